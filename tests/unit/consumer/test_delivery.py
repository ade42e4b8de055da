"""As a batch is given out, warnings point at the line that asked for it."""

import pytest
import torch
from torch.utils import data

import headrace as hr


class Liar(data.IterableDataset):
    def __len__(self):
        return 1

    def __iter__(self):
        return iter(range(3))


# Python 3.12 and later say so of every fork of a process with threads, torch's too; it points at
# where they fork.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_warning_of_a_stream_that_is_too_long_points_at_the_loop():
    loader = hr.DataLoader(Liar())
    assert len(loader) == 1
    with pytest.warns(UserWarning, match="reported to be 1") as caught:
        for _ in loader:
            pass
    with pytest.warns(UserWarning, match="reported to be 1") as in_async_for:
        async for _ in loader:
            pass
    assert [warning.filename for warning in (*caught, *in_async_for)] == [__file__] * 4


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="with an accelerator nothing is said"
)
def test_warning_that_nothing_is_pinned_points_at_the_line_that_iterates():
    with pytest.warns(UserWarning, match="no accelerator is found") as caught:
        iter(hr.DataLoader([1], pin_memory=True))
    assert caught[0].filename == __file__
