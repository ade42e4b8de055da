"""A store that misbehaves, over real sockets: every sample is delivered once and whole, or reported with its index."""

import asyncio
import collections
import contextlib
import datetime
import hashlib
import http.client
import io
import logging
import pickle
import socket
import traceback
import zlib

import pytest
import torch

import headrace as hr
from object_server import Fault, ObjectServer
from tests.faults.ledger import QUICK, SAMPLES, SIZE, Ledger, body_of, checked_number, contents
from tests.faults.watching import drain, once_each

LARGE = bytes(range(256)) * 4 * 20_000  # 20 MB are more than one part


@pytest.fixture(scope="module")
def servers():
    others = {"odd/empty": b"", "odd/large": LARGE, **{f"many/{i:04}": b"x" for i in range(2500)}}
    with ObjectServer({**contents(), **others}) as server:
        yield server


@pytest.fixture
def server(servers):
    servers.misbehave()
    yield servers
    servers.misbehave()


@pytest.fixture(params=["thread", "process"])
def placement(request):
    return request.param


@pytest.fixture
def network(case, server, placement):
    """Run a program with a `Ledger`, in each placement."""
    # A store that is dropped closes its idle connections on threads of its own.
    return lambda program: case(with_ledger(program, server, placement), within=5.0)


@pytest.fixture
def local(case, server):
    """The same in a thread only: most faults end in the store's client, which is the same in each placement."""
    return lambda program: case(with_ledger(program, server, "thread"), within=5.0)


def with_ledger(program, server, placement):
    url, options = server.url, server.store_options
    return lambda: program(Ledger(url, options, placement))


def requests(server, key="train/0007"):
    return [seen for seen in server.seen() if seen.key == key]


# Refusals


def test_two_503s_are_retried(network, server):
    server.misbehave(Fault("status", times=2, per_key=True))
    network(Ledger.assert_all_delivered)
    assert len(requests(server)) == 3


TRANSIENT = {
    **{
        status: Fault("status", key="train/0007", times=1, status=status)
        for status in (408, 425, 429, 500, 502, 504, 520)
    },
    "an error page with status 200": Fault("page", key="train/0007", times=2, body="<html>Please wait</html>"),
    **{f"truncated at {at}": Fault("cut", key="train/0007", times=1, at=at) for at in (0, 1, SIZE - 1)},
    "another range": Fault("misplaced", key="train/0007", times=1),
}


@pytest.mark.parametrize("fault", TRANSIENT, ids=str)
def test_transient_faults_are_retried(local, server, fault):
    server.misbehave(TRANSIENT[fault])
    local(Ledger.assert_all_delivered)
    assert len(requests(server)) == 1 + TRANSIENT[fault].times


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "StoreError"),
        (401, "StoreError"),
        (403, "StoreError"),
        (404, "ObjectNotFoundError"),
        (412, "ObjectChangedError"),
        (416, "ObjectChangedError"),
        (501, "StoreError"),
    ],
)
def test_permanent_statuses_are_reported_without_retry(local, server, status, kind):
    server.misbehave(Fault("status", key="train/0007", status=status))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects())
        assert type(error).__name__ == kind, error
        assert error.status == status
        assert error.attempts == 1

    local(program)
    assert len(requests(server)) == 1


def test_permanent_503_is_reported_after_max_attempts(network, server):
    server.misbehave(Fault("status", key="train/0007", body="<Code>SlowDown</Code>"))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects(retry=hr.RetryPolicy(max_attempts=4, initial_backoff=0.01)))
        assert error.key == "0007"
        assert error.index == 7
        assert error.attempts == 4
        assert error.status == 503
        for word in ("'0007'", "index 7", "4 attempts in", "SlowDown", "s3://bucket/train"):
            assert word in str(error), str(error)

    network(program)
    assert len(requests(server)) == 4


def test_retry_of_the_loader_takes_precedence_over_its_dataset(network, server):
    server.misbehave(Fault("status", key="train/0007"))

    def program(ledger) -> None:
        dataset = ledger.objects()
        for retry, attempts in ((1, 1), (hr.RetryPolicy(max_attempts=2, initial_backoff=0.01), 2)):
            assert ledger.failure(dataset, retry=retry).attempts == attempts

    network(program)


