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
    ("ranks", "dataset", "options"),
    [
        (1, Numbers(), {}),
        (1, datasets.Numbers(4), {}),
        (2, Numbers().split().map(abs), {}),
        (2, Declared(), {}),
        (2, Numbers(Declared()), {}),
        (2, OfOneRank(4), {}),
        (2, datasets.Numbers(4), {"sampler": hr.ElasticSampler(4)}),
        (2, datasets.Numbers(4), {"sampler": DistributedSampler(range(4), 2, 0)}),
        (2, datasets.Numbers(4), {"sampler": [0, 2]}),
        (2, datasets.Numbers(4), {"batch_sampler": BatchSampler(SequentialSampler(range(2)), 1, False)}),
        (2, range(4), {}),  # of torch, whose loader does not warn
    ],
)
def test_loader_does_not_warn_of_one_rank_or_of_a_dataset_or_a_sampler_that_may_divide(
    as_rank, ranks, dataset, options
):
    as_rank(0, ranks)
    with hr.DataLoader(dataset, **options) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
