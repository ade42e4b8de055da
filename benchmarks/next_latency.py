"""What `next()` and `anext()` cost when a batch is ready.

Batches of 256 integers as one tensor; the consumer rests for a millisecond between two calls, so
that the next batch has arrived, and the median and the mean over 1,000 calls are taken. Claimed for
the median: 10 µs where the loop runs in a thread, 50 µs where it is a process of its own (the batch
is received, unpacked and mapped within the call). Claimed for the mean of `next()`, which has the
calls that draw and send plans (one in five): 8 µs and 30 µs. The limit of `next()` is taking an
item out of a queue in the same way; of `anext()` one turn of the event loop, which it always gives
to other tasks. Both draw the indices of a later batch from torch's sampler as well, which is shown
by itself. For the mean there is also a bare process: it is sent indices in groups of five, drawn by
the same sampler, over a pipe, and sends back the batches.

Every value of every batch is checked, and the batch is freed, outside the clock.

    python benchmarks/next_latency.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import pickle
import queue
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import uvloop
from harness import (
    claim,
    describe_machine,
    interleave_figures,
    is_installed,
    parse_arguments,
)

import headrace as hr

BATCH = 256
REST = 0.001  # seconds between two calls

# batches that the bare process makes ahead, and requests that it is sent together, as a loader's
AHEAD, GROUP = (6, 5)

QUEUE, TURN, SAMPLER, PROCESS = (
    "a queue's get()",
    "a turn of the loop",
    "the sampler's next()",
    "a bare process",
)
AIMS = {
    "next(), thread": 10,
    "anext(), thread": 10,
    "next(), process": 50,
    "anext(), process": 50,
}
MEAN_AIMS = {"next(), thread": 8, "next(), process": 30}
UNITS = ("µs, median of the calls", "µs, mean of the calls")

Figures = tuple[float, float]
"""In `UNITS`."""


class AtOnce(hr.AsyncDataset[int]):
    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return BATCH * (self.calls + 1)

    async def aget(self, index: int) -> int:
        return index


def check(batch: torch.Tensor, number: int) -> None:
    if not torch.equal(batch, torch.arange(number * BATCH, (number + 1) * BATCH)):
        raise RuntimeError(f"batch {number} is wrong: this run does not count")


def as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch


def time_calls(
    calls: int,
    call: Callable[[], Any],
    as_tensor: Callable[[Any], torch.Tensor] = as_it_is,
) -> Figures:
    """The median and the mean of `call()` in µs."""
    times = []
    for number in range(1, calls + 1):
        time.sleep(REST)
        began = time.perf_counter()
        batch = call()
        times.append(time.perf_counter() - began)
        check(as_tensor(batch), number)
        # not in the next call's time: torch frees a tensor without Python's lock, which another
        # thread takes
        del batch
    return in_microseconds(times)


def in_microseconds(times: list[float]) -> Figures:
    return statistics.median(times) * 1e6, statistics.mean(times) * 1e6


async def time_calls_async(calls: int, call: Callable[[], Awaitable[Any]]) -> Figures:
    times = []
    for number in range(1, calls + 1):
        await asyncio.sleep(REST)
        began = time.perf_counter()
        batch = await call()
        times.append(time.perf_counter() - began)
        check(batch, number)
        del batch  # as above
    return in_microseconds(times)


def with_queue(calls: int) -> Figures:
    batches: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for number in range(1, calls + 1):
        batches.put(torch.arange(number * BATCH, (number + 1) * BATCH))
    return time_calls(calls, batches.get)


def with_turns(calls: int) -> Figures:
    ready = iter(
        [
            torch.arange(number * BATCH, (number + 1) * BATCH)
            for number in range(1, calls + 1)
        ]
    )

    async def turn() -> torch.Tensor:
        await asyncio.sleep(0)
        return next(ready)

    return uvloop.run(time_calls_async(calls, turn))


def with_next(calls: int, loader: hr.DataLoader[Any]) -> Figures:
    batches = iter(loader)
    check(next(batches), 0)
    return time_calls(calls, lambda: next(batches))


def with_anext(calls: int, loader: hr.DataLoader[Any]) -> Figures:
    async def run() -> Figures:
        batches = aiter(loader)
        check(await anext(batches), 0)
        return await time_calls_async(calls, lambda: anext(batches))

    return uvloop.run(run())


def answer(pipe: Connection) -> None:
    """Make the batches of which the indices are requested."""
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            for indices in pickle.loads(pipe.recv_bytes()):
                pipe.send_bytes(pickle.dumps(np.array(indices), protocol=5))


class BareProcess:
    """The least that a loader in a process of its own needs: draw and send indices, receive batches."""

    def __enter__(self) -> BareProcess:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=answer, args=(theirs,))
        self.process.start()
        theirs.close()
        self.pipe.recv()
        return self

    def __call__(self, calls: int) -> Figures:
        sampler = sampler_of(calls)
        under_way = 0

        def request(count: int) -> int:
            drawn = [tuple(indices) for indices in itertools.islice(sampler, count)]
            if drawn:
                self.pipe.send_bytes(pickle.dumps(drawn, protocol=5))
            return len(drawn)

        def take() -> torch.Tensor:
            nonlocal under_way
            batch = torch.from_numpy(pickle.loads(self.pipe.recv_bytes()))
            under_way -= 1
            if under_way <= AHEAD - GROUP:
                under_way += request(GROUP)
            return batch

        under_way += request(AHEAD)
        check(take(), 0)
        return time_calls(calls, take)

    def __exit__(self, *exc_info: object) -> None:
        self.pipe.close()
        self.process.join()


def sampler_of(calls: int) -> Iterator[list[int]]:
    sampler = torch.utils.data.SequentialSampler(AtOnce(calls))
    return iter(torch.utils.data.BatchSampler(sampler, BATCH, drop_last=False))


def with_sampler(calls: int) -> Figures:
    """Drawing the next batch's indices, which a loader does within `next()`, as torch's does."""
    batches = sampler_of(calls)
    next(batches)
    return time_calls(calls, lambda: next(batches), torch.tensor)


def with_spdl(calls: int) -> Figures:
    from spdl.pipeline import PipelineBuilder

    source = [
        torch.arange(number * BATCH, (number + 1) * BATCH) for number in range(calls + 1)
    ]
    pipeline = (
        PipelineBuilder()
        .add_source(source)
        .pipe(torch.clone)
        .add_sink(4)
        .build(num_threads=1)
    )
    with pipeline.auto_stop():
        batches = pipeline.get_iterator()
        check(next(batches), 0)
        return time_calls(calls, lambda: next(batches))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parse_arguments(parser, calls=50, rounds=1)
    calls = arguments.calls
    contestants: dict[str, Callable[[], Figures]] = {
        QUEUE: lambda: with_queue(calls),
        TURN: lambda: with_turns(calls),
        SAMPLER: lambda: with_sampler(calls),
    }
    absent = {}
    with (
        BareProcess() as bare_process,
        hr.DataLoader(AtOnce(calls), batch_size=BATCH, placement="thread") as in_thread,
        hr.DataLoader(AtOnce(calls), batch_size=BATCH, placement="process") as in_process,
    ):
        contestants[PROCESS] = lambda: bare_process(calls)
        contestants["next(), thread"] = lambda: with_next(calls, in_thread)
        contestants["anext(), thread"] = lambda: with_anext(calls, in_thread)
        contestants["next(), process"] = lambda: with_next(calls, in_process)
        contestants["anext(), process"] = lambda: with_anext(calls, in_process)
        if is_installed("spdl-core"):
            contestants["SPDL, next()"] = lambda: with_spdl(calls)
        else:
            absent["SPDL, next()"] = "spdl is not installed"
        medians, means = interleave_figures(
            contestants, rounds=arguments.rounds, units=UNITS
        )
    print(
        f"{calls} calls, {REST * 1000:.0f} ms apart, a batch ready; batches of {BATCH} integers; anext() on uvloop"
    )
    print(describe_machine("spdl-core"))
    medians.show(against=QUEUE, absent=absent)
    means.show(against=QUEUE, absent=absent)
    for name, aim in AIMS.items():
        claim(f"{name}, a batch ready", medians.figure(name, "µs", at_most=aim))
    for name, aim in MEAN_AIMS.items():
        claim(f"{name}, a batch ready, mean", means.figure(name, "µs", at_most=aim))


if __name__ == "__main__":
    main()
