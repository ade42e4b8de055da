"""Shards with one index are map-style: equal to their streams, found without a request for each shard, and checked."""

import asyncio
import functools
import gzip
import os
import pickle
import random
import shutil
import signal
import subprocess
import tarfile
import zlib

import numpy as np
import pytest

import headrace as hr
from headrace._shards.index_file import (
    HASHED_FROM,
    PREFIX,
    IndexedShard,
    IndexFile,
    content_digest,
    dump_index,
)
from headrace.cli.main import main
from headrace.datasets import Decoder, ShardedStream
from headrace.errors import ObjectChangedError, ShardError, StoreError
from object_server import Fault
from tests.fixtures.seekable import make as seekable
from tests.unit.datasets.formats import FIXTURES, files_in
from tests.unit.datasets.test_tar import keys, numbered
from tests.unit.shards import tars
from tests.unit.shards.resuming import in_folder
from tests.unit.shards.test_tar_format import typed

LINES = {
    "a.jsonl": b'\n\n{"x": 1}\r\n  \n[2]\n\n"three"\n\n',
    "b.jsonl": b"",
    "c.jsonl": b"\xef\xbb\xbf" + b"\n".join(b"%d" % 10**number for number in range(400)),
    "d.jsonl": b'"' + b"x" * 600_000 + b'"\n1',
}
TEXT = {
    "a.txt": b"\n\none\r\n\ntwo",
    "b.txt": b"",
    "c.txt": "\ufeffäö\n".encode() * 3,
    "d.txt": b"\n",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    """Six shards of ten samples each."""
    return in_folder(tmp_path / "shards", numbered(6, 10))


# Samples


def in_parts():
    """Lines in the frames of zstd's seekable format, in streams of gzip with padding, and in small streams of zlib."""
    text = b"".join(b'"' + b"%d" % number * 300 + b'"\n' for number in range(1200))
    pieces = [text[first : first + 300_000] for first in range(0, len(text), 300_000)]
    small = [text[first : first + 9_999] for first in range(0, len(text), 9_999)]
    return {
        "a.jsonl.zst": (FIXTURES / "seekable" / "a.jsonl.zst").read_bytes(),
        "b.jsonl.gz": (b"\0" * 99).join(map(gzip.compress, pieces)),
        "c.jsonl.zlib": b"".join(map(zlib.compress, small)),
    }


def archive_of_every_kind():
    """A tar with long names, extended headers, folders, other files, empty members, and a name that is no UTF-8."""
    files = [
        "README",
        "a.txt",
        "x" * 300 + ".txt",
        "\udcff.txt",
        "ä/b.c.txt",
        "LICENSE",
        "e.TXT",
    ]
    members = [(name, bytes(len(name) - 5)) for name in files]
    members.insert(2, ("d", typed(tarfile.DIRTYPE)))
    return tars.members(*members, format=tarfile.PAX_FORMAT)


@pytest.mark.parametrize(
    ("kind", "files", "options"),
    [
        (hr.TarDataset, {**numbered(2, 10), "empty.tar": tars.members()}, {}),
        (
            hr.TarDataset,
            {**numbered(1, 3), "z.tar": archive_of_every_kind()},
            {"uniform": False},
        ),
        (
            hr.TarDataset,
            {
                "gnu.tar": tars.members(
                    ("g" * 200 + ".a", b"1"), (".a", b"2"), ("h.a", b"3")
                )
            },
            {},
        ),
        (
            hr.TarDataset,
            {"a.tar": tars.shard("ab", cls=str.encode, jpg=lambda key: b"")},
            {"fields": ["jpg"]},
        ),
        (hr.LinesDataset, {**LINES, **TEXT}, {}),
        (hr.LinesDataset, {**LINES, **TEXT}, {"format": "bytes"}),
        (hr.TFRecordDataset, {**files_in("tfrecord"), "b.tfrecord": b""}, {}),
        (
            hr.TarDataset,
            {"a.tar": tars.shard("ab"), "b.tar.gz": gzip.compress(tars.shard("cde"))},
            {},
        ),
        (
            hr.LinesDataset,
            {"a.jsonl.zst": tars.zstd(LINES["c.jsonl"]), "b.json.gz": gzip.compress(b"")},
            {},
        ),
        (hr.LinesDataset, in_parts(), {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_indexed_samples_are_those_of_the_stream(
    tmp_path, monkeypatch, kind, files, options
):
    files = {name: data for name, data in files.items() if name.endswith(kind.suffixes)}
    in_folder(tmp_path, files)
    dataset = kind.index(tmp_path, save=True, **options)
    expected = list(kind(tmp_path, shards_in_parallel=1, **options))
    assert [dataset[index] for index in range(len(dataset))] == expected
    assert dataset.__getitems__(range(len(dataset))) == expected
    assert len(dataset.counts) == len(files)
    order = random.Random(0).sample(range(len(dataset)), len(dataset))
    reordered = [expected[index] for index in order]
    with hr.DataLoader(
        dataset, 7, sampler=order, collate_fn=list, placement="process"
    ) as loader:
        assert [sample for batch in loader for sample in batch] == reordered
    # Borders within samples.
    monkeypatch.setattr("headrace.datasets.cached.CACHE_BLOCK", 700)
    cached = dataset.cache(tmp_path / "cache")
    for epoch in range(2):
        with hr.DataLoader(cached, 7, sampler=order, collate_fn=list) as loader:
            assert [sample for batch in loader for sample in batch] == reordered
            counts = loader.stats().requests
        assert counts.cache_damaged == 0
        assert (counts.cache_misses > 0) == (epoch == 0)


def test_indexed_dataset_has_counts_of_shards_and_keys_of_samples(folder):
    dataset = hr.TarDataset.index(folder / "*.tar")
    assert dataset.counts == (10,) * 6
    assert dataset.sample_key(12) == "0001.tar[2048:3072]"
    assert hr.TarDataset.index(folder / "000{4,1}.tar")[3]["__key__"] == "04-003"


def test_index_of_samples_with_different_fields_needs_a_choice_of_fields(tmp_path):
    in_folder(
        tmp_path,
        {"a.tar": tars.members(("a.jpg", b"1"), ("b.cls", b"2"), ("b.jpg", b"3"))},
    )
    chosen = hr.TarDataset.index(tmp_path, fields=["jpg"])
    assert [sample["jpg"] for sample in chosen] == [b"1", b"3"]
    with pytest.raises(ShardError, match="'a' lacks 'cls'"):
        hr.TarDataset.index(tmp_path, fields=["jpg", "cls"])[0]
    with pytest.raises(ShardError, match="has 'cls', which earlier samples lack"):
        hr.TarDataset.index(tmp_path)


LONG = "n" * 150


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--label=/disk 1", LONG),
        ("--incremental", LONG),
        ("--format=v7", "b"),
        ("--format=ustar", "b"),
        ("--format=gnu", LONG),
        ("--format=posix", LONG),
    ],
)
def test_stream_and_index_read_archives_of_gnu_tar_and_skip_members_that_are_no_files(
    tmp_path, option, name
):
    files = {"a.txt": b"a" * 3000, f"sub/{name}.txt": b"long"}
    folder = in_folder(tmp_path / "in", files)
    subprocess.run(
        ["tar", "-C", folder, option, "-cf", tmp_path / "a.tar", "."], check=True
    )
    index = hr.TarDataset.index(tmp_path / "a.tar")
    for samples in (
        hr.TarDataset(tmp_path / "a.tar"),
        map(index.__getitem__, range(len(index))),
    ):
        assert {f"{sample['__key__']}.txt": sample["txt"] for sample in samples} == files


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (gzip.compress(tars.shard("ab")), "gzip by its first bytes, but not by its name"),
        (
            tars.members(("README", b"x")),
            "none of its 1 files has a name with an extension",
        ),
        (tars.shard("ab")[:1500], "truncated tar"),
    ],
)
def test_stream_and_index_refuse_with_the_same_reason(tmp_path, archive, why):
    (tmp_path / "a.tar").write_bytes(archive)
    for read in (
        lambda: list(hr.TarDataset(tmp_path)),
        lambda: hr.TarDataset.index(tmp_path),
    ):
        with pytest.raises(ShardError, match=why):
            read()


def test_a_compressed_shard_is_read_once(serve):
    shards = {
        "a.tar.gz": gzip.compress(tars.shard(map(str, range(300)))),
        "b.tar": tars.shard("x"),
    }
    server = serve(shards)
    dataset = hr.TarDataset.index([*shards], store=server.store(), save=True)
    before = server.requests()["GET"]
    with hr.DataLoader(dataset, 10, shuffle=True, seed=0, collate_fn=list) as loader:
        assert sum(map(len, loader)) == 301
    assert server.requests()["GET"] - before == 2


def test_a_part_of_a_compressed_shard_is_read_alone(serve):
    shards = in_parts()
    server = serve(shards)
    dataset = hr.LinesDataset.index([*shards], store=server.store(), save=True)
    assert dataset[1999] == seekable.lines()[1999]
    server.misbehave()
    for at in (1234, *range(2000, len(dataset), 199)):
        dataset = pickle.loads(pickle.dumps(dataset))  # nothing is unpacked in a copy
        assert dataset[at] is not None
    assert {seen.key for seen in server.seen()} == {*shards}
    for seen in server.seen():
        start, stop = map(int, seen.span.removeprefix("bytes=").split("-"))
        assert stop - start < len(shards[seen.key]) / 3
    with hr.DataLoader(dataset, 100, shuffle=True, seed=0, collate_fn=len) as loader:
        before = server.requests()["GET"]
        assert sum(loader) == len(dataset)
    parts = dataset._index.pieces.sum()
    assert server.requests()["GET"] - before < 1.5 * parts


def test_a_changed_byte_of_a_compressed_shard_is_an_error_or_changes_nothing(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tars.shard(map(str, range(300)))))
    samples = list(hr.TarDataset.index(tmp_path, save=True))
    data, times = path.read_bytes(), path.stat()
    errors = 0
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        try:
            assert hr.TarDataset.index(tmp_path).__getitems__(range(300)) == samples
        except ShardError:
            errors += 1
    assert errors > len(data) // 7 - 10


