"""`TFRecordDataset` reads the records that tensorflow's writer has made, and notices each damaged one."""

import struct

import google_crc32c
import pytest

import headrace as hr
from headrace.errors import ShardError, TruncatedShardError
from tests.unit.datasets.formats import FORMATS
from tests.unit.shards.resuming import (
    in_memory,
    resumes_at_every_position,
    samples_and_errors,
)

FILES = FORMATS["tfrecord"].files


def masked(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(*records):
    sizes = [struct.pack("<Q", len(record)) for record in records]
    return b"".join(
        size + masked(size) + data + masked(data)
        for size, data in zip(sizes, records, strict=True)
    )


def read(data, name="x.tfrecord", **options):
    """Samples and errors of a file."""
    return samples_and_errors(hr.TFRecordDataset(in_memory({name: data}), **options))


def test_a_stream_continues_at_every_position():
    store = in_memory(FILES)
    options = {
        "chunk_bytes": 500,
        "shuffle": True,
        "buffer_size": 4,
        "shards_in_parallel": 2,
    }
    found = resumes_at_every_position(lambda: hr.TFRecordDataset(store, **options))
    assert sorted(found) == sorted(FORMATS["tfrecord"].samples)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 13, 1000])
def test_records_are_found_in_pieces_of_any_size(chunk_bytes):
    records = [b"", b"a", bytes(200), b"", bytes(range(256)) * 9]
    assert read(framed(*records), chunk_bytes=chunk_bytes) == records
    assert read(framed(), chunk_bytes=chunk_bytes) == []


def test_a_damaged_record_is_an_error_and_the_next_follow():
    data = bytearray(framed(b"first", b"second", b"third"))
    data[21 + 12 + 2] ^= 1
    first, error, third = read(bytes(data))
    assert (first, third) == (b"first", b"third")
    assert isinstance(error, ShardError)
    assert error.offset == 21
    assert "record 2: its checksum is wrong" in str(error)
    assert "x.tfrecord" in str(error)


@pytest.mark.parametrize(
    ("data", "name", "error", "what"),
    [
        (
            framed(b"first")[:-1],
            "x.tfrecord",
            TruncatedShardError,
            "truncated in record 1",
        ),
        (
            FILES["d.tfrecord.zlib"],
            "x.tfrecord",
            ShardError,
            "length is damaged .* compressed",
        ),
        (FILES["c.tfrecord.gz"], "x.tfrecord", ShardError, "gzip by its first bytes"),
        (
            struct.pack("<Q", 1 << 40) + masked(struct.pack("<Q", 1 << 40)),
            "x.tfrec",
            ShardError,
            "above 1 GiB",
        ),
    ],
)
def test_what_is_no_record_ends_its_file(data, name, error, what):
    *_, last = read(data, name)
    assert type(last) is error
    assert last.shard.endswith(name)
    with pytest.raises(error, match=what):
        raise last
