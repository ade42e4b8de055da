"""MDS and LitData's chunks: every compression, one request for a compressed shard, and what is refused."""

import asyncio
import gc
import json
import struct

import cramjam
import numpy as np
import pytest
import torch

import headrace as hr
from headrace._shards.unpacked import UnpackedShards
from headrace.errors import ShardError
from object_server import Fault
from tests.fixtures.litdata import make as litdata
from tests.fixtures.mds import make as mds
from tests.unit.datasets.formats import files_in, plain
from tests.unit.shards.resuming import in_memory

MDS = files_in("mds/zstd")
ENCODINGS = json.loads(MDS["index.json"])["shards"][0]["column_encodings"]
OBJECTS = {f"mds/{key}": data for key, data in MDS.items()}
OBJECTS |= {f"arrow/{key}": data for key, data in files_in("litdata/arrow").items()}


@pytest.mark.parametrize("compression", mds.COMPRESSIONS)
def test_every_compression_of_mosaic(compression):
    files = files_in(f"mds/{compression}")
    assert [plain(sample) for sample in hr.MDSDataset(in_memory(files))] == [
        *map(plain, mds.samples(18))
    ]


@pytest.mark.counts
@pytest.mark.parametrize("read", ["blocks", "stream"])
def test_compressed_shard_is_requested_once(server, read):
    dataset = hr.MDSDataset(server.store("mds"), unpacked_bytes=1)
    before = server.requests()["GET"]
    if read == "blocks":
        sampler = hr.BlockShuffleSampler(dataset, block_size=18, blocks_at_once=1)
        loader = hr.DataLoader(dataset, batch_size=18, sampler=sampler, collate_fn=len)
    else:
        loader = hr.DataLoader(dataset.stream(), batch_size=18, collate_fn=len)
    assert sum(loader) == 18
    assert server.requests()["GET"] - before == 4


@pytest.mark.counts
def test_corrupt_shard_is_requested_twice_however_many_samples_it_has(server):
    server.misbehave(Fault("flip", key="*00001*", at=0))
    dataset = hr.MDSDataset(server.store("mds"))
    before = server.requests()["GET"]
    loader = hr.DataLoader(dataset, batch_size=6, on_error="skip", collate_fn=len)
    lost = dataset.counts[1]
    assert sum(loader) == 18 - lost
    assert server.requests()["GET"] - before == 3 + 2
    found = []
    for one in range(dataset.counts[0], dataset.counts[0] + lost):
        with pytest.raises(ShardError, match=r"shard.00001.mds.zstd") as error:
            dataset[one]
        found.append(error.value)
    assert len({*map(id, found)}) == lost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "format 'mds' in version 3"),
        ({"samples": 3}, "samples, and 3 in its index"),
        ({"compression": "lz4"}, "compression 'lz4'"),
        ({"zip_data": {"basename": "../x", "bytes": 9}}, "'../x' is not in the folder"),
        (
            {"zip_data": {"basename": "shard.00000.mds.zstd", "bytes": []}},
            r"\(compressed: \[\]\)",
        ),
        (
            {"raw_data": {"basename": "x", "bytes": 4000, "hashes": {}}},
            "not zstd of 4,000 bytes|and 4,000 in its index",
        ),
        (
            {"raw_data": {"basename": "x", "bytes": 400 << 20, "hashes": {}}},
            "are said to unpack to 419,430,400, and 268,435,456 are the most|419,430,400 in its index",
        ),
        ({"column_sizes": None}, "no index of such shards: TypeError"),
        (
            {"column_encodings": ["ndarray:int7", *ENCODINGS[1:]]},
            "encoding 'ndarray:int7' is of an unknown type; uint8",
        ),
        (
            {"column_encodings": ["tensor", *ENCODINGS[1:]]},
            "encoding 'tensor' is unknown",
        ),
        ({"column_encodings": ["pkl", *ENCODINGS[1:]]}, "pickled"),
    ],
)
def test_index_that_lies_is_refused(change, message):
    index = json.loads(MDS["index.json"])
    with pytest.raises(ShardError, match="twice"):
        hr.MDSDataset(
            in_memory(
                MDS | {"index.json": json.dumps({"shards": 2 * index["shards"]}).encode()}
            )
        )
    index["shards"][0] |= change
    with pytest.raises(ShardError, match=message):
        hr.MDSDataset(in_memory(MDS | {"index.json": json.dumps(index).encode()}))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data_format": ["pickle"], "item_loader": "PyTreeLoader"},
            "leaf 'pickle' is pickled",
        ),
        (
            {"data_format": ["opus"], "item_loader": "PyTreeLoader"},
            "leaf 'opus' is unknown; str, text, int",
        ),
        (
            {"data_format": ["no_header_numpy:99"]},
            "leaf 'no_header_numpy:99' is of an unknown type",
        ),
        (
            {
                "data_spec": json.dumps(
                    [1, {"type": "OrderedDict", "children_spec": []}]
                ),
                "item_loader": "PyTreeLoader",
            },
            "samples with 'OrderedDict' are not read; dict, list and tuple are",
        ),
        (
            {"data_format": ["no_header_numpy:5", "int"]},
            "leaf 'int' has no place|too many values",
        ),
        ({"encryption": {"algorithm": "fernet"}}, "encrypted or not, are not read"),
        (
            {"compression": "zstd", "compression_level": "sample"},
            "compression_level='sample'",
        ),
        ({"item_loader": "PyTreeLoader"}, "bytes in place of|corrupt"),
    ],
)
def test_chunks_that_cannot_be_read_are_refused(change, message):
    files = files_in("litdata/tokens")
    index = json.loads(files["index.json"])
    index["config"] |= change
    tokens = index["config"]["item_loader"] == "TokensLoader"
    with pytest.raises(ShardError, match=message):
        hr.LitDataset(
            in_memory(files | {"index.json": json.dumps(index).encode()}),
            seq_len=9 if tokens else None,
        )[0]
    with pytest.raises(ValueError, match="chunks of tokens need one"):
        hr.LitDataset(in_memory(files))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (1, r"its offsets, from 0 to 1,134, are not those of [\d,]+ bytes"),
        (1 << 30, "no chunk of compressed frames: .*are the most"),
    ],
)
def test_frames_that_unpack_to_another_size_than_their_offsets_say_are_refused(
    size, message
):
    files = files_in("litdata/frames")
    chunk = bytearray(files["chunk-0-0.bin"])
    struct.pack_into("<I", chunk, 24 + 4 * 6 + 20, size)  # of the first frame
    with pytest.raises(ShardError, match=message):
        hr.LitDataset(in_memory(files | {"chunk-0-0.bin": bytes(chunk)}))[0]
    with pytest.raises(ShardError, match="no index of such shards: it has no 'config'"):
        hr.LitDataset(in_memory({"index.json": b'{"chunks": []}'}))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"LDARW01", b"LDARW02", "no Arrow table that can be read: .*LDARW02"),
        ("né 1".encode(), b"n\xff\xff 1", "no Arrow table that can be read: .*UTF8"),
        (b"\5\0\0\0\0\0\0\0", b"\4\0\0\0\0\0\0\0", "no Arrow table that can be read"),
    ],
)
def test_chunk_with_a_damaged_arrow_table_is_an_error(old, new, message):
    files = files_in("litdata/arrow")
    dataset = hr.LitDataset(
        in_memory(files | {"chunk-0-0.bin": files["chunk-0-0.bin"].replace(old, new)})
    )
    assert dataset[5] == litdata.row(5)
    with pytest.raises(ShardError, match=message):
        dataset[1]


