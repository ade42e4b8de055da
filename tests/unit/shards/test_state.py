"""A stream of shards continues from a saved position with the same samples and errors, by ranged reads."""

import asyncio
import gzip
import json
import random
import tarfile

import pytest

import headrace as hr
from headrace.errors import ObjectChangedError, ShardError, StateError
from object_server import ObjectServer
from tests.servers import store_of
from tests.unit.shards import tars
from tests.unit.shards.resuming import (
    in_folder,
    in_memory,
    restored,
    resumes_at_every_position,
    state_after,
    states,
)
from tests.unit.streams.reading import outcomes

CHUNK = 700  # bytes; members straddle chunks


def tar_bytes(
    number, samples, *, format=tarfile.USTAR_FORMAT, name="{number}/{sample:03}"
):
    """A tar with two fields in each sample, of lengths that differ."""
    draw = random.Random(number)
    keys = [name.format(number=number, sample=sample) for sample in range(samples)]
    names = [f"{key}.{field}" for key in keys for field in ("txt", "cls")]
    return tars.members(
        *((name, draw.randbytes(draw.randrange(150))) for name in names), format=format
    )


def many_gzip_streams(data):
    """A gzip stream for each 900 bytes, as `bgzip` and parallel compressors write them."""
    return b"".join(
        gzip.compress(data[start : start + 900], mtime=0)
        for start in range(0, len(data), 900)
    )


PACKINGS = {
    "plain": ("", bytes),
    "gzip": (".gz", gzip.compress),
    "gzip-streams": (".gz", many_gzip_streams),
    "gzip-padded": (".gz", lambda data: many_gzip_streams(data) + bytes(100)),
    "zstd": (".zst", tars.zstd),
    "zstd-frames": (
        ".zst",
        lambda data: b"".join(
            tars.zstd(data[at : at + 900]) for at in range(0, len(data), 900)
        ),
    ),
}


# The same samples in the same order


LONG = {"name": "é" * 60 + "/" + "n" * 90 + "{number}-{sample}"}  # in a header of its own


@pytest.mark.parametrize(
    ("packing", "in_parallel", "archive"),
    [
        ("plain", 1, {}),
        *((name, 2, {}) for name in PACKINGS),
        ("plain", 2, {**LONG, "format": tarfile.PAX_FORMAT}),
        ("plain", 2, {**LONG, "format": tarfile.GNU_FORMAT}),
    ],
)
def test_tar_stream_continues_at_every_position(packing, in_parallel, archive):
    suffix, pack = PACKINGS[packing]
    objects = {
        f"{n}.tar{suffix}": pack(tar_bytes(n, samples, **archive))
        for n, samples in enumerate((4, 1, 6, 3))
    }
    store = in_memory(objects)
    found = resumes_at_every_position(
        lambda: hr.TarDataset(
            list(objects), store=store, chunk_bytes=CHUNK, shards_in_parallel=in_parallel
        )
    )
    assert len({sample["__key__"] for sample in found}) == len(found) == 14


@pytest.mark.parametrize(
    ("packing", "format", "ending"),
    [
        ("plain", "json", "\n"),
        ("plain", "text", "\r\n"),
        ("gzip-streams", "text", "\n"),
        ("zstd", "json", "\r\n"),
    ],
)
@pytest.mark.parametrize("if_match", [True, False])
def test_lines_continue_at_every_position(packing, format, ending, if_match):
    suffix, pack = PACKINGS[packing]
    draw = random.Random(0)
    texts = [
        ending.join(json.dumps("x" * draw.randrange(40)) for _ in range(count))
        for count in (9, 1, 14, 6)
    ]
    texts[1] += ending
    texts[3] += ending + "{"
    texts[2] = ending + texts[2].replace(ending, ending * 2, 5) + ending * 2
    objects = {f"{n}.jsonl{suffix}": pack(text.encode()) for n, text in enumerate(texts)}
    store = in_memory(objects, if_match=if_match)
    found = resumes_at_every_position(
        lambda: hr.LinesDataset(
            list(objects),
            store=store,
            format=format,
            chunk_bytes=37,
            shards_in_parallel=2,
        )
    )
    assert len(found) == 31 if format == "json" else len(found) > 31
    assert sum(isinstance(one, tuple) for one in found) == (format == "json")


# Errors


def damaged_shards():
    """Shards of which three are damaged after some samples."""
    objects = {f"{n}.tar": tar_bytes(n, 5) for n in range(6)}
    objects["1.tar"] = objects["1.tar"][:3000]
    flipped = bytearray(objects["3.tar"])
    flipped[3072] ^= 1
    objects["3.tar"] = bytes(flipped)
    objects["4.tar"] = b"no tar" * 200
    return objects


@pytest.mark.parametrize("in_parallel", [1, 4])
def test_errors_are_at_the_same_place_and_not_reported_again(in_parallel):
    objects = damaged_shards()
    store = in_memory(objects)
    found = resumes_at_every_position(
        lambda: hr.TarDataset(
            list(objects), store=store, chunk_bytes=CHUNK, shards_in_parallel=in_parallel
        )
    )
    assert sum(isinstance(one, tuple) for one in found) == 3