def test_a_format_of_another_package_can_be_indexed(tmp_path):
    in_folder(tmp_path, {"a.rows": b"abcdef", "b.rows": b"gh"})
    dataset = Pairs.index(tmp_path, save=True, upper=True)
    assert [dataset[index] for index in range(4)] == ["AB", "CD", "EF", "GH"]
    assert Pairs.index(tmp_path)[3] == "gh"
    with pytest.raises(TypeError, match=r"Pairs.index.*'shuffle'"):
        Pairs.index(tmp_path, shuffle=True)


class PairDecoder(Decoder):
    """Decoder of samples of two bytes."""

    format = "pairs"

    def __init__(self, upper):
        self.upper, self.held = upper, b""

    def feed(self, data):
        self.held += bytes(data)
        while len(self.held) >= 2:
            sample, self.held = self.held[:2].decode(), self.held[2:]
            self.complete += 2
            yield sample.upper() if self.upper else sample

    def finish(self):
        return iter(())

    def restore(self, position):
        self.held = b""


class Pairs(ShardedStream):
    suffixes = (".rows",)

    def __init__(self, shards, *, upper=False, **options):
        self.upper = upper
        super().__init__(shards, **options)

    def decoder(self, shard):
        return PairDecoder(self.upper)


def test_invalid_samples_are_errors_of_the_stream_when_they_are_read(tmp_path):
    damaged = bytearray(files_in("tfrecord")["a.tfrecord"])
    damaged[20] ^= 1
    in_folder(
        tmp_path,
        {
            "a.jsonl": b'1\n{"x"\n3\n',
            "a.tfrecord": damaged,
            "a.tar": tars.members(("../a.b", b""), ("c.b", b"")),
        },
    )
    for dataset, good in (
        (hr.LinesDataset.index(tmp_path), [1, 3]),
        (hr.TFRecordDataset.index(tmp_path), hr.TFRecordDataset(tmp_path)),
        (
            hr.TarDataset.index(tmp_path, uniform=False),
            hr.TarDataset(tmp_path, uniform=False),
        ),
    ):
        with hr.DataLoader(dataset, batch_size=None, on_error="skip") as loader:
            read = list(loader)
            (failure,) = loader.stats().skipped
        assert failure.type_name in ("ShardError", "UnsafeMemberError")
        assert "offset" in failure.message
        with hr.DataLoader(good, batch_size=None, on_error="skip") as loader:
            assert read == list(loader)