def test_arrow_tables_are_found_by_a_server_that_ignores_ranges(server):
    server.misbehave(Fault("whole", key="*.bin", times=4))
    dataset = hr.LitDataset(server.store("arrow"))
    assert [*dataset] == [*map(litdata.row, range(18))]


def test_compressed_chunks_are_those_that_are_not():
    dataset = hr.LitDataset(in_memory(files_in("litdata/zstd")))
    assert [*map(plain, dataset)] == [*map(plain, map(litdata.sample, range(18)))]
    assert [*hr.LitDataset(in_memory(files_in("litdata/arrow-zstd")))] == [
        *map(litdata.row, range(18))
    ]
    raw = files_in("litdata/tokens")
    index = json.loads(raw["index.json"])
    index["config"] |= {"compression": "zstd"}
    packed = {
        key: bytes(cramjam.zstd.compress(data))
        for key, data in raw.items()
        if key != "index.json"
    }
    dataset = hr.LitDataset(
        in_memory(packed | {"index.json": json.dumps(index).encode()}), seq_len=20
    )
    assert torch.equal(
        torch.stack([*dataset]), torch.stack([*hr.LitDataset(in_memory(raw), seq_len=20)])
    )


async def test_unpacked_shard_is_loaded_once_for_all_that_wait_and_kept_while_it_is_in_use():
    cache, loads, go = UnpackedShards(150), [], asyncio.Event()

    async def load(key):
        loads.append(key)
        await go.wait()
        return np.full(100, key, np.uint8)

    waiting = [asyncio.create_task(cache.get(1, lambda: load(1))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    go.set()
    cancelled, *kept = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert bytes(kept[0]) == bytes(kept[1]) == b"\1" * 100
    await cache.get(2, lambda: load(2))
    await cache.get(1, lambda: load(1))  # over the limit, but in use
    assert loads == [1, 2]
    del cancelled, kept, waiting
    gc.collect()  # on Python 3.14, the frames of a cancelled task are a cycle
    await cache.get(2, lambda: load(2))
    await cache.get(1, lambda: load(1))
    assert loads == [1, 2, 2, 1]
