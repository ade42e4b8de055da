"""`TFRecordDataset` reads the records that tensorflow's writer has made, and notices each damaged one."""

import struct

import google_crc32c
import numpy as np
import pytest

import headrace as hr
from headrace.errors import MissingExtraError, ShardError, TruncatedShardError
from tests.unit.datasets.formats import FORMATS, files_in, plain
from tests.unit.shards.resuming import in_memory

FILES = files_in("tfrecord")


def masked(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(*records):
    sizes = [struct.pack("<Q", len(record)) for record in records]
    return b"".join(size + masked(size) + data + masked(data) for size, data in zip(sizes, records, strict=True))


def read(data, name="x.tfrecord", **options):
    """Samples and errors of a file."""
    stream, found = iter(hr.TFRecordDataset(in_memory({name: data}), **options)), []
    while True:
        try:
            found.append(next(stream))
        except StopIteration:
            return found
        except ShardError as error:
            found.append(error)


def test_the_framing_is_that_of_tensorflow():
    records = read(FILES["a.tfrecord"])
    assert framed(*records) == FILES["a.tfrecord"]
    assert [plain(*read(framed(record), decode=True)) for record in records] == [
        *map(plain, FORMATS["tfrecord"].samples[:14])
    ]
    assert read(b"") == []


@pytest.mark.parametrize("chunk_bytes", [1, 7, 13, 1000])
def test_records_are_found_in_pieces_of_any_size(chunk_bytes):
    records = [b"", b"a", bytes(200), b"", bytes(range(256)) * 9]
    assert read(framed(*records), chunk_bytes=chunk_bytes) == records


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
        (framed(b"first")[:-1], "x.tfrecord", TruncatedShardError, "truncated in record 1"),
        (FILES["d.tfrecord.zlib"], "x.tfrecord", ShardError, "length is damaged .* compressed"),
        (FILES["c.tfrecord.gz"], "x.tfrecord", ShardError, "gzip by its first bytes"),
        (struct.pack("<Q", 1 << 40) + masked(struct.pack("<Q", 1 << 40)), "x.tfrec", ShardError, "above 1 GiB"),
    ],
)
def test_what_is_no_record_ends_its_file(data, name, error, what):
    *_, last = read(data, name)
    assert type(last) is error
    assert last.shard.endswith(name)
    with pytest.raises(error, match=what):
        raise last


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (read(FILES["sequence.record"])[0], "but field 2, as of a SequenceExample"),
        (b"\x0a\xff", "index out of range"),
        (b"\x0a\x08\x0a\x06\x12\x04\x22\x02\x0a\0", "of kind 4"),  # from the future
        (b"\x0a\x09\x0a\x07\x12\x05\x1a\x03\x0a\x01\x80", "numbers without an end"),
        (b"\x0a\x09\x0a\x07\x12\x05\x12\x03\x0a\x01\0", "buffer size must be a multiple"),
    ],
)
def test_a_record_that_is_no_example_is_an_error_and_the_next_follow(record, what):
    error, example = read(framed(record, b""), decode=True)
    assert what in str(error)
    assert "record 1: its data are no tf.train.Example" in str(error)
    assert example == {}


def test_lists_that_are_not_packed_are_read():
    ints, floats = b"\x08\x05\x08" + b"\xff" * 9 + b"\x01", b"\x0d" + struct.pack("<f", 1.5)
    entries = [b"\x0a\x01x\x12" + bytes([2 + len(ints)]) + b"\x1a" + bytes([len(ints)]) + ints]
    entries += [b"\x0a\x01y\x12" + bytes([2 + len(floats)]) + b"\x12" + bytes([len(floats)]) + floats]
    features = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in entries)
    ((example),) = read(framed(b"\x0a" + bytes([len(features)]) + features), decode=True)
    assert plain(example) == plain({"x": np.array([5, -1]), "y": np.array([1.5], np.float32)})


def test_without_the_checksums_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "google_crc32c", None)
    with pytest.raises(MissingExtraError, match=r"google-crc32c.*headrace\[tfrecord\]"):
        hr.TFRecordDataset("x.tfrecord")
