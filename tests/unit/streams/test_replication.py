"""A loader warns once of an async dataset that several ranks read whole, unless a part of it declares a split."""

import warnings

import pytest
import torch.distributed
from torch.utils.data import DistributedSampler

import headrace as hr
from headrace._order.restore import check_reading
from headrace._ranks.rankinfo import RankInfo
from tests import datasets
from tests.unit.shards.resuming import in_memory


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
        (
            datasets.Numbers(4).map(abs),
            {"shuffle": True},
            r"sampler=headrace\.ElasticSampler",
        ),
        (
            datasets.Numbers(4),
            {"shuffle": True, "seed": 0, "batch_size": None},
            r"sampler=headrace\.ElasticSampler",
        ),
    ],
)
def test_loader_warns_once_of_a_dataset_that_is_not_divided(
    as_rank, dataset, options, remedy
):
    as_rank(1, 2)
    with hr.DataLoader(dataset, **options) as loader:
        with pytest.warns(
            UserWarning, match=rf"2 ranks reads all of.*{remedy}.*splits_by_rank"
        ) as caught:
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
        (2, datasets.Numbers(4), {"batch_sampler": [[0], [1]]}),
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


SHARDS = hr.LinesDataset(
    in_memory({f"{number}.txt": b"%d\n" % number for number in range(4)})
)


@pytest.mark.parametrize(
    ("change", "options", "warned"),
    [
        (lambda shards: shards, {}, True),
        (lambda shards: shards.filter(len).shuffle(2), {}, True),
        (lambda shards: hr.concat([shards, shards]), {}, True),
        (lambda shards: shards, {"coordinated": True}, False),
        (lambda shards: shards.split().map(int), {}, False),
        (lambda shards: shards.split().filter(len), {}, True),
        (lambda shards: hr.batch_by_tokens(shards.split(), 3), {}, True),
        (lambda shards: shards.repeat().take(3), {}, False),
        (lambda shards: shards.repeat(2), {}, True),
    ],
)
def test_ranks_that_train_together_on_unequal_shards_are_a_warning(
    as_rank, monkeypatch, change, options, warned
):
    as_rank(1, 2)
    loader = hr.DataLoader(change(SHARDS), **options)
    spec, done = loader._control.spec, set()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            check_reading(spec, loader, RankInfo(1, 2, "test"), done)
    assert ["waits for ever" in str(each.message) for each in caught] == [True] * warned
