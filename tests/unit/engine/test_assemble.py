"""Transform and collate: errors of user code become records that name stage and index."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_convert

import headrace as hr
from headrace._core.batches import BatchPlan

PLAN = BatchPlan(4, (10, 11, 12), 0)


class Unbatched(hr.AsyncIterableDataset):
    """Samples that are given out as they are, or converted; the last but one cannot be."""

    SAMPLES = (torch.ones(2), np.arange(3), "text", {"x": np.ones(1)}, [np.zeros(1)], None, np.array([1], "M8[s]"), 7)

    async def __aiter__(self):
        for sample in self.SAMPLES:
            yield sample


def test_single_samples_are_converted_as_by_torch():
    with hr.DataLoader(Unbatched(), batch_size=None) as loader:
        batches = iter(loader)
        got = [next(batches) for _ in range(6)]
        with pytest.raises(TypeError, match=r"can't convert np\.ndarray") as caught:
            next(batches)
        assert "collate" in "".join(caught.value.__notes__)
        assert list(batches) == [7]
    expected = [default_convert(sample) for sample in Unbatched.SAMPLES[:6]]
    assert repr(got) == repr(expected)
    assert got[0] is Unbatched.SAMPLES[0]
