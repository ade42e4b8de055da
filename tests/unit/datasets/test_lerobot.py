"""Samples of LeRobot datasets are those of lerobot and of PyAV, and only the needed bytes are read."""

import io
import json
import pickle
import re

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import headrace as hr
from headrace.errors import ShardError
from tests.fixtures.lerobot import make
from tests.hub_server import serve_hub
from tests.unit.datasets.formats import FIXTURES, files_in
from tests.unit.shards.resuming import in_memory
from tests.unit.shards.tars import parquet

FOLDER = FIXTURES / "lerobot/set"
FILES = files_in("lerobot/set")
FRONT = "videos/observation.images.front/chunk-000/file-000.mp4"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
BORDERS = [0, 9, 11, 25, 31, 51]
# What the reader of lerobot gave: see tests/fixtures/lerobot/make.py.
with np.load(FIXTURES / "lerobot/expected.npz") as stored:
    EXPECTED = {name: stored[name] for name in stored}
TIMES = {"plain": {}, "deltas": make.DELTAS}


def check(samples, rows, case="plain"):
    """Check that samples are those of some rows."""
    wanted = {
        name.partition("/")[2]: EXPECTED[name]
        for name in EXPECTED
        if name.startswith(case)
    }
    assert wanted.keys() == samples[0].keys()
    for name, values in wanted.items():
        found = np.stack([make.stored(name, sample[name]) for sample in samples])
        assert (found.dtype.kind, found.shape[1:]) == (
            values.dtype.kind,
            values.shape[1:],
        )
        # Releases of FFmpeg may round the colours in another way.
        if values.dtype == np.uint8:
            assert abs(found.astype(int) - values[rows]).max() <= 2
        else:
            assert np.array_equal(found, values[rows])


def changed(path, change):
    """The files with a changed table or JSON file."""
    if path.endswith(".json"):
        value = json.loads(FILES[path])
        change(value)
        return {**FILES, path: json.dumps(value).encode()}
    return {**FILES, path: parquet(change(pq.read_table(io.BytesIO(FILES[path]))))}


def column(name, values):
    """A change of a column of a table."""

    def change(table):
        place, new = table.column_names.index(name), values(table[name].to_pylist())
        return table.set_column(place, name, pa.array(new, table[name].type))

    return change


@pytest.mark.parametrize("case", TIMES)
def test_samples_of_a_dataset_written_by_lerobot_are_those_of_lerobot(case):
    rows = hr.LeRobotDataset(FOLDER, TIMES[case])
    every = range(BORDERS[-1])
    assert len(rows) == len(every)
    check([rows[index] for index in every], every, case)
    order = np.random.default_rng(0).permutation(every).tolist()
    check(pickle.loads(pickle.dumps(rows)).__getitems__(order), order, case)


def test_frames_as_uint8_and_the_metadata():
    first = changed(EPISODES, lambda table: table[:2])
    last = changed(EPISODES, lambda table: table[2:])[EPISODES]
    files = {**first, "meta/episodes/chunk-000/file-001.parquet": last}
    rows = hr.LeRobotDataset(in_memory(files), return_uint8=True)
    for name in ("observation.images.front", "observation.image"):
        assert torch.equal(rows[11][name] / 255, hr.LeRobotDataset(FOLDER)[11][name])
    assert repr(rows) == "LeRobotDataset(5 episodes, 51 rows)"
    assert rows.info["fps"] == 10
    assert rows.stats["action"]["count"] == [51]
    episode = torch.utils.data.Subset(rows, range(*rows.borders[2:4]))
    assert [sample["episode_index"].item() for sample in episode] == [2] * 14
    assert hr.LeRobotDataset(in_memory(without("stats.json"))).stats == {}


def test_a_dataset_without_videos_has_the_rows():
    def change(info):
        info["features"] = {
            key: feature
            for key, feature in info["features"].items()
            if feature["dtype"] != "video"
        }

    files = changed("meta/info.json", change)
    rows = hr.LeRobotDataset(
        in_memory(files), {"action": [0.0, 0.2], "note": [-0.1, 0.1]}
    )
    assert rows[3]["action"].tolist() == EXPECTED["plain/action"][[3, 5]].tolist()
    assert rows[3]["note"] == ["né 2", "né 4"]
    assert "observation.images.front" not in rows[3]


