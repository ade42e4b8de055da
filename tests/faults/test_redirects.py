"""Redirects: no byte of a request reaches a host that the user did not name."""

import datetime
import ipaddress
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import headrace as hr
from object_server import Fault, ObjectServer
from tests.faults.ledger import Ledger, body_of, contents
from tests.faults.watching import drain

KEY = "x-api-key"
SECRET = "secret-of-a-header"


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
    """A server on another host name of this machine, which answers 403 to requests without the secret header."""
    servers[1].misbehave(Fault("status", status=403, unless=(KEY, SECRET)))
    yield servers[1]
    servers[1].misbehave()


def other_host_url(far, key="train/0007"):
    return f"{far.http_url}/{key}".replace("127.0.0.1", "localhost")


@pytest.fixture(params=["s3", "http"])
def local(request, case, near):
    """Run a program with a `Ledger` over each type of store that has one host, and a secret in its headers."""

    def run(program, **more):
        url, options = near.http_url, {"client_options": {"allow_http": True, "default_headers": {KEY: SECRET}}, **more}
        if request.param == "s3":
            url, options = near.url, {**near.store_options, **options}
        ledger = Ledger(url, options, keys=[key.removeprefix("train/") for key in contents()])
        case(lambda: program(ledger), within=5.0)

    return run


def test_redirect_to_another_host_is_refused_before_a_byte_is_sent(local, near, far):
    near.misbehave(Fault("redirect", key="train/0007", body=other_host_url(far)))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects())
        assert type(error) is hr.StoreError, error
        assert error.attempts == 1, error
        assert "allow_redirects" in str(error), str(error)
        assert "another host" in str(error), str(error)
        assert SECRET not in str(error)

    local(program)
    assert far.seen() == []


def test_redirect_to_another_host_is_followed_with_allow_redirects(local, near, far):
    near.misbehave(Fault("redirect", key="train/0007", body=other_host_url(far)))
    local(Ledger.assert_all_delivered, allow_redirects=True)
    assert len(far.seen()) == 1, "the server answers nothing without the header: it was sent along"


def test_redirect_within_the_host_is_followed(local, near):
    near.misbehave(Fault("redirect", key="train/0007", body="/bucket/alias/0007"))
    local(Ledger.assert_all_delivered)


def test_redirect_to_a_host_without_an_address_is_refused(local, near):
    near.misbehave(Fault("redirect", key="train/0007", body="https://no-such-host.invalid/0007"))

    def program(ledger) -> None:
        assert ledger.failure(ledger.objects()).attempts == 1

    local(program)


def test_redirect_loop_is_reported(local, near):
    near.misbehave(Fault("redirect", key="train/0007", body="/bucket/train/0007"))

    def program(ledger) -> None:
        error = ledger.failure(ledger.objects())
        assert type(error) is hr.StoreError, error
        assert error.attempts == 1, error

    local(program)
    assert len([seen for seen in near.seen() if seen.key == "train/0007"]) == 11, "ten redirects"


def test_redirected_listing_is_refused(case, near, far):
    near.misbehave(Fault("redirect", method="LIST", body=other_host_url(far, "?list-type=2")))
    store = hr.Store(near.url, options=near.store_options)

    def program() -> None:
        with pytest.raises(hr.StoreError, match="another host"):
            hr.ObjectDataset(store)

    case(program, within=5.0)
    assert far.seen("LIST") == []


def test_redirected_shards_are_refused(case, near, far):
    near.misbehave(Fault("redirect", body=other_host_url(far)))
    url = near.http_url

    def program() -> None:
        for dataset in (hr.LinesDataset(f"{url}/train/0007.txt"), hr.TarDataset(f"{url}/train/0007.tar")):
            with hr.DataLoader(dataset, batch_size=1) as loader:
                delivered, errors = drain(loader)
            (error,) = errors
            assert "another host" in str(error), error
            assert not delivered, error

    case(program, within=5.0)
    assert far.seen() == []


# From TLS to plain HTTP


class Redirects(BaseHTTPRequestHandler):
    """Answers every request with a redirect."""

    def do_GET(self):
        self.send_response(302)
        self.send_header("Location", self.server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def secure(tmp_path):
    """A server behind TLS, with a certificate of its own, that redirects every request to its `location`."""
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(_certificate())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirects) as server:
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
def test_redirect_from_tls_to_plain_http_is_refused_on_the_same_host(case, secure, near, allow):
    secure.location = f"{near.http_url}/train/0007"
    url = f"https://127.0.0.1:{secure.server_port}/train"
    options = {"client_options": {"allow_invalid_certificates": True}, "allow_redirects": allow}

    def program() -> None:
        retry = hr.RetryPolicy(initial_backoff=0.01)
        dataset = hr.ObjectDataset(hr.Store(url, options=options, retry=retry), keys=["0007"])
        with hr.DataLoader(dataset, batch_size=1, collate_fn=len) as loader:
            delivered, (error,) = drain(loader)
        assert not delivered, error
        assert isinstance(error, hr.StoreError), error
        assert error.attempts == 1, error

    case(program, within=5.0)
    assert near.seen() == []
