"""Faults of the disk cache: no sample is lost, none has wrong bytes, nothing hangs; also where ranges are joined.

Processes are real and killed by SIGKILL; disks are real file systems, mounted small or read-only
where the tests run as root. The server counts what was fetched.
"""

import asyncio
import hashlib
import os
import pathlib
import pickle
import signal
import stat
import subprocess
import warnings

import pytest

import headrace as hr
from headrace._store.disk_cache import HEADER, RECORD, DiskCache
from headrace._store.request_stats import RequestStats, session_stats
from object_server import Fault, ObjectServer
from tests.answers import answering
from tests.faults.peers import Peer, results, started_together
from tests.faults.programs import caches
from tests.faults.shortage import AS_ROOT, mounted
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


def entries_in(folder):
    """How many entries the indices have."""
    sizes = [path.stat().st_size for path in pathlib.Path(folder).glob("*.index")]
    return sum((size - len(HEADER)) // RECORD.itemsize for size in sizes)


def room_of(folder):
    return sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())


def read_all(dataset):
    """Each sample's bytes, read as a loader would, and what was counted."""

    async def read():
        session_stats.set(counts)
        return await asyncio.gather(*(dataset.aget(index) for index in range(len(dataset))))

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
    sums = [f"sha256:{hashlib.sha256(body_of(number)).hexdigest()}" for number in range(8)]
    listed = objects(server)
    cached = hr.ObjectDataset(listed._store, keys=listed.keys, checksums=sums).cache(folder)
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


def test_sigkill_at_any_point_of_a_write_leaves_a_cache_that_works(forks, tmp_path):
    names = [bytes([number]) * 16 for number in range(3)]
    max_bytes = 12_000
    with Peer(forks, caches.write_until_killed, str(tmp_path), names, DATA, max_bytes) as peer:
        calls = peer.receive()
    assert calls > 30, f"only {calls} calls were seen: the kills were not where they should be"
    for last in range(1, calls, 3):
        cache = DiskCache(tmp_path / str(last), max_bytes)
        for name in names:
            get(cache, name, DATA[:1000])
        assert not get(cache, names[2], DATA[:1000]), (
            f"killed before call {last}, and nothing is cached afterwards"
        )
        assert room_of(tmp_path / str(last)) <= max_bytes, f"killed before call {last}"


# A full disk, and bounds


def test_full_disk_loses_no_sample_and_warns_once(tmp_path):
    with ObjectServer(contents(60)) as server, mounted(tmp_path / "disk", "size=200k") as disk:
        cached = objects(server).cache(disk / "cache")
        with pytest.warns(RuntimeWarning, match="No space left") as caught:
            got = read_all(cached)[0]
        assert len(caught) == 1
        assert got == [body_of(number) for number in range(60)]
        kept = entries_in(disk / "cache")
        assert 0 < kept < 60
        for again in (cached, objects(server).cache(disk / "cache")):
            expect(again, hits=kept, misses=60 - kept, count=60)
        with warnings.catch_warnings():  # as errors: no sample is lost either
            warnings.simplefilter("error")
            expect(
                objects(server).cache(disk / "cache", version="other"), hits=0, misses=60, count=60
            )


def test_max_bytes_holds_and_the_oldest_entries_go_first(folder):
    bound = 100_000
    cache = DiskCache(folder, bound)
    names = [number.to_bytes(16, "little") for number in range(200)]
    for number, name in enumerate(names):
        get(cache, name, DATA[: 10 * number])
        assert room_of(folder) <= bound
    fresh = DiskCache(folder)  # without a bound: nothing is evicted
    there = [not get(fresh, name, DATA[: 10 * number]) for number, name in enumerate(names)]
    assert sum(there) > 40
    assert there == sorted(there)


def test_entry_larger_than_half_of_max_bytes_is_not_cached_and_evicts_nothing(folder):
    cache = DiskCache(folder, 10_000)
    get(cache, b"s" * 16, b"small")
    assert all(get(cache, NAME, bytes(5_100)) for _ in range(2))
    assert not get(cache, b"s" * 16, b"small")


# Files that change while they are in use, and files of others