def test_no_request_is_made_before_retry_after(local, server):
    server.misbehave(
        Fault("status", key="train/0003", times=1, status=429, headers={"Retry-After": "1"}),
        Fault("status", method="HEAD", status=429, headers={"Retry-After": "1"}),
    )

    def program(ledger) -> None:
        ledger.assert_all_delivered(ledger.objects(), batch_size=1, concurrency=1)

    local(program)
    refused = next(seen for seen in server.seen() if seen.fault)
    later = [seen.at - refused.at for seen in server.seen() if seen.at > refused.at]
    assert later, "nothing was tried again"
    assert min(later) >= 1.0
    (question,) = server.seen("HEAD")
    assert question.key == "train/0003"


def test_retry_after_beyond_the_deadline_is_reported_at_once_and_delays_no_other_sample(local, server):
    server.misbehave(
        Fault("status", key="train/0003", status=503, headers={"Retry-After": "3600"}),
        Fault("status", method="HEAD", status=503, headers={"Retry-After": "3600"}),
    )

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects(), index=3, concurrency=1)
        assert (error.status, error.attempts) == (503, 1), error

    local(program)
    assert len(requests(server, "train/0003")) == 1


# Bodies


def test_error_page_with_status_200_is_never_a_sample(local, server):
    server.misbehave(Fault("page", key="train/0007", body="<html>Please log in</html>"))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects())
        assert isinstance(error, hr.errors.ObjectChangedError), error

    local(program)


@pytest.mark.parametrize("kind", ["cut", "reset"])
@pytest.mark.parametrize("etag", [True, False], ids=["with an entity tag", "without"])
def test_truncated_body_is_retried(local, server, kind, etag):
    server.misbehave(Fault(kind, times=2, per_key=True, at=700, etag=etag))

    def program(ledger) -> None:
        ledger.assert_all_delivered(ledger.objects(if_match=etag))

    local(program)
    assert len(requests(server)) == 3


def test_body_that_is_always_truncated_is_reported(local, server):
    server.misbehave(Fault("cut", key="train/0007", at=700))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects(retry=hr.RetryPolicy(max_attempts=3, initial_backoff=0.01)))
        assert error.attempts == 3, error
        assert "cut short" in str(error), error

    local(program)


def test_connection_reset_before_the_response_is_retried(local, server):
    server.misbehave(Fault("refuse", times=2, per_key=True))
    local(Ledger.assert_all_delivered)


def test_flipped_bit_is_found_by_a_given_checksum(local, server):
    server.misbehave(Fault("flip", times=1, per_key=True, at=3))

    def program(ledger) -> None:
        def sums(key):
            return "sha256:" + hashlib.sha256(body_of(int(key))).hexdigest()

        ledger.assert_all_delivered(ledger.objects(checksums=sums))

    local(program)


def test_permanent_checksum_mismatch_is_reported(local, server):
    server.misbehave(Fault("flip", key="train/0007", at=3))

    def program(ledger) -> None:
        def sums(key):
            return f"crc32:{zlib.crc32(body_of(int(key))):08x}"

        error = ledger.failure(ledger.objects(checksums=sums))
        assert type(error) is hr.errors.ChecksumError, error
        assert error.attempts == 3

    local(program)


def test_objects_are_read_whole_from_a_store_that_ignores_ranges(network, server):
    server.misbehave(Fault("whole"))
    network(Ledger.assert_all_delivered)
    # Each fetcher in flight at the start may find out for itself, once.
    assert sum(bool(seen.span) for seen in server.seen()) <= SAMPLES
    assert len(server.seen()) <= 2 * SAMPLES


def test_wrong_range_is_never_a_sample(local, server):
    server.misbehave(Fault("misplaced", key="train/0007"))

    def program(ledger) -> None:
        ledger.failure(ledger.objects())

    local(program)


# Changes


@pytest.fixture
def restored(server):
    """The server; afterwards its object train/0007 is as before."""
    yield server
    server.put("train/0007", body_of(7))


def test_object_overwritten_between_attempts_is_an_error_with_its_key(network, restored):
    # The first attempt is cut short, and meanwhile another object of the same length is stored.
    restored.misbehave(Fault("overwrite", key="train/0007", times=1, at=700, body="x" * SIZE))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects())
        assert type(error) is hr.errors.ObjectChangedError, error
        assert error.key == "0007", error
        assert error.attempts == 2, error
        assert error.status == 412, error

    network(program)


