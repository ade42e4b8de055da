"""Faults of the disk cache: no sample is lost, none has wrong bytes, nothing hangs.

Processes are real and killed by SIGKILL; disks are real file systems, mounted small or read-only where the tests run as
root. The server counts what was fetched.
"""

import asyncio
import contextlib
import gc
import hashlib
import io
import os
import pathlib
import pickle
import signal
import stat
import subprocess
import tarfile
import warnings

import pytest

import headrace as hr
from headrace._core.cache.disk_cache import DiskCache
from headrace._core.cache.entry import TRAILER
from headrace._core.cache.locks import Locks
from headrace._core.cache.quota import DISK_BLOCK
from headrace._core.store.request_stats import RequestStats, second_attempt, session_stats
from object_server import Fault, ObjectServer
from tests.answers import answering
from tests.faults.peers import Peer, results, started_together
from tests.faults.programs import caches
from tests.faults.shortage import AS_ROOT, mounted

QUICK = hr.RetryPolicy(max_attempts=2, initial_backoff=0.01)
SIZE = 6_000


def body_of(number, salt=0):
    return (number * 256 + salt).to_bytes(4, "little") * (SIZE // 4)


def contents(count, prefix="train", salt=0):
    return {f"{prefix}/{number:03}": body_of(number, salt) for number in range(count)}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def server():
    with ObjectServer(contents(8)) as server:
        yield server


def objects(server, prefix="train", timeout=30.0, **more):
    store = hr.Store(f"{server.url}/{prefix}", options=server.store_options, timeout=timeout, retry=QUICK)
    return hr.ObjectDataset(store, **more)


def files_in(folder):
    """The entries, and what is left of unfinished ones."""
    return sorted(path for path in pathlib.Path(folder).glob("?/*"))


def room_of(folder):
    return sum(-(-path.stat().st_size // DISK_BLOCK) * DISK_BLOCK for path in files_in(folder))


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

NAME = hashlib.sha256(b"an entry").digest()
DATA = bytes(range(256)) * 20


def get(cache, name=NAME, data=DATA):
    """Whether an entry had to be fetched; its bytes must be right in any case."""
    fetched = []

    async def fetch():
        fetched.append(name)
        return memoryview(data)

    assert bytes(asyncio.run(cache.get(name, fetch, lambda data: data))) == data
    return bool(fetched)


# Damaged downloads


def test_bytes_with_a_wrong_checksum_are_never_cached(server, folder):
    sums = [f"sha256:{hashlib.sha256(body_of(number)).hexdigest()}" for number in range(8)]
    cached = objects(server, checksums=sums).cache(folder)
    server.misbehave(Fault("flip", key="train/003", at=1000))
    with pytest.raises(hr.errors.ChecksumError, match="'003'"):
        asyncio.run(cached.aget(3))
    assert files_in(folder) == []
    server.misbehave()
    expect(cached, hits=0, misses=8)
    expect(cached, hits=8, misses=0)


def tar_of(count):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number in range(count):
            info = tarfile.TarInfo(f"{number}.bin")
            info.size = SIZE
            archive.addfile(info, io.BytesIO(body_of(number)))
    return stream.getvalue()


def test_tar_member_with_a_wrong_checksum_is_never_cached(folder):
    with ObjectServer({"0.tar": tar_of(3)}) as server:
        tar = hr.TarDataset.index(f"{server.url}/0.tar", store=hr.Store(server.url, options=server.store_options))
        cached = tar.cache(folder)
        server.misbehave(Fault("flip", key="0.tar", at=100))
        with pytest.raises(hr.errors.ShardError, match="checksum"):
            asyncio.run(cached.aget(1))
        assert files_in(folder) == []
        server.misbehave()
        before = server.requests()["GET"]
        for _ in range(2):
            assert [sample["bin"] for sample in map(cached.__getitem__, range(3))] == [body_of(n) for n in range(3)]
        assert server.requests()["GET"] == before + 3


def test_tar_member_with_transient_damage_is_read_again_and_cached(folder):
    with ObjectServer({"0.tar": tar_of(3)}) as server:
        cached = hr.TarDataset.index(
            f"{server.url}/0.tar", store=hr.Store(server.url, options=server.store_options)
        ).cache(folder)
        server.misbehave(Fault("flip", key="0.tar", at=100, times=1))
        before = server.requests()["GET"]
        for _ in range(2):
            assert asyncio.run(cached.aget(1))["bin"] == body_of(1)
        assert server.requests()["GET"] == before + 2


def test_tar_member_with_permanent_damage_is_read_twice_with_and_without_a_cache(folder):
    with ObjectServer({"0.tar": tar_of(3)}) as server:
        tar = hr.TarDataset.index(f"{server.url}/0.tar", store=hr.Store(server.url, options=server.store_options))
        server.misbehave(Fault("flip", key="0.tar", at=100))
        for dataset in (tar, tar.cache(folder)):
            before = server.requests()["GET"]
            with pytest.raises(hr.errors.ShardError, match="checksum"):
                asyncio.run(dataset.aget(1))
            assert server.requests()["GET"] == before + 2


# SIGKILL


def killed_at(last, folder, max_bytes):
    with Peer(caches.get_until_killed, last, str(folder), NAME, DATA, max_bytes) as peer:
        peer.process.join()
        return peer.process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("max_bytes", [None, 3 * DISK_BLOCK], ids=["no bound", "a bound"])
def test_sigkill_at_any_point_of_a_write_leaves_a_cache_that_works(tmp_path, max_bytes):
    for last in range(1, 1000):
        folder = tmp_path / str(last)
        if max_bytes is not None:  # so that the write has to make room
            get(DiskCache(folder, max_bytes), hashlib.sha256(b"another entry").digest())
        if not killed_at(last, folder, max_bytes):
            break
        cache = DiskCache(folder, max_bytes)
        get(cache)
        assert not get(cache), f"killed before call {last}, and the entry is not cached afterwards"
        assert not list(folder.glob("?/*.part")), f"killed before call {last}, and an unfinished file is left"
        if max_bytes is not None:
            assert room_of(folder) <= max_bytes, f"killed before call {last}, and max_bytes is exceeded"
    else:
        raise AssertionError("the process never ended")
    assert last > 40, f"only {last} calls were seen: the kills were not where they should be"


def test_files_of_killed_writers_are_removed_by_eviction(folder):
    cache = DiskCache(folder, 4 * DISK_BLOCK)
    left = folder / "a" / f"{'c' * 63}.part"
    left.parent.mkdir()
    left.write_bytes(bytes(100_000))
    for number in range(6):
        get(cache, bytes([number]) * 32)
    assert not left.exists()


# A full disk, and bounds


def test_full_disk_loses_no_sample_and_warns_once(tmp_path):
    with ObjectServer(contents(60)) as server, mounted(tmp_path / "disk", "size=200k") as disk:
        cached = objects(server).cache(disk / "cache")
        with pytest.warns(RuntimeWarning, match="No space left") as caught:
            got, counts = read_all(cached)
        assert len(caught) == 1
        assert got == [body_of(number) for number in range(60)]
        kept = files_in(disk / "cache")
        assert 0 < len(kept) < 60
        assert not [path for path in kept if path.suffix == ".part"]
        got, counts = read_all(cached)
        assert got == [body_of(number) for number in range(60)]
        assert (counts.cache_hits, counts.cache_misses) == (len(kept), 60 - len(kept))


def test_warnings_as_errors_lose_no_sample(tmp_path, server):
    with mounted(tmp_path / "disk", "size=16k") as disk, warnings.catch_warnings():
        cached = objects(server).cache(disk / "cache")
        warnings.simplefilter("error")
        expect(cached, hits=0, misses=8)


def test_max_bytes_is_never_exceeded(folder):
    bound = 10 * DISK_BLOCK
    cache = DiskCache(folder, bound)
    for number in range(100):
        get(cache, hashlib.sha256(bytes([number])).digest(), DATA[: 41 * number])
        assert room_of(folder) <= bound
    assert len(files_in(folder)) >= 5


def test_eviction_removes_the_least_recently_read(folder):
    cache = DiskCache(folder, 8 * DISK_BLOCK)
    names = [hashlib.sha256(bytes([number])).digest() for number in range(9)]
    for age, name in enumerate(names[:8]):
        get(cache, name, DATA[:1000])
        path = folder / name.hex()[0] / name.hex()[1:]
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    assert not get(cache, names[0], DATA[:1000])  # the oldest is read, and the youngest then
    get(cache, names[8], DATA[:1000])
    assert not get(cache, names[0], DATA[:1000])
    assert get(cache, names[1], DATA[:1000])


def test_entry_larger_than_max_bytes_is_not_cached_and_evicts_nothing(folder):
    cache = DiskCache(folder, 2 * DISK_BLOCK)
    get(cache, b"s" * 32, b"small")
    assert get(cache, NAME, bytes(3 * DISK_BLOCK))
    assert get(cache, NAME, bytes(3 * DISK_BLOCK))
    assert not get(cache, b"s" * 32, b"small")


# Files that change while they are in use

DAMAGES = {
    "deleted": lambda path, other: path.unlink(),
    "cut": lambda path, other: os.truncate(path, SIZE // 2),
    "cut to the length of its trailer": lambda path, other: os.truncate(path, TRAILER.size),
    "cut within its trailer": lambda path, other: os.truncate(path, SIZE + 10),
    "empty": lambda path, other: os.truncate(path, 0),
    "longer": lambda path, other: path.write_bytes(path.read_bytes() + b"x"),
    "a flipped bit": lambda path, other: path.write_bytes(b"!" + path.read_bytes()[1:]),
    "a flipped bit in its trailer": lambda path, other: path.write_bytes(
        path.read_bytes()[:-40] + b"!" + path.read_bytes()[-39:]
    ),
    "zeros": lambda path, other: path.write_bytes(bytes(path.stat().st_size)),
    "another entry": lambda path, other: path.write_bytes(other.read_bytes()),
    "another entry, moved": lambda path, other: os.replace(other, path),
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
    "a pipe": lambda path, other: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path, other: (path.unlink(), path.symlink_to(other)),
    "a link to nothing": lambda path, other: (path.unlink(), path.symlink_to("/nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_entry_damaged_while_in_use_is_fetched_again(server, folder, damage):
    cached = objects(server).cache(folder)
    read_all(cached)
    expect(cached, hits=8, misses=0)  # each has been checked once
    held = asyncio.run(cached.aget(0)).data
    files = {path.read_bytes()[: -TRAILER.size]: path for path in files_in(folder)}
    DAMAGES[damage](files[body_of(0)], files[body_of(1)])
    lost = 2 if damage == "another entry, moved" else 1
    before = server.requests()["GET"]
    expect(cached, hits=8 - lost, misses=lost, damaged=0 if damage == "deleted" else 1)
    assert server.requests()["GET"] == before + lost
    expect(cached, hits=8, misses=0, damaged=0)
    assert bytes(held) == body_of(0)


def test_folder_deleted_while_in_use_is_created_again(server, folder):
    cached = objects(server).cache(folder)
    expect(cached, hits=0, misses=8)
    subprocess.run(["rm", "-r", folder], check=True)
    expect(cached, hits=0, misses=8)
    expect(cached, hits=8, misses=0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_shortage_of_descriptors_damages_no_entry(server, folder):
    import resource

    cached = objects(server).cache(folder)
    expect(cached, hits=0, misses=8)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    name = next(path for path in files_in(folder))
    entry = bytes.fromhex(name.parent.name + name.name)

    async def read():
        async def fetch():
            return memoryview(name.read_bytes()[: -TRAILER.size])

        await cached._cache.get(entry, fetch, bytes)  # the threads are there from now on
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            return await cached._cache.get(entry, given, bytes)
        finally:
            for descriptor in taken:
                os.close(descriptor)

    expected = name.read_bytes()[: -TRAILER.size]

    async def given():
        return memoryview(expected)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, hard))
        assert asyncio.run(read()) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    expect(cached, hits=8, misses=0, damaged=0)


# Several processes


@pytest.mark.parametrize("with_child", [False, True], ids=["alone", "with a child that lives on"])
def test_lock_of_a_killed_process_is_released(folder, with_child):
    with Peer(caches.fetch_for_ever, str(folder), NAME, with_child) as peer:
        peer.receive()
        peer.kill()
        cache = DiskCache(folder)
        assert get(cache)
        assert not get(cache)  # it was cached: the lock was acquired


def test_fetches_do_not_wait_for_ever_for_a_stopped_process(folder):
    with Peer(caches.fetch_for_ever, str(folder), NAME, False) as peer:
        os.kill(peer.receive(), signal.SIGSTOP)
        cache = DiskCache(folder, fetch_timeout=0.1)
        assert get(cache)
        assert get(cache)
        peer.kill()
        assert get(cache)
        assert not get(cache)


def readers(server, folder, *, count, objects, epochs=1, **cache_options):
    """Processes that read the same objects through the same folder."""
    expected = {key.rpartition("/")[2]: data for key, data in contents(objects).items()}
    store = hr.Store(f"{server.url}/train", options=server.store_options)
    return started_together(caches.read_objects, count, store, str(folder), expected, epochs, cache_options)


def test_processes_that_read_the_same_objects_fetch_them_once(folder):
    with (
        ObjectServer(contents(5), latency=0.4) as server,  # longer than the processes' starts are apart
        readers(server, folder, count=4, objects=5) as peers,
    ):
        hits, misses, waits, damaged = map(sum, zip(*results(peers), strict=True))
        assert server.requests()["GET"] == 5
        assert (hits, misses, damaged) == (15, 5, 0)
        assert waits > 0


def test_tasks_that_read_the_same_objects_fetch_them_once(server, folder):
    server.latency = 0.05
    cached = objects(server).cache(folder)

    async def read():
        return await asyncio.gather(*(cached.aget(index % 2) for index in range(20)))

    before = server.requests()["GET"]
    assert {bytes(sample.data) for sample in asyncio.run(read())} == {body_of(0), body_of(1)}
    assert server.requests()["GET"] == before + 2


def test_loaders_of_one_process_that_read_the_same_objects_fetch_them_once(server, folder):
    server.latency = 0.05
    cached = objects(server).cache(folder)
    with (
        hr.DataLoader(cached, batch_size=8, collate_fn=list, placement="thread") as one,
        hr.DataLoader(cached, batch_size=8, collate_fn=list, placement="thread") as other,
    ):
        first, second = iter(one), iter(other)
        assert [[bytes(s.data) for s in next(it)] for it in (first, second)] == [[body_of(n) for n in range(8)]] * 2
    assert server.requests()["GET"] == 8


def test_fetch_error_is_raised_for_each_waiter_and_nothing_is_cached(server, folder):
    server.latency = 0.05
    cached = objects(server).cache(folder)
    server.delete("train/002")

    async def read():
        return await asyncio.gather(*(cached.aget(2) for _ in range(3)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(read())] == [hr.errors.ObjectNotFoundError] * 3
    assert files_in(folder) == []


def test_eviction_of_entries_that_others_read_loses_no_sample(folder):
    bound = 12 * 2 * DISK_BLOCK
    with (
        ObjectServer(contents(40)) as server,
        readers(server, folder, count=3, objects=40, epochs=5, max_bytes=bound) as peers,
    ):
        for hits, misses, _, damaged in results(peers):
            assert (hits + misses, damaged) == (200, 0)
        assert room_of(folder) <= bound


# A read-only cache


def test_read_only_cache_serves_its_entries(tmp_path, server):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        cached = objects(server).cache(disk / "cache")
        for index in range(3):
            asyncio.run(cached.aget(index))
        del cached
        gc.collect()  # it has its lock open for writing
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        fresh = objects(server).cache(disk / "cache")
        with pytest.warns(RuntimeWarning, match="Read-only file system") as caught:
            expect(fresh, hits=3, misses=5)
        assert len(caught) == 1
        expect(fresh, hits=3, misses=5)


@pytest.mark.skipif(AS_ROOT, reason="permissions mean nothing to root")
def test_cache_without_write_permission_serves_its_entries(server, folder):
    cached = objects(server).cache(folder)
    for index in range(3):
        asyncio.run(cached.aget(index))
    for path in [folder / "lock", *folder.glob("?"), folder]:
        path.chmod(0o500)
    try:
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            expect(objects(server).cache(folder), hits=3, misses=5)
    finally:
        for path in [folder, *folder.glob("?")]:
            path.chmod(0o700)


# The files beside the entries


@pytest.mark.parametrize("damage", ["deleted", "empty", "cut", "longer", "flipped", "garbage", "of another format"])
def test_corrupt_total_is_recounted(folder, damage):
    bound = 6 * DISK_BLOCK
    cache = DiskCache(folder, bound)
    for number in range(4):
        get(cache, hashlib.sha256(bytes([number])).digest(), DATA[:100])
    total = folder / "total"
    good = total.read_bytes()
    bad = {
        "empty": b"",
        "cut": good[:-3],
        "longer": good + b"x",
        "flipped": good[:9] + bytes([good[9] ^ 1]) + good[10:],
        "garbage": os.urandom(len(good)),
        "of another format": b"x" + good[1:],
    }
    if damage == "deleted":
        total.unlink()
    else:
        total.write_bytes(bad[damage])
    for number in range(4, 20):
        get(cache, hashlib.sha256(bytes([number])).digest(), DATA[:100])
        assert len(files_in(folder)) <= 6
    assert not get(cache, hashlib.sha256(bytes([19])).digest(), DATA[:100])
    assert total.read_bytes()[:8] == good[:8]


@pytest.mark.parametrize("stop", ["deleted", "a folder", "a link"])
def test_damaged_lock_file_loses_no_sample(folder, stop):
    cache = DiskCache(folder)
    get(cache)
    lock = folder / "lock"
    lock.unlink()
    if stop == "a folder":
        lock.mkdir()
    elif stop == "a link":
        lock.symlink_to("/etc/passwd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert get(cache, b"other".ljust(32))
        assert not get(cache)
    assert bool(caught) == (stop != "deleted")


# Names of entries


def test_urls_with_the_same_basename_have_different_entries(folder):
    both = {**contents(4, "a/train"), **contents(4, "b/train", salt=1)}
    with ObjectServer(both) as one, ObjectServer(contents(4, "a/train", salt=2)) as other:
        datasets = [
            hr.ObjectDataset(hr.Store(f"{server.url}/{prefix}", options=server.store_options)).cache(folder)
            for server, prefix in ((one, "a/train"), (one, "b/train"), (other, "a/train"))
        ]
        for _ in range(2):
            for salt, dataset in enumerate(datasets):
                assert read_all(dataset)[0] == [body_of(number, salt) for number in range(4)]
    assert len(files_in(folder)) == 12


def test_stores_with_other_default_headers_have_different_entries(folder):
    def answer(request):
        request.send_object(b"bytes of " + request.headers["x-tenant"].encode(), {"ETag": '"1"'})

    with answering(answer) as url:
        for _ in range(2):
            for tenant in ("a", "b"):
                store = hr.Store(url, options={"default_headers": {"x-tenant": tenant, "authorization": tenant}})
                dataset = hr.ObjectDataset(store, keys=["k"]).cache(folder)
                assert dataset[0].data == b"bytes of " + tenant.encode()
    assert len(files_in(folder)) == 2


def test_overwritten_objects_and_other_versions_are_fetched(server, folder):
    expect(objects(server).cache(folder), hits=0, misses=8)
    expect(objects(server).cache(folder), hits=8, misses=0)
    server.put("train/004", body_of(4, salt=9))
    got, counts = read_all(objects(server).cache(folder))
    assert got[4] == body_of(4, salt=9)
    assert (counts.cache_hits, counts.cache_misses) == (7, 1)
    expect_version = objects(server).cache(folder, version="second")
    assert read_all(expect_version)[1].cache_misses == 8


def test_no_secret_is_in_a_name_or_a_file(server, folder):
    options = {**server.store_options, "access_key_id": "CANARY1", "secret_access_key": "CANARY2"}
    options["skip_signature"] = False
    url = f"{server.url}/train"
    cached = hr.ObjectDataset(hr.Store(url, options=options)).cache(folder)
    expect(cached, hits=0, misses=8)
    shown = repr(cached) + cached.dataset.extent(0).store
    assert "CANARY" not in shown
    # Credentials are no part of an entry's name.
    expect(hr.ObjectDataset(hr.Store(url, options=server.store_options)).cache(folder), hits=0, misses=8)


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
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"lock", "total"}


@pytest.mark.skipif(not AS_ROOT, reason="only root can give a folder to another user")
@pytest.mark.parametrize("given", ["itself", "by a link of his"])
def test_folder_of_another_user_is_refused(server, folder, tmp_path, given):
    folder.mkdir(mode=0o700)
    if given == "itself":
        os.chown(folder, 12345, 12345)
        named = folder
    else:
        named = tmp_path / "link"
        named.symlink_to(folder)
        os.chown(named, 12345, 12345, follow_symlinks=False)
    with pytest.raises(hr.errors.CacheFolderError, match="user 12345"):
        objects(server).cache(named)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_folder_that_others_may_write_to_is_refused(server, folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(hr.errors.CacheFolderError, match=f"its mode is {mode:o}"):
        objects(server).cache(folder)


@pytest.mark.skipif(not AS_ROOT, reason="only root can give a folder to another user")
def test_folder_with_a_new_owner_is_refused_after_pickling(server, folder):
    cached = objects(server).cache(folder)
    expect(cached, hits=0, misses=8)
    travelled = pickle.dumps(cached)
    os.chown(folder, 12345, 12345)
    with pytest.raises(hr.errors.CacheFolderError, match="user 12345"):
        asyncio.run(pickle.loads(travelled).aget(0))


def test_file_in_place_of_the_folder_is_an_error_with_its_path(server, folder):
    folder.write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="cache"):
        objects(server).cache(folder)


# Cancellation, forks, hedging


def test_read_cancelled_at_any_point_holds_no_lock(tmp_path, on_loop):
    async def cancelled_at(step, folder):
        """Cancel a read after so many turns of the loop, each of which waits until a thread has done something."""
        cache = DiskCache(folder)
        turns = asyncio.Event()

        async def fetch():
            await asyncio.sleep(0)
            return memoryview(DATA)

        task = asyncio.ensure_future(cache.get(NAME, fetch, lambda data: data))
        for _ in range(step):
            await asyncio.sleep(0)
            await asyncio.to_thread(turns.set)
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])

        async def again():
            return memoryview(DATA)

        assert bytes(await cache.get(NAME, again, lambda data: data)) == DATA
        counts = RequestStats()
        session_stats.set(counts)
        assert bytes(await cache.get(NAME, again, lambda data: data)) == DATA
        assert counts.cache_hits == 1, f"cancelled after {step} turns, and nothing is cached"
        return ended

    for step in range(200):
        if on_loop(lambda step=step: cancelled_at(step, tmp_path / str(step))):
            return
    raise AssertionError("the read never ended")


def test_second_attempt_does_not_wait_and_its_bytes_are_cached(folder, on_loop):
    async def both():
        cache = DiskCache(folder)
        begun, never = asyncio.Event(), asyncio.Event()

        async def stalls():
            begun.set()
            await never.wait()

        async def answers():
            return memoryview(DATA)

        async def second():
            second_attempt.set(True)
            return await cache.get(NAME, answers, bytes)

        first = asyncio.ensure_future(cache.get(NAME, stalls, bytes))
        await begun.wait()
        waits = asyncio.ensure_future(cache.get(NAME, stalls, bytes))
        assert await asyncio.ensure_future(second()) == DATA
        assert await waits == DATA
        first.cancel()
        await asyncio.wait([first])
        counts = RequestStats()
        session_stats.set(counts)
        assert await cache.get(NAME, stalls, bytes) == DATA
        return counts.cache_hits

    assert on_loop(both) == 1


def test_stalled_sample_is_hedged_through_the_cache(folder):
    with ObjectServer(contents(256)) as server:
        server.misbehave(Fault("silence", key="train/200", times=1))
        cached = objects(server, timeout=60.0).cache(folder)
        with hr.DataLoader(
            cached, batch_size=16, collate_fn=list, hedge="auto", concurrency=8, placement="thread"
        ) as loader:
            got = [bytes(sample.data) for batch in loader for sample in batch]
            assert got == [body_of(number) for number in range(256)]
            counts = loader.stats().requests
            assert counts.hedges_won >= 1
        expect(cached, hits=256, misses=0, count=256)


def test_fork_neither_keeps_nor_uses_the_locks_of_its_parent(folder):
    locks = Locks(str(folder))
    assert locks.acquire(5)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later warn of threads
        pid = os.fork()
    if not pid:
        try:
            locks.release(5)  # would release the parent's
            os.write(write, b"taken" if locks.acquire(5) else b"refused")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"refused"
    assert not Locks(str(folder)).acquire(5)
    locks.release(5)
    assert Locks(str(folder)).acquire(5)


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "stripes"])
def test_locks_exclude_others_and_are_released_one_by_one(folder, ranges):
    one, other = (Locks(str(folder), ranges=ranges) for _ in range(2))
    assert one.acquire(1)
    assert one.acquire(65)  # the same stripe
    assert not one.acquire(1)
    assert not other.acquire(1)
    one.release(1)
    assert other.acquire(1) == ranges
    assert not other.acquire(65)
    one.release(65)
    assert other.acquire(65)


def test_loaders_of_a_cached_dataset_leave_nothing(case, tmp_path):
    with ObjectServer(contents(30)) as server:
        store = hr.Store(f"{server.url}/train", options=server.store_options)
        folder = tmp_path / "cache"

        def program() -> None:
            dataset = hr.ObjectDataset(store).cache(folder)
            for placement in ("thread", "process"):
                with hr.DataLoader(dataset, batch_size=4, collate_fn=len, placement=placement, num_workers=1) as loader:
                    assert sum(loader) == 30
            with hr.DataLoader(dataset, batch_size=4, collate_fn=len, placement="thread") as loader:
                next(iter(loader))

        case(program, within=5.0)
        assert server.requests()["GET"] == 30