# The file


def test_every_mutation_of_an_index_is_an_error_or_changes_nothing(folder):
    """Of an offset also where hash and checksum are right: nothing outside of a shard is read."""
    whole = list(hr.TarDataset.index(folder, save=True))
    path = folder / "headrace.index"
    data = path.read_bytes()
    draw = random.Random(0)
    offsets = data.index(b'["0000.tar"') - 60 * 4  # 4 bytes each
    errors = []
    for number in range(500):
        mutated = bytearray(data)
        is_hashed = number % 5 == 0
        at = offsets + draw.randrange(60 * 4) if is_hashed else draw.randrange(len(data))
        if number % 5 <= 1:
            mutated[at] ^= 1 << draw.randrange(8)
        elif number % 5 == 2:
            del mutated[at : at + draw.randrange(1, 99)]
        elif number % 5 == 3:
            mutated[at:at] = draw.randbytes(draw.randrange(1, 99))
        else:
            mutated[at : at + 8] = draw.randbytes(8)
        if is_hashed:
            mutated[56:64] = zlib.crc32(mutated[PREFIX.size :]).to_bytes(8, "little")
            mutated[16:48] = content_digest(mutated[HASHED_FROM:])
        path.write_bytes(mutated)
        try:
            assert hr.TarDataset.index(folder).__getitems__(range(60)) == whole
        except ShardError as error:
            if not is_hashed:
                errors.append(str(error))
    assert len(errors) > 380, (
        "only the hash of the content, which is not computed again, may change"
    )
    assert all("headrace.index" in error for error in errors)
    path.write_bytes(b"")
    with pytest.raises(
        ShardError, match=r"damaged one; make it again by `headrace index`"
    ):
        hr.TarDataset.index(folder)
    assert list(hr.TarDataset.index(folder, save=True)) == whole
    assert path.read_bytes() == data


