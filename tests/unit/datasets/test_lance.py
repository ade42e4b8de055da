"""`LanceDataset` takes rows as lance does, of the version that it was made with."""

import pickle
import shutil
import threading

import lance
import pyarrow as pa
import pytest
import torch

import headrace as hr
from headrace.errors import StoreError

ROWS = 40


def table(first=0, count=ROWS):
    ids = range(first, first + count)
    return pa.table(
        {"id": ids, "text": [f"row {i}" for i in ids], "pair": [{"a": i, "b": -i} for i in ids]}
    )


@pytest.fixture
def path(tmp_path):
    lance.write_dataset(table(), tmp_path / "t.lance", max_rows_per_file=7)
    return tmp_path / "t.lance"


def test_rows_and_tables_are_those_that_were_written(path):
    dataset, rows = hr.LanceDataset(path), table().to_pylist()
    assert [dataset[n] for n in range(ROWS)] == [dataset[n] for n in range(-ROWS, 0)] == rows
    assert dataset.__getitems__([5, 39, 5, -1]) == [rows[n] for n in (5, 39, 5, 39)]
    assert hr.LanceDataset(path, columns=["text", "pair.a"])[3] == {
        "text": "row 3",
        "pair": {"a": 3},
    }
    assert dataset[[30, 2]].equals(table().take([30, 2]))
    for index in (ROWS, -ROWS - 1, [0, ROWS]):
        with pytest.raises(IndexError):
            dataset[index]


def test_loader_gives_each_row_once_and_whole_batches_as_tables(path):
    with hr.DataLoader(hr.LanceDataset(path, columns=["id"]), 4, shuffle=True, seed=1) as loader:
        ids = [number for batch in loader for number in batch["id"].tolist()]
    assert ids != sorted(ids) == [*range(ROWS)]
    batches = torch.utils.data.BatchSampler(
        torch.utils.data.SequentialSampler(range(ROWS)), 16, drop_last=False
    )
    with hr.DataLoader(
        hr.LanceDataset(path), sampler=batches, batch_size=None, collate_fn=lambda part: part
    ) as tables:
        assert pa.concat_tables(tables).equals(table())


def test_version_stays_in_every_copy(path):
    dataset = hr.LanceDataset(path)
    lance.write_dataset(table(100), path, mode="append")
    lance.dataset(path).delete("id < 10")
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy.version, len(copy), copy[0]["id"]) == (1, ROWS, 0)
    assert len(hr.LanceDataset(path)) == hr.LanceDataset(path)[0]["id"] * 7 == 70
    assert hr.LanceDataset(path, version=2)[ROWS]["id"] == 100
    shutil.rmtree(path)
    lance.write_dataset(table(500), path)  # version 1 again, and other rows
    for each in (dataset, copy, pickle.loads(pickle.dumps(copy))):
        with pytest.raises(StoreError, match=r"cannot read LanceDataset.*row.*Not found"):
            each[20]


def test_what_is_not_there_is_an_error(path):
    with pytest.raises(
        StoreError, match=r"cannot open Lance dataset .*\"x\".*\"id\", \"text\", \"pair\""
    ):
        hr.LanceDataset(path, columns=["id", "x"])
    for name in ("pair.z", "pair.", "ID", ""):  # of most of these lance's Rust code panics
        with pytest.raises(StoreError, match="cannot open Lance dataset"):
            hr.LanceDataset(path, columns=[name])
    for place, options in ((path / "no", {}), (path, {"version": 7})):
        with pytest.raises(StoreError, match=f"cannot open Lance dataset {place}"):
            hr.LanceDataset(place, **options)
    for manifest in (path / "_versions").glob("*.manifest"):
        whole = manifest.read_bytes()
        for content in (b"", whole[:-20], b"\xff" * 500 + b"LANC", b"\x55" * 60 + whole[60:]):
            manifest.write_bytes(content)
            with pytest.raises(StoreError, match="cannot open Lance dataset"):
                hr.LanceDataset(path)


def test_panic_of_a_take_is_an_error(path):
    dataset = hr.LanceDataset(path)
    dataset._columns = ["pair.z"]  # a name that the constructor refuses
    with pytest.raises(StoreError, match="cannot read LanceDataset"):
        dataset[0]


def test_user_and_password_are_shown_nowhere(path):
    said = repr(hr.LanceDataset(f"file://{path}?sig=hidden"))
    for url in (
        f"file://someone:hidden@{path}",
        "s3://someone:hidden@bucket/table.lance?sig=hidden",
    ):
        with pytest.raises(StoreError, match=r"cannot open Lance dataset \w+://[/b]") as caught:
            hr.LanceDataset(url, storage_options={"aws_secret_access_key": "hidden"})
        said += str(caught.value)
    assert "hidden" not in said
    assert "someone" not in said


def test_loader_that_ends_waits_for_takes(path, monkeypatch):
    begun, ended, answered = [], [], threading.Event()
    take = lance.LanceDataset.take

    def slow(dataset, rows, columns):
        begun.append(rows)
        if rows[0]:  # not of the first batch
            answered.wait()
        ended.append(rows)
        return take(dataset, rows, columns)

    dataset = hr.LanceDataset(path)
    monkeypatch.setattr(lance.LanceDataset, "take", slow)
    with hr.DataLoader(dataset, batch_size=2) as loader:
        next(iter(loader))
        threading.Timer(0.5, answered.set).start()  # the latency of the other requests
    assert len(begun) == len(ended) > 1
