"""`on_error="skip"`: deliveries, lost batches, counts and warnings."""

import gc
import itertools
import warnings
import weakref

import pytest
import torch

import headrace as hr
from tests.model.parts import BadSampleError, Count
from tests.unit.shards.resuming import in_memory

PREFIX = "a sample was skipped"


class Mine(ValueError):
    """A user's own exception."""


class Bad:
    """Raises for some samples; a sample is its index."""

    def __init__(self, *bad, error=Mine):
        self.bad = bad
        self.error = error

    def __call__(self, sample):
        if sample in self.bad:
            raise self.error(f"{sample} is bad")
        return sample


good = Bad()


class Checked:
    """Numbers below `length`, if `check` does not raise."""

    def __init__(self, length, check=good):
        self.length = length
        self.check = check

    def __len__(self):
        return self.length

    def sample_key(self, index):
        return f"key-{index}"


class Numbers(Checked, hr.AsyncDataset):
    async def aget(self, index):
        return self.check(index)


class TorchNumbers(Checked, torch.utils.data.Dataset):
    def __getitem__(self, index):
        return self.check(index)


MAPS = {"async": Numbers, "torch": TorchNumbers}


class CollateUnless(Bad):
    def __call__(self, samples):
        return torch.tensor(
            [super(CollateUnless, self).__call__(sample) for sample in samples]
        )


STAGES = pytest.mark.parametrize("stage", ["fetch", "transform", "collate"])


def failing(stage, *bad, error=Mine, **options):
    """A loader over eight samples, in batches of two, in which `stage` fails for some of them."""
    fails = Bad(*bad, error=error)
    if stage == "fetch":
        return hr.DataLoader(Numbers(8, fails), 2, **options)
    if stage == "transform":
        return hr.DataLoader(Numbers(8), 2, transform=fails, **options)
    return hr.DataLoader(
        Numbers(8), 2, collate_fn=CollateUnless(*bad, error=error), **options
    )


def skipping(dataset, batch_size=2, **options):
    return hr.DataLoader(dataset, batch_size, on_error="skip", **options)


def lists(batches):
    return [batch.tolist() for batch in batches]


# What is delivered


class WithoutAttributes(Exception):
    def __getattr__(self, name):  # as urllib's HTTPError, once it is unpickled
        return self.__dict__["file"]


@STAGES
@pytest.mark.parametrize(
    ("error", "num_workers"),
    [(Mine, 0), (Mine, 1), (WithoutAttributes, 1), (GeneratorExit, 1)],
)
def test_batch_is_delivered_without_failed_samples(stage, num_workers, error):
    with failing(
        stage, 5, error=error, on_error="skip", num_workers=num_workers
    ) as loader:
        assert lists(loader) == [
            [0, 1],
            [2, 3],
            *([] if stage == "collate" else [[4]]),
            [6, 7],
        ]
        stats = loader.stats()
        (record,) = stats.skipped
        assert (record.stage, record.batch) == (stage, 2)
        assert record.type_name == (
            "ControlFlowError" if error is GeneratorExit else error.__name__
        )
        if stage == "collate":
            assert (
                stats.samples,
                stats.skipped_samples,
                stats.lost_batches,
                record.index,
            ) == (
                6,
                2,
                1,
                None,
            )
            assert "indices [4, 5], keys ['key-4', 'key-5']" in str(record)
        else:
            assert (stats.samples, stats.skipped_samples, record.index, record.key) == (
                7,
                1,
                5,
                "key-5",
            )
            assert stats.lost_batches == 0
            assert "5 is bad" in record.message


@pytest.mark.parametrize(("kind", "num_workers"), [("async", 0), ("torch", 1)])
def test_lost_batch_on_one_of_several_ranks_is_an_error_that_names_the_remedy(
    kind, num_workers, as_rank
):
    as_rank(1, 2)
    dataset = MAPS[kind](10, Bad(2, 6))
    with skipping(dataset, sampler=range(0, 10, 2), num_workers=num_workers) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0]
    dataset = MAPS[kind](8, Bad(2, 3, 5))
    sampler = hr.ElasticSampler(8, shuffle=False, rank=0, world_size=1)
    with skipping(dataset, sampler=sampler, num_workers=num_workers) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(
            hr.errors.TooManySkippedError,
            match=r"batch 1 lost all its samples.*coordinated=True",
        ):
            next(batches)
        assert lists(batches) == [[4], [6, 7]], "iteration can go on"


