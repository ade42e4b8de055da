"""Ctrl-C, SIGKILL and SIGSTOP of the process that trains."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable

import pytest
import uvloop

import headrace as hr
from headrace._pool import launch
from tests.faults.watching import (
    Numbers,
    in_processes,
    make_signal_pair,
    sidecar,
    wait_for_exit,
)
from tests.forks import Forks
from tests.programs import run_by
from tests.unit.streams.reading import Plain

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


class NeverAnswers(Numbers):
    async def aget(self, index):
        await asyncio.Event().wait()


# Of `for`, tests/parity/test_ends.py has the same.
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_ctrl_c_interrupts_the_wait_for_a_batch(
    forks: Forks, runner: Callable[..., object]
) -> None:
    def program() -> None:
        loader = hr.DataLoader(NeverAnswers(8), batch_size=4, num_workers=1)

        async def wait():
            stream = aiter(loader)
            asyncio.get_running_loop().call_soon(lambda: print("waiting", flush=True))
            await anext(stream)

        try:
            runner(wait())
        except KeyboardInterrupt:
            print("interrupted", flush=True)

    with forks.start(program) as process:
        assert process.stdout.readline() == "waiting\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate()
        assert (process.wait(), out) == (0, "interrupted\n"), err
    assert "Traceback" not in err


class NeverEnds(Numbers):
    async def aget(self, index):
        while index:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                os.write(1, b"cancelled\n")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_second_ctrl_c_at_exit_ends_the_wait_silently(
    forks: Forks, num_workers: int
) -> None:
    def program() -> None:
        iterator = iter(
            hr.DataLoader(
                NeverEnds(4), num_workers=num_workers, concurrency=2, transform=int
            )
        )
        next(iterator)
        print("reading", flush=True)
        signal.pause()

    with forks.start(program) as process:
        for line in ("reading\n", "cancelled\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert process.wait() != 0
    assert err.count("Traceback") == 1, err  # that of the first one


@pytest.mark.parametrize(
    ("placement", "consumer"), [("thread", "training"), ("process", "waiting")]
)
def test_workers_and_zygote_end_when_the_trainer_is_killed(
    forks: Forks, placement: str, consumer: str
) -> None:
    def program() -> None:
        def busy(index):
            if index < 8:
                return index
            # One call for the line: several processes write.
            os.write(1, b"%d\n" % os.getpid())
            while True:
                pass

        loader = in_processes(Numbers(64), transform=busy, placement=placement)
        iterator = iter(loader)
        next(iterator)
        engine = sidecar(loader) if placement == "process" else launch._zygote.process.pid
        os.write(1, b"%d\n%d\n" % (launch._zygote.process.pid, engine))
        if consumer == "waiting":
            list(iterator)
        signal.pause()

    with forks.start(program) as trainer:
        # Zygote, sidecar and two workers.
        pids = {int(trainer.stdout.readline()) for _ in range(4)}
        assert len(pids) == (4 if placement == "process" else 3)
        descriptors = [os.pidfd_open(pid) for pid in pids]
        trainer.send_signal(signal.SIGKILL)
        # Standard output closes when the last process has ended.
        _, stderr = trainer.communicate()
        for descriptor in descriptors:
            wait_for_exit(descriptor)
        assert trainer.wait() == -signal.SIGKILL
        assert "Traceback" not in stderr, stderr


# Forks of the trainer, of which the second has the sockets of the first; children of another
# process.
@pytest.mark.parametrize(("start", "num_workers"), [("fork", 2), ("forkserver", 1)])
def test_workers_of_multiprocessing_end_when_the_trainer_is_killed(
    forks: Forks, start: str, num_workers: int
) -> None:
    def program() -> None:
        loader = hr.DataLoader(
            range(64),
            batch_size=4,
            num_workers=num_workers,
            multiprocessing_context=start,
        )
        iterator = iter(loader)
        next(iterator)
        print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
        threading.Event().wait()

    with forks.start(program) as process:
        descriptors = [
            os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()
        ]
        assert len(descriptors) == num_workers
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        for descriptor in descriptors:
            wait_for_exit(descriptor)


STOP = 0.3  # seconds: the length of each stop


class Computing(Numbers):
    async def aget(self, index):
        return sum(number * number for number in range(1000))


@run_by("script")
def test_a_stopped_process_is_no_cause_of_a_warning() -> None:
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("headrace").addHandler(handler)
    commands = f"for i in 1 2; do kill -STOP {os.getpid()}; sleep {STOP}; kill -CONT {os.getpid()}; done"
    with hr.DataLoader(Computing(600), batch_size=10, placement="thread") as loader:
        stopping = None
        # user code computes on the loop when it is stopped
        while stopping is None or stopping.poll() is None:
            for _ in loader:
                stopping = stopping or subprocess.Popen(["sh", "-c", commands])
    assert (stopping.returncode, messages) == (0, [])


PLACES = {
    dis.opmap[name]
    for name in (
        "CALL",
        "CALL_FUNCTION_EX",
        "RESUME",
        "JUMP_BACKWARD",
        "FOR_ITER",
        "CALL_KW",
    )
    if name in dis.opmap
}
"""Instructions after which CPython handles signals."""


class CtrlC:
    """Raises KeyboardInterrupt in headrace, at the n-th place where a signal can be handled."""

    def __init__(self, place: int) -> None:
        self.left = place
        self._offsets: dict[types.CodeType, set[int]] = {}

    def __enter__(self) -> None:
        sys.settrace(self._on_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: types.FrameType, event: str, _: object) -> object:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith("headrace.") or name.startswith("headrace.telemetry"):
            return None
        frame.f_trace_opcodes = True
        return self._on_instruction

    def _on_instruction(self, frame: types.FrameType, event: str, _: object) -> object:
        if event == "opcode" and frame.f_lasti in self._offsets_of(frame.f_code):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self._on_instruction

    def _offsets_of(self, code: types.CodeType) -> set[int]:
        if code not in self._offsets:
            pairs = itertools.pairwise(dis.get_instructions(code))
            self._offsets[code] = {
                after.offset for before, after in pairs if before.opcode in PLACES
            }
        return self._offsets[code]


@pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="CPython 3.12.1 crashes after a tracer of instructions has raised; 3.13 leaves out instructions",
)
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers(16), {"placement": "thread", "shuffle": True}),
        (Numbers(16), {"placement": "process"}),
        (Plain(16), {"placement": "thread"}),
        (range(16), {"num_workers": 1, "persistent_workers": True}),
    ],
    ids=["map-style", "process", "stream", "torch"],
)
@run_by("case")
def test_ctrl_c_at_any_place_of_next_loses_no_batch(dataset, options) -> None:
    make_signal_pair()
    # A socket whose owner had not been made yet: the reference count or the collector closes it.
    warnings.simplefilter("ignore", ResourceWarning)
    with hr.DataLoader(dataset, 2, timeout=10, seed=0, **options) as loader:
        place = 0
        while True:
            place += 1
            interruption = CtrlC(place)
            given: list[int] = []
            batches = iter(loader)
            for number in itertools.count():
                try:
                    with interruption if number == 3 else contextlib.nullcontext():
                        given += next(batches).tolist()
                except KeyboardInterrupt:
                    continue
                except StopIteration:
                    break
                except RuntimeError as error:
                    if "load_state_dict" not in str(error):
                        raise
                    loader.load_state_dict(loader.state_dict())
                    batches = iter(loader)
            assert sorted(given) == list(range(16)), f"place {place}"
            if interruption.left > 0:
                break
        assert place > 20
    gc.collect()
