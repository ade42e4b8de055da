"""Objects named by columns of a table, and a listing that is kept in a file: the same samples without a listing."""

import numpy as np
import pandas
import pytest

from headrace.datasets.objects import ObjectDataset
from headrace.errors import ChecksumError, ObjectChangedError

COLUMNS = {"key": ["d.txt", "a.jpg", "a.jpg"], "species": ["cat", "dog", "dog"]}
TABLES = {
    "dict": COLUMNS,
    "NumPy": {name: np.array(column) for name, column in COLUMNS.items()},
    "pandas": pandas.DataFrame(COLUMNS, index=[7, 8, 9]),
}


@pytest.fixture
def store(server):
    return server.store("train", retry=1)


def samples(dataset):
    return [
        (sample.key, bytes(sample.data), sample.label)
        for sample in map(dataset.__getitem__, range(len(dataset)))
    ]


@pytest.mark.counts
@pytest.mark.parametrize("kind", TABLES)
def test_columns_are_keys_and_labels_in_order_without_listing(server, store, kind):
    table = TABLES[kind]
    dataset = ObjectDataset(store, keys=table["key"], labels=table["species"])
    assert samples(dataset) == [
        ("d.txt", b"d.txt", "cat"),
        ("a.jpg", b"a.jpg", "dog"),
        ("a.jpg", b"a.jpg", "dog"),
    ]
    assert server.requests()["LIST"] == 0


@pytest.mark.counts
def test_sizes_etags_and_checksums_of_a_table_are_used(server, store):
    listed = ObjectDataset(store)
    etags = [listed.extent(index).version.strip('"') for index in range(2)]
    table = pandas.DataFrame(
        {
            "key": ["a.jpg", "b.jpg", "d.txt"],
            "size": [5, None, 5],
            "tag": [*etags, None],
            "sum": [None, None, "md5:" + "0" * 32],
        }
    )
    columns = {"sizes": table["size"], "etags": table["tag"], "checksums": table["sum"]}
    dataset = ObjectDataset(store, keys=table["key"], **columns)
    server.misbehave()
    assert [bytes(dataset[index].data) for index in range(2)] == [b"a.jpg", b"b.jpg"]
    assert server.seen()[0].span == "bytes=0-4"
    with pytest.raises(ChecksumError):
        dataset[2]
    for name in ("a.jpg", "b.jpg"):
        server.put(f"train/{name}", b"A.JPG")
    for index in range(2):
        with pytest.raises(ObjectChangedError):
            dataset[index]


def test_urls_and_paths_under_the_datasets_are_keys(server, store, tmp_path):
    keys = [server.url + "/train/a.jpg", "b.jpg"]
    assert list(ObjectDataset(store, keys=keys).keys) == ["a.jpg", "b.jpg"]
    (tmp_path / "a.bin").write_bytes(b"local")
    for key in (str(tmp_path / "a.bin"), (tmp_path / "a.bin").as_uri(), "a.bin"):
        assert bytes(ObjectDataset(tmp_path, keys=[key])[0].data) == b"local"


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"keys": []}, "keys= is empty"),
        (
            {"keys": ["s3://me:secret@other/a?sig=hush"]},
            r"s3://other/a is not under .*s3://bucket/train",
        ),
        ({"keys": ["a"], "sizes": [-1]}, "-1 is not a number of bytes"),
        ({"keys": ["a"], "sizes": [1, 2]}, "2 sizes= for 1 keys="),
        ({"keys": ["a"], "checksums": ["x"]}, "algorithm:hexadecimal"),
        ({"keys": ["a"], "labels": [1, 2]}, "2 labels"),
        ({"sizes": [1]}, "need keys="),
    ],
    ids=repr,
)
def test_columns_that_make_no_sense_are_refused_before_any_request(columns, why):
    with pytest.raises(ValueError, match=why) as refused:
        ObjectDataset("s3://bucket/train", **columns)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("keys", [[1], ["a", None], ["a", float("nan")]])
def test_keys_that_are_not_text_are_refused(keys):
    with pytest.raises(TypeError, match=f"row {len(keys) - 1}: a key must be text"):
        ObjectDataset("s3://bucket/train", keys=keys)
