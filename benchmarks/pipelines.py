"""Simulated pipelines, each with another stage that is too slow: does `report()` name it, and is its prediction true?

Each pipeline is a real loader whose training step is a sleep. Its limit is known. The change that
the report proposes is applied: `report.change`, where it is one of constructor arguments, otherwise
a change of the dataset or the loop as the advice says. Then the waiting is measured again, and
compared with `report.predicted`.

The gain is what training steps gain in rate. ::

    python benchmarks/pipelines.py [--rounds 5] [--only latency,order]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
import numpy as np
import torch
from harness import Figure, claim, describe_machine, parse_arguments
from servers import Fault, ObjectServer

import headrace as hr

TOLERANCE = 0.25


@dataclass
class Pipeline:
    """A loader whose slow stage is known.

    Attributes:
        limit: the limit that the report has to name.
        make: makes the loader, given arguments of a change.
        step: seconds of a training step.
        batches: number of batches that are read.
        by_hand: makes the loader after a change that is not one of constructor arguments, given the
            report.
        second_epoch: whether the change is to read another epoch.
    """

    limit: str
    make: Callable[..., hr.DataLoader[Any]]
    step: float
    batches: int = 60
    by_hand: Callable[[hr.types.Report], hr.DataLoader[Any]] | None = None
    second_epoch: bool = False


@dataclass
class Outcome:
    """One round of a pipeline: the report, and the share of the time that was waited before and after the change."""

    report: hr.types.Report
    before: float
    after: float | None = None
    advice: str = ""


class Numbers(hr.AsyncDataset):
    """Samples that take a while to fetch, as `wait` says for each index."""

    def __init__(self, length: int, wait: Callable[[int], float], size: int = 16) -> None:
        self.length, self.wait, self.size = length, wait, size

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> np.ndarray:
        await asyncio.sleep(self.wait(index))
        return np.zeros(self.size, np.uint8)


class Computing(Numbers):
    """Samples that take CPU time of the event loop's thread."""

    def __init__(self, length: int, cpu: float) -> None:
        super().__init__(length, lambda index: 0.005)
        self.cpu = cpu

    async def aget(self, index: int) -> np.ndarray:
        compute(self.cpu)
        return await super().aget(index)


class Blocking(Numbers):
    """Samples that are fetched by a call that blocks."""

    async def aget(self, index: int) -> np.ndarray:
        time.sleep(self.wait(index))  # noqa: ASYNC251
        return np.zeros(self.size, np.uint8)


class InThreads(Numbers):
    """The same, in threads."""

    async def aget(self, index: int) -> np.ndarray:
        await anyio.to_thread.run_sync(time.sleep, self.wait(index))
        return np.zeros(self.size, np.uint8)


class Opened(Numbers):
    """A dataset that takes a second to open."""

    def __init__(self, length: int, wait: Callable[[int], float]) -> None:
        super().__init__(length, wait)
        self.connection = hr.per_loop(functools.partial(asyncio.sleep, 1.0))

    async def aget(self, index: int) -> np.ndarray:
        await self.connection()
        return await super().aget(index)


