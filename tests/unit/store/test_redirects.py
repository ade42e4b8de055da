"""Which stores' requests are kept to one host."""

import pytest

from headrace._core.store.open import _kept_to_one_host

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


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
        ("https://example.org", {"client_options": {"proxy_url": "http://proxy:3128"}}, None),
        ("s3://bucket", {}, None),
        ("s3://bucket", {"endpoint": "http://10.0.0.7:9000"}, None),
        ("s3://bucket", {"endpoint": "http://10.0.0.7:9000", "skip_signature": True}, "10.0.0.7"),
        ("s3://bucket", {"AWS_ENDPOINT_URL": "https://minio", "access_key_id": "a"}, "minio"),
        ("s3://bucket", {"config": {"endpoint": "https://minio", "aws_access_key_id": "a"}}, "minio"),
        ("gs://bucket", {}, None),
        ("az://container", {"account_name": "a"}, None),
    ],
)
def test_requests_are_kept_to_a_host_where_there_is_one_only(url, options, host):
    assert _kept_to_one_host(url, options).get("proxy_excludes") == host


def test_proxy_of_the_environment_is_used_but_for_hosts_that_it_is_not_for(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    assert _kept_to_one_host("https://example.org", {}) == {}
    monkeypatch.setenv("no_proxy", "example.org")
    assert _kept_to_one_host("https://example.org", {})["proxy_excludes"] == "example.org"
