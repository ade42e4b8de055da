"""A loader warns once of an async dataset that several ranks read whole, unless a part of it declares a split."""

import warnings

import pytest
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

import headrace as hr
from tests import datasets


class Numbers(hr.AsyncIterableDataset):
    def __init__(self, inner=None):
        self.inner = inner

    async def __aiter__(self):
        yield 1


class Declared(Numbers):
    splits_by_rank = True


class OfOneRank(datasets.Numbers):
    splits_by_rank = True


@pytest.mark.parametrize(
    ("dataset", "options", "remedy"),
    [
        (Numbers().shuffle(2), {}, r"\.split\(\).*get_rank_info"),
        (datasets.Numbers(4), {}, r"sampler=headrace\.ElasticSampler"),
        (datasets.Numbers(4).map(abs), {"shuffle": True}, r"sampler=headrace\.ElasticSampler"),
        (datasets.Numbers(4), {"shuffle": True, "seed": 0, "batch_size": None}, r"sampler=headrace\.ElasticSampler"),
    ],
)
def test_loader_warns_once_of_a_dataset_that_is_not_divided(as_rank, dataset, options, remedy):
    as_rank(1, 2)
    with hr.DataLoader(dataset, **options) as loader:
        with pytest.warns(UserWarning, match=rf"2 ranks reads all of.*{remedy}.*splits_by_rank") as caught:
            list(loader)
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(loader)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers().split().map(abs), {}),
        (Declared(), {}),
        (Numbers(Declared()), {}),
        (OfOneRank(4), {}),
        (datasets.Numbers(4), {"sampler": hr.ElasticSampler(4)}),
        (datasets.Numbers(4), {"sampler": DistributedSampler(range(4), 2, 0)}),
        (datasets.Numbers(4), {"sampler": [0, 2]}),
        (datasets.Numbers(4), {"batch_sampler": BatchSampler(SequentialSampler(range(2)), 1, False)}),
        (range(4), {}),  # of torch, whose loader does not warn
    ],
)
def test_loader_does_not_warn_of_a_dataset_or_a_sampler_that_may_divide(as_rank, dataset, options):
    as_rank(0, 2)
    with hr.DataLoader(dataset, **options) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)


@pytest.mark.parametrize("dataset", [Numbers(), datasets.Numbers(4)])
def test_loader_does_not_warn_of_one_rank(dataset, as_rank):
    as_rank(0, 1)
    with hr.DataLoader(dataset) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
