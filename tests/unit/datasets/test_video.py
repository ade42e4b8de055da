"""Clips of `VideoDataset` have the frames that PyAV decodes of the whole file, and read only the bytes for them."""

import functools
import io
import struct

import av
import numpy as np
import pytest
import torch

import headrace as hr
from headrace.errors import ShardError
from tests.unit.datasets.formats import video_file
from tests.unit.shards.resuming import in_memory

OPEN = {"x264-params": "open-gop=1:keyint=12:bframes=3:b-pyramid=normal"}
OPEN_HEVC = {"x265-params": "open-gop=1:keyint=12:bframes=3:log-level=none"}
SHORT = {"x264-params": "open-gop=1:keyint=4:bframes=6:b-pyramid=normal"}
PAUSES = np.cumsum(np.random.default_rng(6).integers(1, 20, 60)).tolist()


def with_edit(data, begin=None, length=None):
    """The file with its edit list changed: ticks at which the edit begins, its length in ms; None: without a list."""
    data, at = bytearray(data), data.index(b"elst")
    assert struct.unpack_from(">I", data, at + 8) == (1,)
    if begin is None:
        data[at - 8 : at - 4] = b"free"
    else:
        (ticks_a_second,) = struct.unpack_from(">I", data, data.index(b"mvhd") + 16)
        struct.pack_into(">Ii", data, at + 12, length * ticks_a_second // 1000, begin)
    return bytes(data)


PLAIN = video_file(60)
MAKE = {
    "h264": lambda: PLAIN,
    "h264, index at the end, two tracks of audio": lambda: video_file(
        60, movflags="", audio=2
    ),
    "h264, open groups": lambda: video_file(60, options=OPEN),
    "h264, variable rate, begins late": lambda: video_file(60, times=PAUSES),
    "h264, short open groups, variable rate": lambda: video_file(
        60, times=PAUSES, options=SHORT
    ),
    "h264, negative delays": lambda: video_file(60, movflags="negative_cts_offsets"),
    "h264, mov, turned": lambda: video_file(60, container="mov", rotation=90),
    "no edit list": lambda: with_edit(PLAIN),
    "edit begins and ends within groups": lambda: with_edit(PLAIN, 1024 + 512 * 17, 900),
    "edit begins between frames": lambda: with_edit(PLAIN, 1100 + 512 * 5, 1234),
    "edit begins before the first frame": lambda: with_edit(PLAIN, 500, 1777),
    "hevc, open groups": lambda: video_file(60, codec="libx265", options=OPEN_HEVC),
    "mpeg4": lambda: video_file(60, codec="mpeg4"),
    "av1": lambda: video_file(60, codec="libsvtav1", options={"preset": "12"}),
    "raw": lambda: video_file(60, codec="rawvideo", container="mov", pixels="uyvy422"),
    "vp9": lambda: video_file(60, codec="libvpx-vp9", options={"deadline": "realtime"}),
}


@functools.cache
def file(name):
    return MAKE[name]()


def decoded(data):
    """Times and pixels of all frames of a file."""
    with av.open(io.BytesIO(data)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        return [
            (frame.time, frame.to_ndarray(format="rgb24"))
            for frame in container.decode(video=0)
        ]


def same(some, others):
    return len(some) == len(others) and all(
        map(np.array_equal, (one for _, one in some), (one for _, one in others))
    )


def opened(data, **options):
    return hr.VideoDataset(in_memory({"a.mp4": data}), **options)


@pytest.mark.parametrize("name", MAKE)
def test_clips_have_the_frames_of_the_whole_file_at_their_times(name):
    frames = decoded(file(name))
    times = [time for time, _ in frames]
    for length, stride in ((5, 5), (9, 4), (25, 11)):
        clips = [*opened(file(name), frames=length, stride=stride)]
        assert [clip.times.tolist() for clip in clips] == [
            times[at : at + length] for at in range(0, len(times) - length + 1, stride)
        ]
        for number, clip in enumerate(clips):
            assert same(decoded(clip.data), frames[stride * number :][:length])
            assert (clip.key, clip.start) == ("a.mp4", clip.times[0])
        assert torch.equal(
            hr.decode.video(24)(clip),
            hr.decode.video(24)(file(name))[stride * number :][:length],
        )


@pytest.mark.parametrize(
    "name",
    ["h264", "h264, variable rate, begins late", "edit begins and ends within groups"],
)
def test_clips_by_time_have_the_frames_that_are_shown_in_it(name):
    frames = decoded(file(name))
    times = np.array([time for time, _ in frames])
    for seconds, stride in ((0.5, 0.5), (0.31, 0.173)):
        clips = [*opened(file(name), clip_seconds=seconds, stride=stride)]
        assert 0 <= times[-1] - clips[-1].start - seconds + 0.15 < stride + 0.15
        for number, clip in enumerate(clips):
            assert clip.start == pytest.approx(times[0] + number * stride, abs=1e-4)
            first = np.searchsorted(times, clip.start + 1e-6) - 1
            wanted = frames[first : np.searchsorted(times, clip.start + seconds - 1e-4)]
            assert clip.times.tolist() == [time for time, _ in wanted]
            assert same(decoded(clip.data), wanted)


@pytest.mark.parametrize(("movflags", "requests"), [("faststart", 1), ("", 2)])
def test_only_the_index_and_the_bytes_of_groups_are_read(serve, movflags, requests):
    data = video_file(300, movflags=movflags, options={"x264-params": "qp=1"})
    server = serve({"a.mp4": data})
    clips = hr.VideoDataset("a.mp4", frames=12, store=server.store())
    spans = [tuple(map(int, seen.span[6:].split("-"))) for seen in server.seen()]
    assert (len(spans), server.requests()["HEAD"]) == (requests, 0)
    assert sum(stop + 1 - start for start, stop in spans) < (16 << 10) * 2
    assert len(decoded(clips[10].data)) == 12
    with av.open(io.BytesIO(data)) as container:
        packets = [one for one in container.demux(video=0) if one.size]
    needed = [at for at, one in enumerate(packets) if 4 <= one.pts * one.time_base < 4.39]
    assert len(needed) == 12
    key = max(at for at, one in enumerate(packets) if one.is_keyframe and at <= needed[0])
    last = packets[max(needed)]
    assert [seen.span for seen in server.seen()[requests:]] == [
        f"bytes={packets[key].pos}-{last.pos + last.size - 1}"
    ]
    assert clips.sample_key(10) == "a.mp4[4.000 s]"
    assert repr(clips) == "VideoDataset(1 shards, 25 samples)"


def pictures(data):
    """Frames of a file as PyAV decodes them, not turned: uint8 `(count, 3, height, width)`."""
    return torch.from_numpy(np.stack([frame for _, frame in decoded(data)])).permute(
        0, 3, 1, 2
    )


def test_decoder_gives_upright_frames_of_clips_and_of_whole_files():
    frames = pictures(PLAIN)
    assert torch.equal(hr.decode.video()(PLAIN), frames)
    assert torch.equal(
        hr.decode.video(frames=3)(hr.types.ObjectSample("a", memoryview(PLAIN), 5))[0],
        frames[[0, 30, 59]],
    )
    # Compared with frames of the same file: x264 may encode the same pictures differently in each
    # run.
    rotated = file("h264, mov, turned")
    turned = opened(rotated, frames=2)[3]
    assert torch.equal(
        hr.decode.video()(turned), torch.rot90(pictures(rotated)[6:8], 1, (2, 3))
    )
    assert hr.decode.video(size=(40, 20))(turned).shape == (2, 3, 40, 20)
    with pytest.raises(ValueError, match="frames must be positive"):
        hr.decode.video(frames=0)
    with pytest.raises(ValueError, match="size must be positive"):
        hr.decode.video(size=0)


def test_damaged_frames_are_an_error_of_the_decoder():
    clip = opened(PLAIN, frames=12)[1]
    middle = clip.data.index(b"mdat") + 1000
    for damaged in (
        clip.data[:middle] + bytes(3000) + clip.data[middle + 3000 :],
        b"no video",
    ):
        with pytest.raises(ValueError):
            hr.decode.video()(clip._replace(data=damaged))
    with pytest.raises(ValueError, match="12 frames, where there should be 11"):
        hr.decode.video()(clip._replace(times=clip.times[1:]))


def test_clips_of_periodic_intra_refresh_are_refused_as_their_frames_would_be_wrong():
    params = "intra-refresh=1:keyint=12:bframes=0:ref=3:sliced-threads=1"
    clips = opened(
        video_file(60, times=PAUSES, options={"x264-params": params}), frames=5, stride=1
    )
    assert hr.decode.video()(clips[0]).shape[0] == 5
    for index in range(20, len(clips)):
        with pytest.raises(ValueError, match="without a key frame"):
            hr.decode.video()(clips[index])


def patched(old, new):
    assert old in PLAIN
    return PLAIN.replace(old, new)


def with_numbers(kind, at, *numbers):
    """The file with other numbers in a table, without its edit list."""
    data = bytearray(with_edit(PLAIN))
    struct.pack_into(f">{len(numbers)}I", data, data.index(kind) + at, *numbers)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (video_file(20, movflags="frag_keyframe+empty_moov"), "fragmented"),
        (PLAIN[: len(PLAIN) // 2], "its video ends at"),
        (video_file(20, movflags="")[:-9], "whole index"),
        (
            patched(b"vide", b"soun"),
            r"no video that can be read.*no track of video, but \[b'soun",
        ),
        (b"\x1aE\xdf\xa3" + bytes(500), r"begins as b'.*; remux"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (with_numbers(b"stsz", 8, 1, 1 << 24), "16777216 frames"),
        (patched(b"avc1\0", b"encv\0"), "encrypted"),
        (patched(b"stts", b"sttz"), "it has no b'stts'"),
        (with_edit(PLAIN, -1, 100), "edit list"),
        (with_edit(PLAIN, 1 << 30, 100), "zero-size array"),
    ],
)
def test_file_that_cannot_be_read_by_ranges_is_one_error_with_its_name(data, what):
    with pytest.raises(ShardError, match=rf"{what}.*a\.mp4"):
        opened(data, frames=5)


def test_times_that_are_only_stated_make_no_millions_of_clips():
    with pytest.raises(ShardError, match=r"clips of 60 frames.*a\.mp4"):
        opened(with_numbers(b"stts", 16, 1 << 29), clip_seconds=1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "either clip_seconds= or frames="),
        ({"frames": 1.5}, "no whole number"),
        ({"clip_seconds": 1, "stride": 0}, "not positive"),
        ({"frames": 61}, "none of 1 videos is long enough"),
    ],
)
def test_invalid_arguments(options, what):
    with pytest.raises(ValueError, match=what):
        opened(PLAIN, **options)
