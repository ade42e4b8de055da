"""The loader's arguments, and its copies."""

import asyncio
import copy
import gc
import inspect
import pickle
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import headrace as hr
from tests.datasets import Numbers
from tests.unit.consumer.test_skipping import lists


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_fn_set_later_counts_from_the_next_iteration_and_leaves_a_running_one_alone(
    num_workers,
):
    with hr.DataLoader(Numbers(6), batch_size=2, num_workers=num_workers) as loader:
        running = iter(loader)
        first = next(running)
        loader.collate_fn = sum
        assert list(loader) == [1, 5, 9]
        assert lists([first, *running]) == [[0, 1], [2, 3], [4, 5]]


# Copies


def test_copy_of_a_running_loader_has_an_engine_of_its_own():
    with hr.DataLoader(Numbers(10), batch_size=5) as loader:
        running = iter(loader)
        next(running)
        with copy.copy(loader) as twin:
            assert len(list(twin)) == 2
        assert next(running).tolist() == [5, 6, 7, 8, 9]


# Epochs


def test_set_epoch_reaches_sampler_batch_sampler_and_dataset():
    class Recording(Numbers):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    class ToldSampler(torch.utils.data.SequentialSampler):
        set_epoch = Recording.set_epoch

    dataset = Recording(10)
    sampler = ToldSampler(dataset)
    hr.DataLoader(dataset, sampler=sampler).set_epoch(5)
    assert (dataset.epoch, sampler.epoch) == (5, 5)
    hr.DataLoader(
        dataset, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False)
    ).set_epoch(6)
    assert (dataset.epoch, sampler.epoch) == (6, 6)
    hr.DataLoader(dataset.map(str)).set_epoch(7)
    assert dataset.epoch == 7


# What goes to the workers


@pytest.mark.parametrize("argument", ["transform", "collate_fn", "worker_init_fn"])
def test_function_that_cannot_be_pickled_is_named_with_the_culprit_and_a_remedy(argument):
    model = SimpleNamespace(size=3, layers={"a": [0, threading.Lock()]})

    def guarded(_):
        return model

    says = (
        rf"(?s){argument}.*guarded.*cannot pickle '_thread\.lock' object.*num_workers=0"
    )
    with pytest.raises(hr.errors.NotPicklableError, match=says) as caught:
        iter(hr.DataLoader(Numbers(10), num_workers=1, **{argument: guarded}))
    assert isinstance(caught.value, TypeError)


class NotAsync(Numbers):
    def aget(self, index):
        return index


class Nothing(Numbers):
    async def aget(self, index):
        pass


class OfTheFirstLoop(Numbers):
    client = None

    async def aget(self, index):
        self.client = self.client or asyncio.Event()
        async with asyncio.timeout(0):
            await self.client.wait()


@pytest.mark.parametrize(
    ("dataset", "remedy"),
    [
        (NotAsync(2), "`async def aget`"),
        (Nothing(2), "does aget, or .* lack a return"),
        (OfTheFirstLoop(2), "per_loop"),
    ],
)
def test_usual_mistakes_in_aget_have_a_remedy(dataset, remedy):
    for _ in range(2):
        with (
            hr.DataLoader(dataset) as loader,
            pytest.raises((TypeError, RuntimeError, TimeoutError)) as caught,
        ):
            next(iter(loader))
    assert re.search(remedy, "\n".join([str(caught.value), *caught.value.__notes__]))


def made_anew(loader):
    """What trainers do: call the class again with the attributes that are named like its arguments."""
    names = list(inspect.signature(hr.DataLoader.__init__).parameters)[1:]
    attributes = {name: value for name, value in vars(loader).items() if name in names}
    return hr.DataLoader(**{**attributes, "batch_sampler": None})


