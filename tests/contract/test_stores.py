"""Connections to stores, their error messages, and the programs of docs/stores.md."""

import gzip
import os
import pathlib
import re
import socket
import ssl
import sys
from pathlib import Path
from types import SimpleNamespace

import obstore
import pytest
import trustme
from botocore.exceptions import ProfileNotFound

import headrace as hr
from headrace._store.open import open_store
from headrace._store.retry_policy import RetryPolicy
from headrace.datasets.objects import ObjectDataset
from headrace.datasets.tar import TarDataset
from headrace.errors import (
    EmptyListingError,
    MissingExtraError,
    ObjectNotFoundError,
    StoreError,
    StoreUnreachableError,
)
from headrace.loader import DataLoader
from object_server import ObjectServer
from tests.answers import answering
from tests.contract.places import ACCOUNT, ACCOUNT_KEY, azurite, moto_bucket, variables_of

# of boto3 and moto themselves
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

QUICK = RetryPolicy(initial_backoff=0.01)
PASSWORD = "canary-of-a-password"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    """Remove the variables and files of this machine that configure stores."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith(
            "_proxy"
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def bucket():
    """A bucket of moto's with three objects, and its store options."""
    with moto_bucket("holidays") as (
        client,
        options,
    ):  # moto keeps one set of buckets for a process
        for i in range(3):
            client.put_object(Bucket="holidays", Key=f"train/{i}.bin", Body=b"%d" % i)
        yield options


@pytest.fixture
def recorder():
    """A server that answers every GET with its path, and records the header with the credentials."""

    def answer(request):
        recorder.asked.append(request.headers.get("Authorization", ""))
        request.send(
            301 if recorder.moved else 200,
            request.path.removesuffix("?[").encode(),
            {"ETag": '"1"'},
        )

    recorder = SimpleNamespace(asked=[])
    # Without a Location, as Amazon answers for a bucket of another region.
    recorder.moved = False
    with answering(answer) as recorder.url:
        yield recorder


def read_from(recorder, **options):
    """Read an object of a bucket at the recorder; returns the credentials that were sent."""
    store = hr.Store("s3://photos", options={"endpoint": recorder.url, **options})
    assert bytes(ObjectDataset(store, keys=["a"])[0].data) == b"/photos/a"
    return recorder.asked[-1]


