"""For programs in child processes: what the process holds before and after, and datasets and loaders to be watched.

`watch` counts descriptors, threads, child processes, workers and names in /dev/shm around a block.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import hashlib
import os
import re
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import trio
import uvloop

import headrace as hr
from headrace._eventloop import waiting
from headrace._pool import launch
from tests.datasets import Numbers


def make_signal_pair() -> None:
    """Make the sockets that the main thread's first wait makes and keeps; a batch that is ready spares that wait."""
    waiting._pair()


def children() -> list[int]:
    """The ids of this process's child processes, without the zygote, which is kept for the process's life."""
    zygote = launch._zygote.process.pid if launch._zygote is not None else None
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return sorted(pid for pid in map(int, file.read().split()) if pid != zygote)


def workers() -> list[int]:
    """The living processes that the zygote has forked: workers, and a sidecar for each loader in a process."""
    if launch._zygote is None:
        return []
    pid = launch._zygote.process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return sorted(map(int, file.read().split()))


@contextlib.contextmanager
def ignored_deaths() -> Iterator[None]:
    """Show no warning of a replaced engine."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(the engine|engine . of)", RuntimeWarning)
        yield


def sidecar(loader: hr.DataLoader) -> int:
    """The id of the process in which a loader's engine runs."""
    return engines_of(loader)[0]


def engines_of(loader: hr.DataLoader) -> list[int]:
    """The ids of the processes of a loader's engines."""
    started = loader._control.placements._current._engines
    engines = [started[number] for number in sorted(started)]
    wait_until(
        lambda: all(
            engine.process.ended() or engine.process.pid is not None for engine in engines
        )
    )
    return [engine.process.pid for engine in engines]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another process where no descriptor tells; the test's clock bounds it."""
    while not condition():
        time.sleep(0.005)  # between two looks


def wait_for_exit(descriptor: int) -> None:
    """Wait until the process of a pidfd has ended, and close the descriptor."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll()
    os.close(descriptor)


def state_of(pid: int | str) -> str:
    """The letter of a process's state; Z also of one that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def session_of(leader: int) -> list[int]:
    """The living processes of the session of process `leader`."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader and state_of(pid) != "Z":
                found.append(pid)
    return found


def kill(*pids: int) -> None:
    """SIGKILL processes, and wait until they have ended."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    for descriptor in descriptors:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    for descriptor in descriptors:
        wait_for_exit(descriptor)


def run_in_fork(program: Callable[[], object]) -> None:
    """Run a program in a fork of this process; it must not fail."""
    with warnings.catch_warnings():
        # Of threads, since Python 3.12.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            program()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def first_call(path: Any) -> bool:
    """Whether this is the first call for `path`, in any process; creates the file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def threads() -> list[str]:
    """The names of this process's threads, without the idle ones that trio keeps for a while."""
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if not thread.name.startswith("Trio thread")
    )


def resources() -> dict[str, Any]:
    """The number of this process's descriptors, and its threads, child processes and workers."""
    gc.collect()
    for thread in threading.enumerate():
        if getattr(
            thread, "stopping", False
        ):  # AnyIO's: asked to end when its loop ends, but not joined
            thread.join()
    return {
        "descriptors": len(descriptors()),
        "threads": threads(),
        "children": children(),
        "workers": workers(),
    }


def descriptors() -> dict[int, str]:
    """The process's open files by descriptor, without the zygote's and those that are open for a moment only."""
    zygote = None if launch._zygote is None else launch._zygote.control.fileno()
    momentary = f"/proc/{os.getpid()}/fd"  # the folder of descriptors itself
    found = {}
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            # Closed by another thread meanwhile.
            with contextlib.suppress(FileNotFoundError):
                found[int(entry.name)] = os.readlink(entry.path)
    return {
        number: name
        for number, name in found.items()
        if number != zygote and name != momentary
    }


def shared_memory() -> dict[int, str]:
    """The names in /dev/shm, by inode."""
    with os.scandir("/dev/shm") as entries:
        return {entry.inode(): entry.name for entry in entries}