def groups(video):
    """First and last byte of the group of pictures of each frame, in the order of the frames."""
    with av.open(io.BytesIO(video)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    begins = [packet.pos for packet in packets if packet.is_keyframe]
    ends = [*begins[1:], packets[-1].pos + packets[-1].size]
    bounds = np.array([*zip(begins, ends, strict=True)])
    order = sorted(packets, key=lambda packet: packet.pts)
    return [
        bounds[np.searchsorted(begins, each.pos, side="right") - 1].tolist()
        for each in order
    ]


GROUPS = {path: groups(data) for path, data in FILES.items() if path.endswith(".mp4")}


def needed(indices, times):
    """Bytes of the groups of pictures with the frames of some rows."""
    found = set()
    for index in indices:
        place = np.searchsorted(BORDERS, index, side="right")
        first, end = BORDERS[place - 1 : place + 1]
        for camera in ("observation.images.front", "observation.images.wrist"):
            for delta in times.get(camera, [0]):
                row = min(max(index + round(10 * delta), first), end - 1)
                second = row >= 25
                path = f"videos/{camera}/chunk-000/file-00{int(second)}.mp4"
                found.add((path, *GROUPS[path][row - 25 * second]))
    return sum(end - begin for _, begin, end in found)


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_bytes_are_those_of_the_groups_of_pictures_and_of_the_rows(serve, times, shuffle):
    server = serve(FILES)
    rows = hr.LeRobotDataset(server.store(), times)
    opening = len(server.seen())
    options = {"shuffle": shuffle, "seed": 1, "concurrency": 1}
    with hr.DataLoader(rows, batch_size=5, collate_fn=list, **options) as loader:
        batches = [[sample["index"].item() for sample in batch] for batch in loader]
    seen = server.seen()[opening:]
    spans = [tuple(map(int, re.findall(r"\d+", each.span))) for each in seen]
    tables = sum(len(data) for path, data in FILES.items() if path.startswith("data/"))
    videos = sum(needed(batch, times) for batch in batches)
    fetched = sum(end + 1 - begin for begin, end in spans)
    assert fetched <= 1.3 * (videos + tables)
    # With `concurrency=1` each batch is a call: touching ranges are a single request.
    most = sum(
        2 * len(batch) * max(1, len(times.get("observation.images.front", [0])))
        for batch in batches
    )
    assert len(seen) < most


def test_files_of_the_hub(monkeypatch):
    commit = "a" * 40
    with serve_hub({"main": commit, commit: {**FILES, "README.md": b"#"}}) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.urls[0])
        rows = hr.LeRobotDataset(hr.hub("datasets/org/name", "**", token=False))
        check([rows[25]], [25])


def without(part):
    """The files whose paths do not have a part."""
    return {path: data for path, data in FILES.items() if part not in path}


def depth(info):
    info["features"]["observation.images.front"]["shape"] = [48, 64, 1]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (without("info"), "it has no 'features'|info"),
        (without("wrist"), "videos/observation.images.wrist/chunk-000/file-000"),
        (without("tasks"), "meta/info.json"),
        (without("data/"), "meta/info.json"),
        (without("data/chunk-000/file-001"), "episodes are not those of"),
        (
            changed("meta/info.json", depth),
            "'observation.images.front' is a camera without 3 channels",
        ),
        (
            changed("meta/info.json", lambda info: info.pop("fps")),
            "it has no 'fps'.*meta/info.json",
        ),
        (
            {**FILES, "meta/stats.json": b"{"},
            "no JSON.*meta/stats.json|meta/stats.json.*no JSON",
        ),
        (
            changed(EPISODES, column("dataset_to_index", lambda values: values[::-1])),
            "episodes are not those of 51 rows",
        ),
    ],
)
def test_files_that_contradict_each_other_are_refused(files, message):
    with pytest.raises(ShardError) as caught:
        hr.LeRobotDataset(in_memory(files))
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("timestamp", lambda value: value + 0.01, rf"no frames of .*{FRONT}"),
        ("task_index", lambda value: 9, r"file-000\.parquet\[3\]"),
        ("reward", lambda value: None, r"file-000\.parquet\[3\]"),
        (
            "observation.image",
            lambda value: {"bytes": b"no image", "path": None},
            r"(?=.*'observation\.image' cannot be decoded).*file-000\.parquet",
        ),
    ],
)
def test_rows_that_do_not_fit_are_errors_with_the_file(name, change, message):
    every = column(name, lambda values: [*map(change, values)])
    rows = hr.LeRobotDataset(in_memory(changed("data/chunk-000/file-000.parquet", every)))
    with pytest.raises(ShardError) as caught:
        rows[3]
    assert re.search(message, str(caught.value)), str(caught.value)
    # Other files are read.
    check([rows[30]], [30])


def test_damaged_frames_are_an_error_with_the_file():
    begin, end = GROUPS[FRONT][0]
    video = FILES[FRONT][:begin] + bytes(end - begin) + FILES[FRONT][end:]
    rows = hr.LeRobotDataset(in_memory({**FILES, FRONT: video}))
    with pytest.raises(
        ShardError, match=r"frames of '.*front' cannot be decoded"
    ) as caught:
        rows[0]
    assert FRONT in str(caught.value)
    check([rows[40]], [40])


@pytest.mark.parametrize(
    "times",
    [
        {"actoin": [0.0]},
        {"action": [0.03]},
        {"action": []},
        {"observation.images.front": [0.0, 0.15]},
    ],
)
def test_times_that_are_no_rows_are_refused(times):
    with pytest.raises(ValueError, match=r"delta_timestamps: .* no multiples of 1/10 s"):
        hr.LeRobotDataset(in_memory(FILES), times)
    rows = hr.LeRobotDataset(in_memory(FILES), {"action": [0.11]}, tolerance_s=0.02)
    assert rows[0]["action"].tolist() == EXPECTED["plain/action"][[1]].tolist()
