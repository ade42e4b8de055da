"""The local object server behaves as an object store and leaves no process or port."""

import asyncio
import hashlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import urllib.parse
from xml.etree import ElementTree

import obstore
import pytest
from obstore.store import from_url

from headrace.testing import ObjectServer

NAMESPACE = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}


def ask(server, method, path, headers=None):
    """One request, as bytes on a socket would make it: status, headers, body."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.endpoint).netloc)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.fixture
def store(server):
    return from_url(server.url, **server.store_options)


def test_get_returns_object_and_headers(server):
    status, headers, body = ask(server, "GET", "/bucket/many/007.bin")
    assert (status, body) == (200, b"body 7")
    assert headers["Content-Length"] == "6"
    assert headers["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    assert headers["Last-Modified"].endswith("GMT")


@pytest.mark.parametrize(
    ("asked", "status", "content_range", "body"),
    [
        ("bytes=0-5", 206, "bytes 0-5/6", b"body 7"),
        ("bytes=1-2", 206, "bytes 1-2/6", b"od"),
        ("bytes=5-", 206, "bytes 5-5/6", b"7"),
        ("bytes=-3", 206, "bytes 3-5/6", b"y 7"),
        ("bytes=2-99", 206, "bytes 2-5/6", b"dy 7"),
        ("bytes=6-7", 416, None, None),
    ],
)
def test_range_request_returns_part_and_content_range(server, asked, status, content_range, body):
    answered, headers, content = ask(server, "GET", "/bucket/many/007.bin", {"Range": asked})
    assert (answered, headers["Content-Range"]) == (status, content_range)
    assert body is None or content == body


def test_head_has_length_and_no_body(server):
    status, headers, body = ask(server, "HEAD", "/bucket/many/007.bin")
    assert (status, headers["Content-Length"], body) == (200, "6", b"")


@pytest.mark.parametrize(("path", "code"), [("/bucket/none", "NoSuchKey"), ("/other/none", "NoSuchBucket")])
def test_missing_object_is_404_with_s3s_code(server, path, code):
    status, _, body = ask(server, "GET", path)
    assert (status, ElementTree.fromstring(body).findtext("Code")) == (404, code)


def test_listing_with_delimiter_has_a_thousand_keys_and_prefixes_per_page():
    objects = {f"{i:04}/{j}": b"" for i in range(1500) for j in range(2)} | {
        f"{i:04}.txt": b"" for i in range(0, 999, 9)
    }
    with ObjectServer(objects) as server:
        level = obstore.list_with_delimiter(from_url(server.url, **server.store_options))
        assert level["common_prefixes"] == [f"{i:04}" for i in range(1500)]
        assert [entry["path"] for entry in level["objects"]] == [f"{i:04}.txt" for i in range(0, 999, 9)]
        assert server.requests()["LIST"] == 2
        inside = obstore.list_with_delimiter(from_url(server.url, **server.store_options), "0007")
        assert (inside["common_prefixes"], [entry["path"] for entry in inside["objects"]]) == ([], ["0007/0", "0007/1"])


def test_unsupported_requests_are_refused(server):
    for method, path in [("GET", "/bucket?uploads"), ("POST", "/bucket/a?uploads"), ("PUT", "/bucket")]:
        assert ask(server, method, path)[0] == 501


def test_listing_pages_are_complete(server):
    keys, token, pages = [], None, 0
    while token is not None or not pages:
        query = {"list-type": "2", "prefix": "many/", "max-keys": "30"} | (
            {"continuation-token": token} if token is not None else {}
        )
        _, _, body = ask(server, "GET", "/bucket?" + urllib.parse.urlencode(query))
        tree = ElementTree.fromstring(body)
        keys += [element.text for element in tree.findall("s3:Contents/s3:Key", NAMESPACE)]
        token = tree.findtext("s3:NextContinuationToken", None, NAMESPACE)
        pages += 1
    assert (pages, keys) == (4, [f"many/{i:03}.bin" for i in range(100)])


def test_obstore_lists_reads_writes_and_deletes(store):
    assert len(obstore.list(store).collect()) == 101
    assert bytes(obstore.get(store, "one & two/ü+%.txt").bytes()) == b"awkward"
    assert obstore.head(store, "many/000.bin")["size"] == 6
    obstore.put(store, "new", b"fresh")
    assert bytes(obstore.get_range(store, "new", start=1, length=3)) == b"res"


def test_objects_can_be_put_replaced_and_deleted(server, store):
    server.put("a b", b"first")
    server.put("a b", b"second")
    assert bytes(obstore.get(store, "a b").bytes()) == b"second"
    server.delete("a b")
    server.delete("a b")
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a b")


def test_large_object_can_be_put(server):
    large = bytes(3 << 20)
    server.put("large.bin", large)
    try:
        assert ask(server, "GET", "/bucket/large.bin")[2] == large
    finally:
        server.delete("large.bin")


def test_plain_http_serves_the_same_objects(server):
    store = from_url(server.http_url, client_options={"allow_http": True})
    assert bytes(obstore.get(store, "many/001.bin").bytes()) == b"body 1"


def test_requests_are_counted_by_method(server, store):
    obstore.list(store).collect()
    obstore.get_range(store, "many/001.bin", start=0, length=1)
    obstore.head(store, "many/001.bin")
    server.put("new", b"")
    server.delete("new")
    assert server.requests() == {"GET": 1, "HEAD": 1, "LIST": 1, "PUT": 1, "DELETE": 1}


async def test_latencies_overlap(server, store):
    server.latency = 0.05
    await asyncio.gather(*(obstore.get_range_async(store, f"many/{i:03}.bin", start=0, length=6) for i in range(20)))
    assert server.max_concurrent > 1
    assert server.requests()["GET"] == 20


def test_close_reaps_the_process_frees_the_port_and_is_idempotent():
    descriptors = set(os.listdir("/proc/self/fd"))
    server = ObjectServer({"a": b"1"}).start()
    port, pid = int(server.endpoint.rpartition(":")[2]), server._process.pid
    server.close()
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert set(os.listdir("/proc/self/fd")) <= descriptors  # of tests before this one some may have closed meanwhile


def test_closed_server_raises():
    server = ObjectServer()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.endpoint
    with server:
        pass
    with pytest.raises(RuntimeError, match="not running"):
        server.requests()
    with pytest.raises(RuntimeError, match="make another"):
        server.start()


def test_server_ends_when_its_parent_is_killed():
    code = (
        "from headrace.testing import ObjectServer; s = ObjectServer().start(); print(s.endpoint, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        port = int(parent.stdout.readline().decode().strip().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            os.kill(parent.pid, signal.SIGKILL)
            assert connection.recv(1) == b"", "the server's end of the connection closes when the server ends"


@pytest.mark.parametrize("wrong", [{"latency": -1}, {"latency": float("nan")}, {"bucket": ""}, {"bucket": "a/b"}])
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ObjectServer(**wrong)


def test_aiohttp_is_imported_on_use_and_named_if_missing():
    code = (
        "import sys, headrace.testing as t; assert 'aiohttp' not in sys.modules\n"
        "import importlib.util as u; u.find_spec = lambda name: None\n"
        "try: t.ObjectServer()\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install headrace[testing]" in said
