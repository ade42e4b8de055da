"""What type checkers make of a user's program."""

from pathlib import Path

from mypy import api

PROGRAM = """
from collections.abc import AsyncIterator
from typing import Any, assert_type

import headrace as hr
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset


class Map(hr.AsyncDataset[int]):
    def __len__(self) -> int: return 3
    async def aget(self, index: int) -> int: return index


class Stream(hr.AsyncIterableDataset[str]):
    async def __aiter__(self) -> AsyncIterator[str]:
        yield "a"


class DuckMap:
    def __len__(self) -> int: return 3
    async def aget(self, index: str) -> bytes: return b""


class DuckStream:
    async def __aiter__(self) -> AsyncIterator[float]:
        yield 1.0


tensors = hr.DataLoader(TensorDataset(torch.zeros(3)))
loader = hr.DataLoader(Map())
assert_type(loader, hr.DataLoader[int])
assert_type(hr.DataLoader(Map().map(str), transform=len), hr.DataLoader[str])
assert_type(hr.DataLoader(Stream(), batch_size=None), hr.DataLoader[str])
assert_type(hr.DataLoader(DuckMap()), hr.DataLoader[bytes])
assert_type(hr.DataLoader(DuckStream()), hr.DataLoader[float])
part = hr.DataLoader(Subset(Map(), [1]))
numbers = hr.DataLoader([1, 2])
assert_type(hr.DataLoader(hr.concat([Map(), Map()])), hr.DataLoader[Any])
files = hr.DataLoader(hr.FileDataset("."))
annotated: hr.DataLoader[Any] = hr.DataLoader(DuckMap())
for batch in loader:
    print(batch)


class OnDevice(hr.DataLoader[int]):
    pass


OnDevice(Map())
"""


def test_a_loader_needs_no_annotation(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = Path(__file__).parents[1] / "pyproject.toml"
    out, err, code = api.run(["--strict", "--config-file", str(settings), str(program)])
    assert code == 0, out + err


def test_argument_that_is_not_a_dataset_is_a_type_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import headrace as hr\n\nloader = hr.DataLoader(3)\n")
    out, _, code = api.run(["--strict", str(program)])
    assert code == 1
    assert "arg-type" in out
