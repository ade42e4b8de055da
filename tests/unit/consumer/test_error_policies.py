"""`on_error` as `SkipErrors` and as a function: decisions, limits and their errors."""

import itertools
from contextlib import nullcontext

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from tests.model.parts import BadSampleError, Count, TorchCount
from tests.unit.consumer.test_skipping import (
    Bad,
    Mine,
    Numbers,
    TorchNumbers,
    failing,
    lists,
)
from tests.unit.shards import tars
from tests.unit.shards.resuming import in_folder

pytestmark = pytest.mark.filterwarnings(
    "ignore:a sample was skipped", "ignore:batch .* lost all its samples"
)
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])
STREAMS = pytest.mark.parametrize("stream", [Count, TorchCount])


def loading(dataset, on_error, batch_size=2, **options):
    return hr.DataLoader(dataset, batch_size, on_error=on_error, **options)


@WORKERS
@pytest.mark.parametrize("kind", [Numbers, TorchNumbers])
def test_too_many_failures_in_a_row_are_an_error_with_counts_and_examples(
    kind, num_workers
):
    dataset = kind(12, Bad(3, 4, 5))
    with loading(
        dataset, hr.SkipErrors(1, max_in_a_row=2), num_workers=num_workers
    ) as loader:
        batches = iter(loader)
        assert lists(itertools.islice(batches, 2)) == [[0, 1], [2]]
        with pytest.raises(
            hr.errors.TooManySkippedError,
            match="3 samples in a row failed, and max_in_a_row is 2",
        ) as caught:
            next(batches)
        error = caught.value
        assert (error.skipped, error.delivered, len(error.examples)) == (3, 3, 3)
        assert "Mine: 5 is bad (stage fetch, batch 2, index 5, key 'key-5'" in str(error)
        assert error.examples[-1] in str(error)
        assert isinstance(error.__cause__, Mine)
        assert [record.index for record in loader.stats().skipped] == [3, 4, 5]
        assert lists(batches) == [[6, 7], [8, 9], [10, 11]], "iteration goes on"


def test_failures_in_a_row_are_counted_within_a_delivered_batch():
    loader = loading(
        Numbers(8), hr.SkipErrors(1, max_in_a_row=2), 8, transform=Bad(2, 3, 4)
    )
    with loader, pytest.raises(hr.errors.TooManySkippedError, match="3 samples in a row"):
        next(iter(loader))
    with loading(
        Numbers(8), hr.SkipErrors(1, max_in_a_row=2), 8, transform=Bad(1, 2, 4, 5)
    ) as loader:
        assert lists(loader) == [[0, 3, 6, 7]]


@STREAMS
def test_stream_that_always_fails_ends_with_the_limit(stream):
    with loading(
        stream(1000, failing=range(4, 1000)),
        hr.SkipErrors(1, max_in_a_row=5),
        collate_fn=list,
    ) as loader:
        batches = iter(loader)
        assert list(itertools.islice(batches, 2)) == [[0, 1], [2, 3]]
        with pytest.raises(hr.errors.TooManySkippedError, match="6 samples in a row"):
            next(batches)
        assert loader.stats().skipped_samples == 6


def test_share_is_compared_when_it_amounts_to_ten_samples():
    policy = hr.SkipErrors(max_share=0.1, max_in_a_row=100)
    with loading(
        Numbers(1000), policy, 10, transform=Bad(*range(0, 1000, 5)), collate_fn=len
    ) as loader:
        batches = iter(loader)
        assert list(itertools.islice(batches, 9)) == [8] * 9
        with pytest.raises(
            hr.errors.TooManySkippedError,
            match=r"20\.00% of the samples failed, and max_share is 10\.00%",
        ):
            next(batches)


def test_share_is_compared_at_the_end_of_a_short_epoch_and_none_allows_no_failure():
    with loading(Numbers(20), hr.SkipErrors(max_share=0.04), transform=Bad(3)) as loader:
        batches = iter(loader)
        assert len(list(itertools.islice(batches, 10))) == 10
        with pytest.raises(
            hr.errors.TooManySkippedError, match=r"5\.00% of the samples failed"
        ):
            next(batches)
        assert list(batches) == []
    with loading(Numbers(20), hr.SkipErrors(max_share=0.05), transform=Bad(3)) as loader:
        assert len(list(loader)) == 10
    loader = loading(Numbers(20), hr.SkipErrors(max_share=0), transform=Bad(0))
    with loader, pytest.raises(hr.errors.TooManySkippedError):
        next(iter(loader))


@pytest.mark.parametrize(
    "limits",
    [{"max_share": -0.1}, {"max_share": 1.1}, {"max_share": True}, {"max_share": "1 %"}, {"max_share": float("nan")},
     {"max_in_a_row": -1}, {"max_in_a_row": 1.5}, {"max_in_a_row": True}, {"max_in_a_row": None}],
)  # fmt: skip
def test_limit_out_of_range_is_refused(limits):
    (name,) = limits
    with pytest.raises((ValueError, TypeError), match=f"SkipErrors: {name}.* must be"):
        hr.SkipErrors(**limits)


