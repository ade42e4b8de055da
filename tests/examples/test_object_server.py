"""The local object server leaves no process or port."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from object_server import ObjectServer
from tests.documents import ROOT


def test_close_reaps_the_process_frees_the_port_and_is_idempotent():
    server = ObjectServer({"a": b"1"}).start()
    port, pid = int(server.endpoint.rpartition(":")[2]), server._process.pid
    server.close()
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with pytest.raises(RuntimeError, match="make another"):
        server.start()


def test_server_ends_when_its_parent_is_killed():
    code = "from object_server import ObjectServer; s = ObjectServer().start(); print(s.endpoint, flush=True); input()"
    command, path = (
        [sys.executable, "-c", code],
        {**os.environ, "PYTHONPATH": str(ROOT / "examples")},
    )
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path
    ) as parent:
        port = int(parent.stdout.readline().decode().strip().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            os.kill(parent.pid, signal.SIGKILL)
            assert connection.recv(1) == b"", (
                "the server's end of the connection closes when the server ends"
            )
