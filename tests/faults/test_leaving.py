"""Leaving an epoch in every way: no thread, process, descriptor or task is left behind.

The `finally` of a stream's generators runs on the loop that read it, every end of a program closes
the resources of a loop, and workers end as torch's do: they finish the sample that they read, and
what they have printed is written.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import headrace as hr
from tests.faults.watching import (
    Numbers,
    Slow,
    first_call,
    negate,
    run_in_fork,
    state_of,
    watch,
    workers,
)
from tests.programs import run_by

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


@run_by("script")
def test_watch_reports_leaked_descriptors_threads_and_processes() -> None:
    leaks = {
        "a descriptor": lambda: os.dup(1),
        "a thread": lambda: threading.Thread(
            target=threading.Event().wait, daemon=True
        ).start(),
        "a process": lambda: kept.append(subprocess.Popen(["sleep", "60"])),
    }
    kept = []
    for leak in leaks.values():
        with pytest.raises(AssertionError, match="left behind"), watch():
            leak()
    kept[0].kill()
    kept[0].wait()


@run_by("case")
def test_loader_used_after_fork_starts_anew_and_parent_continues() -> None:
    def read_all():
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        loader.close()

    with hr.DataLoader(Slow(8), batch_size=4) as loader:
        iterator = iter(loader)
        next(iterator)
        run_in_fork(read_all)
        assert next(iterator).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("placement", "num_workers"), [("thread", 0), ("process", 2)])
def test_interpreter_exit_while_a_daemon_thread_iterates_loses_no_batch_silently(
    script: Callable[..., Any], placement: str, num_workers: int
) -> None:
    def program() -> None:
        import __main__

        os.environ["PYTHONWARNINGS"] = "default"  # for the processes that it starts
        loader = hr.DataLoader(
            Slow(100_000),
            4,
            num_workers=num_workers,
            transform=negate,
            placement=placement,
        )
        __main__.loader = loader
        first_batch = threading.Event()

        def iterate():
            for batch in loader:
                first_batch.set()

        threading.Thread(target=iterate, daemon=True).start()
        first_batch.wait()

    done = script(program, quiet=False)
    assert "ResourceWarning" not in done.stderr, done.stderr
    assert "LostBatchError" not in done.stderr, done.stderr
    errors = [
        line
        for line in done.stderr.splitlines()
        if "Error" in line and not line.startswith("headrace: ")
    ]
    assert all(line.startswith("headrace.errors.LoaderClosedError") for line in errors), (
        done.stderr
    )


@pytest.mark.parametrize("engine_loop", ["uvloop", "asyncio"])
def test_loader_whose_last_reference_is_dropped_on_its_own_event_loop_leaves_nothing(
    script: Callable[..., Any], engine_loop: str
) -> None:
    """The garbage collector runs on any thread."""

    def program() -> None:
        def drop(held):
            held.clear()
            gc.collect()

        def leave():
            loader = hr.DataLoader(
                list(range(64)), batch_size=4, num_workers=2, persistent_workers=True
            )
            held = [loader, iter(loader)]
            next(held[1])
            loop = loader._control.placements._current._loop
            del loader
            loop.call_soon(drop, held)
            loop._thread.join()
            assert not held

        leave()  # the native threads that stay for the life of the process
        with watch(within=5.0):
            leave()

    script(program, engine_loop=engine_loop)


# Streams


class Stream(hr.AsyncIterableDataset):
    """Makes a file in a folder when it starts, and one when its `finally` has run."""

    def __init__(self, folder):
        self.folder = folder

    async def __aiter__(self):
        name = f"{self.folder}/{os.getpid()}-{time.monotonic_ns()}"
        first_call(f"{name}.started")
        try:
            for index in range(1_000_000):
                await asyncio.sleep(0.0005)  # latency
                yield index
        finally:
            for _ in range(3):  # as closing a connection would
                await asyncio.sleep(0)
            first_call(f"{name}.ended")


class Nested(Stream):
    """A generator around another, which it does not close."""

    async def __aiter__(self):
        async for sample in super().__aiter__():
            yield sample


class WithoutAclose(Stream):
    """An iterator that is no generator, and holds one."""

    def __aiter__(self):
        return Iterating(super().__aiter__())


class Iterating:
    def __init__(self, generator):
        self.generator = generator

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await anext(self.generator)


def notes(folder, ending):
    return sorted(
        name.removesuffix(ending) for name in os.listdir(folder) if name.endswith(ending)
    )


@pytest.mark.parametrize(
    ("kind", "placement"),
    [(Stream, "process"), (Nested, "thread"), (WithoutAclose, "process")],
)
@run_by("case")
def test_generators_of_a_stream_are_closed_when_another_thread_closes_the_loader(
    placement: str, kind: type[Stream], tmp_path: Path
) -> None:
    for _ in range(3):
        loader = hr.DataLoader(kind(tmp_path), 2, placement=placement)
        iterators = [iter(loader), iter(loader)]
        for iterator in iterators:
            next(iterator)
        closer = threading.Thread(target=loader.close)
        closer.start()
        try:
            for batch in iterators[0]:
                pass
        except hr.errors.LoaderClosedError:
            closer.join()
    assert len(notes(tmp_path, ".started")) == 6
    assert notes(tmp_path, ".started") == notes(tmp_path, ".ended")


# Resources of a loop


class Connected(Slow):
    """Prints when a resource of a loop is opened and closed."""

    def __init__(self):
        super().__init__()
        self.pool = hr.per_loop(lambda: note("open"), close=lambda _: note("close"))

    async def aget(self, index):
        await self.pool()
        return await super().aget(index)


def note(event):
    os.write(1, event.encode() + b"\n")


def _events(done: Any) -> list[str]:
    return [word for word in done.stdout.split() if not word.isdigit()]


@pytest.mark.parametrize(("num_workers", "end"), [(0, "return"), (2, "error")])
def test_interpreter_exit_in_mid_epoch_closes_resources_and_ends_all_processes(
    script: Callable[..., Any], num_workers: int, end: str
) -> None:
    def program() -> None:
        import __main__

        __main__.loader = hr.DataLoader(
            Connected(), batch_size=4, num_workers=num_workers
        )
        __main__.iterator = iter(__main__.loader)
        __main__.stream = aiter(__main__.loader)
        next(__main__.iterator)
        print(os.getpid(), *workers(), flush=True)
        assert end == "return"

    done = script(program, status=1 if end == "error" else 0, quiet=end != "error")
    assert _events(done) == ["open", "close"]
    assert "Exception ignored" not in done.stderr
    pids = filter(str.isdigit, done.stdout.split())
    assert {state_of(pid) for pid in pids} == {"Z"}


def test_interpreter_exit_closes_resources_of_an_indexed_dataset(
    script: Callable[..., Any],
) -> None:
    assert _events(script(lambda: Connected()[3])) == ["open", "close"]


def test_keyboard_interrupt_closes_resources(script: Callable[..., Any]) -> None:
    def program() -> None:
        loader = hr.DataLoader(Connected(), batch_size=4)
        for _ in loader:
            os.kill(os.getpid(), signal.SIGINT)

    done = script(program, status=-2, quiet=False)
    assert _events(done) == ["open", "close"]


# Workers


def show(index):
    print("sample", index)
    return index


@pytest.mark.parametrize("kind", ["torch dataset", "process"])
def test_output_of_workers_is_written_where_it_is_buffered(script, kind):
    def program():
        os.environ.pop("PYTHONUNBUFFERED", None)
        dataset, options = (
            (list(range(4)), {})
            if kind == "torch dataset"
            else (Numbers(4), {"placement": kind})
        )
        loader = hr.DataLoader(dataset, 2, num_workers=1, transform=show, **options)
        with loader:
            assert len(list(loader)) == 2

    assert sorted(script(program).stdout.splitlines()) == [
        f"sample {index}" for index in range(4)
    ]


class Writing(Dataset[int]):
    """Each sample is a file in two halves; the second is written after the FIFO was opened for writing."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with open(self.folder / f"{index}.part", "wb", buffering=0) as file:
            file.write(b"a" * 100)
            if index:
                with open(self.folder / "go on") as fifo:
                    fifo.read()
            file.write(b"b" * 100)
        return index


def test_sample_that_a_worker_reads_is_finished_when_the_epoch_is_left(tmp_path):
    os.mkfifo(tmp_path / "go on")
    batches = iter(
        loader := hr.DataLoader(Writing(tmp_path), batch_size=1, num_workers=1)
    )
    assert next(batches).tolist() == [0]
    closing, closed = threading.Event(), threading.Event()

    def let_the_worker_go_on():
        closing.wait()
        while not closed.is_set():
            with open(tmp_path / "go on", "w"):  # blocks until a sample has opened it
                pass

    writer = threading.Thread(target=let_the_worker_go_on, daemon=True)
    writer.start()
    closing.set()
    loader.close()
    closed.set()
    with open(os.open(tmp_path / "go on", os.O_RDONLY | os.O_NONBLOCK)):
        writer.join()
    assert {file.stat().st_size for file in tmp_path.glob("*.part")} == {200}
