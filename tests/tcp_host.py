"""A placement on another machine, in its simplest form: a process that takes calls over a TCP connection.

python -m tests.tcp_host PORT KEY
"""

import asyncio
import contextlib
import dataclasses
import pickle
import secrets
import subprocess
import sys
from multiprocessing.connection import Client, Listener

from headrace._base.remote_placement import EngineHost, RemotePlacement
from headrace._links.hosted import HostedEngine


@dataclasses.dataclass(frozen=True)
class TcpPlacement(RemotePlacement):
    """Engines in processes of this machine, as if they were elsewhere.

    Attributes:
        address: the address of the consumer, for the hosts.
        started: the hosts that were started.
    """

    name = "tcp"
    engines: int = 1
    cpus_per_engine: float = 1
    start_timeout: float = 60.0
    address: str = "127.0.0.1"
    started: list["TcpHost"] = dataclasses.field(default_factory=list, compare=False)

    @property
    def least(self):
        return self.engines

    @property
    def shortage(self):
        return "see its standard error"

    def hosts(self, setup, engines):
        self.started.extend(
            TcpHost(setup, engine, self.address) for engine in range(engines)
        )
        return self.started[-engines:]


class TcpHost(EngineHost):
    def __init__(self, setup, engine, address):
        self._arguments = pickle.dumps((setup, engine), protocol=5)
        self._address = address
        self._start()

    def _start(self):
        key = secrets.token_bytes(8)
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            port = str(listener.address[1])
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, port, key.hex()]
            )
            self._calls = listener.accept()
        self._calls.send_bytes(self._arguments)

    async def connect(self, port, token):
        if self.process.poll() is not None:
            self._start()
        await asyncio.to_thread(self._call, "connect", self._address, port, token)

    async def how_it_ended(self):
        return await asyncio.to_thread(self._call, "how_it_ended")

    def _call(self, *call):
        try:
            self._calls.send_bytes(pickle.dumps(call))
            answer = pickle.loads(self._calls.recv_bytes())
        except EOFError as error:
            raise ConnectionError("the host has ended") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self._calls.close()

    def join(self):
        self.process.wait(30)


def main(port, key):
    with Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key)) as calls:
        engine = HostedEngine(*pickle.loads(calls.recv_bytes()))
        with contextlib.suppress(EOFError):
            while True:
                name, *arguments = pickle.loads(calls.recv_bytes())
                try:
                    answer = getattr(engine, name)(*arguments)
                except Exception as error:
                    answer = error
                calls.send_bytes(pickle.dumps(answer))
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
