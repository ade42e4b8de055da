"""A store that misbehaves, over real sockets: every sample comes once and whole, or is reported with its index."""

import textwrap

import pytest

from headrace.testing import Fault, ObjectServer
from tests.faults.ledger import LEDGER, SAMPLES, SIZE, body_of, contents

LARGE = bytes(range(256)) * 4 * 20_000  # 20 MB are more than one part


@pytest.fixture(scope="module")
def servers():
    odd = {"odd/empty": b"", "odd/large": LARGE}
    with ObjectServer({**contents(), **odd}) as server:
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
    """Run a body with the server's URL, the ledger, and each placement of the engine."""

    def run(body, **given):
        # A store that is dropped closes its kept connections on threads of its own.
        return case(
            LEDGER + textwrap.dedent(body),
            within=5.0,
            **{"url": server.url, "options": server.store_options, "placement": placement, "SIZE": SIZE, **given},
        )

    return run


@pytest.fixture
def local(case, server):
    """The same with the engine in a thread only, where the placement makes no difference to the fault."""

    def run(body, **given):
        told = {"url": server.url, "options": server.store_options, "placement": "thread", "SIZE": SIZE, **given}
        return case(LEDGER + textwrap.dedent(body), within=5.0, **told)

    return run


def requests(server, key="train/0007"):
    return [seen for seen in server.seen() if seen.key == key]


# Refusals


def test_503_twice_then_ok_loses_nothing(network, server):
    server.misbehave(Fault("status", times=2, per_key=True))
    network("all_came(objects())")
    assert len(requests(server)) == 3


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 520])
def test_statuses_that_pass_are_tried_again(local, server, status):
    server.misbehave(Fault("status", key="train/0007", times=1, status=status))
    local("all_came(objects())")
    assert len(requests(server)) == 2


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
def test_statuses_that_stay_are_reported_at_once(local, server, status, kind):
    server.misbehave(Fault("status", key="train/0007", status=status))
    local(
        """
        delivered, failures = epoch(objects())
        (index, error), = failures.items()
        assert index == 7 and type(error).__name__ == kind, (index, error)
        assert error.status == status and error.attempts == 1
        """,
        kind=kind,
        status=status,
    )
    assert len(requests(server)) == 1


def test_503_for_ever_is_bounded_and_named(network, server):
    server.misbehave(Fault("status", key="train/0007", body="<Code>SlowDown</Code>"))
    network(
        """
        delivered, failures = epoch(objects(retry=hr.RetryPolicy(max_attempts=4, initial_backoff=0.01)))
        (index, error), = failures.items()
        assert index == 7 and error.key == "0007" and error.index == 7 and error.attempts == 4 and error.status == 503
        for word in ("'0007'", "index 7", "4 attempts in", "SlowDown", "s3://bucket/train"):
            assert word in str(error), str(error)
        """
    )
    assert len(requests(server)) == 4


def test_the_retry_of_a_loader_goes_before_that_of_its_dataset(network, server):
    server.misbehave(Fault("status", key="train/0007"))
    network(
        """
        dataset = objects()
        for retry, attempts in ((1, 1), (hr.RetryPolicy(max_attempts=2, initial_backoff=0.01), 2)):
            delivered, failures = epoch(dataset, retry=retry)
            assert failures[7].attempts == attempts
        """
    )


def test_no_request_comes_before_the_time_that_retry_after_names(local, server):
    server.misbehave(
        Fault("status", key="train/0003", times=1, status=429, headers={"Retry-After": "1"}),
        Fault("status", method="HEAD", status=429, headers={"Retry-After": "1"}),
    )
    local("all_came(objects(), batch_size=1, concurrency=1)")
    refused = next(seen for seen in server.seen() if seen.fault)
    later = [seen.at - refused.at for seen in server.seen() if seen.at > refused.at]
    assert later, "nothing was tried again"
    assert min(later) >= 1.0
    (question,) = server.seen("HEAD")
    assert question.key == "train/0003"


