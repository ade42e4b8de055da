"""`hr.headspace`: steps on batches of the loader, and on batches that are kept."""

import pytest
import torch

import headrace as hr
from tests import datasets
from tests.datasets import SlowDataset
from tests.unit.streams.reading import Count


class Numbers(datasets.Numbers):
    async def aget(self, index):
        return {"number": index, "image": torch.zeros(3)}


def test_same_number_of_steps_is_made_on_both_kinds_of_batches():
    steps = []

    def step(batch):  # takes its batch apart
        steps.append(batch.pop("number").tolist())

    found = hr.headspace(hr.DataLoader(Numbers(64), 4), step, 6)
    assert found.batches == 6
    assert steps[:10] == [list(range(4 * number, 4 * number + 4)) for number in range(10)]
    assert steps[10:] == [steps[number % 4] for number in (*range(4), *range(6))]
    assert 0.0 < found.waited_seconds <= found.step_seconds
    assert found.speedup >= 1.0


def test_loader_is_left_as_it_was():
    with hr.DataLoader(Numbers(64), 4, shuffle=True) as loader:
        torch.manual_seed(1)
        first = [batch["number"].tolist() for batch in loader]
        torch.manual_seed(1)
        batches = iter(loader)
        next(batches)
        state, stats, report = loader.state_dict(), loader.stats(), loader.report()
        torch.manual_seed(1)
        drawn = torch.get_rng_state()
        hr.headspace(loader, lambda batch: None, 20)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert loader.state_dict() == state
        assert loader.stats() == stats
        assert loader.report() == report
        assert [batch["number"].tolist() for batch in batches] == first[1:]
        assert loader.stats().epochs == 2


@pytest.mark.parametrize(
    "loader", [hr.DataLoader(Count(8), 4), hr.DataLoader(list(range(8)), 4), torch.utils.data.DataLoader(range(8), 4)]
)
def test_short_loader_begins_further_epochs(loader):
    found = hr.headspace(loader, lambda batch: None, 11)
    assert found.batches == 11
    assert (found.report is None) == (type(loader) is torch.utils.data.DataLoader)
    assert "steps/s" in str(found)


def test_errors_end_the_measurement_and_the_engine():
    def step(batch):
        raise KeyError("label")

    loader = hr.DataLoader(Numbers(64), 4)
    with pytest.raises(KeyError, match="label"):
        hr.headspace(loader, step)
    for wrong, batches in ((loader, 0), ([], 5)):
        with pytest.raises(ValueError):
            hr.headspace(wrong, len, batches)
    assert loader.stats().epochs == 0


def test_result_names_the_limit_of_the_loader():
    found = hr.headspace(hr.DataLoader(SlowDataset(64, 0.02), 2, concurrency=1), lambda batch: None, 20)
    assert found.report.limit == "latency"
    assert found.report.headline in str(found)
    assert found.speedup > 1.0
