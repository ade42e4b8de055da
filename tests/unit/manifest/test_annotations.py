"""`ObjectDataset.from_csv` reads the tables people have, and says which line is wrong where one is."""

import gzip
import pickle

import obstore
import pytest
from backports import zstd
from obstore.store import MemoryStore

from headrace._core.store.store import Store
from headrace.datasets.objects import ObjectDataset
from headrace.errors import ManifestError, ObjectNotFoundError


@pytest.fixture
def of_csv(server, tmp_path):
    """A dataset of the server's training objects by a CSV of these bytes."""

    def make(content, name="labels.csv", **more):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ObjectDataset.from_csv(Store(server.url + "/train", options=server.store_options), path, **more)

    return make


@pytest.fixture
def refused(tmp_path):
    """What a CSV of these bytes is refused with; there is no store, so that any request would be another error."""

    def make(content, name="labels.csv", **more):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ManifestError) as caught:
            ObjectDataset.from_csv("s3://bucket/train", path, **more)
        return caught.value

    return make


def read(dataset):
    return [(sample.key, bytes(sample.data), sample.label) for sample in map(dataset.__getitem__, range(len(dataset)))]


BOTH = [("b.jpg", b"b.jpg", "cat"), ("a.jpg", b"a.jpg", "dog")]


# What is read


@pytest.mark.counts
def test_rows_are_samples_in_order_without_listing(server, of_csv):
    assert read(of_csv("key,label\nb.jpg,cat\na.jpg,dog\n")) == BOTH
    assert server.requests() == {"GET": 2, "HEAD": 0, "LIST": 0, "PUT": 0, "DELETE": 0}


@pytest.mark.parametrize(
    ("content", "how"),
    [
        pytest.param("\ufeffkey,label\nb.jpg,cat\na.jpg,dog", {}, id="a byte order mark, no last end of line"),
        pytest.param("key,label\r\nb.jpg,cat\r\n\r\na.jpg,dog\r\n", {}, id="as Windows writes it, an empty line"),
        pytest.param('key,label\n"b.jpg","cat"\n"a.jpg",dog\n', {}, id="quoted"),
        pytest.param("label;key\ncat;b.jpg\ndog;a.jpg\n", {"delimiter": ";"}, id="semicolons"),
        pytest.param("key\tlabel\nb.jpg\tcat\na.jpg\tdog\n", {"name": "labels.tsv"}, id="tabs by the name"),
        pytest.param("'b.jpg',cat\na.jpg,dog\n", {"header": False, "key": 0, "label": 1, "quotechar": "'"}, id="bare"),
        pytest.param("id,label\nb,cat\na,dog\n", {"key": "id", "suffix": ".jpg"}, id="a suffix"),
        pytest.param("id,label\njpg,cat\n", {"key": "id", "prefix": "b."}, id="a prefix"),
        pytest.param("cat,b.jpg\ndog,a.jpg\n", {"header": False, "key": -1, "label": -2}, id="negative numbers"),
        pytest.param("k,label\nb.jpg,cat\na.jpg,dog\n", {"key": 0}, id="a number beside a header"),
        pytest.param(
            "k,l\nb,CAT\na,DOG\n",
            {"key": lambda row: row["k"] + ".jpg", "label": lambda row: row["l"].lower()},
            id="functions",
        ),
        pytest.param(
            "b,cat\na,dog\n",
            {"header": False, "key": lambda row: f"{row[0]}.jpg", "label": lambda row: row[1]},
            id="functions without names",
        ),
        pytest.param("key,label\nb.jpg,cat\na.jpg,dog\n".encode("utf-16"), {"encoding": "utf-16"}, id="UTF-16"),
        pytest.param(gzip.compress(b"key,label\nb.jpg,cat\na.jpg,dog\n"), {"name": "labels.csv.gz"}, id="gzip"),
        pytest.param(zstd.compress(b"key,label\nb.jpg,cat\na.jpg,dog\n"), {"name": "labels.csv.zst"}, id="zstd"),
    ],
)
def test_csv_dialects_are_read(of_csv, content, how):
    dataset = of_csv(content, **how)
    assert read(dataset) == BOTH[: len(dataset)]


def test_urls_under_the_datasets_url_are_keys(server, of_csv):
    dataset = of_csv(f"key,label\n{server.url}/train/b.jpg,cat\n")
    assert tuple(dataset.keys) == ("b.jpg",)


