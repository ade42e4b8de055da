"""Objects of a server without ranges: streamed, requested again after a truncated body, and kept for other parts."""

import asyncio
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace._core.retry_policy import RetryPolicy
from headrace._core.store.client import StoreClient
from headrace._core.store.head import Head
from headrace._core.store.whole_objects import WholeObjects
from headrace.errors import ObjectChangedError, StoreError

pytestmark = pytest.mark.filterwarnings("ignore:.*does not do ranges")

BODY = bytes(range(256)) * 4096  # 1 MiB
QUICK = RetryPolicy(initial_backoff=0.01)


class Plain(BaseHTTPRequestHandler):
    """Sends the whole body for any range, or as many bytes of it as the test sets."""

    def do_GET(self):
        body = self.server.bodies[0] if len(self.server.bodies) == 1 else self.server.bodies.popleft()
        cut = self.server.cuts.popleft() if self.server.cuts and "Range" not in self.headers else len(body)
        self.server.whole += "Range" not in self.headers
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", self.server.modified)
        self.end_headers()
        self.wfile.write(body[:cut])

    def log_message(self, *said):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Plain) as server:
        server.bodies, server.cuts, server.whole = deque([BODY]), deque(), 0
        server.modified = "Thu, 01 Jan 1970 00:00:00 GMT"
        server.handle_error = lambda request, address: None  # a client that goes away in mid-body
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server):
    return f"http://127.0.0.1:{server.server_port}"


def source_of(server):
    return StoreClient(url_of(server), {}, retry=QUICK)


async def streamed(source, *, head=None, done=0):
    stream = source.stream("a", 100_000, head=head, skip=done)
    pieces = []
    while (piece := await stream.read()) is not None:
        pieces.append(bytes(piece))
    return b"".join(pieces)


async def test_a_stream_gives_all_bytes_by_one_request(server):
    assert await streamed(source_of(server)) == BODY
    assert server.whole == 1


@pytest.mark.parametrize("done", [0, 1, 99_999, len(BODY) - 1, len(BODY)])
async def test_a_stream_skips_bytes_already_read(server, done):
    assert await streamed(source_of(server), done=done) == BODY[done:]


@pytest.mark.parametrize("cuts", [[0], [1], [100_000], [500_001], [len(BODY) - 1], [700_000, 300_000, 900_000]])
async def test_a_truncated_body_is_requested_again_and_no_byte_is_repeated(server, cuts):
    server.cuts.extend(cuts)
    assert await streamed(source_of(server)) == BODY
    assert server.whole == len(cuts) + 1


async def test_a_body_that_is_always_truncated_is_an_error(server):
    server.cuts.extend([500_000] * 50)
    with pytest.raises(StoreError, match="'a'"):
        await streamed(source_of(server))


async def test_an_object_that_changes_between_two_attempts_is_an_error(server):
    server.cuts.append(500_000)
    server.bodies = deque([BODY, BODY[:-1]])
    with pytest.raises(ObjectChangedError):
        await streamed(source_of(server))
    with pytest.raises(ObjectChangedError):
        await streamed(source_of(server), head=Head("a", 3, None))


async def test_parts_of_one_object_are_of_one_request(server):
    source = source_of(server)
    with pytest.warns(UserWarning, match="does not do ranges"):
        reads = await asyncio.gather(*(source.read("a", start, start + 10) for start in range(0, 50, 10)))
    assert [bytes(read) for read in reads] == [BODY[start : start + 10] for start in range(0, 50, 10)]
    assert bytes((await source.read_end("a", 5)).data) == BODY[-5:]
    assert server.whole == 1


async def test_a_kept_object_is_read_again_for_another_version(server):
    wholes = WholeObjects(StoreClient(url_of(server), {}, retry=QUICK))
    await wholes.part("a", size=None, etag=None, modified=None, index=None)
    with pytest.raises(ObjectChangedError):
        await wholes.part("a", size=3, etag=None, modified=None, index=None)


async def test_a_kept_object_is_read_again_where_its_time_is_another(server):
    server.modified = "Mon, 01 Jan 2024 00:00:01 GMT"
    source = source_of(server)
    with pytest.warns(UserWarning, match="does not do ranges"):
        head = (await source.read_start("a", 10)).head
    before = server.whole
    with pytest.raises(ObjectChangedError):
        await source.read("a", 0, 10, size=head.size, modified="2024-01-01T00:00:02+00:00")
    assert server.whole == before + 1


async def test_most_recent_objects_are_kept(server, monkeypatch):
    monkeypatch.setattr("headrace._core.store.whole_objects.CAPACITY", 2 * len(BODY))
    wholes = WholeObjects(StoreClient(url_of(server), {}, retry=QUICK))
    for key in "abcacb":
        await wholes.part(key, size=None, etag=None, modified=None, index=None)
    assert server.whole == 5, "a, b, c, then a again since c took its place, and b"


async def test_an_empty_object_does_not_say_that_the_store_has_no_ranges(server):
    server.bodies = deque([b""])
    source = source_of(server)
    assert bytes((await source.read_start("a", 10)).data) == b""
    assert not source.ranges_ignored
