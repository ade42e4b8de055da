"""A store that misbehaves, over real sockets: every sample is delivered once and whole, or reported with its index."""

import asyncio
import collections
import contextlib
import datetime
import functools
import hashlib
import http.client
import socket
import zlib
from dataclasses import replace

import pytest

import headrace as hr
from object_server import Fault, ObjectServer
from tests.answers import answering
from tests.faults.ledger import (
    QUICK,
    SAMPLES,
    SIZE,
    Ledger,
    body_of,
    checked_number,
    contents,
)
from tests.faults.watching import Numbers, drain, ignored_deaths, once_each
from tests.programs import run_by

LARGE = bytes(range(256)) * 4 * 20_000  # 20 MB are more than one part


@pytest.fixture(scope="module")
def servers():
    others = {
        "odd/empty": b"",
        "odd/large": LARGE,
        **{f"many/{i:04}": b"x" for i in range(2500)},
    }
    with ObjectServer({**contents(), **others}) as server:
        yield server


@pytest.fixture
def server(servers):
    servers.misbehave()
    return servers


@pytest.fixture
def local(case, server):
    """Run a program with a `Ledger` in a thread: most faults end in the store's client, the same in each placement."""
    return functools.partial(run_with_ledger, case, server, "thread")


@pytest.fixture
def remote(case, server):
    """The same in a process of the loader's, from which errors and batches travel."""
    return functools.partial(run_with_ledger, case, server, "process")


def run_with_ledger(case, server, placement, program, faults=()):
    if faults:
        server.misbehave(*faults)
    url, options = server.url, server.store_options
    # A store that is dropped closes its idle connections on threads of its own.
    case(lambda: program(Ledger(url, options, placement)), within=5.0)


def requests(server, key="train/0007"):
    return [seen for seen in server.seen() if seen.key == key]


# One epoch, in which each fault has an object of its own

EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
TRANSIENT = [
    *(
        Fault("status", times=1, status=status)
        for status in (408, 425, 429, 500, 502, 504, 520)
    ),
    Fault("status", times=2, status=503),
    Fault("page", times=2, body="<html>Please wait</html>"),  # with status 200
    *(Fault("cut", times=1, at=at) for at in (0, 1, SIZE - 1)),
    Fault("cut", times=2, at=700),
    Fault("reset", times=2, at=700),
    Fault("cut", times=2, at=700, etag=False),
    Fault("reset", times=2, at=700, etag=False),
    Fault("refuse", times=2),  # a reset before the response
    Fault("misplaced", times=1),  # another range
]
PERMANENT = [  # with the class of the error, its attempts, its status
    (Fault("status", status=400), "StoreError", 1, 400),
    (Fault("status", status=401), "StoreError", 1, 401),
    (Fault("status", status=403), "StoreError", 1, 403),
    (Fault("status", status=404), "ObjectNotFoundError", 1, 404),
    (Fault("status", status=412), "ObjectChangedError", 1, 412),
    (Fault("status", status=416), "ObjectChangedError", 1, 416),
    (Fault("status", status=501), "StoreError", 1, 501),
    (Fault("status", status=400, body=EXPIRED), "StoreError", 2, 400),
    (Fault("page", body="<html>Please log in</html>"), "ObjectChangedError", None, None),
    (Fault("cut", at=700), "StoreError", 3, None),
    (Fault("misplaced"), None, None, None),
    (Fault("retag"), "ObjectChangedError", None, None),  # of the same length
    # The first attempt is cut short, and meanwhile another object of the same length is stored.
    (Fault("overwrite", times=1, at=700, body="x" * SIZE), "ObjectChangedError", 2, None),
]


def keyed(faults):
    """Each fault at an object of its own, the first at that of index 0."""
    return [
        replace(fault, key=f"train/{number:04}") for number, fault in enumerate(faults)
    ]


@pytest.mark.parametrize("if_match", [True, False])
def test_transient_faults_are_retried(local, server, if_match):
    server.misbehave(*keyed(TRANSIENT))

    def program(ledger) -> None:
        ledger.assert_all_delivered(ledger.objects(if_match=if_match))

    local(program)
    for fault in keyed(TRANSIENT):
        assert len(requests(server, fault.key)) == 1 + fault.times, fault