def test_a_retry_after_beyond_the_deadline_is_reported_and_not_waited_for(local, server):
    server.misbehave(
        Fault("status", key="train/0003", status=503, headers={"Retry-After": "3600"}),
        Fault("status", method="HEAD", status=503, headers={"Retry-After": "3600"}),
    )
    local(
        """
        delivered, failures = epoch(hr.ObjectDataset(hr.Store(url, options=options, retry=QUICK), keys=["train/0003"]))
        assert failures[0].status == 503 and failures[0].attempts == 1, failures
        """
    )
    assert len(server.seen()) == 1


def test_a_retry_after_beyond_the_deadline_does_not_hold_up_other_samples(local, server):
    server.misbehave(
        Fault("status", key="train/0003", status=503, headers={"Retry-After": "3600"}),
        Fault("status", method="HEAD", status=503, headers={"Retry-After": "3600"}),
    )
    local(
        """
        delivered, failures = epoch(objects(), concurrency=1)
        assert list(failures) == [3] and failures[3].status == 503, failures
        """
    )


# Bodies


def test_a_page_of_an_error_in_place_of_an_object_is_never_a_sample(network, server):
    server.misbehave(Fault("page", key="train/0007", body="<html>Please log in</html>"))
    network(
        """
        delivered, failures = epoch(objects())
        (index, error), = failures.items()
        assert index == 7 and isinstance(error, hr.ObjectChangedError), error
        """
    )


def test_a_page_of_an_error_that_goes_away_costs_a_retry(local, server):
    server.misbehave(Fault("page", key="train/0007", times=2, body="<html>Please wait</html>"))
    local("all_came(objects())")


@pytest.mark.parametrize("kind", ["cut", "reset"])
@pytest.mark.parametrize("etag", [True, False], ids=["with an entity tag", "without"])
def test_a_body_that_ends_early_is_fetched_again(network, server, kind, etag):
    server.misbehave(Fault(kind, times=2, per_key=True, at=700, etag=etag))
    network("all_came(objects(if_match=etag))", etag=etag)
    assert len(requests(server)) == 3


@pytest.mark.parametrize("at", [0, 1, SIZE - 1])
def test_a_body_may_end_anywhere(local, server, at):
    server.misbehave(Fault("cut", times=1, per_key=True, at=at))
    local("all_came(objects())")


def test_a_body_that_always_ends_early_is_reported(local, server):
    server.misbehave(Fault("cut", key="train/0007", at=700))
    local(
        """
        delivered, failures = epoch(objects(retry=hr.RetryPolicy(max_attempts=3, initial_backoff=0.01)))
        assert failures.keys() == {7} and failures[7].attempts == 3 and "cut short" in str(failures[7]), failures
        """
    )


def test_a_connection_that_is_reset_before_an_answer_is_made_again(network, server):
    server.misbehave(Fault("refuse", times=2, per_key=True))
    network("all_came(objects())")


def test_a_flipped_bit_is_found_by_the_given_checksum(network, server):
    server.misbehave(Fault("flip", times=1, per_key=True, at=3))
    network(
        """
        import hashlib
        def sums(key):
            data = int(key).to_bytes(2, "little") * (SIZE // 2)
            return "sha256:" + hashlib.sha256(data).hexdigest()
        all_came(objects(checksums=sums))
        """
    )


def test_a_checksum_that_is_always_wrong_is_reported(local, server):
    server.misbehave(Fault("flip", key="train/0007", at=3))
    local(
        """
        import zlib
        def sums(key):
            return f"crc32:{zlib.crc32(int(key).to_bytes(2, 'little') * (SIZE // 2)):08x}"
        delivered, failures = epoch(objects(checksums=sums))
        assert failures.keys() == {7} and type(failures[7]) is hr.ChecksumError, failures
        assert failures[7].attempts == 3
        """
    )