def test_quoted_fields_may_have_delimiters_quotes_and_line_breaks(of_csv):
    assert of_csv('key,label\na.jpg,"a ""dog"",\nor two"\n')[0].label == 'a "dog",\nor two'


def test_label_of_several_columns_is_a_tuple(of_csv):
    assert of_csv("key,x,y\na.jpg,1,2\n", label=["y", 1])[0].label == ("2", "1")


def test_labels_are_optional(of_csv):
    assert of_csv("key\na.jpg\n", label=None)[0].label is None


def test_labels_of_a_function(of_csv):
    dataset = of_csv("key,label\na.jpg,1\nb.jpg,2\n", label=lambda row: int(row["label"]))
    assert [dataset[0].label, dataset[1].label] == [1, 2]
    assert type(dataset[0].label) is int
    assert pickle.loads(pickle.dumps(dataset))[1].label == 2


def test_table_may_be_in_the_same_store_or_in_another(server, tmp_path):
    server.put("tables/train.csv", b"key,label\na.jpg,dog\n")
    inside = ObjectDataset.from_csv(
        Store(server.url + "/train", options=server.store_options), server.url + "/tables/train.csv"
    )
    (tmp_path / "a.jpg").write_bytes(b"a.jpg")
    beside = ObjectDataset.from_csv(tmp_path.as_uri(), server.http_url + "/tables/train.csv")
    assert read(inside) == read(beside) == BOTH[1:]


def test_table_may_be_in_a_given_store():
    store = MemoryStore()
    obstore.put(store, "a.jpg", b"a.jpg")
    obstore.put(store, "tables/train.csv", b"key,label\na.jpg,dog\n")
    assert read(ObjectDataset.from_csv(Store("memory://x", backend=store), "memory://x/tables/train.csv")) == BOTH[1:]


def test_credentials_are_not_sent_to_other_hosts(server):
    """What answers at another host sees none of them."""
    secret = {"client_options": {"default_headers": {"x-api-key": "hush"}}}
    other = server.http_url.replace("127.0.0.1", "localhost")
    dataset = ObjectDataset(Store("https://data.example/train", options=secret), keys=["k"])
    assert dataset._index(other + "/labels.csv").client._options == {}
    assert dataset._index("https://data.example/labels.csv").client._options == secret


# What is refused


@pytest.mark.parametrize(
    ("content", "how", "line", "column", "why"),
    [
        pytest.param("", {}, None, None, "the file is empty", id="nothing"),
        pytest.param("key,label\n", {}, None, None, "no rows", id="a header only"),
        pytest.param(
            "file,label\na,b\n", {}, None, None, "no such column; the columns are 'file', 'label'", id="no key"
        ),
        pytest.param("key,class\na,b\n", {}, None, None, "'key', 'class'; give label=None", id="no label"),
        pytest.param("key,key\na,b\n", {}, 1, None, "'key' twice", id="a column twice"),
        pytest.param("key,label\na,b\n", {"label": 2}, None, None, "label=2: no such column", id="no such number"),
        pytest.param("a,b\n", {"header": False}, None, None, "without a header", id="names without a header"),
        pytest.param("a,b\n", {"header": False, "key": 0, "label": 5}, 1, 5, "no such column", id="a number beyond"),
        pytest.param("key,label\na,1\nb,2\na,3\n", {}, 4, "key", "'a' is also on line 2", id="twice"),
        pytest.param("key,label\na,1\n,2\n", {}, 3, "key", "it is empty", id="an empty key"),
        pytest.param("key,label\na,1\n  ,2\n", {"suffix": ".jpg"}, 3, "key", "it is empty", id="a blank key"),
        pytest.param("key,label\na,1\nb,2,3\n", {}, 3, None, "3 fields, where the first row has 2", id="a long row"),
        pytest.param("key,label\na\n", {}, 2, None, "1 fields, where the first row has 2", id="a short row"),
        pytest.param('key,label\na,"b\nc,d\n', {}, 3, None, "not valid CSV", id="a quote that is never closed"),
        pytest.param(b"key,label\na,1\n\xff,2\n", {}, 1, None, "not utf-8", id="another encoding"),
        pytest.param("key,label\na,x\n", {"label": lambda row: int(row["label"])}, 2, None, "label=: ", id="a label"),
        pytest.param("key,label\na,x\n", {"label": lambda row: row["no"]}, 2, None, "KeyError: 'no'", id="its column"),
        pytest.param("key,label\na,x\n", {"key": lambda row: 7}, 2, None, "must give a str, not int", id="its type"),
        pytest.param(gzip.compress(b"key,label\n")[:-5], {"name": "l.csv.gz"}, 2, None, "truncated", id="cut gzip"),
        pytest.param(b"key\na", {"name": "l.csv.gz"}, 1, None, "not gzip", id="no gzip"),
    ],
)
def test_errors_have_file_line_and_column(refused, tmp_path, content, how, line, column, why):
    error = refused(content, **how)
    assert why in str(error)
    assert error.source == str(tmp_path / how.get("name", "labels.csv"))
    assert str(error).startswith(error.source)
    assert (error.line, error.column) == (line, column)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "key",
    [
        "../secret",
        "a/../../secret",
        "..",
        "..\\secret",
        "/etc/passwd",
        "//host/a",
        "./a",
        "a//b",
        "a/",
        "a/./b",
        "a\0b",
        "https://evil.example/a",
        "s3://other/train/a.jpg",
        "s3://bucket/trainer/x.jpg",
        "s3://bucket/train/../trainer/x.jpg",
        "file:///etc/passwd",
    ],
)
def test_key_outside_the_dataset_is_refused_with_its_line(refused, key):
    error = refused(f"key,label\na.jpg,1\n{key},2\n")
    assert (error.line, error.column) == (3, "key")


