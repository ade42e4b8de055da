"""Clips of mp4 and mov files, map-style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace._shards.discovery import (
    OnOpeningError,
    Shard,
    Shards,
    find_shards,
    open_each,
)
from headrace._store.ranges import Ranges
from headrace._store.store import StoreLike
from headrace.datasets.cached import RangedShards
from headrace.datasets.mp4 import Array, VideoTrack, clip_file, read_track

# Limit of clips of a file, plus 1,000 for each frame: the index may state wrong times.
_MOST_CLIPS = 1 << 20
_CLIP = np.dtype("<i8,<i8,<i8,<i8,<i8,<i8,<i8,<f8")
# `video` is the number of the file, `first` and `last` are frames, `begin` and `end` shown ticks,
# `start` and `stop` bytes.
_CLIP.names = ("video", "first", "last", "begin", "end", "start", "stop", "seconds")


class VideoClip(NamedTuple):
    """Consecutive frames of a video, not decoded.

    Attributes:
        key: key of the file.
        start: time from the beginning of the video to the beginning of the clip, in seconds.
        times: the time of each frame in the video, in seconds, float64.
        data: an mp4 file with only these frames, for `headrace.decode.video`.
    """

    key: str
    start: float
    times: torch.Tensor
    data: bytes


class VideoDataset(RangedShards[VideoClip]):
    """Clips of video tracks in mp4 and mov files.

    Map-style. A sample is a `VideoClip`, for decoding in ``transform=``. A clip is read by a ranged
    request, from the key frame before the clip to the last byte needed by the clip's frames. The
    clip has all frames shown at some time in the clip. The rest of a video, too short for a clip,
    is dropped: a video shorter than a clip has no clips.

    The constructor reads the index of each file by one to three requests, each time anew, and keeps
    26 bytes a frame. Fragmented files are refused, and edit lists that do more than cut and delay.
    Videos with periodic intra refresh in place of key frames are refused later, by the decoder.

    Args:
        objects: URLs or paths, as the shards of `TarDataset`. In a directory, files ending in
            ``.mp4``, ``.m4v`` or ``.mov``.
        clip_seconds: length of a clip, in seconds. Numbers of frames differ: batches need
            ``hr.decode.video(frames=…)``.
        frames: number of frames of a clip, in place of `clip_seconds`.
        stride: distance from the start of a clip to the start of the next clip, in the same unit.
            The default is the length of a clip.
        store: store of all files, a `headrace.Store` or its URL, as for `TokenDataset`.
        on_error: ``"skip"`` leaves out broken or missing files, with one warning.

    Raises:
        ShardError: a file has no video that can be read by ranges, or is truncated.
        StoreError: a listing or a request failed, or found nothing.
        ValueError: an invalid argument, or no video is long enough for a clip.

    Example:
        >>> clips = VideoDataset("s3://bucket/videos/", clip_seconds=2, stride=1)  # doctest: +SKIP
    """

    def __init__(
        self,
        objects: Shards,
        *,
        clip_seconds: float | None = None,
        frames: int | None = None,
        stride: float | None = None,
        store: StoreLike | None = None,
        on_error: OnOpeningError = "raise",
    ) -> None:
        if (clip_seconds is None) is (frames is None):
            raise ValueError("give either clip_seconds= or frames=")
        length = frames or clip_seconds or 0
        stride = length if stride is None else stride
        if (
            not 0 < length < 1e6
            or not 0 < stride < 1e6
            or (frames is not None and (length % 1 or stride % 1))
        ):
            lengths = f"a length of {length} or stride={stride}"
            raise ValueError(f"{lengths} is not positive, or no whole number of frames")
        found = find_shards(objects, suffixes=(".mp4", ".m4v", ".mov"), store=store)

        async def read(shard: Shard) -> tuple[Shard, VideoTrack, Array]:
            shard, track = await read_track(shard)
            return shard, track, _clips(shard, track, length, stride, frames is not None)

        shards, self._tracks, clips = zip(
            *open_each(found, read, on_error=on_error), strict=True
        )
        super().__init__(shards, [*map(len, clips)])
        self.clips = np.concatenate(clips)
        self.clips["video"] = np.repeat(np.arange(len(clips)), self.counts)
        if not len(self):
            raise ValueError(f"none of {len(found)} videos is long enough for a clip")

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Return the bytes of the clips at `indices`.

        Raises:
            IndexError: an index is out of range.
        """
        shards, _, places = self._rows(indices)
        clips = self.clips[places]
        return Ranges(shards, clips["start"], clips["stop"])

    def sample_key(self, index: int) -> str:
        """Return the file and the start of a clip."""
        return f"{self._shards[self.range(index)[0]].key}[{self.clips[index]['seconds']:.3f} s]"

    def sample_of(self, index: int, data: memoryview) -> VideoClip:
        """Make the clip at `index` from the clip's bytes."""
        return self.clip_of(self.clips[index], data)

    def clip_of(self, clip: Any, data: memoryview) -> VideoClip:
        """Make a clip, described as in `clips`, from bytes."""
        number = clip["video"]
        track = self._tracks[number]
        frames = track.frames[clip["first"] : clip["last"]]
        begin, end = int(clip["begin"]), int(clip["end"])
        shown = (frames["pts"] >= begin) & (frames["pts"] < end)
        times = torch.from_numpy(np.sort(frames["pts"][shown]) / track.scale)
        file = clip_file(track.boxes, frames, begin, end, data)
        return VideoClip(self._shards[number].key, float(clip["seconds"]), times, file)