def test_a_store_that_ignores_ranges_is_read_whole(network, server):
    server.misbehave(Fault("whole"))
    network("all_came(objects())")
    # Each fetcher of the first moment may find out for itself; nobody asks twice.
    assert sum(bool(seen.span) for seen in server.seen()) <= SAMPLES
    assert len(server.seen()) <= 2 * SAMPLES


def test_a_range_from_the_wrong_place_is_never_a_sample(local, server):
    server.misbehave(Fault("misplaced", times=1, per_key=True))
    local("all_came(objects())")
    server.misbehave(Fault("misplaced", key="train/0007"))
    local("assert epoch(objects())[1].keys() == {7}")


# Changes


@pytest.fixture
def restored(server):
    """Whatever a test does to this one object, those behind it find it as it was."""
    yield server
    server.put("train/0007", body_of(7))


def test_an_object_that_is_overwritten_between_attempts_is_an_error_with_its_key(network, restored):
    # The first attempt is cut, and meanwhile somebody stores another object of that length.
    restored.misbehave(Fault("overwrite", key="train/0007", times=1, at=700, body="x" * SIZE))
    network(
        """
        delivered, failures = epoch(objects())
        (index, error), = failures.items()
        assert index == 7 and type(error) is hr.ObjectChangedError and error.key == "0007", failures
        assert error.attempts == 2 and error.status == 412, error
        """
    )


def test_an_object_that_is_overwritten_between_attempts_is_never_a_mixture_of_both(local, restored):
    restored.misbehave(Fault("overwrite", key="train/0007", times=1, at=700, body="x" * SIZE))
    local(
        """
        sample = objects(if_match=False)[7]  # whoever does not want the condition gets the object that is there
        assert bytes(sample.data) == b"x" * SIZE
        """
    )


def test_a_store_that_does_not_look_at_conditions_is_found_out_by_its_answers(network, server):
    server.misbehave(Fault("retag", key="train/0007"))
    network(
        """
        delivered, failures = epoch(objects())
        assert failures.keys() == {7} and type(failures[7]) is hr.ObjectChangedError, failures
        """
    )


CHANGED_BEHIND_ITS_BACK = """
import http.client

def ask(method, body=None):
    connection = http.client.HTTPConnection(options["endpoint"].removeprefix("http://"))
    connection.request(method, "/bucket/train/0023", body)
    assert connection.getresponse().status < 300
    connection.close()

dataset, told = objects(), {"placement": placement, "num_workers": int(placement == "process")}
with hr.DataLoader(dataset, batch_size=1, transform=whole, concurrency=2, on_error="skip", **told) as loader:
    delivered = collections.Counter()
    for number, batch in enumerate(loader):
        delivered.update(batch.tolist())
        if number == 2:  # some batches are ahead of this one, and the last is not among them
            ask(*change)
    (failure,) = loader.stats().skipped
    assert loader.stats().replaced_batches == 1
assert delivered == once_each(range(23), [0]), delivered  # the last batch is replaced
assert (failure.index, failure.key, failure.error) == (23, "0023", kind), failure
"""


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
def test_an_object_that_is_changed_in_mid_epoch_is_an_error_with_its_key(network, server, change, kind):
    try:
        network(CHANGED_BEHIND_ITS_BACK, change=change, kind=kind)
    finally:
        server.put("train/0023", body_of(23))


# Silence, and going away


def test_a_store_that_never_answers_one_request_is_asked_again(network, server):
    server.misbehave(Fault("silence", key="train/0007", times=1))
    network("all_came(objects(timeout=0.3))")
    assert len(requests(server)) == 2