# A function of the failure


@WORKERS
@pytest.mark.parametrize("stage", ["fetch", "transform"])
def test_function_is_given_the_failure_and_decides(stage, num_workers):
    given = []

    def decide(failure):
        given.append(failure)
        return "skip" if failure.index == 2 else "raise"

    with failing(stage, 2, 5, on_error=decide, num_workers=num_workers) as loader:
        batches = iter(loader)
        assert lists(itertools.islice(batches, 2)) == [[0, 1], [3]]
        with pytest.raises(Mine, match="5 is bad"):
            next(batches)
        assert lists(batches) == [[6, 7]]
        assert [record.index for record in loader.stats().skipped] == [2]
    assert [
        (failure.stage, failure.batch, failure.index, failure.key) for failure in given
    ] == [
        (hr.types.Stage(stage), 1, 2, "key-2"),
        (hr.types.Stage(stage), 2, 5, "key-5"),
    ]
    assert all(isinstance(failure.error, Mine) for failure in given)
    assert given[0].worker == (0 if num_workers and stage == "transform" else None)


def test_error_that_the_function_raises_is_raised_by_next_with_the_failure_as_its_cause():
    def decide(failure):
        if failure.index == 0:
            raise failure.error
        raise KeyError("quarantine") if failure.index == 2 else StopIteration

    with loading(Numbers(6), decide, transform=Bad(0, 2, 4)) as loader:
        batches = iter(loader)
        with pytest.raises(Mine) as caught:
            next(batches)
        assert "stage transform, batch 0, index 0" in caught.value.__notes__[-1]
        with pytest.raises(KeyError, match="quarantine") as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, Mine)
        assert "stage on_error, batch 1, index 2" in caught.value.__notes__[-1]
        with pytest.raises(hr.errors.ControlFlowError):
            next(batches)


def test_decision_that_is_none_is_a_type_error_that_names_the_failure():
    loader = loading(Numbers(4), lambda failure: "ignore", transform=Bad(0))
    with (
        loader,
        pytest.raises(
            TypeError, match=r'on_error must return "raise" or "skip".*index 0'
        ),
    ):
        next(iter(loader))


@STREAMS
def test_function_is_not_asked_about_an_error_that_ended_the_stream(stream):
    asked = []

    def decide(failure):
        asked.append(failure.index)
        return "skip"

    with loading(stream(1000, failing=range(1000)), decide) as loader:
        with pytest.raises(BadSampleError) as caught:
            list(loader)
        assert "stage fetch (100 failures in a row)" in caught.value.__notes__[-1]
    assert asked == list(range(99))


@WORKERS
@pytest.mark.parametrize(
    ("damage", "options", "lost", "words"),
    [
        (b"?", {}, 57, "from byte 52,224 of 112,640 cannot be read: about 57 samples"),
        (
            b"",
            {"shards_in_parallel": 1},
            50,
            "from byte 52,224 of 52,224 cannot be read: about 50 samples",
        ),
        (
            b"",
            {},
            1,
            "from byte 52,224 of 52,224 cannot be read: an unknown number of samples",
        ),
        (
            None,
            {"shards_in_parallel": 1},
            100,
            "nothing of it can be read: about 100 samples",
        ),
    ],
)
def test_rest_of_a_shard_is_warned_of_and_counts_as_its_samples(
    tmp_path, damage, options, lost, words, num_workers
):
    names = [f"{number}.tar" for number in range(3)]
    files = {
        name: tars.shard(f"{name[0]}-{sample:03}" for sample in range(100))
        for name in names
    }
    whole = files.pop("1.tar")
    if damage is not None:  # in the header of sample 51; None: no such file
        files["1.tar"] = whole[:52_224] + damage + (damage and whole[52_225:])
    dataset = hr.TarDataset(names, store=in_folder(tmp_path, files), **options)
    with hr.DataLoader(
        dataset, batch_size=None, num_workers=num_workers, on_error="skip"
    ) as loader:
        with pytest.warns(
            RuntimeWarning, match=f"the rest of a shard was skipped, owing to .*{words}"
        ):
            assert len(list(loader)) == (200 if damage is None else 250)
        assert loader.stats().skipped_samples == lost
    refused = pytest.raises(hr.errors.TooManySkippedError, match="max_share is 15")
    with (
        loading(dataset, hr.SkipErrors(max_share=0.15), None) as loader,
        refused if lost > 1 else nullcontext(),
    ):
        list(loader)


def test_undecodable_row_group_counts_as_its_rows_and_the_next_is_read(tmp_path):
    table = pa.table({"x": range(3000)})
    options = {
        "use_dictionary": False,
        "compression": "none",
        "write_page_checksum": True,
    }
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000, **options)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    with hr.DataLoader(
        hr.ParquetDataset(tmp_path), 5, on_error="skip"
    ) as loader:  # 200 batches in a row
        assert sum(len(batch["x"]) for batch in loader) == 2000
        assert loader.stats().skipped_samples == 1000
