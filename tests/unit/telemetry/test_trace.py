"""`hr.trace`: what is in the file, that Perfetto's trace processor loads it, and what goes wrong."""

import asyncio
import collections
import gzip
import json
import os
import resource

import pytest
import torch

import headrace as hr
from tests.datasets import Numbers, TorchStream
from tests.faults.watching import run_in_fork
from tests.trace_processor import TraceProcessor, missing
from tests.unit.streams.reading import Count

LENGTH, BATCH = 64, 8
SQUARES = [index * index for index in range(LENGTH)]


class Photos(Numbers):
    async def aget(self, index):
        await asyncio.sleep(0.002)  # the latency
        return torch.full((100,), index)


class Joined(Photos):
    async def agets(self, indices):
        return [torch.full((100,), index) for index in indices]


def double(sample):
    return 2 * sample


def events_of(path):
    """The events of a complete file."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)[
        "traceEvents"
    ]


def calls_of(events):
    return [event for event in events if event["name"] == "next()" and event["ph"] == "b"]


def all_loaders():
    """One of each kind, by its name in the trace."""
    options = {"batch_size": BATCH, "collate_fn": torch.utils.data.default_collate}
    return {
        "Photos": hr.DataLoader(
            Photos(LENGTH), transform=double, num_workers=2, concurrency=16, **options
        ),
        "Photos 2": hr.DataLoader(
            Photos(LENGTH), transform=double, concurrency=16, **options
        ),
        "Photos 3": hr.DataLoader(
            Photos(LENGTH),
            placement="process",
            hedge="auto",
            memory_budget=1 << 20,
            **options,
        ),
        "Joined": hr.DataLoader(
            Joined(LENGTH), placement="thread", num_workers=2, transform=double, **options
        ),
        "Count": hr.DataLoader(Count(LENGTH), in_order=False, **options),
        "list": hr.DataLoader(SQUARES, **options),
        "TorchStream": hr.DataLoader(TorchStream(LENGTH), num_workers=2, **options),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The trace of an epoch of each kind of loader, one after the other, and of two at the same time."""
    path = tmp_path_factory.mktemp("trace") / "epoch.json.gz"
    loaders = all_loaders()
    with hr.trace(path):
        for loader in loaders.values():
            assert sum(map(len, loader)) == LENGTH
        for first, second in zip(loaders["Photos 2"], loaders["Photos 2"], strict=True):
            assert torch.equal(first, second)
        asyncio.run(both_at_once(loaders["Photos 3"]))
    for loader in loaders.values():
        loader.close()
    return path


async def both_at_once(loader):
    async def read():
        return [len(batch) async for batch in loader]

    await asyncio.gather(read(), read())


