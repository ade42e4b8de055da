"""Programs of documents that read a bucket: the README, the quickstart and the recipes."""

import csv
import importlib
import io
import json
import re
import shutil
import tarfile
from pathlib import Path

import lance
import numpy as np
import pyarrow.feather
import pyarrow.parquet
import pytest
import zarr

from tests.contract.places import moto_bucket, variables_of
from tests.documents import programs_with_output, python_blocks
from tests.hub_server import serve_hub
from tests.unit.datasets.formats import FIXTURES, video_file

READING = python_blocks("README.md")[0]
PAGES = "docs/recipes.md", "docs/formats.md", "docs/shards.md"
RECIPES = [
    each
    for page in PAGES
    for each in programs_with_output(page)
    if "from datasets" not in each[0]
]


def write_data(folder):
    """The data of the README and of docs/recipes.md."""
    for name in (
        "clips",
        "code",
        "corpus",
        "saved/train",
        "features",
        "pairs",
        "shards",
        "table",
        "text",
        "tokens",
        "train/disc",
        "train/square",
        "train/triangle",
        "val",
        "videos",
    ):
        (folder / name).mkdir(parents=True)
    shutil.copytree(FIXTURES / "mds/zstd", folder / "mds")
    shutil.copytree(FIXTURES / "litdata/tokens", folder / "chunks")
    shutil.copytree(FIXTURES / "lerobot/set", folder / "robot")
    importlib.import_module("05_image_folder").draw_shapes(folder, 1200)
    importlib.import_module("09_padded_audio").record(folder / "clips", 16)
    for name, frames in (("a", 150), ("b", 130)):
        (folder / f"videos/{name}.mp4").write_bytes(video_file(frames))
    shutil.copytree(Path(__file__).parent / "fixtures/tfrecord", folder / "records")
    fields = zarr.open_group(folder / "fields.zarr", mode="w")
    fields.create_array(
        "wind", shape=(365, 2, 32, 64), chunks=(10, 2, 8, 16), dtype="f4"
    )[:] = 1.5
    fields.create_array("time", data=np.arange(365), chunks=(100,))
    with open(folder / "labels.csv", newline="") as labels:
        rows = [row for row in csv.DictReader(labels) if row["file"].endswith(".jpg")]
    for row in rows:
        (folder / row["file"]).rename(folder / "train" / row["label"] / row["file"])
    for label in ("square", "triangle"):  # of three classes, the first is missing
        shutil.copytree(folder / "train" / label, folder / "val" / label)
    keys = [f"{row['label']}/{row['file']}" for row in rows]
    pairs = [
        {"caption": f"{n} images", "images": keys[n : n + n % 4 + (n % 8 == 0)]}
        for n in range(200)
    ]
    (folder / "pairs/0.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    images = [
        {"id": n, "file_name": f"{row['label']}/{row['file']}"}
        for n, row in enumerate(rows)
    ]
    classes = [
        {"id": n, "name": name} for n, name in enumerate(("disc", "square", "triangle"))
    ]
    marks = [
        {"id": n, "image_id": n, "category_id": n % 3, "bbox": [10, 20, 20, 30]}
        for n in range(0, len(rows), 2)
    ]
    crowd = {**marks[0], "id": len(rows), "category_id": 7, "iscrowd": 1}
    flat = {**marks[0], "id": len(rows) + 1, "category_id": 7, "bbox": [10, 20, 0, 30]}
    (folder / "coco.json").write_text(
        json.dumps(
            {
                "images": images,
                "categories": classes,
                "annotations": [crowd, flat, *marks],
            }
        )
    )
    for shard in range(4):
        with tarfile.open(folder / f"shards/{shard:04d}.tar", "w") as tar:
            for row in rows[shard::4][:50]:
                tar.add(folder / "train" / row["label"] / row["file"], row["file"])
                label = tarfile.TarInfo(row["file"].replace(".jpg", ".cls"))
                label.size = 1
                tar.addfile(label, io.BytesIO(b"%d" % len(row["label"])))
        for kind, text in (
            ("text", "Document {}-{}. "),
            ("code", "def f{}_{}(): pass; "),
        ):
            lines = [
                json.dumps({"text": text.format(shard, number) * (number % 7)})
                for number in range(100)
            ]
            (folder / kind / f"{shard}.jsonl").write_text("\n".join(lines))
        np.save(folder / f"features/{shard}.npy", np.ones((100, 16, 8), np.float16))
        np.arange(20_000, dtype=np.uint16).tofile(folder / f"tokens/{shard}.bin")
        lengths = np.arange(1, 101)
        np.arange(lengths.sum(), dtype=np.uint16).tofile(folder / f"corpus/{shard}.ds")
        np.cumsum(lengths, dtype=np.uint64).tofile(folder / f"corpus/{shard}.ds.index")
        table = {"id": range(100), "label": [1] * 100, "features": [[0.5, 1.5]] * 100}
        pyarrow.parquet.write_table(
            pyarrow.table(table), folder / f"table/{shard}.parquet", row_group_size=50
        )
    lance.write_dataset(
        pyarrow.table({"id": range(200), "label": [1] * 200}), folder / "table.lance"
    )
    pyarrow.feather.write_feather(
        pyarrow.table({"id": range(200), "label": [1] * 200}),
        folder / "saved/train/0.arrow",
    )


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """Images, shards, text, tokens and tables behind an S3 server: the lines that lead a program to them."""
    folder = tmp_path_factory.mktemp("bucket")
    write_data(folder)
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("t[ae]*/*.*")
    }
    with (
        moto_bucket("bucket") as (client, options),
        serve_hub({"main": "a" * 40, "a" * 40: files}) as hub,
    ):
        for path in folder.glob("*/**/*"):
            if path.is_file():
                key = path.relative_to(folder).as_posix()
                client.upload_file(path, "bucket", key, ExtraArgs={"ACL": "public-read"})
        images = sorted(folder.glob("train/*/*"))[:45]
        images += [folder / f"train/gone/{n}.jpg" for n in range(3)]
        url = f"{options['endpoint']}/bucket"
        links = [
            {"url": f"{url}/{path.relative_to(folder).as_posix()}", "caption": path.stem}
            for path in images
        ]
        links += [{"url": "http://127.0.0.1:9/nowhere", "caption": ""}] * 2
        (folder / "links.jsonl").write_text("\n".join(map(json.dumps, links)))
        variables = {
            **variables_of(options),
            "AWS_ALLOW_HTTP": "true",
            "HF_ENDPOINT": hub.urls[0],
        }
        ignored = (
            "import warnings\nwarnings.filterwarnings('ignore', 'a sample was skipped')\n"
        )
        yield f"{ignored}import os\nos.chdir({str(folder)!r})\nos.environ.update({variables})\n"