def new_shared_memory(before: dict[int, str]) -> set[str]:
    """The names in /dev/shm that were not there, without those that other programs on this machine have mapped."""
    # Only these: the maps of all processes of a busy machine are tens of thousands of lines.
    inodes = dict(shared_memory().items() - before.items())
    for pid in filter(str.isdecimal, os.listdir("/proc")) if inodes else ():
        with contextlib.suppress(OSError):
            if os.getsid(int(pid)) != os.getsid(0):
                with open(f"/proc/{pid}/maps") as maps:
                    for line in maps:
                        # a semaphore's name there is the one it had before it was linked
                        if "/dev/shm/" in line:
                            inodes.pop(int(line.split()[4]), None)
    names = (name for name in inodes.values() if not _is_of_another_program(name))
    return {name for name in names if os.path.exists(f"/dev/shm/{name}")}


def _is_of_another_program(name: str) -> bool:
    """Whether torch made the file in a living process of another session, which may not have mapped it yet.

    A server of PostgreSQL, of the tests of documents, is another program too."""
    if name.startswith("PostgreSQL."):
        return True
    made = re.fullmatch(r"torch_(\d+)_.*", name)
    try:
        return made is not None and os.getsid(int(made[1])) != os.getsid(0)
    except ProcessLookupError:
        return False


@contextlib.contextmanager
def watch(within: float = 0.0) -> Iterator[None]:
    """Fail if the block leaves anything behind.

    Args:
        within: seconds for other processes to notice that a process was killed.
    """
    before, names_before = resources(), shared_memory()
    yield
    deadline = time.monotonic() + within
    while (after := resources()) != before and time.monotonic() < deadline:
        # between two looks at other processes, which signal nothing when they have ended
        time.sleep(0.01)
    assert not (left := new_shared_memory(names_before)), f"left in /dev/shm: {left}"
    assert after == before, f"left behind:\n  before {before}\n  after  {after}"


class Slow(Numbers):
    """Samples with a latency in seconds, so that fetches are in flight wherever an epoch is left."""

    def __init__(self, length: int = 64, latency: float = 0.002) -> None:
        super().__init__(length)
        self.latency = latency

    async def aget(self, index: int) -> Any:
        await asyncio.sleep(self.latency)  # of a store
        return index


def negate(sample: Any) -> Any:
    return -sample


def drain(loader: hr.DataLoader) -> tuple[collections.Counter[Any], list[Exception]]:
    """Iterate one epoch to its end despite errors; returns the delivered samples, counted, and the errors."""
    delivered, errors = collections.Counter[Any](), []
    iterator = iter(loader)
    while len(errors) < 100:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Exception as error:
            errors.append(error)
        else:
            delivered.update(batch.tolist())
    return delivered, errors


def digest(batches: Any) -> str:
    """SHA-256 of the order and the bytes of batches."""
    sha = hashlib.sha256()
    for batch in batches:
        sha.update(batch.numpy().tobytes())
    return sha.hexdigest()


def in_processes(dataset: Any, **options: Any) -> hr.DataLoader:
    """A loader of batches of four samples with two workers, beside an engine in a process."""
    return hr.DataLoader(
        dataset, 4, **{"num_workers": 2, "placement": "process", **options}
    )


def epoch_in_processes(
    dataset: Any, **options: Any
) -> tuple[collections.Counter[Any], list[Exception]]:
    """`drain` of such a loader, which is closed."""
    with in_processes(dataset, **options) as loader:
        return drain(loader)


def run_on(loop: str, function: Callable[[], Any]) -> Any:
    """Run an async function on an event loop, by its name."""
    if loop == "trio":
        return trio.run(function)
    return {"asyncio": asyncio.run, "uvloop": uvloop.run}[loop](function())


def once_each(*ranges: Any) -> collections.Counter[Any]:
    """The count of `drain` where every sample was delivered exactly once."""
    return collections.Counter(index for indices in ranges for index in indices)


def text_of(error: BaseException) -> str:
    """An error's message and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
