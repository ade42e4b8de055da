"""Answers that are no object: those that cannot be read say why, and error pages are found where that is possible."""

import pytest

import headrace as hr
from headrace.errors import ObjectNotFoundError, StoreError, StoreUnreachableError
from tests.answers import answering

BODY = b"x" * 1000
PAGE = b"<html>Please log in</html>"
QUICK = hr.RetryPolicy(max_attempts=5, initial_backoff=0.001)
HTML = {"Content-Type": "text/html; charset=utf-8"}


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


@pytest.mark.parametrize("size", [None, len(BODY)])
def test_error_page_among_ranges_is_never_a_sample(size, tmp_path):
    def answer(request):
        if request.path == "/1.jpg":
            request.send(200, PAGE, HTML)
        else:
            request.send_object(BODY)

    with answering(answer) as url:
        store = hr.Store(url, retry=QUICK)
        dataset = hr.ObjectDataset(store, keys=["0.jpg", "1.jpg", "2.jpg"])
        if size is not None:
            (tmp_path / "m.csv").write_text("key,size\n" + "".join(f"{n}.jpg,{size}\n" for n in range(3)))
            dataset = hr.ObjectDataset.from_manifest(store, tmp_path / "m.csv")
        assert dataset[0].data == BODY
        with pytest.raises(StoreError, match=r"1\.jpg") as failed:
            dataset[1]
        assert not isinstance(failed.value, ObjectNotFoundError)
        assert dataset[2].data == BODY


def test_error_page_that_does_not_stay_is_read_again_and_ranges_are_used_further():
    seen = []

    def answer(request):
        seen.append(request.headers.get("Range"))
        if len(seen) in (2, 3):
            request.send(200, PAGE, HTML)
        else:
            request.send_object(BODY)

    with answering(answer) as url:
        dataset = hr.ObjectDataset(hr.Store(url, retry=QUICK), keys=["0.jpg", "1.jpg", "2.jpg"])
        assert [dataset[index].data for index in range(3)] == [BODY] * 3
    assert seen.count(None) == 1, "of the second request for the page, to see what it is"


@pytest.mark.parametrize(
    ("key", "ranged", "whole"),
    [
        ("1.jpg", {}, {}),
        ("1.jpg", {}, {"Content-Type": "image/jpeg"}),
        ("1.html", {}, HTML),
        ("1", HTML, HTML),
    ],
)
def test_object_without_a_range_among_ranges_is_read(key, ranged, whole):
    def answer(request):
        if request.path == "/0":
            request.send_object(BODY, ranged)
        else:
            request.send(200, PAGE, whole)

    with answering(answer) as url:
        dataset = hr.ObjectDataset(hr.Store(url, retry=QUICK), keys=["0", key])
        assert dataset[0].data == BODY
        assert dataset[1].data == PAGE
