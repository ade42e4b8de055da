"""The oracle for faults: a script in a child process, watched from inside and from outside.

The script leaves whatever it does behind `watch()`: descriptors, threads, child processes, named shared memory and
tasks are counted before and after. From outside: the exit status, a hard clock, and what standard error must not say.

`script` runs a child for itself. `case` runs in a child that serves a whole test module, one case after the other and
each behind `watch()`: importing torch, there and in the zygote, takes longer than most cases do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.forks import Fork, Forks

CLOCK = 60  # seconds; a case that hangs fails here
CASE_CLOCK = 25  # seconds, for one that need not import torch
OPTIONS = ("-X", "dev", "-W", "error::ResourceWarning")

PRELUDE = '''
import asyncio, collections, contextlib, gc, os, select, signal, sys, threading, time, warnings
import torch
import headrace as hr
from headrace._core.eventloop import waiting
from headrace._core.pool import launch

waiting._pair()  # made at the main thread's first wait, which a batch that is ready spares it; the process keeps it


def children():
    """The processes whose parent is this one, without the zygote, which is kept for the process's life."""
    zygote = launch._zygote.process.pid if launch._zygote is not None else None
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return sorted(pid for pid in map(int, file.read().split()) if pid != zygote)


def workers():
    """The living processes that the zygote has forked: workers, and a sidecar for each loader in a process."""
    if launch._zygote is None:
        return []
    pid = launch._zygote.process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return sorted(map(int, file.read().split()))


def sidecar(loader):
    """The pid of the process in which a loader's engine runs."""
    process = loader._engines._current._process
    until(lambda: process.ended() or process.pid is not None)
    return process.pid


def until(condition):
    """Wait for what other processes do, where nothing tells; the clock from outside bounds it."""
    while not condition():
        time.sleep(0.005)


def kill(*pids):
    """SIGKILL processes, and wait until they have ended."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    for descriptor in descriptors:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    for descriptor in descriptors:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
        os.close(descriptor)


def first_time(path):
    """Whether nobody, in any process, has asked this of `path` before."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def threads():
    """The names of this process's threads, without the idle ones that trio keeps for a while."""
    return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("Trio thread"))


def held():
    gc.collect()
    for thread in threading.enumerate():
        if getattr(thread, "stopping", False):  # AnyIO's, which it tells to end with its loop, and does not wait for
            thread.join()
    zygote = [] if launch._zygote is None else [launch._zygote.control.fileno()]
    descriptors = sorted(set(map(int, os.listdir("/proc/self/fd"))) - set(zygote))
    descriptors = [fd for fd in descriptors if os.path.exists(f"/proc/self/fd/{fd}")]
    return {
        "descriptors": len(descriptors),
        "threads": threads(),
        "children": children(),
        "workers": workers(),
    }


def shared_memory():
    """The names in /dev/shm, without those that other programs on this machine have mapped, or had a moment ago."""
    with os.scandir("/dev/shm") as entries:
        inodes = {entry.inode(): entry.name for entry in entries}
    for pid in filter(str.isdecimal, os.listdir("/proc")) if inodes else ():
        with contextlib.suppress(OSError):
            if os.getsid(int(pid)) != os.getsid(0):
                with open(f"/proc/{pid}/maps") as maps:
                    for line in maps:
                        if "/dev/shm/" in line:  # a semaphore's name there is the one it had before it was linked
                            inodes.pop(int(line.split()[4]), None)
    return {name for name in inodes.values() if os.path.exists(f"/dev/shm/{name}")}


