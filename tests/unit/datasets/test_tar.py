"""`TarDataset` streams the samples of WebDataset shards, in one order, over ranks, whole or with an error."""

import asyncio
import gzip

import pytest

import headrace as hr
from headrace.errors import EmptyListingError, ShardError
from tests.unit.shards import tars
from tests.unit.shards.resuming import in_folder, in_memory


def keys(stream):
    return [sample["__key__"] for sample in stream]


def numbered(count, size):
    """So many shards of so many samples, by name."""
    return {
        f"{number:04}.tar": tars.shard(
            f"{number:02}-{sample:03}" for sample in range(size)
        )
        for number in range(count)
    }


@pytest.fixture
def folder(tmp_path):
    """Six shards of ten samples each."""
    return in_folder(tmp_path, numbered(6, 10))


ALL = [f"{number:02}-{sample:03}" for number in range(6) for sample in range(10)]


# Samples


def test_members_with_the_same_key_are_one_sample(tmp_path):
    files = [
        ("d/1.JPG", b"j"),
        ("d/1.seg.png", b"s"),
        ("d/1.cls", b"7"),
        ("d.e/2.jpg", b"J"),
        ("README", b"r"),
    ]
    in_folder(tmp_path, {"a.tar": tars.members(*files)})
    url = (tmp_path / "a.tar").as_uri()
    assert list(hr.TarDataset(tmp_path, uniform=False)) == [
        {"__key__": "d/1", "__url__": url, "jpg": b"j", "seg.png": b"s", "cls": b"7"},
        {"__key__": "d.e/2", "__url__": url, "jpg": b"J"},
    ]


@pytest.mark.parametrize("suffix", tars.PACKERS)
def test_compressed_shards_give_the_same_samples_as_plain_ones(suffix):
    packed = tars.PACKERS[suffix](tars.shard(range(500)))
    samples = hr.TarDataset(in_memory({f"0.{suffix}": packed}), chunk_bytes=1000)
    assert [sample["txt"] for sample in samples] == [
        b"text of %d" % i for i in range(500)
    ]


# Which shards


@pytest.mark.parametrize(
    "make",
    [
        hr.LinesDataset,
        hr.TarDataset.index,
        hr.ParquetDataset,
        lambda shards, **options: hr.TokenDataset(shards, seq_len=1, **options),
    ],
    ids=["lines", "tar", "parquet", "tokens"],
)
def test_no_shard_is_an_error(tmp_path, serve, make):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.md").touch()
    for name in ("nothing", "other", "other/"):
        with pytest.raises(
            EmptyListingError,
            match=r"^no such file, and no file in such a directory ends in",
        ):
            make(f"{tmp_path}/{name}")
    with pytest.raises(EmptyListingError, match=r"x\*"):
        make(tmp_path / "x*.tar")
    with pytest.raises(ValueError, match="no shard"):
        make([])
    store = serve({"other/notes.md": b""}).store()
    for name in ("nothing", "other"):
        with pytest.raises(EmptyListingError, match=r"^no such file"):
            make(name, store=store)


def test_named_file_may_have_any_ending_and_is_named_once(tmp_path, serve):
    objects = {"app.log": b"one\ntwo\n", "samples.archive": tars.shard("ab")}
    for store in (hr.Store(in_folder(tmp_path, objects)), serve(objects).store()):
        assert list(hr.LinesDataset("app.log", store=store)) == ["one", "two"]
        assert keys(hr.TarDataset("samples.archive", store=store)) == ["a", "b"]
        assert len(hr.TarDataset.index("samples.archive", store=store)) == 2
    assert list(hr.LinesDataset(tmp_path / "app.log")) == ["one", "two"]
    with pytest.raises(ValueError, match="given twice"):
        hr.TarDataset(
            [tmp_path / "samples.archive", tmp_path / "{samples,samples}.archive"]
        )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shards_in_parallel": 0}, "shards_in_parallel=0 must be at least 1"),
        ({"buffer_size": None}, "buffer_size must be an int, but got None"),
        ({"buffer_size": -1}, "buffer_size=-1 must be at least 0"),
        ({"rank": 1}, "give both"),
        ({"rank": 2, "world_size": 2}, "rank=2 is out of range"),
    ],
)
def test_invalid_options_are_refused(folder, options, what):
    error = TypeError if None in options.values() else ValueError
    with pytest.raises(error, match=what):
        hr.TarDataset(folder / "{0000..0005}.tar", **options)


