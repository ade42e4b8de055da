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


def ended_by_the_connection(request):
    request.close_connection = True
    request.send_response(200)
    request.end_headers()
    request.wfile.write(BODY)


def without_a_total(request):
    request.send(206, BODY, {"Content-Range": "bytes 0-999/*"})


def without_a_range(request):
    request.send(206, BODY)


def with_a_wrong_time(request):
    request.send_object(BODY, {"Last-Modified": "yesterday"})


def with_a_header_that_is_not_ascii(request):
    request.send_object(BODY, {"ETag": '"caf\u00e9"'})


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (chunked, "no Content-Length"),
        (ended_by_the_connection, "no Content-Length"),
        (without_a_total, r"Content-Range .* 'bytes 0-999/\*'"),
        (without_a_range, "no Content-Range"),
        (with_a_wrong_time, "last modified 'yesterday'"),
        (with_a_header_that_is_not_ascii, "not ASCII"),
    ],
)
def test_unusable_answer_is_reported_at_once_with_its_header(answer, named):
    with answering(answer) as url, pytest.raises(StoreError, match=f"cannot be used: .*{named}") as failed:
        hr.ObjectDataset(hr.Store(url, retry=QUICK), keys=["x"])[0]
    assert not isinstance(failed.value, StoreUnreachableError)
    assert failed.value.attempts == 1


def test_server_that_does_not_speak_http_is_reported_with_what_came():
    def answer(request):
        request.close_connection = True
        request.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    with answering(answer) as url, pytest.raises(StoreUnreachableError, match=r"not valid HTTP \(Version\)"):
        hr.ObjectDataset(hr.Store(url, retry=QUICK), keys=["x"])[0]
