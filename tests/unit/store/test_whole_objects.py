"""A server that ignores ranges: small objects are read whole for a part of them, large ones are an error."""

import warnings
from collections import deque

import pytest

import headrace as hr
from headrace._store.head import Head
from headrace._store.store import LARGEST_WHOLE
from headrace.errors import ObjectChangedError
from tests.answers import answering

pytestmark = pytest.mark.filterwarnings("ignore:.*does not do ranges")

BODY = bytes(range(256)) * 4096  # 1 MiB
QUICK = hr.RetryPolicy(initial_backoff=0.01)


class Plain:
    """Sends the whole body for any range, or as many bytes of it as `cuts` says."""

    modified = "Mon, 01 Jan 2024 00:00:01 GMT"

    def __init__(self, body=BODY):
        self.body = body
        self.cuts = deque()
        self.asked = []

    def __call__(self, request):
        self.asked.append(request.headers.get("Range"))
        cut = self.cuts.popleft() if self.cuts else len(self.body)
        request.send_response(200)
        request.send_header("Content-Length", str(len(self.body)))
        request.send_header("Last-Modified", self.modified)
        request.end_headers()
        request.wfile.write(self.body[:cut])
        request.close_connection = cut < len(self.body)


async def test_part_is_cut_out_of_the_whole_object_with_one_warning():
    server = Plain()
    with answering(server) as url:
        client = hr.Store(url, retry=QUICK)
        with pytest.warns(UserWarning, match="does not do ranges"):
            assert (
                bytes(await client.read("a", 10, 20, head=Head("a", len(BODY), None)))
                == BODY[10:20]
            )
        with warnings.catch_warnings(action="error"):
            assert bytes(await client.read("a", 0, 10)) == BODY[:10]
        assert bytes((await client.read_end("a", 5)).data)[-5:] == BODY[-5:]
    assert server.asked[2:] == [None] * (len(server.asked) - 2), (
        "known from the first request on"
    )


@pytest.mark.parametrize("cuts", [[0], [1, 500_001], [len(BODY) - 1]])
def test_truncated_body_of_a_shard_is_requested_again(cuts):
    server = Plain(b"".join(b"%0799d\n" % number for number in range(300)))
    with answering(server) as url:
        server.cuts.extend([0, *cuts])  # the first, for a range, is not read
        lines = list(
            hr.LinesDataset(
                f"{url}/a.txt", store=hr.Store(url, retry=QUICK), chunk_bytes=50_000
            )
        )
    assert lines == [f"{number:0799}" for number in range(300)]


async def test_version_is_compared():
    server = Plain()
    with answering(server) as url:
        client = hr.Store(url, retry=QUICK)
        head = (await client.read_start("a", 10)).head
        server.modified = "Mon, 01 Jan 2024 00:00:02 GMT"
        with pytest.raises(ObjectChangedError):
            await client.read("a", 0, 10, head=head)


@pytest.mark.parametrize("read", ["read", "read_start"])
async def test_large_object_is_an_error_that_has_its_size(read):
    def answer(request):
        request.send_response(200)
        request.send_header("Content-Length", str(LARGEST_WHOLE + 1))
        request.end_headers()

    with answering(answer) as url:
        client = hr.Store(url, retry=QUICK)
        with pytest.raises(
            hr.StoreError, match=f"all {LARGEST_WHOLE + 1} bytes come.* 64 MiB"
        ) as failed:
            await (
                client.read("a", 0, 10) if read == "read" else client.read_start("a", 10)
            )
    assert failed.value.attempts == 1