def test_program_of_the_readme_reads_each_image_of_a_bucket(run, bucket):
    assert len(READING.splitlines()) <= 16
    *printed, number = run(f"{bucket}{READING}print(len(photos))\n")
    counts = re.findall(r"tensor\(\[(.*?)\]\)", " ".join(printed))
    assert (
        sum(int(count) for each in counts for count in each.split(",")) == int(number) > 0
    )


def test_labels_of_the_validation_set_agree_where_a_class_is_missing(run, bucket):
    program, _, _ = python_blocks("docs/train-and-validate.md")
    accuracies = re.findall(r"accuracy (\d+)%", " ".join(run(bucket + program)))
    assert len(accuracies) == 3
    assert int(accuracies[-1]) > 60


def test_programs_of_the_quickstart_run_on_a_directory_and_on_a_bucket(run, bucket):
    files, photos, upload, resumed = python_blocks("docs/quickstart.md")
    assert len(files.splitlines()) <= 15
    left, *_, total = run(files + resumed)[-6:]
    assert int(left) == int(total) - 1
    own = (
        (upload + photos)
        .replace("s3://bucket/", "s3://own/")
        .replace('"bucket"', '"own"')
    )
    assert run(bucket + own)[-3:] == ["('disc',", "'square',", "'triangle')"]


@pytest.mark.parametrize(("program", "printed"), RECIPES)
def test_recipe_prints_what_is_written_below_it(run, bucket, program, printed):
    assert " ".join(run(bucket + program)) == " ".join(printed.split())