def test_an_object_that_never_comes_is_reported_within_the_deadline(local, server):
    server.misbehave(Fault("silence", key="train/0007"))
    local(
        """
        policy = hr.RetryPolicy(initial_backoff=0.01, deadline=0.5)
        delivered, failures = epoch(objects(timeout=0.3, retry=policy))
        assert type(failures[7]) is hr.StoreUnreachableError and failures[7].elapsed < 5, failures
        """
    )
    assert len(requests(server)) == 2


def test_a_slow_body_that_goes_on_is_waited_for_however_long_it_takes(network, server):
    # Ten pieces, 0.15 s apart: three times the time-out in all.
    server.misbehave(Fault("trickle", key="train/0007", seconds=0.15))
    network("all_came(objects(timeout=0.5))")
    assert len(requests(server)) == 1


def test_a_refused_port_is_reported_soon_and_by_name(local, server):
    local(
        """
        import socket
        with socket.create_server(("127.0.0.1", 0)) as listening:
            nowhere = f"http://127.0.0.1:{listening.getsockname()[1]}"
        dataset = hr.ObjectDataset(
            hr.Store("s3://b", options={**options, "endpoint": nowhere}, retry=QUICK), keys=["0000"]
        )
        delivered, failures = epoch(dataset)
        assert type(failures[0]) is hr.StoreUnreachableError and failures[0].attempts == 3, failures
        """
    )


def test_a_host_without_an_address_is_reported(local, server):
    local(
        """
        dataset = hr.ObjectDataset(hr.Store("http://no-such-host.invalid/d", retry=QUICK), keys=["0000"])
        delivered, failures = epoch(dataset)
        assert type(failures[0]) is hr.StoreUnreachableError, failures
        """
    )


def test_a_server_that_is_restarted_in_mid_epoch_costs_time_and_no_sample(network, server):
    # The look-ahead is shorter than the epoch: what is fetched behind the fourth batch finds the server gone.
    network(
        """
        import http.client, socket
        host, _, port = options["endpoint"].removeprefix("http://").partition(":")
        def restart():
            with socket.create_connection((host, int(port))) as kept:
                connection = http.client.HTTPConnection(host, int(port))
                connection.request("PUT", "/_restart", "0.5")
                assert connection.getresponse().status == 204
                connection.close()
                with contextlib.suppress(ConnectionResetError):
                    assert kept.recv(1) == b""  # connections end behind the listener
        dataset = objects(retry=hr.RetryPolicy(initial_backoff=0.05))
        told = {"placement": placement, "num_workers": int(placement == "process")}
        delivered = collections.Counter()
        with hr.DataLoader(dataset, batch_size=2, transform=whole, concurrency=2, **told) as loader:
            for number, batch in enumerate(loader):
                delivered.update(batch.tolist())
                if number == 3:
                    restart()
        assert delivered == collections.Counter(range(len(dataset))), delivered
        """
    )


def test_a_kept_connection_that_has_gone_stale_costs_no_sample(network, server):
    server.misbehave(Fault("hang up", seconds=0.0))
    network("all_came(objects(), concurrency=4)")


# Credentials


def test_credentials_that_expire_are_renewed_once(local, server):
    expired = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    server.misbehave(Fault("status", status=400, body=expired, unless=("x-amz-security-token", "new")))
    local(
        """
        import datetime, itertools
        given = []
        def provider():
            given.append(len(given))
            token = "old" if len(given) == 1 else "new"
            later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
            return {"access_key_id": "id", "secret_access_key": "hush", "token": token, "expires_at": later}
        signed = {**options, "skip_signature": False, "credential_provider": provider}
        dataset = hr.ObjectDataset(hr.Store(url + "/train", options=signed, retry=QUICK))
        all_came(dataset, concurrency=4)
        assert 2 <= len(given) <= 3, given
        """
    )


def test_credentials_that_stay_expired_are_reported(local, server):
    expired = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    server.misbehave(Fault("status", key="train/0007", status=400, body=expired))
    local(
        """
        delivered, failures = epoch(objects())
        assert failures.keys() == {7} and failures[7].attempts == 2 and "credentials" in str(failures[7]), failures
        """
    )
    assert len(requests(server)) == 2


