"""Where a store's options come from: its endpoint, the environment and the user."""

import os
import re

import pytest
from obstore.store import HTTPStore

from headrace._store.open import StoreOptions, store_id
from headrace._store.store import Store


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """No variable of this machine decides these tests."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("s3:/bucket/data", {}, "Did you mean s3://bucket/data?"),
        ("hdfs://host", {}, "It must begin with s3, "),
        ("s3://bucket", {"regoin": "x"}, "'regoin'"),
        ("gs://bucket", {"client_options": {"timout": "1s"}}, "timout"),
        (
            "s3://bucket",
            {"endpoint": "minio:9000"},
            "its endpoint must begin with http:// or https://",
        ),
        (
            "s3://bucket",
            {"endpoint": ""},
            "its endpoint must begin with http:// or https://",
        ),
    ],
)
def test_misspelt_urls_and_options_are_named(url, options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        Store(url, options=options).backend()


def client_of(url, options):
    return StoreOptions(url, options).client


@pytest.mark.parametrize(
    ("url", "options", "environment", "allowed"),
    [
        ("s3://bucket", {"endpoint": "http://10.0.0.7:9000"}, {}, True),
        ("s3://bucket", {}, {"AWS_ENDPOINT_URL": "http://10.0.0.7:9000"}, True),
        (
            "s3://bucket",
            {"endpoint": "https://10.0.0.7"},
            {"AWS_ENDPOINT": "http://10.0.0.7"},
            None,
        ),
        ("gs://bucket", {"base_url": "http://10.0.0.7"}, {}, True),
        (
            "abfss://container",
            {},
            {"AZURE_STORAGE_ENDPOINT": "http://10.0.0.7/account"},
            True,
        ),
        ("https://10.0.0.7/data", {}, {}, None),
    ],
)
def test_allow_http_is_inferred_from_the_endpoint(
    monkeypatch, url, options, environment, allowed
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert client_of(url, options).get("allow_http") is allowed


@pytest.mark.parametrize("url", ["s3://bucket", "s3a://b", "gs://b", "az://b"])
def test_client_options_are_found_beside_those_of_the_store(url):
    client = client_of(
        url, {"timeout": "5s", "client_options": {"Proxy_URL": "http://mine"}}
    )
    assert client == {"proxy_url": "http://mine", "timeout": "5s"}


def test_options_of_the_client_do_not_make_another_store(monkeypatch):
    plain = store_id("s3://bucket", {"region": "eu"}, None)
    given = {
        "region": "eu",
        "aws_allow_http": "true",
        "proxy_url": "http://me:hush@proxy",
        "profile": "mine",
    }
    assert store_id("s3://bucket", given, None) == plain


def spellings(headers):
    return [
        {"default_headers": headers},
        {"client_options": {"default_headers": headers}},
        {"config": {"aws_default_headers": headers}},
    ]


def test_default_headers_make_another_store_in_each_spelling():
    plain = store_id("s3://bucket", {}, None)
    of_a = {
        store_id("s3://bucket", options, None)
        for options in spellings({"x-tenant": "tenant-a"})
    }
    of_b = {
        store_id("s3://bucket", options, None)
        for options in spellings({"X-Tenant": b"tenant-b"})
    }
    assert len(of_a) == len(of_b) == 1
    assert len({plain, *of_a, *of_b}) == 3
    assert "tenant" not in str(of_a | of_b)
    backends = [
        HTTPStore(
            "http://host", client_options={"allow_http": True, "default_headers": h}
        )
        for h in ({}, {"a": "b"})
    ]
    assert len({store_id("http://host", {}, backend) for backend in backends}) == 2


def test_credentials_do_not_make_another_store_and_options_beside_them_do():
    plain = store_id("https://host", {}, None)
    headers = {
        "Authorization": "Bearer hush",
        "cookie": "a=b",
        "X-Auth-Token": "hush",
        "user-agent": "mine/2",
    }
    assert {
        store_id("https://host", options, None) for options in spellings(headers)[:2]
    } == {plain}
    assert store_id("https://host", {"default_headers": {}}, None) == plain

    def of(endpoint, secret):
        return store_id(
            "s3://bucket",
            {"config": {"endpoint": endpoint, "secret_access_key": secret}},
            None,
        )

    assert (
        of("http://one", "hush") == of("http://one", "other") != of("http://two", "hush")
    )
    assert "hush" not in str(of("http://one", "hush"))