def test_errors_redact_signed_urls(refused):
    said = str(refused("key,label\nhttps://me:hushhush@h/a?sig=hushhush,2\n"))
    assert "hushhush" not in said
    assert "https://h/a" in said


def test_missing_table_raises_not_found(server, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.csv"):
        ObjectDataset.from_csv(Store(server.url, options=server.store_options), tmp_path / "no.csv")
    with pytest.raises(ObjectNotFoundError, match=r"no\.csv"):
        ObjectDataset.from_csv(Store(server.url, options=server.store_options), server.url + "/no.csv")


def test_decompression_bomb_is_refused_in_bounded_memory(refused):
    assert "a line is longer" in str(refused(gzip.compress(b"key," + bytes(64 << 20)), name="bomb.csv.gz"))


# Which rows, and keys that come twice


SPLITS = "key,label,split\nb.jpg,cat,train\nx.jpg,cat,test\na.jpg,dog,extra\n"


@pytest.mark.parametrize(
    "where",
    [
        {"split": ["train", "extra"]},
        {2: {"train", "extra"}},
        {"split": ("train", "extra"), "key": ["a.jpg", "b.jpg"]},
        lambda row: row["split"] != "test",
    ],
    ids=["by name", "by number", "several columns", "a function"],
)
def test_where_filters_rows(of_csv, where):
    assert read(of_csv(SPLITS, where=where)) == BOTH


def test_where_accepts_a_single_value(of_csv):
    assert [key for key, *_ in read(of_csv(SPLITS, where={"split": "train"}))] == ["b.jpg"]


def test_filtered_rows_may_repeat_a_key(of_csv):
    content = "key,label,split\nb.jpg,cat,train\na.jpg,cat,test\na.jpg,dog,train\n"
    assert read(of_csv(content, where={"split": "train"})) == BOTH


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"part": "train"}, "where='part': no such column"),
        ({"split": "none"}, "where= leaves no rows"),
        (lambda row: row["part"], "where=: KeyError: 'part'"),
    ],
    ids=["no such column", "no rows", "a function that fails"],
)
def test_invalid_where_is_an_error(refused, where, said):
    assert said in str(refused(SPLITS, where=where))


def test_kept_duplicates_are_separate_samples(of_csv):
    content = "key,label\nb.jpg,left\na.jpg,middle\nb.jpg,right\n"
    assert [(key, label) for key, _, label in read(of_csv(content, duplicates="keep"))] == [
        ("b.jpg", "left"),
        ("a.jpg", "middle"),
        ("b.jpg", "right"),
    ]


def test_invalid_duplicates_is_an_error(of_csv):
    with pytest.raises(ValueError, match="duplicates='yes' must be 'error' or 'keep'"):
        of_csv(SPLITS, duplicates="yes")
