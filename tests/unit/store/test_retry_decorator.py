"""A user's own function, tried again by the rules that a store's requests are tried again by."""

import asyncio
import datetime
import pickle
import socket
import urllib.error
import urllib.request

import aiohttp
import anyio.to_thread
import asyncpg
import boto3
import botocore.config
import cloudpickle
import httpx
import pytest
import redis.asyncio
import requests
from aiohttp import web

import headrace as hr
from headrace._core.store.driver_errors import classify_driver_error, retry_after_of
from headrace._core.store.errors import Cause
from headrace._core.store.request_stats import RequestStats, session_stats

QUICK = hr.RetryPolicy(max_attempts=4, initial_backoff=0.001, max_backoff=0.002)
PATIENT = 60.0
"""Seconds that a client waits where no time-out is expected: on a busy machine 0.1 s may pass before any answer."""


class Failing:
    """An async function that raises its errors first, one at each call."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self, result="done"):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return result


class Answer(Exception):
    def __init__(self, status, **more):
        super().__init__(status)
        self.status = status
        self.__dict__.update(more)


@pytest.mark.parametrize("error", [Answer(429), Answer(503), Answer(500), Answer(408), TimeoutError(),
                                   ConnectionResetError(), socket.gaierror()], ids=repr)  # fmt: skip
async def test_transient_error_is_retried(error):
    failing = Failing(error, error)
    assert await hr.retrying(QUICK)(failing)("a page") == "a page"
    assert failing.calls == 3


@pytest.mark.parametrize("error", [Answer(404), Answer(403), Answer(501), KeyError("id"), FileNotFoundError(),
                                   hr.StoreError("gone", url="s3://a", status=503)], ids=repr)  # fmt: skip
async def test_permanent_error_is_raised_at_once(error):
    failing = Failing(error)
    with pytest.raises(type(error)):
        await hr.retrying(QUICK)(failing)()
    assert failing.calls == 1


async def test_last_error_is_raised_itself_with_a_note():
    failing = Failing(*(Answer(503) for _ in range(9)))
    with pytest.raises(Answer) as caught:
        await hr.retrying(QUICK)(failing)()
    assert failing.calls == 4
    assert "failed 4 times in" in caught.value.__notes__[0]
    assert "HTTP status 503" in caught.value.__notes__[0]


async def test_cancellation_is_not_tried_again():
    failing = Failing(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await hr.retrying(failing)()
    assert failing.calls == 1


async def test_exception_types_of_on_are_retried():
    failing = Failing(KeyError(), Answer(503))
    assert await hr.retrying(QUICK, on=KeyError)(failing)() == "done"
    failing = Failing(KeyError(), ValueError())
    assert await hr.retrying(QUICK, on=(KeyError, ValueError))(failing)() == "done"


async def test_retry_if_decides_instead():
    failing = Failing(Answer(404), Answer(503))
    with pytest.raises(Answer, match="503"):
        await hr.retrying(QUICK, retry_if=lambda error: error.status == 404)(failing)()


async def test_loaders_policy_counts_where_none_is_given():
    session_stats.set(RequestStats(hr.RetryPolicy(max_attempts=2, initial_backoff=0.001)))
    failing = Failing(*(Answer(500) for _ in range(9)))
    with pytest.raises(Answer):
        await hr.retrying(failing)()
    assert failing.calls == 2
    with pytest.raises(Answer):
        await hr.retrying(3)(failing)()
    assert failing.calls == 5


async def test_attempts_and_refusals_are_counted_for_the_loader():
    session_stats.set(requests := RequestStats())
    await hr.retrying(QUICK)(Failing(Answer(429), TimeoutError(), Answer(500)))()
    counts = requests.take()
    assert (counts.requests, counts.retries, counts.throttled, counts.timed_out) == (4, 3, 1, 1)
    assert requests.throttle_events == 2


async def test_retry_after_holds_all_calls_of_the_function_back():
    began = asyncio.get_running_loop().time()
    failing = Failing(Answer(429, retry_after=0.2))
    fetch = hr.retrying(QUICK)(failing)
    first = asyncio.ensure_future(fetch())
    await asyncio.sleep(0)
    assert failing.calls == 1
    await asyncio.gather(first, fetch(), fetch())
    assert failing.calls == 4
    assert asyncio.get_running_loop().time() - began >= 0.2  # what was asked for


async def test_longer_retry_after_than_the_deadline_is_not_waited_for():
    failing = Failing(Answer(429, retry_after=3600), Answer(429, retry_after=3600))
    fetch = hr.retrying(failing)
    for _ in range(2):
        with pytest.raises(Answer):
            await fetch()
    assert failing.calls == 2


async def test_methods_and_functions_keep_their_names():
    class Rows(hr.AsyncDataset):
        @hr.retrying(on=ValueError)
        async def aget(self, index):
            """A row."""
            return index

    assert await Rows().aget(4) == 4
    assert (Rows.aget.__name__, Rows.aget.__doc__) == ("aget", "A row.")


def test_decorated_function_can_be_pickled():
    fetch = hr.retrying(QUICK)(Failing(Answer(503)))
    assert asyncio.run(pickle.loads(cloudpickle.dumps(fetch))()) == "done"


async def stream():
    yield 1


@pytest.mark.parametrize("wrong", [lambda: hr.retrying(QUICK)(3), lambda: hr.retrying(stream),
                                   lambda: hr.retrying(on="ValueError"), lambda: hr.retrying(on=(KeyboardInterrupt,)),
                                   lambda: hr.retrying(retry_if=3), lambda: hr.retrying("3")])  # fmt: skip
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(TypeError):
        wrong()


@pytest.fixture(scope="module")
def server():
    """A real server: ``/429`` answers with that status and Retry-After, ``/hang`` never, ``/cut`` half a body."""
    from headrace._core.eventloop.loop_thread import LoopThread

    async def answer(request):
        what = request.match_info["what"]
        if what == "hang":
            await asyncio.get_running_loop().create_future()
        if what == "cut":
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b"half")
            request.transport.close()
            return response
        body = "<Error><Code>SlowDown</Code></Error>" if what == "503" else ""
        return web.Response(status=int(what), headers={"Retry-After": "7"}, text=body)

    async def start():
        app = web.Application()
        app.router.add_get("/{what}", answer)
        app.router.add_get("/{what}/key", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    loop = LoopThread("server")
    runner, url = loop.run(start())
    yield url
    loop.run(runner.cleanup())
    loop.close(1.0)


async def by_aiohttp(url, timeout=PATIENT):
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_read=timeout)) as session,
        session.get(url) as response,
    ):
        response.raise_for_status()
        await response.read()


async def by_httpx(url, timeout=PATIENT):
    async with httpx.AsyncClient(timeout=timeout) as client:
        (await client.get(url)).raise_for_status()


async def by_requests(url, timeout=PATIENT):
    def get():
        with requests.Session() as session:
            response = session.get(url, timeout=timeout)
            response.raise_for_status()

    await anyio.to_thread.run_sync(get)


async def by_urllib(url, timeout=PATIENT):
    def get():
        with urllib.request.urlopen(url, timeout=timeout) as response:
            response.read()

    try:
        await anyio.to_thread.run_sync(get)
    except urllib.error.HTTPError as error:
        error.close()
        raise


async def by_boto3(url, timeout=PATIENT):
    endpoint, _, bucket = url.rpartition("/")
    config = botocore.config.Config(
        retries={"total_max_attempts": 1}, read_timeout=timeout, s3={"addressing_style": "path"}
    )
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="local",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=config,
    )
    try:
        await anyio.to_thread.run_sync(lambda: client.get_object(Bucket=bucket, Key="key")["Body"].read())
    finally:
        client.close()


async def failure(call):
    try:
        await call
    except Exception as error:
        return error


CLIENTS = pytest.mark.parametrize("get", [by_aiohttp, by_httpx, by_requests, by_urllib, by_boto3])


@CLIENTS
@pytest.mark.parametrize(("status", "cause"), [(429, Cause.THROTTLED), (503, Cause.THROTTLED), (500, Cause.SERVER),
                                              (404, Cause.NOT_FOUND), (403, Cause.REFUSED)])  # fmt: skip
async def test_status_and_retry_after_are_found_in_the_errors_of_real_clients(server, get, status, cause):
    error = await failure(get(f"{server}/{status}"))
    verdict = classify_driver_error(error)
    assert (verdict.status, verdict.cause) == (status, cause)
    assert retry_after_of(error) == 7.0


@CLIENTS
async def test_refused_connection_is_tried_again(unused_tcp_port, get):
    error = await failure(get(f"http://127.0.0.1:{unused_tcp_port}/bucket"))
    cause = classify_driver_error(error).cause
    assert cause is Cause.UNREACHABLE or isinstance(error, urllib.error.URLError)


@pytest.mark.parametrize("get", [by_aiohttp, by_httpx, by_requests, by_boto3])
async def test_time_out_is_tried_again(server, get):
    assert classify_driver_error(await failure(get(f"{server}/hang", timeout=0.1))).cause is Cause.TIMED_OUT


@pytest.mark.parametrize("get", [by_aiohttp, by_httpx, by_requests])
async def test_body_cut_short_is_tried_again(server, get):
    assert classify_driver_error(await failure(get(f"{server}/cut"))).cause is Cause.CUT


async def test_refused_redis_and_postgres_connections_are_retried(unused_tcp_port):
    async with redis.asyncio.Redis(port=unused_tcp_port) as client:
        assert classify_driver_error(await failure(client.get("a"))).cause is Cause.UNREACHABLE
    refused = await failure(asyncpg.connect(host="127.0.0.1", port=unused_tcp_port, user="a", timeout=5))
    assert classify_driver_error(refused).cause is Cause.UNREACHABLE
    assert classify_driver_error(asyncpg.TooManyConnectionsError("sorry")).cause is Cause.THROTTLED


@pytest.mark.parametrize(("given", "seconds"), [(3, 3.0), (0.5, 0.5), (datetime.timedelta(seconds=2), 2.0),
                                               (-1, 0.0), ("soon", None), (None, None)])  # fmt: skip
def test_retry_after_attribute(given, seconds):
    assert retry_after_of(Answer(None, retry_after=given)) == seconds


def test_retry_after_attribute_alone_is_a_refusal():
    error = ValueError()
    error.retry_after = 1
    assert classify_driver_error(error).cause is Cause.THROTTLED
