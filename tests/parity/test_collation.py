"""Collation: what a batch is made of, type for type and dtype for dtype."""

from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils import data

import headrace as hr
from tests.parity.datasets import LENGTH, Map
from tests.parity.harness import ASYNC, NAMES, Raised, drained, epochs, parity

Point = namedtuple("Point", ["x", "label"])


class Made(Map):
    """Samples that a function makes of their index."""

    def __init__(self, make):
        super().__init__(5)
        self.make = make

    def __getitem__(self, index):
        return self.make(super().__getitem__(index)[1])


def batches_of(same, make, fails=False):
    return same(
        lambda DataLoader: epochs(DataLoader(Made(make), batch_size=2), 1), fails=fails
    )


DTYPES = [
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
]


@parity("tensors, of every dtype and shape, also empty and of no dimension")
def test_tensors_are_stacked(same):
    def shapes(i):
        return (
            torch.tensor(i),
            torch.empty(0),
            torch.empty(2, 0),
            torch.arange(6).view(2, 3).T + i,
        )

    batches_of(
        same,
        lambda i: [*(torch.full((2, 3), i).to(dtype) for dtype in DTYPES), *shapes(i)],
    )


@parity("tensors of different dtypes are promoted")
def test_tensors_of_different_dtypes_collate_as_in_torch(same):
    batches_of(
        same, lambda i: torch.ones(2, dtype=torch.int32 if i % 2 else torch.float64)
    )


@parity("tensors that require gradients are refused in workers, for torch's datasets")
def test_tensors_with_gradients_collate_as_in_torch(same):
    fails = same.setting.name == "torch dataset, 2 workers"
    batches_of(same, lambda i: torch.full((2,), float(i)).requires_grad_(), fails)


@parity(
    "torch: without workers a batch can be resized in place; here not if the batch is large"
)
def test_batches_cannot_be_resized_in_place(same):
    dataset = Made(lambda i: (i, torch.zeros(1 << 20)))

    def program(DataLoader):
        resized = []
        for batch in next(iter(DataLoader(dataset, batch_size=2))):
            try:
                batch.resize_(2 * batch.numel())
            except RuntimeError as error:
                resized.append(str(error))
        return resized

    refused = ["Trying to resize storage that is not resizable"]
    assert same.torchs(program).result == (
        refused * 2 if "2 workers" in same.setting.name else []
    )
    assert same.ours(program).result in (refused, refused * 2)


@parity("NumPy arrays and numbers")
def test_arrays_become_tensors(same):
    kinds = [
        np.uint8,
        np.int16,
        np.int64,
        np.bool_,
        np.float16,
        np.float32,
        np.float64,
        np.complex64,
    ]
    shapes = [
        lambda i: np.array(i),
        lambda i: np.empty((0, 2)),
        lambda i: np.arange(6).reshape(2, 3).T + i,
    ]
    arrays = [lambda i, kind=kind: np.full((2, 3), i).astype(kind) for kind in kinds]
    batches_of(same, lambda i: [make(i) for make in [*arrays, *kinds, *shapes]])


@parity("numbers, truth values, strings and bytes")
def test_scalars_become_tensors(same):
    batches_of(same, lambda i: [i, float(i), i % 2 == 0, f"n{i}", bytes([i])])
    batches_of(same, lambda i: i)


@parity("mappings: dicts and other classes are kept")
def test_mappings_are_collated_by_key(same):
    batches_of(
        same,
        lambda i: {
            "a": i,
            "b": torch.tensor([i]),
            "c": {"d": f"n{i}"},
            1: i,
            ("a", 2): i,
        },
    )
    batches_of(
        same, lambda i: [OrderedDict(b=i, a=2 * i), defaultdict(list, a=i), UserDict(a=i)]
    )


@parity("named tuples are kept; tuples and lists become lists of batches")
def test_sequences_are_collated_by_position(same):
    batches_of(same, lambda i: Point(torch.tensor([i]), f"label {i}"))
    batches_of(
        same,
        lambda i: [
            i,
            (i, float(i)),
            (i, [i, "x"]),
            UserList([i, i + 1]),
            range(i, i + 2),
        ],
    )


