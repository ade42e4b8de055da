"""The local object server answers as an object store does, and leaves nothing behind."""

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


def test_a_get_gives_the_object_and_its_headers(server):
    status, headers, body = ask(server, "GET", "/bucket/many/007.bin")
    assert (status, body) == (200, b"body 7")
    assert headers["Content-Length"] == "6"
    assert headers["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    assert headers["Last-Modified"].endswith("GMT")


@pytest.mark.parametrize(
    ("asked", "status", "told", "body"),
    [
        ("bytes=0-5", 206, "bytes 0-5/6", b"body 7"),
        ("bytes=1-2", 206, "bytes 1-2/6", b"od"),
        ("bytes=5-", 206, "bytes 5-5/6", b"7"),
        ("bytes=-3", 206, "bytes 3-5/6", b"y 7"),
        ("bytes=2-99", 206, "bytes 2-5/6", b"dy 7"),
        ("bytes=6-7", 416, None, None),
    ],
)
def test_a_range_gives_that_part_and_says_which(server, asked, status, told, body):
    answered, headers, content = ask(server, "GET", "/bucket/many/007.bin", {"Range": asked})
    assert (answered, headers["Content-Range"]) == (status, told)
    assert body is None or content == body


def test_a_head_tells_the_length_and_sends_no_body(server):
    status, headers, body = ask(server, "HEAD", "/bucket/many/007.bin")
    assert (status, headers["Content-Length"], body) == (200, "6", b"")


@pytest.mark.parametrize(("path", "code"), [("/bucket/none", "NoSuchKey"), ("/other/none", "NoSuchBucket")])
def test_what_is_missing_is_a_404_with_s3s_code(server, path, code):
    status, _, body = ask(server, "GET", path)
    assert (status, ElementTree.fromstring(body).findtext("Code")) == (404, code)


def test_a_listing_by_level_has_keys_and_common_prefixes_a_thousand_of_both_to_a_page():
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


def test_what_is_not_supported_is_refused_and_not_answered_wrongly(server):
    for method, path in [("GET", "/bucket?uploads"), ("POST", "/bucket/a?uploads"), ("PUT", "/bucket")]:
        assert ask(server, method, path)[0] == 501


def test_a_listing_comes_in_pages_that_join(server):
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


def test_objects_are_put_replaced_and_deleted_while_it_runs(server, store):
    server.put("a b", b"first")
    server.put("a b", b"second")
    assert bytes(obstore.get(store, "a b").bytes()) == b"second"
    server.delete("a b")
    server.delete("a b")
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a b")


def test_an_object_larger_than_a_web_form_is_put_too(server):
    large = bytes(3 << 20)
    server.put("large.bin", large)
    try:
        assert ask(server, "GET", "/bucket/large.bin")[2] == large
    finally:
        server.delete("large.bin")


def test_plain_http_reaches_the_same_objects(server):
    store = from_url(server.http_url, client_options={"allow_http": True})
    assert bytes(obstore.get(store, "many/001.bin").bytes()) == b"body 1"


def test_requests_are_counted_by_kind(server, store):
    obstore.list(store).collect()
    obstore.get_range(store, "many/001.bin", start=0, length=1)
    obstore.head(store, "many/001.bin")
    server.put("new", b"")
    server.delete("new")
    assert server.requests() == {"GET": 1, "HEAD": 1, "LIST": 1, "PUT": 1, "DELETE": 1}


async def test_gets_wait_for_their_latency_side_by_side(server, store):
    server.latency = 0.05
    await asyncio.gather(*(obstore.get_range_async(store, f"many/{i:03}.bin", start=0, length=6) for i in range(20)))
    assert server.max_concurrent > 1
    assert server.requests()["GET"] == 20


def test_closing_reaps_the_process_frees_the_port_and_may_be_repeated():
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


def test_a_closed_server_says_so():
    server = ObjectServer()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.endpoint
    with server:
        pass
    with pytest.raises(RuntimeError, match="not running"):
        server.requests()
    with pytest.raises(RuntimeError, match="make another"):
        server.start()


def test_it_dies_with_a_parent_that_is_killed():
    code = (
        "from headrace.testing import ObjectServer; s = ObjectServer().start(); print(s.endpoint, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        port = int(parent.stdout.readline().decode().strip().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            os.kill(parent.pid, signal.SIGKILL)
            assert connection.recv(1) == b"", "the server's end of the connection closes when the server ends"


@pytest.mark.parametrize("wrong", [{"latency": -1}, {"latency": float("nan")}, {"bucket": ""}, {"bucket": "a/b"}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ObjectServer(**wrong)


def test_importing_it_does_not_import_aiohttp_and_a_missing_one_is_named():
    code = (
        "import sys, headrace.testing as t; assert 'aiohttp' not in sys.modules\n"
        "import importlib.util as u; u.find_spec = lambda name: None\n"
        "try: t.ObjectServer()\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install headrace[testing]" in said
