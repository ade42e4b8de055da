"""An object of unknown size is one request if it is small, and parts of one version if it is large."""

import hashlib

import pytest

from headrace._store.retry_policy import RetryPolicy
from headrace._store.store import LARGE, PART, Store
from headrace.datasets.objects import ObjectDataset
from headrace.errors import ChecksumError, StoreError
from object_server import Fault, ObjectServer
from tests.answers import answering
from tests.servers import store_of
from tests.unit.shards.resuming import in_folder, in_memory

QUICK = RetryPolicy(initial_backoff=0.001)
# No two parts of it are alike.
BODY = hashlib.shake_128(b"large").digest(LARGE + 2 * PART + 5)


@pytest.fixture(scope="module")
def shared():
    with ObjectServer(
        {"small": b"small", "empty": b"", "full": BODY[:LARGE], "more": BODY[: LARGE + 1]}
    ) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.put("large", BODY)
    shared.misbehave()
    return shared


def read(server, key, checksum=None):
    dataset = ObjectDataset(
        store_of(server, retry=QUICK), keys=[key], checksums=[checksum]
    )
    return bytes(dataset[0].data)


def spans(server):
    return sorted(
        tuple(map(int, seen.span.removeprefix("bytes=").split("-")))
        for seen in server.seen()
    )


@pytest.mark.parametrize(
    ("key", "body", "requests"),
    [
        ("small", b"small", 1),
        ("full", BODY[:LARGE], 1),
        ("more", BODY[: LARGE + 1], 2),
        ("large", BODY, 4),
    ],
)
def test_up_to_16_mib_are_one_request_and_the_rest_comes_in_parts(
    server, key, body, requests
):
    assert read(server, key) == body
    asked = spans(server)
    assert len(asked) == requests
    assert asked[0] == (0, LARGE - 1)
    assert [start for start, _ in asked[1:]] == [last + 1 for _, last in asked[:-1]]
    assert asked[-1][1] == max(LARGE, len(body)) - 1
    assert not server.seen("HEAD")


def test_an_empty_object_comes_empty(server, tmp_path):
    assert read(server, "empty") == b""
    files = {"empty": b""}
    for store in (server.http_url, in_folder(tmp_path, files), in_memory(files)):
        assert bytes(ObjectDataset(store, keys=["empty"])[0].data) == b""


def test_an_empty_object_that_comes_without_a_range_says_nothing_of_others(server):
    server.misbehave(Fault("whole", key="empty"))
    dataset = ObjectDataset(store_of(server, retry=QUICK), keys=["empty", "large"])
    assert bytes(dataset[0].data) == b""
    assert bytes(dataset[1].data) == BODY
    assert len([seen for seen in server.seen() if seen.key == "large"]) == 4


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_a_request_that_fails_is_made_again_and_no_other(server, skip):
    server.misbehave(Fault("cut", at=2, skip=skip, times=1))
    assert read(server, "large") == BODY
    assert len(server.seen()) == 5


def test_a_checksum_is_of_the_whole(server):
    assert read(server, "large", "sha256:" + hashlib.sha256(BODY).hexdigest()) == BODY
    server.misbehave(Fault("flip", skip=2, at=1))
    with pytest.raises(ChecksumError):
        read(server, "large", "sha256:" + hashlib.sha256(BODY).hexdigest())


@pytest.mark.parametrize("size", [200 * 10**12, 7 * 2**60, 2**64 - 1])
def test_a_size_beyond_memory_is_an_error_with_key_and_size(size):
    listing = f"<ListBucketResult><Contents><Key>a</Key><Size>{size}</Size>"
    listing += (
        "<LastModified>2020-01-01T00:00:00Z</LastModified></Contents></ListBucketResult>"
    )

    def answer(request):
        if "list-type" in request.path:
            request.send(200, listing.encode())
        else:
            request.send(
                206, bytes(LARGE), {"Content-Range": f"bytes 0-{LARGE - 1}/{size}"}
            )

    with answering(answer) as url:
        options = {"endpoint": url, "skip_signature": True, "region": "x"}
        listed = ObjectDataset(Store("s3://bucket", options=options))
        for dataset in (listed, ObjectDataset(f"{url}/d", keys=["a"])):
            with pytest.raises(
                StoreError, match=rf"'a' .*: {min(size, 2**63 - 1):,} bytes are claimed"
            ) as caught:
                dataset[0]
            assert (caught.value.key, caught.value.index) == ("a", 0)
