"""`engines=`: the batches of one engine, from several; any of them may die. A stream is read by one."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import pathlib
import pickle
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
    drain,
    engines_of,
    first_call,
    ignored_deaths,
    kill,
    once_each,
    text_of,
)
from tests.programs import run_by

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

KILLS = int(os.environ.get("HEADRACE_ENGINE_KILLS", "4"))  # 50: as many as docs/faults.md names


def digest(batches: Any) -> str:
    """SHA-256 of the order and the bytes of batches."""
    sha = hashlib.sha256()
    for batch in batches:
        sha.update(batch.numpy().tobytes())
    return sha.hexdigest()


def samples_of(batches: Any) -> list[Any]:
    return [sample for batch in batches for sample in batch.tolist()]


def killing(loader: hr.DataLoader, kills: dict[int, list[int]]) -> Iterator[Any]:
    """Batches; after those whose numbers are keys, some engines are killed."""
    for number, batch in enumerate(loader):
        yield batch
        if number in kills:
            pids = engines_of(loader)
            kill(*(pids[engine] for engine in kills[number]))


# Two datasets of 360 samples: by index, and shards of very unequal length


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    number = 0
    for shard, size in enumerate((90, 4, 160, 30, 1, 75)):
        (tmp_path / f"{shard}.txt").write_text(
            "".join(f"{number + line}\n" for line in range(size))
        )
        number += size
    return str(tmp_path)


def noisy(sample: Any) -> torch.Tensor:
    return float(sample) + torch.rand(2)


def by_index(folder: str, **options: Any) -> hr.DataLoader:
    return hr.DataLoader(Slow(360, 0.001), 4, shuffle=True, seed=7, transform=noisy, **options)


def stream(folder: str, **options: Any) -> hr.DataLoader:
    data = hr.LinesDataset(f"{folder}/*.txt", shuffle=True, buffer_size=16, chunk_bytes=64)
    return hr.DataLoader(data, 4, seed=7, transform=noisy, **options)


@pytest.mark.parametrize("new", [by_index, stream])
@run_by("case")
def test_batches_are_the_same_bytes_for_any_number_of_engines(folder: str, new: Any) -> None:
    found = []
    # of torch: few cores here
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    for engines, workers in ((1, 2), (4, 0), (3, 2 if new is stream else 3)):
        with new(folder, engines=engines, num_workers=workers) as loader:
            found.append([digest(loader), digest(loader)])
            assert loader.stats().samples == 2 * 360
            in_processes = workers or (engines > 1 and new is by_index)
            assert loader.stats().placement == ("process" if in_processes else "thread")
    assert found == found[:1] * 3
    assert found[0][0] != found[0][1], "epochs differ"


@pytest.mark.parametrize("new", [by_index, stream])
@run_by("case")
def test_states_continue_with_another_number_of_engines(folder: str, new: Any) -> None:
    """Of which each continues the one before."""
    with new(folder, engines=2) as loader:
        whole = [batch.tolist() for batch in loader]
    given, state = [], None
    for engines in (4, 1, 2, 3):
        with new(folder, engines=engines) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                given.append(batch.tolist())
                if len(given) % 23 == 0 and len(given) < 70:
                    break
            state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert given == whole


@pytest.mark.parametrize("memory_budget", [None, 1])  # 1: a batch of each engine at a time
@run_by("case")
def test_order_and_bytes_survive_random_kills(folder: str, memory_budget: int | None) -> None:
    """With `HEADRACE_ENGINE_KILLS=50`: 50 in 25 epochs of 90 batches."""
    draw = random.Random(KILLS)
    # A small look-ahead: what is ready when an engine dies would else be consumed before it has
    # been replaced.
    options: dict[str, Any] = {"concurrency": 24, "memory_budget": memory_budget}
    with (
        by_index(folder, **options) as expected,
        by_index(folder, engines=3, **options) as loader,
        ignored_deaths(),
    ):
        for _ in range(KILLS // 2):
            moments = {draw.randrange(start, start + 30): [draw.randrange(3)] for start in (0, 40)}
            assert digest(killing(loader, moments)) == digest(expected)


@pytest.mark.parametrize(
    ("kills", "in_order", "memory_budget"),  # a batch of each engine at a time; as many as planned
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
    loader = hr.DataLoader(Slow(400), 4, engines=3, in_order=in_order, memory_budget=memory_budget)
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
        if int(line) == self.line and (not self.paths or any(map(first_call, self.paths))):
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
        named = (
            "2 engines have ended while they made batch 5 and nothing else: .* exited with code 3"
        )
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


class Failing(Numbers):
    async def aget(self, index: int) -> int:
        if index % 10 == 3:
            raise OSError(f"no object {index}")
        return index


@run_by("case")
def test_errors_of_samples_are_raised_at_their_batch() -> None:
    with hr.DataLoader(Failing(32), 4, engines=2) as loader:
        delivered, errors = drain(loader)
    assert [str(error) for error in errors] == ["no object 3", "no object 13", "no object 23"]
    assert all("index" in text_of(error) for error in errors)
    assert delivered == once_each(range(4, 12), range(16, 20), range(24, 32))

    with hr.DataLoader(Failing(32), 4, engines=2, on_error="skip") as loader:
        with pytest.warns(RuntimeWarning, match="no object 3"):
            delivered, errors = drain(loader)
        assert loader.stats().skipped_samples == 3
    assert not errors
    assert sum(delivered.values()) == 29


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
