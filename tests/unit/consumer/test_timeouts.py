"""A time-out says which batch and which samples it waits for, and where they are."""

import asyncio
import threading

import pytest
import torch

import headrace as hr
from tests.datasets import Numbers


class Held(Numbers):
    """Some samples come only when the test allows it."""

    def __init__(self, *held, length=12):
        super().__init__(length)
        self.held = held

    async def aget(self, index):
        if index in self.held:
            await asyncio.Event().wait()
        return index

    def sample_key(self, index):
        return f"key-{index}"


class HeldAtOnce(Held):
    async def agets(self, indices):
        return [await self.aget(index) for index in indices]


class HeldStream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for i in range(5):
            yield i
        await asyncio.Event().wait()


class HeldTorch(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5:
            threading.Event().wait()
        return index

    def sample_key(self, index):
        return f"key-{index}"


def is_early(message):
    """Whether a busy machine has not come to the samples yet."""
    return any(
        words in message for words in ("on its way", "not begun", "does not answer")
    )


def message_of(dataset, batch=1, size=4, **options):
    """The time-out's message, for a loader that gives some batches and then waits."""
    with hr.DataLoader(
        dataset, size, timeout=1 if options.get("num_workers") else 0.05, **options
    ) as loader:
        batches = iter(loader)
        for _ in range(batch):
            while True:
                try:
                    next(batches)
                    break
                except hr.errors.LoaderTimeoutError:  # the machine is busy
                    continue
        while True:
            with pytest.raises(hr.errors.LoaderTimeoutError) as caught:
                next(batches)
            if not is_early(str(caught.value)):
                break
        assert caught.value.batch == batch
        assert isinstance(caught.value, RuntimeError)
        assert 0 <= loader.stats().wait_share <= 1
        return str(caught.value)


PLACEMENTS = pytest.mark.parametrize("placement", ["thread", "process"])


@PLACEMENTS
def test_timeout_names_the_missing_samples(placement):
    message = message_of(Held(5, 7), placement=placement)
    assert "DataLoader timed out after 0.05 seconds" in message
    assert (
        "batch 1 is in stage fetch, and waits for 2 samples: indices [5, 7], keys ['key-5', 'key-7']"
        in message
    )


def test_timeout_names_the_whole_batch_of_agets_the_sample_without_batches_and_the_position_in_a_stream():
    assert "waits for 4 samples: indices [4, 5, 6, 7]" in message_of(HeldAtOnce(5))
    assert "batch 3 is in stage fetch, and waits for 1 sample: indices [3]" in message_of(
        Held(3), 3, None
    )
    assert "batch 1 is in stage fetch, and waits for 1 sample: indices [5]" in message_of(
        HeldStream()
    )


def test_timeout_of_a_large_batch_stays_short():
    message = message_of(Held(*range(2000), length=2000), 0, 2000)
    assert "… 2000 in all" in message
    assert len(message) < 600


def hold(sample):
    if sample == 5:
        threading.Event().wait()
    return sample


def test_timeout_in_a_transform_names_the_worker_and_the_batch():
    message = message_of(Held(), num_workers=1, transform=hold)
    assert (
        "batch 1 is in stage assemble (transform and collate), worker 0, indices [4, 5, 6, 7]"
        in message
    )
    assert "keys ['key-4'" in message


def test_timeout_of_a_torch_dataset_names_the_worker_that_reads():
    message = message_of(HeldTorch(), num_workers=1)
    assert (
        "batch 1 is in stage fetch, in a worker, worker 0, indices [4, 5, 6, 7]"
        in message
    )


def test_timeout_is_not_held_up_by_a_loop_that_user_code_blocks():
    release = threading.Event()

    class Blocks(Held):
        async def aget(self, index):
            if index == 5:
                release.wait()
            return index

    try:
        with hr.DataLoader(Blocks(), 4, timeout=0.05) as loader:
            batches = iter(loader)
            with pytest.raises(
                hr.errors.LoaderTimeoutError,
                match=r"indices \[.*does not answer: code in aget or",
            ) as caught:
                list(batches)
            assert caught.value.batch in (0, 1)
            release.set()
    finally:
        release.set()


def test_timeout_of_an_async_iterator_names_the_missing_samples(consumer_loop):
    async def scenario():
        async with hr.DataLoader(Held(1), 4, timeout=0.05) as loader:
            batches = aiter(loader)
            while True:
                with pytest.raises(hr.errors.LoaderTimeoutError) as caught:
                    await anext(batches)
                if not is_early(str(caught.value)):
                    return str(caught.value)

    assert "waits for 1 sample: indices [1], keys ['key-1']" in consumer_loop(scenario)
