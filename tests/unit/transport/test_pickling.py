"""Pickling restores values, types, shapes, and the identity of classes."""

import pickle
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

from headrace._transport.pickling import (
    PickledPayload,
    dump_message,
    load_message,
    picklable_error,
)
from headrace.errors import RemoteError

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def there_and_back(obj):
    """As the channel does: the buffers are copied, and the copies are read."""
    packed = dump_message(obj)
    return load_message(
        packed.pickled, [memoryview(bytearray(buffer)) for buffer in packed.buffers]
    )


def as_bytes(tensor):
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .tolist()
    )


def as_a_batch(obj):
    """As a batch travels: its payload is pickled in a worker, forwarded, and unpickled by the consumer."""
    return there_and_back(PickledPayload.dumps(obj)).loads()


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)], ids=str)
def test_tensor_of_any_dtype_and_shape(shape):
    for dtype in DTYPES:
        size = torch.Size(shape).numel() * dtype.itemsize
        zeros_and_ones = (torch.arange(size) % 2).to(torch.uint8)
        tensor = (
            zeros_and_ones.view(dtype).reshape(shape)
            if size
            else torch.empty(shape, dtype=dtype)
        )
        one, other, another = as_a_batch([tensor, torch.ones(7), tensor.clone()])
        assert torch.equal(other, torch.ones(7))
        for came in there_and_back(tensor), one, another:
            assert (came.dtype, came.shape, came.stride()) == (
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
            )
            assert as_bytes(came) == as_bytes(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12)[::3],
        torch.arange(12).reshape(3, 4)[1:, 2:],
        torch.arange(24).reshape(2, 3, 4)[1:].permute(2, 0, 1),
        torch.randn(3, 4, dtype=torch.complex64).T.conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=[
        "transposed",
        "strided",
        "slice",
        "permuted slice",
        "conjugated",
        "negated",
        "channels-last",
    ],
)
def test_dense_layout_is_kept_and_any_other_becomes_contiguous(tensor):
    came = there_and_back(tensor)
    assert torch.equal(came, tensor)
    assert came.stride() == torch.empty_like(tensor).stride()
    came[...] = 0  # and it can be written to, each element by itself


def test_number_with_the_negative_bit_arrives_negated():
    number = torch.randn(1, dtype=torch.complex64).conj().imag
    assert torch.equal(there_and_back(number), number)


