"""Batches in shared memory: right in shortages, and unchanged for as long as any view of them is alive."""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import typing
import warnings

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import headrace as hr
from tests.faults.watching import Numbers, in_processes
from tests.programs import run_by

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

PLACEMENTS = pytest.mark.parametrize("placement", ["thread", "process"])


def row(index, columns=32 * 1024):
    """A row filled with its index, so that a batch shows whether it is whole."""
    return torch.full((columns,), index, dtype=torch.int64)


def check(number, batch, size=4):
    expected = torch.arange(number * size, (number + 1) * size)[:, None]
    assert batch.shape[0] == size, (number, batch)
    assert (batch == expected).all(), (number, batch)


@run_by("case")
def test_shortage_of_shared_memory_falls_back_to_sockets() -> None:
    import numpy.random  # while there are descriptors to import it with

    def small_files_only(worker=None):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    class Limits(Numbers):
        # Where aget runs; samples for workers and batches need larger files.
        async def aget(self, index):
            small_files_only()
            return row(index)

    def fail(name, after):
        calls, function = itertools.count(), getattr(os, name)

        def failing(*arguments, **keywords):
            if next(calls) >= after:
                raise OSError(28, "No space left on device")
            return function(*arguments, **keywords)

        setattr(os, name, failing)

    shortages = {
        "no memfd": lambda worker: fail("memfd_create", 0),
        "no memory": lambda worker: fail("posix_fallocate", 0),
        "no more memory in mid-epoch": lambda worker: fail("posix_fallocate", 1),
        "small files only": small_files_only,
        "no descriptors": lambda worker: (
            numpy.random and resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        ),
        "in the fetching process": None,
    }
    for name, initialise in shortages.items():
        dataset, transform = (Numbers(40), row) if initialise else (Limits(40), abs)
        with in_processes(
            dataset, transform=transform, worker_init_fn=initialise
        ) as loader:
            for number, batch in enumerate(loader):
                check(number, batch)
        assert number == 9, (name, number)


@run_by("case")
def test_batches_of_changing_sizes_are_whole() -> None:
    sizes = [1, 100, 10_000, 100_000, 1_000_000, 5, 1_000_001, 0, 200_000, 3]

    class Grows(Numbers):
        async def aget(self, index):
            return row(index, sizes[index // 2])

    kept = []
    loader = hr.DataLoader(
        Grows(2 * len(sizes)), 2, num_workers=2, transform=torch.neg, placement="process"
    )
    with loader:
        for number, batch in itertools.chain(enumerate(loader), enumerate(loader)):
            assert batch.shape == (2, sizes[number])
            check(number, -batch, size=2)
            kept.append((number, batch[:, :1000]))
    for number, batch in kept:
        check(number, -batch, size=2)


@dataclasses.dataclass
class Record:
    image: torch.Tensor
    label: str


class Pair(typing.NamedTuple):
    left: torch.Tensor
    right: np.ndarray


def big(index):
    return torch.arange(index, index + 20_000, dtype=torch.float32)


# The default collate, of tensors, arrays, and containers of both: tests/parity/test_collation.py.
RETURNED = {
    "string": lambda index: "ü" * index,
    "nested": lambda index: {
        "a": [big(index), {"b": (index, "s")}],
        "c": big(index).numpy(),
    },
    "namedtuple": lambda index: Pair(big(index), big(index).numpy()),
    "bytes": lambda index: b"y" * 50_000,
    "requires_grad": lambda index: big(index).requires_grad_(),
    "sparse": lambda index: torch.eye(50).mul(index).to_sparse(),
    "nested tensor": lambda index: torch.nested.nested_tensor(
        [big(index), big(index)[:5]]
    ),
    "quantized": lambda index: torch.quantize_per_tensor(
        big(index), 0.5, 3, torch.qint32
    ),
    "object array": lambda index: np.array(
        [index, "s", None, {"k": index}], dtype=object
    ),
    "PackedSequence": lambda index: pack_sequence([big(index), big(index)[:7]]),
    "dataclass": lambda index: Record(big(index), "label"),
    "parameter": lambda index: torch.nn.Parameter(big(index)),
    "one tensor twice": lambda index: [big(index)] * 2,
    "more arrays than one sendmsg takes": lambda index: [
        np.full(3, index) for _ in range(1500)
    ],
}


def everything(index):
    return {name: make(index) for name, make in RETURNED.items()}


class Everything(Numbers):
    async def aget(self, index):
        return everything(index)


@PLACEMENTS
@run_by("case")
def test_every_type_of_payload_arrives_unchanged(placement: str) -> None:
    """Of large tensors the beginning and the end are compared: other tests compare all values."""
    warnings.simplefilter("ignore")  # torch's, of beta features
    for dataset, transform in (Everything(4), None), (Numbers(4), everything):
        with in_processes(
            dataset, transform=transform, placement=placement, collate_fn=list
        ) as loader:
            (samples,) = loader
        for index, sample in enumerate(samples):
            for name, expected in everything(index).items():
                assert repr(sample[name]) == repr(expected), (name, sample[name])


@run_by("case")
def test_delivered_tensors_and_arrays_are_writable() -> None:
    def both(samples):
        stacked = torch.stack(samples)
        return stacked, stacked.numpy().copy(), stacked[:, :2], np.arange(3)

    warnings.simplefilter("error")
    for collate_fn in (None, both):
        with in_processes(Numbers(32), transform=row, collate_fn=collate_fn) as loader:
            for number, batch in enumerate(loader):
                for part in [batch] if collate_fn is None else batch:
                    before = torch.as_tensor(part).clone()
                    part += 1
                    assert torch.equal(torch.as_tensor(part), before + 1)


@PLACEMENTS
@run_by("case")
def test_memory_is_not_reused_while_any_view_of_it_lives(placement: str) -> None:
    views = {
        "one row": lambda batch: batch[1],
        "numpy": lambda batch: batch.numpy(),
        "a memoryview": lambda batch: memoryview(batch.numpy()),
        "bytes of another dtype": lambda batch: batch.view(torch.uint8).view(-1)[100:],
        "what autograd saved": lambda batch: (
            (torch.ones(4, 1, requires_grad=True) * batch.double()).grad_fn
        ),
    }

    def bytes_of(view):
        if hasattr(view, "_saved_other"):
            view = view._saved_other
        return np.asarray(view).tobytes()

    kept = []
    with in_processes(Numbers(240), transform=row, placement=placement) as loader:
        for epoch in range(2):
            for number, batch in enumerate(loader):
                check(number, batch)
                if number % 3 == 0:
                    name = list(views)[number // 3 % len(views)]
                    view = views[name](batch)
                    kept.append((name, number, view, hash(bytes_of(view))))
                del batch
        for name, number, view, seen in kept:
            assert hash(bytes_of(view)) == seen, (name, number)
    for name, number, view, seen in kept:  # and the memory outlives the loader
        assert hash(bytes_of(view)) == seen, (name, number)
