"""LeRobot datasets of format version 3, map-style."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace import decode
from headrace._shards.discovery import Shard, find_shards, shard_errors
from headrace._store.ranges import Ranges, read_ranges
from headrace._store.store import StoreLike, as_store
from headrace._streams.blocking import background_loop
from headrace._streams.map_style import MappedDataset, positions
from headrace.datasets.mp4 import check
from headrace.datasets.parquet import ParquetDataset
from headrace.datasets.video import VideoDataset

_INFO = "meta/info.json"
_PLACE = ("chunk_index", "file_index", "from_timestamp")  # columns of each camera
_Fields = dict[str, Any]
_Files = Mapping[str, Shard]


class LeRobotDataset(MappedDataset[_Fields]):
    """Rows and camera frames of a LeRobot dataset, version 3.

    Map-style. Needs ``headrace[parquet]``, ``headrace[video]`` for videos, and ``headrace[image]``
    for images in the rows. A sample is a dict, equal to the sample of lerobot: tensors of float32,
    int64 or bool, text as `str`, frames [3, H, W] of each camera, and the text of the `task`.

    A row group is read as a whole, as by `headrace.ParquetDataset`. Of a video, only the groups of
    pictures with the frames are read. Ranges that touch are read by a single request, for several
    batches at once. Frames are decoded where functions of `map` run: in the loader's workers.

    The constructor lists the files, and reads the metadata, the footers and the index of each
    video. A pickled dataset needs no request for them. The dataset keeps 100 bytes for each frame
    of a video. Cameras without 3 channels, as of depth, are refused.

    Args:
        files: URL or path of the dataset's folder, a `headrace.Store`, or the files as returned by
            ``headrace.hub(name, "**")``.
        delta_timestamps: for some features, times relative to the time of the row, in seconds.
            The sample has the stacked values at these times, and ``<feature>_is_pad``. Times
            outside the episode give the first or last value, and True in ``<feature>_is_pad``.
            Frames of a video at a single time are not stacked.
        tolerance_s: maximum distance in time of a frame from the wanted time, in seconds.
        return_uint8: whether frames are uint8, in place of float32 from 0 to 1.

    Attributes:
        info: the content of ``meta/info.json``.
        stats: the content of ``meta/stats.json``, or an empty dict.
        borders: int64 array: the first row of each episode, and the number of all rows. The rows of
            episode n are ``range(*borders[n : n + 2])``.

    Raises:
        MissingExtraError: a package is not installed.
        ShardError: a file is missing, corrupt, or contradicts another file.
        StoreError: a request failed.
        ValueError: an invalid argument.

    Example:
        >>> times = {"action": [0.0, 0.1, 0.2]}
        >>> rows = LeRobotDataset("s3://bucket/pusht", times)  # doctest: +SKIP
    """

    def __init__(
        self,
        files: StoreLike | tuple[Shard, ...],
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        *,
        tolerance_s: float = 1e-4,
        return_uint8: bool = False,
    ) -> None:
        given = files if isinstance(files, tuple) else as_store(files)
        shards = find_shards(given, suffixes=(".json", ".parquet", ".mp4"))
        by_path = {shard.key: shard for shard in shards}
        self.info, self.stats = _json(by_path, _INFO), _json(by_path, "meta/stats.json")
        with shard_errors("no dataset of version 3", f"{_INFO} beside {shards[0].name}"):
            rows, fps = (
                _EncodedRows(by_path, self.info, tolerance_s),
                float(self.info["fps"]),
            )
        for key, times in (delta_timestamps or {}).items():
            steps = [time * fps for time in times]
            near = all(abs(step - round(step)) <= tolerance_s * fps for step in steps)
            what = f"{key!r} is no feature, or its times are no multiples of 1/{fps:g} s"
            check(key in rows.kinds and steps and near, f"delta_timestamps: {what}")
            rows.offsets[key] = [*map(round, steps)]
        super().__init__(rows, partial(_decoded, not return_uint8))
        self.borders = rows.borders

    def __repr__(self) -> str:
        return f"LeRobotDataset({len(self.borders) - 1} episodes, {len(self)} rows)"


class _Encoded(NamedTuple):
    """Frames of a sample, not decoded."""

    file: str
    # Rows of `VideoDataset.clips`, then `VideoClip`s; or the bytes of images.
    clips: list[Any]
    times: torch.Tensor | None  # of the frames in the clips
    stacked: bool


class _EncodedRows(ParquetDataset):
    """Rows with frames that are not decoded.

    Attributes:
        kinds: types of the features.
        borders: the first row of each episode, and the number of all rows.
        offsets: for some features, the wanted rows of a sample, relative to the row of the sample.
    """

    # Plan a single row group ahead: frames take more memory than rows.
    _rows_ahead = 1 << 10

    def __init__(self, files: _Files, info: Any, tolerance: float) -> None:
        self.kinds: dict[str, str] = {}
        for key, feature in info["features"].items():
            self.kinds[key] = kind = feature["dtype"]
            known = kind not in ("video", "image") or 3 in feature["shape"]
            check(known, f"{key!r} is a camera without 3 channels")
        cameras = [key for key, kind in self.kinds.items() if kind == "video"]
        stored = [key for key in self.kinds if key not in cameras]
        super().__init__(_under(files, "data/"), columns=stored)
        self._tasks = [row.popitem()[1] for row in _rows(files, "meta/tasks.parquet")]
        columns = [f"videos/{camera}/{name}" for camera, name in product(cameras, _PLACE)]
        self._episodes = _rows(files, "meta/episodes/", "dataset_to_index", *columns)
        ends = [row["dataset_to_index"] for row in self._episodes]
        self.borders, self.offsets = (
            np.array([0, *ends], np.int64),
            dict[str, list[int]](),
        )
        good = (np.diff(self.borders) > 0).all() and self.borders[-1] == len(self)
        check(good, f"its episodes are not those of {len(self)} rows")
        self._tolerance = tolerance
        if not cameras:
            return
        videos = _under(files, "videos/")
        self._numbers = {shard.key: number for number, shard in enumerate(videos)}
        for camera, episode in product(cameras, self._episodes):
            self._place(camera, episode)  # raises an error if the video is missing
        self._videos = VideoDataset(videos, frames=1)
        seconds = self._videos.clips["seconds"]
        self._middles = (seconds[:-1] + seconds[1:]) / 2

    async def agets(self, indices: Sequence[int]) -> Sequence[_Fields]:
        """Read rows, in the order of `indices`."""
        places = positions(indices, len(self))
        episodes = np.searchsorted(self.borders, places, side="right") - 1
        near = places + np.array([0, *chain(*self.offsets.values())])[:, None]
        inside = np.clip(near, self.borders[episodes], self.borders[episodes + 1] - 1)
        numbers = np.unique(inside).tolist()
        rows = dict(zip(numbers, await super().agets(numbers), strict=True))
        made = map(partial(self._sample, rows), places.tolist(), episodes.tolist())
        samples = await asyncio.to_thread(list, made)
        values = chain(*(sample.values() for sample in samples))
        videos = [
            each
            for each in values
            if isinstance(each, _Encoded) and each.times is not None
        ]
        if videos:
            clips = np.array([*chain(*(each.clips for each in videos))])
            ranges = Ranges(clips["video"], clips["start"], clips["stop"])
            views = iter(await read_ranges(ranges, self._videos.read_range, gap=0))
            for each in videos:
                each.clips[:] = [
                    self._videos.clip_of(clip, next(views)) for clip in each.clips
                ]
        return samples

    def _sample(self, rows: Mapping[int, _Fields], index: int, episode: int) -> _Fields:
        """Make a sample, with clips that are not read."""
        sample: _Fields = {}
        file = self.sample_key(index)
        first, end = self.borders[episode : episode + 2].tolist()
        with shard_errors(f"a row that does not fit {_INFO}", file):
            sample["task"] = self._tasks[rows[index]["task_index"]]
            for key, kind in self.kinds.items():
                wanted = [index + offset for offset in self.offsets.get(key, [0])]
                some = [rows[min(max(number, first), end - 1)] for number in wanted]
                stacked = key in self.offsets
                if stacked:
                    padded = [not first <= number < end for number in wanted]
                    sample[f"{key}_is_pad"] = torch.tensor(padded)
                if kind == "video":
                    video, begin = self._place(key, self._episodes[episode])
                    sample[key] = self._frames(
                        video, [begin + row["timestamp"] for row in some]
                    )
                elif kind == "image":
                    images = [row[key]["bytes"] for row in some]
                    sample[key] = _Encoded(file, images, None, stacked)
                else:
                    values: Any = [row[key] for row in some]
                    values = (
                        values if kind in ("string", "language") else torch.tensor(values)
                    )
                    sample[key] = values if stacked else values[0]
        return sample

    def _place(self, camera: str, episode: _Fields) -> tuple[int, float]:
        """Return the number of an episode's video, and the begin of the episode in the video."""
        chunk, file, begin = (episode[f"videos/{camera}/{name}"] for name in _PLACE)
        path = f"videos/{camera}/chunk-{chunk:03d}/file-{file:03d}.mp4"
        return self._numbers[path], begin

    def _frames(self, video: int, times: Sequence[float]) -> _Encoded:
        """Find the frames of a video at some times."""
        videos = self._videos
        first, end, shard = (
            videos._firsts[video],
            videos._ends[video],
            videos._shards[video],
        )
        nearest = first + np.searchsorted(self._middles[first : end - 1], times)
        found = videos.clips["seconds"][nearest]
        what = f"no frames of {shard.name} at {times} s; the nearest are at {found} s"
        check((abs(found - times) < self._tolerance).all(), what)
        clips = videos.clips[np.unique(nearest)]
        # Clips with bytes that touch are read and decoded as a single clip.
        apart = np.flatnonzero(clips["start"][1:] > clips["stop"][:-1]) + 1
        joined = []
        for some in np.split(clips, apart):
            joined.append(some[0].copy())
            for name in ("last", "end", "stop"):
                joined[-1][name] = some[name].max()
        return _Encoded(shard.name, joined, torch.from_numpy(found), len(times) > 1)


def _json(files: _Files, path: str) -> Any:
    if path not in files:
        return {}
    with shard_errors("no JSON", files[path].name):
        return json.loads(bytes(background_loop().run(files[path].store.read_all(path))))


def _under(files: _Files, folder: str) -> list[Shard]:
    return [shard for path, shard in files.items() if path.startswith(folder)]


def _rows(files: _Files, folder: str, *columns: str) -> list[_Fields]:
    table = ParquetDataset(_under(files, folder), columns=columns or None)
    return table.__getitems__(range(len(table)))


def _decoded(scaled: bool, sample: _Fields) -> _Fields:
    """Decode the frames of a sample."""
    found = sample.copy()
    for key, value in sample.items():
        if not isinstance(value, _Encoded):
            continue
        with shard_errors(f"frames of {key!r} cannot be decoded", value.file):
            if value.times is None:
                frames = torch.stack([*map(decode.image(), value.clips)])
            else:
                times = torch.cat([clip.times for clip in value.clips])
                frames = torch.cat([*map(decode.video(), value.clips)])
                frames = frames[torch.searchsorted(times, value.times)]
        frames = frames / 255 if scaled else frames
        found[key] = frames if value.stacked else frames[0]
    return found
