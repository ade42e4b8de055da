"""Index of an mp4 or mov file, and clips as mp4 files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from headrace._shards.discovery import HeaderReader, Shard, shard_errors
from headrace.errors import TruncatedShardError

Array = np.ndarray[Any, Any]


class VideoTrack(NamedTuple):
    """Video track of a file."""

    frames: Array  # in decoding order
    scale: int  # ticks per second
    boxes: tuple[bytes, ...]  # to copy into clips


_FRAME = np.dtype("<i8,<i8,<u4,<u4,?,?")
# Times are in ticks, as in FFmpeg.
_FRAME.names = ("pts", "offset", "size", "duration", "sync", "shown")
_FIRST, _LATER = 16 << 10, 1 << 20  # bytes of the first request, and of later requests
# Limits of the size of an index, and of the numbers stated in an index.
_MOST_BYTES, _MOST_FRAMES, _MOST_SECONDS = 1 << 28, 1 << 24, 4e6
_PARENTS = (b"mdia", b"minf", b"stbl", b"edts", b"dinf")
# Boxes to copy into clips, at each depth.
_COPIED = ((b"tkhd",), (b"mdhd", b"hdlr"), (b"vmhd", b"dinf"), (b"stsd",))


def check(good: object, what: str) -> None:
    """Raise `ValueError` unless `good`."""
    if not good:
        raise ValueError(what)


async def read_track(shard: Shard) -> tuple[Shard, VideoTrack]:
    """Read the index of a file by one to three requests.

    Returns the shard with size and version, and the video track.
    """
    shard, first = await shard.read_version(_FIRST)
    reader, size = HeaderReader(shard, first, _LATER), shard.size
    at, kind, header, length = 0, b"", 0, 0
    for _ in range(1000):
        at += length
        kind, header, length = _header(await reader.take(at, at + 16), size - at)
        if kind in (b"moov", b"moof") or not header <= length < size - at:
            break
    if kind != b"moov" or not header <= length <= min(size - at, _MOST_BYTES):
        what = (
            f"not mp4 or mov with a whole index (moov): begins as {bytes(first[:12])!r}"
        )
        remedy = "remux (ffmpeg -c copy), or decode whole files of an ObjectDataset"
        raise shard.error(f"{what}; {remedy}", at)
    with shard_errors("no video that can be read by ranges", shard.name, at):
        track = _parse(await reader.take(at + header, at + length), size)
    if (end := int(track.frames["offset"][-1]) + int(track.frames["size"][-1])) > size:
        raise TruncatedShardError(
            f"{size} bytes, but its video ends at {end}", shard=shard.name, offset=size
        )
    return shard, track


def _header(data: memoryview, left: int) -> tuple[bytes, int, int]:
    """Return a box's kind, header length and total length.

    A stored length of 0 means all `left` bytes.
    """
    length, kind = struct.unpack_from(">I4s", data)
    if length == 1:
        return (kind, 16, *struct.unpack_from(">Q", data, 8))
    return (kind, 8, length or left)


def _walk(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    while len(data) >= 8:
        kind, header, length = _header(data, len(data))
        check(
            header <= length <= len(data),
            f"box {kind!r} of {length} bytes where there are {len(data)}",
        )
        yield kind, data[header:length]
        yield from _walk(data[header:length]) if kind in _PARENTS else ()
        data = data[length:]


def _rows(box: memoryview, dtype: str, at: int = 4) -> Array:
    """Return the rows of a table.

    The number of rows is stored at byte `at`, directly before the rows.
    """
    return np.frombuffer(box, dtype, struct.unpack_from(">I", box, at)[0], at + 4)


def _runs(box: memoryview, dtype: str, count: int) -> Array:
    """Return the values of a run-length table.

    A row of the table is a number of repetitions and a value.
    """
    rows = _rows(box, dtype)
    check(
        rows["f0"].sum(dtype=float) == count,
        f"a table of times that is not for {count} frames",
    )
    return np.repeat(rows["f1"].astype(np.int64), rows["f0"])


def _parse(moov: memoryview, size: int) -> VideoTrack:
    movie = dict(_walk(moov))
    # Of several boxes of the same kind, the first counts.
    tracks = [
        dict(reversed([*_walk(box)])) for kind, box in _walk(moov) if kind == b"trak"
    ]
    kinds = {bytes(each.get(b"hdlr", b"")[8:12]): each for each in reversed(tracks)}
    check(b"vide" in kinds, f"no track of video, but {[*kinds]}")
    track = kinds[b"vide"]
    check(b"mvex" not in movie, "fragmented mp4, whose index is not in one place")
    codecs = bytes(track[b"stsd"][4:16])
    check(
        codecs[:4] == b"\0\0\0\1" and codecs[8:] != b"encv",
        "encrypted, or of several codecs",
    )
    check(
        b"dref" not in track or bytes(track[b"dref"][19:20]) == b"\1",
        "the frames are in another file",
    )
    mvhd, mdhd = movie[b"mvhd"], track[b"mdhd"]
    constant, count = struct.unpack_from(">II", track[b"stsz"], 4)
    at = 20 if mvhd[0] else 12
    (scale,) = struct.unpack_from(">I", mdhd, 20 if mdhd[0] else 12)
    most = min(_MOST_FRAMES, size // max(1, constant))
    check(
        0 < count <= most and scale,
        f"{count} frames in {size} bytes, {scale} ticks a second",
    )
    frames = np.zeros(count, _FRAME)
    frames["size"] = constant or _rows(track[b"stsz"], ">u4", 8)
    frames["offset"] = _offsets(track, frames["size"].astype(np.int64))
    frames["duration"] = durations = _runs(track[b"stts"], ">u4,>u4", count)
    pts, shift, shown = np.cumsum(durations) - durations, 0, np.ones(count, bool)
    if b"ctts" in track:
        pts += _runs(track[b"ctts"], ">u4,>i4", count)
    frames["sync"][
        _rows(track[b"stss"], ">u4").astype(np.int64) - 1
        if b"stss" in track
        else slice(None)
    ] = True
    if b"elst" in track:
        edits = _rows(
            track[b"elst"], ">u8,>i8,>u4" if track[b"elst"][0] else ">u4,>i4,>u4"
        )
        plain = (
            (edits["f1"][:-1] == -1).all()
            and (edits["f1"][-1:] >= 0).all()
            and (edits["f2"][-1:] == 1 << 16).all()
        )
        check(len(edits) and plain, "an edit list of several parts, or of another speed")
        movie_scale = max(1, *struct.unpack_from(">I", mvhd, at))
        *empty, length = (
            (2 * int(each) * scale + movie_scale) // (2 * movie_scale)
            for each in edits["f0"]
        )
        shown = (pts >= edits["f1"][-1]) & (pts - int(edits["f1"][-1]) < length)
        # Not from the edit's begin: FFmpeg shows the first frame at once.
        shift = sum(empty) - int(pts[shown].min())
    check(
        np.ptp(pts) + abs(shift) <= _MOST_SECONDS * scale, "times that are out of range"
    )
    frames["pts"], frames["shown"] = pts + shift, shown
    # The movie gets the track's time scale: edits of clips are in ticks.
    head = _box(b"mvhd", mvhd[:at], struct.pack(">I", scale), mvhd[at + 4 :])
    copied = (
        b"".join(_box(kind, track[kind]) for kind in kinds if kind in track)
        for kinds in _COPIED
    )
    return VideoTrack(frames, scale, (head, *copied))


def _offsets(track: dict[bytes, memoryview], sizes: Array) -> Array:
    """Return the offset of each frame in the file, in bytes.

    Frames are in chunks. The tables give the chunks' offsets and numbers of frames.
    """
    places = (
        _rows(track[b"co64"], ">u8") if b"co64" in track else _rows(track[b"stco"], ">u4")
    )
    rows = _rows(track[b"stsc"], ">u4,>u4,>u4")
    runs = np.diff(rows["f0"], append=len(places) + 1).astype(np.int64)
    inside = rows["f1"].astype(np.int64)
    counted = (
        (rows["f0"][:1] == 1).any()
        and (runs > 0).all()
        and runs.astype(float) @ inside == len(sizes)
    )
    check(
        counted and places.max() < 1 << 60,
        "tables of chunks and sizes that contradict each other",
    )
    inside, before = np.repeat(inside, runs), np.cumsum(sizes) - sizes
    first = np.repeat(
        before[np.minimum(np.cumsum(inside) - inside, len(sizes) - 1)], inside
    )
    offsets: Array = np.repeat(places.astype(np.int64), inside) + before - first
    check(
        (offsets[1:] >= offsets[:-1] + sizes[:-1]).all(),
        "frames that overlap, or are not in the order of decoding",
    )
    return offsets


def _box(kind: bytes, *parts: bytes | memoryview) -> bytes:
    return b"".join((struct.pack(">I4s", 8 + sum(map(len, parts)), kind), *parts))


def _table(kind: bytes, *columns: Any, extra: bytes = b"") -> bytes:
    rows = np.stack(np.broadcast_arrays(*columns), axis=-1).astype(">u4")
    return _box(kind, bytes(4), extra, struct.pack(">I", len(rows)), rows.tobytes())


def clip_file(
    boxes: tuple[bytes, ...], frames: Array, begin: int, end: int, data: memoryview
) -> bytes:
    """Make an mp4 file of a clip.

    Args:
        boxes: boxes of the track, as of `read_track`.
        frames: frames needed to decode the clip, in decoding order.
        begin: time of the first shown frame, in ticks.
        end: end of the shown frames, in ticks.
        data: bytes of the original file, from the first of `frames` to the last.
    """
    head, track, media, info, description = boxes
    durations, ftyp = (
        frames["duration"].astype(np.int64),
        _box(b"ftyp", b"isom", bytes(4), b"isom"),
    )
    delays = frames["pts"] - frames["pts"][0] - (np.cumsum(durations) - durations)
    least = min(0, int(delays.min()))
    edit = struct.pack(
        ">IIQqI", 1 << 24, 1, end - begin, begin - int(frames["pts"][0]) - least, 1 << 16
    )
    times = _table(b"stts", 1, durations) + _table(b"ctts", 1, delays - least)
    places = _table(
        b"stco", frames["offset"] - frames["offset"][0] + len(ftyp) + 8
    ) + _table(b"stsc", [1], 1, 1)
    # With several sync samples, FFmpeg chooses where an edit begins and ends. The choice is not
    # always right in open groups, where frames are delayed. Other codecs may need the flag of each
    # frame.
    syncs = [1] if delays.any() else np.union1d(1, np.flatnonzero(frames["sync"]) + 1)
    sizes = _table(b"stsz", frames["size"], extra=bytes(4)) + _table(b"stss", syncs)
    media += _box(b"minf", info, _box(b"stbl", description, times, places, sizes))
    trak = _box(b"trak", track, _box(b"edts", _box(b"elst", edit)), _box(b"mdia", media))
    return b"".join(
        (
            ftyp,
            struct.pack(">I4s", 8 + len(data), b"mdat"),
            data,
            _box(b"moov", head, trak),
        )
    )
