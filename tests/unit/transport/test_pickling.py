"""Pickling restores values, types, shapes, and the identity of classes."""

import json

import numpy as np
import pytest
import torch

from headrace._core.transport.pickling import dump_message, load_message, picklable_error

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def there_and_back(obj):
    """As the channel does: the buffers are copied into one region, and the copy is read from there."""
    packed = dump_message(obj)
    region = bytearray(packed.size)
    for offset, buffer in zip(packed.offsets, packed.buffers, strict=True):
        region[offset : offset + buffer.nbytes] = buffer
    view = memoryview(region)
    extents = zip(packed.offsets, packed.buffers, strict=True)
    return load_message(packed.pickled, [view[offset : offset + buffer.nbytes] for offset, buffer in extents])


def as_bytes(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4)], ids=str)
def test_tensor_of_any_dtype_and_shape(dtype, shape):
    size = torch.Size(shape).numel() * dtype.itemsize
    tensor = (
        (torch.arange(size) % 2).to(torch.uint8).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    )
    came = there_and_back(tensor)
    assert (came.dtype, came.shape, as_bytes(came)) == (tensor.dtype, tensor.shape, as_bytes(tensor))


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
    ids=["transposed", "strided", "slice", "permuted slice", "conjugated", "negated", "channels-last"],
)
def test_dense_layout_is_kept_and_any_other_becomes_contiguous(tensor):
    came = there_and_back(tensor)
    assert torch.equal(came, tensor)
    assert came.stride() == torch.empty_like(tensor).stride()
    came[...] = 0  # and it can be written to, each element by itself


@pytest.mark.parametrize(
    "expanded",
    [
        torch.arange(3.0).reshape(1, 3, 1).expand(50, 3, 20),
        torch.zeros(()).expand(4_000_000_000),
        torch.arange(6.0).reshape(2, 3).T.unsqueeze(0).expand(10, 3, 2),
        torch.tensor([True]).expand(5).unsqueeze(1).expand(5, 7),
        torch.arange(3.0).requires_grad_().expand(4, 3).detach().requires_grad_(),
    ],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
def test_expanded_tensor_arrives_expanded(expanded):
    came = there_and_back(expanded)
    assert (came.shape, came.dtype, came.requires_grad) == (expanded.shape, expanded.dtype, expanded.requires_grad)
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
    assert (came.dtype, came.shape, came.tolist()) == (array.dtype, array.shape, array.tolist())
    came[...] = came[::-1].copy()


@pytest.mark.parametrize(
    "view",
    [
        memoryview(b""),
        memoryview(b"abc"),
        memoryview(bytearray(b"abc"))[1:],
        memoryview(b"abcdef")[::2],
        memoryview(np.arange(6, dtype=np.int32).reshape(2, 3)),
        memoryview(np.arange(6, dtype=np.int32).reshape(2, 3).T),
        memoryview(np.arange(4, dtype=np.float64)),
        memoryview(np.array(5, dtype=np.int16)),
    ],
    ids=lambda view: f"{view.format}{view.shape}{view.strides}",
)
def test_memoryview_of_any_shape(view):
    came = there_and_back(view)
    assert isinstance(came, memoryview)
    assert (came.format, came.shape, came.tolist()) == (view.format, view.shape, view.tolist())


# Errors


class NeedsTwo(Exception):
    def __init__(self, left, right):
        super().__init__(left)


class Composes(Exception):
    """Composes its message; a second call would compose it a second time."""

    def __init__(self, path):
        super().__init__(f"corrupt: {path}")
        self.path = path


class HasSlots(Exception):
    __slots__ = ("path",)

    def __init__(self, path, reason):
        self.path = path


class Gone(FileNotFoundError):
    def __init__(self, key, bucket):
        super().__init__(2, "no such key", key)
        self.bucket = bucket


class NotUtf8(UnicodeDecodeError):
    def __init__(self, name, raw):
        super().__init__("utf-8", raw, 0, 1, "bad byte")
        self.name = name


def raised(action, *args):
    with pytest.raises(BaseException) as caught:
        action(*args)
    return caught.value


EXACT = [
    NeedsTwo(1, 2),
    Composes("a.jpg"),
    HasSlots("a.jpg", 3),
    Gone("k", "b"),
    NotUtf8("a.txt", b"\xff"),
    raised(json.loads, "{"),
    raised(open, "/no/such/file"),
    raised(int, "x"),
    raised(b"\xff".decode),
    raised(compile, "a b", "script.py", "exec"),
    raised(__import__, "no_such_module_at_all"),
    np.exceptions.AxisError(3, 2),
    torch.OutOfMemoryError("no memory"),
    SystemExit(3),
    KeyError(("a", 1)),
    ExceptionGroup("two", [NeedsTwo(1, 2), ValueError("v")]),
]


@pytest.mark.parametrize("error", EXACT, ids=lambda error: type(error).__name__)
def test_error_is_restored_with_any_constructor(error):
    error.add_note("noted")
    came = there_and_back(picklable_error(error))
    assert (type(came), str(came), repr(came)) == (type(error), str(error), repr(error))
    assert came.__notes__ == ["noted"]
    for name in ("path", "bucket", "name", "pos", "doc", "errno", "strerror", "filename", "reason", "lineno", "axis",
                 "code", "msg"):  # fmt: skip
        assert getattr(came, name, None) == getattr(error, name, None)