def test_permanent_faults_are_reported(remote, restored):
    restored.misbehave(*keyed(fault for fault, *_ in PERMANENT))
    expected = [
        ending for _, *ending in PERMANENT
    ]  # without faults, whose module other processes do not find

    def program(ledger) -> None:
        policy = hr.RetryPolicy(max_attempts=3, initial_backoff=0.01)
        _, failures = ledger.epoch(ledger.objects(retry=policy))
        assert list(failures) == list(range(len(expected))), failures
        for error, (kind, attempts, status) in zip(
            failures.values(), expected, strict=True
        ):
            assert kind is None or type(error).__name__ == kind, repr(error)
            assert attempts is None or error.attempts == attempts, (error, error.attempts)
            assert status is None or error.status == status, (error, error.status)
            assert error.key == f"{error.index:04}", error
        assert "credentials" in str(failures[7]), failures[7]
        assert "cut short" in str(failures[9]), failures[9]

    remote(program)
    for number, (fault, _, attempts, _) in enumerate(PERMANENT):
        assert attempts in (None, len(requests(restored, f"train/{number:04}"))), fault


def test_permanent_503_is_reported_after_max_attempts(remote, server):
    server.misbehave(Fault("status", key="train/0007", body="<Code>SlowDown</Code>"))

    def program(ledger) -> None:
        dataset = ledger.objects(
            retry=hr.RetryPolicy(max_attempts=4, initial_backoff=0.01)
        )
        error = ledger.failure(dataset)
        assert (error.key, error.index, error.attempts, error.status) == (
            "0007",
            7,
            4,
            503,
        ), error
        for word in (
            "'0007'",
            "index 7",
            "4 attempts in",
            "SlowDown",
            "s3://bucket/train",
        ):
            assert word in str(error), str(error)
        # A policy of the loader takes precedence over its dataset's.
        for retry, attempts in (
            (1, 1),
            (hr.RetryPolicy(max_attempts=2, initial_backoff=0.01), 2),
        ):
            assert ledger.failure(dataset, retry=retry).attempts == attempts

    remote(program)
    assert len(requests(server)) == 4 + 1 + 2


@run_by(
    "local",
    faults=[
        Fault("flip", key="train/0007", at=3),
        Fault("flip", times=1, per_key=True, at=3),
    ],
)
def test_flipped_bit_is_found_by_a_given_checksum(ledger):
    def checksum(number):
        if number < 10:
            return f"crc32:{zlib.crc32(body_of(number)):08x}"
        return "sha256:" + hashlib.sha256(body_of(number)).hexdigest()

    keys = ledger.objects().keys
    sums = [checksum(int(key)) for key in keys]
    error = ledger.failure(hr.ObjectDataset(ledger.store(), keys=keys, checksums=sums))
    assert type(error) is hr.errors.ChecksumError, error
    assert error.attempts == 3


def test_claimed_length_of_an_error_body_ends_the_process_of_the_loader_only(remote):
    def refuse(request):
        request.send_response(404)
        request.send_header("Content-Length", str(9 * 10**18))
        request.end_headers()
        request.wfile.write(b"x")
        request.wfile.flush()
        with contextlib.suppress(OSError):
            for _ in range(1000):
                request.wfile.write(bytes(65536))

    with answering(refuse) as url:

        def program(ledger) -> None:
            dataset = hr.ObjectDataset(hr.Store(f"{url}/d", retry=QUICK), keys=["0000"])
            with (
                ledger.loader(dataset) as loader,
                ignored_deaths(),
                pytest.raises(hr.errors.WorkerDiedError, match="SIGABRT"),
            ):
                list(loader)
            assert len(list(ledger.loader(ledger.objects()))) == SAMPLES

        remote(program)


# Ranges and versions


def test_objects_are_read_whole_from_a_store_that_ignores_ranges(remote, server):
    server.misbehave(Fault("whole"))
    remote(Ledger.assert_all_delivered)
    # Each fetcher in flight at the start may find out for itself, once.
    assert sum(bool(seen.span) for seen in server.seen()) <= SAMPLES
    assert len(server.seen()) <= 2 * SAMPLES


@pytest.fixture
def restored(server):
    """The server; afterwards its samples are as before."""
    yield server
    for key, data in contents().items():
        server.put(key, data)


@pytest.mark.usefixtures("restored")
@run_by(
    "local",
    faults=[Fault("overwrite", key="train/0007", times=1, at=700, body="x" * SIZE)],
)
def test_object_overwritten_between_attempts_is_never_a_mixture_of_both(ledger):
    sample = ledger.objects(if_match=False)[7]  # without the condition: the new object
    assert bytes(sample.data) == b"x" * SIZE