class Throttled(Numbers):
    """Samples of a source that refuses requests above a rate; each request is for `together` samples."""

    def __init__(self, length: int, rate: float, together: int = 1) -> None:
        super().__init__(length, lambda index: 0.005)
        self.rate, self.together = rate, together
        self._tokens, self._at = 1.0, 0.0

    async def aget(self, index: int) -> np.ndarray:
        if index % self.together == 0:  # the others come with it
            await self._request()
        return np.zeros(self.size, np.uint8)

    async def _request(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            self._tokens = min(8.0, self._tokens + (now - self._at) * self.rate)
            self._at = now
            if self._tokens >= 1:
                self._tokens -= 1
                return
            hr.report_throttled()
            await asyncio.sleep(0.05)


def compute(seconds: float) -> None:
    """Use CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def sleeping(seconds: float) -> Callable[[Any], Any]:
    """A transform that takes so long, and no core: workers on this machine stand for those of a larger one."""

    def transform(sample: Any) -> Any:
        time.sleep(seconds)
        return sample

    return transform


class SlowSampler:
    """A batch sampler that takes a while for each batch."""

    def __init__(self, batches: int, size: int, seconds: float) -> None:
        self.batches, self.size, self.seconds = batches, size, seconds

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.batches):
            time.sleep(self.seconds)
            yield list(range(batch * self.size, (batch + 1) * self.size))


class Unpickled:
    """A batch whose unpickling takes 20 ms."""

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (0.02,)

    def __repr__(self) -> str:
        return "None"  # as the result of unpickling


def as_objects(batch: Sequence[Any]) -> Unpickled:
    """A batch that stands for one of many small objects."""
    return Unpickled()


def as_tensor(batch: Sequence[Any]) -> torch.Tensor:
    """One of a single tensor."""
    return torch.zeros(1000)


class Constant:
    """A collate function that returns always the same tensor, so that its making takes no time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tensor: torch.Tensor | None = None

    def __call__(self, batch: Sequence[Any]) -> torch.Tensor:
        if self.tensor is None:  # in the process that needs it
            self.tensor = torch.ones(self.size, dtype=torch.uint8)
        return self.tensor


def wait_share(
    loader: hr.DataLoader[Any], pipeline: Pipeline
) -> tuple[float, hr.types.Report]:
    """Read an epoch; the share of the time that the loop waited."""
    waited = began = first = 0.0
    at = time.perf_counter()
    batches = iter(loader)
    for number in range(pipeline.batches):
        batch = next(batches)
        now = time.perf_counter()
        if number:
            waited += now - at
        else:
            first, began = now - at, now
        del batch
        time.sleep(pipeline.step)
        at = time.perf_counter()
    report = loader.report()
    elapsed = at - began - pipeline.step
    if pipeline.second_epoch:
        waited, elapsed = waited + first, elapsed + first
    del batches
    return waited / elapsed, report


def warm_up(loader: hr.DataLoader[Any]) -> None:
    """Start the engine and the workers, so that the limit is not the start."""
    batches = iter(loader)
    next(batches)
    del batches


def run(pipeline: Pipeline) -> Outcome:
    """Read an epoch, apply the change that the report proposes, and read another one."""
    with pipeline.make() as loader:
        if not pipeline.second_epoch:
            warm_up(loader)
        before, report = wait_share(loader, pipeline)
        outcome = Outcome(report, before)
        if report.limit != pipeline.limit:
            return outcome
        if pipeline.second_epoch:
            outcome.after, _ = wait_share(loader, pipeline)
            return outcome
    if report.change:
        changed = pipeline.make(**report.change)
    elif pipeline.by_hand is not None:
        changed = pipeline.by_hand(report)
    else:
        changed = pipeline.make()
    with changed:
        warm_up(changed)
        outcome.after, _ = wait_share(changed, pipeline)
    return outcome


def store_of(server: ObjectServer) -> hr.Store:
    """The store of a server."""
    return hr.Store(f"{server.url}/train", options=server.store_options)


def objects(server: ObjectServer, **change: Any) -> hr.DataLoader[Any]:
    """A loader of objects in batches of 8."""
    arguments = {"collate_fn": len, "concurrency": 32, **change}
    return hr.DataLoader(hr.ObjectDataset(store_of(server)), 8, **arguments)


def pipelines(stack: ExitStack) -> dict[str, Callable[[], Pipeline]]:
    """The pipelines, by name; servers that they need are entered into `stack`."""

    def make(
        dataset: Callable[[], Any], batch_size: int = 16, **arguments: Any
    ) -> Callable[..., hr.DataLoader[Any]]:
        return lambda **change: hr.DataLoader(
            dataset(), batch_size, **{**arguments, **change}
        )

    def served(
        size: int, count: int, *faults: Fault, latency: float = 0.005
    ) -> ObjectServer:
        contents = {f"train/{number:05}": bytes(size) for number in range(count)}
        server = stack.enter_context(ObjectServer(contents, latency=latency))
        server.misbehave(*faults)
        return server

    def latency() -> Pipeline:
        return Pipeline(
            "latency",
            make(lambda: Numbers(960, lambda index: 0.05), concurrency=16),
            0.02,
        )

    def latency_of_a_store() -> Pipeline:
        server = served(4096, 320, latency=0.05)
        return Pipeline(
            "latency",
            lambda **change: objects(server, **{"concurrency": 6, **change}),
            0.03,
            40,
        )

    def throttling() -> Pipeline:
        def fewer(report: hr.types.Report) -> hr.DataLoader[Any]:
            assert report.factor is not None
            together = -int(-report.factor // 1)
            return make(lambda: Throttled(640, 200.0, together))()

        return Pipeline(
            "throttling", make(lambda: Throttled(640, 200.0)), 0.03, 40, fewer
        )

    def bandwidth() -> Pipeline:
        size, link = 65_536, Fault("bandwidth", rate=8e6)
        server = served(size, 400, link)

        def smaller(report: hr.types.Report) -> hr.DataLoader[Any]:
            assert report.factor is not None
            return objects(served(int(size / report.factor), 400, link))

        return Pipeline(
            "source", lambda **change: objects(server, **change), 0.03, 50, smaller
        )

    def event_loop() -> Pipeline:
        def cheaper(report: hr.types.Report) -> hr.DataLoader[Any]:
            assert report.factor is not None
            return make(lambda: Computing(960, 0.004 / report.factor), concurrency=16)()

        return Pipeline(
            "event-loop",
            make(lambda: Computing(960, 0.004), concurrency=16),
            0.03,
            40,
            cheaper,
        )

    def blocked_loop() -> Pipeline:
        def threads(report: hr.types.Report) -> hr.DataLoader[Any]:
            return make(lambda: InThreads(960, lambda index: 0.008), concurrency=16)()

        return Pipeline(
            "blocked-loop",
            make(lambda: Blocking(960, lambda index: 0.008), concurrency=16),
            0.04,
            40,
            threads,
        )

    def workers() -> Pipeline:
        dataset, transform = (lambda: Numbers(640, lambda index: 0.001)), sleeping(0.005)
        return Pipeline(
            "workers", make(dataset, 8, transform=transform, num_workers=1), 0.03
        )

    def no_workers() -> Pipeline:
        dataset, transform = (lambda: Numbers(640, lambda index: 0.001)), sleeping(0.005)
        return Pipeline("workers", make(dataset, 8, transform=transform), 0.03)

    def order() -> Pipeline:
        dataset = lambda: Numbers(960, lambda index: 0.6 if index % 160 == 7 else 0.002)  # noqa: E731
        return Pipeline("order", make(dataset, 8, concurrency=64), 0.02, 120)

    def slow_shard() -> Pipeline:
        lines = b"x" * 99 + b"\n"
        contents = {f"train/{number:02}.txt": lines * 80 for number in range(16)}
        server = stack.enter_context(ObjectServer(contents, latency=0.005))
        server.misbehave(Fault("trickle", key="train/03.txt", seconds=0.2))

        def shards(**change: Any) -> hr.DataLoader[Any]:
            names = [f"{server.url}/train/{number:02}.txt" for number in range(16)]
            parallel = change.pop("shards_in_parallel", 2)
            dataset = hr.LinesDataset(
                names, store=store_of(server), format="bytes", shards_in_parallel=parallel
            )
            return hr.DataLoader(dataset, 16, collate_fn=len, **change)

        def more(report: hr.types.Report) -> hr.DataLoader[Any]:
            assert report.factor is not None
            return shards(shards_in_parallel=round(2 * report.factor))

        return Pipeline("order", shards, 0.02, 80, more)

    def transport() -> Pipeline:
        dataset = lambda: Numbers(480, lambda index: 0.001)  # noqa: E731
        arguments = {
            "placement": "process",
            "concurrency": 32,
            "collate_fn": Constant(64_000_000),
        }
        return Pipeline("transport", make(dataset, 8, **arguments), 0.01)

    def copy() -> Pipeline:
        dataset = lambda: Numbers(640, lambda index: 0.001)  # noqa: E731
        loader = make(dataset, collate_fn=as_objects, num_workers=1)

        def tensors(report: hr.types.Report) -> hr.DataLoader[Any]:
            return loader(collate_fn=as_tensor)

        return Pipeline("copy", loader, 0.01, 40, tensors)

    def start_up() -> Pipeline:
        return Pipeline(
            "start-up",
            make(lambda: Opened(320, lambda index: 0.005)),
            0.02,
            20,
            second_epoch=True,
        )

    def memory_budget() -> Pipeline:
        dataset = lambda: Numbers(480, lambda index: 0.05, 100_000)  # noqa: E731
        return Pipeline(
            "memory-budget",
            make(dataset, 8, memory_budget=2_500_000, concurrency=64, collate_fn=len),
            0.01,
        )

    def look_ahead() -> Pipeline:
        return Pipeline(
            "look-ahead",
            make(
                lambda: Numbers(480, lambda index: 0.08),
                8,
                num_workers=1,
                prefetch_factor=1,
            ),
            0.02,
        )

    def sampler() -> Pipeline:
        slow = SlowSampler(60, 8, 0.02)
        quick = SlowSampler(60, 8, 0.0)

        def loader(sampler: SlowSampler, **change: Any) -> hr.DataLoader[Any]:
            arguments = {"concurrency": 16, **change}
            return hr.DataLoader(
                Numbers(480, lambda index: 0.005), batch_sampler=sampler, **arguments
            )

        return Pipeline(
            "look-ahead",
            functools.partial(loader, slow),
            0.02,
            by_hand=lambda report: loader(quick),
        )

    def consumer() -> Pipeline:
        return Pipeline("consumer", make(lambda: Numbers(960, lambda index: 0.02)), 0.02)

    return {
        each.__name__.replace("_", " "): each
        for each in (
            consumer, latency, latency_of_a_store, throttling, bandwidth, event_loop, blocked_loop, workers, no_workers,
            order, slow_shard, transport, copy, start_up, memory_budget, look_ahead, sampler,
        )
    }  # fmt: skip


def gain(share_before: float, share_after: float) -> float:
    """By how much the rate of steps grows, if the loop waits less."""
    return (
        (1 - share_before) / max(1e-9, 1 - share_after)
        if share_before > share_after
        else 1.0
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--verbose", action="store_true", help="print each report")
    arguments = parse_arguments(
        parser, rounds=1, only="latency,bandwidth,workers,start up"
    )
    print(describe_machine())
    with ExitStack() as stack:
        known = pipelines(stack)
        chosen = [
            name
            for name in known
            if not arguments.only or name in arguments.only.split(",")
        ]
        outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
        made = {name: known[name]() for name in chosen}
        for pipeline in made.values() if arguments.quick else ():
            pipeline.batches = 10
        for _ in range(arguments.rounds):
            for name in chosen:
                outcome = run(made[name])
                outcomes[name].append(outcome)
                if arguments.verbose:
                    print(
                        name,
                        outcome.before,
                        outcome.after,
                        outcome.report.predicted,
                        outcome.report.change,
                    )
                    print(outcome.report, end="\n\n", flush=True)
        show({name: (made[name], found) for name, found in outcomes.items()})


def show(outcomes: Mapping[str, tuple[Pipeline, Sequence[Outcome]]]) -> None:
    """Print the table, and whether each prediction was true."""
    row = "{:20} {:14} {:7} {:>6} {:>9} {:>6}  {:>9} {:>6}"
    print(
        row.format(
            "pipeline",
            "limit",
            "found",
            "waits",
            "predicted",
            "after",
            "predicted",
            "gain",
        )
    )
    missed = []
    for name, (pipeline, rounds) in outcomes.items():
        right = [each for each in rounds if each.report.limit == pipeline.limit]
        found = f"{len(right)} of {len(rounds)}"
        cells = [name, pipeline.limit, found]
        good = len(right) == len(rounds)
        if right:
            before = statistics.median(each.before for each in right)
            after = statistics.median(
                each.after for each in right if each.after is not None
            )
            cells.append(f"{before:.0%}")
            known = [each for each in right if each.report.predicted is not None]
            predicted = (
                statistics.median(each.report.predicted for each in known)
                if known
                else None
            )
            if predicted is not None and pipeline.limit != "consumer":
                expected, reached = 1 / gain(before, predicted), 1 / gain(before, after)
                cells += [
                    f"{predicted:.0%}",
                    f"{after:.0%}",
                    f"{expected:.2f}x",
                    f"{reached:.2f}x",
                ]
                good &= abs(reached / expected - 1) <= TOLERANCE
        wrong = sorted(
            {each.report.limit for each in rounds if each.report.limit != pipeline.limit}
        )
        line = row.format(*cells, *[""] * (8 - len(cells)))
        print(line.rstrip() + ("" if good else f"  MISSED {' '.join(wrong)}"))
        if not good:
            missed.append(name)
    if missed:
        print(f"missed: {', '.join(missed)}")
    claim(
        "report() on simulated pipelines: the limit in each round, the rate after the change within 25 %",
        Figure(
            f"of {len(outcomes)} pipelines",
            [len(outcomes) - len(missed)],
            at_least=len(outcomes),
        ),
    )


if __name__ == "__main__":
    main()
