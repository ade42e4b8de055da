"""Streams of shards, read by several engines: the batches of one, also when engines die."""

from __future__ import annotations

import functools
import os
import pathlib
import random
import re
import warnings
from typing import Any

import pytest
import torch

import headrace as hr
from tests.faults.test_engines import digest, ignored_deaths, killing, samples_of
from tests.faults.watching import engines_of, first_call, kill

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

KILLS = int(os.environ.get("HEADRACE_ENGINE_KILLS", "4"))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    """Shards of very unequal length."""
    number = 0
    for shard, size in enumerate((90, 4, 160, 30, 1, 75)):
        (tmp_path / f"{shard}.txt").write_text("".join(f"{number + line}\n" for line in range(size)))
        number += size
    return str(tmp_path)


def noisy(line: str) -> torch.Tensor:
    return float(line) + torch.rand(2)


def numbers(line: str) -> int:
    return int(line)


def new(folder: str, transform: Any = noisy, lanes: int | None = None, **options: Any) -> hr.DataLoader:
    data = hr.LinesDataset(f"{folder}/*.txt", shuffle=True, buffer_size=16, chunk_bytes=64)
    loader = hr.DataLoader(data, 4, seed=7, transform=transform, **options)
    loader._control._lanes.wanted = lanes or loader._control._lanes.wanted
    return loader


def test_batches_are_the_same_for_any_number_of_engines(case: Any, folder: str) -> None:
    def program(folder: str) -> None:
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # of torch: few cores here
        with new(folder, lanes=4) as loader:
            expected = [digest(loader), digest(loader)]
            assert loader.stats().samples == 2 * 360
        for engines, workers in ((2, 2), (4, 0)):
            with new(folder, lanes=4, engines=engines, num_workers=workers) as loader:
                assert [digest(loader), digest(loader)] == expected
                assert f"engines={engines}, 4 lanes" in loader.stats().placement

    case(functools.partial(program, folder))


def test_states_continue_with_any_number_of_engines(case: Any, folder: str) -> None:
    """Of which each continues the one before."""

    def program(folder: str) -> None:
        with new(folder, lanes=4) as loader:
            whole = [batch.tolist() for batch in loader]
        given, state = [], None
        for engines in (4, 1, 2, 4):
            with new(folder, engines=engines, lanes=None if engines == 1 else 4) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for batch in loader:
                    given.append(batch.tolist())
                    if len(given) % 23 == 0 and len(given) < 70:
                        break
                state = loader.state_dict()
        assert given == whole

    case(functools.partial(program, folder))


def test_order_and_bytes_survive_random_kills(case: Any, folder: str) -> None:
    """With `HEADRACE_ENGINE_KILLS=50`: 50 in 14 epochs."""

    def program(folder: str, kills: int) -> None:
        draw, died = random.Random(kills), 0
        with new(folder, lanes=5) as expected, new(folder, lanes=5, engines=3) as loader, ignored_deaths():
            while died < kills:
                moments = {number: [draw.randrange(3)] for number in draw.sample(range(85), min(4, kills - died))}
                died += len(moments)
                assert digest(killing(loader, moments)) == digest(expected)

    case(functools.partial(program, folder, KILLS))


def test_restored_epoch_survives_a_kill(case: Any, folder: str) -> None:
    """Also that of fewer lanes than engines: one lane is read by one of them."""

    def program(folder: str) -> None:
        for lanes in (1, 3):
            with new(folder, lanes=lanes) as loader:
                iterator = iter(loader)
                samples_of(next(iterator) for _ in range(20))
                state, expected = loader.state_dict(), digest(iterator)
            with new(folder, engines=4) as loader, ignored_deaths():
                loader.load_state_dict(state)
                with pytest.warns(UserWarning, match=f"read by {lanes} of 4 engines, since its state was saved with"):
                    iterator = iter(loader)
                engine = engines_of(loader)[0]

                def all_killed(iterator=iterator, engine=engine):
                    for number, batch in enumerate(iterator):
                        yield batch
                        if number == 10:
                            kill(engine)

                assert digest(all_killed()) == expected

    case(functools.partial(program, folder))


class Deadly:
    """A filter that ends its process at one line: always, or as often as there are paths."""

    def __init__(self, line: int, *paths: str) -> None:
        self.line, self.paths = str(line), paths

    def __call__(self, line: str) -> bool:
        if line == self.line and (not self.paths or any(map(first_call, self.paths))):
            os._exit(3)
        return True


def deadly(folder: str, line: int, *paths: str) -> hr.DataLoader:
    shards = [f"{folder}/{shard}.txt" for shard in (0, 2)]  # one for each lane
    data = hr.LinesDataset(shards, chunk_bytes=64).filter(Deadly(line, *paths))
    return hr.DataLoader(data, 4, transform=numbers, engines=2)


def test_sample_that_ends_every_engine_is_named(case: Any, folder: str) -> None:
    """By the batch that its lane came to: a filter is applied to samples ahead of those in the batch."""

    def program(folder: str) -> None:
        with ignored_deaths(), deadly(folder, 21) as loader:
            samples: list[int] = []
            with pytest.raises(
                hr.errors.EngineDiedError, match=r"they made batch \d+ and nothing else: .*code 3"
            ) as error:
                samples.extend(sample for batch in loader for sample in batch.tolist())
            number = int(re.search(r"batch (\d+)", str(error.value))[1])
            assert number % 2 == 0
            assert len(samples) == 4 * number

    case(functools.partial(program, folder))


@pytest.mark.parametrize("deaths", [1, 3])
def test_lane_goes_on_in_the_replacement_or_in_another_engine(case: Any, folder: str, deaths: int) -> None:
    def program(folder: str, deaths: int) -> None:
        paths = [f"{folder}/died {death}" for death in range(deaths)]
        message = "it is started again|is not started again in this epoch. Its batches are made again"
        with deadly(folder, 0, *paths) as loader, pytest.warns(RuntimeWarning, match=message):
            samples = samples_of(loader)
        assert sorted(samples) == [*range(90), *range(94, 254)]
        assert samples[:8] == [0, 1, 2, 3, 94, 95, 96, 97]

    case(functools.partial(program, folder, deaths))
