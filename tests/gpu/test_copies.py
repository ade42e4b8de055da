"""On a real device: whole bytes under load, no growth, errors with their batch's number."""

import hashlib

import pytest
import torch

import headrace as hr

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Rows(hr.AsyncDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    async def aget(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (200_000,), dtype=torch.uint8, generator=generator), index, float(index)


def digest(tensor):
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()


def slow_kernels(stream, matrix):
    with torch.cuda.stream(stream):
        for _ in range(4):
            matrix = matrix @ matrix
    return matrix


@pytest.mark.parametrize("workers", [0, 2])
def test_a_thousand_batches_are_whole_while_slow_kernels_run_on_other_streams(workers):
    busy, matrix = torch.cuda.Stream(), torch.eye(4096, device="cuda")
    kept = []
    with hr.DataLoader(Rows(1000), num_workers=workers, device="cuda") as loader:
        for number, (data, labels, floats) in enumerate(loader):
            slow_kernels(busy, matrix)
            kept.append(data.clone())  # on the stream that waits for the copy
            assert (labels.dtype, floats.dtype) == (torch.int64, torch.float64)
            del data
            if len(kept) == 50:
                for offset, tensor in enumerate(kept, number - 49):
                    generator = torch.Generator().manual_seed(offset)
                    sent = torch.randint(0, 256, (1, 200_000), dtype=torch.uint8, generator=generator)
                    assert digest(tensor) == digest(sent)
                kept.clear()
    torch.cuda.synchronize()


def test_batches_may_be_taken_under_a_stream_of_the_users():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), hr.DataLoader(Rows(50), num_workers=1, device="cuda") as loader:
        sums = [(labels.sum() * 2, number) for number, (_, labels, _) in enumerate(loader)]
    stream.synchronize()
    assert all(total.item() == 2 * number for total, number in sums)


def test_neither_pinned_nor_device_memory_grows_over_two_thousand_batches():
    with hr.DataLoader(Rows(2000), num_workers=2, device="cuda") as loader:
        for number, batch in enumerate(loader):
            if number == 500:
                torch.cuda.synchronize()
                reserved, pinned = (
                    torch.cuda.memory_reserved(),
                    torch.cuda.host_memory_stats()["reserved_bytes.current"],
                )
            del batch
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= reserved
    assert torch.cuda.host_memory_stats()["reserved_bytes.current"] <= pinned


class Broken:
    def to(self, device, *, non_blocking):
        raise ValueError("it does not move")


def broken_at_three(samples):
    return Broken() if samples[0][1] == 3 else samples[0][0]


def test_an_error_in_a_copy_has_its_batchs_number():
    with hr.DataLoader(Rows(6), collate_fn=broken_at_three, device="cuda") as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        with pytest.raises(ValueError, match="does not move") as caught:
            next(batches)
        assert "headrace: stage copy, batch 3" in caught.value.__notes__
        assert next(batches).device.type == "cuda"


def test_batches_are_refused_while_a_graph_is_captured():
    with hr.DataLoader(Rows(4), device="cuda") as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(hr.CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            next(batches)


def test_pinned_batches_lie_in_registered_slabs():
    with hr.DataLoader(Rows(20), num_workers=1, pin_memory=True) as loader:
        assert all(data.is_pinned() for data, _, _ in loader)
