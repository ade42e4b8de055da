"""Packing: shards are ranges, are read by their datasets, and errors say what does not fit."""

import decimal
import functools
import hashlib
import json
import random
import tarfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import headrace as hr
from tests.datasets import Numbers, SlowDataset
from tests.faults.test_packing import digests


def dataset(*samples):
    return SlowDataset(len(samples), 0, make=samples.__getitem__)


def test_objects_become_tar_shards_with_an_index(tmp_path):
    source = tmp_path / "source"
    for name in (*(f"cat/{number:02}.jpg" for number in range(32)), "dog/1.seg.png"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode())
    photos = hr.ObjectDataset(source, labels="folder")
    packed = hr.pack(photos, tmp_path / "shards", samples_per_shard=16)
    assert packed[:2] == (3, 33)
    with tarfile.open(tmp_path / "shards/000000000032.tar") as archive:
        assert archive.getnames() == ["dog/1.seg.png", "dog/1.cls"]
    assert {
        path.name for path in (tmp_path / "shards").iterdir() if path.suffix != ".tar"
    } == {
        "_pack",
        "headrace.index",
    }
    samples = hr.TarDataset.index(tmp_path / "shards", fields=["cls"])
    assert [samples[index]["cls"] for index in range(33)] == [b"0"] * 32 + [b"1"]
    record = json.loads((tmp_path / "shards/_pack/000000000032.json").read_text())
    shard = tmp_path / "shards/000000000032.tar"
    assert record == {
        "first": 32,
        "stop": 33,
        "samples": 1,
        "bytes": shard.stat().st_size,
        "name": shard.name,
        "sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
    }


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


@pytest.mark.parametrize("name", ["jpg", "seg.png", "é", "a b", "x" * 200])
def test_names_are_read_as_written(name, tmp_path):
    sample = {"__key__": f"dir.a/{'k' * 120}", name: b"1"}
    hr.pack(dataset(sample), tmp_path)
    (found,) = hr.TarDataset(tmp_path)
    assert {key: value for key, value in found.items() if key != "__url__"} == sample


