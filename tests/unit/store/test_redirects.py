"""Which hosts a store's requests may go to, and what is refused where that cannot be kept."""

import pytest

from headrace._core.store.redirects import fenced_host, restrict_redirects
from headrace._core.store.store import Store
from headrace.datasets.objects import ObjectDataset

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
SECRET = {"client_options": {"default_headers": {"x-api-key": "hush"}}}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("url", "options", "host"),
    [
        ("https://example.org/train", {}, "example.org"),
        ("HTTP://Example.org:8080", {}, "example.org"),
        ("http://[::1]:80/a", {}, "::1"),
        ("https://example.org", {"allow_redirects": True}, None),
        ("s3://bucket", {}, None),
        ("s3://bucket", {"endpoint": "http://10.0.0.7:9000"}, None),
        ("s3://bucket", {"endpoint": "http://10.0.0.7:9000", "skip_signature": True}, "10.0.0.7"),
        ("s3://bucket", {"AWS_ENDPOINT_URL": "https://minio", "access_key_id": "a"}, "minio"),
        ("s3://bucket", {"config": {"endpoint": "https://minio", "aws_access_key_id": "a"}}, "minio"),
        ("gs://bucket", {}, None),
        ("az://container", {"account_name": "a"}, None),
        ("file:///data", {}, None),
        ("memory://", {}, None),
    ],
)
def test_requests_are_kept_to_a_host_where_there_is_one_only(url, options, host):
    assert fenced_host(url, options) == host


@pytest.mark.parametrize("variable", PROXIES[:3])
def test_behind_a_proxy_a_header_that_a_redirect_would_take_along_is_refused(monkeypatch, variable):
    url = "http://example.org" if variable == "http_proxy" else "https://example.org"
    monkeypatch.setenv(variable, "http://proxy.example.org:3128")
    assert restrict_redirects(url, {}) == {}
    assert restrict_redirects(url, {**SECRET, "allow_redirects": True}) == {}
    with pytest.raises(ValueError, match=r"'x-api-key'.*example\.org.*'allow_redirects': True") as refused:
        ObjectDataset(Store(url, options=SECRET), keys=["a"])
    assert "hush" not in str(refused.value)


def test_a_proxy_in_the_options_counts_as_one(monkeypatch):
    client = {**SECRET["client_options"], "proxy_url": "http://proxy.example.org:3128"}
    with pytest.raises(ValueError, match="x-api-key"):
        restrict_redirects("https://example.org", {"client_options": client})


def test_a_host_that_the_environment_keeps_from_its_proxy_is_fenced_in(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    assert restrict_redirects("https://example.org", SECRET)["proxy_excludes"] == "example.org"


@pytest.mark.parametrize("name", ["Authorization", "cookie", "Accept", "User-Agent"])
def test_headers_that_do_not_go_along_or_hold_no_secret_pass_any_proxy(monkeypatch, name):
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    assert restrict_redirects("https://example.org", {"client_options": {"default_headers": {name: "x"}}}) == {}
