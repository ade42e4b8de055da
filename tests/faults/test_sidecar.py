"""The engine in a process of its own: nobody notices but by what is promised, and no death of it goes unnoticed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

WORKERS = pytest.mark.parametrize("workers", [0, 2])
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])

# How an async program is run; the scripts of this file are given `loop` or say it themselves.
ON_LOOPS = """
def run_on(loop, function):
    if loop == "trio":
        import trio
        return trio.run(function)
    if loop == "uvloop":
        import uvloop
        return uvloop.run(function())
    return asyncio.run(function())
"""

# Hangs where it is told to, and says that it does.
HANGS = """
class Hangs(hr.AsyncDataset):
    def __init__(self, fifo, behind):
        self.fifo, self.behind = fifo, behind

    def __len__(self):
        return 64

    async def aget(self, index):
        if index < self.behind:
            return index
        if index == self.behind:
            with open(self.fifo, "w") as fifo:
                fifo.write("hangs\\n")
        await asyncio.Event().wait()


def listening(fifo):
    os.mkfifo(fifo)
    return open(os.open(fifo, os.O_RDWR))  # for writing as well: then nobody waits for the other in open()
"""


@WORKERS
def test_an_epoch_is_what_it_is_in_a_thread(case: Any, workers: int) -> None:
    count = workers

    def program() -> None:
        def noisy(index):
            return index + torch.rand(())

        before = threads()
        epochs = {}
        for placement in ("thread", "process"):
            with hr.DataLoader(
                Numbers(), 5, shuffle=True, seed=7, num_workers=count, transform=noisy, placement=placement
            ) as loader:
                epochs[placement] = [[batch.tolist() for batch in loader] for _ in range(2)]
                if placement == "process":
                    assert threads() == before, threads()
                    assert loader.stats().placement == "process: placement='process'", loader.stats()
        if count:  # with none, the thread shares the trainer's random state, as documented
            assert epochs["thread"] == epochs["process"], epochs
        else:
            floored = [[[int(x) for x in b] for b in e] for e in epochs["thread"]]
            assert floored == [[[int(x) for x in b] for b in e] for e in epochs["process"]]

    case(program)


@WORKERS
def test_every_door_out_of_an_epoch_leaves_nothing(case: Any, workers: int) -> None:
    count = workers
    # PREFIX ['ON_LOOPS']

    def program() -> None:
        def new():
            return hr.DataLoader(Slow(), batch_size=4, num_workers=count, transform=negate, placement="process")

        def break_out():
            for batch in new():
                break
            assert batch.tolist() == [0, -1, -2, -3]

        async def break_out_async():
            async for batch in new():
                break
            assert batch.tolist() == [0, -1, -2, -3]

        def abandon():
            iterator = iter(new())
            next(iterator)
            cycle = [iterator]
            cycle.append(cycle)  # only the collector finds it

        def never_ask():
            iter(new())
            aiter(new())

        def never_iterate():
            new()
            new().close()

        def fail():
            try:
                iterator = iter(new())
                next(iterator)
                raise KeyError("the training step")
            except KeyError as error:
                kept = error

        def close():
            with new() as loader:
                iterator = iter(loader)
                next(iterator)
            try:
                next(iterator)
            except hr.LoaderClosedError:
                loader.close()
                return
            raise AssertionError("a closed iterator gave a batch")

        async def close_async():
            async with new() as loader:
                stream = aiter(loader)
                await anext(stream)
            try:
                await anext(stream)
            except hr.LoaderClosedError:
                await loader.aclose()
                return
            raise AssertionError("a closed iterator gave a batch")

        async def cancel():
            import anyio
            stream = aiter(new())
            await anext(stream)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anext(stream)

        def go_to_the_end():
            loader = new()
            for _ in range(2):
                assert sum(len(batch) for batch in loader) == 64

        for door in (break_out, abandon, never_ask, never_iterate, fail, close, go_to_the_end):
            with watch():
                door()
        for loop in ("asyncio", "uvloop", "trio"):
            for door in (break_out_async, close_async, cancel):
                with watch():
                    run_on(loop, door)

    case(program)


def test_the_doors_of_one_epoch_leave_the_loader_as_it_was(case: Any) -> None:
    def program() -> None:
        with hr.DataLoader(Slow(), batch_size=4, num_workers=2, transform=negate, placement="process") as loader:
            next(iter(loader))
            wait_until(lambda: len(workers()) == 3)
            pids = workers()
            with watch():
                for _ in range(50):
                    for number, batch in enumerate(loader):
                        if number == 2:
                            break
                    assert batch.tolist() == [-8, -9, -10, -11]
                    del batch
                assert workers() == pids, "a process was replaced"
            assert drain(loader) == (once_each(range(0, -64, -1)), [])

    case(program)


@LOOPS
def test_several_iterators_of_one_loader_at_once(case: Any, loop: str) -> None:
    # PREFIX ['ON_LOOPS']

    def program() -> None:
        def new():
            return hr.DataLoader(Slow(), batch_size=4, num_workers=2, transform=negate, placement="process")

        expected = [list(range(-n, -n - 4, -1)) for n in range(0, 64, 4)]

        before = threads()

        async def together():
            import anyio
            delivered = {}

            async def iterate(name):
                delivered[name] = [batch.tolist() async for batch in loader]
                assert threads() == before, threads()

            async with new() as loader:
                async with anyio.create_task_group() as tasks:
                    for name in range(3):
                        tasks.start_soon(iterate, name)
            assert delivered == dict.fromkeys(range(3), expected), delivered

        run_on(loop, together)
        with new() as loader:
            for one, two, three in zip(loader, loader, loader, strict=True):
                assert one.tolist() == two.tolist() == three.tolist() == expected.pop(0)
        assert not expected

    case(program)


def test_an_async_consumer_does_not_hold_up_its_loop_while_it_waits(case: Any, tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    # PREFIX ['ON_LOOPS', 'HANGS']

    def program() -> None:
        async def main():
            import anyio
            async with hr.DataLoader(Hangs(fifo, 4), batch_size=4, num_workers=2, placement="process") as loader:
                stream = aiter(loader)
                assert (await anext(stream)).tolist() == [0, 1, 2, 3]
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(stream.__anext__)
                    assert await anyio.to_thread.run_sync(lines.readline) == "hangs\n"
                    tasks.cancel_scope.cancel()

        for loop in ("asyncio", "uvloop", "trio"):
            with watch(), listening(fifo) as lines:
                run_on(loop, main)
            os.unlink(fifo)

    case(program)


@pytest.mark.parametrize("consumer", ["for", "asyncio", "uvloop", "trio"])
def test_the_death_of_the_sidecar_is_one_error_and_a_new_iteration_works(
    case: Any, consumer: str, tmp_path: Path
) -> None:
    fifo = str(tmp_path / "fifo")
    # PREFIX ['ON_LOOPS', 'HANGS']

    def program() -> None:
        def died(error, pid):
            assert type(error) is hr.EngineDiedError, error
            assert f"its process {pid} was killed by SIGKILL" in str(error), error

        class Stepwise:
            # One way to iterate for both kinds of consumer: each step is awaited, or blocks.
            def __init__(self, loader):
                self.iterator = iter(loader) if consumer == "for" else aiter(loader)

            async def next(self):
                try:
                    return next(self.iterator) if consumer == "for" else await anext(self.iterator)
                except (StopIteration, StopAsyncIteration):
                    return None

        async def main():
            global checked
            # While it waits: a thread kills when the sidecar hangs.
            loader = hr.DataLoader(Hangs(fifo, 4), batch_size=4, num_workers=2, placement="process")
            steps = Stepwise(loader)
            pid = sidecar(loader)
            assert (await steps.next()).tolist() == [0, 1, 2, 3]
            killer = threading.Thread(target=lambda: (lines.readline(), os.kill(pid, signal.SIGKILL)))
            killer.start()
            try:
                await steps.next()
                raise AssertionError("a batch came")
            except hr.EngineDiedError as error:
                died(error, pid)
            killer.join()
            assert await steps.next() is None, "the epoch goes on behind the error"
            loader.dataset.behind = 64
            again = Stepwise(loader)
            assert sidecar(loader) != pid
            for number in range(16):
                assert (await again.next()).tolist() == list(range(number * 4, number * 4 + 4))
            assert await again.next() is None

            # Between batches: those that came before are given out, then the error.
            with hr.DataLoader(Numbers(4000), batch_size=4, num_workers=2, transform=abs, placement="process") as loader:
                steps, other = Stepwise(loader), Stepwise(loader)
                assert (await steps.next()).tolist() == [0, 1, 2, 3]
                pid = sidecar(loader)
                kill(pid)
                delivered = 1
                try:
                    while (batch := await steps.next()) is not None:
                        assert batch.tolist() == list(range(delivered * 4, delivered * 4 + 4))
                        delivered += 1
                    raise AssertionError("the epoch ended as if nothing had been")
                except hr.EngineDiedError as error:
                    died(error, pid)
                assert delivered < 1000
                assert await steps.next() is None
                if consumer == "for":
                    assert drain(loader) == (once_each(range(4000)), [])
                else:
                    assert sum([len(batch) async for batch in loader]) == 4000
                try:  # an iterator of before, too
                    while await other.next() is not None:
                        pass
                    raise AssertionError("the other epoch ended as if nothing had been")
                except (hr.EngineDiedError, hr.LoaderClosedError):
                    checked = True

        with listening(fifo) as lines:
            run_on("asyncio" if consumer == "for" else consumer, main)
        assert checked

    case(program, within=10)


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_the_death_of_the_zygote_is_one_error_or_none_and_leaves_nothing(
    case: Any, placement: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    go = str(tmp_path.parent / f"{tmp_path.name}.go")

    def program() -> None:
        def transform(index):
            if index >= 64 and not os.path.exists(go):
                first_call(f"{folder}/{os.getpid()}")
                while not os.path.exists(go):  # SIGKILL alone ends it
                    pass
            return index

        with hr.DataLoader(Numbers(128), 4, num_workers=2, transform=transform, placement=placement) as loader:
            iterator = iter(loader)
            assert next(iterator).tolist() == [0, 1, 2, 3]
            wait_until(lambda: len(os.listdir(folder)) == 2)
            descriptors = [os.pidfd_open(pid) for pid in workers()]
            assert len(descriptors) == 2 + (placement == "process")
            kill(launch._zygote.process.pid)
            delivered, error = list(range(4)), None
            first_call(go + ".soon")
            try:
                if placement == "thread":  # the workers are killed, replaced, and their batches done again
                    poller = select.poll()
                    poller.register(descriptors[0], select.POLLIN)
                    poller.poll()
                    first_call(go)
                for batch in iterator:
                    delivered += batch.tolist()
            except hr.EngineDiedError as caught:
                error = caught
            if placement == "thread":
                assert error is None and delivered == list(range(128)), (error, delivered)
            else:
                assert "its process" in str(error), error
                assert delivered == list(range(len(delivered))), delivered
            for descriptor in descriptors:  # and those of before are gone, though they were busy
                poller = select.poll()
                poller.register(descriptor, select.POLLIN)
                poller.poll()
                os.close(descriptor)
            first_call(go)
            assert drain(loader) == (once_each(range(128)), [])
        with hr.DataLoader(Numbers(), 4, num_workers=2, transform=abs, placement=placement) as loader:
            assert drain(loader) == (once_each(range(32)), [])

    case(program, within=10)


def test_an_unpicklable_dataset_stays_in_a_thread_and_says_why(case: Any) -> None:
    def program() -> None:
        class Locks(Numbers):
            def __init__(self):
                self.length, self.lock = 32, threading.Lock()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with hr.DataLoader(Locks(), 4, num_workers=2, transform=negate) as loader:
                assert drain(loader) == (once_each(range(0, -32, -1)), [])
        (warning,) = [warning for warning in caught if warning.category is RuntimeWarning]
        assert "dataset Locks cannot be pickled" in str(warning.message), warning.message
        assert "lock" in str(warning.message), warning.message
        assert warning.filename == "<string>", warning.filename  # where `iter` was called: in `drain`
        assert loader.stats().placement.startswith("thread: dataset Locks cannot be pickled"), loader.stats()

        for part, arguments in {
            "dataset Locks": {"dataset": Locks()},
            "transform": {"dataset": Numbers(), "transform": Locks().__getitem__},
        }.items():
            try:
                iter(hr.DataLoader(batch_size=4, num_workers=2, placement="process", **arguments))
            except hr.NotPicklableError as error:
                assert part in str(error) and "lock" in str(error), error
            else:
                raise AssertionError("it was pickled")

        places = {
            "process: an async dataset with workers": {"num_workers": 2},
            "process: placement='process'": {"placement": "process"},
            "thread: num_workers=0": {},
            "thread: placement='thread'": {"placement": "thread", "num_workers": 2},
        }
        for words, arguments in places.items():
            with hr.DataLoader(Numbers(), 4, **arguments) as loader:
                next(iter(loader))
            assert loader.stats().placement == words, loader.stats()

    case(program)


def test_a_batch_that_its_helper_thread_changes_later_arrives_as_it_was(case: Any) -> None:
    def program() -> None:
        array = torch.zeros(4, 256 * 1024, dtype=torch.int64)

        def collate(samples):
            return array.copy_(torch.tensor(samples)[:, None])

        with hr.DataLoader(Numbers(128), 4, collate_fn=collate, placement="process") as loader:
            for number, batch in enumerate(list(loader)):
                assert (batch == torch.arange(number * 4, number * 4 + 4)[:, None]).all(), (number, batch)

    case(program)


def test_a_script_needs_no_guard_and_its_own_classes_travel(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import dataclasses, enum, sys, threading
            import torch
            import headrace as hr

            print("imported")
            SCALE = 10

            class Colour(enum.Enum):
                RED = 1

            @dataclasses.dataclass
            class Record:
                value: torch.Tensor
                colour: Colour

            class Dataset(hr.AsyncDataset):
                def __len__(self): return 8
                async def aget(self, index): return Record(torch.tensor(index * SCALE), Colour.RED)

            class Batch:
                def __init__(self, records): self.records = records

            loader = hr.DataLoader(
                Dataset(),
                4,
                num_workers=2,
                transform=lambda record: dataclasses.replace(record, value=record.value + 1),
                collate_fn=lambda records: Batch(records),
            )
            for batch in loader:
                assert type(batch) is Batch and all(type(record) is Record for record in batch.records)
                assert all(record.colour is Colour.RED for record in batch.records)
                print([int(record.value) for record in batch.records])
            assert threading.enumerate() == [threading.main_thread()]
            print(loader.stats().placement)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", str(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "imported",
        "[1, 11, 21, 31]",
        "[41, 51, 61, 71]",
        "process: an async dataset with workers",
    ]


@pytest.mark.parametrize("doing", ["waiting", "training"])
def test_all_processes_go_when_the_trainer_is_killed(tmp_path: Path, doing: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = f"""
import os, time
import headrace as hr
from headrace._core.pool import launch

