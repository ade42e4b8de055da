"""`loader.report()`: the times of a real loader's batches, in each placement."""

import pickle

import pytest

import headrace as hr


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 64

    async def aget(self, index):
        return index


class Stream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for number in range(64):
            yield number


def double(sample):
    return 2 * sample


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers(), {}),
        (Numbers(), {"transform": double}),
        (Numbers(), {"transform": double, "num_workers": 1}),
        (Numbers(), {"placement": "process"}),
        (Numbers(), {"hedge": "auto"}),
        (Numbers(), {"memory_budget": 1 << 20}),
        (Stream(), {}),
        (Stream(), {"transform": double, "num_workers": 1}),
        (list(range(64)), {}),
        (list(range(64)), {"num_workers": 1}),
    ],
)
def test_times_of_a_batch_are_in_the_order_of_the_stages(dataset, options):
    with hr.DataLoader(dataset, 2, **options) as loader:
        assert sum(len(batch) for batch in loader) == 64
        report = loader.report()
        log = loader._epochs.counters.log.records()
    assert report.batches == 31
    assert report.samples == 62
    assert 0.0 <= report.wait_share <= 1.0
    for record in log:
        times = record.times
        assert record.called <= record.taken <= record.refilled <= record.returned
        fetched = [times.admitted, times.began, times.fetched, times.assembled]
        if any(fetched):
            assert fetched == sorted(fetched)
            assert record.planned <= times.admitted <= record.taken
        if "transform" in options or isinstance(dataset, list):
            assert 0.0 < times.work_began <= times.work_ended <= record.taken


def test_report_is_of_the_last_iteration():
    with hr.DataLoader(Numbers(), 4) as loader:
        list(loader)
        for number, _ in enumerate(loader):
            if number == 7:
                break
        assert loader.report().batches == 7
        assert [record.iteration for record in loader._epochs.counters.log.records()] == [2] * 8


def test_report_before_the_first_batch():
    with hr.DataLoader(Numbers(), 4) as loader:
        assert loader.report().batches == 0


def test_pickled_loader_leaves_its_log_behind():
    with hr.DataLoader(Numbers(), 4) as loader:
        list(loader)
        with pickle.loads(pickle.dumps(loader)) as other:
            assert other.report().batches == 0
        assert loader.report().batches == 15


def test_subscribers_get_each_batch_until_they_leave():
    seen = []
    with hr.DataLoader(Numbers(), 4) as loader:
        leave = loader._epochs.counters.log.subscribe(lambda record: seen.append(record.number))
        list(loader)
        leave()
        list(loader)
    assert seen == list(range(16))


@pytest.mark.parametrize("in_order", [True, False])
async def test_async_iteration_is_reported(in_order):
    async with hr.DataLoader(Numbers(), 4, in_order=in_order) as loader:
        async for _ in loader:
            pass
        assert loader.report().batches == 15