@pytest.mark.parametrize(
    "expanded",
    [
        torch.zeros(()).expand(4_000_000_000),
        torch.arange(6.0).reshape(2, 3).T.unsqueeze(0).expand(10, 3, 2),
        torch.arange(3.0).requires_grad_().expand(4, 3).detach().requires_grad_(),
    ],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
def test_expanded_tensor_arrives_expanded(expanded):
    came = there_and_back(expanded)
    assert (came.shape, came.dtype, came.requires_grad) == (
        expanded.shape,
        expanded.dtype,
        expanded.requires_grad,
    )
    if expanded.numel() < 1e6:
        assert torch.equal(came, expanded)
    if not expanded.requires_grad:
        assert came.untyped_storage().nbytes() <= expanded.untyped_storage().nbytes()


@pytest.mark.parametrize(
    "array",
    [
        np.frombuffer(bytes(range(24)), dtype=np.uint8),
        np.frombuffer(bytes(range(24)), dtype=">u2").reshape(3, 4)[:, ::2],
        np.frombuffer(b"", dtype=np.float32),
        np.broadcast_to(np.arange(3), (4, 3)),
        np.frombuffer(bytes(16), dtype="M8[ns]"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_read_only_array_arrives_writable(array):
    came = there_and_back(array)
    assert came.flags.writeable
    assert (came.dtype, came.shape, came.tolist()) == (
        array.dtype,
        array.shape,
        array.tolist(),
    )
    came[...] = came[::-1].copy()


@pytest.mark.parametrize(
    "view",
    [
        memoryview(b""),
        memoryview(bytearray(b"abc"))[1:],
        memoryview(b"abcdef")[::2],
        memoryview(np.arange(6, dtype=np.int32).reshape(2, 3).T),
        memoryview(np.array(5, dtype=np.int16)),
    ],
    ids=lambda view: f"{view.format}{view.shape}{view.strides}",
)
def test_memoryview_of_any_shape(view):
    came = there_and_back(view)
    assert isinstance(came, memoryview)
    assert (came.format, came.shape, came.tolist()) == (
        view.format,
        view.shape,
        view.tolist(),
    )


# Small tensors are as independent of each other as tensors that are sent alone.


def columns(count):
    return {
        f"column {number}": torch.full((4, 2), float(number)) for number in range(count)
    }


@pytest.mark.parametrize("count", [5, 50])
def test_tensors_of_a_batch_are_independent(count):
    batch = as_a_batch(columns(count))
    weight = torch.ones(4, 2, requires_grad=True)
    loss = (weight * batch["column 2"]).sum()
    batch["column 1"].mul_(10)
    batch["column 3"].fill_(-1)
    loss.backward()  # the tensors share no version counter: this one was not written to
    assert torch.equal(weight.grad, torch.full((4, 2), 2.0))
    assert torch.equal(batch["column 2"], torch.full((4, 2), 2.0))
    # nor is any the view of another, which autograd would not let change in place
    batch["column 4"] *= weight
    assert batch["column 4"].requires_grad
    for tensor in batch.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
    assert len(pickle.dumps(batch["column 1"])) == len(
        pickle.dumps(torch.full((4, 2), 1.0))
    )


LABELS = {
    "tensor": torch.arange(2048),
    "array": np.arange(2048),
    "memoryview": memoryview(bytes(range(256)) * 64),
    "one of many": [torch.full((2, 512), number) for number in range(20)],
}


@pytest.mark.parametrize("kind", LABELS)
def test_label_that_is_kept_does_not_keep_the_memory_of_its_batch(kind):
    payload = PickledPayload.dumps(
        {"images": torch.zeros(1 << 18), "labels": LABELS[kind]}
    )
    region = np.concatenate(
        [np.frombuffer(buffer, np.uint8) for buffer in payload.buffers]
    )
    parts = np.split(
        region, np.cumsum([buffer.nbytes for buffer in payload.buffers])[:-1]
    )
    batch = PickledPayload(payload.pickled, *(part.data for part in parts)).loads()
    assert np.shares_memory(batch["images"].numpy(), region)
    label, expected = (
        each[-1] if kind == "one of many" else each
        for each in (batch["labels"], LABELS[kind])
    )
    assert np.array_equal(label, expected)
    assert not np.shares_memory(np.asarray(label), region)


# Errors


class NeedsTwo(Exception):
    def __init__(self, left, right):
        super().__init__(left)


class HasSlots(Exception):
    __slots__ = ("path",)

    def __init__(self, path, reason):
        self.path = path


class Gone(FileNotFoundError):
    def __init__(self, key, bucket):
        super().__init__(2, "no such key", key)
        self.bucket = bucket


def raised(action, *args):
    with pytest.raises(BaseException) as caught:
        action(*args)
    return caught.value


EXACT = [
    NeedsTwo(1, 2),
    HasSlots("a.jpg", 3),
    Gone("k", "b"),
    raised(compile, "a b", "script.py", "exec"),
    raised(__import__, "no_such_module_at_all"),
    np.exceptions.AxisError(3, 2),
    torch.OutOfMemoryError("no memory"),
    ExceptionGroup("two", [NeedsTwo(1, 2), ValueError("v")]),
]


@pytest.mark.parametrize("error", EXACT, ids=lambda error: type(error).__name__)
def test_error_is_restored_with_any_constructor(error):
    error.add_note("noted")
    came = there_and_back(picklable_error(error))
    assert (type(came), str(came), repr(came)) == (type(error), str(error), repr(error))
    assert came.__notes__ == ["noted"]
    for name in ("path", "bucket", "filename", "name", "lineno", "axis"):
        assert getattr(came, name, None) == getattr(error, name, None)


def test_error_with_an_object_keeps_its_class():
    assert type(there_and_back(picklable_error(LookupError(object())))) is LookupError


class Unprintable(Exception):
    def __init__(self):
        super().__init__()
        self.lock, self.held = threading.Lock(), torch.ones(3)

    def __str__(self):
        raise ValueError("not printable")


def test_error_that_cannot_be_printed_loses_only_what_cannot_be_pickled():
    came = there_and_back(picklable_error(Unprintable()))
    assert type(came) is Unprintable
    assert not hasattr(came, "lock")
    assert torch.equal(came.held, torch.ones(3))


class Refused(Exception):
    """Composes its text of an attribute, as aiohttp's errors do; that one cannot be pickled."""

    def __init__(self, request, status):
        self.request, self.status = request, status
        super().__init__(request, status)

    def __str__(self):
        return f"{self.status} of {self.request.url}"

    def __repr__(self):
        return f"{type(self).__name__}({self.request.url}, {self.status})"


class Forgets(Exception):
    """Has a pickle of its own, without what its text is made of."""

    key = "unknown"

    def __str__(self):
        return f"no {self.key}"

    def __reduce__(self):
        return Forgets, self.args


def forgetful():
    error = Forgets(1)
    error.key = "a.jpg"
    return error


class Dies(Exception):
    def __reduce__(self):
        raise SystemExit(3)


class Request:
    url = "http://h/x"

    def __reduce__(self):
        raise TypeError("it holds a connection")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Refused(Request(), 403), "403 of http://h/x"),
        (forgetful(), "no a.jpg"),
        (Dies("oh"), "oh"),
    ],
    ids=str,
)
def test_error_whose_text_is_composed_of_what_cannot_be_sent_arrives_as_text(error, text):
    came = there_and_back(picklable_error(error))
    assert isinstance(came, RemoteError)
    assert text in str(came)
    assert type(error).__qualname__ in str(came)


def test_slice_of_a_table_is_sent_without_the_rest():
    columns = {
        "number": range(10_000),
        "text": [f"row {n}" for n in range(10_000)],
        "nested": [{"list": [n, None]} for n in range(10_000)],
        "repeated": pa.array(["a", "b"] * 5_000).dictionary_encode(),
    }
    table = pa.table(columns).replace_schema_metadata({"made by": "us"})
    for part in (
        table.slice(5_000, 20),
        pa.concat_tables([table.slice(7, 5), table.slice(90, 5)]),
        table.slice(0, 0),
    ):
        assert sum(map(len, dump_message(part).buffers)) < 20_000
        for came in there_and_back(part), as_a_batch(part), as_a_batch([part])[0]:
            assert came.equals(part, check_metadata=True)
            came.validate(full=True)
