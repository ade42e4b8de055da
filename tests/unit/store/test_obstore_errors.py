"""The wording of obstore's errors, which `errors.classify_error` reads, checked with real requests.

obstore gives no status, no headers and no kind of a failed connection but in the text of its errors. Where a release
words them otherwise, failed requests would silently no longer be retried; these tests fail then, and name the release
and the text.
"""

import asyncio
import importlib.metadata
import socket
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import obstore
import pytest
import trustme
from obstore.store import LocalStore, MemoryStore

from headrace._core.store.backoff import ask_retry_after
from headrace._core.store.errors import NATIVE_ERRORS, Cause, classify_error, describe_error
from headrace._core.store.open import open_store
from object_server import Fault, ObjectServer

RELEASE = f"obstore {importlib.metadata.version('obstore')} words this error otherwise"
BODY = bytes(1000)


@pytest.fixture(scope="module")
def server():
    with ObjectServer({"a": BODY}) as server:
        yield server


def error_of(store, key="a", **options):
    """The error of one GET, of a range if `options` do not say otherwise."""

    async def request():
        result = await obstore.get_async(store, key, options={"range": (0, 100), **options})
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


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (401, Cause.REFUSED),
        (403, Cause.REFUSED),
        (404, Cause.NOT_FOUND),
        (412, Cause.CHANGED),
        (429, Cause.THROTTLED),
        (503, Cause.THROTTLED),
        (408, Cause.TIMED_OUT),
        (425, Cause.SERVER),
        (500, Cause.SERVER),
        (502, Cause.SERVER),
        (501, Cause.OTHER),
        (400, Cause.OTHER),
        (416, Cause.CHANGED),
    ],
)
def test_status_is_in_the_text(server, status, cause):
    check(error_of(opened(server, Fault("status", status=status))), cause, status)


def test_body_of_a_refusal_is_in_the_text(server):
    body = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    error = error_of(opened(server, Fault("status", status=400, body=body)))
    check(error, Cause.EXPIRED, 400)
    assert "ExpiredToken: The provided token has expired." in describe_error(error), RELEASE


def test_request_of_a_refusal_is_in_the_text(server):
    store = opened(server, Fault("status", status=503, headers={"Retry-After": "7"}))
    error = error_of(store)
    server.misbehave(Fault("status", method="HEAD", key="a", status=503, headers={"Retry-After": "7"}))
    assert asyncio.run(ask_retry_after(error)) == 7.0, f"{RELEASE}: {error}"


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


def test_redirect_to_another_host(server):
    error = error_of(opened(server, Fault("redirect", body="http://127.0.0.2:1/a")))
    check(error, Cause.REDIRECTED)


def test_redirects_in_a_circle(server):
    error = error_of(opened(server, Fault("redirect", body=f"{server.endpoint}/bucket/a")))
    check(error, Cause.OTHER)


def test_port_without_a_listener():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        failure = check(error_of(open_store(f"http://127.0.0.1:{port}", {}, timeout=5.0)), Cause.UNREACHABLE)
    assert failure.detail == f"Connection refused (127.0.0.1:{port})", RELEASE


def test_host_name_that_does_not_resolve():
    check(error_of(open_store("http://no-such-host.invalid", {}, timeout=5.0)), Cause.UNRESOLVED)


def test_plain_http_that_is_not_allowed(server):
    store = open_store("s3://bucket", {**server.store_options, "client_options": {"allow_http": False}}, timeout=5.0)
    check(error_of(store), Cause.PLAIN_HTTP)


@contextmanager
def serving(handler, context=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda request, address: None  # of a handshake that the client ends
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Moved(BaseHTTPRequestHandler):
    """Answers as Amazon does for a bucket of another region: 301 without a Location."""

    def do_GET(self):
        self.send_response(301)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_bucket_of_another_region():
    with serving(Moved) as port:
        options = {"endpoint": f"http://127.0.0.1:{port}", "skip_signature": True}
        check(error_of(open_store("s3://bucket", options, timeout=5.0)), Cause.WRONG_REGION)


def test_certificate_of_an_unknown_authority():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with serving(Moved, context) as port:
        failure = check(error_of(open_store(f"https://127.0.0.1:{port}", {}, timeout=5.0)), Cause.UNTRUSTED)
    assert failure.detail == "UnknownIssuer", RELEASE


def test_server_without_tls():
    with serving(Moved) as port:
        check(error_of(open_store(f"https://127.0.0.1:{port}", {}, timeout=5.0)), Cause.NOT_TLS)


def test_missing_objects_of_other_stores(tmp_path):
    check(error_of(LocalStore(tmp_path)), Cause.NOT_FOUND)
    check(error_of(MemoryStore()), Cause.NOT_FOUND)


@pytest.mark.parametrize("make", [lambda path: LocalStore(path), lambda path: MemoryStore()], ids=["local", "memory"])
def test_range_of_an_empty_object(tmp_path, make):
    store = make(tmp_path)
    obstore.put(store, "a", b"")
    check(error_of(store), Cause.OTHER)


def test_errors_of_opening_a_store(tmp_path):
    with pytest.raises(ValueError, match="gopher"):
        open_store("gopher://host", {}, timeout=1.0)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        open_store((tmp_path / "gone").as_uri(), {}, timeout=1.0)