@pytest.mark.usefixtures("restored")
@run_by("local")
def test_object_changed_in_mid_epoch_is_an_error_with_its_key(ledger):
    changes = {
        23: ("DELETE",),
        22: ("PUT", "x" * SIZE),
        21: ("PUT", "longer" * SIZE),
        20: ("PUT", "s"),
        19: ("PUT", ""),
    }

    def request(key, method, body=None):
        connection = http.client.HTTPConnection(
            ledger.options["endpoint"].removeprefix("http://")
        )
        connection.request(method, f"/bucket/train/{key:04}", body)
        assert connection.getresponse().status < 300
        connection.close()

    with ledger.loader(ledger.objects(), concurrency=2) as loader:
        batches = iter(loader)
        assert [int(next(batches)) for _ in range(3)] == [0, 1, 2]
        # Later batches have been fetched, but not the last.
        for key, change in changes.items():
            request(key, *change)
        for number in range(3, 19):
            assert int(next(batches)) == number
        for number in range(19, 24):
            kind = (
                hr.errors.ObjectNotFoundError
                if number == 23
                else hr.errors.ObjectChangedError
            )
            with pytest.raises(kind) as caught:
                next(batches)
            assert (caught.value.index, caught.value.key) == (number, f"{number:04}"), (
                caught.value
            )
        assert next(batches, None) is None


# Silence and restarts


def test_silent_request_is_retried_and_a_slow_body_is_waited_for(local, server):
    server.misbehave(
        Fault("silence", key="train/0003", times=1),
        Fault(
            "trickle", key="train/0007", seconds=0.15
        ),  # ten pieces: in all longer than the time-out
    )

    def program(ledger) -> None:
        ledger.assert_all_delivered(ledger.objects(timeout=1.2))

    local(program)
    assert (len(requests(server, "train/0003")), len(requests(server))) == (2, 1)


def test_object_without_any_response_is_reported_within_the_deadline(local, server):
    server.misbehave(Fault("silence", key="train/0007"))

    def program(ledger) -> None:
        policy = hr.RetryPolicy(initial_backoff=0.01, deadline=0.5)
        error = ledger.failure(ledger.objects(timeout=0.3, retry=policy))
        assert type(error) is hr.errors.StoreUnreachableError, error
        assert error.elapsed < 5, error

    local(program)
    assert len(requests(server)) == 2


@run_by("local")
def test_server_restart_in_mid_epoch_loses_no_sample(ledger):
    # Prefetching covers less than the epoch: fetches after the fourth batch find the server gone.
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


def test_stale_idle_connections_and_low_bandwidth_lose_no_sample(local, server):
    for fault in (Fault("hang up", seconds=0.0), Fault("bandwidth", rate=100_000)):
        server.misbehave(fault)
        local(
            lambda ledger: ledger.assert_all_delivered(
                ledger.objects(timeout=0.5), concurrency=4
            )
        )


# Credentials


@run_by(
    "local",
    faults=[
        Fault("status", status=400, body=EXPIRED, unless=("x-amz-security-token", "new"))
    ],
)
def test_expired_credentials_are_renewed_once(ledger):
    given = []

    def provider():
        given.append(len(given))
        token = "old" if len(given) == 1 else "new"
        later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        return {
            "access_key_id": "id",
            "secret_access_key": "hush",
            "token": token,
            "expires_at": later,
        }

    signed = {**ledger.options, "skip_signature": False, "credential_provider": provider}
    dataset = hr.ObjectDataset(ledger.store(options=signed))
    ledger.assert_all_delivered(dataset, concurrency=4)
    assert 2 <= len(given) <= 3, given


# Odd sizes


def test_large_object_overwritten_while_it_is_read_is_never_a_mixture(local, server):
    def program(ledger) -> None:
        with pytest.raises(hr.errors.ObjectChangedError) as caught:
            hr.ObjectDataset(ledger.store("odd"))[1]
        assert (caught.value.key, caught.value.index) == ("large", 1)

    # After two parts the object has another entity tag: the answer of a store that checks
    # `If-Match`, of one that ignores it, and an object that really was overwritten.
    for kind, more in (
        ("status", {"status": 412}),
        ("retag", {}),
        ("overwrite", {"times": 1, "body": "another"}),
    ):
        server.misbehave(Fault(kind, key="odd/large", skip=2, **more))
        local(program)
    server.put("odd/large", LARGE)


