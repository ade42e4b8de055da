"""Lightning rebuilds loaders from their attributes: the class, its options and the transform are kept."""

import pytest
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

import headrace as hr

data = pytest.importorskip("lightning.fabric.utilities.data")
has_iterable_dataset = pytest.importorskip("lightning.pytorch.utilities.data").has_iterable_dataset


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 12

    async def aget(self, index):
        return index


class DuckStream:
    async def __aiter__(self):
        for number in range(12):
            yield number


class OnDevice(hr.DataLoader):
    """Takes any option, and has attributes of its own that are named like options."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.device = "cuda:7"


def tenfold(sample):
    return sample * 10


def numbers(loader):
    with loader:
        return [number for batch in loader for number in batch.tolist()]


@pytest.mark.parametrize("kind", [hr.DataLoader, OnDevice])
def test_transform_is_applied_once_by_a_rebuilt_loader_with_another_sampler(kind):
    loader = kind(Numbers(), batch_size=4, shuffle=True, seed=5, transform=tenfold)
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=1, shuffle=False)
    again = data._update_dataloader(loader, sampler)
    assert type(again) is kind
    assert numbers(again) == [10, 30, 50, 70, 90, 110]


def test_rebuilt_loader_keeps_options():
    loader = hr.DataLoader(Numbers(), batch_size=4, transform=tenfold, concurrency=3, seed=5, on_error="skip", retry=2)
    again = data._update_dataloader(loader, SequentialSampler(loader.dataset))
    assert again._options == loader._options


def test_stream_without_base_class_is_an_iterable_dataset():
    loader = hr.DataLoader(DuckStream(), batch_size=4, transform=tenfold)
    assert has_iterable_dataset(loader)
    again = data._update_dataloader(loader, loader.sampler)
    assert isinstance(again.dataset, IterableDataset)
    assert numbers(again) == numbers(loader) == list(range(0, 120, 10))
