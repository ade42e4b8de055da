"""Small tensors that were packed are as independent of each other as tensors that were sent alone."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace._core.transport.pickling import NUMPY_DTYPES, PickledPayload, dump_message, load_message

DTYPES = [
    *NUMPY_DTYPES, torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def there_and_back(obj):
    """As a batch travels: its payload is pickled in a worker, forwarded, and unpickled by the consumer."""
    message = dump_message(PickledPayload.dumps(obj))
    buffers = [memoryview(bytearray(buffer)) for buffer in message.buffers]
    return load_message(message.pickled, buffers).loads()


def columns(count=5, shape=(4, 2)):
    return {f"column {number}": torch.full(shape, float(number)) for number in range(count)}


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4)], ids=str)
def test_tensors_of_any_dtype_and_shape(dtype, shape):
    size = torch.Size(shape).numel() * dtype.itemsize
    tensors = [
        (torch.arange(size) % (2 + number)).to(torch.uint8).clamp(max=1).view(dtype).reshape(shape)
        if size
        else torch.empty(shape, dtype=dtype)
        for number in range(3)
    ]
    came = there_and_back([*tensors, torch.ones(7), *tensors])
    assert torch.equal(came[3], torch.ones(7))
    for tensor, received in zip(tensors * 2, came[:3] + came[4:], strict=True):
        assert (received.dtype, received.shape, received.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert as_bytes(received) == as_bytes(tensor)


@given(st.lists(st.tuples(st.sampled_from([torch.int64, torch.bool, torch.float32]), st.integers(0, 5)), max_size=30))
def test_tensors_arrive_in_their_places_among_other_values(kinds):
    batch = [
        [torch.full((size,), number).to(dtype), {"bytes": np.full(size, number), "tensor": torch.tensor(number)}]
        for number, (dtype, size) in enumerate(kinds)
    ]
    for number, (tensor, others) in enumerate(there_and_back(batch)):
        assert torch.equal(tensor, batch[number][0])
        assert tensor.dtype == batch[number][0].dtype
        assert np.array_equal(others["bytes"], batch[number][1]["bytes"])
        assert others["tensor"].item() == number


def test_writing_to_one_tensor_leaves_the_others_and_their_gradients_alone():
    batch = there_and_back(columns())
    weight = torch.ones(4, 2, requires_grad=True)
    loss = (weight * batch["column 2"]).sum()
    batch["column 1"].mul_(10)
    batch["column 3"].fill_(-1)
    loss.backward()  # the tensors share no version counter: this one was not written to
    assert torch.equal(weight.grad, torch.full((4, 2), 2.0))
    assert torch.equal(batch["column 2"], torch.full((4, 2), 2.0))
    batch["column 4"] *= weight  # nor is any the view of another, which autograd would not let change in place
    assert batch["column 4"].requires_grad


def test_each_tensor_has_a_storage_of_its_own():
    batch = there_and_back(columns())
    for tensor in batch.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
    saved = io.BytesIO()
    torch.save(batch["column 1"], saved)
    alone = io.BytesIO()
    torch.save(torch.full((4, 2), 1.0), alone)
    assert len(saved.getvalue()) == len(alone.getvalue())
    assert len(pickle.dumps(batch["column 1"])) == len(pickle.dumps(torch.full((4, 2), 1.0)))
    assert copy.deepcopy(batch["column 1"]).untyped_storage().nbytes() == 32