def test_fields_are_read_in_lower_case(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/A.JPG").write_bytes(b"1")
    hr.pack(hr.FileDataset(tmp_path / "in"), tmp_path / "out")
    assert [
        (each["__key__"], each["jpg"]) for each in hr.TarDataset(tmp_path / "out")
    ] == [("A", b"1")]
    with pytest.raises(TypeError, match="sample 0"):
        hr.pack(dataset({"A": b"", "a": b""}), tmp_path / "x")


def test_shard_size_decides_on_the_number_of_samples_in_all_shards(tmp_path):
    rows = [{"n": index, "text": "x" * 100} for index in range(500)]
    packed = hr.pack(dataset(*rows), tmp_path, format="parquet", shard_size=20_000)
    assert packed.samples == 500
    assert [len(pq.read_table(path)) for path in sorted(tmp_path.glob("*.parquet"))] == [
        192,
        192,
        116,
    ]
    assert list(hr.ParquetDataset(tmp_path)) == rows


MAP = pa.map_(pa.string(), pa.int64())
TYPES = {
    "small": pa.array([1, 2] * 50, pa.int16()),
    "single": pa.array([0.5] * 100, pa.float32()),
    "category": pa.array(["a", "b"] * 50).dictionary_encode(),
    "price": pa.array(
        [decimal.Decimal("1.50")] * 70 + [decimal.Decimal("12345.00")] * 30, pa.decimal128(10, 2)
    ),
    "late": pa.array([None] * 64 + ["x"] * 36),
    "never": pa.nulls(100),
    "tags": pa.array([[]] * 64 + [["x"]] * 36),
    "nanoseconds": pa.array([1, 1001] * 50, pa.timestamp("ns", "UTC")),
    "spans": pa.array([1, None] * 50, pa.duration("ns")),
    "times": pa.array([1] * 100, pa.time64("ns")),
    "large": pa.array([1] * 70 + [2**63 + 1] * 30, pa.uint64()),
    "map": pa.array([[("a", 1)], None] * 50, MAP),
    "nested": pa.array([{"n": [{"x": None}]}] * 100, pa.struct([("n", pa.list_(pa.struct([("x", pa.int8())])))])),
    "text": pa.array(["a"] * 100, pa.large_string()),
    "of dictionaries": pa.array([["a"]] * 100, pa.list_(pa.dictionary(pa.int8(), pa.string()))),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["rows", "arrow"])
def test_tables_keep_schema_and_values(kind, tmp_path):
    table = pa.table(TYPES).replace_schema_metadata({"made": "by us"})
    (tmp_path / "in").mkdir()
    for number in range(2):
        part = table.slice(number * 50, 50)
        pq.write_table(part, tmp_path / f"in/{number}.parquet", row_group_size=30)
    source = hr.ParquetDataset(tmp_path / "in", format=kind)
    hr.pack(source, tmp_path / "out", format="parquet", samples_per_shard=60)
    found = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert [len(each) for each in found] == [60, 40]
    expected = pa.concat_tables(
        [pq.read_table(path) for path in sorted((tmp_path / "in").glob("*"))]
    )
    assert found[0].schema.equals(found[1].schema, check_metadata=True)
    assert found[0].schema.equals(expected.schema, check_metadata=True)
    assert pa.concat_tables(found).equals(expected)


def test_rows_get_the_given_schema(tmp_path):
    schema = pa.schema(
        [
            ("id", pa.uint64()),
            ("score", pa.float32()),
            ("name", pa.dictionary(pa.int32(), pa.string())),
            ("tags", pa.list_(pa.string())),
            ("at", pa.timestamp("ns")),
            ("price", pa.decimal128(10, 2)),
        ]
    )
    row = {
        "id": 2**63,
        "score": 0.5,
        "name": "a",
        "tags": [],
        "at": np.datetime64(1001, "ns"),
        "price": decimal.Decimal("1.5"),
    }
    rows = [row, dict.fromkeys(row), {"id": 1}]
    hr.pack(dataset(*rows), tmp_path, format="parquet", schema=schema)
    found = pq.read_table(tmp_path)
    assert found.schema == schema
    columns = {name: [each.get(name) for each in rows] for name in row}
    assert found == pa.table(
        {name: pa.array(columns[name], schema.field(name).type) for name in row}
    )


def test_types_are_those_of_the_first_rows_in_all_shards(tmp_path):
    rows = [{"a": 1.5, "b": None if index % 100 else "x"} for index in range(300)]
    hr.pack(dataset(*rows), tmp_path, format="parquet", samples_per_shard=50)
    schemas = {str(pq.read_schema(path)) for path in tmp_path.glob("*.parquet")}
    assert len(schemas) == 1
    assert list(hr.ParquetDataset(tmp_path)) == rows


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
            hr.pack(data, tmp_path, shard_size=30_000, transform=transform)
    for options, name in (
        ({"transform": second}, "transform"),
        ({"transform": first, "seed": 1}, "seed"),
    ):
        with pytest.raises(
            ValueError, match=rf"was packed with {name}=.* and not .*: continue with"
        ):
            hr.pack(data, tmp_path, shard_size=30_000, **options)


def test_changed_transform_continues_if_allowed(tmp_path):
    data = dataset(*({"cls": index} for index in range(640)))
    with pytest.raises(RuntimeError, match="stop"):
        hr.pack(data, tmp_path, samples_per_shard=64, transform=stopped)
    hr.pack(data, tmp_path, samples_per_shard=64, transform=corrected, allow_changed=True)
    texts = [
        sample["txt"][:3] for sample in hr.TarDataset(tmp_path, shards_in_parallel=1)
    ]
    assert set(texts) == {b"old", b"new"}
    assert len(texts) == 640


def test_samples_that_fail_otherwise_after_an_interruption_come_once_or_not_at_all(
    tmp_path,
):
    healed, going = tmp_path / "healed", tmp_path / "going"

    def make(index):
        if index == 5 and not healed.exists():
            raise ValueError("once")
        if index == 600 and not going.exists():
            raise RuntimeError("stop")
        return {"txt": f"{index:1000}"}

    options = {
        "samples_per_shard": 16,
        "on_error": lambda failure: "skip" if "once" in failure.message else "raise",
    }
    data = SlowDataset(640, 0, make=make)
    with pytest.raises(RuntimeError, match="stop"):
        hr.pack(data, tmp_path / "shards", **options)
    going.touch()
    healed.touch()
    hr.pack(data, tmp_path / "shards", **options)
    texts = [
        int(sample["txt"])
        for sample in hr.TarDataset(tmp_path / "shards", shards_in_parallel=1)
    ]
    assert texts == [index for index in range(640) if index != 5]


@pytest.mark.parametrize("make", [list, lambda tokens: np.array(tokens, np.uint16)])
def test_documents_become_token_files(tmp_path, make):
    documents = [list(range(index)) for index in range(50)]
    packed = hr.pack(
        dataset(*map(make, documents)), tmp_path, format="tokens", samples_per_shard=20
    )
    assert packed.shards == 3
    tokens = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*.bin")))
    dtype = np.int32 if make is list else np.uint16
    assert np.frombuffer(tokens, dtype).tolist() == [
        token for document in documents for token in document
    ]


def test_transform_runs_in_workers_and_skipped_samples_are_left_out(tmp_path):
    def transform(number):
        if number == 1:
            raise ValueError("no 1")
        return {"txt": f"{number}"}

    options = {
        "num_workers": 1,
        "transform": transform,
        "on_error": "skip",
        "samples_per_shard": 2,
    }
    assert hr.pack(Numbers(3), tmp_path, **options).samples == 2
    assert [sample["txt"] for sample in hr.TarDataset(tmp_path)] == [b"0", b"2"]
    assert len(hr.TarDataset.index(tmp_path)) == 2


def test_shard_whose_samples_all_fail_is_complete_if_all_may_fail(tmp_path):
    def make(index):
        if index == 6:
            raise ValueError("broken")
        return {"txt": str(index)}

    pack = functools.partial(
        hr.pack, SlowDataset(7, 0, make=make), tmp_path, samples_per_shard=3
    )
    with pytest.raises(hr.errors.TooManySkippedError, match="max_share=1"):
        pack(on_error="skip")
    policy = hr.SkipErrors(max_share=1)
    assert pack(on_error=policy) == (0, 0, 0)
    assert len(hr.TarDataset.index(tmp_path)) == 6
    bad = SlowDataset(1, 0, make=lambda index: 1 / index)
    with pytest.raises(ValueError, match="give schema="):
        hr.pack(bad, tmp_path / "rows", format="parquet", on_error=policy)


@pytest.mark.parametrize(
    ("format", "samples", "problem"),
    [
        ("tar", [{"txt": b""}, {"txt": object()}], "sample 1 .*field 'txt' is a object"),
        ("tar", [{"__key__": "a.b", "txt": b""}], "sample 0 .*'a.b'"),
        (
            "tar",
            [{"__key__": each, "txt": b""} for each in "aba"],
            "sample 2 .*'a' .* used once",
        ),
        ("tar", [{"__key__": "/a", "txt": b""}], "sample 0 .*'/a' .* absolute"),
        ("tar", [{"__key__": "../a", "txt": b""}], "sample 0 .*'../a'"),
        ("tar", [{"__key__": "a"}], "sample 0 .*'a' .* at least one field"),
        ("tar", [{"txt": b""}, {"a/b": b""}], "sample 1 .*'a/b'.* no slash"),
        ("tar", [{"a\0b": b""}], "sample 0 "),
        ("tar", [{"": b""}], "sample 0 "),
        ("tar", [{1: b""}], "sample 0 "),
        (
            "parquet",
            [{"a": 1}] * 64 + [{"a": 2}, {"a": 0.5}],
            "sample 65 .*a: double, but a: int64",
        ),
        ("parquet", [{"a": 1}] * 64 + [{"a": 1, "b": 2}], r"sample 64 .*columns \['b'\]"),
        ("parquet", [{"a": 1}] * 64 + [{"a": "1"}], "sample 64 "),
        (
            "parquet",
            [{"a": {"x": 1}}] * 64 + [{"a": {"x": 1, "y": 2}}],
            "sample 64 .*schema=",
        ),
        ("parquet", [{"a": None}] * 64 + [{"a": 1}], "sample 64 .*schema="),
        ("parquet", [{"a": 1}, 3], "sample 1 "),
        ("parquet", [{"a\ud800": 1}], "sample 0 "),
        (
            "tar",
            [{"time": np.datetime64(1, "ns")}],
            "sample 0 .*field 'time' is a datetime64",
        ),
        ("tar", [3], "sample 0 .*has no attribute 'key'"),
        (
            "parquet",
            [{"t": pd.Timestamp(1001, unit="ns")}],
            "sample 0 .*more than microseconds",
        ),
        ("tokens", [[1], [2**40]], "sample 1 .*do not fit int32"),
        ("tokens", [[1], [[2]]], "sample 1 .*not a sequence of integers"),
        ("tokens", [[0.5]], "sample 0 .*not a sequence of integers"),
    ],
)
def test_samples_that_do_not_fit_are_named(format, samples, problem, tmp_path):
    with pytest.raises(TypeError, match=problem):
        hr.pack(dataset(*samples), tmp_path, format=format)
    assert [path.name for path in tmp_path.glob("*.*")] == []


@pytest.mark.parametrize(
    "row", [{"a": 0.5}, {"a": 300}, {"b": 1}, {"t": np.datetime64(1001, "ns")}]
)
def test_values_that_a_given_schema_would_lose_are_named(row, tmp_path):
    schema = pa.schema([("a", pa.int8()), ("t", pa.timestamp("us"))])
    with pytest.raises(TypeError, match="sample 1 "):
        hr.pack(dataset({"a": 1}, row), tmp_path, format="parquet", schema=schema)


def test_directory_with_other_content_is_refused(tmp_path):
    data = dataset({"txt": b"a"})
    (tmp_path / "precious.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is not empty: it has precious\.tar"):
        hr.pack(data, tmp_path)
    assert hr.pack(data, tmp_path / "shards").samples == 1
    # Again: there is nothing to do.
    assert hr.pack(data, tmp_path / "shards").samples == 0
    for other, name in (
        ({"format": "parquet"}, "format='tar', and not 'parquet'"),
        ({"samples_per_shard": 3}, "samples_per_shard=None, and not 3"),
        ({"shard_size": 30}, "shard_size=256000000, and not 30"),
    ):
        with pytest.raises(ValueError, match=name):
            hr.pack(data, tmp_path / "shards", **other)
    with pytest.raises(ValueError, match="length=1, and not 2"):
        hr.pack(dataset({"txt": b"a"}, {"txt": b"b"}), tmp_path / "shards")
    with pytest.raises(
        ValueError, match="format='zip' must be one of tar, parquet, tokens"
    ):
        hr.pack(data, tmp_path / "other", format="zip")


def test_another_index_of_the_same_length_is_refused(tmp_path):
    for name in "ab":
        hr.pack(dataset(*({"txt": name * 9} for _ in range(9))), tmp_path / name)
    hr.pack(hr.TarDataset.index(tmp_path / "a"), tmp_path / "out")
    with pytest.raises(ValueError, match="was packed with source="):
        hr.pack(hr.TarDataset.index(tmp_path / "b"), tmp_path / "out")


def test_another_number_of_a_class_is_refused(tmp_path):
    for folder in ("cat", "dog"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        (tmp_path / "data" / folder / "0.txt").write_text(folder)
    data, out = tmp_path / "data", tmp_path / "out"
    hr.pack(hr.FileDataset(data, labels="folder"), out, samples_per_shard=1)
    classes = ["bird", "cat", "dog"]
    with pytest.raises(ValueError, match=r"packed with classes=\['cat', 'dog'\]"):
        hr.pack(
            hr.FileDataset(data, labels="folder", classes=classes),
            out,
            samples_per_shard=1,
        )


def test_streams_are_refused(tmp_path):
    hr.pack(dataset({"txt": b"a"}), tmp_path / "shards")
    stream = hr.TarDataset(tmp_path / "shards")
    with pytest.raises(TypeError, match="TarDataset is a stream"):
        hr.pack(stream, tmp_path / "out")
    with (
        pytest.raises(TypeError, match="TarDataset is a stream"),
        hr.pack_results(hr.DataLoader(stream, 2), tmp_path / "out"),
    ):
        pass


def noisy(sample):
    return {"txt": f"{sample} {random.random()} {torch.rand(())}"}


@pytest.mark.parametrize(
    "orders", [[(0, 2), (1, 2)], [(2, 3), (0, 1)], [(1, 2), (1, 2), (0, 3), (0, 1)]]
)
def test_bytes_do_not_depend_on_ranks(orders, tmp_path, as_rank):
    options = {"transform": noisy, "samples_per_shard": 100}
    hr.pack(Numbers(1000), tmp_path / "one", **options)
    for rank, world_size in orders:
        as_rank(rank, world_size)
        assert not (tmp_path / "several/headrace.index").exists()
        hr.pack(Numbers(1000), tmp_path / "several", **options)
    assert digests(tmp_path / "several") == digests(tmp_path / "one")
    samples = hr.TarDataset.index(tmp_path / "several")
    assert [int(samples[index]["txt"].split()[0]) for index in range(1000)] == [
        *range(1000)
    ]


# Results.


def rows_of(folder):
    return sorted(hr.ParquetDataset(folder), key=lambda row: row["index"])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("data", [Numbers(1000), [*range(1000)]])
def test_results_have_the_index_of_the_sample(data, num_workers, tmp_path):
    with hr.DataLoader(data, 32, shuffle=True, seed=1, num_workers=num_workers) as loader:
        with hr.pack_results(loader, tmp_path, samples_per_shard=100) as out:
            for batch in loader:
                vectors = torch.stack([batch, batch + 1], 1).float()
                names = [f"n{number}" for number in batch.tolist()]
                out.put({"vector": vectors, "name": names, "n": batch.numpy()})
        assert len(loader) == 32  # the loader's own order is back
        assert next(iter(loader)).tolist() != [*range(32)]
    assert rows_of(tmp_path) == [
        {"index": index, "vector": [index, index + 1.0], "name": f"n{index}", "n": index}
        for index in range(1000)
    ]
    assert len([*tmp_path.glob("*.parquet")]) == 10


def test_results_get_the_given_schema(tmp_path):
    schema = pa.schema([("index", pa.int32()), ("result", pa.float32())])
    loader = hr.DataLoader(Numbers(10), 4)
    with hr.pack_results(loader, tmp_path, schema=schema) as out:
        for batch in loader:
            out.put(batch.double())
    assert pq.read_schema(tmp_path / "000000000000.parquet") == schema


def test_results_of_skipped_samples_are_left_out(tmp_path):
    def make(index):
        if index % 7 == 3 or 40 <= index < 60 or index > 90:
            raise ValueError("broken")
        return index

    loader = hr.DataLoader(SlowDataset(100, 0, make=make), 8, on_error="skip")
    with hr.pack_results(loader, tmp_path, samples_per_shard=10) as out:
        for batch in loader:
            out.put(batch)
    good = [index for index in range(91) if index % 7 != 3 and not 40 <= index < 60]
    assert rows_of(tmp_path) == [{"index": index, "result": index} for index in good]
    assert len([*(tmp_path / "_pack").glob("0*.json")]) == 10


def test_loop_that_ends_early_is_continued(tmp_path):
    counts = []
    for stop in (5, 9, 100):
        loader = hr.DataLoader(Numbers(100), 4)
        with hr.pack_results(loader, tmp_path, samples_per_shard=10) as out:
            for number, batch in enumerate(loader):
                if number == stop:
                    break
                out.put(batch)
        counts.append(len([*tmp_path.glob("*.parquet")]))
    assert counts == [1, 3, 10]


def put_after(puts, folder):
    """Put results after batches with some numbers, and end the epoch."""
    loader = hr.DataLoader(Numbers(12), 4)
    with hr.pack_results(loader, folder) as out:
        for number, batch in enumerate(loader):
            for _ in range(puts.count(number)):
                out.put(batch)


@pytest.mark.parametrize("puts", [[0, 0], [1], [0, 2], [0, 1]])
def test_put_is_called_once_for_each_batch(puts, tmp_path):
    with pytest.raises(ValueError, match=r"put\(\) is called once for each batch"):
        put_after(puts, tmp_path)
    assert [*tmp_path.glob("*.parquet")] == []
    put_after([0, 1, 2], tmp_path)
    assert len(rows_of(tmp_path)) == 12


def test_results_with_another_number_of_rows_are_refused(tmp_path):
    loader = hr.DataLoader(Numbers(8), 4)
    with (
        hr.pack_results(loader, tmp_path) as out,
        pytest.raises(ValueError, match="length"),
    ):
        out.put(next(iter(loader))[1:])


def write_results(length, folder, **options):
    loader = hr.DataLoader(Numbers(length), **{"batch_size": 4, **options})
    with hr.pack_results(loader, folder) as out:
        for batch in loader:
            out.put(batch)


def test_results_of_another_dataset_are_refused(tmp_path):
    write_results(8, tmp_path)
    write_results(8, tmp_path, batch_size=3)
    with pytest.raises(ValueError, match="length=8, and not 9"):
        write_results(9, tmp_path)


@pytest.mark.parametrize("options", [{"batch_size": None}, {"in_order": False}])
def test_loaders_without_batches_in_order_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match="needs a loader with batch_size= and in_order"):
        write_results(8, tmp_path, **options)
