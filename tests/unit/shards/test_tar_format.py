"""The tar parser gives what is in an archive, in whatever pieces it comes, and takes nothing damaged for an end."""

import io
import tarfile
from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace._shards.tar import TAR_BLOCK, TarSamples
from headrace.errors import ShardError, TruncatedShardError, UnsafeMemberError
from tests.unit.shards import tars

FORMATS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}


def archive(members, format=tarfile.USTAR_FORMAT, **extra):
    return tars.members(*members, format=format, **extra)


class Members(TarSamples):
    """Gives all members, without the fast path."""

    def _plain(self, view, begin):
        return iter(())

    def _is_wanted(self, name):
        return True


def parse(data, pieces=None, **options):
    """All members, the archive fed in pieces of `pieces` bytes."""
    parser = Members("x.tar", uniform=False, **options)
    step = pieces or len(data) or 1
    members = [
        member
        for at in range(0, len(data), step)
        for member in parser.members(data[at : at + step])
    ]
    deque(parser.finish())
    return members


def contents(members):
    return [(member.name, member.data) for member in members]


def typed(kind, **more):
    info = tarfile.TarInfo()
    info.type = kind
    for name, value in more.items():
        setattr(info, name, value)
    return info


FILES = [
    ("a.txt", b"abc"),
    ("empty.bin", b""),
    ("deep/er/b.bin", bytes(range(256)) * 5),
    ("block", bytes(TAR_BLOCK)),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pieces", [1, 511, 513, None])
def test_chunk_size_does_not_change_members(format, pieces):
    assert contents(parse(archive(FILES, FORMATS[format]), pieces)) == FILES


def test_a_size_in_base_256_is_read():
    header = bytearray(archive([("a.bin", b"x" * 1000)])[:TAR_BLOCK])
    header[124:136] = b"\x80" + (1000).to_bytes(11, "big")
    data = rechecked(header) + b"x" * 1000 + bytes(24) + bytes(2 * TAR_BLOCK)
    assert contents(parse(data, 300)) == [("a.bin", b"x" * 1000)]


def test_checksum_of_signed_characters_is_accepted():
    header = bytearray(archive([("\xff\xfe.bin", b"")], encoding="latin-1")[:TAR_BLOCK])
    signed = (
        sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:])
        + 256
    )
    header[148:156] = b"%06o\0 " % signed
    assert len(parse(bytes(header) + bytes(2 * TAR_BLOCK))) == 1


