"""`hr.hub` lists a repository of the Hugging Face Hub, and datasets read its files through redirects to a CDN."""

import asyncio
import os

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    EmptyListingError,
    ObjectNotFoundError,
    StateError,
    StoreUnreachableError,
)
from tests.hub_server import serve_hub

OLD, NEW, TOKEN = "a" * 40, "b" * 40, "hf_" + "s" * 30


def jsonl(start, count):
    return b"".join(b'{"x": %d}\n' % number for number in range(start, start + count))


FILES = {
    ".gitattributes": b"*.parquet filter=lfs",
    "README.md": b"#" * 20,
    "data/.part.jsonl": b"{",
    "data/a.jsonl": jsonl(0, 20),
    "data/b c+é%20#.jsonl": jsonl(20, 10),
    "data/c.jsonl": jsonl(30, 300),
    "data/deep/d.jsonl": jsonl(330, 10),
    "empty.jsonl": b"",
    "large.bin": os.urandom(20 << 20),
    "tokens.bin": np.arange(2000, dtype=np.uint16).tobytes(),
}


@pytest.fixture
def server(monkeypatch):
    with serve_hub(
        {"main": OLD, "refs/pr/1": NEW, OLD: FILES, NEW: {"data/a.jsonl": jsonl(7, 1)}}
    ) as server:
        # of HF_ENDPOINT, at its import
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.urls[0])
        yield server


def hub(files, name="datasets/org/name", token=TOKEN, **options):
    return hr.hub(name, files, token=token, **options)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ("data/*.jsonl", ["data/a.jsonl", "data/b c+é%20#.jsonl", "data/c.jsonl"]),
        ("data/{a,c}.jsonl", ["data/a.jsonl", "data/c.jsonl"]),
        (
            ["data/?.jsonl", "**/[cd].jsonl"],
            ["data/a.jsonl", "data/c.jsonl", "data/deep/d.jsonl"],
        ),
        ("*", ["README.md", "empty.jsonl", "large.bin", "tokens.bin"]),
    ],
)
def test_files_are_found_by_globs_over_all_pages_with_their_sizes(server, files, found):
    assert [(shard.key, shard.head.size) for shard in hub(files)] == [
        (key, len(FILES[key])) for key in found
    ]


def test_datasets_read_by_signed_urls_that_never_get_the_token(server):
    lines = hr.LinesDataset(hub(["data/**/*.jsonl", "empty.jsonl"]))
    assert sorted(row["x"] for row in lines) == [*range(340)]
    store = hub("*")[0].store
    files = hr.ObjectDataset(store, keys=["README.md", "tokens.bin"])
    assert [bytes(sample.data) for sample in (files[0], files[1])] == [
        FILES["README.md"],
        FILES["tokens.bin"],
    ]
    windows = hr.TokenDataset(hub("tokens.bin"), seq_len=100)
    with hr.DataLoader(windows, batch_size=5, shuffle=True, num_workers=1) as loader:
        assert sorted(
            token for batch in loader for token in batch.flatten().tolist()
        ) == [*range(2000)]
    assert {(host, token) for host, _, _, token in server.requests} == {
        ("hub", TOKEN),
        ("cdn", ""),
    }
    resolved = [path for host, _, path, _ in server.requests if "/resolve/" in path]
    assert all(path.startswith(f"/datasets/org/name/resolve/{OLD}/") for path in resolved)
    # A large file is read in parts, and a HEAD request would not be signed.
    server.requests.clear()
    assert (
        asyncio.run(hub("large.bin")[0].read_version(20 << 20))[1] == FILES["large.bin"]
    )
    assert {method for _, method, _, _ in server.requests} == {"GET"}


def test_branch_is_resolved_once_and_a_state_does_not_fit_another_commit(server):
    loader = hr.DataLoader(
        hr.LinesDataset(hub("data/a.jsonl", "datasets/org/name@main")), batch_size=4
    )
    server.commits["main"] = NEW
    assert next(iter(loader))["x"].tolist() == [0, 1, 2, 3]
    state = loader.state_dict()
    same, other = (
        hr.LinesDataset(hub("data/a.jsonl", f"hf://datasets/org/name@{each}"))
        for each in (OLD, "main")
    )
    loader = hr.DataLoader(same, batch_size=4)
    loader.load_state_dict(state)
    assert [x for batch in loader for x in batch["x"].tolist()] == [*range(4, 20)]
    loader = hr.DataLoader(other, batch_size=4)
    loader.load_state_dict(state)
    with pytest.raises(StateError):
        next(iter(loader))
    assert (
        hub("data/*", "models/org/name@refs/pr/1")[0].name
        == f"{server.urls[0]}/org/name/resolve/{NEW}/data/a.jsonl"
    )


@pytest.mark.parametrize(
    ("name", "files", "token", "error", "text"),
    [
        (
            "datasets/org/name",
            "data/*.csv",
            TOKEN,
            EmptyListingError,
            r"no file matches 'data/\*.csv'",
        ),
        ("datasets/org/name@v9", "*", TOKEN, ObjectNotFoundError, "Revision Not Found"),
        ("datasets/org/other", "*", TOKEN, ObjectNotFoundError, "may read it"),
        (
            "datasets/org/name",
            "*",
            False,
            hr.StoreError,
            "A private repository needs a token .* HF_TOKEN",
        ),
        ("org/name", "*", TOKEN, ValueError, "must be datasets/…, spaces/… or models/…"),
    ],
)
def test_refused_listings_say_what_to_do(server, name, files, token, error, text):
    server.private_token = TOKEN
    with pytest.raises(error, match=text) as caught:
        hub(files, name, token)
    assert not isinstance(caught.value, hr.StoreError) or caught.value.__context__ is None


def test_hub_that_does_not_respond_is_unreachable(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StoreUnreachableError, match="HF_ENDPOINT"):
        hub("*")


def test_hub_that_throttles_is_an_error(server):
    server.throttled = 1
    with pytest.raises(hr.StoreError, match="429") as caught:
        hub("data/*.jsonl")
    assert caught.value.status == 429


def test_reads_are_retried_if_throttled_and_name_the_terms_but_not_the_token_if_refused(
    server,
):
    shards = hub("data/a.jsonl")
    server.throttled = 3
    with hr.DataLoader(hr.LinesDataset(shards), batch_size=None) as loader:
        assert len(list(loader)) == 20
        assert loader.stats().requests.throttled == 3
        state = loader.state_dict()
    server.gated = True
    with pytest.raises(
        hr.StoreError, match=r"ask for access.*accepted the terms"
    ) as caught:
        list(hr.LinesDataset(shards))
    assert (
        TOKEN
        not in f"{caught.value!r} {shards!r} {shards[0].store!r} {shards[0].store.store_id} {state}"
    )
    with pytest.raises(ValueError, match=r"hr\.hub"):
        hr.ParquetDataset("hf://datasets/org/name/*.parquet")
