"""Failures of user code and of workers: each costs its own batch and is one error, and the epoch continues."""

from __future__ import annotations

import collections
import ctypes
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from tests.faults.watching import (
    Numbers,
    drain,
    epoch_in_processes,
    first_call,
    in_processes,
    kill,
    once_each,
    sidecar,
    state_of,
    text_of,
    wait_until,
    workers,
)
from tests.programs import run_by

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

PLACEMENTS = pytest.mark.parametrize("placement", ["thread", "process"])

# How a process ends itself, by the words of the error for it.
DEATHS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "code 0": lambda: os._exit(0),
}
CONTROL_FLOW = {
    "SystemExit(3)": lambda: SystemExit(3),
    "KeyboardInterrupt()": KeyboardInterrupt,
    "GeneratorExit()": GeneratorExit,
    "StopIteration()": StopIteration,
    "StopAsyncIteration()": StopAsyncIteration,
}


DYING = dict(zip((5, 13, 21), DEATHS, strict=True))  # by index


@PLACEMENTS
def test_batch_whose_worker_dies_is_retried_once_and_then_reported(
    case: Any, placement: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)

    def program() -> None:
        def transform(index):
            if index in DYING and (always or first_call(f"{folder}/{index}")):
                DEATHS[DYING[index]]()
            return index

        def epoch(on_error):
            with in_processes(
                Numbers(32), transform=transform, placement=placement, on_error=on_error
            ) as loader:
                return *drain(loader), loader.stats()

        always = False
        delivered, errors, stats = epoch("raise")
        assert (delivered, errors, stats.worker_deaths) == (once_each(range(32)), [], 3)
        assert len(os.listdir(folder)) == 3
        always = True
        delivered, errors, _ = epoch("raise")
        assert delivered == once_each(
            range(4), range(8, 12), range(16, 20), range(24, 32)
        ), delivered
        _, none, stats = epoch("skip")
        assert not none, none
        for error, record, (index, death) in zip(
            errors, stats.skipped, DYING.items(), strict=True
        ):
            indices = list(range(index - 1, index + 3))
            text = f"on batch {index // 4}, indices {indices}, attempt 2"
            assert (record.type_name, record.batch) == ("WorkerDiedError", index // 4), (
                record
            )
            assert text in record.message, record
            assert type(error) is hr.errors.WorkerDiedError, error
            assert (error.batch, error.indices) == (index // 4, tuple(indices)), error
            assert error.worker in (0, 1), error.worker
            for words in (
                death,
                f"worker {error.worker} (pid ",
                text,
                "num_workers=0",
                "In torch's words: DataLoader w",
            ):
                assert words in str(error), error

    stderr = case(program)
    for (
        index,
        death,
    ) in (
        DYING.items()
    ):  # once for each of the three epochs, and where it is reported it is not logged
        first = rf"worker \d \(pid \d+\) .*{death} on batch {index // 4}, indices .*, attempt 1\..* takes its place"
        assert len(re.findall(first, stderr)) == 3, stderr
    assert not re.search(r"indices .*, attempt 2\..* takes its place", stderr)


class ReadBy(torch.utils.data.Dataset[Any]):
    """Each index, with the worker that has read it; one that dies at the first reading of `killed`."""

    def __init__(self, folder: str, killed: int) -> None:
        self.folder, self.killed = folder, killed

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self.killed and first_call(f"{self.folder}/{index}"):
            DEATHS["SIGKILL"]()
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return index, info.id


def test_batches_sent_to_a_worker_that_dies_go_to_its_replacement(
    case: Any, tmp_path: Path
) -> None:
    folder = str(tmp_path)

    def program() -> None:
        with hr.DataLoader(
            ReadBy(folder, 201),
            num_workers=2,
            prefetch_factor=16,
            persistent_workers=True,
        ) as loader:
            read = [(int(index), int(worker)) for index, worker in loader]
            assert [index for index, _ in read] == list(range(300))
            assert [
                (index, worker) for index, worker in read if worker != index % 2
            ] == []

    assert "on batch 201, indices [201], attempt 1. " in case(program)


@PLACEMENTS
def test_idle_workers_are_replaced_after_sigkill(case: Any, placement: str) -> None:
    def program() -> None:
        with in_processes(Numbers(32), transform=abs, placement=placement) as loader:
            for _ in range(3):
                delivered, errors = drain(loader)
                assert not errors, errors
                assert delivered == once_each(range(32)), delivered
                # the replacements of the last round
                wait_until(lambda: len(workers()) == 2 + (placement == "process"))
                idle = [
                    pid
                    for pid in workers()
                    if placement == "thread" or pid != sidecar(loader)
                ]
                assert len(idle) == 2, idle
                kill(*idle)

    assert "was killed by SIGKILL while idle. To see a crash" in case(program)


@run_by("case")
def test_batch_is_retried_after_its_worker_dies_while_writing_it(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    class DiesStacked(torch.Tensor):
        # The field before it has already been written to shared memory.
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.stack and first_call(marker):
                die()
            return super().__torch_function__(function, types, args, kwargs or {})

    def filled(index):
        return torch.full((64, 1024), index)

    def two_fields(index):
        return filled(index), (
            torch.ones(8).as_subclass(DiesStacked) if index == 5 else torch.ones(8)
        )

    def without_shared_memory_dies_in_mid_frame(worker):
        def sendmsg(self, pieces):
            if sum(map(len, pieces)) > 100_000 and first_call(marker):
                self.send(pieces[0])
                die()
            return send(self, pieces)

        def no_memory(*_):
            raise OSError(28, "No space left on device")

        send, socket.socket.sendmsg = socket.socket.sendmsg, sendmsg
        os.memfd_create = no_memory

    writes = {
        "a field into shared memory": {"transform": two_fields},
        "half of a frame": {
            "transform": filled,
            "worker_init_fn": without_shared_memory_dies_in_mid_frame,
        },
    }
    for write, arguments in writes.items():
        marker = os.path.join(folder, write)
        with in_processes(Numbers(32), **arguments) as loader:
            delivered = collections.Counter()
            for batch in loader:
                tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
                assert (tensor == tensor[:, :1, :1]).all(), write
                delivered.update(tensor[:, 0, 0].tolist())
        assert os.path.exists(marker), write
        assert delivered == once_each(range(32)), (write, delivered)


@run_by("case")
def test_control_flow_exceptions_of_user_code_are_errors_and_stop_nothing() -> None:
    # Indices: of each exception three batches, one for each stage.
    failing = 12 * len(CONTROL_FLOW)

    def stop_at(index, place):
        if index < failing and index % 12 == place:
            raise list(CONTROL_FLOW.values())[index // 12]()

    class Stops(Numbers):
        async def aget(self, index):
            stop_at(index, 1)
            return index

    def transform(index):
        stop_at(index, 5)
        return index

    def collate(samples):
        stop_at(samples[1], 9)
        return torch.tensor(samples)

    functions = {"transform": transform, "collate_fn": collate}
    with in_processes(Stops(failing + 20), **functions) as loader:
        delivered, errors = drain(loader)
        assert delivered == once_each(range(failing, failing + 20)), delivered
        before = workers()
        delivered, again = drain(loader)
        assert delivered == once_each(range(failing, failing + 20)), delivered
        assert workers() == before, "a worker was replaced"
    expected = [
        (name, stage)
        for name in CONTROL_FLOW
        for stage in ("fetch", "transform", "collate")
    ]
    for error, (name, stage) in zip(errors + again, expected * 2, strict=True):
        # Python itself makes a RuntimeError of a coroutine's StopIteration.
        by_python = stage == "fetch" and "coroutine raised StopIteration" in str(error)
        assert by_python or (
            type(error) is hr.errors.ControlFlowError and name in str(error)
        ), error
        assert f"stage {stage}" in text_of(error), text_of(error)

    for stop in CONTROL_FLOW.values():

        def initialise(worker, stop=stop):
            raise stop()

        delivered, errors = epoch_in_processes(
            Numbers(8), worker_init_fn=initialise, **functions
        )
        assert not delivered, delivered
        assert [type(error) for error in errors] == [hr.errors.ControlFlowError] * 2, (
            errors
        )


@run_by("case")
def test_unpicklable_sample_is_reported_and_costs_only_its_batch() -> None:
    class Locks(Numbers):
        async def aget(self, index):
            return threading.Lock() if index == 1 else index

    delivered, (error,) = epoch_in_processes(Locks(32), transform=abs)
    assert delivered == once_each(range(4, 32)), delivered
    assert type(error) is hr.errors.NotPicklableError, error
    assert "a fetched sample cannot be pickled" in text_of(error), text_of(error)
    assert "lock" in text_of(error), text_of(error)


@run_by("case")
def test_close_ends_workers_in_an_endless_loop_and_stopped_ones(tmp_path: Path) -> None:
    """By SIGTERM, or by SIGKILL those that ignore it; the loaders are closed together: each waits for some seconds."""
    folder = str(tmp_path)

    def transform(index):
        if index == 4:
            if worker_ignores:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            first_call(f"{folder}/{os.getpid()}")
            while True:
                pass
        return index

    loaders = []
    for placement, worker_ignores in (("thread", True), ("process", False)):
        loader = hr.DataLoader(
            Numbers(32), 4, num_workers=1, transform=transform, placement=placement
        )
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        # Called in this turn.
        wait_until(lambda: len(os.listdir(folder)) == len(loaders) + 1)
        loaders.append(loader)

    before = workers()
    loader = in_processes(Numbers(32), transform=abs)
    assert drain(loader) == (once_each(range(32)), [])
    wait_until(lambda: len(workers()) == len(before) + 3)
    stopped = [pid for pid in workers() if pid not in (*before, sidecar(loader))]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state_of(pid) == "T" for pid in stopped))
    iterator = iter(loader)  # gives the stopped workers work
    closing = [threading.Thread(target=each.close) for each in (*loaders, loader)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    del iterator
    assert not workers(), workers()


@run_by("case")
def test_process_that_outlives_its_worker_delays_nothing(tmp_path: Path) -> None:
    marker = str(tmp_path / "forked")
    fifo = str(tmp_path / "pids")

    def transform(index):
        if index == 5 and first_call(marker):
            child = os.fork()
            if child == 0:
                while True:
                    signal.pause()
            os.write(written, f"{child}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    def initialise(worker):
        global written
        written = os.open(fifo, os.O_WRONLY)

    os.mkfifo(fifo)
    with open(os.open(fifo, os.O_RDWR)) as pids:
        drained = epoch_in_processes(
            Numbers(32), transform=transform, worker_init_fn=initialise
        )
        assert drained == (once_each(range(32)), [])
        grandchild = int(pids.readline())
    assert not workers(), workers()
    kill(grandchild)


@PLACEMENTS
@run_by("case")
def test_workers_that_always_die_while_starting_are_one_error_after_bounded_restarts(
    placement: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)

    def initialise(worker):
        if os.path.exists(f"{folder}/healed"):
            return
        first_call(f"{folder}/{os.getpid()}")
        os._exit(3)

    with in_processes(
        Numbers(32), transform=abs, worker_init_fn=initialise, placement=placement
    ) as loader:
        delivered, errors = drain(loader)
        started = len(os.listdir(folder))
        first_call(f"{folder}/healed")
        assert not drain(loader)[1], "the next epoch did not start other workers"
    assert not delivered, delivered
    assert started <= 6, "started too often"
    assert len(errors) == 8, errors
    assert len({str(error) for error in errors}) == 1, errors
    assert type(errors[0]) is hr.errors.WorkerDiedError, errors
    assert errors[0].batch is None, errors
    assert "exited with code 3 while starting, attempt 3" in str(errors[0]), errors