@pytest.mark.parametrize(
    "by", [lambda loader: loader, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_loader_rebuilt_from_attributes_has_the_options_and_draws_the_orders_of_its_seed(
    by,
):
    options = {"seed": 3, "transform": float, "concurrency": 7, "placement": "thread"}

    def made():
        return hr.DataLoader(Numbers(50), batch_size=50, shuffle=True, **options)

    def orders(loader):
        with loader:
            return [[batch.tolist() for batch in loader] for _ in range(3)]

    rebuilt = made_anew(by(made()))
    assert {name: getattr(rebuilt, name) for name in options} == options
    assert orders(rebuilt) == orders(made())


class _ClosesItsLoader:
    """A sampler in which another thread closes the loader, once, at the start or while the first plans are drawn."""

    def __init__(self, where):
        self.where = where

    def __len__(self):
        return 4

    def close(self, where):
        if where == self.where:
            self.where = None
            closing = threading.Thread(target=self.loader.close)
            closing.start()
            closing.join()

    def __iter__(self):
        self.close("iter")

        def draw(index):
            self.close("next")
            return index

        return map(draw, range(4))


@pytest.mark.parametrize("where", ["iter", "next"])
@pytest.mark.parametrize(
    "options", [{}, {"placement": "process"}, {"num_workers": 1, "placement": "thread"}]
)
def test_close_by_another_thread_during_iter_is_the_error_of_a_closed_loader(
    where, options
):
    sampler = _ClosesItsLoader(where)
    with hr.DataLoader(Numbers(4), sampler=sampler, **options) as sampler.loader:
        with pytest.raises(hr.errors.LoaderClosedError):
            list(sampler.loader)
        assert len(list(sampler.loader)) == 4


class _Plain:
    def __iter__(self):
        return iter(range(2))


@pytest.mark.parametrize(
    "stream",
    [_Plain(), IterableWrapper(range(2)).sharding_filter()],
    ids=["plain", "data pipe"],
)
def test_undivided_stream_in_several_workers_is_said_to_be_repeated(stream):
    said = f"each of 2 workers reads all of {type(stream).__name__}, .* use num_workers=0"
    with hr.DataLoader(stream, batch_size=2, num_workers=2) as loader:
        with pytest.warns(UserWarning, match=said) as caught:
            assert [batch.tolist() for batch in loader] == [[0, 1], [0, 1]]
        # Of forking, Python 3.12 and libraries that were imported warn too.
        assert [
            each.filename for each in caught if "reads all of" in str(each.message)
        ] == [__file__]
        assert len(list(loader)) == 2, "the second epoch does not repeat the warning"
    with hr.DataLoader(stream, batch_size=2, num_workers=1) as loader:
        assert len(list(loader)) == 1


class _Tenfold(hr.DataLoader):
    """Does work of its own on each batch, as PyTorch Geometric's `NodeLoader` does."""

    def _get_iterator(self):
        return (batch * 10 for batch in super()._get_iterator())


def test_iterator_that_a_subclass_replaces_is_used():
    with _Tenfold(Numbers(4), batch_size=2) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]
        with pytest.raises(
            TypeError, match=r"_Tenfold has a _get_iterator\(\) of its own, .* use `for`"
        ):
            aiter(loader)


def test_iterator_that_a_subclass_asks_torch_for_is_headraces():
    class Endless(hr.DataLoader):
        """Keeps its iterator, as ultralytics' `InfiniteDataLoader` does."""

        def __iter__(self):
            self.iterator = self._get_iterator()
            yield from self.iterator

    with Endless(Numbers(4), batch_size=2) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert loader.stats().batches == 2


class _Frozen(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return gc.get_freeze_count(), gc.isenabled()


def test_garbage_collector_of_a_worker_ignores_objects_from_before_its_start():
    # Else it would copy every page of the trainer's heap into each forked worker.
    with hr.DataLoader(
        _Frozen(), num_workers=1, multiprocessing_context="fork"
    ) as loader:
        for frozen, collects in loader:
            # Importing torch makes 170,000.
            assert frozen.item() > gc.get_freeze_count() + 10_000
            assert collects.item()
