"""`ArrayDataset` gives the rows of arrays that numpy.save has written, by ranged requests."""

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.errors import ShardError
from headrace.testing import same
from tests.unit.datasets.formats import npy
from tests.unit.shards.resuming import in_memory

ROWS = np.random.default_rng(0).integers(0, 1 << 62, size=(500, 3, 5))


OBJECTS = {
    f"a/{n}.npy": npy(part) for n, part in enumerate(np.split(ROWS, [200, 200, 201]))
}


def opened(server):
    return hr.ArrayDataset("a", store=server.store())


@pytest.mark.counts
def test_rows_of_several_files_are_read_by_joined_requests(server):
    dataset = opened(server)
    before = len(server.seen())
    with hr.DataLoader(dataset, 500, shuffle=True, seed=0, concurrency=4) as loader:
        (batch,) = loader
    assert len(server.seen()) - before == 3  # files that have rows
    assert sorted(map(str, batch.numpy())) == sorted(map(str, ROWS))
    assert dataset.sample_key(200) == "a/2.npy[128:248]"


TYPES = (
    "f2",
    "f4",
    "f8",
    "u1",
    "i1",
    "u2",
    "i2",
    "u4",
    "i4",
    "u8",
    "i8",
    "b1",
    "c8",
    "c16",
)


@pytest.mark.parametrize("dtype", [order + kind for kind in TYPES for order in "<>"])
@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 2, 3)])
def test_tensors_have_the_values_and_the_type_of_the_array(dtype, shape):
    array = (ROWS.reshape(-1)[: np.prod(shape)].reshape(shape) % 30_000 - 99).astype(
        dtype
    )
    dataset = hr.ArrayDataset(in_memory({"x.npy": npy(array)}))
    wanted = torch.from_numpy(array.astype(np.dtype(dtype).newbyteorder("=")))
    assert same(torch.stack([*dataset]), wanted)
    assert same(torch.stack([*dataset.__getitems__(range(7))]), wanted)
    assert dataset[3].is_contiguous()


def test_only_big_files_have_large_headers_and_offsets(tmp_path):
    """A sparse file of more than 4 GiB."""
    array = np.lib.format.open_memmap(
        tmp_path / "x.npy", mode="w+", dtype="<u4", shape=(1 << 20, 1 << 11)
    )
    array[-1] = np.arange(1 << 11)
    array.flush()
    dataset = hr.ArrayDataset(tmp_path / "x.npy")
    assert dataset[-1].tolist() == [*range(1 << 11)]
    assert not dataset[(1 << 20) - 2].any()


class Runs:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (
            {"x.npy": npy(np.asfortranarray(ROWS))},
            r"columns come first.*ascontiguousarray.*x\.npy",
        ),
        (
            {"x.npy": npy(np.array([Runs()]), allow_pickle=True)},
            r"torch has no type for object.*x\.npy",
        ),
        (
            {"x.npy": npy(np.zeros(3, "M8[s]"))},
            r"torch has no type for datetime64.*x\.npy",
        ),
        ({"x.npy": npy(np.zeros((3, 0)))}, r"shape \(3, 0\) has no rows.*x\.npy"),
        (
            {"x.npy": npy(ROWS)[:-120]},
            r"59,880 bytes, but the header has int64 of shape \(500, 3, 5\).*x\.npy",
        ),
        (
            {"x.npy": npy(ROWS).replace(b"NUMPY\1\0", b"NUMPY\4\0")},
            r"version \(4, 0\) is unknown.*x\.npy",
        ),
        (
            {"x.npy": npy(ROWS), "y.npy": npy(ROWS[:, 1:])},
            r"int64 of shape \(500, 2, 5\), but the first.*y\.npy",
        ),
        ({"x.npz": b"PK"}, r"not a .npy file.*x\.npz"),
    ],
)
def test_what_has_no_rows_or_no_tensors_is_refused(files, what):
    with pytest.raises(ShardError, match=what):
        hr.ArrayDataset([*files], store=in_memory(files))
