"""Pinned memory: what torch pins, is pinned; without an accelerator its warning comes, and plain tensors."""

from collections import OrderedDict, UserDict, UserList, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.parity.datasets import LENGTH, Map, Stream, tensors
from tests.parity.harness import assert_same, epochs, parity

ACCELERATED = torch.accelerator.is_available()
Point = namedtuple("Point", ["x", "label"])


def read(same, make=Map, **options):
    """Both loaders with `pin_memory`; they warn if there is no accelerator. Where batches lie is compared, too."""
    options = {"batch_size": 4, "pin_memory": True, **options}
    return same(
        lambda DataLoader: epochs(DataLoader(make(), **options), 1)[0],
        warns=not ACCELERATED,
    )


@parity("`pin_memory` on tensors, of map-style datasets and of streams")
def test_tensors_are_pinned(same):
    for make in (Map, Stream):
        for batch in read(same, make):
            assert all(tensor.is_pinned() is ACCELERATED for tensor in batch)


def in_containers(samples):
    x = torch.stack([x for x, _ in samples])
    return {
        "tuple": (x, x + 1),
        "list": [x, "text", b"bytes", 3, None],
        "named": Point(x, [x]),
        "ordered": OrderedDict(x=x),
        "user's": (UserDict(x=x), UserList([x])),
        "nested": {"a": [{"b": (x,)}]},
    }


@parity("`pin_memory` on containers keeps their classes")
def test_containers_are_pinned(same):
    read(same, collate_fn=in_containers)


def packed(samples):
    return pack_sequence(
        [torch.arange(label + 1.0) for _, label in samples], enforce_sorted=False
    )


@parity("`pin_memory` on a `PackedSequence`")
def test_packed_sequences_are_pinned(same):
    for batch in read(same, collate_fn=packed):
        assert isinstance(batch, PackedSequence)
        assert batch.is_pinned() is ACCELERATED


class Batch:
    """A user's own batch, that knows how it is pinned."""

    def __init__(self, samples):
        self.labels = [label for _, label in samples]
        self.pinned = 0

    def pin_memory(self):
        self.pinned += 1
        return self

    def __eq__(self, other):
        return vars(self) == vars(other)


@parity(
    "a batch of a user's class: `pin_memory()` of the class is called, once, if there is an accelerator"
)
def test_custom_pin_memory_is_called(same):
    assert {batch.pinned for batch in read(same, collate_fn=Batch)} == {int(ACCELERATED)}


@pytest.mark.skipif(
    ACCELERATED, reason="with an accelerator the test above has a real one"
)
@parity(
    "a batch of a user's class: `pin_memory()` of the class is called, once, if there is an accelerator"
)
def test_custom_pin_memory_is_called_with_an_accelerator(same, monkeypatch):
    # No tensor is pinned here, so none is needed: torch has only to say that there is one. torch's
    # loader is compared without workers, since its pinning thread would ask for the device.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    def program(DataLoader):
        options = {} if DataLoader.is_ours else {"num_workers": 0}
        collates = [
            Batch,
            lambda samples: {"a": [Batch(samples), (Batch(samples), "text", 3)]},
        ]
        return [
            epochs(
                DataLoader(
                    Map(), batch_size=4, pin_memory=True, collate_fn=collate, **options
                ),
                1,
            )
            for collate in collates
        ]

    ((first, *_),), ((second, *_),) = same(program)
    assert first.pinned == second["a"][0].pinned == second["a"][1][0].pinned == 1


@parity("without an accelerator torch's warning, at each epoch, and unpinned batches")
def test_missing_accelerator_warns_as_in_torch(same):
    def program(DataLoader):
        loader = DataLoader(Map(), batch_size=4, pin_memory=True)  # nothing is said yet
        return epochs(loader)

    torchs = same(program, warns=not ACCELERATED)
    plain = same.torchs(lambda DataLoader: epochs(DataLoader(Map(), batch_size=4)))
    if not ACCELERATED:
        assert_same(torchs, plain.result)
        assert len(same.ours(program).warned) == 2


@pytest.mark.parametrize("pin", [True, False])
@parity(
    "`pin_memory_device` is accepted; with `pin_memory` torch's warning says that it is deprecated"
)
def test_pin_memory_device_is_accepted_as_in_torch(same, pin):
    def program(DataLoader):
        loader = DataLoader(Map(), batch_size=4, pin_memory=pin, pin_memory_device="cuda")
        return loader.pin_memory_device, list(loader)

    same(program, warns=pin)


@parity("`pin_memory` without batches, and with `TensorDataset`")
def test_samples_without_batches_are_pinned(same):
    assert len(read(same, batch_size=None)) == LENGTH
    if not same.setting.asynchronous:
        read(same, tensors)


@parity("`pin_memory` may be set between epochs", warns=not ACCELERATED)
def test_pin_memory_set_between_epochs_takes_effect(DataLoader):
    loader = DataLoader(Map(), batch_size=4)
    first = list(loader)
    loader.pin_memory = True
    return first, list(loader)
