"""Batches and functions as Ray carries them."""

import asyncio

import numpy as np
import pytest
import torch

from headrace._core.links.ray_actor import IN_BAND, _Served, pack, unpack, unpack_views
from headrace._core.transport.pickling import dump_message


@pytest.mark.parametrize("size", [10, IN_BAND + 1], ids=["one byte string", "arrays"])
def test_object_arrives_in_memory_of_its_own_or_as_views_without_a_warning(size):
    tensor = torch.arange(size, dtype=torch.uint8)
    packed = pack(dump_message({"tensor": tensor, "empty": np.empty((0, 3)), "view": np.ones(3)}))
    assert isinstance(packed, bytes) == (size < IN_BAND)
    for array in () if isinstance(packed, bytes) else packed[1]:
        array.flags.writeable = False  # as Ray gives them back
    found = unpack(packed)
    found["tensor"] += 1
    found["view"] += 1
    assert torch.equal(found["tensor"], tensor + 1)
    assert found["view"].tolist() == [2.0, 2.0, 2.0]
    assert found["empty"].shape == (0, 3)
    assert torch.equal(unpack(packed)["tensor"], tensor)
    assert torch.equal(unpack_views(packed)["tensor"], tensor)


def test_function_of_a_script_is_sent_by_value():
    double = unpack_views(pack(dump_message(lambda value: 2 * value)))
    assert double(4) == 8


def test_small_messages_come_in_one_answer_and_a_large_one_alone_in_their_order():
    async def answers(*sizes):
        served = _Served()
        for size in sizes:
            served._put(pack(dump_message(np.ones(size, np.uint8))))
        served.end(None)
        found = [await served.answer() for _ in range(6)]
        return [
            [unpack(each).size for each in answer] if type(answer) is list else unpack(answer)
            for answer in found
        ]

    half = IN_BAND // 2 + 1
    first, large, second, third, *end = asyncio.run(answers(1, 2, 2 * IN_BAND, 3, half, half))
    assert large.nbytes == 2 * IN_BAND
    assert (first, second, third) == ([1, 2], [3, half], [half])
    assert end == [[], []]  # for every call that is made after it
