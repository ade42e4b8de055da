"""Samples that are read together and cached each by itself: as few requests as without a cache, and no less safe.

What was fetched is counted by the server, byte by byte.
"""

import asyncio
import contextlib
import io
import os
import pathlib
import signal
import tarfile
import textwrap
import warnings

import numpy as np
import pytest
import torch

import headrace as hr
from headrace._core.cache.disk_cache import DiskCache
from headrace._core.cache.get_many import get_many
from headrace.datasets.cached import CachedRanges
from headrace.testing import Fault, ObjectServer
from tests.faults.test_cache import Child

WINDOW = 50  # tokens, of two bytes
COUNT = 400
SIZE = 6_000  # bytes of a tar's member
TOKENS = np.arange(WINDOW * COUNT, dtype=np.uint16)
QUICK = hr.RetryPolicy(max_attempts=2, initial_backoff=0.01)


def tar_of(count):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number in range(count):
            info = tarfile.TarInfo(f"{number:03}.bin")
            info.size = SIZE
            archive.addfile(info, io.BytesIO(number.to_bytes(4, "little") * (SIZE // 4)))
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def server():
    with ObjectServer({"0.bin": TOKENS.tobytes(), "1.bin": TOKENS.tobytes(), "0.tar": tar_of(64)}) as server:
        yield server


def windows(server, *shards):
    urls = [f"{server.url}/{shard}.bin" for shard in shards or (0,)]
    return hr.TokenDataset(urls, seq_len=WINDOW, store=hr.Store(server.url, options=server.store_options))


def tar(server):
    return hr.TarDataset.index(
        f"{server.url}/0.tar", store=hr.Store(server.url, options=server.store_options), cache_folder=False
    )


def loader_of(dataset, *, batch_size=20, **more):
    more = {"placement": "thread", "executor": "thread", "concurrency": 8, "retry": QUICK, **more}
    return hr.DataLoader(dataset, batch_size=batch_size, num_workers=1, prefetch_factor=10, **more)


def epoch(dataset, **more):
    """The rows of one epoch of windows, and what was counted."""
    with loader_of(dataset, **more) as loader:
        rows = [row for batch in loader for row in batch.tolist()]
        return rows, loader.stats().requests


def rows_of(numbers):
    return [TOKENS[number * WINDOW : number * WINDOW + WINDOW].tolist() for number in numbers]


def counted(counts, *names):
    return {name: getattr(counts, f"cache_{name}") for name in names}


def files_in(folder):
    return sorted(path for path in pathlib.Path(folder).glob("?/*"))


def spans(server):
    """From where to where each request since the last `misbehave` has read."""
    found = [seen.span.removeprefix("bytes=").split("-") for seen in server.seen()]
    return sorted((int(start), int(stop) + 1) for start, stop in found)


# As few requests, and each byte once


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_a_first_epoch_makes_no_more_requests_than_without_a_cache_and_the_second_none(
    server, folder, placement, engine_loop
):
    expected = rows_of(range(COUNT))
    _, plain = epoch(windows(server), placement=placement)
    cached = windows(server).cache(folder)
    rows, first = epoch(cached, placement=placement)
    assert rows == expected
    assert max(first.requests, plain.requests) < COUNT / 20
    assert counted(first, "hits", "misses", "waits", "damaged") == {
        "hits": 0,
        "misses": COUNT,
        "waits": 0,
        "damaged": 0,
    }
    rows, second = epoch(cached, placement=placement)
    assert rows == expected
    assert second.requests == 0
    assert counted(second, "hits", "misses") == {"hits": COUNT, "misses": 0}


def test_members_of_a_tar_are_read_together_and_cached_one_by_one(server, folder):
    def read(dataset):
        with loader_of(dataset, batch_size=8, collate_fn=list) as loader:
            samples = [sample for batch in loader for sample in batch]
            return samples, loader.stats().requests

    expected, plain = read(tar(server))
    samples, first = read(tar(server).cache(folder))
    assert samples == expected
    assert max(first.requests, plain.requests) <= 8
    assert len(files_in(folder)) == 64
    samples, second = read(tar(server).cache(folder))
    assert samples == expected
    assert second.requests == 0


def test_what_is_on_disk_is_read_from_there_and_only_the_rest_is_fetched(server, folder):
    cached = windows(server).cache(folder)
    epoch(torch.utils.data.Subset(cached, range(100, COUNT)))
    server.misbehave()
    rows, counts = epoch(cached)
    assert rows == rows_of(range(COUNT))
    assert counted(counts, "hits", "misses") == {"hits": COUNT - 100, "misses": 100}
    read = spans(server)
    assert min(start for start, _ in read) == 0
    assert max(stop for _, stop in read) == 100 * WINDOW * 2
    assert sum(stop - start for start, stop in read) == 100 * WINDOW * 2


def test_an_index_that_is_asked_for_twice_is_fetched_once(server, folder):
    numbers = [5, 5, 6, 7, 5, 6] * 20
    cached = windows(server).cache(folder)
    server.misbehave()
    rows, _ = epoch(torch.utils.data.Subset(cached, numbers), batch_size=len(numbers))
    assert rows == rows_of(numbers)
    assert spans(server) == [(5 * WINDOW * 2, 8 * WINDOW * 2)]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_selections_and_rows_are_seen_through_also_where_only_a_part_is_cached(server, folder, concurrency):
    first, second = windows(server, 0), windows(server, 1).cache(folder)
    both = torch.utils.data.ConcatDataset([first.take(100), second.take(100)])
    for requests, hits, misses in ((True, 0, 100), (True, 100, 0)):
        rows, counts = epoch(both, concurrency=concurrency)
        assert rows == rows_of(range(100)) * 2
        assert (0 < counts.requests < 20) == requests
        assert counted(counts, "hits", "misses") == {"hits": hits, "misses": misses}
    rows, counts = epoch(torch.utils.data.Subset(second, range(50, 150)), concurrency=concurrency)
    assert rows == rows_of(range(50, 150))
    assert counted(counts, "hits", "misses") == {"hits": 50, "misses": 50}


def test_a_selection_works_in_a_stock_loader(server, folder):
    stock = torch.utils.data.DataLoader(windows(server).cache(folder).take(30), batch_size=10)
    assert [row for batch in stock for row in batch.tolist()] == rows_of(range(30))


def test_a_dataset_whose_bytes_are_not_those_of_its_ranges_is_not_joined(server, folder):
    class Reversed(hr.TokenDataset):
        async def read_bytes(self, index):
            return memoryview(bytes(await super().read_bytes(index))[::-1])

    shard = f"{server.url}/0.bin"
    cached = Reversed(shard, seq_len=WINDOW, store=hr.Store(server.url, options=server.store_options)).cache(folder)
    assert not isinstance(cached, CachedRanges)
    rows, _ = epoch(cached)
    assert rows == [TOKENS.byteswap()[n * WINDOW : n * WINDOW + WINDOW][::-1].tolist() for n in range(COUNT)]


# Several that want the same

READS = """
import headrace as hr

dataset = hr.TokenDataset("0.bin", seq_len=window, store=hr.Store(url, options=options)).cache(folder, **more)
options = {"num_workers": 1, "prefetch_factor": 10, "concurrency": 8, "placement": "thread", "executor": "thread"}
with hr.DataLoader(dataset, batch_size=20, **options) as loader:
    wire.send("ready")
    wire.recv()
    rows = [row for batch in loader for row in batch.tolist()]
    counts = loader.stats().requests
wire.send((rows, counts.cache_hits, counts.cache_misses, counts.cache_damaged))
"""


def reading(server, folder, **more):
    given = {"url": server.url, "options": server.store_options, "folder": str(folder), "window": WINDOW}
    return Child(READS, **given, more=more)


def test_several_processes_that_want_the_same_fetch_each_byte_once(server, folder):
    server.latency = 0.05
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(reading(server, folder)) for _ in range(4)]
        for child in children:
            assert child.hear() == "ready"
        server.misbehave()
        for child in children:
            child.wire.send("go")
        told = [child.hear() for child in children]
        for child in children:
            child.join()
    expected = rows_of(range(COUNT))
    assert all(rows == expected for rows, *_ in told)
    hits, misses, damaged = (sum(column) for column in list(zip(*told, strict=True))[1:])
    assert (hits, misses, damaged) == (3 * COUNT, COUNT, 0)
    read = spans(server)
    assert sum(stop - start for start, stop in read) == TOKENS.nbytes


def test_loaders_of_one_process_that_want_the_same_fetch_each_byte_once(server, folder):
    server.latency = 0.05
    cached = windows(server).cache(folder)
    server.misbehave()
    with loader_of(cached) as one, loader_of(cached) as other:
        pairs = list(zip(one, other, strict=True))
    assert [row for batch, _ in pairs for row in batch.tolist()] == rows_of(range(COUNT))
    assert all(torch.equal(*pair) for pair in pairs)
    assert sum(stop - start for start, stop in spans(server)) == TOKENS.nbytes


NAMES = [bytes([number]) * 32 for number in range(40)]
BODIES = [bytes([number]) * 100 for number in range(40)]

HOLDS = """
import asyncio
from headrace._core.cache.disk_cache import DiskCache
from headrace._core.cache.get_many import get_many

async def read(chosen, others):
    wire.send(len(chosen))
    await asyncio.Event().wait()

async def main():
    async for _ in get_many(DiskCache(folder), names, read, None): pass

asyncio.run(main())
"""


async def together(cache, names=NAMES, *, refused=(), told=lambda: None):
    """What comes, by position, and what had to be read."""
    asked = []

    async def read(chosen, others):
        asked.append((chosen, others))
        return [memoryview(BODIES[NAMES.index(names[position])]) for position in chosen]

    def accept(found):
        good = [(position, data) for position, data in zip(*found, strict=True) if position not in refused]
        return [position for position, _ in good], [data for _, data in good]

    come = {}
    async for positions, views in get_many(cache, names, read, accept):
        come.update(zip(positions, map(bytes, views), strict=True))
        told()
    return come, asked


def all_of(names=NAMES):
    return {position: BODIES[NAMES.index(name)] for position, name in enumerate(names)}


def test_the_locks_of_a_dead_process_are_free(folder, on_loop):
    with Child(HOLDS, folder=str(folder), names=NAMES) as child:
        assert child.hear() == len(NAMES)
        child.kill()
        come, asked = on_loop(lambda: together(DiskCache(folder)))
    assert come == all_of()
    assert asked == [(list(range(40)), [])]
    assert len(files_in(folder)) == len(NAMES)


def test_a_stopped_process_delays_a_joined_read_no_longer_than_a_single_one(folder, on_loop):
    with Child(HOLDS, folder=str(folder), names=NAMES[:30]) as child:
        assert child.hear() == 30
        os.kill(child.process.pid, signal.SIGSTOP)
        cache = DiskCache(folder, fetch_timeout=0.3)
        come, asked = on_loop(lambda: together(cache))
        child.kill()
    assert come == all_of()
    # First what nobody else has, then at once all that somebody has not let go of.
    assert asked == [(list(range(30, 40)), list(range(30))), (list(range(30)), [])]
    assert len(files_in(folder)) == 10


def test_what_another_process_has_when_it_dies_is_read_together_too(folder, on_loop):
    with Child(HOLDS, folder=str(folder), names=NAMES[:30]) as child:
        assert child.hear() == 30

        async def main():
            own_is_read = asyncio.Event()
            reading = asyncio.ensure_future(together(DiskCache(folder), told=own_is_read.set))
            await own_is_read.wait()
            child.kill()
            return await reading

        come, asked = on_loop(main)
    assert come == all_of()
    assert [len(chosen) for chosen, _ in asked] == [10, 1, 29]


def test_two_that_want_the_same_in_opposite_order_do_not_wait_for_each_other(folder, on_loop):
    async def main():
        cache = DiskCache(folder)
        return await asyncio.gather(together(cache), together(cache, NAMES[::-1]), together(cache))

    for come, names in zip(on_loop(main), (NAMES, NAMES[::-1], NAMES), strict=True):
        assert come[0] == all_of(names)


# What goes wrong

# As in test_cache.py: dies before the `last`-th call of a C function by the cache's modules.
DIES = """
import asyncio, os, signal, sys, threading
from headrace._core.cache.disk_cache import DiskCache
from headrace._core.cache.get_many import get_many

seen = 0

def trace(frame, event, function):
    global seen
    if event == "c_call" and "/headrace/_core/cache/" in frame.f_code.co_filename:
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)

async def read(chosen, others):
    return [memoryview(bodies[position]) for position in chosen]

async def main():
    async for _ in get_many(DiskCache(folder, max_bytes), names, read, lambda found: found): pass

threading.setprofile(trace)
sys.setprofile(trace)
asyncio.run(main())
"""


@pytest.mark.parametrize("max_bytes", [None, 4096 * 3], ids=["no bound", "a bound"])
def test_sigkill_at_any_point_leaves_a_cache_that_works(tmp_path, max_bytes, on_loop):
    names = NAMES[:2]
    for last in range(1, 1000, 3):
        folder = tmp_path / str(last)
        if max_bytes is not None:  # so that the write has to make room
            on_loop(lambda folder=folder: together(DiskCache(folder, max_bytes), NAMES[5:7]))
        given = {"folder": str(folder), "names": names, "bodies": BODIES, "max_bytes": max_bytes}
        with Child(DIES, last=last, **given) as child:
            child.process.join()
            killed = child.process.exitcode == -signal.SIGKILL
        if not killed:
            break
        cache = DiskCache(folder, max_bytes)
        for _ in range(2):
            come, asked = on_loop(lambda cache=cache: together(cache, names))
            assert come == all_of(names)
        assert asked == [], f"killed before call {last}, and what is fetched then does not stay"
        assert not list(folder.glob("?/*.part")), f"killed before call {last}, and a part of it stays"
        if max_bytes is not None:
            assert 4096 * len(files_in(folder)) <= max_bytes, f"killed before call {last}, and the bound does not hold"
    else:
        raise AssertionError("the child never came to its end")
    assert last > 60, f"only {last} calls were seen: the kills were not where they should be"


def test_what_is_not_accepted_neither_comes_nor_stays(folder, on_loop):
    come, _ = on_loop(lambda: together(DiskCache(folder), refused={3, 7}))
    assert come == {position: body for position, body in all_of().items() if position not in (3, 7)}
    assert len(files_in(folder)) == 38


def test_a_read_that_is_cancelled_at_any_point_leaves_nothing_held(tmp_path, on_loop):
    async def cancelled_at(step, folder):
        cache = DiskCache(folder)
        task = asyncio.ensure_future(together(cache, NAMES[:3]))
        for _ in range(step):
            await asyncio.sleep(0)
            await asyncio.to_thread(lambda: None)
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])
        come, _ = await together(cache, NAMES[:3])
        assert come == all_of(NAMES[:3])
        come, asked = await together(cache, NAMES[:3])
        assert (come, asked) == (all_of(NAMES[:3]), []), f"cancelled after {step} turns, and nothing is cached any more"
        return ended

    for step in range(200):
        if on_loop(lambda step=step: cancelled_at(step, tmp_path / str(step))):
            return
    raise AssertionError("it never came to its end")


