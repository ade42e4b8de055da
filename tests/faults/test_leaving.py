"""Leaving an epoch in every way: no thread, process, descriptor or task is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from tests.faults.watching import Slow, negate, wait_until, watch, workers

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

LOOPS = pytest.mark.parametrize("engine_loop", ["uvloop", "asyncio"])


def test_watch_reports_leaked_descriptors_threads_and_processes(script: Callable[..., Any]) -> None:
    def program() -> None:
        leaks = {
            "a descriptor": lambda: os.dup(1),
            "a thread": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
            "a process": lambda: kept.append(subprocess.Popen(["sleep", "60"])),
        }
        kept = []
        for leak in leaks.values():
            with pytest.raises(AssertionError, match="left behind"), watch():
                leak()
        kept[0].kill()
        kept[0].wait()

    script(program)


def test_many_interrupted_epochs_leave_nothing(case: Callable[..., Any]) -> None:
    def program() -> None:
        def take_three_and_break(loader):
            for number, batch in enumerate(loader, start=1):
                if number == 3:
                    break
            assert sorted(map(abs, batch.tolist())) == [8, 9, 10, 11]

        def once():
            take_three_and_break(kept)
            take_three_and_break(working)
            with hr.DataLoader(Slow(), batch_size=4) as fresh:
                take_three_and_break(fresh)
            take_three_and_break(hr.DataLoader(list(range(64)), batch_size=4, num_workers=2))

        with (
            hr.DataLoader(Slow(), batch_size=4) as kept,
            hr.DataLoader(Slow(), batch_size=4, num_workers=2, transform=negate) as working,
        ):
            once()
            wait_until(lambda: len(workers()) == 3)
            pids = workers()
            with watch():
                for _ in range(6):
                    once()
                assert workers() == pids, "a process was replaced"

    case(program)


def test_loader_used_after_fork_starts_anew_and_parent_continues(case: Callable[..., Any]) -> None:
    def program() -> None:
        with hr.DataLoader(Slow(8), batch_size=4) as loader:
            iterator = iter(loader)
            next(iterator)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
                    loader.close()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert next(iterator).tolist() == [4, 5, 6, 7]

    case(program)


@pytest.mark.parametrize(("placement", "num_workers"), [("thread", 0), ("process", 2)])
def test_interpreter_exit_while_a_daemon_thread_iterates_loses_no_batch_silently(
    script: Callable[..., Any], placement: str, num_workers: int
) -> None:
    def program() -> None:
        import __main__

        os.environ["PYTHONWARNINGS"] = "default"  # for the processes that it starts
        loader = hr.DataLoader(Slow(100_000), 4, num_workers=num_workers, transform=negate, placement=placement)
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
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    assert all(line.startswith("headrace.errors.LoaderClosedError") for line in errors), done.stderr


@LOOPS
def test_loader_whose_last_reference_is_dropped_on_its_own_event_loop_leaves_nothing(
    script: Callable[..., Any], engine_loop: str
) -> None:
    """The garbage collector runs on any thread."""

    def program() -> None:
        def drop(held):
            held.clear()
            gc.collect()

        def leave():
            loader = hr.DataLoader(list(range(64)), batch_size=4, num_workers=2, persistent_workers=True)
            held = [loader, iter(loader)]
            next(held[1])
            loop = loader._control._placements._current._loop
            del loader
            loop.call_soon(drop, held)
            loop._thread.join()
            assert not held

        leave()  # the native threads that stay for the life of the process
        with watch(within=5.0):
            leave()

    script(program, engine_loop=engine_loop)
