"""`engines=`: the batches of one engine, from several; any of them may die."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import headrace as hr
from tests.faults.watching import (
    Numbers,
    Slow,
    digest,
    engines_of,
    first_call,
    ignored_deaths,
    kill,
)
from tests.programs import run_by

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

# 50: as many as docs/faults.md names.
KILLS = int(os.environ.get("HEADRACE_ENGINE_KILLS", "4"))


def samples_of(batches: Any) -> list[Any]:
    return [sample for batch in batches for sample in batch.tolist()]


def killing(loader: hr.DataLoader, kills: dict[int, list[int]]) -> Iterator[Any]:
    """Batches; after those whose numbers are keys, some engines are killed."""
    for number, batch in enumerate(loader):
        yield batch
        if number in kills:
            pids = engines_of(loader)
            kill(*(pids[engine] for engine in kills[number]))


def noisy(sample: Any) -> torch.Tensor:
    return float(sample) + torch.rand(2)


def by_index(**options: Any) -> hr.DataLoader:
    return hr.DataLoader(
        Slow(360, 0.001), 4, shuffle=True, seed=7, transform=noisy, **options
    )


# 1: a batch of each engine at a time.
@pytest.mark.parametrize("memory_budget", [None, 1])
@run_by("case")
def test_order_and_bytes_survive_random_kills(memory_budget: int | None) -> None:
    """With `HEADRACE_ENGINE_KILLS=50`: 50 in 25 epochs of 90 batches."""
    draw = random.Random(KILLS)
    # A small look-ahead: what is ready when an engine dies would else be consumed before it has
    # been replaced.
    options: dict[str, Any] = {"concurrency": 24, "memory_budget": memory_budget}
    with (
        by_index(**options) as expected,
        by_index(engines=3, **options) as loader,
        ignored_deaths(),
    ):
        for _ in range(KILLS // 2):
            moments = {
                draw.randrange(start, start + 30): [draw.randrange(3)]
                for start in (0, 40)
            }
            assert digest(killing(loader, moments)) == digest(expected)


@pytest.mark.parametrize(
    # A batch of each engine at a time; as many as planned.
    ("kills", "in_order", "memory_budget"),
    [
        ({10: [0], 40: [1], 70: [2]}, True, 1),
        ({10: [0], 40: [1], 70: [2]}, False, 2**30),
        ({10: [1, 2]}, True, None),
        ({0: [0, 1, 2]}, True, None),
    ],
    ids=["in turn", "in turn, out of order", "all but one", "all"],
)
@run_by("case")
def test_engines_that_are_killed_are_replaced(
    kills: dict[int, list[int]], in_order: bool, memory_budget: int | None
) -> None:
    again = r"of 3 \(process .*\) was killed by SIGKILL: it is started again"
    loader = hr.DataLoader(
        Slow(400), 4, engines=3, in_order=in_order, memory_budget=memory_budget
    )
    with loader:
        with pytest.warns(RuntimeWarning, match=again):
            samples = samples_of(killing(loader, kills))
        assert len(set(engines_of(loader))) == 3
    assert (samples if in_order else sorted(samples)) == list(range(400))


class DeadlyLine:
    """A filter that ends its process at one line: always, or as often as there are paths."""

    def __init__(self, line: int, *paths: str) -> None:
        self.line, self.paths = line, paths

    def __call__(self, line: Any) -> bool:
        if int(line) == self.line and (
            not self.paths or any(map(first_call, self.paths))
        ):
            os._exit(3)
        return True


class Deadly(Numbers):
    """Ends its process at one index, as the filter does."""

    def __init__(self, index: int, *paths: str) -> None:
        super().__init__(64)
        self.end = DeadlyLine(index, *paths)

    async def aget(self, index: int) -> int:
        self.end(index)
        return index


@run_by("case")
def test_sample_that_ends_one_engine_or_every_engine(tmp_path: Any) -> None:
    """Another engine fetches it; or its batch is named."""
    path = str(tmp_path / "died")
    with ignored_deaths(), hr.DataLoader(Deadly(21, path), 4, engines=2) as loader:
        assert samples_of(loader) == list(range(64))
    with ignored_deaths(), hr.DataLoader(Deadly(21), 4, engines=2) as loader:
        iterator = iter(loader)
        assert samples_of(next(iterator) for _ in range(5)) == list(range(20))
        named = "2 engines have ended while they made batch 5 and nothing else: .* exited with code 3"
        with pytest.raises(hr.errors.WorkerDiedError, match=named):
            next(iterator)
        assert samples_of(iterator) == list(range(24, 64))


@run_by("case")
def test_trace_has_the_fetches_of_every_engine(tmp_path: Any) -> None:
    path = str(tmp_path / "trace.json.gz")
    pids = set()
    with (
        ignored_deaths(),
        hr.DataLoader(Slow(240), 4, engines=2, concurrency=16) as loader,
        hr.trace(path),
    ):
        for _ in killing(loader, {0: [0]}):
            pids.update(engines_of(loader))
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert len(pids) == 3
    assert {event["pid"] for event in events if event["ph"] == "b"} >= pids


class NoEpoch(Numbers):
    def __init__(self) -> None:
        super().__init__(32)
        self.made_in = os.getpid()

    def set_epoch(self, epoch: int) -> None:
        if epoch == 1 and os.getpid() != self.made_in:
            raise ValueError("no such epoch")


@run_by("case")
def test_error_of_set_epoch_in_an_engine_ends_the_epoch() -> None:
    with hr.DataLoader(NoEpoch(), 4, engines=2) as loader:
        list(loader)
        with pytest.raises(ValueError, match="no such epoch"):
            list(loader)


class Hangs(Numbers):
    async def aget(self, index: int) -> int:
        if index == 9:
            await asyncio.Event().wait()
        return index


@run_by("case")
def test_timeout_names_the_stage_in_any_engine() -> None:
    with hr.DataLoader(Hangs(32), 4, engines=2, timeout=2) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(
            hr.errors.LoaderTimeoutError, match=r"batch 2 is in stage fetch"
        ) as caught:
            next(iterator)
        assert caught.value.batch == 2


_number = -1


def keep_number(number: int) -> None:
    global _number
    _number = number


def number_of_worker(sample: int) -> int:
    return _number


@run_by("case")
def test_workers_of_all_engines_have_numbers_of_their_own() -> None:
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    with hr.DataLoader(
        Slow(240),
        2,
        engines=2,
        num_workers=3,
        worker_init_fn=keep_number,
        transform=number_of_worker,
    ) as loader:
        assert set(samples_of(loader)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("dataset", "arguments", "match"),
    [
        (
            Numbers(32),
            {"engines": 2, "placement": "thread"},
            "engines=2 and placement='thread' exclude each other",
        ),
        (
            Numbers(32),
            {"engines": 3, "num_workers": 2},
            "num_workers must be 0 or at least 3, but got 2",
        ),
        (Numbers(32), {"engines": 0}, "engines=0 must be at least 1"),
        (
            [0, 1],
            {"engines": 2},
            "engines=2 needs an async dataset: a torch dataset is read by num_workers",
        ),
    ],
)
def test_arguments_that_exclude_each_other(
    dataset: Any, arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        hr.DataLoader(dataset, **arguments)