def test_fields_of_the_first_sample_are_required_after_a_restore():
    data = tars.members(
        *((f"{n}.{field}", b"x" * 300) for n in range(4) for field in ("a", "b")),
        ("4.a", b"x"),
    )
    store = in_memory({"0.tar": data})
    found = resumes_at_every_position(
        lambda: hr.TarDataset(["0.tar"], store=store, chunk_bytes=CHUNK)
    )
    assert len(found) == 5
    assert found[4][0] is ShardError


# Requests


async def test_restore_reads_at_most_a_chunk_again():
    objects = {f"{n}.tar": tar_bytes(n, 40) for n in range(4)}
    with ObjectServer(objects) as server:
        options = {"store": store_of(server), "chunk_bytes": 4096}

        def make():
            return hr.TarDataset(
                list(objects), shards_in_parallel=2, requests_per_shard=1, **options
            )

        found, dumps = await states(make())
        whole = sum(map(len, objects.values())) // 4096
        before = server.requests()["GET"]
        await outcomes(await restored(make(), dumps[len(found) * 9 // 10]))
        assert server.requests()["GET"] - before < whole // 5


async def test_closing_a_stream_leaves_no_request_and_keeps_its_state():
    objects = {f"{number}.tar": tar_bytes(number, 40) for number in range(6)}
    iterator = aiter(
        hr.TarDataset(
            "*.tar", store=in_memory(objects), chunk_bytes=CHUNK, shards_in_parallel=2
        )
    )
    # Near the end of the first two: the next ones are opened ahead.
    await outcomes(iterator, 70)
    state = iterator.state_dict()
    assert len(asyncio.all_tasks()) > 1
    await iterator.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert iterator.state_dict() == state
    assert await outcomes(iterator) == []


# States that do not fit


def small(store, names=("0.tar", "1.tar", "2.tar"), **options):
    return hr.TarDataset(
        list(names),
        store=store,
        chunk_bytes=CHUNK,
        **{"shards_in_parallel": 2, **options},
    )


@pytest.fixture
def objects():
    return {f"{n}.tar": tar_bytes(n, 5) for n in range(3)}


async def test_shard_that_has_changed_is_an_error_that_names_it(objects):
    state = await state_after(small(in_memory(objects)), 3)
    # other versions, of all but the middle one
    changed = in_memory(dict(reversed(objects.items())))
    iterator = aiter(small(changed))
    iterator.load_state_dict(state)
    with pytest.raises(ObjectChangedError, match=r"0\.tar"):
        [await anext(iterator) for _ in range(9)]


def test_listed_shard_that_has_changed_is_an_error_before_anything_is_read(
    objects, tmp_path
):
    in_folder(tmp_path, objects)

    def make():
        return hr.TarDataset(tmp_path, chunk_bytes=CHUNK, shards_in_parallel=2)

    state = asyncio.run(state_after(make(), 3))
    (tmp_path / "1.tar").write_bytes(tar_bytes(7, 30))
    with pytest.raises(
        StateError,
        match=r"1\.tar has changed since the state was saved: it had \d+ bytes",
    ):
        aiter(make()).load_state_dict(state)


async def test_shard_that_has_become_shorter_without_a_version_is_an_error(objects):
    store = in_memory(objects, if_match=False)
    state = await state_after(small(store), 9)
    for one in state["inner"]["open"]:
        one["given"] += 20
        one["drop"] += 20
    iterator = aiter(small(store))
    iterator.load_state_dict(state)
    with pytest.raises(
        StateError,
        match=r"\.tar has changed since the state was saved: it ends after \d+ samples",
    ):
        await anext(iterator)


def test_each_different_option_is_named_with_old_and_new(objects):
    store, saved_with = in_memory(objects), {"shuffle": True, "seed": 1}
    state = asyncio.run(state_after(small(store, **saved_with), 3))
    for options, message in (
        ({"shuffle": False}, "shuffle=True, but now there is shuffle=False"),
        ({"seed": 0}, "seed=1, but now there is seed=0"),
        (
            {"names": ("0.tar", "1.tar")},
            r"list of shards='3 \(\w+\)', but now .*='2 \(\w+\)'",
        ),
        (
            {"rank": 0, "world_size": 2},
            r"reader=\[0, 1\], but now there is reader=\[0, 2\]",
        ),
    ):
        with pytest.raises(StateError, match=f"saved with {message}"):
            aiter(small(store, **{**saved_with, **options})).load_state_dict(state)


# Epochs


async def test_state_continues_in_the_order_of_its_epoch(objects):
    store = in_memory(objects)
    dataset = small(store, shuffle=True, shards_in_parallel=1)
    dataset.set_epoch(3)
    found, dumps = await states(dataset)
    first, _ = await states(small(store, shuffle=True, shards_in_parallel=1))
    assert first != found
    again = await restored(small(store, shuffle=True, shards_in_parallel=1), dumps[4])
    assert await outcomes(again) == found[4:]
