"""`ObjectDataset` gives each object of a listing as a sample, with one request, and says plainly what went wrong."""

import hashlib
import pickle
import re
import signal
import traceback
import zlib

import cloudpickle
import obstore
import pandas
import pytest
from obstore.store import LocalStore

from headrace._store.store import Store
from headrace.datasets.objects import ObjectDataset, ObjectSample
from headrace.errors import (
    ChecksumError,
    EmptyListingError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    StoreUnreachableError,
)

KEYS = ("a.jpg", "b.jpg", "c.png", "d.txt", "empty.bin")


def opened(server, folder="train", **options):
    return ObjectDataset(server.store(folder), **options)


@pytest.fixture
def dataset(server):
    return opened(server)


def to_nowhere(endpoint, **more):
    """Store options that lead to an endpoint where no store is."""
    return {
        "endpoint": endpoint,
        "region": "x",
        "skip_signature": True,
        "client_options": {"allow_http": True},
        **more,
    }


# Samples


async def test_data_is_a_view_that_nobody_can_write_to(dataset):
    sample = await dataset.aget(0)
    assert isinstance(sample.data, memoryview)
    assert sample.data.readonly
    assert isinstance(sample.data.obj, obstore.Bytes), "the bytes were copied"


@pytest.mark.counts
def test_samples_are_in_order_of_their_keys_and_each_is_one_request(server, dataset):
    assert tuple(dataset.keys) == KEYS
    assert [bytes(dataset[i].data) for i in range(4)] == [
        key.encode() for key in KEYS[:4]
    ]
    assert bytes(dataset[4].data) == b"", "an empty object needs no request"
    assert server.requests() == {"GET": 4, "HEAD": 0, "LIST": 1, "PUT": 0, "DELETE": 0}


def test_each_kind_of_checksum_tells_its_own_bytes_from_others_and_another_form_is_refused(
    server,
):
    store = server.store("train", retry=1)
    digests = {
        name: hashlib.new(name, b"a.jpg").hexdigest()
        for name in ("sha256", "sha1", "md5")
    }
    for name, digest in {**digests, "crc32": f"{zlib.crc32(b'a.jpg'):08x}"}.items():
        checksums = [f"{name}:{digest}"] * 2
        checked = ObjectDataset(store, keys=["a.jpg", "b.jpg"], checksums=checksums)
        assert bytes(checked[0].data) == b"a.jpg"
        with pytest.raises(ChecksumError):
            checked[1]
    for wrong in ("md5:" + "0" * 31, "sha512:" + "0" * 128, "MD5:" + "0" * 32):
        with pytest.raises(ValueError, match="algorithm:hexadecimal"):
            ObjectDataset(store, keys=["a.jpg"], checksums=[wrong])


# Labels


def test_labels_come_from_a_function_a_mapping_or_a_row(server):
    series = pandas.Series(range(5), index=[3, 1, 4, 0, 2])  # by position
    for labels in (
        KEYS.index,
        {key: i for i, key in enumerate(KEYS)},
        range(5),
        series,
    ):
        dataset = opened(server, labels=labels)
        assert [dataset[i].label for i in range(5)] == [0, 1, 2, 3, 4]


def test_labels_that_do_not_fit_are_refused(server):
    for labels, error, why in (
        ([1, 2], ValueError, "2 labels for 5 keys"),
        ({"a.jpg": 1}, ValueError, "'b.jpg'"),
        ("abcde", TypeError, "not str"),
        (pandas.DataFrame(index=range(5)), TypeError, "labels= must be"),
    ):
        with pytest.raises(error, match=why):
            opened(server, labels=labels)


# In async programs, and in other processes


@pytest.mark.counts
def test_a_pickled_dataset_takes_keys_and_sizes_along_and_lists_nothing_again(
    server, dataset
):
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert bytes(copy[1].data) == b"b.jpg"
    assert server.requests()["LIST"] == 1


def test_a_given_store_is_pickled_with_the_dataset(tmp_path):
    (tmp_path / "x").write_bytes(b"local")
    dataset = ObjectDataset(Store("file:///the-data", backend=LocalStore(tmp_path)))
    assert bytes(cloudpickle.loads(cloudpickle.dumps(dataset))[0].data) == b"local"


def test_a_sample_can_be_pickled_and_its_bytes_go_out_of_band(dataset):
    for protocol in (4, 5):
        copy = pickle.loads(pickle.dumps(dataset[0], protocol))
        assert copy == ObjectSample("a.jpg", memoryview(b"a.jpg"), None)
        assert copy.data.readonly
    buffers = []
    pickled = pickle.dumps(dataset[0], 5, buffer_callback=buffers.append)
    assert [bytes(buffer) for buffer in buffers] == [b"a.jpg"]
    assert bytes(pickle.loads(pickled, buffers=buffers).data) == b"a.jpg"