@pytest.fixture
def refused_port():
    """A port without a listener, reserved for the test."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def failure_of(url, **options):
    """The error of reading one object."""
    with pytest.raises(StoreError) as failed:
        ObjectDataset(hr.Store(url, options=options, retry=QUICK), keys=["a"])[0]
    assert PASSWORD not in str(failed.value)
    return failed.value


# Endpoints and the environment


@pytest.mark.parametrize("workers", [0, 1])
def test_bucket_is_configured_by_the_environment_alone(monkeypatch, bucket, workers):
    for name, value in variables_of(bucket).items():
        monkeypatch.setenv(name, value)
    with DataLoader(
        ObjectDataset("s3://holidays/train"),
        batch_size=3,
        num_workers=workers,
        collate_fn=list,
    ) as loader:
        (batch,) = loader
    assert [bytes(sample.data) for sample in batch] == [b"0", b"1", b"2"]


def test_requests_are_unsigned_with_aws_skip_signature(monkeypatch, recorder):
    monkeypatch.setenv("AWS_ENDPOINT_URL", recorder.url)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert bytes(ObjectDataset("s3://photos", keys=["a"])[0].data) == b"/photos/a"
    assert set(recorder.asked) == {""}


# Profiles


def write_profiles(folder):
    text = "[default]\naws_access_key_id = AKIADEFAULT\naws_secret_access_key = canary-default\n"
    text += "[research]\naws_access_key_id = AKIARESEARCH\naws_secret_access_key = canary-research\n"
    (folder / "credentials").write_text(text)
    process = '{"Version": 1, "AccessKeyId": "AKIAPROCESS", "SecretAccessKey": "canary-process"}'
    (folder / "process.json").write_text(process)
    text = "[profile research]\nregion = eu-west-3\n"
    text += f"[profile process]\ncredential_process = cat {folder / 'process.json'}\n"
    (folder / "config").write_text(text)


def test_profiles_and_providers_give_credentials_and_region(
    monkeypatch, tmp_path, recorder
):
    def provide():
        return {
            "access_key_id": "AKIAPROVIDED",
            "secret_access_key": "s",
            "token": None,
            "expires_at": None,
        }

    write_profiles(tmp_path)
    # By a credential process.
    assert "AKIAPROCESS" in read_from(recorder, profile="process")
    assert "AKIAPROVIDED" in read_from(recorder, credential_provider=provide)
    monkeypatch.setenv("AWS_PROFILE", "research")
    sent = read_from(recorder)
    assert "AKIARESEARCH" in sent
    assert "eu-west-3" in sent


@pytest.mark.parametrize("workers", [0, 1])
def test_profile_option_is_sent_to_other_processes(tmp_path, recorder, workers):
    write_profiles(tmp_path)
    options = {"endpoint": recorder.url, "profile": "default", "region": "us-east-2"}
    dataset = ObjectDataset(hr.Store("s3://photos", options=options), keys=["a"])
    with DataLoader(dataset, batch_size=1, num_workers=workers, collate_fn=len) as loader:
        assert list(loader) == [1]
    assert "AKIADEFAULT" in recorder.asked[0]
    assert "us-east-2" in recorder.asked[0]


def test_missing_profile_is_an_error_with_its_name(monkeypatch, tmp_path):
    write_profiles(tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(ProfileNotFound, match="missing") as refused:
        ObjectDataset("s3://photos", keys=["a"])[0]
    assert "canary" not in str(refused.value)


def test_profile_without_boto3_is_an_error_with_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setenv("AWS_PROFILE", "research")
    with pytest.raises(MissingExtraError, match=r"headrace\[aws\]"):
        ObjectDataset("s3://photos", keys=["a"])[0]


def test_profile_of_the_environment_is_not_read_beside_other_credentials(
    monkeypatch, recorder
):
    monkeypatch.setenv("AWS_PROFILE", "missing")
    assert read_from(recorder, skip_signature="true") == ""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    assert "AKIA" in read_from(recorder)


def test_error_of_missing_credentials_says_how_to_name_a_profile(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        metadata = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(
        "headrace._store.store.CREDENTIAL_HOST", metadata.removeprefix("http://")
    )
    error = failure_of("s3://photos", region="us-east-1", metadata_endpoint=metadata)
    assert "No credentials were given" in str(error)
    assert "AWS_PROFILE" in str(error)


# Messages of connection errors


def test_error_of_a_refused_connection_names_the_address(refused_port):
    error = failure_of(
        "s3://photos", endpoint=f"http://127.0.0.1:{refused_port}", skip_signature=True
    )
    assert isinstance(error, StoreUnreachableError)
    assert f"Connection refused (127.0.0.1:{refused_port})" in str(error)
    assert "endpoint" in str(error)
    assert error.attempts == 3


def test_error_of_an_unresolved_host_name_says_so():
    error = failure_of(
        "s3://photos", endpoint="https://minio.invalid", skip_signature=True
    )
    assert isinstance(error, StoreUnreachableError)
    assert "no connection to the store: failed to lookup address information" in str(
        error
    )
    assert "GET https://minio.invalid/photos/a" in str(error)
    assert error.attempts == 3


@pytest.mark.parametrize("how", ["environment", "options"])
def test_error_of_a_refused_proxy_hides_its_password(monkeypatch, refused_port, how):
    proxy = f"http://me:{PASSWORD}@127.0.0.1:{refused_port}"
    client = {"proxy_url": proxy} if how == "options" else {}
    if how == "environment":
        monkeypatch.setenv("http_proxy", proxy)
    error = failure_of("http://example.org/data", client_options=client)
    assert f"Connection refused (127.0.0.1:{refused_port})" in str(error)
    assert PASSWORD not in str(error)


def test_missing_bucket_and_missing_key_are_different_errors(bucket):
    assert "NoSuchBucket" in str(missing := failure_of("s3://another-bucket", **bucket))
    assert "Check bucket and key, and endpoint, region and credentials" in str(missing)
    assert "not found" in str(failure_of("s3://holidays/nothing", **bucket))
    with pytest.raises(EmptyListingError, match="s3://holidays/nothing"):
        ObjectDataset(hr.Store("s3://holidays/nothing", options=bucket))
    with pytest.raises(ObjectNotFoundError, match="NoSuchBucket"):
        ObjectDataset(hr.Store("s3://no-such-bucket", options=bucket))


def test_object_with_content_encoding_is_not_decompressed(bucket):
    store = hr.Store("s3://holidays/packed", options=bucket)
    packed = gzip.compress(b"1\n2\n")
    obstore.put(
        store.backend(), "a.jsonl.gz", packed, attributes={"Content-Encoding": "gzip"}
    )
    assert bytes(ObjectDataset(store)[0].data) == packed
    assert list(hr.LinesDataset("a.jsonl.gz", store=store)) == [1, 2]


def test_server_that_answers_404_to_a_listing_is_said_to_be_one_that_may_not_list():
    with answering(lambda request: request.send(404, b"", {})) as url:
        for make in (ObjectDataset, TarDataset):
            with pytest.raises(
                EmptyListingError, match=r"list by WebDAV only: .* keys=\[\.\.\.\]"
            ):
                make(f"{url}/data")


def test_error_of_a_bucket_in_another_region_says_so(recorder):
    recorder.moved = True
    error = failure_of("s3://photos", endpoint=recorder.url, skip_signature=True)
    assert "incorrectly configured region" in str(error)
    assert error.attempts == 1


# TLS


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def secure(authority):
    """A server with TLS, whose certificate is of a private authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with answering(
        lambda request: request.send(200, b"secret", {"ETag": '"1"'}), context
    ) as url:
        yield url


