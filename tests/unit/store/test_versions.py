"""All parts of an object are of one version, by whichever of entity tag, time and size the server gives."""

import contextlib

import numpy as np
import pyarrow
import pytest

import headrace as hr
from headrace._store.errors import RequestFailure
from headrace._store.head import Head, check_version
from headrace._store.store import LARGE
from headrace.errors import ObjectChangedError
from tests.answers import answering
from tests.unit.shards.tars import parquet

QUICK = hr.RetryPolicy(max_attempts=3, initial_backoff=0.001)
TIMES = ("Mon, 01 Jan 2024 00:00:01 GMT", "Mon, 01 Jan 2024 00:00:02 GMT")
HEADERS = {
    "strong tag": ({"ETag": '"1"'}, {"ETag": '"2"'}),
    "weak tag": ({"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}),
    "time": ({"Last-Modified": TIMES[0]}, {"Last-Modified": TIMES[1]}),
    "weak tag that stays": (
        {"ETag": 'W/"1"', "Last-Modified": TIMES[0]},
        {"ETag": 'W/"1"', "Last-Modified": TIMES[1]},
    ),
}


READS = {  # the object before and after it is overwritten, and how it is read
    "object of unknown size": (
        b"a" * (LARGE + 100),
        b"b" * (LARGE + 100),
        lambda store: hr.ObjectDataset(store, keys=["x"]),
    ),
    "lines": (
        b"old\n" * 2000,
        b"new\n" * 2000,
        lambda store: hr.LinesDataset("x.txt", store=store, chunk_bytes=1000),
    ),
    "windows of tokens": (
        bytes(128),
        bytes([1]) * 128,
        lambda store: hr.TokenDataset("x.npy", store=store, seq_len=8, dtype="uint16"),
    ),
    "footer and row groups": (
        parquet(pyarrow.table({"a": [0] * 10})),
        parquet(pyarrow.table({"a": [1] * 10})),
        lambda store: hr.ParquetDataset("x.parquet", store=store),
    ),
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("kind", READS)
def test_all_requests_are_of_one_version(kind, headers):
    """Of a server that ignores `If-Match`, and whose object is overwritten after a request."""
    *versions, opened = READS[kind]
    seen = []

    def answer(request):
        seen.append(request)
        number = int(len(seen) > 1)
        request.send_object(versions[number], headers[number])

    with answering(answer) as url, pytest.raises(ObjectChangedError):
        list(opened(hr.Store(url, retry=QUICK)))


def test_store_without_tags_in_its_answers_is_asked_to_compare():
    asked = []

    def answer(request):
        asked.append(request.headers.get("If-Match"))
        if asked[-1] is None:
            request.send_object(b"other", {})
        else:
            request.send(412, b"")

    with answering(answer) as url:
        columns = {"keys": ["x"], "sizes": [5], "etags": ['"1"']}
        dataset = hr.ObjectDataset(hr.Store(url, retry=QUICK), **columns)
        with pytest.raises(ObjectChangedError):
            dataset[0]
    assert asked == [None, '"1"']


def test_cached_window_is_of_the_version_of_the_shard_without_a_tag(tmp_path):
    versions = [np.full(64, number, np.uint16).tobytes() for number in (0, 1)]
    headers, current = HEADERS["time"], 0
    with answering(
        lambda request: request.send_object(versions[current], headers[current])
    ) as url:
        for current in (0, 1):
            windows = hr.TokenDataset("x.bin", store=url, seq_len=8, dtype="uint16")
            assert windows.cache(tmp_path / "cache")[0].tolist() == [current] * 8


@pytest.mark.parametrize(
    ("known", "found", "same"),
    [
        (('"a"', None), ('"a"', None), True),
        (('"a"', None), ('W/"a"', None), True),
        (('"a"', "2024-01-01T00:00:01"), ('"a"', "2024-01-01T00:00:02"), True),
        (('W/"a"', "2024-01-01T00:00:01"), ('W/"a"', "2024-01-01T00:00:02"), False),
        (
            (None, "2024-01-01T00:00:01.250000+00:00"),
            (None, "2024-01-01T00:00:01+00:00"),
            True,
        ),
    ],
)
def test_versions_are_compared_by_tag_and_else_by_time(known, found, same):
    with contextlib.nullcontext() if same else pytest.raises(RequestFailure):
        check_version(Head("x", 10, *known), Head("x", 10, *found))
