"""Packing: the shards are read by their datasets, and say what does not fit."""

import decimal
import functools
import json
import re
import tarfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import headrace as hr
from headrace.cli.main import main
from tests.datasets import SlowDataset


def dataset(*samples):
    return SlowDataset(len(samples), 0, make=samples.__getitem__)


def upper(sample):
    return {
        "__key__": sample.key.partition(".")[0],
        "txt": bytes(sample.data).upper(),
        "n": torch.tensor(1),
    }


def test_objects_become_tar_shards_with_an_index(tmp_path):
    source = tmp_path / "source"
    for name in (*(f"cat/{number:02}.jpg" for number in range(32)), "dog/1.seg.png"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode())
    packed = hr.pack(hr.ObjectDataset(source, labels="folder"), tmp_path / "shards", shard_size=1)
    assert packed[:2] == (3, 33)
    with tarfile.open(tmp_path / "shards/000002.tar") as archive:
        assert archive.getnames() == ["dog/1.seg.png", "dog/1.cls"]
    assert {path.name for path in (tmp_path / "shards").iterdir() if path.suffix != ".tar"} == {
        "_pack.json",
        "headrace.index",
    }
    samples = hr.TarDataset.index(tmp_path / "shards", fields=["cls"])
    assert [samples[index]["cls"] for index in range(33)] == [b"0"] * 32 + [b"1"]
    record = json.loads((tmp_path / "shards/_pack.json").read_text())
    assert [shard["samples"] for shard in record["shards"]] == [16, 16, 1]


def test_fields_are_encoded(tmp_path):
    sample = {
        "npy": np.arange(3),
        "json": {"a": 1},
        "cls": 4,
        "score": 0.5,
        "id": torch.tensor(7),
        "jpg": b"\xff",
    }
    sample["raw"] = memoryview(np.arange(6, dtype="<i4").reshape(2, 3)[:, ::2])
    hr.pack(dataset(sample), tmp_path)
    (found,) = hr.TarDataset(tmp_path)
    assert found["__key__"] == "000000000"
    assert {name: found[name] for name in ("json", "cls", "score", "id", "jpg")} == {
        "json": b'{"a": 1}', "cls": b"4", "score": b"0.5", "id": b"7", "jpg": b"\xff",
    }  # fmt: skip
    assert found["npy"].startswith(b"\x93NUMPY")
    assert np.frombuffer(found["raw"], "<i4").tolist() == [0, 2, 3, 5]


def test_rows_become_parquet(tmp_path):
    rows = [{"n": index, "text": "x" * index} for index in range(300)]
    packed = hr.pack(dataset(*rows), tmp_path, format="parquet", shard_size="20KB")
    assert packed.shards > 1
    assert list(hr.ParquetDataset(tmp_path)) == rows


TYPES = {
    "small": pa.array([1, 2] * 50, pa.int16()),
    "single": pa.array([0.5] * 100, pa.float32()),
    "category": pa.array(["a"] * 100).dictionary_encode(),
    "price": pa.array(
        [decimal.Decimal("1.50")] * 70 + [decimal.Decimal("12345.00")] * 30, pa.decimal128(10, 2)
    ),
    "late": pa.array([None] * 64 + ["x"] * 36),
    "tags": pa.array([[]] * 64 + [["x"]] * 36),
    "nanoseconds": pa.array([1, 1001] * 50, pa.timestamp("ns")),
    "large": pa.array([1] * 70 + [2**63 + 1] * 30, pa.uint64()),
}


def test_packed_parquet_dataset_keeps_its_types(tmp_path):
    table = pa.table(TYPES)
    pq.write_table(table, tmp_path / "0.parquet")
    hr.pack(hr.ParquetDataset(tmp_path), tmp_path / "packed", format="parquet")
    found = pq.read_table(tmp_path / "packed/000000.parquet")
    assert found.cast(table.schema).to_pylist() == table.to_pylist()
    assert found.drop_columns("tags").schema.types == table.drop_columns("tags").schema.types


def stopped(sample):
    if sample["cls"] > 300 and sample.keys() - {"a", "set", "of", "names"}:
        raise RuntimeError("stop")
    return {"txt": "old" * 100}


def corrected(sample):
    return {"txt": "new" * 100}


def scaled(sample, size):
    if sample["cls"] > 300:
        raise RuntimeError("stop")
    return {"txt": "x" * size}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (stopped, corrected),
        (functools.partial(scaled, size=300), functools.partial(scaled, size=301)),
        (lambda sample: stopped(sample), lambda sample: corrected(sample)),
    ],
)
def test_shards_of_another_transform_are_not_continued(first, second, tmp_path):
    data = dataset(*({"cls": index} for index in range(640)))
    for transform in (first, first):
        with pytest.raises(RuntimeError, match="stop"):
            hr.pack(data, tmp_path, shard_size="30KB", transform=transform)
    for options in ({"transform": second}, {"transform": first, "seed": 1}):
        with pytest.raises(
            ValueError, match=r"was packed with .*'transform'.* continue with the same, or delete"
        ):
            hr.pack(data, tmp_path, shard_size="30KB", **options)


def test_samples_that_fail_otherwise_after_an_interruption_come_once_or_not_at_all(tmp_path):
    healed, going = tmp_path / "healed", tmp_path / "going"

    def make(index):
        if index == 5 and not healed.exists():
            raise ValueError("once")
        if index == 600 and not going.exists():
            raise RuntimeError("stop")
        return {"txt": f"{index:1000}"}

    options = {
        "shard_size": "10KB",
        "on_error": lambda failure: "skip" if "once" in failure.message else "raise",
    }
    data = SlowDataset(640, 0, make=make)
    with pytest.raises(RuntimeError, match="stop"):
        hr.pack(data, tmp_path / "shards", **options)
    going.touch()
    healed.touch()
    hr.pack(data, tmp_path / "shards", **options)
    texts = [
        int(sample["txt"]) for sample in hr.TarDataset(tmp_path / "shards", shards_in_parallel=1)
    ]
    assert texts == [index for index in range(640) if index != 5]


