"""The local object server behaves as an object store and leaves no process or port."""

import hashlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import urllib.parse

import obstore
import pytest
from obstore.store import from_url

from object_server import ObjectServer
from tests.documents import ROOT


def ask(server, method, path, headers=None):
    """One request, as bytes on a socket would make it: status, headers, body."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.endpoint).netloc)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def server():
    objects = {f"many/{i:03}.bin": f"body {i}".encode() for i in range(100)}
    with ObjectServer({**objects, "one & two/ü+%.txt": b"awkward"}) as server:
        yield server


@pytest.mark.parametrize(
    ("asked", "status", "content_range", "body"),
    [
        (None, 200, None, b"body 7"),
        ("bytes=0-5", 206, "bytes 0-5/6", b"body 7"),
        ("bytes=1-2", 206, "bytes 1-2/6", b"od"),
        ("bytes=5-", 206, "bytes 5-5/6", b"7"),
        ("bytes=-3", 206, "bytes 3-5/6", b"y 7"),
        ("bytes=2-99", 206, "bytes 2-5/6", b"dy 7"),
        ("bytes=6-7", 416, None, None),
    ],
)
def test_object_or_a_range_of_it_is_sent_with_its_headers(
    server, asked, status, content_range, body
):
    answered, headers, content = ask(
        server, "GET", "/bucket/many/007.bin", {"Range": asked} if asked else {}
    )
    assert (answered, headers["Content-Range"]) == (status, content_range)
    assert body is None or (content, headers["ETag"]) == (
        body,
        f'"{hashlib.md5(b"body 7").hexdigest()}"',
    )


def test_obstore_lists_reads_writes_and_deletes():
    with ObjectServer({"one & two/ü+%.txt": b"awkward", "a": b"abcdef"}) as server:
        store = from_url(server.url, **server.store_options)
        assert len(obstore.list(store).collect()) == 2
        assert bytes(obstore.get(store, "one & two/ü+%.txt").bytes()) == b"awkward"
        assert obstore.head(store, "a")["size"] == 6
        obstore.put(store, "new", b"fresh")
        server.put("a b", bytes(3 << 20))
        server.delete("a b")
        plain = from_url(server.http_url, client_options={"allow_http": True})
        assert bytes(obstore.get_range(plain, "new", start=1, length=3)) == b"res"
        with pytest.raises(FileNotFoundError):
            obstore.get(store, "a b")
        assert server.requests() == {"GET": 3, "HEAD": 1, "LIST": 1, "PUT": 2, "DELETE": 1}


def test_close_reaps_the_process_frees_the_port_and_is_idempotent():
    server = ObjectServer({"a": b"1"}).start()
    port, pid = int(server.endpoint.rpartition(":")[2]), server._process.pid
    server.close()
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with pytest.raises(RuntimeError, match="make another"):
        server.start()


def test_server_ends_when_its_parent_is_killed():
    code = "from object_server import ObjectServer; s = ObjectServer().start(); print(s.endpoint, flush=True); input()"
    command, path = (
        [sys.executable, "-c", code],
        {**os.environ, "PYTHONPATH": str(ROOT / "examples")},
    )
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path
    ) as parent:
        port = int(parent.stdout.readline().decode().strip().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            os.kill(parent.pid, signal.SIGKILL)
            assert connection.recv(1) == b"", (
                "the server's end of the connection closes when the server ends"
            )
