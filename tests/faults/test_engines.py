"""`engines=`: the batches of one engine, from several; any of them may die."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import hashlib
import json
import os
import pickle
import random
import threading
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
    kill,
    once_each,
    run_on,
    text_of,
)

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


@contextlib.contextmanager
def ignored_deaths() -> Iterator[None]:
    """Show no warning of a replaced engine."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "engine . of", RuntimeWarning)
        yield


def noisy(index: int) -> torch.Tensor:
    return index + torch.rand(2)


async def collected(loader: hr.DataLoader) -> list[Any]:
    return [sample async for batch in loader for sample in batch.tolist()]


def test_batches_are_the_same_bytes_for_any_number_of_engines(case: Any) -> None:
    def program() -> None:
        found = {}
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # of torch: few cores here
        for engines, workers in ((1, 2), (2, 0), (3, 3)):
            with hr.DataLoader(
                Numbers(60), 5, shuffle=True, seed=7, num_workers=workers, transform=noisy, engines=engines
            ) as loader:
                found[engines, workers] = [digest(loader) for _ in range(2)]
                where = "engines=" if engines > 1 else "an async dataset with workers"
                assert where in loader.stats().placement, loader.stats()
        assert len(set(map(tuple, found.values()))) == 1, found
        assert len(set(found[2, 0])) == 2  # epochs differ

    case(program)


@pytest.mark.parametrize("loop", ["uvloop", "trio"])
def test_async_for_on_any_loop(case: Any, loop: str) -> None:
    def program() -> None:
        with hr.DataLoader(Slow(), 4, engines=2) as loader:
            assert run_on(loop, lambda: collected(loader)) == list(range(64))

    case(program)


def killing(loader: hr.DataLoader, kills: dict[int, list[int]]) -> Iterator[Any]:
    """Batches; after those whose numbers are keys, some engines are killed."""
    for number, batch in enumerate(loader):
        yield batch
        if number in kills:
            pids = engines_of(loader)
            kill(*(pids[engine] for engine in kills[number]))


@pytest.mark.parametrize(
    ("in_order", "memory_budget"),  # a batch of each engine at a time; as many as are planned
    [(True, 1), (False, 2**30)],
)
def test_engine_that_is_killed_is_replaced(case: Any, in_order: bool, memory_budget: int) -> None:
    def program() -> None:
        again = r"of 3 \(process .*\) was killed by SIGKILL: it is started again"
        loader = hr.DataLoader(Slow(400), 4, engines=3, in_order=in_order, memory_budget=memory_budget)
        with loader, pytest.warns(RuntimeWarning, match=again):
            samples = samples_of(killing(loader, {10: [0], 40: [1], 70: [2]}))
        assert (samples if in_order else sorted(samples)) == list(range(400))

    case(program)


def test_all_or_all_but_one_are_killed(case: Any) -> None:
    def program() -> None:
        with ignored_deaths(), hr.DataLoader(Slow(240), 4, engines=4) as loader:
            assert samples_of(killing(loader, {10: [1, 2, 3]})) == list(range(240))
            assert len(set(engines_of(loader))) == 4

        with ignored_deaths(), hr.DataLoader(Slow(240), 4, engines=2) as loader:
            every = r"all of its 2 processes.*engine 0 .*SIGKILL; engine 1 .*SIGK"
            with pytest.raises(hr.errors.EngineDiedError, match=every):
                samples_of(killing(loader, {0: [0, 1]}))
            assert samples_of(loader) == list(range(240))  # new engines

    case(program)


def test_order_and_bytes_survive_random_kills(case: Any) -> None:
    """With `HEADRACE_ENGINE_KILLS=50`: 50 in an epoch of 2,500 batches."""

    def program(kills: int) -> None:
        batches, draw = 50 * kills, random.Random(kills)
        moments = {draw.randrange(start, start + 40): [draw.randrange(3)] for start in range(0, batches, 50)}
        # A small look-ahead: what is ready when an engine dies would else be consumed before it has been replaced.
        options: dict[str, Any] = {"shuffle": True, "seed": 3, "transform": noisy, "concurrency": 24}
        with hr.DataLoader(Slow(4 * batches, 0.001), 4, placement="process", **options) as loader:
            expected = digest(loader)
        for memory_budget in (1, 2**30):
            options["memory_budget"] = memory_budget
            with ignored_deaths(), hr.DataLoader(Slow(4 * batches, 0.001), 4, engines=3, **options) as loader:
                assert digest(killing(loader, moments)) == expected
                assert loader.stats().batches == batches

    case(functools.partial(program, KILLS))


def test_state_goes_on_with_another_number_of_engines(case: Any) -> None:
    def program() -> None:
        def new(engines):
            return hr.DataLoader(Slow(100), 4, shuffle=True, seed=5, transform=noisy, engines=engines)

        with new(2) as loader:
            whole = [batch.tolist() for batch in loader]
        given, state = [], None
        for engines in (2, 3, 1, 4):
            with new(engines) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for batch in loader:
                    given.append(batch.tolist())
                    if len(given) % 6 == 0 and engines != 4:
                        break
                state = pickle.loads(pickle.dumps(loader.state_dict()))
        assert given == whole

    case(program)


class Deadly(Numbers):
    """Ends its process at one index: always, or once, at the creation of a file."""

    def __init__(self, index: int, path: Any = None) -> None:
        super().__init__(64)
        self.index, self.path = index, path

    async def aget(self, index: int) -> int:
        if index == self.index and (self.path is None or first_call(self.path)):
            os._exit(3)
        return index