def test_error_of_a_certificate_of_an_unknown_authority_says_so(secure):
    error = failure_of(secure)
    assert isinstance(error, StoreUnreachableError)
    assert "no connection to the store: UnknownIssuer" in str(error)
    assert "root_certificate" in str(error)


def test_error_of_a_server_without_tls_says_so(recorder):
    error = failure_of(recorder.url.replace("http", "https"))
    assert "no connection to the store: InvalidContentType" in str(error)
    assert "http://" in str(error)


# Paths


def test_what_is_no_place_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        ObjectDataset("")
    for dataset in (ObjectDataset, TarDataset):
        with pytest.raises(ValueError, match="minio://"):
            list(dataset("minio://bucket/a.tar"))
    (tmp_path / "a.bin").write_bytes(b"data")
    with pytest.raises(EmptyListingError, match="not a file"):
        ObjectDataset(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="ObjectDataset takes URLs"):
        hr.FileDataset("s3://bucket/train")


# docs/stores.md

PAGE = Path(hr.__file__).parents[2] / "docs" / "stores.md"
BLOCKS = re.findall(
    r"<!-- (?:run: )?(\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL
)
SECRETS = {
    "key_id": "AKIATESTING",
    "secret": "testing-secret",
    "account": ACCOUNT,
    "account_key": ACCOUNT_KEY,
    "sas": "sv=2024&sig=s",
}


def run(code):
    """Run a block of the page, whose last line makes a dataset; returns its first sample."""
    names = {"hr": hr, "pathlib": pathlib, **SECRETS}
    exec(re.sub(r"^(?=hr\.)", "dataset = ", code, flags=re.MULTILINE), names)
    return bytes(names["dataset"][0].data)


def test_every_block_of_the_page_is_run_or_opened():
    kinds = [kind for kind, _ in BLOCKS]
    assert set(kinds) == {
        "s3",
        "profile",
        "open",
        "gs",
        "az",
        "http",
        "path",
        "proxy",
        "tls",
    }
    assert len(kinds) == PAGE.read_text().count("```python") - 1, (
        "all but the first, which only shows the form"
    )


@pytest.mark.parametrize(
    ("kind", "code"), [block for block in BLOCKS if block[0] not in ("open", "az")]
)
def test_block_of_the_page_reads_an_object(request, monkeypatch, tmp_path, kind, code):
    found = b"0"
    with ObjectServer({"a": b"0", "train/a": b"0"}) as server:
        if "skip_signature" in code and kind == "s3":  # moto's bucket is not public
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
            code = code.replace("s3://bucket/train", "s3://bucket")
        elif kind in ("s3", "profile"):
            endpoint = request.getfixturevalue("bucket")["endpoint"]
            if "endpoint" not in code:
                monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            if kind == "profile":
                write_profiles(tmp_path)
            code = code.replace("http://minio:9000", endpoint).replace(
                "s3://bucket", "s3://holidays"
            )
        elif kind == "gs":
            code = code.replace("http://fake-gcs:4443", server.endpoint)
        elif kind == "path":
            (tmp_path / "a").write_bytes(b"0")
            code = code.replace("/data/train", str(tmp_path))
        elif kind == "tls":
            request.getfixturevalue("authority").cert_pem.write_to_path(
                tmp_path / "ca.pem"
            )
            monkeypatch.chdir(tmp_path)
            code = code.replace(
                "https://host/train", request.getfixturevalue("secure")
            ).replace("a.jpg", "a")
            found = b"secret"
        else:
            url = request.getfixturevalue("recorder").url
            code = code.replace("https://host", url).replace("http://proxy:3128", url)
            found = b"/train/a.jpg" if kind == "http" else b"http://host/train/a.jpg"
        assert run(code) == found


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "az"])
def test_block_of_the_page_on_azure_reads_an_object(monkeypatch, tmp_path, code):
    with azurite({"train/a": b"0"}, tmp_path) as place:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", place.options["options"]["endpoint"])
        assert run(code.replace("az://container", place.url)) == b"0"


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "open"])
def test_stores_without_a_test_server_can_be_opened(code):
    def opened(url, *, options):
        assert open_store(url, options, timeout=30.0)

    exec(
        code,
        {
            "hr": SimpleNamespace(ObjectDataset=lambda store: None, Store=opened),
            **SECRETS,
        },
    )
