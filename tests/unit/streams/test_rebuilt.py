"""Plain torch loaders made of the attributes of a headrace loader; subclasses with attributes of their own."""

import asyncio
import operator
import pickle
import warnings

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

import headrace as hr
from headrace._ranks.rankinfo import RankInfo, temporary_rank
from headrace._torchcompat import portable_collate as portable
from tests.datasets import Numbers


def tenfold(sample):
    return sample * 10


class DuckMap:
    def __len__(self):
        return 10

    async def aget(self, index):
        return index


class DuckStream:
    name = "duck"

    async def __aiter__(self):
        for number in range(10):
            yield number


class Stream(DuckStream, hr.AsyncIterableDataset):
    pass


class SizedDuckStream(DuckStream):
    def __len__(self):
        return 10


class DividedStream(hr.AsyncIterableDataset):
    """Gives a part of itself in a torch worker, as torch's documentation recommends."""

    async def __aiter__(self):
        worker = get_worker_info()
        for number in (
            range(10) if worker is None else range(worker.id, 10, worker.num_workers)
        ):
            await asyncio.sleep(0)
            yield number


@pytest.fixture(autouse=True)
def not_warned_yet():
    portable._warned[0] = 0
    yield
    portable._warned[0] = 0


def rebuilt(loader, **options):
    """As accelerate and Ray Train do: a torch loader of torch's arguments, read as attributes."""
    order = {"batch_sampler": loader.batch_sampler}
    if isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
        order = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    names = ("dataset", "num_workers", "collate_fn", "generator", "worker_init_fn")
    return TorchDataLoader(
        **{name: getattr(loader, name) for name in names} | order | options
    )


def numbers(loader):
    return [
        number
        for batch in loader
        for number in torch.as_tensor(batch).reshape(-1).tolist()
    ]


@pytest.mark.parametrize("dataset", [Numbers(10), DuckMap(), range(10), Stream(), DuckStream(), SizedDuckStream()],
                         ids=lambda dataset: type(dataset).__name__)  # fmt: skip
@pytest.mark.parametrize(("batch_size", "num_workers"), [(4, 0), (None, 0), (4, 2)])
def test_rebuilt_loader_applies_the_transform_and_warns_once(
    dataset, batch_size, num_workers
):
    loader = hr.DataLoader(
        dataset, batch_size=batch_size, num_workers=num_workers, transform=tenfold
    )
    plain = rebuilt(loader)
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert sorted(numbers(plain)) == list(range(0, 100, 10))
        assert sorted(numbers(plain)) == list(range(0, 100, 10))
    ours = [
        each for each in caught if "docs/trainers.md" in str(each.message)
    ]  # libraries warn of each fork
    assert len(ours) == (
        1 if num_workers == 0 else 0
    )  # a worker's warning is printed in the worker
    assert portable._warned[0] == 1
    with loader:
        assert sorted(numbers(loader)) == list(range(0, 100, 10))


def test_rebuilt_loader_of_an_async_dataset_warns_without_a_transform_too():
    with pytest.warns(RuntimeWarning, match="headrace's engine does not run"):
        assert numbers(rebuilt(hr.DataLoader(Numbers(10), batch_size=4))) == list(
            range(10)
        )


def test_torch_dataset_without_transform_is_rebuilt_without_a_warning():
    loader = hr.DataLoader(range(10), batch_size=4, collate_fn=list)
    assert loader.collate_fn is list
    assert numbers(rebuilt(loader)) == list(range(10))


@pytest.mark.parametrize(
    ("dataset", "num_workers"),
    [(Numbers(10), 1), (range(10), 1), (DuckMap(), 0), (DuckStream(), 0)],
)
def test_transform_is_applied_once_by_a_headrace_loader_made_of_anothers_attributes(
    dataset, num_workers
):
    first = hr.DataLoader(dataset, batch_size=4, transform=tenfold)
    options = {"batch_size": 4, "num_workers": num_workers}
    tens = list(range(0, 100, 10))
    for transform, expected in (
        (tenfold, tens),
        (None, tens),
        (operator.neg, list(range(0, -10, -1))),
    ):
        with hr.DataLoader(
            first.dataset, collate_fn=first.collate_fn, transform=transform, **options
        ) as second:
            assert numbers(second) == expected
    with hr.DataLoader(first.dataset, **options) as third:
        assert numbers(third) == list(range(10))


