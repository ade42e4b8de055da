"""What leaves the library about a URL has no secrets in it."""

import pytest

from headrace._store.redaction import redact_text, redact_url, secrets_in


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/train", "s3://bucket/train"),
        ("https://me:pass@host:8080/a/b.bin", "https://host:8080/a/b.bin"),
        ("https://me:p@ss@host/a", "https://host/a"),
        (
            "abfss://files@account.dfs.core.windows.net/a",
            "abfss://files@account.dfs.core.windows.net/a",
        ),
        ("az://me:pass@host/a", "az://host/a"),
        ("https://account.blob/c?sv=1&sig=abc", "https://account.blob/c"),
        ("https://host?sig=a/b", "https://host"),
        ("https://host/folder@v2/a", "https://host/folder@v2/a"),
        ("no url at all?sig=abc", "no url at all"),
    ],
)
def test_a_url_keeps_its_place_and_loses_its_secrets(url, shown):
    assert redact_url(url) == shown


def test_urls_end_where_a_quote_does_and_secrets_are_masked_wherever_they_stand():
    assert (
        redact_text("""at "http://a:b@h/x?q=1", 'http://a:b@h/y?q=1'""")
        == """at "http://h/x", 'http://h/y'"""
    )
    assert (
        redact_text("key hush and hush-hush", ["hush", "hush-hush"]) == "key *** and ***"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no /b/k?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=hush sorry", "no /b/k sorry"),
        ("no /b/k?verify=hush", "no /b/k"),
        (
            "GET https://me:hush@h/k?hush (https://me:hush@h/k?hush)",
            "GET https://h/k (https://h/k",
        ),
        ("https:\\/\\/host\\/k?sig=hush", "https:\\/\\/host\\/k"),
        ("k%3FX-Amz-Signature%3Dhush%26b", "k%3FX-Amz-Signature%3D***"),
        (
            "k&amp;X-Amz-Security-Token=hush&amp;a=b",
            "k&amp;X-Amz-Security-Token=***&amp;a=b",
        ),
        (
            "AWSAccessKeyId=hush Expires=3&Signature=hush",
            "AWSAccessKeyId=*** Expires=3&Signature=***",
        ),
        (
            '{"token": "hush", "Authorization": "Bearer hush", "n": 1}',
            '{"token": "***", "Authorization": "***", "n": 1}',
        ),
        (
            "authorization: AWS4-HMAC-SHA256 Credential=hush, Signature=hush\nx",
            "authorization: ***\nx",
        ),
        ("Set-Cookie: a=hush; b=hush", "Set-Cookie: ***"),
        ("X-Api-Key: hush", "X-Api-Key: ***"),
        ("sent bearer hushhushhushhush.", "sent bearer ***"),
        ("no user:p@ss@host/k", "no host/k"),
        ("at http://me:hush@[::1]:8000/k?sig=hush", "at http://[::1]:8000/k"),
        ("token: expired, bytes=0-3, is it? The security token is at 12:30", None),
        ("x" * 100_000, "x" * 4096),
    ],
)
def test_a_text_shows_no_signature_nor_a_credential_by_its_name(text, shown):
    assert redact_text(text) == (text if shown is None else shown)


def test_credentials_are_found_at_any_depth_and_nothing_else_is():
    options = {
        "region": "eu-west-1",
        "endpoint": "http://127.0.0.1",
        "skip_signature": True,
        "secret_access_key": "hush",
        "sse_bucket_key_enabled": "true",
        "config": {"aws_session_token": "silence", "bucket": "b"},
        "client_options": {
            "default_headers": {"x-auth": b"quiet", "cookie": "id=a/secret"},
            "timeout": "30s",
        },
    }
    assert sorted(secrets_in(options)) == [
        "a/secret",
        "hush",
        "id=a/secret",
        "quiet",
        "silence",
    ]
