"""A user's program, for type checkers; it is not run."""

from collections.abc import AsyncIterator
from typing import Any, assert_type

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import headrace as hr


class Map(hr.AsyncDataset[int]):
    def __len__(self) -> int:
        return 3

    async def aget(self, index: int) -> int:
        return index


class Stream(hr.AsyncIterableDataset[str]):
    async def __aiter__(self) -> AsyncIterator[str]:
        yield "a"


class DuckMap:
    def __len__(self) -> int:
        return 3

    async def aget(self, index: str) -> bytes:
        return b""


class DuckStream:
    async def __aiter__(self) -> AsyncIterator[float]:
        yield 1.0


class TorchMap(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3)


class Client:
    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None: ...


async def connect() -> list[str]:
    return []


async def resources() -> None:
    assert_type(await hr.per_loop(Client)(), Client)
    assert_type(await hr.per_loop(connect)(), list[str])
    assert_type(await hr.per_loop(connect, close=list.clear)(), list[str])
    assert_type(await hr.per_loop(lambda: 3)(), int)


def double(x: int) -> int:
    return 2 * x


def collate(samples: list[int]) -> dict[str, torch.Tensor]:
    return {}


@hr.randomized
def noisy(value: int, rng: np.random.Generator) -> float:
    return value + rng.random()


class Augment:
    @hr.randomized
    def __call__(self, value: int, rng: np.random.Generator) -> float:
        return value + rng.random()


assert_type(noisy, hr.types.Randomized[int, float])
assert_type(noisy(3), float)
assert_type(noisy(3, np.random.default_rng(0)), float)
assert_type(Augment()(3), float)
assert_type(hr.DataLoader(Map().map(noisy), batch_size=None), hr.DataLoader[Any])
assert_type(hr.DataLoader(TensorDataset(torch.zeros(3))), hr.DataLoader[Any])
assert_type(hr.DataLoader(Map()), hr.DataLoader[Any])
assert_type(
    hr.DataLoader(Map(), 8, True, num_workers=2, seed=3, concurrency="auto"),
    hr.DataLoader[Any],
)
assert_type(
    hr.DataLoader(Map(), collate_fn=collate), hr.DataLoader[dict[str, torch.Tensor]]
)
assert_type(
    hr.DataLoader(Map(), batch_size=8, num_workers=1, collate_fn=len), hr.DataLoader[int]
)
assert_type(
    hr.DataLoader(Map(), batch_size=8, num_workers="auto", collate_fn=len),
    hr.DataLoader[int],
)
assert_type(hr.DataLoader(Map().map(str), transform=len), hr.DataLoader[Any])
assert_type(hr.DataLoader(Stream(), batch_size=None), hr.DataLoader[Any])
assert_type(hr.DataLoader(Stream()), hr.DataLoader[Any])
assert_type(hr.DataLoader(DuckStream()), hr.DataLoader[Any])
assert_type(hr.DataLoader(TorchMap(), 4), hr.DataLoader[Any])
numbers = hr.DataLoader([1, 2])
part = hr.DataLoader(Subset(Map(), [1]))
assert_type(hr.DataLoader(hr.concat([Map(), Map()])), hr.DataLoader[Any])
assert_type(hr.concat([Map(), Map()]), hr.AsyncDataset[Any])
assert_type(hr.mix([Map(), hr.FileDataset(".")], [1, 1]), hr.AsyncDataset[Any])
assert_type(
    hr.mix({"a": Stream(), "b": Stream()}, {"a": 1, "b": 1}), hr.AsyncIterableDataset[Any]
)
hr.mix([Stream(), Stream()], [(0, [1, 0]), (10, [1, 1])]).take(3)
subsets: Any = hr.mix([Subset(Map(), [1]), Subset(Map(), [2])], [1, 1])
assert_type(hr.decode.image()(b""), torch.Tensor)
assert_type(
    hr.DataLoader(hr.FileDataset("."), transform=hr.decode.image()), hr.DataLoader[Any]
)
decode_fields = hr.decode.fields(jpg=hr.decode.image(), cls=int)
files = hr.DataLoader(hr.FileDataset("."))
annotated: hr.DataLoader[Any] = hr.DataLoader(DuckMap())
for batch in hr.DataLoader(Map(), collate_fn=collate):
    assert_type(batch, dict[str, torch.Tensor])


async def consume() -> None:
    async for batch in hr.DataLoader(Map(), collate_fn=collate):
        assert_type(batch, dict[str, torch.Tensor])


class OnDevice(hr.DataLoader[int]):
    pass


OnDevice(Map())


hr.DataLoader(
    Map(),
    on_error=lambda failure: "skip" if failure.stage is hr.types.Stage.FETCH else "raise",
)
hr.DataLoader(Map(), on_error=hr.SkipErrors(max_share=0.1))
placed: hr.DataLoader[Any] = hr.DataLoader(
    Map(), placement="process", retry=hr.RetryPolicy(), hedge="auto"
)
