"""Batches in shared memory: right in shortages, and unchanged for as long as any view of them is alive."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import resource
import signal
import typing
import warnings

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import headrace as hr
from headrace._core.pool import launch
from tests.faults.watching import Numbers, kill, wait_until, workers
from tests.forks import Forks
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
        with hr.DataLoader(
            dataset,
            4,
            num_workers=2,
            transform=transform,
            worker_init_fn=initialise,
            placement="process",
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


class Graph:
    def __init__(self, nodes):
        self.nodes = nodes

    def __eq__(self, other):
        return type(other) is Graph and same(self.nodes, other.nodes)


def big(index):
    return torch.arange(index, index + 20_000, dtype=torch.float32)


def structured(index):
    return np.array([(index, 2.5)] * 3000, dtype=[("a", "<i4"), ("b", ">f8")])


# Samples that the default collate takes, with the same result as torch's.
COLLATED = {
    "tensor": big,
    "non-contiguous": lambda index: big(index).view(100, 200).t()[::2],
    "0-d": lambda index: torch.tensor(index),
    "empty": lambda index: torch.empty(0, 3),
    "bfloat16": lambda index: big(index).bfloat16(),
    "float8": lambda index: big(index).to(torch.float8_e4m3fn),
    "complex": lambda index: torch.complex(big(index), -big(index)),
    "conjugate": lambda index: torch.complex(big(index), -big(index)).conj(),
    "bool": lambda index: big(index) > index + 5,
    "array": lambda index: big(index).double().numpy(),
    "transposed array": lambda index: big(index).view(100, 200).numpy().T,
    "0-d array": lambda index: np.float64(index),
    "number": lambda index: index / 3,
    "string": lambda index: "ü" * index,
    "bytes": lambda index: b"x" * index * 1000,
    "nested": lambda index: {"a": [big(index), {"b": (index, "s")}], "c": big(index).numpy()},
    "namedtuple": lambda index: Pair(big(index), big(index).numpy()),
    "mixed": lambda index: (big(index), b"y" * 50_000, index),
}
# Batches that only a user's collate_fn returns.
RETURNED = {
    **COLLATED,
    "requires_grad": lambda index: big(index).requires_grad_(),
    "sparse": lambda index: torch.eye(50).mul(index).to_sparse(),
    "sparse csr": lambda index: torch.eye(50).mul(index).to_sparse_csr(),
    "nested tensor": lambda index: torch.nested.nested_tensor([big(index), big(index)[:5]]),
    "quantized": lambda index: torch.quantize_per_tensor(big(index), 0.5, 3, torch.qint32),
    "object array": lambda index: np.array([index, "s", None, {"k": index}], dtype=object),
    "string array": lambda index: np.array(["a", "ü" * index]),
    "structured array": structured,
    "dates": lambda index: np.array(["2024-01-01", "2025-02-03"], dtype="datetime64[D]"),
    "fortran array": lambda index: np.asfortranarray(big(index).view(100, 200).numpy()),
    "view of a view": lambda index: big(index).numpy()[::-3],
    "PackedSequence": lambda index: pack_sequence([big(index), big(index)[:7]]),
    "dataclass": lambda index: Record(big(index), "label"),
    "class": lambda index: Graph({"edges": big(index), "name": "n"}),
    "None": lambda index: None,
    "set": lambda index: {index, "s"},
    "bytearray": lambda index: bytearray(b"z" * 50_000),
    "memoryview": lambda index: memoryview(bytes(range(256)) * 200),
    "dtype": lambda index: (torch.float16, np.dtype("f4"), torch.Size([index])),
    "parameter": lambda index: torch.nn.Parameter(big(index)),
    "one tensor twice": lambda index: [big(index)] * 2,
    "more arrays than one sendmsg takes": lambda index: [np.full(3, index) for _ in range(1500)],
}


def same(ours, theirs):
    if type(ours) is not type(theirs):
        return False
    if dataclasses.is_dataclass(ours):
        return same(vars(ours), vars(theirs))
    if isinstance(ours, torch.Tensor):
        if (ours.dtype, ours.layout, ours.requires_grad) != (
            theirs.dtype,
            theirs.layout,
            theirs.requires_grad,
        ):
            return False
        if ours.is_nested:
            return same(list(ours.unbind()), list(theirs.unbind()))
        if ours.is_quantized:
            return same(ours.dequantize(), theirs.dequantize())
        if ours.layout is not torch.strided:
            return torch.equal(ours.to_dense(), theirs.to_dense())
        return ours.shape == theirs.shape and bits(ours) == bits(theirs)
    if isinstance(ours, np.ndarray):
        return (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and ours.tolist() == theirs.tolist()
        )
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return ours == theirs


def bits(tensor):
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


class Makes(Numbers):
    def __init__(self, make, where):
        self.length, self.make, self.where = 4, make, where

    async def aget(self, index):
        return self.make(index) if self.where == "aget" else index


def itself(samples):
    return list(samples)


@pytest.mark.parametrize(("collate", "placement"), [("default", "thread"), ("user", "process")])
@run_by("case")
def test_every_type_of_payload_arrives_unchanged(placement: str, collate: str) -> None:
    def arrive(make, where, **arguments):
        transform = make if where == "transform" else None
        with hr.DataLoader(
            Makes(make, where), 2, transform=transform, collate_fn=collate_fn, **arguments
        ) as loader:
            return list(loader)

    warnings.simplefilter("ignore")  # torch's, of beta features
    collate_fn = itself if collate == "user" else None
    kinds = RETURNED if collate == "user" else COLLATED
    broken = []

    def everything(index):
        return {name: make(index) for name, make in kinds.items()}

    expected = arrive(everything, "transform", num_workers=0, placement="thread")
    for where in ("transform", "aget"):
        for batch, wanted in zip(
            arrive(everything, where, num_workers=2, placement=placement), expected, strict=True
        ):
            if collate_fn is itself:
                batch, wanted = batch[0], wanted[0]
            broken += [
                (where, name, batch[name], wanted[name])
                for name in kinds
                if not same(batch[name], wanted[name])
            ]
    assert not broken, broken


@run_by("case")
def test_delivered_tensors_and_arrays_are_writable() -> None:
    def both(samples):
        stacked = torch.stack(samples)
        return stacked, stacked.numpy().copy(), stacked[:, :2], np.arange(3)

    warnings.simplefilter("error")
    for collate_fn in (None, both):
        with hr.DataLoader(
            Numbers(32), 4, num_workers=2, transform=row, collate_fn=collate_fn, placement="process"
        ) as loader:
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
        "a slice": lambda batch: batch[1:3, 5:],
        "numpy": lambda batch: batch.numpy(),
        "a slice of numpy": lambda batch: batch.numpy()[2, ::7],
        "a memoryview": lambda batch: memoryview(batch.numpy()),
        "bytes of another dtype": lambda batch: batch.view(torch.uint8).view(-1)[100:],
        "a transposed view": lambda batch: batch.t()[10],
        "what autograd saved": lambda batch: (
            (torch.ones(4, 1, requires_grad=True) * batch.double()).grad_fn
        ),
        "what unbind gave": lambda batch: batch.unbind()[3],
        "an iterator": lambda batch: iter(batch.numpy().ravel()[:100]),
    }

    def bytes_of(view):
        if hasattr(view, "_saved_other"):
            view = view._saved_other
        if hasattr(view, "__next__"):
            view = np.array(list(copy.copy(view)))
        return np.asarray(view).tobytes()

    kept = []
    with hr.DataLoader(
        Numbers(240), 4, num_workers=2, transform=row, placement=placement
    ) as loader:
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


@run_by("case")
def test_resident_memory_does_not_grow_when_batches_are_dropped() -> None:
    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def megabyte(index):
        return torch.full((1024 * 1024,), index % 256, dtype=torch.uint8)

    after = []
    with hr.DataLoader(
        Numbers(600), 4, num_workers=2, transform=megabyte, prefetch_factor=2, placement="process"
    ) as loader:
        for number, batch in enumerate(loader):
            assert batch[3, 17] == (number * 4 + 3) % 256
            if number in (50, 149):
                after.append(resident_bytes())
    assert after[1] - after[0] < 3 * 4 * 2**20, after  # less than three batches, of 100


def test_no_shared_memory_is_left_after_all_processes_of_a_program_are_killed(forks: Forks) -> None:
    def program() -> None:
        class Rows(Numbers):
            async def aget(self, index):
                return torch.full((20_000,), index)

        loader = hr.DataLoader(
            Rows(400), 4, num_workers=2, transform=torch.neg, placement="process"
        )
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(8)]
        wait_until(lambda: len(workers()) == 3)
        print(os.getpid(), launch._zygote.process.pid, *workers(), flush=True)
        list(loader)
        signal.pause()
        del kept

    names_before = set(os.listdir("/dev/shm"))
    with forks.start(program) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 5, pids  # the trainer, the zygote, the sidecar and two workers
        kill(*pids)
    left = {
        name
        for name in set(os.listdir("/dev/shm")) - names_before
        if any(str(pid) in name for pid in pids)
    }
    assert not left