@contextlib.contextmanager
def watch(within=0.0):
    """Fail if something is left behind; `within` so many seconds, where a process was killed and others notice."""
    before, named = held(), shared_memory()
    yield
    deadline = time.monotonic() + within
    while (after := held()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (left := shared_memory() - named), f"left in /dev/shm: {left}"
    assert after == before, f"left behind:\\n  before {before}\\n  after  {after}"


class Slow(hr.AsyncDataset):
    """Samples that take a little while, so that an epoch has fetches under way wherever it is left."""

    def __init__(self, length=64, latency=0.002):
        self.length, self.latency = length, latency

    def __len__(self):
        return self.length

    async def aget(self, index):
        await asyncio.sleep(self.latency)  # latency
        return index


class Numbers(hr.AsyncDataset):
    """Samples that are their index, at once."""

    def __init__(self, length=32):
        self.length = length

    def __len__(self):
        return self.length

    async def aget(self, index):
        return index


def negate(sample):
    return -sample


def drain(loader):
    """An epoch to its end, whatever it raises on the way: the samples delivered, counted, and the errors."""
    delivered, errors = collections.Counter(), []
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


def once_each(*ranges):
    """What `drain` has counted where every sample came exactly once."""
    return collections.Counter(index for indices in ranges for index in indices)


def told(error):
    """All that an error says: its text and its notes."""
    return "\\n".join([str(error), *getattr(error, "__notes__", ())])
'''

# A child that runs the bodies it is sent, each behind `watch()`.
SERVE = """
import faulthandler, json, pathlib, socket, tempfile, traceback
import obstore, obstore.store
from headrace._core.interface.background_loop import background_loop


async def use_obstore():
    # Its runtime, and the sync face's loop, stay for the life of the process as well.
    await obstore.put_async(obstore.store.MemoryStore(), "a", b"")


async def connect_once(port):
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()


def serve(descriptor):
    faulthandler.register(signal.SIGUSR1)  # how the clock asks where a case hangs
    with tempfile.TemporaryDirectory() as folder:  # the sync face's loop and obstore's threads stay too
        pathlib.Path(folder, "0").touch()
        hr.ObjectDataset(pathlib.Path(folder).as_uri())
    with socket.create_server(("127.0.0.1", 0)) as listening:  # uvloop keeps a descriptor from its first connection on
        background_loop().run(connect_once(listening.getsockname()[1]))
    for placement in ("thread", "process"):  # the zygote and native threads that stay for the life of the process
        with hr.DataLoader(Numbers(2), num_workers=1, placement=placement) as loader:
            list(loader)
    background_loop().run(use_obstore())
    with socket.socket(fileno=descriptor) as wire, wire.makefile("rw") as lines:
        for line in lines:
            lines.write(json.dumps(run(**json.loads(line))) + "\\n")
            lines.flush()


def run(body, given, within):
    scope = {**globals(), **given}
    try:
        with watch(within):
            try:
                exec(compile(body, "<case>", "exec"), scope)
            finally:
                scope.clear()
    except BaseException:
        return traceback.format_exc()
    return None
"""

NEVER_SAID = (
    "never retrieved",
    "Task was destroyed",
    "Event loop is closed",
    "never awaited",
    "ResourceWarning",
    "Exception ignored",
    "Fatal Python error",
    "Traceback",
)


Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """What the children of all modules are forked from; each is in a session of its own, so that what it leaves
    behind, and others' shared memory, can be told."""
    with Forks(*OPTIONS) as parent:
        yield parent


@pytest.fixture
def script(forks: Forks) -> Script:
    """Run a script in a child; by default it must exit with status 0 and say nothing that a leak would say."""

    def run(
        body: str, *, status: int = 0, quiet: bool = True, engine_loop: str = "uvloop"
    ) -> subprocess.CompletedProcess[str]:
        done = forks.run(PRELUDE + textwrap.dedent(body), timeout=CLOCK, HEADRACE_EVENT_LOOP=engine_loop)
        assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        if quiet:
            said = [phrase for phrase in NEVER_SAID if phrase in done.stderr]
            assert not said, f"standard error says {said}:\n{done.stderr}"
        return done

    return run


class Resident:
    """The child of one test module; replaced when a case has killed it or hangs in it."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._process: Fork | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`

    def run(self, body: str, given: dict[str, Any], within: float) -> str | None:
        """Run one case; returns the traceback of its failure."""
        if self._process is None:
            self._start()
        request = json.dumps({"body": textwrap.dedent(body), "given": given, "within": within})
        try:
            self._wire.sendall(request.encode() + b"\n")
            reply = self._lines.readline()
        except BaseException as error:  # this clock, or another's
            assert self._process is not None
            self._process.send_signal(signal.SIGUSR1)
            self._end(clock=1)
            error.add_note(self.said())
            raise
        if not reply:
            return f"the child died with status {self._end(clock=2)}\n{self.said()}"
        failure: str | None = json.loads(reply)
        return failure

    def said(self) -> str:
        """What has been said on standard error since the last call."""
        return self._said.read().decode(errors="replace")

    def close(self) -> None:
        """Let the child exit; everything that descends from it has to go with it."""
        status = self._end(clock=CLOCK) if self._process is not None else 0
        said = self.said()
        self._said.close()
        assert status == 0, f"exit status {status}\n{said}"

    def _start(self) -> None:
        self._wire, theirs = socket.socketpair()
        self._wire.settimeout(CASE_CLOCK)
        self._lines = self._wire.makefile("r")
        with theirs, open(f"/proc/self/fd/{self._said.fileno()}", "ab") as said:
            self._process = self._forks.fork(
                PRELUDE + SERVE + "serve(*descriptors)", stdout=1, stderr=said.fileno(), descriptors=[theirs.fileno()]
            )

    def _end(self, clock: float) -> int:
        assert self._process is not None
        process, self._process = self._process, None
        self._lines.close()
        self._wire.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(clock)
        left = [pid for pid in session_of(process.pid) if pid != process.pid]
        for pid in session_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = process.wait()
        assert status != 0 or not left, f"processes {left} have outlived the child"
        return status


def session_of(leader: int) -> list[int]:
    """The living processes of the session that process `leader` has begun."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat") as file:
            state, _, _, session = file.read().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(name))
    return found


@pytest.fixture(scope="module")
def resident(forks: Forks) -> Iterator[Resident]:
    """The child that serves this module's cases."""
    child = Resident(forks)
    yield child
    child.close()


Case = Callable[..., str]


@pytest.fixture
def case(resident: Resident) -> Case:
    """Run a body in the module's child: it must not fail, leave anything behind, or say what a leak would say.

    Keyword arguments are names that the body finds. `within`: the seconds it may take until nothing is left, where
    the body kills processes. Returns what was said on standard error.
    """

    def run(body: str, *, within: float = 0.0, **given: Any) -> str:
        failure = resident.run(body, given, within)
        said = resident.said()
        assert failure is None, f"{failure}\n{said[-20_000:]}"
        phrases = [phrase for phrase in NEVER_SAID if phrase in said]
        assert not phrases, f"standard error says {phrases}:\n{said[-20_000:]}"
        return said

    return run
