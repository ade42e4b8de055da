"""Answers that cannot be read say why."""

import pytest

import headrace as hr
from headrace.errors import StoreError, StoreUnreachableError
from tests.answers import answering

BODY = b"x" * 1000
QUICK = hr.RetryPolicy(max_attempts=5, initial_backoff=0.001)


def chunked(request):
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    request.wfile.write(b"3e8\r\n" + BODY + b"\r\n0\r\n\r\n")


def without_a_total(request):
    request.send(206, BODY, {"Content-Range": "bytes 0-999/*"})


def with_a_header_that_is_not_ascii(request):
    request.send_object(BODY, {"ETag": '"caf\u00e9"'})


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (chunked, "Content-Length Header missing"),
        (without_a_total, r"CONTENT_RANGE .*bytes 0-999/\*"),
        (with_a_header_that_is_not_ascii, "non-ASCII"),
    ],
)
def test_unusable_answer_is_reported_at_once_with_its_header(answer, named):
    with answering(answer) as url, pytest.raises(StoreError, match=f"failed: .*{named}") as failed:
        hr.ObjectDataset(hr.Store(url, retry=QUICK), keys=["x"])[0]
    assert not isinstance(failed.value, StoreUnreachableError)
    assert failed.value.attempts == 1