def test_a_damaged_member_is_read_again_and_its_neighbours_are_not(server, folder):
    cached = tar(server).cache(folder)
    server.misbehave(Fault("flip", key="0.tar", at=10 * (SIZE + 656) + 1000, times=1))
    with loader_of(cached, batch_size=64, collate_fn=list) as loader:
        samples = next(iter(loader))
    assert [sample["bin"][:4] for sample in samples] == [number.to_bytes(4, "little") for number in range(64)]
    assert len(server.seen()) == 2
    assert len(files_in(folder)) == 64


def test_when_the_joined_read_fails_each_sample_is_fetched_by_itself_and_cached(server, folder):
    cached = windows(server).cache(folder)
    server.misbehave(Fault("status", key="0.bin", status=403, times=1))
    rows, counts = epoch(cached.take(20))
    assert rows == rows_of(range(20))
    assert counts.requests == 21
    assert len(files_in(folder)) == 20


def test_a_store_that_refuses_names_each_sample_and_nothing_stays(server, folder):
    cached = windows(server).cache(folder)
    server.misbehave(Fault("status", key="0.bin", status=403))
    with loader_of(cached.take(20), on_error="skip", batch_size=5) as loader:
        with pytest.raises(hr.TooManySkippedError):
            list(loader)
        skipped = loader.stats().skipped
    assert sorted(skip.index for skip in skipped) == list(range(20))
    assert all(skip.key == cached.sample_key(skip.index) for skip in skipped)
    assert files_in(folder) == []


