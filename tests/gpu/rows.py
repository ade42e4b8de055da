"""Samples whose every byte is known, of every dtype; and a loop that looks at every byte of every batch."""

import hashlib
import sys

import cloudpickle
import torch
from torch.utils.data import default_collate

import headrace as hr

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
BYTES = 16 * 1024  # of each dtype: a batch of one is 192 KiB, and travels in a slab
KEPT = 50  # batches whose bytes are looked at together: a copy back to the host stops the device each time


def sample(index):
    """Random bits, those of NaN among them, as every dtype; and random booleans."""
    generator = torch.Generator().manual_seed(index)
    bits = torch.randint(0, 256, (len(DTYPES) + 1, BYTES), dtype=torch.uint8, generator=generator)
    made = {str(dtype): row.view(dtype) for dtype, row in zip(DTYPES, bits[1:], strict=True)}
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

    Each is cloned on the caller's stream and dropped at once, as a training step does that has only enqueued its work.

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
        assert digest(batch) == digest(default_collate([sample(number)])), f"batch {number} is not what was sent"
    kept.clear()