def flipped(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flipped_in_records(index, *bits):
    """Flip a bit in each of some records."""
    for record, bit in enumerate(bits):
        flipped(index, (1 + record) * RECORD.itemsize + bit)


DAMAGES = {  # of the data and the index of eight entries: what is done, and how many are lost
    "data cut": (lambda data, index: os.truncate(data, 3 * SIZE + 100), 5),
    "a bit of the data": (lambda data, index: flipped(data, 2 * SIZE), 1),
    "data deleted": (lambda data, index: data.unlink(), 8),
    "data a pipe": (lambda data, index: (data.unlink(), os.mkfifo(data)), 8),
    "data a link": (lambda data, index: (data.rename(f"{data}2"), data.symlink_to(f"{data}2")), 8),
    "index cut": (lambda data, index: os.truncate(index, 4 * RECORD.itemsize + 7), 5),
    "index deleted": (lambda data, index: index.unlink(), 8),
    "index a folder": (lambda data, index: (index.unlink(), index.mkdir()), 8),
    "index with garbage": (
        lambda data, index: index.write_bytes(index.read_bytes() + os.urandom(500)),
        0,
    ),
    "index of another version": (lambda data, index: flipped(index, 15), 8),
    "a bit of each field of a record": (
        lambda data, index: flipped_in_records(index, 0, 15, 17, 23, 24, 31, 33),
        7,
    ),
    "a bit without meaning": (lambda data, index: flipped(index, RECORD.itemsize + 37), 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_fetched_again(server, folder, damage):
    cached = objects(server).cache(folder)
    for index in range(8):
        cached[index]
    held = cached[0].data
    (data,), (index,) = folder.glob("*.data"), folder.glob("*.index")
    does, lost = DAMAGES[damage]
    does(data, index)
    server.misbehave()
    fresh = objects(server).cache(folder)
    expect(fresh, hits=8 - lost, misses=lost)
    assert len(server.seen()) == lost
    expect(fresh, hits=8, misses=0, damaged=0)
    expect(objects(server).cache(folder), hits=8, misses=0, damaged=0)
    assert bytes(held) == body_of(0)


def test_damage_is_counted_and_also_found_after_the_first_read_if_bytes_are_missing(server, folder):
    read_all(objects(server).cache(folder))
    (data,) = folder.glob("*.data")
    flipped(data, 100)
    cached = objects(server).cache(folder)
    expect(cached, hits=7, misses=1, damaged=1)
    expect(cached, hits=8, misses=0, damaged=0)
    os.truncate(data, 100)
    expect(cached, hits=1, misses=7, damaged=7)


def test_other_files_of_the_folder_are_ignored_and_kept(server, folder):
    folder.mkdir(mode=0o700)
    others = ["lock", "total", "notes.data", "x.index", f"{'0' * 16}-1-{'0' * 8}.other"]
    for name in others:
        (folder / name).write_bytes(pickle.dumps(os.system))
    (folder / "a").mkdir()
    cached = objects(server).cache(folder, max_bytes=20_000)
    for _ in range(3):
        assert read_all(cached)[0] == [body_of(number) for number in range(8)]
    assert all((folder / name).exists() for name in [*others, "a"])


def test_folder_deleted_while_in_use_is_created_again(server, folder):
    cached = objects(server).cache(folder)
    expect(cached, hits=0, misses=8)
    subprocess.run(["rm", "-r", folder], check=True)
    fresh = pickle.loads(pickle.dumps(cached))
    expect(fresh, hits=0, misses=8)
    expect(fresh, hits=8, misses=0)
    expect(cached, hits=0, misses=8)
    expect(cached, hits=8, misses=0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# Several processes


def readers(forks, server, folder, *, count, objects, epochs=1, **cache_options):
    """Processes that read the same objects through the same folder."""
    expected = {key.rpartition("/")[2]: data for key, data in contents(objects).items()}
    store = store_of(server, "train")
    return started_together(
        forks, caches.read_objects, count, store, str(folder), expected, epochs, cache_options
    )


def test_each_process_reads_what_others_have_fetched(forks, server, folder):
    with readers(forks, server, folder, count=3, objects=8) as peers:
        first = [*map(sum, zip(*results(peers), strict=True))]
    assert len(server.seen()) == first[1] <= 24
    with readers(forks, server, folder, count=3, objects=8) as peers:
        assert [*map(sum, zip(*results(peers), strict=True))] == [24, 0, 0]


def test_process_finds_what_another_appends_while_it_runs(folder):
    one, other = DiskCache(folder), DiskCache(folder)
    get(one)
    get(other, b"of another entry")
    other.begin_epoch()
    assert not get(other)
    one.begin_epoch()
    assert not get(one, b"of another entry")
    assert entries_in(folder) == 2


def test_stopped_process_delays_no_other(forks, folder):
    with Peer(forks, caches.fetch_for_ever, str(folder), NAME) as peer:
        os.kill(peer.receive(), signal.SIGSTOP)
        cache = DiskCache(folder)
        assert get(cache)
        assert not get(cache)


def test_eviction_of_entries_that_others_read_loses_no_sample(forks, folder):
    bound = 120_000
    with (
        ObjectServer(contents(40)) as server,
        readers(forks, server, folder, count=3, objects=40, epochs=5, max_bytes=bound) as peers,
    ):
        for hits, misses, damaged in results(peers):
            assert (hits + misses, damaged) == (200, 0)
        assert room_of(folder) <= bound


# A read-only cache


def test_read_only_cache_serves_its_entries(tmp_path, server):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        cached = objects(server).cache(disk / "cache")
        assert [cached[index].key for index in range(3)] == ["000", "001", "002"]
        del cached  # it has its segment open for writing
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        fresh = objects(server).cache(disk / "cache")
        with pytest.warns(RuntimeWarning, match="Read-only file system") as caught:
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
                assert read_all(dataset)[0] == [body_of(number, salt) for number in range(4)]
    assert entries_in(folder) == 12


def test_stores_with_other_default_headers_have_different_entries(folder):
    def answer(request):
        request.send_object(request.headers["x-tenant"].encode(), {"ETag": '"1"'})

    with answering(answer) as url:
        for tenant in ("a", "b") * 2:
            store = hr.Store(
                url, options={"default_headers": {"x-tenant": tenant, "authorization": tenant}}
            )
            assert hr.ObjectDataset(store, keys=["k"]).cache(folder)[0].data == tenant.encode()
    assert entries_in(folder) == 2


def test_overwritten_objects_and_other_versions_are_fetched(folder):
    with ObjectServer(contents(8)) as server:
        expect(objects(server).cache(folder), hits=0, misses=8)
        expect(objects(server).cache(folder), hits=8, misses=0)
        server.put("train/004", body_of(4, salt=9))
        got, counts = read_all(objects(server).cache(folder))
        assert got[4] == body_of(4, salt=9)
        assert (counts.cache_hits, counts.cache_misses) == (7, 1)
        assert read_all(objects(server).cache(folder, version="second"))[1].cache_misses == 8


def test_no_secret_is_in_a_name_or_a_file(server, folder):
    secrets = {"access_key_id": "CANARY1", "secret_access_key": "CANARY2", "skip_signature": False}
    url, options = f"{server.url}/train", server.store_options
    cached = hr.ObjectDataset(hr.Store(url, options={**options, **secrets})).cache(folder)
    expect(cached, hits=0, misses=8)
    assert "CANARY" not in repr(cached) + cached.dataset.extent(0).store
    # Credentials are no part of an entry's name.
    expect(hr.ObjectDataset(hr.Store(url, options=options)).cache(folder), hits=8, misses=0)


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
        assert counts.cache_hits == 1, f"cancelled after {step} turns, and nothing is cached"
        return ended

    assert any(asyncio.run(cancelled_at(step, tmp_path / str(step))) for step in range(200)), (
        "it never ended"
    )


def test_fork_appends_to_a_segment_of_its_own(folder):
    cache, names = DiskCache(folder), (NAME, b"name of a second", b"name of a third.")
    get(cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later warn of threads
        pid = os.fork()
    if not pid:
        try:
            os._exit(0 if not get(cache) and get(cache, names[1]) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    get(cache, names[2])
    assert len(list(folder.glob("*.data"))) == 2
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
                    dataset, batch_size=4, collate_fn=len, placement=placement, num_workers=1
                ) as loader:
                    assert sum(loader) == 30
            with hr.DataLoader(dataset, batch_size=4, collate_fn=len, placement="thread") as loader:
                next(iter(loader))

        case(program, within=5.0)
        assert server.requests()["GET"] == 30