def test_a_file_that_is_damaged_is_fetched_again_together_with_what_is_missing(server, folder):
    cached = windows(server).cache(folder)
    epoch(cached.take(60))
    damaged = files_in(folder)[:15]
    for path in damaged:
        with open(path, "r+b") as file:
            file.truncate(40)
    rows, counts = epoch(windows(server).cache(folder).take(60))
    assert rows == rows_of(range(60))
    assert counted(counts, "hits", "misses", "damaged") == {"hits": 45, "misses": 15, "damaged": 15}
    assert counts.requests <= 4


def test_a_folder_that_changed_hands_is_refused_and_gets_nothing(server, folder):
    cached = windows(server).cache(folder)
    folder.chmod(0o777)
    with loader_of(cached.take(20)) as loader, pytest.raises(hr.CacheFolderError, match="may write"):
        list(loader)
    assert files_in(folder) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a file system: needs root")
def test_a_full_disk_costs_no_sample_and_warns_once(server, tmp_path):
    from tests.faults.test_cache import mounted

    with mounted(tmp_path / "small", "size=300k") as small:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows, _ = epoch(windows(server).cache(small / "cache"))
            assert rows == rows_of(range(COUNT))
        assert len([each for each in caught if "disk cache" in str(each.message)]) == 1
        rows, counts = epoch(windows(server).cache(small / "cache"))
        assert rows == rows_of(range(COUNT))
        assert counts.cache_hits > 10


def test_a_bound_holds_and_costs_no_sample(server, folder):
    most = 4096 * 50
    cached = windows(server).cache(folder, max_bytes=most)
    for _ in range(3):
        rows, counts = epoch(cached)
        assert rows == rows_of(range(COUNT))
        assert counts.cache_evicted > 0
        assert 0 < sum(-(-path.stat().st_size // 4096) * 4096 for path in files_in(folder)) <= most


def test_an_epoch_that_is_left_in_the_middle_holds_nothing(server, folder):
    server.latency = 0.02
    cached = windows(server).cache(folder)
    with loader_of(cached) as loader:
        for _ in range(3):
            next(iter(loader))
    with Child(
        textwrap.dedent(READS),
        url=f"{server.url}/0.bin",
        options=server.store_options,
        folder=str(folder),
        window=WINDOW,
        more={},
    ) as child:
        assert child.hear() == "ready"
        child.wire.send("go")
        rows, *_ = child.hear()
        assert rows == rows_of(range(COUNT))
        child.join()
    assert not [path for path in files_in(folder) if path.name.endswith(".part")]