def test_offsets_beyond_four_gib_are_exact():
    # Of samples, of which some are larger than 4 GiB.
    sizes = np.random.default_rng(0).integers(1, 3 << 31, 40)
    begins, end = np.cumsum(sizes) - sizes, int(sizes.sum())
    parts = []
    for name in ("0.tar", "1.tar"):
        row = IndexedShard(name, "tar", end, None, None, len(sizes), end, None, "")
        parts.append(
            IndexFile(name, dump_index("", [row], begins, np.empty(0, np.uint32)))
        )
    index = IndexFile("all", IndexFile.joined("", parts))
    starts, stops = index.bounds(np.repeat([0, 1], 40), np.tile(np.arange(40), 2))
    assert starts.tolist() == [*begins, *begins]
    assert (stops - starts).tolist() == [*sizes, *sizes]


def test_a_pickled_index_is_the_path_and_the_hash_of_its_file(folder):
    hr.TarDataset.index(folder, save=True)
    pickled = pickle.dumps(hr.TarDataset.index(folder))
    (folder / "more.tar").write_bytes(tars.shard(map(str, range(20_000))))
    hr.TarDataset.index(folder / "more.tar", index=folder / "more.index", save=True)
    large = pickle.dumps(
        hr.TarDataset.index(folder / "more.tar", index=folder / "more.index")
    )
    assert len(large) < len(pickled) < 3_000
    path = folder / "headrace.index"
    path.rename(folder / "moved")
    with pytest.raises(
        ShardError,
        match=r"no index of shards, .* make it again by `headrace index`: .*No such file",
    ):
        pickle.loads(pickled)
    shutil.copy(folder / "more.index", path)
    with pytest.raises(ShardError, match="it was replaced"):
        pickle.loads(pickled)


