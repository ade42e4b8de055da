"""Batches and functions as Ray carries them."""

import numpy as np
import pytest
import torch

from headrace._core.links.ray_wire import IN_BAND, unpack, unpack_views
from headrace._core.links.ray_wire import pack as pack_message
from headrace._core.transport.pickling import dump_message


def pack(obj):
    return pack_message(dump_message(obj))


def sample(size):
    return {"tensor": torch.arange(size, dtype=torch.uint8), "empty": np.empty((0, 3)), "name": "a", "view": np.ones(3)}


def read_only(packed):
    """What Ray gives back: the same, its arrays in memory that must not be written to."""
    if isinstance(packed, bytes):
        return packed
    for array in packed[1]:
        array.flags.writeable = False
    return packed


@pytest.mark.parametrize("size", [10, IN_BAND + 1], ids=["one byte string", "arrays"])
def test_object_arrives_equal_and_in_memory_of_its_own(size):
    packed = read_only(pack(sample(size)))
    assert isinstance(packed, bytes) == (size < IN_BAND)
    found = unpack(packed)
    expected = sample(size)
    found["tensor"] += 1
    found["view"] += 1
    assert torch.equal(found["tensor"], expected["tensor"] + 1)
    assert found["view"].tolist() == [2.0, 2.0, 2.0]
    assert found["empty"].shape == (0, 3)
    again = unpack(packed)
    assert torch.equal(again["tensor"], expected["tensor"])


@pytest.mark.parametrize("size", [10, IN_BAND + 1], ids=["one byte string", "arrays"])
def test_views_are_equal_without_a_warning(size):
    found = unpack_views(read_only(pack(sample(size))))
    assert torch.equal(found["tensor"], sample(size)["tensor"])
    assert found["empty"].shape == (0, 3)


def test_function_of_a_script_is_sent_by_value():
    double = unpack_views(pack(lambda value: 2 * value))
    assert double(4) == 8