def _clips(
    shard: Shard, track: VideoTrack, length: float, stride: float, count: bool
) -> Array:
    """Return the clips of a video.

    `length` and `stride` are numbers of frames if `count` is true, else seconds.
    """
    frames, scale = track.frames, track.scale
    pts, shown = frames["pts"], np.flatnonzero(frames["shown"])
    shown = shown[np.argsort(pts[shown], kind="stable")]
    times = pts[shown]
    ends = min(
        times[-1] + frames["duration"][shown[-1]],
        pts[pts > times[-1]].min(initial=1 << 62),
    )
    if (np.diff(times) == 0).any():
        raise shard.error("two frames have the same time")
    if count:
        low = np.arange(0, len(shown) - int(length) + 1, int(stride))
        high, starts = low + int(length), times[low]
    else:
        ticks = round(length * scale)
        room = (ends - times[0] - ticks) / (stride * scale)
        if room > _MOST_CLIPS + 1000 * len(times):
            raise shard.error(f"{room:,.0f} clips of {len(times)} frames")
        starts = times[0] + np.round(
            np.arange(int(room + 1 + 1e-9) if room >= 0 else 0) * (stride * scale)
        )
        low = np.searchsorted(times, starts, side="right") - 1
        high = np.searchsorted(times, starts + ticks)
    clips = np.zeros(len(low), _CLIP)
    if not len(low):
        return clips
    slices = np.stack((low, high), axis=1).ravel()
    lowest = np.minimum.reduceat(np.append(shown, len(pts)), slices)[::2]
    clips["last"] = last = np.maximum.reduceat(np.append(shown, -1), slices)[::2] + 1
    # In an open group, some frames are decoded after a key frame, but shown before the key frame.
    # Such frames need frames before the key frame.
    syncs = np.union1d(0, np.flatnonzero(frames["sync"]))
    by_time = np.searchsorted(np.maximum.accumulate(pts[syncs]), times[low], side="right")
    by_number = np.searchsorted(syncs, lowest, side="right")
    keys = np.maximum(np.minimum(by_time, by_number), 1) - 1
    clips["first"] = first = syncs[keys]
    clips["begin"], clips["end"] = times[low], np.append(times, ends)[high]
    clips["seconds"] = starts / scale
    clips["start"] = frames["offset"][first]
    clips["stop"] = frames["offset"][last - 1] + frames["size"][last - 1]
    needed = np.append(0, np.cumsum(frames["size"], dtype=np.int64))
    if (
        clips["stop"] - clips["start"] > (16 << 20) + 8 * (needed[last] - needed[first])
    ).any():
        raise shard.error("the frames of a clip are spread over the file")
    return clips
