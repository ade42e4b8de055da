"""Transform and collate: errors of user code become records that name stage and index."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_convert

import headrace as hr
from headrace._core.batches import BatchPlan, RawBatch, Rows
from headrace._core.engine.assemble import Assembler
from headrace._core.error_policy import Tolerance
from headrace._core.failure import Failure, Stage

PLAN = BatchPlan(4, (10, 11, 12), 0)


def assembler(*transforms, collate=list, batched=True, skip=False, catch=BaseException):
    return Assembler(transforms, collate, batched, Tolerance(skips=skip), catch)


class Unbatched(hr.AsyncIterableDataset):
    """Samples that are given out as they are, or converted; the last but one cannot be."""

    SAMPLES = (torch.ones(2), np.arange(3), "text", {"x": np.ones(1)}, [np.zeros(1)], None, np.array([1], "M8[s]"), 7)

    async def __aiter__(self):
        for sample in self.SAMPLES:
            yield sample


def test_lists_of_samples_are_passed_on_unless_one_has_failed():
    host = assembler(collate=tuple).passed_on(RawBatch(PLAN, [0, 1, 2], end=True))
    assert (host.data, host.size, host.end, host.plan) == ((0, 1, 2), 3, True, PLAN)
    failed = Failure.caught(ValueError("no"), stage=Stage.FETCH, batch=4, index=11)
    assert assembler(collate=tuple).passed_on(RawBatch(PLAN, [0, failed, 2])) is None
    assert assembler(str, collate=tuple).passed_on(RawBatch(PLAN, [0, 1, 2])) is None


def test_rows_of_a_tensor_are_passed_on_by_a_default_collate():
    rows = torch.ones(3, 2)
    assert assembler(collate=hr.default_collate).passed_on(RawBatch(PLAN, Rows(rows))).data is rows
    assert torch.stack(assembler(collate=list).passed_on(RawBatch(PLAN, Rows(rows))).data).equal(rows)
    assert assembler(collate=hr.pad_sequences).passed_on(RawBatch(PLAN, Rows(rows))) is None


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