def test_object_overwritten_between_attempts_is_never_a_mixture_of_both(local, restored):
    restored.misbehave(Fault("overwrite", key="train/0007", times=1, at=700, body="x" * SIZE))

    def program(ledger) -> None:
        sample = ledger.objects(if_match=False)[7]  # without the condition: the new object
        assert bytes(sample.data) == b"x" * SIZE

    local(program)


def test_changed_object_is_found_in_a_store_that_ignores_if_match(local, server):
    server.misbehave(Fault("retag", key="train/0007"))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects())
        assert type(error) is hr.errors.ObjectChangedError, error

    local(program)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("DELETE",), "ObjectNotFoundError"),
        (("PUT", "x" * SIZE), "ObjectChangedError"),
        (("PUT", "longer" * SIZE), "ObjectChangedError"),
        (("PUT", "shorter"), "ObjectChangedError"),
        (("PUT", ""), "ObjectChangedError"),
    ],
    ids=["deleted", "another of its length", "a longer one", "a shorter one", "an empty one"],
)
def test_object_changed_in_mid_epoch_is_an_error_with_its_key(local, server, change, kind):
    def program(ledger) -> None:
        def request(method, body=None):
            connection = http.client.HTTPConnection(ledger.options["endpoint"].removeprefix("http://"))
            connection.request(method, "/bucket/train/0023", body)
            assert connection.getresponse().status < 300
            connection.close()

        with ledger.loader(ledger.objects(), concurrency=2, on_error="skip") as loader:
            delivered = collections.Counter()
            for number, batch in enumerate(loader):
                delivered.update(batch.tolist())
                if number == 2:  # later batches have been fetched, but not the last
                    request(*change)
            (failure,) = loader.stats().skipped
            assert loader.stats().replaced_batches == 1
        assert delivered == once_each(range(23), [0]), delivered  # the last batch is replaced
        assert (failure.index, failure.key, failure.error) == (23, "0023", kind), failure

    try:
        local(program)
    finally:
        server.put("train/0023", body_of(23))


# Silence and restarts


def test_request_without_any_response_is_retried(network, server):
    server.misbehave(Fault("silence", key="train/0007", times=1))

    def program(ledger) -> None:
        ledger.assert_all_delivered(ledger.objects(timeout=1.0))

    network(program)
    assert len(requests(server)) == 2


def test_object_without_any_response_is_reported_within_the_deadline(local, server):
    server.misbehave(Fault("silence", key="train/0007"))

    def program(ledger) -> None:
        policy = hr.RetryPolicy(initial_backoff=0.01, deadline=0.5)
        error = ledger.failure(ledger.objects(timeout=0.3, retry=policy))
        assert type(error) is hr.errors.StoreUnreachableError, error
        assert error.elapsed < 5, error

    local(program)
    assert len(requests(server)) == 2


def test_slow_body_that_progresses_does_not_time_out(local, server):
    # Ten pieces, 0.15 s apart: in all longer than the time-out.
    server.misbehave(Fault("trickle", key="train/0007", seconds=0.15))

    def program(ledger) -> None:
        ledger.assert_all_delivered(ledger.objects(timeout=1.2))

    local(program)
    assert len(requests(server)) == 1


def test_refused_port_and_host_without_an_address_are_reported_after_three_attempts(local):
    def program(ledger) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        for nowhere in (f"http://127.0.0.1:{port}/d", "http://no-such-host.invalid/d"):
            error = ledger.failure(hr.ObjectDataset(hr.Store(nowhere, retry=QUICK), keys=["0000"]), index=0)
            assert type(error) is hr.errors.StoreUnreachableError, error
            assert error.attempts == 3, error

    local(program)