def test_a_fork_is_told_at_once_where_it_would_hang(forks, tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    code = f"""
import os
from headrace.datasets.objects import ObjectDataset
from headrace.errors import ForkedError
url = {tmp_path.as_uri()!r}
dataset = ObjectDataset(url)

def attempt(what):
    try: what()
    except ForkedError as error: os.write(1, (str(error) + "\\n").encode())

def in_a_fork(then):
    pid = os.fork()
    if pid == 0:
        attempt(lambda: dataset[0])
        attempt(lambda: ObjectDataset(url))
        then()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

in_a_fork(lambda: in_a_fork(lambda: None))
assert bytes(dataset[0].data) == b"1"
"""
    done = forks.run_source(code)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("obstore, which reads object stores, was first used in process")
        == 4
    )


def test_ctrl_c_interrupts_the_listing(forks, silent):
    listening, endpoint = silent
    code = f"""
from headrace import ObjectDataset, Store
try: ObjectDataset(Store("s3://b", options={to_nowhere(endpoint)!r}, timeout=600))
except KeyboardInterrupt: print("interrupted")
"""
    with forks.start_source(code) as process:
        connection, _ = listening.accept()  # it is in the listing now
        with connection:
            process.send_signal(signal.SIGINT)
            assert process.communicate()[0] == "interrupted\n"


# Errors


def test_a_key_that_went_is_named_with_its_index_and_url(server, dataset):
    server.delete("train/b.jpg")
    with pytest.raises(
        ObjectNotFoundError, match=r"'b.jpg' \(index 1\).*\(s3://bucket/train\)"
    ):
        dataset[1]


@pytest.mark.parametrize("key", ["", "..", "a//b", "a\tb", "a\ud800"])
def test_a_key_that_no_object_can_have_is_named_with_its_index_and_not_read(server, key):
    dataset = ObjectDataset(server.http_url, keys=["train/a.jpg", key])
    with pytest.raises(
        StoreError,
        match=rf"{re.escape(repr(key))} \(index 1\): this cannot be the key of an object",
    ):
        dataset[1]


def test_an_object_that_shrank_is_an_error_and_not_a_short_sample(server, dataset):
    server.put("train/a.jpg", b"a")
    blind = ObjectDataset(server.store("train", if_match=False))
    server.put("train/a.jpg", b"aaa")
    with pytest.raises(
        ObjectChangedError, match=r"'a.jpg' \(index 0\): overwritten since"
    ):
        dataset[0]
    # A store clips a range at the object's end, so one that grew is seen only by its tag.
    server.put("train/a.jpg", b"")
    with pytest.raises(ObjectChangedError, match=r"'a.jpg' \(index 0\)"):
        blind[0]


def test_a_store_that_never_answers_is_unreachable_within_the_time_out(silent):
    _, endpoint = silent
    with pytest.raises(StoreUnreachableError, match=r"within 0\.2 s.*s3://b"):
        ObjectDataset(Store("s3://b", options=to_nowhere(endpoint), timeout=0.2))


def test_the_users_own_retries_win(server):
    # The server answers 501 to what it does not know, and errors of the 5xx kind are tried again.
    with_one_retry = to_nowhere(server.endpoint, retry_config={"max_retries": 1})
    dataset = ObjectDataset(Store("s3://_unknown", options=with_one_retry), keys=["k"])
    with pytest.raises(StoreError, match="max_retries: 1"):
        dataset[0]


def test_an_empty_listing_names_what_was_looked_for(server):
    with pytest.raises(EmptyListingError, match=r"s3://bucket/nowhere"):
        opened(server, "nowhere")
    with pytest.raises(
        EmptyListingError,
        match=r"no object whose key ends in .*'\.webp'.*s3://bucket/train",
    ):
        opened(server, suffix=".webp")


def test_a_directory_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(ObjectNotFoundError, match=r"no such directory.*missing"):
        ObjectDataset((tmp_path / "missing").as_uri())


def test_no_error_of_arguments_shows_a_secret():
    for attempt in (
        lambda: ObjectDataset("ftp://me:passpass@host/d?sig=sigsig"),
        lambda: ObjectDataset(
            Store(
                "s3://b", options={"secret_access_key": "hushhush", "no_such": "option"}
            )
        ),
    ):
        with pytest.raises(ValueError) as caught:
            attempt()
        error = caught.value
        assert error.__cause__ is None
        assert error.__context__ is None
        # Without the source lines, which quote this test: what a log would hold of another
        # program's run.
        shown = "".join(
            traceback.TracebackException.from_exception(error).format_exception_only()
        )
        assert not any(word in shown for word in ("passpass", "sigsig", "hushhush")), (
            shown
        )


def test_arguments_that_make_no_sense_are_refused_before_any_request():
    with pytest.raises(ValueError, match="suffix="):
        ObjectDataset("s3://b", keys=["a"], suffix=".jpg")
    with pytest.raises(TypeError, match="not one str"):
        ObjectDataset("s3://b", keys="a.jpg")
    with pytest.raises(ValueError, match="backend="):
        ObjectDataset("memory://")


def test_a_slash_at_the_end_of_an_http_url_changes_nothing(server):
    for url in (f"{server.http_url}/train", f"{server.http_url}/train/"):
        assert bytes(ObjectDataset(url, keys=["a.jpg"])[0].data) == b"a.jpg"