# Odd sizes


def test_empty_and_large_objects_come_whole(network, server):
    server.misbehave(Fault("cut", key="odd/large", times=2, at=1_000_000))
    network(
        """
        dataset = hr.ObjectDataset(hr.Store(url + "/odd", options=options, retry=QUICK))
        told = {"placement": placement, "num_workers": int(placement == "process")}
        with hr.DataLoader(dataset, batch_size=None, transform=lambda s: (s.key, bytes(s.data)), **told) as loader:
            came = dict(loader)
        assert came == {"empty": b"", "large": bytes(range(256)) * 4 * 20_000}, {k: len(v) for k, v in came.items()}
        """
    )
    parts = [seen for seen in server.seen() if seen.key == "odd/large"]
    assert len({seen.span for seen in parts}) == 3
    assert len(parts) == 5, "three parts, two of them cut once"


@pytest.mark.parametrize(
    "fault",
    [
        # Two parts come, and the object that the third finds has another tag: a store that looks at `If-Match` says so,
        Fault("status", key="odd/large", skip=2, status=412),
        # one that does not sends what it has,
        Fault("retag", key="odd/large", skip=2),
        # and here the object is another in earnest.
        Fault("overwrite", key="odd/large", skip=2, times=1, body="another"),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_large_object_overwritten_while_it_is_read_is_never_a_mixture(local, server, fault):
    server.misbehave(fault)
    try:
        local(
            """
            dataset = hr.ObjectDataset(hr.Store(url + "/odd", options=options, retry=QUICK))
            try:
                dataset[1]
            except hr.ObjectChangedError as error:
                assert error.key == "large" and error.index == 1
            else:
                raise AssertionError("it came")
            """
        )
    finally:
        if fault.kind == "overwrite":
            server.put("odd/large", LARGE)


# Listings


@pytest.fixture
def many(server):
    for i in range(2500):
        server.put(f"many/{i:04}", b"x")
    yield
    for i in range(2500):
        server.delete(f"many/{i:04}")


def test_a_listing_that_fails_half_way_goes_on_behind_what_it_had(local, server, many):
    server.misbehave(Fault("status", method="LIST", skip=1, times=2))
    local(
        """
        dataset = hr.ObjectDataset(hr.Store(url + "/many", options=options, retry=QUICK))
        assert list(dataset.keys) == [f"{i:04}" for i in range(2500)]
        """
    )
    assert len(server.seen("LIST")) == 5, "three pages and two failures"


def test_a_page_that_comes_twice_gives_no_sample_twice(local, server, many):
    server.misbehave(Fault("repeat", method="LIST"))
    local(
        """
        dataset = hr.ObjectDataset(hr.Store(url + "/many", options=options, retry=QUICK))
        assert list(dataset.keys) == [f"{i:04}" for i in range(2500)]
        """
    )


# Load


def test_a_bandwidth_cap_slows_and_loses_nothing(local, server):
    server.misbehave(Fault("bandwidth", rate=100_000))
    local("all_came(objects(timeout=0.5))")


def test_retries_of_all_fetchers_share_one_budget(local, server):
    # 24 objects that always fail, ten attempts each, would be 240 requests; the budget allows 5 retries in this time.
    server.misbehave(Fault("status", status=500))
    local(
        """
        policy = hr.RetryPolicy(initial_backoff=0.0, burst=4, deadline=2.0)
        delivered, failures = epoch(objects(retry=policy), concurrency=24)
        assert len(failures) == len(objects()), failures
        """
    )
    assert len(server.seen()) <= SAMPLES + 4 + 4


def test_a_throttle_storm_makes_auto_concurrency_fall_and_costs_few_extra_requests(case, placement):
    many = {f"train/{i:04}": body_of(i) for i in range(3000)}
    with ObjectServer(many, latency=0.02) as store:
        store.misbehave(Fault("throttle", rate=800.0, at=20))  # 64 in flight would be 3,200 a second
        case(
            LEDGER + THROTTLED,
            within=5.0,
            **{"url": store.url, "options": store.store_options, "placement": placement, "SIZE": SIZE},
        )
        asked = store.seen()
    assert any(seen.fault == "throttle" for seen in asked), "the store has throttled"
    assert len(asked) <= 1.3 * len(many)


THROTTLED = """
class Watched(hr.AsyncDataset):
    # A sample tells how many were being fetched when its own fetch began.

    def __init__(self):
        self.objects, self.running = objects(retry=hr.RetryPolicy()), 0

    def __len__(self):
        return len(self.objects)

    async def aget(self, index):
        self.running += 1
        in_flight = self.running
        try:
            return await self.objects.aget(index), in_flight
        finally:
            self.running -= 1


def told_with(fetched):
    sample, in_flight = fetched
    return whole(sample), in_flight


workers = int(placement == "process")
with hr.DataLoader(Watched(), batch_size=25, transform=told_with, placement=placement, num_workers=workers) as loader:
    came = [(key, flight) for keys, flights in loader for key, flight in zip(keys.tolist(), flights.tolist())]
assert collections.Counter(key for key, _ in came) == once_each(range(3000))
assert max(flight for _, flight in came[:500]) == 64, "it begins with these"
assert max(flight for _, flight in came[-500:]) < 64, came[-500:]
"""


# Hedging

HEDGED = """
class Known(hr.AsyncDataset):
    # Index 200 does what `give` says, attempt by attempt; all others come at once.

    def __init__(self, give):
        self.give, self.attempts, self.ended = give, collections.Counter(), []

    def __len__(self):
        return 256

    async def aget(self, index):
        self.attempts[index] += 1
        number = self.attempts[index]
        if index == 200:
            try:
                return await self.give(number)
            except asyncio.CancelledError:
                self.ended.append(number)
                raise
        await asyncio.sleep(0.001)  # latency
        return index


def hedged(dataset):
    with hr.DataLoader(dataset, batch_size=16, hedge="auto", placement="thread", concurrency=8) as loader:
        delivered, errors = drain(loader)
        return delivered, errors, loader.stats().requests
"""


@pytest.fixture
def hedging(case):
    """Run a body with a dataset of which one sample is under control."""

    def run(body):
        case(HEDGED + textwrap.dedent(body))

    return run


def test_a_fetch_that_never_ends_is_begun_again_and_cancelled(hedging):
    hedging(
        """
        async def give(number):
            if number == 1:
                await asyncio.Event().wait()
            return 200
        dataset = Known(give)
        delivered, errors, counts = hedged(dataset)
        assert delivered == once_each(range(256)) and not errors, errors
        assert counts.hedges_won >= 1 and dataset.ended == [1], (counts, dataset.ended)
        assert counts.hedges <= 0.05 * 256
        """
    )


def test_where_both_attempts_answer_the_sample_comes_once(hedging):
    hedging(
        """
        both = None
        async def give(number):
            global both
            if number == 1:
                both = asyncio.get_running_loop().create_future()
            else:
                both.set_result(200)
            return await both  # the two are woken in the same turn of the loop
        dataset = Known(give)
        delivered, errors, counts = hedged(dataset)
        assert delivered == once_each(range(256)) and not errors, errors
        assert dataset.attempts[200] == 2
        """
    )


def test_an_attempt_that_will_not_be_cancelled_gives_no_second_sample(hedging):
    hedging(
        """
        async def give(number):
            if number > 1:
                return 200
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return 999
        delivered, errors, counts = hedged(Known(give))
        assert delivered == once_each(range(256)) and not errors, errors
        """
    )


def test_a_second_attempt_that_fails_leaves_the_first_to_answer(hedging):
    hedging(
        """
        second = None
        async def give(number):
            global second
            if number == 1:
                second = asyncio.Event()
                await second.wait()
                return 200
            second.set()
            raise ValueError("no")
        delivered, errors, counts = hedged(Known(give))
        assert delivered == once_each(range(256)) and not errors, errors
        assert counts.hedges >= 1
        """
    )


def test_an_error_of_the_first_attempt_is_reported_once(hedging):
    hedging(
        """
        second = None
        async def give(number):
            global second
            if number == 1:
                second = asyncio.Event()
                await second.wait()
                raise ValueError("the first")
            second.set()
            await asyncio.Event().wait()
        dataset = Known(give)
        with hr.DataLoader(dataset, batch_size=16, hedge="auto", on_error="skip", concurrency=8) as loader:
            delivered, errors = drain(loader)
            (failure,) = loader.stats().skipped
        assert failure.index == 200 and failure.message == "the first" and not errors
        assert delivered + collections.Counter([200]) == once_each(range(256))
        assert set(dataset.ended) == set(range(2, dataset.attempts[200] + 1)), "an attempt was left behind"
        """
    )


def test_a_store_that_stalls_loses_nothing_and_is_asked_little_more(network, server):
    server.misbehave(Fault("stall", share=0.04, seconds=0.5))
    network(
        """
        dataset = objects()
        told = {"placement": placement, "num_workers": int(placement == "process"), "hedge": "auto"}
        told["sampler"] = list(range(len(dataset))) * 20
        with hr.DataLoader(dataset, batch_size=4, transform=whole, **told) as loader:
            delivered, errors = drain(loader)
            counts = loader.stats().requests
        assert not errors and delivered == collections.Counter(told["sampler"])
        assert counts.hedges <= 0.05 * 480, counts
        assert 480 <= counts.requests <= 1.05 * 480, counts
        """
    )


# Secrets


def test_a_canary_in_url_header_and_credentials_is_seen_nowhere(local, server):
    server.misbehave(Fault("status", key="train/0007", status=403, body="<Code>Denied</Code>"))
    said = local(
        """
        import io, logging, pickle, traceback
        log = io.StringIO()
        logging.basicConfig(stream=log, level=logging.DEBUG, force=True)
        host = options["endpoint"].removeprefix("http://")
        keys = [f"train/{i:04}" for i in range(24)]
        headers = {"default_headers": {"x-api-key": "canary-header"}}
        signed = {"skip_signature": False, "access_key_id": "canary-id", "secret_access_key": "canary-secret",
                  "token": "canary-token", "client_options": {**options["client_options"], **headers}}
        datasets = [
            hr.ObjectDataset(hr.Store(f"http://me:canary-password@{host}/bucket?sig=canary-query",
                                      options={"client_options": headers}, retry=QUICK), keys=keys),
            hr.ObjectDataset(hr.Store(url + "/train", options={**options, **signed}, retry=QUICK)),
        ]
        shown = []
        for dataset in datasets:
            with hr.DataLoader(dataset, batch_size=4, collate_fn=torch.tensor, transform=lambda s: 0) as loader:
                _, (error,) = drain(loader)
            with hr.DataLoader(dataset, batch_size=4, collate_fn=len, on_error="skip", placement="thread") as loader:
                with contextlib.suppress(hr.TooManySkippedError):
                    list(loader)
                stats = loader.stats()
                (failure,) = stats.skipped
                shown += [repr(dataset), repr(dataset._reader), repr(loader), repr(stats), str(failure), repr(failure)]
                assert error.__cause__ is None and error.__context__ is None
                shown += [repr(vars(error)), "".join(traceback.format_exception(error))]
                shown.append(repr(pickle.dumps(error)))
        shown.append(log.getvalue())
        seen = [text for text in shown if "canary" in text]
        assert not seen, seen[0]
        """
    )
    assert "canary" not in said
