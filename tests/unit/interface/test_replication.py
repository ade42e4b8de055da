"""A loader warns once of a stream that several ranks read whole, but not of one that depends on its rank."""

import functools
import os
import warnings

import pytest
import torch
import torch.distributed as dist

import headrace as hr
from headrace._core.interface.replication import is_replicated


async def numbers():
    for number in range(8):
        yield number


async def my_part():
    info = hr.get_rank_info()
    for number in range(info.rank, 8, info.world_size):
        yield number


def helper():
    return hr.get_rank_info()


async def by_helper():
    yield helper()


async def by_environment():
    yield int(os.environ["LOCAL_RANK"])


async def of(stream):
    async for sample in stream:
        yield sample


class Own(hr.AsyncIterableDataset):
    def __init__(self, inner=None):
        self.inner = inner

    async def __aiter__(self):
        yield 1


class Duck:
    async def __aiter__(self):
        yield 1


class OwnOfTorch(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


class ByGroup(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(dist.get_rank(), 4, dist.get_world_size()))


class ByConstructor(Own):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank


class Pipeline(Own):
    """Holds its stages in a list, as webdataset does."""

    def __init__(self, *stages):
        super().__init__()
        self.stages = [*stages]


def splits_by_rank(source):
    rank, _, ranks, _ = info_of_process()
    yield from source[rank::ranks]


def splits_by_worker(source):
    rank, worker, world_size, workers = info_of_process()  # noqa: RUF059  # the test is about names that are not used
    yield from source[worker::workers]


def info_of_process():
    return 0, 0, 1, 1


class Declared(Own):
    splits_by_rank = True


def plain():
    return hr.from_async_iterable(numbers)


def around(stream):
    async def generator():
        async for sample in stream:
            yield sample

    return hr.from_async_iterable(generator)


class Reader:
    def __init__(self, stream):
        self.stream = stream

    def read(self):
        return of(self.stream)

    __call__ = read


WHOLE = {
    "method": lambda: hr.from_async_iterable(Reader(plain()).read),
    "partial": lambda: hr.from_async_iterable(functools.partial(of, plain())),
    "generator": plain,
    "shuffled": lambda: plain().shuffle(4).take(3),
    "own": Own,
    "own around own": lambda: Own(plain()),
    "closure around own": lambda: around(plain()),
    "mix of split and whole": lambda: hr.mix([plain().split(), plain()], [1, 1]),
    "concat of ducks": lambda: hr.concat([Duck(), Duck()]),
    "pipeline of workers' parts": lambda: Pipeline(sorted, splits_by_worker),
    "filtered": lambda: plain().filter(bool),
    "concat": lambda: hr.concat([plain(), plain()]),
    "batches": lambda: hr.batch_by_tokens(plain(), 4, length=abs),
    "torch": OwnOfTorch,
    "torch's ChainDataset": lambda: torch.utils.data.ChainDataset([OwnOfTorch(), OwnOfTorch()]),
}
SPLIT = {
    "split": lambda: plain().split(),
    "split, then shuffled": lambda: plain().split().shuffle(4),
    "split, then filtered": lambda: plain().split().filter(bool),
    "split batches": lambda: hr.batch_by_tokens(plain(), 4, length=abs).split(),
    "mix": lambda: hr.mix([plain().split(), plain().split()], [1, 1]),
    "own around split": lambda: Own(plain().split()),
    "closure around split": lambda: around(plain().split()),
    "partial around split": lambda: hr.from_async_iterable(functools.partial(of, plain().split())),
    "method around split": lambda: hr.from_async_iterable(Reader(plain().split()).read),
    "object around split": lambda: hr.from_async_iterable(Reader(plain().split())),
    "asks": lambda: hr.from_async_iterable(my_part),
    "asks by a helper": lambda: hr.from_async_iterable(by_helper),
    "asks the environment": lambda: hr.from_async_iterable(by_environment),
    "torch that asks the group": ByGroup,
    "given its rank": lambda: ByConstructor(0),
    "pipeline that asks": lambda: Pipeline(sorted, splits_by_rank),
    "declared": Declared,
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_stream_without_ranks_is_replicated(make):
    assert is_replicated(make())


@pytest.mark.parametrize("make", SPLIT.values(), ids=SPLIT)
def test_stream_that_uses_its_rank_is_not_replicated(make):
    assert not is_replicated(make())


def test_sharded_stream_splits_itself(tmp_path):
    tmp_path.joinpath("0.txt").write_text("a\nb\n")
    assert not is_replicated(hr.LinesDataset(tmp_path).shuffle(2))


@pytest.mark.parametrize("make", [plain, OwnOfTorch])
def test_loader_warns_once_of_replicated_stream(monkeypatch, make):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with hr.DataLoader(make()) as loader:
        with pytest.warns(UserWarning, match=r"2 ranks.*\.split\(\).*get_rank_info") as caught:
            list(loader)
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(loader)


@pytest.mark.parametrize(("make", "world_size"), [(plain, "1"), (lambda: plain().split(), "2")])
def test_loader_does_not_warn_of_one_rank_or_a_split(monkeypatch, make, world_size):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with hr.DataLoader(make()) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