@parity("all of the above within each other")
def test_nested_samples_are_collated_recursively(same):
    batches_of(
        same,
        lambda i: {"a": [Point(np.full(2, i), {"b": (i, [torch.tensor(i)])})], "c": ()},
    )


RAGGED = {
    "tensors": lambda i: torch.ones(i + 1),
    "lists": lambda i: [0] * (i + 1),
    "None": lambda i: None if i else 1,
    "an unknown class": lambda i: object(),
    "arrays of strings": lambda i: np.array(["a"]),
    "arrays of objects": lambda i: np.array([None], dtype=object),
    "keys that are missing": lambda i: {"a": 1} if i else {"a": 1, "b": 2},
    "arrays": lambda i: np.ones(i + 1),
    "nothing but None": lambda i: None,
}


@pytest.mark.parametrize("kind", [kind for kind in RAGGED if "None" not in kind])
@parity("samples that do not fit together are an error, with torch's message")
def test_ragged_samples_fail_as_in_torch(same, kind):
    batches_of(same, RAGGED[kind], fails=True)


@parity(
    "without batches, an array of a type that torch lacks is an error, and iteration goes on"
)
def test_unknown_array_type_fails_as_in_torch(same):
    def program(DataLoader):
        dataset = Made(lambda i: np.array([i], "M8[s]") if i == 1 else np.full(2, i))
        return drained(iter(DataLoader(dataset, batch_size=None)))

    assert [type(sample) for sample in same(program)].count(Raised) == 1


@pytest.mark.parametrize("kind", ["nothing but None", "None"])
@parity(
    "None in a sample is an error",
    not_for=dict.fromkeys(ASYNC, "a field that is None in all samples stays None"),
)
def test_none_fails_as_in_torch(same, kind):
    batches_of(same, RAGGED[kind], fails=True)


@dataclass
class Batch:
    x: torch.Tensor
    names: list


def to_batch(samples):
    return Batch(
        torch.stack([x for x, _ in samples]), [str(label) for _, label in samples]
    )


COLLATES = {
    "list": list,
    "a lambda": lambda samples: {"all": samples},
    "a class": to_batch,
    "nothing": lambda samples: None,
    "a partial": lambda samples: (
        torch.tensor([label for _, label in samples]),
        samples[0][0].numpy(),
        {"n", "m"},
    ),
}


@pytest.mark.parametrize("kind", COLLATES)
@parity("`collate_fn`: a user's function may return anything")
def test_users_collate_fn_is_called_as_in_torch(same, kind):
    same(
        lambda DataLoader: epochs(
            DataLoader(Map(), batch_size=4, collate_fn=COLLATES[kind])
        )
    )


class Counting:
    """An object with `__call__`, that keeps count of the samples it has seen."""

    def __init__(self):
        self.seen = 0

    def __call__(self, samples):
        self.seen += len(samples)
        return self.seen


@parity(
    "`collate_fn` as an object with a state, of the caller's where there are no workers",
    not_for={
        name: "each worker has a copy"
        for name in NAMES
        if "workers" in name and "0" not in name
    },
)
def test_unknown_class_fails_as_in_torch(same):
    def program(DataLoader):
        collate = Counting()
        return epochs(DataLoader(Map(), batch_size=4, collate_fn=collate)), collate.seen

    assert same(program)[1] == 2 * LENGTH


@parity(
    "`default_collate`, `default_convert` and `get_worker_info` from the package itself"
)
def test_reexported_functions_are_torchs(same):
    def program(DataLoader):
        package = hr if DataLoader.is_ours else data
        with_collate = DataLoader(Map(), batch_size=4, collate_fn=package.default_collate)
        with_convert = DataLoader(
            Map(), batch_size=None, collate_fn=package.default_convert
        )
        return list(with_collate), list(with_convert), package.get_worker_info()

    same(program)
    assert hr.default_convert is data.default_convert
    assert hr.get_worker_info is data.get_worker_info