# Where


def test_an_index_beside_its_shards_is_found_without_a_request_for_each_shard(serve):
    server = serve(numbered(20, 5))
    named = "{0000..0019}.tar"
    hr.TarDataset.index(named, store=server.store(), save=True)
    assert server.requests()["PUT"] == 1
    for number in range(2):
        before = server.requests()
        dataset = hr.TarDataset.index(named, store=server.store())
        assert server.requests()["GET"] - before["GET"] == 2 - number, (
            "the file comes once, then its hash"
        )
        assert server.requests()["HEAD"] == before["HEAD"]
    before = server.requests()
    assert dataset[15]["txt"] == b"text of 03-000"
    assert sum(server.requests().values()) - sum(before.values()) == 1, (
        "a sample is one request"
    )


def test_a_start_by_the_index_alone_makes_no_request(tmp_path, serve):
    server = serve(numbered(3, 10))
    store = server.store()
    whole = list(hr.TarDataset.index("", store=store, index="x/all.index", save=True))
    server.put("later.tar", tars.shard("a"))
    path = tmp_path / "all.index"
    path.write_bytes(asyncio.run(store.read_all("x/all.index")))
    before = server.requests()
    dataset = hr.TarDataset.index(index=path.as_uri(), store=store, fields=["txt"])
    assert server.requests() == before
    assert [sample["txt"] for sample in dataset] == [sample["txt"] for sample in whole]
    with pytest.raises(
        ShardError, match=r"indexed as tar in .*, and not as lines of text"
    ):
        hr.LinesDataset.index(index=path.as_uri(), store=store)
    with pytest.raises(TypeError, match="give shards, or index="):
        hr.TarDataset.index()


def test_an_object_of_a_shard_is_made_when_the_shard_is_read(folder):
    whole = list(hr.TarDataset.index(folder, save=True))
    dataset = hr.TarDataset.index(index=folder / "headrace.index")
    (first,) = dataset._shards._made  # whose format was compared
    assert (len(dataset), len(dataset._shards), dataset.counts) == (60, 6, (10,) * 6)
    assert (dataset[35], dataset[-1]) == (whole[35], whole[-1])
    assert {*dataset._shards._made} == {first, 3, 5}
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 3_000
    assert pickle.loads(pickled)[59] == whole[59]
    (folder / "0003.tar").write_bytes(tars.shard("abcd"))
    with pytest.raises(ObjectChangedError, match=r"0003\.tar"):
        dataset[30]


def test_each_shard_has_the_format_of_the_dataset(tmp_path):
    """An index of a.txt and b.jsonl as text is refused for b.jsonl where b.jsonl is read as JSON."""
    in_folder(tmp_path, {"a.jsonl": b"1\n\n2\n", "b.txt": b"3\n"})
    index = tmp_path / "headrace.index"
    assert list(hr.LinesDataset.index(tmp_path, save=True, format="text")) == [
        "1",
        "",
        "2",
        "3",
    ]
    assert len(hr.LinesDataset.index(index=index, format="text")) == 4
    dataset = hr.LinesDataset.index(index=index)
    assert dataset[3] == "3"
    with pytest.raises(
        ShardError, match=r"indexed as lines of text .* not as .*JSON.*a\.jsonl"
    ):
        dataset[0]


