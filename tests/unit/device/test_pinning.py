"""`pin_memory=True` without a device: the user copies, and drops a batch before its copy has started."""

import ctypes

import pytest
import torch

import headrace as hr
from headrace._consumer import control
from tests.unit.device.recording import Rows


class PinnedMemory:
    """What torch's allocator does for `pin_memory()`: a copy, which is kept while a copy out of it may be under way.

    Attributes:
        limit: how many bytes may be pinned.
    """

    limit = float("inf")

    def __init__(self):
        self.kept = []

    def copy(self, tensor, device=None):
        there = (
            self.allocate(tensor.numel() * tensor.itemsize)
            .view(tensor.dtype)
            .view(tensor.shape)
        )
        return there.copy_(tensor)

    def allocate(self, size):
        if size > self.limit:
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        self.kept.append(torch.empty(size, dtype=torch.uint8))
        return self.kept[-1]


@pytest.fixture
def memory(monkeypatch):
    memory = PinnedMemory()
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor, device=None: memory.copy(tensor)
    )
    monkeypatch.setattr(control, "should_pin", lambda pin_memory, device: pin_memory)
    return memory


WAYS = [{}, {"num_workers": 1}]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_copy_that_starts_after_its_batch_was_dropped_reads_every_byte(memory, options):
    with hr.DataLoader(Rows(240), batch_size=2, pin_memory=True, **options) as loader:
        under_way = [(batch.data_ptr(), batch.nbytes) for batch in loader]
        assert [address for address, _ in under_way] == [
            tensor.data_ptr() for tensor in memory.kept
        ]  # copied once
        for number, (address, size) in enumerate(under_way):
            read = torch.frombuffer(
                bytearray(ctypes.string_at(address, size)), dtype=torch.int64
            )
            assert read.unique().tolist() == [2 * number, 2 * number + 1]


class Fragile:
    """A user's batch; its own pinning fails."""

    def __init__(self, rows):
        self.rows = rows

    def pin_memory(self):
        raise RuntimeError("it cannot be pinned")


def fragile_at_one(samples):
    rows = torch.stack(samples)
    return Fragile(rows) if rows[0, 0] == 2 else rows


def test_error_of_pinning_has_the_batchs_number(memory):
    with hr.DataLoader(
        Rows(6), batch_size=2, collate_fn=fragile_at_one, pin_memory=True, num_workers=1
    ) as loader:
        batches = iter(loader)
        assert next(batches)[0, 0] == 0
        with pytest.raises(RuntimeError, match="it cannot be pinned") as caught:
            next(batches)
        assert caught.value.__notes__[-1] == "headrace: stage pin, batch 1"
        memory.limit = 0
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            next(batches)
        assert caught.value.__notes__[-1] == "headrace: stage pin, batch 2"