def test_server_restart_in_mid_epoch_loses_no_sample(network, server):
    # Prefetching covers less than the epoch: fetches after the fourth batch find the server gone.
    def program(ledger) -> None:
        host, _, port = ledger.options["endpoint"].removeprefix("http://").partition(":")

        def restart():
            with socket.create_connection((host, int(port))) as kept:
                connection = http.client.HTTPConnection(host, int(port))
                connection.request("PUT", "/_restart", "0.5")
                assert connection.getresponse().status == 204
                connection.close()
                with contextlib.suppress(ConnectionResetError):
                    assert kept.recv(1) == b""  # connections end after the listener

        dataset = ledger.objects(retry=hr.RetryPolicy(initial_backoff=0.05))
        delivered = collections.Counter()
        with ledger.loader(dataset, batch_size=2, concurrency=2) as loader:
            for number, batch in enumerate(loader):
                delivered.update(batch.tolist())
                if number == 3:
                    restart()
        assert delivered == collections.Counter(range(len(dataset))), delivered

    network(program)


def test_stale_idle_connection_loses_no_sample(network, server):
    server.misbehave(Fault("hang up", seconds=0.0))

    def program(ledger) -> None:
        ledger.assert_all_delivered(ledger.objects(), concurrency=4)

    network(program)


# Credentials


def test_expired_credentials_are_renewed_once(local, server):
    expired = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    server.misbehave(Fault("status", status=400, body=expired, unless=("x-amz-security-token", "new")))

    def program(ledger) -> None:
        given = []

        def provider():
            given.append(len(given))
            token = "old" if len(given) == 1 else "new"
            later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
            return {"access_key_id": "id", "secret_access_key": "hush", "token": token, "expires_at": later}

        signed = {**ledger.options, "skip_signature": False, "credential_provider": provider}
        dataset = hr.ObjectDataset(ledger.store(options=signed))
        ledger.assert_all_delivered(dataset, concurrency=4)
        assert 2 <= len(given) <= 3, given

    local(program)


def test_credentials_that_stay_expired_are_reported(local, server):
    expired = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    server.misbehave(Fault("status", key="train/0007", status=400, body=expired))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects())
        assert error.attempts == 2, error
        assert "credentials" in str(error), error

    local(program)
    assert len(requests(server)) == 2


# Odd sizes


def test_empty_and_large_objects_are_read_whole(network, server):
    server.misbehave(Fault("cut", key="odd/large", times=2, at=1_000_000))

    def program(ledger) -> None:
        dataset = hr.ObjectDataset(ledger.store("odd"))
        with ledger.loader(dataset, batch_size=None, transform=lambda s: (s.key, bytes(s.data))) as loader:
            read = dict(loader)
        assert read == {"empty": b"", "large": bytes(range(256)) * 4 * 20_000}, {k: len(v) for k, v in read.items()}

    network(program)
    parts = [seen for seen in server.seen() if seen.key == "odd/large"]
    assert len({seen.span for seen in parts}) == 3
    assert len(parts) == 5, "three parts, two of them cut once"


@pytest.mark.parametrize(
    "fault",
    [
        # After two parts the object has another entity tag: the answer of a store that checks `If-Match`,
        Fault("status", key="odd/large", skip=2, status=412),
        # of one that ignores it,
        Fault("retag", key="odd/large", skip=2),
        # and an object that really was overwritten.
        Fault("overwrite", key="odd/large", skip=2, times=1, body="another"),
    ],
    ids=lambda fault: fault.kind,
)
def test_large_object_overwritten_while_it_is_read_is_never_a_mixture(local, server, fault):
    def program(ledger) -> None:
        dataset = hr.ObjectDataset(ledger.store("odd"))
        with pytest.raises(hr.errors.ObjectChangedError) as caught:
            dataset[1]
        assert (caught.value.key, caught.value.index) == ("large", 1)

    server.misbehave(fault)
    try:
        local(program)
    finally:
        if fault.kind == "overwrite":
            server.put("odd/large", LARGE)


# Listings


def list_many(ledger):
    assert list(hr.ObjectDataset(ledger.store("many")).keys) == [f"{i:04}" for i in range(2500)]


def test_listing_that_fails_half_way_continues_after_its_last_page(local, server):
    server.misbehave(Fault("status", method="LIST", skip=1, times=2))

    local(list_many)
    assert len(server.seen("LIST")) == 5, "three pages and two failures"


def test_repeated_page_of_a_listing_gives_no_sample_twice(local, server):
    server.misbehave(Fault("repeat", method="LIST"))
    local(list_many)