class Dataset(hr.AsyncDataset):
    def __len__(self): return 64
    async def aget(self, index): return index

def busy(index):
    if index < 8:
        return index
    os.write(os.open({str(fifo)!r}, os.O_WRONLY), f"{{os.getpid()}}\\n".encode())
    while True:
        pass

loader = hr.DataLoader(Dataset(), 4, num_workers=2, transform=busy, placement="process")
iterator = iter(loader)
next(iterator)
process = loader._placements._current._process
while process.pid is None:
    process.ended()
os.write(os.open({str(fifo)!r}, os.O_WRONLY), f"{{launch._zygote.process.pid}}\\n{{process.pid}}\\n".encode())
if {doing!r} == "waiting":
    list(iterator)
input()
"""
    with open(os.open(fifo, os.O_RDWR)) as lines:
        trainer = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        pids = {int(lines.readline()) for _ in range(4)}  # zygote, sidecar, and each worker as it gets to work
    assert len(pids) == 4
    descriptors = [os.pidfd_open(pid) for pid in pids]
    trainer.kill()
    _, said = trainer.communicate(timeout=30)  # standard error closes when the last process has gone
    for descriptor in descriptors:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(30_000), "a process has outlived the trainer"
        os.close(descriptor)
    assert trainer.returncode == -signal.SIGKILL
    assert "Traceback" not in said, said