def test_an_index_that_is_built_is_kept_for_these_versions_of_the_shards(serve):
    server = serve(numbered(3, 10))
    store = server.store()
    built = hr.TarDataset.index("*.tar", store=store)
    before = server.requests()
    again = hr.TarDataset.index("*.tar", store=store)
    assert server.requests()["PUT"] == 0
    assert server.requests()["HEAD"] == before["HEAD"] == 0
    assert server.requests()["GET"] - before["GET"] == 1, (
        "whether there is one beside the shards"
    )
    assert list(again) == list(built)
    server.put("0001.tar", tars.shard("xyz"))
    assert keys(hr.TarDataset.index("*.tar", store=store))[10:13] == ["x", "y", "z"]


def test_replaced_and_missing_shards_are_named(folder):
    hr.TarDataset.index(folder, save=True)
    (folder / "new.tar").write_bytes(tars.shard("ab"))
    with pytest.raises(
        ShardError, match=r"not in the index .*headrace index file:.*new\.tar"
    ):
        hr.TarDataset.index(folder)
    (folder / "new.tar").unlink()
    named = hr.TarDataset.index([folder / "0003.tar", folder / "0001.tar"])
    assert named._index.path == str(folder / "headrace.index")
    (folder / "0003.tar").write_bytes(tars.shard("abcd"))
    with pytest.raises(ShardError, match=r"replaced since .*headrace index .*0003\.tar"):
        hr.TarDataset.index(folder / "*.tar")
    with pytest.raises(ObjectChangedError, match=r"0003\.tar"):
        named[0]  # not listed: the read shows it
    assert named[10]["__key__"] == "01-000"
    assert len(hr.TarDataset.index(folder, save=True)) == 54
    with pytest.raises(ShardError, match="indexed as tar"):
        hr.LinesDataset.index(folder / "*.tar", index=folder / "headrace.index")
    with pytest.raises(StoreError, match=r"nothing\.index"):
        hr.TarDataset.index(folder, index=folder / "nothing.index")


def test_shards_of_several_folders_have_one_index(folder, tmp_path):
    for name in "ab":
        shutil.copytree(folder, tmp_path / "more" / name)
    whole = hr.TarDataset.index(tmp_path / "more", save=True)
    for named in (
        tmp_path / "more/{a,b}/*.tar",
        [tmp_path / "more/b/0003.tar", tmp_path / "more/a/0001.tar"],
    ):
        dataset = pickle.loads(pickle.dumps(hr.TarDataset.index(named)))
        assert dataset._index.path == str(tmp_path / "more/headrace.index")
        assert dataset[0] == whole[0 if len(dataset) == 120 else 90]
        assert len({sample["__url__"] for sample in dataset}) == len(dataset) // 10


def test_shards_and_index_can_be_copied_to_another_place(folder, tmp_path):
    hr.TarDataset.index(folder, save=True)
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    copied = hr.TarDataset.index(tmp_path / "copy")
    assert copied._index.path == str(tmp_path / "copy/headrace.index")
    assert copied[17]["__key__"] == "01-007"


@pytest.mark.parametrize(
    ("key", "status"), [("*.tar", 403), ("*.index", 401), ("*.index", 400)]
)
def test_index_that_is_refused_does_not_exist_and_other_refusals_are_errors(
    serve, key, status
):
    server = serve(numbered(1, 10))
    server.misbehave(Fault("status", key="*.index", status=403))
    # S3 refuses what does not exist, to those who may not list the bucket.
    assert len(hr.TarDataset.index("*.tar", store=server.store())) == 10
    server.misbehave(Fault("status", key=key, status=status))
    with pytest.raises(StoreError) as failed:
        hr.TarDataset.index("*.tar", store=server.store())[0]
    assert failed.value.status == status


def test_read_only_store_warns_once(serve):
    server = serve(numbered(3, 10))
    server.misbehave(Fault("status", method="PUT", status=403))
    with pytest.warns(
        RuntimeWarning, match="cannot store the index beside its shards"
    ) as warned:
        dataset = hr.TarDataset.index("*.tar", store=server.store(), save=True)
    assert dataset[15]["txt"] == b"text of 01-005"
    assert len(warned) == 1