# Load


def test_bandwidth_limit_loses_no_sample(local, server):
    server.misbehave(Fault("bandwidth", rate=100_000))

    def program(ledger) -> None:
        ledger.assert_all_delivered(ledger.objects(timeout=0.5))

    local(program)


def test_retries_of_all_fetchers_share_one_budget(local, server):
    # 24 objects that always fail, ten attempts each, would be 240 requests; the budget allows 5 retries in this time.
    server.misbehave(Fault("status", status=500))

    def program(ledger) -> None:
        policy = hr.RetryPolicy(initial_backoff=0.0, burst=4, deadline=2.0)
        _, failures = ledger.epoch(ledger.objects(retry=policy), concurrency=24)
        assert len(failures) == len(ledger.objects()), failures

    local(program)
    assert len(server.seen()) <= SAMPLES + 4 + 4


def test_throttling_store_lowers_auto_concurrency_and_costs_few_extra_requests(case, placement):
    many = {f"train/{i:04}": body_of(i) for i in range(3000)}
    with ObjectServer(many, latency=0.02) as store:
        store.misbehave(Fault("throttle", rate=800.0, at=20))  # 64 in flight would be 3,200 a second
        case(with_ledger(read_throttled, store, placement), within=5.0)
        asked = store.seen()
    assert any(seen.fault == "throttle" for seen in asked), "the store has throttled"
    assert len(asked) <= 1.3 * len(many)


class CountsFetches(hr.AsyncDataset):
    """Samples with the number of fetches in flight when their own started.

    The first wait until `at_first` of them are in flight: the store may refuse one before the last has begun.
    """

    def __init__(self, objects, at_first):
        self.objects, self.running, self.at_first = objects, 0, at_first
        self.begun = asyncio.Event()

    def __len__(self):
        return len(self.objects)

    async def aget(self, index):
        self.running += 1
        in_flight = self.running
        if in_flight == self.at_first:
            self.begun.set()
        try:
            await self.begun.wait()
            return await self.objects.aget(index), in_flight
        finally:
            self.running -= 1


def checked_with_count(fetched):
    sample, in_flight = fetched
    return checked_number(sample), in_flight


def read_throttled(ledger):
    dataset = CountsFetches(ledger.objects(retry=hr.RetryPolicy()), at_first=64)
    with ledger.loader(dataset, batch_size=25, transform=checked_with_count) as loader:
        delivered = [pair for batch in loader for pair in zip(*(column.tolist() for column in batch), strict=True)]
    assert collections.Counter(number for number, _ in delivered) == once_each(range(3000))
    # The initial limit, or twice that if the machine was too slow for the store to throttle at once.
    assert max(in_flight for _, in_flight in delivered[:500]) >= 64
    assert max(in_flight for _, in_flight in delivered[-500:]) < 64, delivered[-500:]


# Hedging


class Controlled(hr.AsyncDataset):
    """Sample 200 is fetched by `attempt`, which is given the attempt's number; all others are returned at once."""

    def __init__(self, attempt):
        self.attempt, self.attempts, self.cancelled = attempt, collections.Counter(), []

    def __len__(self):
        return 256

    async def aget(self, index):
        self.attempts[index] += 1
        number = self.attempts[index]
        if index == 200:
            try:
                return await self.attempt(self, number)
            except asyncio.CancelledError:
                self.cancelled.append(number)
                raise
        await asyncio.sleep(0.001)  # latency
        return index


async def first_never_ends(dataset, number):
    if number == 1:
        await asyncio.Event().wait()
    return 200


async def both_answer(dataset, number):
    if number == 1:
        dataset.both = asyncio.get_running_loop().create_future()
    else:
        dataset.both.set_result(200)
    return await dataset.both  # the two are woken in the same turn of the loop


async def first_ignores_cancellation(dataset, number):
    with contextlib.suppress(asyncio.CancelledError):
        if number == 1:
            await asyncio.Event().wait()
        return 200
    return 999


async def second_fails(dataset, number):
    if number > 1:
        dataset.second.set()
        raise ValueError("the second")
    dataset.second = asyncio.Event()
    await dataset.second.wait()
    return 200


