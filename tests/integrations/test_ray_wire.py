"""Batches and functions as Ray carries them."""

import asyncio

import numpy as np
import pytest
import torch

from headrace._core.links.ray_actor import IN_BAND, NOTHING, _Served, pack, unpack
from headrace._core.messages import StatusRequest
from headrace._core.transport.pickling import dump_message


@pytest.mark.parametrize("size", [10, IN_BAND + 1], ids=["one byte string", "arrays"])
def test_object_arrives_in_memory_of_its_own(size):
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


def test_function_of_a_script_is_sent_by_value():
    double = unpack(pack(dump_message(lambda value: 2 * value)))
    assert double(4) == 8


def test_each_call_gets_the_next_message_and_calls_after_the_end_get_nothing():
    async def answers():
        served = _Served()
        served.send(0, pack(dump_message(StatusRequest(3))))
        served.send(1, pack(dump_message(StatusRequest(4))))
        served.end(None)
        return [await served.answer() for _ in range(4)]

    first, second, *end = asyncio.run(answers())
    assert "batch 3 has not begun" in unpack(first).text
    assert "batch 4 has not begun" in unpack(second).text
    assert end == [NOTHING, NOTHING]
