"""A server that sends its clients elsewhere: no byte of a request reaches a host that the user did not name."""

import datetime
import ipaddress
import ssl
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.testing import Fault, ObjectServer
from tests.faults.ledger import LEDGER, SIZE, body_of, contents

KEY = "x-api-key"
CANARY = "canary-of-a-header"


@pytest.fixture(scope="module")
def servers():
    with ObjectServer({**contents(), "alias/0007": body_of(7)}) as near, ObjectServer(contents()) as far:
        yield near, far


@pytest.fixture
def near(servers):
    """The server that the user names."""
    servers[0].misbehave()
    yield servers[0]
    servers[0].misbehave()


@pytest.fixture
def far(servers):
    """A server that knows from the header who asks, and answers nobody else; under another name of this machine."""
    servers[1].misbehave(Fault("status", status=403, unless=(KEY, CANARY)))
    yield servers[1]
    servers[1].misbehave()


def elsewhere(far, key="train/0007"):
    return f"{far.http_url}/{key}".replace("127.0.0.1", "localhost")


@pytest.fixture(params=["s3", "http"])
def local(request, case, near):
    """Run a body with a dataset over each kind of store that has one host, and a secret in its headers."""

    def run(body, **more):
        client = {"allow_http": True, "default_headers": {KEY: CANARY}}
        url, options = f"{near.http_url}/train", {"client_options": client, **more}
        if request.param == "s3":
            url, options = f"{near.url}/train", {**near.store_options, **options}
        keys = [key.removeprefix("train/") for key in contents()]
        told = {"url": url, "options": options, "keys": keys, "placement": "thread", "SIZE": SIZE, "canary": CANARY}
        case(LEDGER + DATASET + textwrap.dedent(body), within=5.0, **told)

    return run


DATASET = """
def objects(**more):
    return hr.ObjectDataset(hr.Store(url, options=options, retry=QUICK), keys=keys)
"""


def test_a_redirect_to_another_host_is_refused_before_a_byte_is_sent(local, near, far):
    near.misbehave(Fault("redirect", key="train/0007", body=elsewhere(far)))
    local(
        """
        delivered, failures = epoch(objects())
        (index, error), = failures.items()
        assert index == 7 and type(error) is hr.StoreError and error.attempts == 1, (index, error)
        assert "allow_redirects" in str(error) and "another host" in str(error), str(error)
        assert canary not in str(error)
        """
    )
    assert far.seen() == []


def test_a_redirect_to_another_host_is_followed_where_that_was_allowed(local, near, far):
    near.misbehave(Fault("redirect", key="train/0007", body=elsewhere(far)))
    local("all_came(objects())", allow_redirects=True)
    assert len(far.seen()) == 1, "and the header has come there: this is what the option is about"


def test_a_redirect_within_the_host_is_followed(local, near):
    near.misbehave(Fault("redirect", key="train/0007", body="/bucket/alias/0007"))
    local("all_came(objects())")


def test_a_redirect_to_a_host_without_an_address_is_refused_alike(local, near):
    near.misbehave(Fault("redirect", key="train/0007", body="https://no-such-host.invalid/0007"))
    local("assert epoch(objects())[1][7].attempts == 1")


def test_redirects_that_go_in_a_circle_end(local, near):
    near.misbehave(Fault("redirect", key="train/0007", body="/bucket/train/0007"))
    local(
        """
        (index, error), = epoch(objects())[1].items()
        assert index == 7 and type(error) is hr.StoreError and error.attempts == 1, error
        """
    )
    assert len([seen for seen in near.seen() if seen.key == "train/0007"]) == 11, "ten redirects"


def test_a_listing_that_is_redirected_is_refused(case, near, far):
    near.misbehave(Fault("redirect", method="LIST", body=elsewhere(far, "?list-type=2")))
    case(
        """
        try:
            hr.ObjectDataset(hr.Store(url, options=options))
        except hr.StoreError as error:
            assert "another host" in str(error), str(error)
        else:
            raise AssertionError("it was listed")
        """,
        url=near.url,
        options=near.store_options,
        within=5.0,
    )
    assert far.seen("LIST") == []


def test_shards_are_kept_to_their_host_too(case, near, far):
    near.misbehave(Fault("redirect", body=elsewhere(far)))
    case(
        """
        for dataset in (hr.LinesDataset(f"{url}/train/0007.txt"), hr.TarDataset(f"{url}/train/0007.tar")):
            with hr.DataLoader(dataset, batch_size=1) as loader:
                delivered, errors = drain(loader)
            (error,) = errors
            assert "another host" in str(error) and not delivered, error
        """,
        url=near.http_url,
        within=5.0,
    )
    assert far.seen() == []


# From TLS to plain HTTP


class Elsewhere(BaseHTTPRequestHandler):
    """Answers every request with a redirect."""

    def do_GET(self):
        self.send_response(302)
        self.send_header("Location", self.server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *said):
        pass


@pytest.fixture
def secure(tmp_path):
    """A server behind TLS, with a certificate of its own, that sends everybody to its `location`."""
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(_certificate())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _certificate():
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    later = now + datetime.timedelta(hours=1)
    hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, later)
    built = builder.add_extension(hosts, critical=False).sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + built.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("allow", [False, True])
def test_a_redirect_from_tls_to_plain_http_is_refused_though_it_is_the_same_host(case, secure, near, allow):
    secure.location = f"{near.http_url}/train/0007"
    case(
        """
        retry = hr.RetryPolicy(initial_backoff=0.01)
        dataset = hr.ObjectDataset(hr.Store(url, options=options, retry=retry), keys=["0007"])
        with hr.DataLoader(dataset, batch_size=1, collate_fn=len) as loader:
            delivered, (error,) = drain(loader)
        assert not delivered and isinstance(error, hr.StoreError) and error.attempts == 1, error
        """,
        url=f"https://127.0.0.1:{secure.server_port}/train",
        options={"client_options": {"allow_invalid_certificates": True}, "allow_redirects": allow},
        within=5.0,
    )
    assert near.seen() == []