@pytest.mark.parametrize("attempt", [first_never_ends, both_answer, first_ignores_cancellation, second_fails])
def test_hedged_sample_is_delivered_once_whatever_its_attempts_do(case, attempt):
    def program() -> None:
        dataset = Controlled(attempt)
        with hr.DataLoader(dataset, batch_size=16, hedge="auto", placement="thread", concurrency=8) as loader:
            assert drain(loader) == (once_each(range(256)), [])
            counts = loader.stats().requests
        assert dataset.attempts[200] >= 2
        assert 1 <= counts.hedges <= 0.05 * 256
        if attempt is first_never_ends:
            assert counts.hedges_won >= 1, (counts, dataset.cancelled)
            assert dataset.cancelled == [1], (counts, dataset.cancelled)

    case(program)


async def first_fails(dataset, number):
    if number > 1:
        dataset.second.set()
        await asyncio.Event().wait()
    dataset.second = asyncio.Event()
    await dataset.second.wait()
    raise ValueError("the first")


def test_error_of_the_first_attempt_is_reported_once(case):
    def program() -> None:
        dataset = Controlled(first_fails)
        with hr.DataLoader(dataset, batch_size=16, hedge="auto", on_error="skip", concurrency=8) as loader:
            delivered, errors = drain(loader)
            (failure,) = loader.stats().skipped
        assert (failure.index, failure.message, errors) == (200, "the first", [])
        assert delivered + collections.Counter([200]) == once_each(range(256))
        assert set(dataset.cancelled) == set(range(2, dataset.attempts[200] + 1)), "an attempt was not cancelled"

    case(program)


def test_stalling_store_loses_no_sample_and_gets_few_extra_requests(network, server):
    server.misbehave(Fault("stall", share=0.04, seconds=0.5))

    def program(ledger) -> None:
        dataset = ledger.objects()
        planned = list(range(len(dataset))) * 20
        with ledger.loader(dataset, batch_size=4, sampler=planned, hedge="auto") as loader:
            delivered, errors = drain(loader)
            counts = loader.stats().requests
        assert not errors
        assert delivered == collections.Counter(planned)
        assert counts.hedges <= 0.05 * 480, counts
        assert 480 <= counts.requests <= 1.05 * 480, counts

    network(program)


# Secrets


def test_secrets_in_url_headers_and_credentials_are_shown_nowhere(local, server):
    server.misbehave(Fault("status", key="train/0007", status=403, body="<Code>Denied</Code>"))

    def program(ledger) -> None:
        log = io.StringIO()
        logging.basicConfig(stream=log, level=logging.DEBUG, force=True)
        host = ledger.options["endpoint"].removeprefix("http://")
        keys = [f"train/{i:04}" for i in range(24)]
        headers = {"default_headers": {"x-api-key": "canary-header"}}
        signed = {
            "skip_signature": False,
            "access_key_id": "canary-id",
            "secret_access_key": "canary-secret",
            "token": "canary-token",
            "client_options": {**ledger.options["client_options"], **headers},
        }
        datasets = [
            hr.ObjectDataset(
                hr.Store(
                    f"http://me:canary-password@{host}/bucket?sig=canary-query",
                    options={"client_options": headers},
                    retry=QUICK,
                ),
                keys=keys,
            ),
            hr.ObjectDataset(ledger.store(options={**ledger.options, **signed})),
        ]
        shown = []
        for dataset in datasets:
            with hr.DataLoader(dataset, batch_size=4, collate_fn=torch.tensor, transform=lambda s: 0) as loader:
                _, (error,) = drain(loader)
            with hr.DataLoader(dataset, batch_size=4, collate_fn=len, on_error="skip", placement="thread") as loader:
                with contextlib.suppress(hr.errors.TooManySkippedError):
                    list(loader)
                stats = loader.stats()
                (failure,) = stats.skipped
                shown += [repr(dataset), repr(dataset._store), repr(loader), repr(stats), str(failure), repr(failure)]
                assert error.__cause__ is None
                assert error.__context__ is None
                shown += [repr(vars(error)), "".join(traceback.format_exception(error))]
                shown.append(repr(pickle.dumps(error)))
        shown.append(log.getvalue())
        seen = [text for text in shown if "canary" in text]
        assert not seen, seen[0]

    stderr = local(program)
    assert "canary" not in stderr