def test_sample_that_ends_one_engine_or_every_engine(case: Any, tmp_path: Any) -> None:
    """Another engine fetches it; or its batch is named."""

    def program(path: str) -> None:
        with ignored_deaths(), hr.DataLoader(Deadly(21, path), 4, engines=2) as loader:
            assert samples_of(loader) == list(range(64))
        with ignored_deaths(), hr.DataLoader(Deadly(21), 4, engines=2) as loader:
            iterator = iter(loader)
            assert samples_of(next(iterator) for _ in range(5)) == list(range(20))
            named = "they made batch 5 and nothing else: .* exited with code 3"
            with pytest.raises(hr.errors.EngineDiedError, match=named):
                next(iterator)

    case(functools.partial(program, str(tmp_path / "died")))


def test_trace_has_the_fetches_of_every_engine(case: Any, tmp_path: Any) -> None:
    def program(path: str) -> None:
        pids = set()
        with ignored_deaths(), hr.DataLoader(Slow(240), 4, engines=2, concurrency=16) as loader, hr.trace(path):
            for _ in killing(loader, {0: [0]}):
                pids.update(engines_of(loader))
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        assert len(pids) == 3
        assert {event["pid"] for event in events if event["ph"] == "b"} >= pids

    case(functools.partial(program, str(tmp_path / "trace.json.gz")))


class Failing(Numbers):
    async def aget(self, index: int) -> int:
        if index % 10 == 3:
            raise OSError(f"no object {index}")
        return index


def test_errors_of_samples_are_raised_at_their_batch(case: Any) -> None:
    def program() -> None:
        with hr.DataLoader(Failing(), 4, engines=2) as loader:
            delivered, errors = drain(loader)
        assert [str(error) for error in errors] == ["no object 3", "no object 13", "no object 23"]
        assert all("index" in text_of(error) for error in errors)
        assert delivered == once_each(range(4, 12), range(16, 20), range(24, 32))

        with hr.DataLoader(Failing(), 4, engines=2, on_error="skip") as loader:
            with pytest.warns(RuntimeWarning, match="no object 3"):
                delivered, errors = drain(loader)
            assert loader.stats().skipped_samples == 3
        assert not errors
        assert sum(delivered.values()) == 29

    case(program)


class NoEpoch(Numbers):
    def set_epoch(self, epoch: int) -> None:
        if (
            epoch == 1
            and threading.current_thread().name == "MainThread"
            and os.environ.get("_HEADRACE_CONSUMER") is None
        ):
            raise ValueError("no such epoch")


def test_error_of_set_epoch_in_an_engine_ends_the_epoch(case: Any) -> None:
    def program() -> None:
        os.environ["_HEADRACE_CONSUMER"] = "1"
        with hr.DataLoader(NoEpoch(), 4, engines=2) as loader:
            del os.environ["_HEADRACE_CONSUMER"]
            list(loader)
            os.environ["_HEADRACE_CONSUMER"] = "1"
            iterator = iter(loader)
            del os.environ["_HEADRACE_CONSUMER"]
            with pytest.raises(ValueError, match="no such epoch"):
                list(iterator)

    case(program)


class Hangs(Numbers):
    async def aget(self, index: int) -> int:
        if index == 9:
            await asyncio.Event().wait()
        return index


def test_timeout_names_the_engine(case: Any) -> None:
    def program() -> None:
        with hr.DataLoader(Hangs(), 4, engines=2, timeout=2) as loader:
            iterator = iter(loader)
            assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            with pytest.raises(
                hr.errors.LoaderTimeoutError, match=r"batch 2 is in stage fetch.* in engine . of 2"
            ) as caught:
                next(iterator)
            assert caught.value.batch == 2

    case(program)


_number = -1


def keep_number(number: int) -> None:
    global _number
    _number = number


def number_of_worker(sample: int) -> int:
    return _number


def test_workers_of_all_engines_have_numbers_of_their_own(case: Any) -> None:
    def program() -> None:
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        with hr.DataLoader(
            Slow(240), 2, engines=2, num_workers=3, worker_init_fn=keep_number, transform=number_of_worker
        ) as loader:
            assert set(samples_of(loader)) == {0, 1, 2}

    case(program)


def test_stream_is_read_by_one_engine(case: Any) -> None:
    async def numbers():
        for number in range(20):
            yield number

    def program() -> None:
        with hr.DataLoader(hr.from_async_iterable(numbers), 4, engines=2) as loader:
            assert samples_of(loader) == list(range(20))
            assert "of which one reads the stream" in loader.stats().placement

    case(program)


@pytest.mark.parametrize(
    ("dataset", "arguments", "match"),
    [
        (Numbers(), {"engines": 2, "placement": "thread"}, "engines=2 and placement='thread' exclude each other"),
        (Numbers(), {"engines": 3, "num_workers": 2}, "num_workers must be 0 or at least 3, but got 2"),
        (Numbers(), {"engines": 0}, "engines must be an int of at least 1, but got 0"),
        ([0, 1], {"engines": 2}, "engines=2 needs an async dataset: a torch dataset is read by num_workers"),
    ],
)
def test_arguments_that_exclude_each_other(dataset: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hr.DataLoader(dataset, **arguments)
