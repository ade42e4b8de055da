"""A pickle in shared memory: loaded by several processes, its large buffers copied once."""

import gc
import os

import numpy as np
import pytest
import torch

from headrace._transport.shared_pickle import LARGE, SharedPickle

MEGABYTE = 1 << 20


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def open_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(MEGABYTE),
        np.asfortranarray(np.arange(MEGABYTE).reshape(1024, 1024)),
        np.arange(MEGABYTE)[::2],
        torch.arange(MEGABYTE),
        torch.rand(16, 3, 64, 64).to(memory_format=torch.channels_last),
        torch.arange(MEGABYTE).to(torch.bfloat16),
        torch.nn.Parameter(torch.rand(MEGABYTE), requires_grad=False),
        np.zeros((0, 4)),
        torch.zeros(0),
        bytes(2 * LARGE),
        bytearray(2 * LARGE),
        "x" * 2 * LARGE,
    ],
    ids=lambda value: type(value).__name__,
)
def test_object_is_restored(value):
    loaded = SharedPickle.dumps({"value": value, "again": value}).loads()
    assert loaded["value"] is loaded["again"]
    assert type(loaded["value"]) is type(value)
    if isinstance(value, torch.Tensor):
        assert torch.equal(loaded["value"], value)
        assert loaded["value"].stride() == value.stride()
        assert loaded["value"].requires_grad == value.requires_grad
    else:
        assert np.array_equal(loaded["value"], value)


def test_pickle_of_an_unchanged_object_is_used_again_and_a_change_of_a_single_element_is_detected():
    held = Holder(
        table=np.zeros(MEGABYTE, dtype=np.uint8), text="x" * 2 * LARGE, strength=1
    )
    first = SharedPickle.dumps(held)
    assert SharedPickle.dumps(held, first) is first
    held.strength = 2
    second = SharedPickle.dumps(held, first)
    assert (second.loads().strength, second.loads().text) == (2, held.text)
    for position in (0, 77_777, -1):
        before = SharedPickle.dumps(held)
        held.table[position] = 1
        assert SharedPickle.dumps(held, before).loads().table[position] == 1
        assert before.loads().table[position] == 0


def test_another_tensor_in_shared_memory_is_a_change():
    held = Holder(shared=torch.zeros(9).share_memory_())
    first = SharedPickle.dumps(held)
    held.shared = torch.zeros(9).share_memory_()
    second = SharedPickle.dumps(held, first)
    assert second is not first
    held.shared.fill_(3)
    assert second.loads().shared.tolist() == [3] * 9


def test_loaded_arrays_are_independent_and_descriptors_are_closed_with_the_last_reference():
    before = open_descriptors()
    table = np.zeros(MEGABYTE)
    shared = SharedPickle.dumps([table, torch.zeros(9).share_memory_()])
    one, other = shared.loads(), shared.loads()
    one[0][:] = 1
    assert not table.any()
    assert not other[0].any()
    assert not shared.loads()[0].any()
    del shared, other
    assert one[0].nbytes == 8 * MEGABYTE
    del one
    assert open_descriptors() == before