# Listings


def list_many(ledger):
    assert list(hr.ObjectDataset(ledger.store("many")).keys) == [
        f"{i:04}" for i in range(2500)
    ]


def test_listing_continues_after_its_last_page_and_gives_no_sample_twice(local, server):
    server.misbehave(Fault("status", method="LIST", skip=1, times=2))
    local(list_many)
    assert len(server.seen("LIST")) == 5, "three pages and two failures"
    server.misbehave(Fault("repeat", method="LIST"))
    local(list_many)


# Load


def test_retries_of_all_fetchers_share_one_budget(local, server):
    # 24 objects that always fail, ten attempts each, would be 240 requests; the budget allows 5
    # retries in this time.
    server.misbehave(Fault("status", status=500))

    def program(ledger) -> None:
        policy = hr.RetryPolicy(initial_backoff=0.0, burst=4, deadline=2.0)
        _, failures = ledger.epoch(ledger.objects(retry=policy), concurrency=24)
        assert len(failures) == len(ledger.objects()), failures

    local(program)
    assert len(server.seen()) <= SAMPLES + 4 + 4


def test_throttling_store_lowers_auto_concurrency_and_costs_few_extra_requests(case):
    many = {f"train/{i:04}": body_of(i) for i in range(2000)}
    with ObjectServer(many, latency=0.02) as store:
        # 64 in flight would be 3,200 a second
        store.misbehave(Fault("throttle", rate=800.0, at=20))
        run_with_ledger(case, store, "thread", read_throttled)
        asked = store.seen()
    assert any(seen.fault == "throttle" for seen in asked), "the store has throttled"
    assert len(asked) <= 1.3 * len(many)


class CountsFetches(hr.AsyncDataset):
    """Samples with the number of fetches in flight when their own started.

    The first wait until `at_first` of them are in flight: the store may refuse one before the last
    has begun."""

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
    # Without a budget: otherwise one batch is fetched alone until the size of a sample is known.
    with ledger.loader(
        dataset, batch_size=25, transform=checked_with_count, memory_budget=None
    ) as loader:
        delivered = [
            pair
            for batch in loader
            for pair in zip(*(column.tolist() for column in batch), strict=True)
        ]
    assert collections.Counter(number for number, _ in delivered) == once_each(
        range(2000)
    )
    # The initial limit, or twice that if the machine was too slow for the store to throttle at
    # once.
    assert max(in_flight for _, in_flight in delivered[:500]) >= 64
    assert max(in_flight for _, in_flight in delivered[-500:]) < 64, delivered[-500:]


# Hedging


class Controlled(Numbers):
    """Sample 200 is fetched by `attempt`, which is given the attempt's number; all others are returned at once."""

    def __init__(self, attempt):
        super().__init__(256)
        self.attempt, self.attempts, self.cancelled = attempt, collections.Counter(), []

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


async def first_fails(dataset, number):
    if number > 1:
        dataset.second.set()
        await asyncio.Event().wait()
    dataset.second = asyncio.Event()
    await dataset.second.wait()
    raise ValueError("the first")


ATTEMPTS = [
    first_never_ends,
    both_answer,
    first_ignores_cancellation,
    second_fails,
    first_fails,
]


@run_by("case")
def test_hedged_sample_is_delivered_once_whatever_its_attempts_do():
    for attempt in ATTEMPTS:
        dataset = Controlled(attempt)
        with hr.DataLoader(
            dataset, 16, hedge="auto", placement="thread", concurrency=8, on_error="skip"
        ) as loader:
            delivered, errors = drain(loader)
            counts, skipped = loader.stats().requests, loader.stats().skipped
        assert not errors, (attempt, errors)
        assert dataset.attempts[200] >= 2, attempt
        assert 1 <= counts.hedges <= 0.05 * 256, (attempt, counts)
        if attempt is first_fails:
            assert [(failure.index, failure.message) for failure in skipped] == [
                (200, "the first")
            ]
            assert delivered + collections.Counter([200]) == once_each(range(256))
            assert set(dataset.cancelled) == set(range(2, dataset.attempts[200] + 1)), (
                "one was not cancelled"
            )
        else:
            assert delivered == once_each(range(256)), attempt
        if attempt is first_never_ends:
            assert counts.hedges_won >= 1, (counts, dataset.cancelled)
            assert dataset.cancelled == [1], (counts, dataset.cancelled)