def test_without_a_cache_folder_the_index_stays_in_memory(folder, tmp_path, monkeypatch):
    (tmp_path / "open/headrace").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open/headrace").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    with pytest.warns(RuntimeWarning, match="the index stays in memory"):
        dataset = hr.TarDataset.index(folder)
    assert pickle.loads(pickle.dumps(dataset))[59]["__key__"] == "05-009"


# The command


def killed_after(last, arguments):
    """Run the command; the process is killed after the write with a number."""
    put, writes = hr.Store.put, 0

    async def counted(self, key, data):
        nonlocal writes
        await put(self, key, data)
        writes += 1
        if writes == last:
            os.kill(os.getpid(), signal.SIGKILL)

    hr.Store.put = counted
    assert main(arguments) == 0


def test_a_killed_command_continues_to_the_same_bytes(tmp_path, forks):
    folder = in_folder(tmp_path / "shards", numbered(40, 3))
    whole, killed = tmp_path / "whole.index", tmp_path / "killed.index"
    assert main(["index", str(folder), "--output", str(whole), "--processes", "2"]) == 0
    arguments = [
        "index",
        str(folder / "*.tar"),
        "--output",
        str(killed),
        "--processes",
        "1",
    ]
    parts = [0]
    for last in (1, 3, 5, 40):
        done = forks.run(functools.partial(killed_after, last, arguments))
        parts.append(len(list((tmp_path / "killed.index.parts").glob("*.part"))))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not killed.exists()
    assert parts[:4] == sorted({*parts[:4]}), (
        "each call keeps the parts of those before, and adds some"
    )
    assert parts[3] < 40
    assert done.returncode == 0, done.stderr
    assert killed.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "killed.index",
        "shards",
        "whole.index",
    ]


def test_parts_of_several_machines_are_joined(folder, tmp_path, capsys):
    whole = list(hr.TarDataset.index(folder))
    command = ["index", str(folder), "--processes", "1"]
    for part in ("2/2", "1/2"):
        assert main([*command, "--part", part]) == 0
        assert not (folder / "headrace.index").exists()
    assert main(command) == 0
    assert "6 shards, 60 samples" in capsys.readouterr().out
    assert list(hr.TarDataset.index(folder)) == whole


def test_an_index_has_the_lengths_that_a_function_gives(tmp_path, capsys):
    in_folder(
        tmp_path,
        {"a.jsonl": b'"one"\n[1, 2]\n{\n', "b.jsonl.gz": gzip.compress(b'"three"')},
    )
    with pytest.raises(ValueError, match="has no lengths"):
        print(hr.LinesDataset.index(tmp_path).lengths)
    command = ["index", str(tmp_path), "--processes", "1", "--length"]
    assert main([*command, "builtins:len"]) == 0
    assert hr.LinesDataset.index(tmp_path).lengths.tolist() == [3, 2, 0, 5]
    assert hr.LinesDataset.index(tmp_path / "b.jsonl.gz").lengths.tolist() == [5]
    assert main([*command, "builtins:nothing"]) == 2
    assert "--length builtins:nothing" in capsys.readouterr().err


def test_the_command_takes_the_format_by_the_endings(tmp_path, capsys):
    in_folder(tmp_path, {**TEXT, "a.tar": tars.shard("a")})
    assert main(["index", str(tmp_path)]) == 2
    assert "shards of tar and lines: give --format" in capsys.readouterr().err
    assert main(["index", str(tmp_path), "--format", "lines", "--processes", "1"]) == 0
    assert list(hr.LinesDataset.index(tmp_path)) == list(
        hr.LinesDataset(tmp_path, shards_in_parallel=1)
    )
    with pytest.raises(SystemExit):
        main(["index", str(tmp_path), "--part", "3/2"])
