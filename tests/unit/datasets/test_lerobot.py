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
from tests.unit.datasets.formats import FIXTURES, lerobot_sample, lerobot_set, parquet
from tests.unit.shards.resuming import in_memory

# Two cameras; episodes that share files of rows and of frames, and cross row groups.
LENGTHS, DATA, FRONT = [9, 1, 14, 6, 20], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]
FILES, ROWS = lerobot_set(LENGTHS, DATA, FRONT)
TIMES = {
    "front": [-1 / 3, 0.0, 1 / 30],
    "wrist": [0.1],
    "image": [-1 / 30, 0.0],
    "observation.state": [-1 / 30, 0.0],
    "action": [number / 30 for number in range(4)],
    "reward": [0.0],
    "done": [5.0],
    "note": [-0.1, 0.1],
}


def check(sample, index, times=(), dtype=torch.float32):
    """Check that a sample is that of a row."""
    wanted = lerobot_sample(ROWS, index, dict(times), dtype)
    assert sample.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert sample[key].dtype == value.dtype, key
            assert torch.equal(sample[key], value), key
        else:
            assert sample[key] == value, key


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of the dataset."""
    for path, data in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path


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


@pytest.mark.parametrize("case", ["plain", "deltas"])
def test_samples_of_a_dataset_written_by_lerobot_are_those_of_lerobot(case):
    """`expected.npz` has what the reader of lerobot gave, see tests/fixtures/lerobot/make.py."""
    rows = hr.LeRobotDataset(FIXTURES / "lerobot/set", make.DELTAS if case == "deltas" else None)
    samples = [rows[index] for index in range(len(rows))]
    with np.load(FIXTURES / "lerobot/expected.npz") as file:
        wanted = {name.partition("/")[2]: file[name] for name in file if name.startswith(case)}
    assert wanted.keys() == samples[0].keys()
    for name, values in wanted.items():
        found = np.stack([make.stored(name, sample[name]) for sample in samples])
        assert (found.dtype.kind, found.shape) == (values.dtype.kind, values.shape)
        if values.dtype == np.uint8:  # releases of FFmpeg may round the colours in another way
            assert abs(found.astype(int) - values).max() <= 2
        else:
            assert np.array_equal(found, values)


@pytest.mark.parametrize("times", [{}, TIMES])
def test_every_row_has_the_values_and_frames_at_its_times(folder, times):
    rows = hr.LeRobotDataset(folder, times)
    assert len(rows) == sum(LENGTHS)
    for index in range(len(rows)):
        check(rows[index], index, times)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    together = pickle.loads(pickle.dumps(rows)).__getitems__(order)
    for index, sample in zip(order, together, strict=True):
        check(sample, index, times)


def test_frames_as_uint8_and_the_metadata():
    rows = hr.LeRobotDataset(in_memory(FILES), return_uint8=True)
    check(rows[11], 11, dtype=torch.uint8)
    assert repr(rows) == "LeRobotDataset(5 episodes, 50 rows)"
    assert (rows.info["fps"], rows.stats) == (30, {"action": {"mean": [0.5, 0.25]}})
    episode = torch.utils.data.Subset(rows, range(*rows.borders[2:4]))
    assert [sample["episode_index"].item() for sample in episode] == [2] * 14
    without = {path: data for path, data in FILES.items() if path != "meta/stats.json"}
    assert hr.LeRobotDataset(in_memory(without)).stats == {}


def test_a_dataset_without_videos_has_the_rows():
    def change(info):
        info["features"] = {
            key: feature for key, feature in info["features"].items() if feature["dtype"] != "video"
        }

    files = changed("meta/info.json", change)
    rows = hr.LeRobotDataset(in_memory(files), {"action": [0.0, 0.1]})
    actions = np.stack([ROWS[3]["action"], ROWS[6]["action"]]).astype(np.float32)
    assert rows[3]["action"].tolist() == actions.tolist()
    assert "front" not in rows[3]


def groups(video):
    """First and last byte of the group of pictures of each frame, in the order of the frames."""
    with av.open(io.BytesIO(video)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    begins = [packet.pos for packet in packets if packet.is_keyframe]
    ends = [*begins[1:], packets[-1].pos + packets[-1].size]
    bounds = np.array([*zip(begins, ends, strict=True)])
    order = sorted(packets, key=lambda packet: packet.pts)
    return [bounds[np.searchsorted(begins, each.pos, side="right") - 1].tolist() for each in order]


GROUPS = {path: groups(data) for path, data in FILES.items() if path.endswith(".mp4")}


def needed(indices, times):
    """Bytes of the groups of pictures with the frames of some rows."""
    found = set()
    for index in indices:
        first = sum(LENGTHS[: ROWS[index]["episode_index"]])
        end = first + LENGTHS[ROWS[index]["episode_index"]]
        for camera in ("front", "wrist"):
            for delta in times.get(camera, [0]):
                row = min(max(index + round(30 * delta), first), end - 1)
                second = camera == "front" and row >= 24
                path = f"videos/{camera}/chunk-000/file-00{int(second)}.mp4"
                found.add((path, *GROUPS[path][row - 24 * second]))
    return sum(end - begin for _, begin, end in found)


@pytest.mark.parametrize("times", [{}, TIMES])
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
    most = sum(2 * len(batch) * max(1, len(times.get("front", [0]))) for batch in batches)
    assert len(seen) < most


def test_files_of_the_hub(monkeypatch):
    commit = "a" * 40
    with serve_hub({"main": commit, commit: {**FILES, "README.md": b"#"}}) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.urls[0])
        rows = hr.LeRobotDataset(hr.hub("datasets/org/name", "**", token=False), TIMES)
        check(rows[25], 25, TIMES)


def depth(info):
    info["features"]["front"]["shape"] = [48, 64, 1]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({key: FILES[key] for key in FILES if "info" not in key}, "it has no 'features'|info"),
        (
            {key: FILES[key] for key in FILES if "wrist" not in key},
            "videos/wrist/chunk-000/file-000",
        ),
        ({key: FILES[key] for key in FILES if "tasks" not in key}, "meta/info.json"),
        ({key: FILES[key] for key in FILES if "data/" not in key}, "meta/info.json"),
        (
            {
                key: FILES[key]
                for key in FILES
                if not key.endswith("data/chunk-000/file-001.parquet")
            },
            "episodes are not those of",
        ),
        (changed("meta/info.json", depth), "'front' is a camera without 3 channels"),
        (
            changed("meta/info.json", lambda info: info.pop("fps")),
            "it has no 'fps'.*meta/info.json",
        ),
        ({**FILES, "meta/stats.json": b"{"}, "no JSON.*meta/stats.json|meta/stats.json.*no JSON"),
        (
            changed(
                "meta/episodes/chunk-000/file-000.parquet",
                column("dataset_to_index", lambda values: values[::-1]),
            ),
            "episodes are not those of 50 rows",
        ),
    ],
)
def test_files_that_contradict_each_other_are_refused(files, message):
    with pytest.raises(ShardError) as caught:
        hr.LeRobotDataset(in_memory(files))
    assert re.search(message, str(caught.value)), str(caught.value)


def late(values):
    return [value + 0.01 for value in values]


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (
            "data/chunk-000/file-000.parquet",
            column("timestamp", late),
            r"no frames of .*videos/front/chunk-000/file-000\.mp4",
        ),
        (
            "data/chunk-000/file-000.parquet",
            column("task_index", lambda values: [9] * len(values)),
            r"file-000\.parquet\[3\]",
        ),
        (
            "data/chunk-000/file-000.parquet",
            column("reward", lambda values: [None] * len(values)),
            r"file-000\.parquet\[3\]",
        ),
        (
            "data/chunk-000/file-000.parquet",
            column("image", lambda values: [{"bytes": b"no image", "path": None}] * len(values)),
            r"file-000\.parquet.*'image' cannot be decoded|'image' cannot be decoded.*file-000",
        ),
    ],
)
def test_rows_that_do_not_fit_are_errors_with_the_file(path, change, message):
    rows = hr.LeRobotDataset(in_memory(changed(path, change)))
    with pytest.raises(ShardError) as caught:
        rows[3]
    assert re.search(message, str(caught.value)), str(caught.value)
    # Other files are read.
    check(rows[30], 30)


def test_damaged_frames_are_an_error_with_the_file():
    path = "videos/front/chunk-000/file-000.mp4"
    begin, end = GROUPS[path][0]
    video = FILES[path][:begin] + bytes(end - begin) + FILES[path][end:]
    rows = hr.LeRobotDataset(in_memory({**FILES, path: video}))
    with pytest.raises(ShardError, match="frames of 'front' cannot be decoded") as caught:
        rows[0]
    assert path in str(caught.value)
    check(rows[20], 20)


@pytest.mark.parametrize(
    "times", [{"actoin": [0.0]}, {"action": [0.01]}, {"action": []}, {"front": [0.0, 0.05]}]
)
def test_times_that_are_no_rows_are_refused(times):
    with pytest.raises(ValueError, match=r"delta_timestamps: .* no multiples of 1/30 s"):
        hr.LeRobotDataset(in_memory(FILES), times)
    rows = hr.LeRobotDataset(in_memory(FILES), {"action": [0.04]}, tolerance_s=0.01)
    assert rows[0]["action"].tolist() == [pytest.approx(ROWS[1]["action"].tolist())]
