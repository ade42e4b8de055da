"""A manifest gives back the dataset it was written of, without a listing; a damaged one says what is wrong."""

import json
import os
import pickle
import re
import subprocess
import sys
import threading

import anyio
import anyio.to_thread
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from headrace._core.store.store import Store
from headrace.datasets.objects import ObjectDataset
from headrace.errors import ChecksumError, EmptyListingError, ManifestError, ObjectChangedError

NAMES = ["m.csv", "m.tsv", "m.csv.gz", "m.jsonl", "m.ndjson.zst", "m.parquet"]


@pytest.fixture
def listed(server):
    return ObjectDataset(Store(server.url + "/train", options=server.store_options), labels=len)


def again(server, path, *, retry=None, **more):
    store = Store(server.url + "/train", options=server.store_options, retry=retry)
    return ObjectDataset.from_manifest(store, path, **more)


def samples(dataset):
    return [(sample.key, bytes(sample.data), sample.label) for sample in map(dataset.__getitem__, range(len(dataset)))]


# There and back


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.counts
def test_manifest_gives_the_same_samples_without_listing(server, listed, tmp_path, name):
    listed.write_manifest(tmp_path / name)
    wanted, before = samples(listed), server.requests()
    dataset = again(server, tmp_path / name)
    assert samples(dataset) == wanted
    after = server.requests()
    assert after["GET"] - before["GET"] == 4, "one GET a sample, none for the one that is empty"
    assert (after["LIST"], after["HEAD"]) == (before["LIST"], 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.counts
def test_sizes_and_etags_of_a_manifest_are_used(server, listed, tmp_path, name):
    """The size, by a range of that length; and the entity tag, by an error where the object was overwritten."""
    listed.write_manifest(tmp_path / name)
    server.misbehave()
    dataset = again(server, tmp_path / name)
    dataset[1]
    assert [seen.span for seen in server.seen()] == ["bytes=0-4"]
    server.put("train/a.jpg", b"A.JPG")
    with pytest.raises(ObjectChangedError, match=r"'a\.jpg'"):
        dataset[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "labels",
    [
        ["cat", "1", "", "a,\"b\"\n'c'", "é"],
        ["lone\r", "\r", "a\rb", "\r\n", "\n"],
        [1, -2, 3, 2**40, 0],
        [1.5, 0.1, -2.0, 1e300, 0.0],
        [True, False, True, True, False],
        [[1, 2], [], [3], [4], [5]],
        [None, 1, 2, 3, 4],
    ],
    ids=repr,
)
def test_labels_keep_their_types(server, listed, tmp_path, name, labels):
    given = ObjectDataset(Store(server.url + "/train", options=server.store_options), labels=labels)
    given.write_manifest(tmp_path / name)
    came = [sample[2] for sample in samples(again(server, tmp_path / name))]
    assert came == labels
    assert [*map(type, came)] == [*map(type, labels)]


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl"])
def test_labels_of_several_types_round_trip(server, tmp_path, name):
    labels = ["a", 1, 2.5, None, {"x": [1]}]
    ObjectDataset(Store(server.url + "/train", options=server.store_options), labels=labels).write_manifest(
        tmp_path / name
    )
    assert [sample[2] for sample in samples(again(server, tmp_path / name))] == labels


@pytest.mark.parametrize(
    ("labels", "row", "label"),
    [
        ([0, 2**70, 2, 3, 2**70], 2, 2**70),
        ([0, 1, -(2**63) - 1, 3, 4], 3, -(2**63) - 1),
        ([0.5, 1.5, 3, 2.5, 3.5], 3, 3),
        ([1, 2, 3, 4, 5.0], 1, 1),
        ([1, 2, "x", 4, "y"], 3, "x"),
        ([[1], [2], [3.5], [4], [5]], 1, [1]),
        ([{"x": 1}, {"x": 2}, {"y": 3}, {}, {}], 1, {"x": 1}),
    ],
    ids=repr,
)
def test_labels_that_do_not_fit_a_column_are_kept_in_lines_and_refused_in_parquet(server, tmp_path, labels, row, label):
    given = ObjectDataset(Store(server.url + "/train", options=server.store_options), labels=labels)
    for name in ("m.csv", "m.jsonl"):
        given.write_manifest(tmp_path / name)
        assert repr([sample[2] for sample in samples(again(server, tmp_path / name))]) == repr(labels)
    with pytest.raises(TypeError, match=re.escape(f"write JSON lines or CSV (row {row}, label {label!r}: ")):
        given.write_manifest(tmp_path / "m.parquet")
    assert sorted(os.listdir(tmp_path)) == ["m.csv", "m.jsonl"]


def test_numbers_of_numpy_are_written_as_numbers(server, tmp_path):
    labels = np.arange(5)
    ObjectDataset(Store(server.url + "/train", options=server.store_options), labels=labels).write_manifest(
        tmp_path / "m.csv"
    )
    assert [sample[2] for sample in samples(again(server, tmp_path / "m.csv"))] == [0, 1, 2, 3, 4]


def test_unserializable_labels_are_refused_and_nothing_is_written(server, tmp_path):
    dataset = ObjectDataset(Store(server.url + "/train", options=server.store_options), labels=lambda key: object())
    for name in ("m.csv", "m.jsonl", "m.parquet"):
        with pytest.raises(TypeError, match=r"the label of 'a\.jpg' is a object"):
            dataset.write_manifest(tmp_path / name)
    mixed = ObjectDataset(Store(server.url + "/train", options=server.store_options), labels=[1, "a", 2, 3, 4])
    with pytest.raises(TypeError, match="write JSON lines"):
        mixed.write_manifest(tmp_path / "m.parquet")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("label", [{1: "a", "1": "b"}, {None: 1}, [{"x": [{2: 3}]}], ({True: 1},)], ids=repr)
def test_labels_with_keys_that_json_would_change_are_refused(server, tmp_path, label):
    labels = [{"1": "a"}, label, {}, {}, {}]
    dataset = ObjectDataset(Store(server.url + "/train", options=server.store_options), labels=labels)
    for name in NAMES:
        with pytest.raises(TypeError, match=r"the label of 'b\.jpg' has a mapping with keys that are not text"):
            dataset.write_manifest(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_given_labels_override_those_of_the_manifest(server, listed, tmp_path):
    listed.write_manifest(tmp_path / "m.csv")
    assert again(server, tmp_path / "m.csv", labels=lambda key: key[0])[0].label == "a"


def test_checksums_round_trip(server, tmp_path):
    sums = {"a.jpg": "crc32:00000000", "b.jpg": None}
    url, options = server.url + "/train", server.store_options
    dataset = ObjectDataset(Store(url, options=options), keys=list(sums), checksums=sums)
    dataset.write_manifest(tmp_path / "m.csv")
    copy = again(server, tmp_path / "m.csv", retry=1)
    assert bytes(copy[1].data) == b"b.jpg"
    with pytest.raises(ChecksumError):
        copy[0]


def test_a_dataset_of_given_keys_has_a_manifest_without_sizes(server, tmp_path):
    dataset = ObjectDataset(Store(server.url + "/train", options=server.store_options), keys=["d.txt", "a.jpg"])
    dataset.write_manifest(tmp_path / "m.jsonl")
    assert samples(again(server, tmp_path / "m.jsonl")) == samples(dataset)


def test_a_manifest_is_written_into_a_store_and_read_from_there(server, listed):
    listed.write_manifest(server.url + "/lists/m.csv.gz")
    assert samples(again(server, server.url + "/lists/m.csv.gz")) == samples(listed)


def test_manifests_of_other_programs_are_read(server, tmp_path):
    """Columns in any order, some of other programs, empty cells, tags without quotes as inventories have them."""
    (tmp_path / "m.csv").write_text("owner,size,key,etag\nme,,d.txt,\nme,5,a.jpg,8277e0910d750195b448797616e091ad\n")
    dataset = again(server, tmp_path / "m.csv")
    server.put("train/a.jpg", b"A.JPG")
    assert bytes(dataset[0].data) == b"d.txt"
    with pytest.raises(ObjectChangedError):
        dataset[1]
    rows = [{"key": "a.jpg", "label": "x", "more": 1}, {"key": "d.txt"}]
    (tmp_path / "m.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert [sample[2] for sample in samples(again(server, tmp_path / "m.jsonl"))] == ["x", None]
    table = pyarrow.table({"label": [1, 2], "key": ["a.jpg", "d.txt"], "size": pyarrow.array([5.0, None])})
    pyarrow.parquet.write_table(table, tmp_path / "m.parquet")
    assert [sample[2] for sample in samples(again(server, tmp_path / "m.parquet"))] == [1, 2]


def test_unknown_size_needs_a_get_of_the_whole_object(server, tmp_path):
    (tmp_path / "m.csv").write_text('key,size,etag\na.jpg,,\nb.jpg,5,\nempty.bin,0,\nd.txt,,"""x"""\n')
    dataset = again(server, tmp_path / "m.csv")
    assert [bytes(dataset[i].data) for i in range(3)] == [b"a.jpg", b"b.jpg", b""]
    with pytest.raises(ObjectChangedError):
        dataset[3]


def test_format_argument_for_names_without_a_known_suffix(server, listed, tmp_path):
    listed.write_manifest(tmp_path / "m", format="jsonl")
    assert samples(again(server, tmp_path / "m", format="jsonl")) == samples(listed)
    with pytest.raises(ValueError, match=r"\.csv, \.tsv.*format="):
        again(server, tmp_path / "m")
    with pytest.raises(ValueError, match="format='xml' must be one of 'csv', 'jsonl', 'parquet'"):
        listed.write_manifest(tmp_path / "m", format="xml")


def test_missing_pyarrow_is_named(server, listed, tmp_path):
    listed.write_manifest(tmp_path / "m.parquet")
    body = f"""
import sys
sys.modules["pyarrow"] = sys.modules["pyarrow.parquet"] = None
from headrace import ObjectDataset, Store
from headrace.errors import MissingExtraError
dataset = ObjectDataset(Store({server.url!r}, options={server.store_options!r}), keys=["a"])
dataset.write_manifest({str(tmp_path / "m.csv")!r})
for attempt in (
    lambda: dataset.write_manifest({str(tmp_path / "n.parquet")!r}),
    lambda: ObjectDataset.from_manifest({server.url!r}, {str(tmp_path / "m.parquet")!r}),
):
    try:
        attempt()
    except MissingExtraError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("pip install 'headrace[parquet]'") == 2, done.stdout + done.stderr


def test_manifest_is_replaced_atomically(server, tmp_path):
    path = tmp_path / "m.jsonl"
    few, many = (
        ObjectDataset(Store(server.url, options=server.store_options), keys=[f"{i:04}" for i in range(count)])
        for count in (10, 3000)
    )
    few.write_manifest(path)
    ended, lengths = threading.Event(), set()

    def read():
        while not ended.is_set():
            lengths.add(len(again(server, path)))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for dataset in (many, few) * 10:
            dataset.write_manifest(path)
    finally:
        ended.set()
        reader.join()
    assert lengths <= {10, 3000}
    assert os.listdir(tmp_path) == ["m.jsonl"], "nothing is left beside it"


def test_failed_write_leaves_no_file(listed, tmp_path):
    (tmp_path / "m.csv").mkdir()
    with pytest.raises(OSError, match=r"m\.csv"):
        listed.write_manifest(tmp_path / "m.csv")
    assert os.listdir(tmp_path) == ["m.csv"]


# What is refused


def row(key, **more):
    return {"key": key, **more}


@pytest.mark.parametrize(
    ("second", "column", "why"),
    [
        (row("../secret"), "key", r"leads outside the dataset by '\.\.'"),
        (row("/etc/passwd"), "key", "is an absolute path"),
        (row("https://evil.example/x"), "key", "not under the dataset's"),
        (row(""), "key", "it is empty"),
        (row("a"), "key", "'a' is also on line 1"),
        (row("b", size="many"), "size", "'many' is not a number of bytes"),
        (row("b", size="-1"), "size", "'-1' is not a number of bytes"),
        (row("b", size=str(2**63)), "size", "is not a number of bytes"),
        (row("b", checksum="md6:00"), "checksum", "must be algorithm:hexadecimal"),
    ],
)
@pytest.mark.parametrize("name", ["m.csv", "m.jsonl", "m.parquet"])
def test_invalid_row_error_has_its_line(tmp_path, name, second, column, why):
    rows = [{"key": "a", "size": "1", "checksum": ""}, {"size": "", "checksum": "", **second}]
    if name == "m.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    elif name == "m.jsonl":
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = ["key,size,checksum", *(f"{row['key']},{row['size']},{row['checksum']}" for row in rows)]
        (tmp_path / name).write_text("\n".join(lines))
        why = why.replace("line 1", "line 2")
    with pytest.raises(ManifestError, match=why) as caught:
        ObjectDataset.from_manifest("s3://bucket/train", tmp_path / name)
    assert (caught.value.line, caught.value.column) == (3 if name == "m.csv" else 2, column)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("m.csv", b"", "the file is empty"),
        ("m.csv", b"key,size\n", "lists no object"),
        ("m.csv", b"name,size\na,1\n", "needs a column 'key', and has 'name', 'size'"),
        ("m.csv", b'# {"url": "x", "labels": "int"}\nkey,label\na,x\n', "line 3, column 'label'"),
        ("m.jsonl", b"", "lists no object"),
        ("m.jsonl", b'{"key": "a"}\n{"key": ', "line 2: not valid JSON"),
        ("m.jsonl", b'{"key": "a"}\n[1]', "line 2: a line must be a JSON object"),
        ("m.jsonl", b'{"key": "a"}\n{"name": 1}', "line 2: a manifest needs a column 'key', and has 'name'"),
        ("m.jsonl", b'{"key": 7}', "line 1, column 'key': 7 is not text"),
        ("m.jsonl", b'{"key": "a", "size": true}', "True is not a number of bytes"),
        ("m.jsonl", b'{"key": "a", "size": 1.5}', "1.5 is not a number of bytes"),
        ("m.jsonl", b'{"key": "a", "size": Infinity}', "inf is not a number of bytes"),
        ("m.jsonl", b'{"key": "a", "etag": 5}', "column 'etag': 5 is not text"),
        ("m.jsonl", b"[" * 100_000, "not valid JSON"),
        ("m.parquet", b"PAR1 no", "not Parquet, or corrupt"),
        ("m.parquet.gz", b"", "compressed internally"),
    ],
)
def test_invalid_manifest_is_refused(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=why):
        ObjectDataset.from_manifest("s3://bucket/train", tmp_path / name)


# A listing that is kept


def kept(server, path, **more):
    return ObjectDataset(Store(server.url + "/train", options=server.store_options), manifest=path, **more)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.counts
def test_listing_is_cached_in_a_manifest(server, tmp_path, name):
    first = kept(server, tmp_path / name, labels=len)
    server.put("train/later.jpg", b"later")
    second = kept(server, tmp_path / name, labels=len)
    assert server.requests()["LIST"] == 1
    assert samples(second) == samples(first)
    assert len(second) == 5


@pytest.mark.counts
def test_listing_is_cached_in_a_store(server):
    for _ in range(2):
        assert len(kept(server, server.url + "/lists/train.csv")) == 5
    assert server.requests()["LIST"] == 1


@pytest.mark.counts
async def test_open_caches_a_listing(server, tmp_path):
    for _ in range(2):
        dataset = await ObjectDataset.open(
            Store(server.url + "/train", options=server.store_options), manifest=tmp_path / "m.csv"
        )
        assert len(dataset) == 5
    assert server.requests()["LIST"] == 1


def test_manifest_of_another_listing_is_refused(server, tmp_path):
    path = tmp_path / "m.csv"
    kept(server, path, suffix=".jpg")
    with pytest.raises(ManifestError, match=r"suffix=\('\.jpg',\), not with suffix=None; or delete it"):
        kept(server, path)
    with pytest.raises(ManifestError, match=r"s3://bucket/train, not of s3://bucket/trainer; or delete it"):
        ObjectDataset(Store(server.url + "/trainer", options=server.store_options), suffix=".jpg", manifest=path)
    assert len(kept(server, path, suffix=(".jpg",))) == 2
    path.write_text("key\na.jpg\n")
    with pytest.raises(ManifestError, match="does not name its listing"):
        kept(server, path)


def test_empty_listing_is_not_cached(server, tmp_path):
    with pytest.raises(EmptyListingError):
        kept(server, tmp_path / "m.csv", suffix=".gif")
    assert os.listdir(tmp_path) == []


@pytest.mark.counts
def test_invalid_manifest_argument_is_refused_before_any_request(server, tmp_path):
    with pytest.raises(ValueError, match="manifest= keeps a listing"):
        kept(server, tmp_path / "m.csv", keys=["a"])
    with pytest.raises(ValueError, match="format"):
        kept(server, tmp_path / "m.txt")
    assert sum(server.requests().values()) == 0


def test_unknown_argument_is_refused(tmp_path):
    (tmp_path / "m.csv").write_text("key,label\na.jpg,x\n")
    for make in (ObjectDataset.from_manifest, ObjectDataset.from_csv):
        with pytest.raises(TypeError, match="no argument 'keys'"):
            make("s3://bucket", tmp_path / "m.csv", keys=["a"])


def test_manifest_has_no_secrets(tmp_path):
    dataset = ObjectDataset("https://me:hushhush@host/train?sig=hushhush", keys=["a"])
    for name in ("m.csv", "m.jsonl", "m.parquet"):
        dataset.write_manifest(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        assert b"hushhush" not in content
        assert b"https://host/train" in content


def test_dataset_of_a_manifest_can_be_pickled(server, listed, tmp_path):
    listed.write_manifest(tmp_path / "m.csv")
    copy = pickle.loads(pickle.dumps(again(server, tmp_path / "m.csv")))
    assert samples(copy) == samples(listed)


# Within a running loop


def test_manifests_work_on_a_running_loop(server, listed, tmp_path, consumer_loop):
    async def main():
        await listed.awrite_manifest(tmp_path / "m.data", format="csv")
        return await ObjectDataset.afrom_manifest(
            Store(server.url + "/train", options=server.store_options), tmp_path / "m.data", format="csv"
        )

    listed.write_manifest(tmp_path / "m.csv")
    assert samples(consumer_loop(main)) == samples(again(server, tmp_path / "m.csv"))
    assert (tmp_path / "m.data").read_bytes() == (tmp_path / "m.csv").read_bytes()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (ObjectDataset.afrom_manifest, b'{"key": "a", "label": 7}\n'),
        (lambda url, file: ObjectDataset.afrom_csv(url, file, header=False, key=0, label=None), b"a\n"),
    ],
    ids=["manifest", "csv"],
)
def test_reading_a_file_does_not_block_the_callers_loop(tmp_path, consumer_loop, make, line):
    """The file is a pipe, into which the loop writes when it is opened for reading."""
    pipe = tmp_path / "m.jsonl"
    os.mkfifo(pipe)

    async def write():
        file = await anyio.to_thread.run_sync(pipe.open, "wb")  # until there is a reader
        with file:
            file.write(line)

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            return await make(tmp_path.as_uri(), pipe)

    assert list(consumer_loop(main).keys) == ["a"]


def test_errors_are_the_same_on_a_running_loop(server, listed, tmp_path, consumer_loop):
    url = tmp_path.as_uri()
    for make in (ObjectDataset.afrom_manifest, ObjectDataset.afrom_csv):
        with pytest.raises(FileNotFoundError):
            consumer_loop(lambda make=make: make(url, tmp_path / "none.csv"))
        with pytest.raises(TypeError, match="no argument 'keys'"):
            consumer_loop(lambda make=make: make(url, tmp_path / "none.csv", keys=["a"]))
    with pytest.raises(ValueError, match="format"):
        consumer_loop(lambda: listed.awrite_manifest(tmp_path / "m.unknown"))


def test_async_constructors_return_the_subclass(tmp_path, consumer_loop):
    class Mine(ObjectDataset):
        pass

    (tmp_path / "m.csv").write_text("key\na\n")
    assert type(consumer_loop(lambda: Mine.afrom_csv(tmp_path.as_uri(), tmp_path / "m.csv", label=None))) is Mine
