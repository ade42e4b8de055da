"""The child process that runs the programs of tests, one after the other, each inside `watch`."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import pathlib
import pickle
import signal
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable

import obstore
import obstore.store

import headrace as hr
from headrace._streams.blocking import background_loop
from tests.faults.watching import Numbers, make_signal_pair, watch


def serve(descriptor: int) -> None:
    """Run each program that comes over a socket; the answer is the traceback of its failure, or None."""
    # The clock of the test asks where a program hangs.
    faulthandler.register(signal.SIGUSR1)
    make_permanent_resources()
    with socket.socket(fileno=descriptor) as wire, wire.makefile("rwb") as stream:
        while stream.peek(1):
            program, within = pickle.load(stream)
            answer = run(program, within)
            del program
            pickle.dump(answer, stream)
            stream.flush()


def run(program: bytes, within: float) -> str | None:
    try:
        with watch(within), warnings.catch_warnings():
            pickle.loads(program)()
    except BaseException:
        return traceback.format_exc()
    finally:
        # of a program that looks at what is logged: standard error is for the next one
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        # what has outlived it, modules for example, which the next collections need not go through
        gc.freeze()
    return None


def run_alone(program: Callable[[], object]) -> None:
    """Run a program that has the child to itself."""
    make_signal_pair()
    program()


def make_permanent_resources() -> None:
    """Make all that headrace, obstore and uvloop keep for the life of a process, so that `watch` sees no change."""
    make_signal_pair()
    # The background loop, and obstore's threads.
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "0").touch()
        hr.ObjectDataset(pathlib.Path(folder).as_uri())
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as listening:  # a descriptor of uvloop's, from its first connection on
        background_loop().run(_connect(listening.getsockname()[1]))
    for placement in ("thread", "process"):  # the zygote and native threads
        with hr.DataLoader(Numbers(2), num_workers=1, placement=placement) as loader:
            list(loader)
    background_loop().run(_use_obstore())


async def _connect(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()


async def _use_obstore() -> None:
    await obstore.put_async(obstore.store.MemoryStore(), "a", b"")