# When nothing is left


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": Numbers(8, Bad(*range(8)))},
        {"dataset": Numbers(8), "collate_fn": CollateUnless(*range(8)), "num_workers": 1},
        {"dataset": Count(8, failing=range(8))},
    ],
)
def test_epoch_in_which_everything_fails_is_an_error(options):
    with skipping(**options) as loader:
        with pytest.raises(
            hr.errors.TooManySkippedError, match=r"every sample failed.*8 samples"
        ) as caught:
            list(loader)
        assert isinstance(caught.value.__cause__, (Mine, BadSampleError))
        assert caught.value.skipped == loader.stats().skipped_samples == 8


def test_endless_sampler_whose_samples_all_fail_is_an_error_and_iteration_can_go_on():
    bad = Bad(*range(8))
    with skipping(Numbers(8, bad), 1, sampler=itertools.cycle(range(8))) as loader:
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(
                hr.errors.TooManySkippedError,
                match="each of the last 100 batches lost all its samples",
            ):
                next(batches)
        assert loader.stats().skipped_samples == 200


# Warnings and records


def caught_in(loader):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
    return [
        str(warning.message) for warning in caught if warning.category is RuntimeWarning
    ], caught


@pytest.mark.parametrize(("kind", "num_workers"), [("async", 0), ("torch", 1)])
def test_first_skip_of_each_epoch_warns(kind, num_workers):
    dataset = MAPS[kind](8, Bad(5, 6))
    with skipping(dataset, num_workers=num_workers) as loader:
        for _ in range(2):
            (message,), caught = caught_in(loader)
            for words in (
                "Mine",
                "5 is bad",
                "stage fetch",
                "batch 2",
                "index 5",
                "key 'key-5'",
                "loader.stats()",
            ):
                assert words in message
            assert caught[-1].filename == __file__


def test_first_lost_batch_warns():
    with skipping(Numbers(8, Bad(1, 4, 5, 6, 7))) as loader:
        (first, lost), _ = caught_in(loader)
    assert first.startswith(PREFIX)
    assert lost.startswith("batch 2 lost all its samples")
    assert "lost_batches" in lost
    with skipping(Numbers(8, Bad(4, 5, 7))) as loader:
        (lost,), _ = caught_in(loader)
    assert lost.startswith("batch 2 lost all its samples")


def test_records_are_the_last_hundred_and_hold_no_exception():
    refs = []

    class Huge(Exception):
        def __init__(self, text):
            super().__init__(text + "x" * 100_000)
            refs.append(weakref.ref(self))

    dataset = Numbers(1000, Bad(*range(0, 1000, 2), error=Huge))
    with skipping(dataset, 10, num_workers=1, placement="thread") as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert stats.skipped_samples == 500
    assert [record.index for record in stats.skipped] == list(range(800, 1000, 2))
    assert all(len(str(record)) < 700 for record in stats.skipped)
    assert len(repr(stats)) < 1000
    gc.collect()
    assert len(refs) == 500
    assert [ref for ref in refs if ref() is not None] == []


# Errors that end a stream


def dying():
    yield from range(20)
    raise LookupError("no sample 20")


class Dies(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for i in dying():
            yield i


class TorchDies(torch.utils.data.IterableDataset):
    def __iter__(self):
        return dying()


DYING = {
    "plain": Dies(),
    "shuffle": Dies().shuffle(4),
    "concat": hr.concat([Dies(), Dies()]),
    "torch": TorchDies(),
}


@pytest.mark.parametrize(
    ("name", "num_workers"), [*((name, 0) for name in DYING), ("plain", 1), ("torch", 1)]
)
def test_error_that_ends_a_generator_is_raised_and_not_skipped(name, num_workers):
    with hr.DataLoader(
        DYING[name], batch_size=4, num_workers=num_workers, on_error="skip"
    ) as loader:
        given = []
        with pytest.raises(LookupError, match="no sample 20") as raised:
            given.extend(sample for batch in loader for sample in batch.tolist())
    assert sorted(given) == sorted(set(given))
    assert len(given) <= 20
    assert "samples after it are missing" in "\n".join(raised.value.__notes__)


def test_part_of_a_stream_that_cannot_start_is_raised_and_not_skipped():
    store = in_memory({"a.txt": b"a line"})
    lines = hr.LinesDataset(["a.txt"], store=store, rank=0, world_size=2)
    loader = skipping(hr.concat([Count(2), lines, Count(2)]))
    with (
        loader,
        pytest.raises(ValueError, match="1 shards cannot be divided among 2 ranks"),
    ):
        list(loader)
