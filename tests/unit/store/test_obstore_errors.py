"""The wording of obstore's errors, which `errors.classify_error` reads, checked with real requests.

obstore gives no status, no headers and no kind of a failed connection but in the text of its
errors. Where a release words them otherwise, failed requests would silently no longer be retried;
these tests fail then, and name the release and the text.
"""

import asyncio
import importlib.metadata

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

import headrace as hr
from headrace._store.errors import NATIVE_ERRORS, Cause, classify_error, describe_error
from headrace._store.open import open_store
from object_server import Fault, ObjectServer
from tests.answers import answering

RELEASE = f"obstore {importlib.metadata.version('obstore')} words this error otherwise"
BODY = bytes(1000)


@pytest.fixture(scope="module")
def server():
    with ObjectServer({"a": BODY}) as server:
        yield server


def error_of(store, **options):
    """The error of one GET, of a range if `options` do not say otherwise."""

    async def request():
        result = await obstore.get_async(
            store, "a", options={"range": (0, 100), **options}
        )
        return await result.bytes_async()

    with pytest.raises(NATIVE_ERRORS) as failed:
        asyncio.run(request())
    return failed.value


def opened(server, *faults, timeout=5.0, **options):
    server.misbehave(*faults)
    return open_store(server.url, {**server.store_options, **options}, timeout=timeout)


def check(error, cause, status=None):
    failure = classify_error(error)
    assert (failure.cause, failure.status) == (cause, status), f"{RELEASE}: {error}"
    return failure


STATUSES = {
    Cause.REFUSED: (401, 403),
    Cause.NOT_FOUND: (404,),
    Cause.CHANGED: (412, 416),
    Cause.THROTTLED: (429, 503),
    Cause.TIMED_OUT: (408,),
    Cause.SERVER: (425, 500, 502),
    Cause.OTHER: (400, 501),
}


def test_status_is_in_the_text(server):
    for cause, statuses in STATUSES.items():
        for status in statuses:
            check(error_of(opened(server, Fault("status", status=status))), cause, status)


def test_body_of_a_refusal_is_in_the_text(server):
    body = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    error = error_of(opened(server, Fault("status", status=400, body=body)))
    check(error, Cause.EXPIRED, 400)
    assert "ExpiredToken: The provided token has expired." in describe_error(error), (
        RELEASE
    )


def test_condition_that_fails(server):
    error = error_of(opened(server), if_match='"another"')
    assert classify_error(error).cause is Cause.CHANGED, f"{RELEASE}: {error}"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("cut", Cause.CUT),
        ("reset", Cause.CUT),
        ("refuse", Cause.UNREACHABLE),
        ("whole", Cause.RANGE_IGNORED),
        ("misplaced", Cause.WRONG_RANGE),
        ("silence", Cause.TIMED_OUT),
        ("stall", Cause.TIMED_OUT),
    ],
)
def test_faults_of_servers(server, kind, cause):
    timeout = 0.3 if cause is Cause.TIMED_OUT else 60.0
    store = opened(server, Fault(kind, at=10, seconds=60.0), timeout=timeout)
    check(error_of(store), cause)


def test_missing_objects_of_other_stores(tmp_path):
    check(error_of(LocalStore(tmp_path)), Cause.NOT_FOUND)
    check(error_of(MemoryStore()), Cause.NOT_FOUND)


def chunked(request):
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    request.wfile.write(b"3e8\r\n" + BODY + b"\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (chunked, "Content-Length Header missing"),
        (
            lambda request: request.send(206, BODY, {"Content-Range": "bytes 0-999/*"}),
            r"CONTENT_RANGE .*0-999/\*",
        ),
        (lambda request: request.send_object(BODY, {"ETag": '"caf\u00e9"'}), "non-ASCII"),
    ],
)
def test_unusable_answer_is_reported_at_once_with_its_header(answer, named):
    with (
        answering(answer) as url,
        pytest.raises(hr.StoreError, match=f"failed: .*{named}") as failed,
    ):
        hr.ObjectDataset(hr.Store(url, retry=5), keys=["x"])[0]
    assert not isinstance(failed.value, hr.errors.StoreUnreachableError)
    assert failed.value.attempts == 1