@pytest.mark.parametrize("make", [list, lambda tokens: np.array(tokens, np.uint16)])
def test_documents_become_token_files(tmp_path, make):
    documents = [list(range(index)) for index in range(50)]
    packed = hr.pack(dataset(*map(make, documents)), tmp_path, format="tokens", shard_size=1000)
    assert packed.shards > 1
    tokens = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*.bin")))
    dtype = np.int32 if make is list else np.uint16
    assert np.frombuffer(tokens, dtype).tolist() == [
        token for document in documents for token in document
    ]


def test_transform_runs_in_workers_and_skipped_samples_are_left_out(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in "abc":
        (source / f"{name}.txt").write_text(name)

    def transform(sample):
        if sample.key == "b.txt":
            raise ValueError("no b")
        return upper(sample)

    options = {"num_workers": 1, "transform": transform, "on_error": "skip"}
    packed = hr.pack(hr.ObjectDataset(source), tmp_path / "shards", **options)
    assert packed.samples == 2
    assert [sample["txt"] for sample in hr.TarDataset(tmp_path / "shards")] == [b"A", b"C"]


@pytest.mark.parametrize(
    ("format", "samples", "problem"),
    [
        ("tar", [{"txt": b""}, {"txt": object()}], "sample 1 .*field 'txt' is a object"),
        ("tar", [{"__key__": "a.b", "txt": b""}], "sample 0 .*'a.b'"),
        ("tar", [{"__key__": "a", "txt": b""}] * 2, "sample 1 .*'a' is that of the sample before"),
        ("tar", [{"__key__": "/a", "txt": b""}], "sample 0 .*'/a' .* is absolute"),
        ("tar", [{"__key__": "a"}], "sample 0 .*'a' has no field"),
        ("parquet", [{"a": 1}] * 64 + [{"a": 0.5}] * 64, "sample 127 .*a: double, but a: int64"),
        ("parquet", [{"a": 1}] * 64 + [{"a": 1, "b": 2}], r"sample 64 .*columns \['a', 'b'\]"),
        (
            "parquet",
            [{"a": 1}, {"a": 1, "b": 2}] * 32,
            r"sample 1 .*columns \['a', 'b'\], but \['a'\]",
        ),
        ("tar", [{"time": np.datetime64(1, "ns")}], "sample 0 .*field 'time' is a datetime64"),
        ("tar", [3], "sample 0 .*has no attribute 'key'"),
        (
            "parquet",
            [{"t": pd.Timestamp(1001, unit="ns")}],
            r"sample 0 .*t: timestamp\[us\], .*more than microseconds",
        ),
        ("parquet", [{"n": 1}, {"n": 2**63 + 1}], "sample 1 "),
        ("tokens", [[1], [2**40]], "sample 1 .*do not fit int32"),
        ("tokens", [[1], [[2]]], "sample 1 .*not a sequence of integers"),
        ("tokens", [[0.5]], "sample 0 .*not a sequence of integers"),
    ],
)
def test_samples_that_do_not_fit_are_named(format, samples, problem, tmp_path):
    with pytest.raises(TypeError, match=problem):
        hr.pack(dataset(*samples), tmp_path, format=format)


def test_directory_with_other_content_is_refused(tmp_path):
    data = dataset({"txt": b"a"})
    (tmp_path / "precious.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is not empty: it has precious\.tar"):
        hr.pack(data, tmp_path)
    hr.pack(data, tmp_path / "shards")
    assert hr.pack(data, tmp_path / "shards").samples == 1  # again: there is nothing to do
    with pytest.raises(ValueError, match="continue with the same, or delete its shards"):
        hr.pack(data, tmp_path / "shards", format="parquet")
    with pytest.raises(hr.StateError, match=re.escape("len(dataset) was 1, and is 2")):
        hr.pack(dataset({"txt": b"a"}, {"txt": b"b"}), tmp_path / "shards")
    with pytest.raises(ValueError, match="shard_size='many'"):
        hr.pack(data, tmp_path / "other", shard_size="many")


def test_several_ranks_are_refused(tmp_path, as_rank):
    as_rank(0, 2)
    with pytest.raises(ValueError, match="2 ranks would write the same shards"):
        hr.pack(dataset({"txt": b"a"}), tmp_path)


def test_command(tmp_path, capsys):
    source, shards = tmp_path / "source", tmp_path / "shards"
    source.mkdir()
    (source / "a.txt").write_text("a")
    command = ["pack", str(source), str(shards), "--transform", "tests.unit.test_packing:upper"]
    assert main(command) == 0
    assert capsys.readouterr().out == "1 shards, 1 samples, 10,240 bytes\n"
    assert next(iter(hr.TarDataset(shards)))["txt"] == b"A"
    assert (
        main(["pack", str(shards / "000000.tar"), str(tmp_path / "rows"), "--format", "parquet"])
        == 0
    )
    assert next(iter(hr.ParquetDataset(tmp_path / "rows")))["txt"] == b"A"
    assert main(["pack", str(source), str(tmp_path / "x"), "--transform", "nothing:here"]) == 2
    assert "write module:function" in capsys.readouterr().err
