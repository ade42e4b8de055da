"""Redirects: no byte of a request reaches a host that the user did not name."""

import asyncio
import ssl

import pytest
import trustme

import headrace as hr
from object_server import Fault, ObjectServer
from tests.answers import answering
from tests.faults.ledger import Ledger, body_of, contents
from tests.faults.watching import drain
from tests.servers import store_of

KEY = "x-api-key"
SECRET = "secret-of-a-header"


@pytest.fixture(scope="module")
def servers():
    with (
        ObjectServer({**contents(), "alias/0007": body_of(7)}) as near,
        ObjectServer(contents()) as far,
    ):
        yield near, far


@pytest.fixture
def near(servers):
    """The server that the user names."""
    servers[0].misbehave()
    return servers[0]


@pytest.fixture
def far(servers):
    """A server on another host name of this machine, which answers 403 to requests without the secret header."""
    servers[1].misbehave(Fault("status", status=403, unless=(KEY, SECRET)))
    return servers[1]


def other_host_url(far, key="train/0007"):
    return f"{far.http_url}/{key}".replace("127.0.0.1", "localhost")


@pytest.fixture(params=["s3", "http"])
def local(request, case, near):
    """Run a program with a `Ledger` over each type of store that has one host, and a secret in its headers."""

    def run(program, headers, **more):
        url, options = (
            near.http_url,
            {"client_options": {"allow_http": True, "default_headers": headers}, **more},
        )
        if request.param == "s3":
            url, options = near.url, {**near.store_options, **options}
        ledger = Ledger(
            url, options, keys=[key.removeprefix("train/") for key in contents()]
        )
        case(lambda: program(ledger), within=5.0)

    run.stays_in_host = {KEY: SECRET} if request.param == "s3" else {}
    return run


def test_redirects_are_refused_or_followed_within_their_host(local, near, far):
    near.misbehave(
        Fault("redirect", key="train/0007", body=other_host_url(far)),
        Fault("redirect", key="train/0008", body="/bucket/alias/0007"),
        Fault("redirect", key="train/0009", body="/bucket/train/0009"),
    )

    def program(ledger) -> None:
        # Sample 8 is what another key has: it is followed, and has other bytes.
        with ledger.loader(
            ledger.objects(),
            transform=lambda sample: bytes(sample.data)[0],
            sampler=[7, 8, 9],
        ) as loader:
            delivered, (another_host, loop) = drain(loader)
        assert delivered == {7: 1}, delivered
        for error in (another_host, loop):
            assert type(error) is hr.StoreError, error
            assert error.attempts == 1, error
        for words in ("allow_redirects", "another host"):
            assert words in str(another_host), another_host
        assert SECRET not in str(another_host)

    local(program, local.stays_in_host)
    assert far.seen() == [], "a byte was sent"
    assert len([seen for seen in near.seen() if seen.key == "train/0009"]) == 11, (
        "ten redirects"
    )


def test_redirect_to_another_host_is_followed_with_allow_redirects(local, near, far):
    near.misbehave(Fault("redirect", key="train/0007", body=other_host_url(far)))
    local(Ledger.assert_all_delivered, {KEY: SECRET}, allow_redirects=True)
    assert len(far.seen()) == 1, (
        "the server answers nothing without the header: it was sent along"
    )


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_default_headers_reach_no_other_port_of_the_host(status):
    asked = []

    def answer_far(request):
        asked.append((request.headers.get(KEY), request.headers.get("Authorization")))
        request.send_object(b"far")

    with (
        answering(answer_far) as far,
        answering(lambda one: one.send(status, b"", {"Location": f"{far}/a"})) as url,
    ):
        read = [
            lambda dataset: dataset[0],
            lambda dataset: asyncio.run(dataset._store.head("a")),
            lambda dataset: hr.ObjectDataset(dataset._store),
        ]
        for place in (f"{url}/d", f"{url}/d/?version=1"):
            store = hr.Store(place, options={"default_headers": {KEY: SECRET}}, retry=1)
            for request in read:
                with pytest.raises(
                    hr.StoreError,
                    match=r"redirects.*another host or port.*allow_redirects",
                ):
                    request(hr.ObjectDataset(store, keys=["a"]))
        assert asked == []
        store = hr.Store(
            f"{url}/d", options={"default_headers": {"authorization": f"Bearer {SECRET}"}}
        )
        assert bytes(hr.ObjectDataset(store, keys=["a"])[0].data) == b"far"
        assert asked == [(None, None)]


def test_redirected_listing_is_refused(case, near, far):
    near.misbehave(
        Fault("redirect", method="LIST", body=other_host_url(far, "?list-type=2"))
    )
    store = store_of(near)

    def program() -> None:
        with pytest.raises(hr.StoreError, match="another host"):
            hr.ObjectDataset(store)

    case(program, within=5.0)
    assert far.seen("LIST") == []


@pytest.mark.parametrize("allow", [False, True])
def test_redirect_from_tls_to_plain_http_is_refused_on_the_same_host(case, near, allow):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    location = {"Location": f"{near.http_url}/train/0007"}
    options = {
        "client_options": {"allow_invalid_certificates": True},
        "allow_redirects": allow,
    }
    with answering(lambda request: request.send(302, b"", location), tls) as url:

        def program() -> None:
            store = hr.Store(
                f"{url}/train",
                options=options,
                retry=hr.RetryPolicy(initial_backoff=0.01),
            )
            with hr.DataLoader(
                hr.ObjectDataset(store, keys=["0007"]), batch_size=1, collate_fn=len
            ) as loader:
                delivered, (error,) = drain(loader)
            assert not delivered, error
            assert isinstance(error, hr.StoreError), error
            assert error.attempts == 1, error

        case(program, within=5.0)
    assert near.seen() == []
