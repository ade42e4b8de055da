"""Faults of the disk cache: no sample is lost, none has wrong bytes, nothing hangs; also where ranges are joined.

Processes are real and killed by SIGKILL; disks are real file systems, mounted small or read-only
where the tests run as root. The server counts what was fetched.
"""

import asyncio
import contextlib
import gc
import hashlib
import os
import pathlib
import pickle
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import time
import warnings

import pytest

import headrace as hr
from headrace._store import disk_cache
from headrace._store.disk_cache import DATABASE, FORMAT, DiskCache
from headrace._store.request_stats import RequestStats, session_stats
from object_server import Fault, ObjectServer
from tests.faults.peers import Peer, results, started_together
from tests.faults.programs import caches
from tests.faults.shortage import AS_ROOT, mounted
from tests.faults.watching import run_in_fork
from tests.servers import store_of
from tests.unit.shards import tars

QUICK = hr.RetryPolicy(max_attempts=2, initial_backoff=0.01)
SIZE = 6_000


def body_of(number, salt=0):
    return (number * 256 + salt).to_bytes(4, "little") * (SIZE // 4)


def contents(count, prefix="train", salt=0):
    return {f"{prefix}/{number:03}": body_of(number, salt) for number in range(count)}


@pytest.fixture(scope="module")
def started():
    with ObjectServer(contents(8)) as server:
        yield server


def objects(server, prefix="train", timeout=30.0, **more):
    store = store_of(server, prefix, timeout=timeout, retry=QUICK)
    return hr.ObjectDataset(store, **more)


def database_of(folder):
    return pathlib.Path(folder) / FORMAT / DATABASE


def execute(folder, sql):
    """The rows of an SQL statement on the database of a cache, from a connection of its own."""
    with contextlib.closing(
        sqlite3.connect(database_of(folder), isolation_level=None)
    ) as connection:
        return connection.execute(sql).fetchall()


def entries_in(folder):
    """How many entries the database has."""
    return execute(folder, "SELECT count(*) FROM entries")[0][0] if folder.exists() else 0


def read_all(dataset):
    """Each sample's bytes, read as a loader would, and what was counted."""

    async def read():
        session_stats.set(counts)
        return await asyncio.gather(
            *(dataset.aget(index) for index in range(len(dataset)))
        )

    counts = RequestStats()
    return [bytes(sample.data) for sample in asyncio.run(read())], counts


def expect(dataset, *, hits, misses, count=8, **more):
    got, counts = read_all(dataset)
    assert got == [body_of(number) for number in range(count)]
    found = {"hits": counts.cache_hits, "misses": counts.cache_misses}
    found |= {name: getattr(counts, f"cache_{name}") for name in more}
    assert found == {"hits": hits, "misses": misses, **more}


# One entry, and what is fetched for it, without a store: for faults at an exact place.

NAME = b"name of an entry"
DATA = bytes(range(256)) * 20


def get(cache, name=NAME, data=DATA):
    """Whether an entry had to be fetched; its bytes must be right in any case."""
    fetched = []

    async def fetch():
        fetched.append(name)
        return memoryview(data)

    assert bytes(asyncio.run(caches.read_through(cache, name, fetch))) == data
    return bool(fetched)


# Damaged downloads


def test_bytes_with_a_wrong_checksum_are_never_cached(server, folder):
    sums = [
        f"sha256:{hashlib.sha256(body_of(number)).hexdigest()}" for number in range(8)
    ]
    listed = objects(server)
    cached = hr.ObjectDataset(listed._store, keys=listed.keys, checksums=sums).cache(
        folder
    )
    server.misbehave(Fault("flip", key="train/003", at=1000))
    with pytest.raises(hr.errors.ChecksumError, match="'003'"):
        asyncio.run(cached.aget(3))
    assert entries_in(folder) == 0
    server.misbehave()
    expect(cached, hits=0, misses=8)
    expect(cached, hits=8, misses=0)


def test_damaged_tar_member_is_never_given(folder):
    with ObjectServer({"0.tar": tars.shard(range(3), bin=body_of)}) as server:
        tar = hr.TarDataset.index(f"{server.url}/0.tar", store=store_of(server))
        cached = tar.cache(folder)
        server.misbehave(Fault("flip", key="0.tar", at=100))
        # The dataset reads the member twice. The cached dataset reads the block before.
        for dataset, requests in ((tar, 2), (cached, 3), (cached, 2)):
            before = server.requests()["GET"]
            with pytest.raises(hr.errors.ShardError, match="corrupt tar"):
                asyncio.run(dataset.aget(0))
            assert server.requests()["GET"] == before + requests
        assert entries_in(folder) == 1
        server.misbehave()
        before = server.requests()["GET"]
        cached = pickle.loads(pickle.dumps(cached))
        for _ in range(2):
            assert [sample["bin"] for sample in map(cached.__getitem__, range(3))] == [
                body_of(n) for n in range(3)
            ]
        assert server.requests()["GET"] == before + 2  # the member, and the block again
        cached = pickle.loads(pickle.dumps(cached))
        assert cached[0]["bin"] == body_of(0)
        assert server.requests()["GET"] == before + 2


# SIGKILL


KILLS = int(os.environ.get("HEADRACE_CACHE_KILLS", "12"))


def test_sigkill_at_any_point_of_a_write_leaves_a_cache_that_works(forks, folder):
    """Processes that share a folder, and evict, are killed at random times and replaced."""
    bound = 3_000_000
    chance = random.Random(5)
    with contextlib.ExitStack() as stack:

        def started(number):
            peer = stack.enter_context(
                Peer(forks, caches.read_for_ever, str(folder), number, bound)
            )
            assert peer.receive() == "ready"
            return peer

        peers = [started(number) for number in range(3)]
        for number in range(KILLS):
            time.sleep(chance.uniform(0.0, 0.2))  # a kill at any moment
            victim = chance.randrange(3)
            peers[victim].kill()
            assert peers[victim].wait() == -signal.SIGKILL, "a sample had wrong bytes"
            peers[victim] = started(3 + number)
    assert database_of(folder).stat().st_size <= bound
    expected = hashlib.sha256(b"".join(map(caches.data_of, range(caches.COUNT)))).digest()
    cache = DiskCache(folder, bound)
    with warnings.catch_warnings(record=True) as caught:
        # The newest first.
        for numbers in (range(caches.COUNT), reversed(range(caches.COUNT))):
            found = {
                number: bytes(asyncio.run(caches.read_number(cache, number)))
                for number in numbers
            }
            joined = b"".join(found[number] for number in range(caches.COUNT))
            assert hashlib.sha256(joined).digest() == expected
    assert caught == []  # no kill has damaged the database
    assert cache.counts().cache_hits > 10
    assert cache.counts().cache_damaged == 0


# A full disk, and bounds


def test_full_disk_loses_no_sample_and_warns_once(tmp_path):
    with (
        ObjectServer(contents(60)) as server,
        mounted(tmp_path / "disk", "size=600k") as disk,
    ):
        cached = objects(server).cache(disk / "cache")
        with pytest.warns(RuntimeWarning, match="disk is full") as caught:
            got = read_all(cached)[0]
        assert len(caught) == 1
        assert got == [body_of(number) for number in range(60)]
        kept = entries_in(disk / "cache")
        assert 0 < kept < 60
        expect(cached, hits=kept, misses=60 - kept, count=60)
        with warnings.catch_warnings():  # as errors: no sample is lost either
            warnings.simplefilter("error")
            expect(
                objects(server).cache(disk / "cache", version="other"),
                hits=0,
                misses=60,
                count=60,
            )


def test_max_bytes_holds_and_the_oldest_entries_go_first(folder):
    bound = 1_000_000
    cache = DiskCache(folder, bound)
    names = [number.to_bytes(16, "little") for number in range(400)]
    for number, name in enumerate(names):
        get(cache, name, DATA * 8)
        if number % 50 == 49:  # SQLite copies the log when the last connection is closed
            del cache
            gc.collect()
            assert database_of(folder).stat().st_size <= bound
            cache = DiskCache(folder, bound)
    fresh = DiskCache(folder)  # without a bound: nothing is evicted
    there = [not get(fresh, name, DATA * 8) for name in names]
    assert sum(there) > 10
    assert there == sorted(there)


def test_log_is_copied_to_the_database_at_its_limit(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, "LOG_LIMIT", 300_000)
    monkeypatch.setattr(disk_cache, "BUSY_TIMEOUT", 0.1)
    cache, log = DiskCache(folder), pathlib.Path(f"{database_of(folder)}-wal")

    def largest(count):
        sizes = []
        for _ in range(count):
            get(cache, os.urandom(16))
            sizes.append(log.stat().st_size)
        return max(sizes)

    assert largest(50) < 400_000
    with contextlib.closing(
        sqlite3.connect(database_of(folder), isolation_level=None)
    ) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchall()
        assert largest(50) < 400_000  # nothing is written while a read does not end


def test_entry_larger_than_half_of_max_bytes_is_not_cached_and_evicts_nothing(folder):
    cache = DiskCache(folder, 1_000_000)
    get(cache, b"s" * 16, b"small")
    assert all(get(cache, NAME, bytes(510_000)) for _ in range(2))
    assert not get(cache, b"s" * 16, b"small")


# Files that change while they are in use


def overwritten(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def of_another_library(path):
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE entries (something TEXT)")


PAGE = disk_cache.PAGE_SIZE
# Of a database of eight entries: what is done, how many are lost, whether there is a warning.
DAMAGES = {
    "bytes of entries": (
        lambda path: execute(
            path.parent.parent, "UPDATE entries SET data = randomblob(6000)"
        ),
        8,
        False,
    ),
    "cut": (lambda path: os.truncate(path, 5 * PAGE + 100), 8, True),
    "not a database": (lambda path: path.write_bytes(os.urandom(50_000)), 8, True),
    "deleted": (lambda path: path.unlink(), 8, False),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), 8, True),
    "a link": (
        lambda path: (path.rename(f"{path}2"), path.symlink_to(f"{path}2")),
        8,
        True,
    ),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), 8, True),
    "of another library": (of_another_library, 8, True),
    "of another version": (lambda path: path.parent.rename(f"{path.parent}0"), 8, False),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_fetched_again(server, folder, damage):
    cached = objects(server).cache(folder)
    for index in range(8):
        cached[index]
    held = cached[0].data
    del cached  # closes the database
    gc.collect()
    does, lost, warned = DAMAGES[damage]
    does(database_of(folder))
    server.misbehave()
    fresh = objects(server).cache(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        damaged = lost * (damage == "bytes of entries")
        expect(fresh, hits=8 - lost, misses=lost, damaged=damaged)
    assert len(caught) == warned
    assert len(server.seen()) == lost
    expect(fresh, hits=8, misses=0, damaged=0)
    expect(objects(server).cache(folder), hits=8, misses=0, damaged=0)
    assert bytes(held) == body_of(0)


def test_any_damaged_byte_costs_no_sample(folder, tmp_path):
    names = [bytes([number]) * 16 for number in range(30)]
    cache = DiskCache(tmp_path / "intact")
    for name in names:
        get(cache, name, name * 100)
    del cache
    gc.collect()
    source = random.Random(3)
    size = database_of(tmp_path / "intact").stat().st_size
    for _ in range(60):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "intact", folder)
        # Most bytes of importance are in the first bytes of a page.
        at = source.randrange(size // PAGE) * PAGE + int(PAGE * source.random() ** 4)
        overwritten(database_of(folder), at, source.randbytes(4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for cache in (DiskCache(folder), DiskCache(folder), DiskCache(folder)):
                lost = sum(get(cache, name, name * 100) for name in names)
        assert not lost, at


def test_folder_deleted_while_in_use_is_created_again(server, folder):
    cached = objects(server).cache(folder)
    expect(cached, hits=0, misses=8)
    subprocess.run(["rm", "-r", folder], check=True)
    fresh = pickle.loads(pickle.dumps(cached))
    expect(fresh, hits=0, misses=8)
    expect(fresh, hits=8, misses=0)
    expect(cached, hits=8, misses=0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# Several processes


def test_each_process_reads_what_others_have_fetched(forks, server, folder):
    arguments = (
        forks,
        caches.read_objects,
        3,
        store_of(server, "train"),
        str(folder),
        contents(8),
    )
    with started_together(*arguments) as peers:
        first = [*map(sum, zip(*results(peers), strict=True))]
    assert len(server.seen()) == first[1] <= 24
    with started_together(*arguments) as peers:
        assert [*map(sum, zip(*results(peers), strict=True))] == [24, 0, 0]


def test_stopped_process_delays_no_other(forks, folder):
    cache = DiskCache(folder)
    get(cache)
    with Peer(forks, caches.lock_for_ever, str(database_of(folder))) as peer:
        os.kill(peer.receive(), signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(20):
            assert not get(cache)
            assert get(cache, b"of another entry")
        assert time.monotonic() - began < 2 * disk_cache.BUSY_TIMEOUT
    cache = DiskCache(folder)
    get(cache, b"of another entry")
    assert not get(cache, b"of another entry")


# A read-only cache


def test_read_only_cache_serves_its_entries(tmp_path, server):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        cached = objects(server).cache(disk / "cache")
        assert [cached[index].key for index in range(3)] == ["000", "001", "002"]
        del cached  # it has the database open for writing
        gc.collect()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        fresh = objects(server).cache(disk / "cache")
        with pytest.warns(RuntimeWarning, match="readonly database") as caught:
            expect(fresh, hits=3, misses=5)
        assert len(caught) == 1
        expect(fresh, hits=3, misses=5)


# Names of entries


def test_urls_with_the_same_basename_have_different_entries(folder):
    both = {**contents(4, "a/train"), **contents(4, "b/train", salt=1)}
    with ObjectServer(both) as one, ObjectServer(contents(4, "a/train", salt=2)) as other:
        datasets = [
            hr.ObjectDataset(store_of(server, prefix)).cache(folder)
            for server, prefix in ((one, "a/train"), (one, "b/train"), (other, "a/train"))
        ]
        for _ in range(2):
            for salt, dataset in enumerate(datasets):
                assert read_all(dataset)[0] == [
                    body_of(number, salt) for number in range(4)
                ]
    assert entries_in(folder) == 12


def test_overwritten_objects_and_other_versions_are_fetched(folder):
    with ObjectServer(contents(8)) as server:
        expect(objects(server).cache(folder), hits=0, misses=8)
        expect(objects(server).cache(folder), hits=8, misses=0)
        server.put("train/004", body_of(4, salt=9))
        got, counts = read_all(objects(server).cache(folder))
        assert got[4] == body_of(4, salt=9)
        assert (counts.cache_hits, counts.cache_misses) == (7, 1)
        assert (
            read_all(objects(server).cache(folder, version="second"))[1].cache_misses == 8
        )


# Other users


def test_with_umask_0_folder_and_files_belong_to_the_owner_only(server, tmp_path):
    folder = tmp_path / "made" / "with" / "parents"
    before = os.umask(0)
    try:
        expect(objects(server).cache(folder, max_bytes=1 << 20), hits=0, misses=8)
    finally:
        os.umask(before)
    for path in [tmp_path / "made", *(tmp_path / "made").rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


@pytest.mark.skipif(not AS_ROOT, reason="only root can give a folder to another user")
def test_folder_of_another_user_is_refused(server, folder, tmp_path):
    folder.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(hr.errors.CacheFolderError, match="user 12345"):
        objects(server).cache(link)
    travelled = pickle.dumps(objects(server).cache(folder))
    os.chown(folder, 12345, 12345)
    for use in (
        lambda: objects(server).cache(folder),
        lambda: asyncio.run(pickle.loads(travelled).aget(0)),
    ):
        with pytest.raises(hr.errors.CacheFolderError, match="user 12345"):
            use()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_folder_that_others_may_write_to_is_refused(server, folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(hr.errors.CacheFolderError, match=f"its mode is {mode:o}"):
        objects(server).cache(folder)


# Cancellation, forks


def test_read_cancelled_at_any_point_leaves_a_cache_that_works(tmp_path):
    async def cancelled_at(step, folder):
        """Cancel a read after so many turns of the loop, each of which waits until a thread has done something."""
        cache, counts = DiskCache(folder), RequestStats()

        async def fetch():
            await asyncio.sleep(0)
            return memoryview(DATA)

        async def read():
            assert bytes(await caches.read_through(cache, NAME, fetch)) == DATA

        task = asyncio.ensure_future(read())
        for _ in range(step):
            await asyncio.sleep(0)
            await asyncio.to_thread(int)
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])
        await read()
        session_stats.set(counts)
        await read()
        assert counts.cache_hits == 1, (
            f"cancelled after {step} turns, and nothing is cached"
        )
        return ended

    assert any(
        asyncio.run(cancelled_at(step, tmp_path / str(step))) for step in range(200)
    ), "it never ended"


def test_fork_opens_the_database_for_itself(folder):
    cache, names = DiskCache(folder), (NAME, b"name of a second", b"name of a third.")
    get(cache)

    def program():
        assert not get(cache)
        assert get(cache, names[1])

    run_in_fork(program)
    get(cache, names[2])
    fresh = DiskCache(folder)
    assert not any(get(fresh, name) for name in names)


def test_loaders_of_a_cached_dataset_leave_nothing(case, tmp_path):
    with ObjectServer(contents(30)) as server:
        store = store_of(server, "train")
        folder = tmp_path / "cache"

        def program() -> None:
            dataset = hr.ObjectDataset(store).cache(folder)
            for placement in ("thread", "process"):
                with hr.DataLoader(
                    dataset,
                    batch_size=4,
                    collate_fn=len,
                    placement=placement,
                    num_workers=1,
                ) as loader:
                    assert sum(loader) == 30
            with hr.DataLoader(
                dataset, batch_size=4, collate_fn=len, placement="thread"
            ) as loader:
                next(iter(loader))

        case(program, within=5.0)
        assert server.requests()["GET"] == 30