def test_signed_urls_are_refused_without_their_signature():
    with pytest.raises(ValueError, match="signed URLs") as refused:
        hr.TarDataset("https://host/a.tar?sig=canary")
    assert "canary" not in str(refused.value)


# Order


def test_order_depends_only_on_seed_and_epoch(folder):
    def order(epoch, **options):
        dataset = hr.TarDataset(folder / "*.tar", shuffle=True, buffer_size=20, **options)
        dataset.set_epoch(epoch)
        return keys(dataset)

    assert order(0) == order(0, chunk_bytes=512, requests_per_shard=1)
    assert order(0) != order(1) != order(2)
    assert order(0) != order(0, seed=1)
    assert sorted(order(5)) == ALL


# Ranks


def test_more_ranks_than_shards_are_refused(folder):
    with pytest.raises(
        ValueError, match=r"6 shards cannot be divided among 7 ranks; apply \.split\(\)"
    ):
        list(hr.TarDataset(folder / "*.tar", rank=0, world_size=7))


# Damage that only groups have, and of compressed shards


def test_flipped_bit_in_compressed_data_is_an_error_of_its_shard():
    # Stored, not deflated: only gzip's checksum, after the last sample, shows it.
    files = {
        f"{name}.tar.gz": gzip.compress(tars.shard(f"{name}{n}" for n in range(20)), 0)
        for name in "abc"
    }
    files["b.tar.gz"] = files["b.tar.gz"].replace(b"text of b7", b"text of b?")
    dataset = hr.TarDataset(in_memory(files))
    with hr.DataLoader(dataset, batch_size=None, on_error="skip") as loader:
        found = keys(loader)
        (failure,) = loader.stats().skipped
    assert {f"{name}{sample}" for name in "ac" for sample in range(20)} <= {*found}
    assert "not gzip, or corrupt" in failure.message
    assert "b.tar.gz" in failure.message


def test_key_that_appears_again_is_an_error():
    names = ("a.jpg", "b.jpg", "a.jpg")
    store = in_memory({"a.tar": tars.members(*((name, b"x") for name in names))})
    with pytest.raises(ShardError, match="'a' appears again") as caught:
        list(hr.TarDataset(store))
    assert (caught.value.member, caught.value.offset) == ("a.jpg", 2048)


# Reading


def test_memory_is_bounded_by_read_ahead(serve):
    """Of shards of 8 MB, a reader that stops after one sample has asked for no more than its share."""
    blob = bytes(100_000)
    objects = {
        f"{i}.tar": tars.shard(map(str, range(80)), bin=lambda key: blob)
        for i in range(4)
    }
    server = serve(objects)
    options = {"shards_in_parallel": 2, "requests_per_shard": 2, "chunk_bytes": 200_000}
    dataset = hr.TarDataset(f"{server.http_url}/{{0..3}}.tar", **options)

    async def first():
        stream = aiter(dataset)
        await anext(stream)
        await stream.aclose()

    asyncio.run(first())
    # Two shards and the one that is begun already; for each, two ranges under way, and at most
    # three that are parsed: a block of samples that is given out, and the next, of two ranges
    # where a sample reaches into both.
    assert server.requests()["GET"] <= 3 * (2 + 3)


def fail_on_the_second(sample):
    if sample["__key__"] == "00-001":
        raise ValueError("no sample")
    return sample


def fail(samples):
    raise ValueError("no batch")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_names_the_sample_and_its_shard(folder, num_workers):
    tar = hr.TarDataset(folder / "0000.tar")
    key = f"'00-001 in {folder.as_uri()}/0000.tar'"
    for dataset, options, expected in (
        (tar.map(fail_on_the_second), {}, f"index 1, key {key}"),
        (tar.map(fail_on_the_second).shuffle(1), {}, f"before batching, key {key}"),
        (
            tar,
            {"collate_fn": fail},
            f"indices [0, 1], keys ['00-000 in {folder.as_uri()}/0000.tar', {key}]",
        ),
    ):
        with hr.DataLoader(dataset, 2, num_workers=num_workers, **options) as loader:
            with pytest.raises(ValueError) as raised:
                list(loader)
            assert expected in "\n".join(raised.value.__notes__)


def test_shuffling_a_stream_by_the_loader_is_refused_with_the_remedy(folder):
    with pytest.raises(ValueError, match="but got shuffle=True") as refused:
        hr.DataLoader(hr.TarDataset(folder / "0000.tar"), shuffle=True)
    assert (
        "shuffle the stream, by its .shuffle(buffer_size)" in refused.value.__notes__[0]
    )