def rechecked(header):
    """A header whose checksum is right for what it says now."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


# Damage

SMALL = [("one.txt", b"first"), ("two.txt", b"x" * 600)]


def test_every_truncation_before_the_end_blocks_is_an_error():
    data = archive(SMALL)
    end = TAR_BLOCK + TAR_BLOCK + TAR_BLOCK + 2 * TAR_BLOCK + 2 * TAR_BLOCK
    for length in range(end):
        with pytest.raises(TruncatedShardError, match="truncated"):
            parse(data[:length])
    for length in range(end, len(data) + 1, 100):
        assert contents(parse(data[:length])) == SMALL


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_bit_in_a_header_is_an_error_or_changes_nothing(format):
    files = [("one.txt", b"first"), ("zwö.txt", b"second")]
    whole = archive(files, FORMATS[format])
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        second = tar.getmembers()[1].offset
    harmless = 0
    for at in range(second, second + TAR_BLOCK):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            try:
                assert contents(parse(bytes(data))) == files
                harmless += 1
            except ShardError:
                pass
    assert harmless < 12  # what ends the checksum's digits, and the byte after a zero


def test_single_zero_block_does_not_end_an_archive_and_nothing_follows_its_end():
    data = archive(SMALL)
    with pytest.raises(ShardError, match="after the end"):
        parse(data + data)
    first, second = parse(data, member_limit=500)
    assert (first.error, first.data) == (None, b"first")
    assert "600 bytes is more than member_limit=500" in str(second.error)
    with pytest.raises(TruncatedShardError):
        parse(data[: 5 * TAR_BLOCK + TAR_BLOCK])
    with pytest.raises(ShardError, match="single zero block"):
        parse(data[: 5 * TAR_BLOCK] + bytes(TAR_BLOCK) + data)


@pytest.mark.parametrize("size", [b"-0000000005\0", b"0000000000_\0", b"\xff" * 12])
def test_invalid_size_is_refused(size):
    header = bytearray(archive([("a", b"")])[:TAR_BLOCK])
    header[124:136] = size
    with pytest.raises(ShardError, match=r"no valid size|member_limit"):
        parse(rechecked(header) + bytes(1024))


@pytest.mark.parametrize(
    "records",
    [b"8 path=x\n", b"999 path=x\n", b"nonsense", b"12 size=-123\n", b"6 a=b\nx"],
)
def test_invalid_pax_records_are_refused(records):
    header = bytearray(archive([("pax", b"")])[:TAR_BLOCK])
    header[156:157] = b"x"
    header[124:136] = b"%011o\0" % len(records)
    extension = rechecked(header) + records + bytes(-len(records) % TAR_BLOCK)
    with pytest.raises(ShardError, match="extended header"):
        parse(extension + archive([("a", b"")]))


def outcome(data, pieces, **options):
    """The samples of an archive, and the position at its end, or the error after them."""
    decoder = TarSamples("x.tar", **{"fields": None, "uniform": False, **options})
    samples = deque()
    try:
        for at in range(0, len(data), pieces):
            samples.extend(decoder.feed(data[at : at + pieces]))
        position = decoder.position()
        samples.extend(decoder.finish())
    except ShardError as error:
        return list(map(str, samples)), type(error), str(error)
    return list(map(str, samples)), position, None


@example(field=(0, 100), noise=b".hidden.txt\0", at=0, right=True, header=0, options={})
@given(
    field=st.sampled_from(
        [(0, 100), (124, 12), (148, 8), (156, 1), (257, 8), (345, 155)]
    ),
    noise=st.one_of(
        st.binary(min_size=1, max_size=12),
        st.text("01279 /\\:.\0é-_x", min_size=1).map(str.encode),
    ),
    at=st.integers(0, 99),
    right=st.booleans(),
    header=st.sampled_from([0, 2 * TAR_BLOCK]),
    options=st.sampled_from([{}, {"uniform": True}, {"fields": ["txt"]}]),
)
@settings(deadline=None, max_examples=300)
def test_fast_path_equals_general_path(field, noise, at, right, header, options):
    data = bytearray(
        archive(
            [
                *SMALL,
                ("two.cls", b"2"),
                ("d.e/three.Txt", b"3" * 90),
                ("d.e/four.txt", b"4"),
            ]
        )
    )
    begin, length = field
    at %= length
    noise = noise[: length - at]
    data[header + begin + at : header + begin + at + len(noise)] = noise
    if right:
        data[header : header + TAR_BLOCK] = rechecked(data[header : header + TAR_BLOCK])
    assert outcome(bytes(data), len(data), **options) == outcome(
        bytes(data), 100, **options
    )


# What no training data has


def refused(member):
    """The only error in an archive of three members, and that of its sample; the members beside it are read."""
    data = archive([("good.txt", b"1"), member, ("after.txt", b"2")], tarfile.GNU_FORMAT)
    good, bad, after = parse(data)
    assert contents([good, after]) == [("good.txt", b"1"), ("after.txt", b"2")]
    for pieces in (len(data), 100):
        (first, error, last), _, end = outcome(data, pieces, uniform=True)
        assert ("b'1'" in first, "b'2'" in last, end) == (True, True, None)
        assert str(bad.error.args[0].split(" (")[0]) in error
    return bad.error


@pytest.mark.parametrize(
    "name",
    [
        "../x.txt",
        "a/../../x.txt",
        "/etc/passwd",
        "..",
        "a\\..\\..\\x.txt",
        "C:x.txt",
        "./../x.txt",
        "../d/",
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_names_that_lead_outside_are_refused_and_end_no_shard(name, format):
    (member,) = parse(archive([(name, b"x")], FORMATS[format]))
    assert (member.data, type(member.error)) == (None, UnsafeMemberError)
    error = refused((name, b"x"))
    assert isinstance(error, UnsafeMemberError)
    assert "leads outside" in str(error)
    assert error.member.endswith(name.removeprefix("./").rstrip("/"))


@pytest.mark.parametrize(
    ("kind", "what", "error"),
    [
        (tarfile.SYMTYPE, "symbolic link", UnsafeMemberError),
        (tarfile.LNKTYPE, "hard link", UnsafeMemberError),
        (tarfile.CHRTYPE, "device", UnsafeMemberError),
        (tarfile.GNUTYPE_SPARSE, "sparse files are not read", ShardError),
        (b"Z", "type b'Z' is not read", ShardError),
    ],
)
@pytest.mark.parametrize("name", ["bad", "bad.txt"])
def test_links_devices_and_pipes_are_refused_and_end_no_shard(kind, what, error, name):
    found = refused((name, typed(kind, linkname="good.txt")))
    assert type(found) is error
    assert what in str(found)
    assert (found.member, found.offset) == (name, 1024)


@pytest.mark.parametrize(
    "name", ["9:30.jpg", "a\nb/1.jpg", "a\nb/c/1.seg\n.jpg", "\n.jpg"]
)
def test_names_of_any_characters_are_samples(name):
    data = archive(
        [("first.jpg", b"1"), (name, b"2"), ("last.jpg", b"3")], tarfile.GNU_FORMAT
    )
    field = name.rpartition("/")[2].partition(".")[2]
    samples = outcome(data, len(data))
    assert samples == outcome(data, 100)
    assert len(samples[0]) == 3
    assert repr(name[: -len(field) - 1]) in samples[0][1]
    assert repr(field) in samples[0][1]