def test_batches_and_single_fetches_are_in_it_once(path):
    events = events_of(path)
    calls = collections.Counter(event["cat"] for event in calls_of(events))
    often = {"Photos 2": 3, "Photos 3": 3}
    assert calls == {name: often.get(name, 1) * LENGTH // BATCH for name in all_loaders()}
    began = collections.Counter(
        (event["cat"], event["args"]["batch"], event["args"]["slot"])
        for event in events
        if event["name"] == "single fetch" and event["ph"] == "b"
    )
    assert {key: count for key, count in began.items() if key[0] == "Photos"} == {
        ("Photos", batch, slot): 1
        for batch in range(LENGTH // BATCH)
        for slot in range(BATCH)
    }
    assert {count for key, count in began.items() if key[0] == "Joined"} == {1}
    assert (
        sum(count for key, count in began.items() if key[0] == "Joined")
        == LENGTH // BATCH
    )


def test_work_is_in_the_process_that_did_it(path):
    events = events_of(path)
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["name"] == "process_name"
    }
    worked = {
        (event["cat"], names[event["pid"]])
        for event in events
        if event["name"] == "transform and collate" and event["ph"] == "X"
    }
    workers = {
        f"worker {number} of {name}"
        for name in ("Photos", "Joined", "TorchStream")
        for number in (0, 1)
    }
    assert {name for _, name in worked} - {"consumer", "loader of Photos 3"} <= workers
    assert {
        ("Photos 2", "consumer"),
        ("list", "consumer"),
        ("Photos 3", "loader of Photos 3"),
    } <= worked
    assert names[os.getpid()] == "consumer"


@pytest.fixture(scope="module")
def processor(path):
    if (reason := missing()) is not None:
        pytest.skip(reason)
    processor = TraceProcessor()
    processor.load(path)
    yield processor
    processor.close()


def test_trace_processor_drops_nothing(processor, path):
    assert (
        processor.query(
            "SELECT name, value FROM stats WHERE severity != 'info' AND value > 0"
        )
        == []
    )
    assert processor.query(
        "SELECT count() AS n FROM stats WHERE name GLOB '*flow*without*' AND value > 0"
    ) == [(0,)]
    events = events_of(path)
    slices = sum(event["ph"] in "Xb" for event in events)
    assert processor.query("SELECT count() AS n FROM slice") == [(slices,)]
    assert processor.query("SELECT count() AS n FROM slice WHERE dur < 0") == [(0,)]


def test_batch_is_followed_over_all_processes_by_sql(processor):
    rows = processor.query("""
        INCLUDE PERFETTO MODULE slices.with_context;
        WITH everywhere AS (
            SELECT ts, name, category, process_name, arg_set_id FROM thread_slice
            UNION ALL SELECT ts, name, category, process_name, arg_set_id FROM process_slice
        )
        SELECT name, process_name FROM everywhere
        WHERE category = 'Photos' AND EXTRACT_ARG(arg_set_id, 'args.batch') = 3
          AND EXTRACT_ARG(arg_set_id, 'args.samples') = 8
        ORDER BY ts
    """)
    assert {rows[0], rows[1]} == {("batch", "consumer"), ("plan", "consumer")}
    elsewhere = [row for row in rows if row[1] != "consumer"]
    assert elsewhere in [
        [("transform and collate", f"worker {number} of Photos")] for number in (0, 1)
    ]
    assert rows[-1] == ("delivery", "consumer")


# The block.


def test_loader_that_runs_is_traced_from_its_next_batch_until_the_end_of_the_block(
    tmp_path,
):
    with hr.DataLoader(Photos(LENGTH), BATCH, concurrency=4) as loader:
        epoch = iter(loader)
        values = [next(epoch)]
        with hr.trace(tmp_path / "t.json") as path:
            values += [next(epoch) for _ in range(5)]
        values += list(epoch)
    assert torch.cat(values)[:, 0].tolist() == list(range(LENGTH))
    events = events_of(path)
    assert [event["args"]["batch"] for event in calls_of(events)] == [1, 2, 3, 4, 5]
    assert any(event["name"] == "single fetch" for event in events)


def test_two_traces_at_once_are_the_same_and_a_file_that_exists_is_replaced(tmp_path):
    with hr.DataLoader(SQUARES, BATCH) as loader:
        with (
            hr.trace(tmp_path / "t.json") as path,
            hr.trace(tmp_path / "other.json") as other,
        ):
            list(loader)
        assert len(events_of(path)) == len(events_of(other)) > LENGTH // BATCH
        with hr.trace(path):
            pass
        assert len(events_of(path)) == 1  # complete


@pytest.fixture
def small_files():
    """Files of this process can have 64 KiB at most."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_an_error_at_the_end_and_does_not_stop_the_loop(
    tmp_path, small_files
):
    samples = []
    with hr.DataLoader(list(range(2000)), 1) as loader:
        with pytest.raises(OSError, match="too large"), hr.trace(tmp_path / "t.json"):
            samples += loader
        assert len(samples) == 2000
        with (
            pytest.raises(OSError, match="too large") as raised,
            hr.trace(tmp_path / "t.json"),
        ):
            raise KeyError(len(list(loader)))
        assert isinstance(raised.value.__context__, KeyError)
        with pytest.raises(KeyError), hr.trace(tmp_path / "whole.json") as path:
            raise KeyError(next(iter(loader)))
    assert events_of(path)  # complete
    with (
        pytest.raises(FileNotFoundError),
        hr.trace(tmp_path / "no such folder" / "t.json"),
    ):
        raise AssertionError("the block was entered")


def test_fork_leaves_the_file_alone(tmp_path):
    def read():
        list(loader)
        tracing.__exit__(None, None, None)

    tracing = hr.trace(tmp_path / "t.json")
    with hr.DataLoader(SQUARES, BATCH) as loader:
        path = tracing.__enter__()
        run_in_fork(read)
        read()
    events = events_of(path)
    assert len(calls_of(events)) == LENGTH // BATCH
