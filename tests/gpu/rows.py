"""Samples whose every byte is known, of every dtype; and a loop that looks at every byte of every batch."""

import hashlib
import sys

import cloudpickle
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

import headrace as hr

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
)
BYTES = 16 * 1024  # of each dtype: a batch of one is 192 KiB, and travels in a slab
# batches whose bytes are looked at together: a copy back to the host stops the device each time
KEPT = 50


def sample(index):
    """Random bits, those of NaN among them, as every dtype; and random booleans."""
    generator = torch.Generator().manual_seed(index)
    bits = torch.randint(
        0, 256, (len(DTYPES) + 1, BYTES), dtype=torch.uint8, generator=generator
    )
    made = {
        str(dtype): row.view(dtype) for dtype, row in zip(DTYPES, bits[1:], strict=True)
    }
    return {**made, str(torch.bool): bits[0] > 127}


class Rows(hr.AsyncDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    async def aget(self, index):
        return sample(index)


def digest(batch):
    """A hash of all bytes of a dict of tensors, and of what they are."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(batch.items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def check_every_byte(batches, before_use=lambda batch: batch):
    """Compares every batch of one sample with what was sent.

    Each is cloned on the caller's stream and dropped at once, as a training step does that has only
    enqueued its work.

    Args:
        batches: of `Rows`, from the first on.
        before_use: is given each batch before it is cloned, and gives what is to be cloned.

    Returns:
        How many there were.
    """
    kept, number = [], -1
    for number, batch in enumerate(batches):
        there = before_use(batch)
        kept.append((number, {name: tensor.clone() for name, tensor in there.items()}))
        del batch, there
        if len(kept) == KEPT:
            _compare(kept)
    _compare(kept)
    return number + 1


def _compare(kept):
    for number, batch in kept:
        assert digest(batch) == digest(default_collate([sample(number)])), (
            f"batch {number} is not what was sent"
        )
    kept.clear()


def layouts():
    """A batch of all that a tensor can be beside contiguous, of many small tensors, and of containers."""
    return {
        "channels last": torch.rand(2, 3, 4, 5).contiguous(
            memory_format=torch.channels_last
        ),
        "transposed": torch.arange(12).view(3, 4).t(),
        "expanded": torch.arange(3).expand(4, 3),
        "strided": torch.arange(12)[::2],
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "large": torch.arange(100_000),  # so that the batch travels in a slab
        "many": tuple(torch.full((3,), number) for number in range(114)),
        "packed": pack_sequence(
            [torch.arange(2.0), torch.arange(3.0)], enforce_sorted=False
        ),
    }


def check_layouts(got, sent, own_copy):
    """Compares what arrived with what `own_copy` makes of each tensor that was sent."""
    assert got.keys() == sent.keys()
    for name, tensor in sent.items():
        if isinstance(tensor, torch.Tensor):
            own = own_copy(tensor)
            assert torch.equal(got[name], own), name
            assert got[name].device == own.device, name
            # Where elements share their memory, it depends on who copies.
            if name != "expanded":
                assert got[name].stride() == own.stride(), name
    assert [small.tolist() for small in got["many"]] == [
        [number] * 3 for number in range(114)
    ]
    packed = sent["packed"]
    assert torch.equal(got["packed"].data, own_copy(packed.data))
    assert torch.equal(got["packed"].batch_sizes, packed.batch_sizes)
    assert torch.equal(got["packed"].unsorted_indices, own_copy(packed.unsorted_indices))