class Negated:
    def __init__(self, collate):
        self.collate = collate

    def __call__(self, samples):
        return -self.collate(samples)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_fn_wrapped_and_set_again_applies_the_transform_once(num_workers):
    with hr.DataLoader(
        Numbers(10), batch_size=5, num_workers=num_workers, transform=tenfold
    ) as loader:
        loader.collate_fn = Negated(loader.collate_fn)
        assert numbers(loader) == list(range(0, -100, -10))
        with pytest.warns(RuntimeWarning, match="rebuilt"):
            assert numbers(rebuilt(loader, num_workers=0)) == list(range(0, -100, -10))


def test_attributes_of_the_collate_fn_are_those_of_the_users():
    class Scaled:
        transform, warn = "the user's", 2  # names of headrace's own parts too

        def __init__(self, factor):
            self.factor = factor

        def __call__(self, samples):
            return [sample * self.factor for sample in samples]

    with hr.DataLoader(
        Numbers(10), batch_size=5, collate_fn=Scaled(1), transform=tenfold
    ) as loader:
        shown = loader.collate_fn
        assert (shown.factor, shown.transform, shown.warn) == (1, "the user's", 2)
        shown.factor, shown.collate = 3, "added"
        assert numbers(loader) == list(range(0, 300, 30))
        assert shown.collate == "added"
        del shown.collate
        assert not hasattr(shown, "collate")
    hr.DataLoader(Numbers(10)).collate_fn = pickle.loads(cloudpickle.dumps(shown))
    assert pickle.loads(cloudpickle.dumps(shown)).factor == 3


# Streams


@pytest.mark.parametrize(
    ("stream", "num_workers"),
    [(Stream(), 3), (DuckStream(), 3), (DividedStream(), 0), (DividedStream(), 3)],
)
def test_torch_loader_yields_a_stream_once_with_any_number_of_workers(
    stream, num_workers
):
    shown = hr.DataLoader(stream).dataset
    assert isinstance(shown, IterableDataset)
    assert isinstance(shown, type(stream))
    assert sorted(numbers(TorchDataLoader(shown, num_workers=num_workers))) == list(
        range(10)
    )


def test_stream_adapter_has_the_attributes_and_length_of_the_stream():
    stream = SizedDuckStream()
    shown = hr.DataLoader(stream).dataset
    assert (shown.name, len(shown)) == ("duck", 10)
    shown.name = shown.other = "goose"
    del shown.other
    assert stream.name == "goose"
    assert not hasattr(stream, "other")
    assert not hasattr(shown, "set_epoch")
    assert not hasattr(type(hr.DataLoader(DuckStream()).dataset), "__len__")
    again = pickle.loads(pickle.dumps(shown))
    assert (again.name, len(again), list(again)) == ("goose", 10, list(range(10)))


def test_stream_of_shards_of_a_rank_divides_itself_among_torch_workers(tmp_path):
    for shard in range(4):
        (tmp_path / f"{shard}.txt").write_text(
            "".join(f"{shard}{line}\n" for line in range(5))
        )
    lines = hr.LinesDataset(str(tmp_path / "*.txt"))
    shown = hr.DataLoader(lines.map(int)).dataset
    spawned = {"multiprocessing_context": "spawn"}  # obstore does not survive a fork
    with temporary_rank(RankInfo(1, 2, "test")):
        got = numbers(TorchDataLoader(shown, num_workers=2, batch_size=None, **spawned))
    assert sorted(got) == [10 * shard + line for shard in (2, 3) for line in range(5)]


def test_setting_an_option_of_a_loader_warns_that_it_has_no_effect():
    with hr.DataLoader(Numbers(10), batch_size=10) as loader:
        with pytest.warns(RuntimeWarning, match="transform= is read once"):
            loader.transform = tenfold
        assert numbers(loader) == list(range(10))
