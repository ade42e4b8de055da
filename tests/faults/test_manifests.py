"""Damaged and malicious manifests: an error that names the line, and no request to any store."""

import gzip
import json
import os
import re
import signal
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

import headrace as hr
from headrace._core.manifest.table_file import TableFile
from headrace.testing import ObjectServer

CLOSING = 5.0  # seconds; obstore closes idle connections on threads of its own, some time after their store is gone
NAMES = ["m.csv", "m.csv.gz", "m.jsonl", "m.parquet"]


@pytest.fixture
def server():
    objects = {f"train/{i:03}": b"%d" % i for i in range(50)}
    with ObjectServer({**objects, "secret": b"secret"}) as server:
        yield server


@pytest.fixture
def written(server, tmp_path):
    """Write an intact manifest; returns its path."""

    def write(name):
        dataset = hr.ObjectDataset(
            hr.Store(server.url + "/train", options=server.store_options), labels=lambda key: f"l{key}"
        )
        dataset.write_manifest(tmp_path / name)
        server.misbehave()  # counts from here
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    "key", ["../secret", "a/../../secret", "..\\secret", "/etc/hostname", "https://evil.example/a"]
)
def test_manifest_with_a_key_outside_its_prefix_is_refused_without_any_request(case, server, tmp_path, key):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "train").mkdir()
    server.misbehave()
    stores = [
        hr.Store(tmp_path / "train"),
        hr.Store(f"{server.http_url}/train"),
        hr.Store(f"{server.url}/train", options=server.store_options),
    ]

    def program() -> None:
        (tmp_path / "m.csv").write_text(f"key,label\n001,a\n{key},b\n")
        (tmp_path / "m.jsonl").write_text(json.dumps({"key": "001"}) + "\n" + json.dumps({"key": key}))
        pyarrow.parquet.write_table(pyarrow.table({"key": ["001", key]}), tmp_path / "m.parquet")
        for store in stores:
            for name, make, line in (
                ("m.csv", hr.ObjectDataset.from_csv, 3),
                ("m.csv", hr.ObjectDataset.from_manifest, 3),
                ("m.jsonl", hr.ObjectDataset.from_manifest, 2),
                ("m.parquet", hr.ObjectDataset.from_manifest, 2),
            ):
                with pytest.raises(hr.errors.ManifestError) as caught:
                    make(store, tmp_path / name)
                error = caught.value
                assert (error.line, error.column, error.source) == (line, "key", str(tmp_path / name)), error

    case(program, within=CLOSING)
    assert server.seen() == server.seen("HEAD") == server.seen("LIST") == []


@pytest.mark.parametrize("name", NAMES)
def test_truncated_manifest_is_an_error_and_never_a_shorter_dataset(case, server, written, name):
    path = written(name)
    store = hr.Store(f"{server.url}/train", options=server.store_options)

    def program() -> None:
        whole = path.read_bytes()
        last = len(whole.rstrip())  # an end of line at the end says nothing
        for at in range(0, last, max(1, last // 150)):
            path.write_bytes(whole[:at])
            with pytest.raises(hr.errors.ManifestError, match=re.escape(str(path))):
                hr.ObjectDataset.from_manifest(store, path)

    case(program, within=CLOSING)


@pytest.mark.parametrize("name", ["m.csv.gz", "m.parquet"])
def test_flipped_bit_in_a_manifest_with_checksums_is_an_error_or_changes_nothing(case, server, written, name):
    path = written(name)
    store = hr.Store(f"{server.url}/train", options=server.store_options)

    def program() -> None:
        whole = path.read_bytes()

        def entries():
            return list(zip(dataset.keys, dataset._labels, strict=True))

        dataset = hr.ObjectDataset.from_manifest(store, path)
        expected, errors = entries(), []
        for at in range(0, len(whole), max(1, len(whole) // 150)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            path.write_bytes(damaged)
            try:
                dataset = hr.ObjectDataset.from_manifest(store, path)
            except hr.errors.ManifestError as error:
                errors.append(str(error))
            else:
                assert entries() == expected, at
        assert len(errors) > 50, errors
        assert all(str(path) in error for error in errors), errors

    case(program, within=CLOSING)


def test_missing_object_of_a_manifest_is_a_failed_sample(case, server, written):
    path = written("m.csv")
    path.write_text(path.read_text().replace("\n007,", "\n07x,"))
    store = hr.Store(f"{server.url}/train", options=server.store_options)

    def program() -> None:
        dataset = hr.ObjectDataset.from_manifest(store, path)
        with hr.DataLoader(dataset, batch_size=10, transform=lambda sample: sample.label, on_error="skip") as loader:
            labels = [label for batch in loader for label in batch]
            (failure,) = loader.stats().skipped
        assert len(labels) == 49
        assert failure.key == "07x", failure
        assert failure.error == "ObjectNotFoundError", failure

    case(program, within=CLOSING)


@pytest.mark.parametrize("name", ["bomb.csv.gz", "bomb.jsonl.gz"])
def test_decompression_bomb_is_an_error_before_it_fills_memory(case, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(bytes(256 << 20)))

    def program() -> None:
        tracemalloc.start()
        with pytest.raises(hr.errors.ManifestError, match="longer than"):
            hr.ObjectDataset.from_manifest("s3://bucket", path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 96 << 20, peak

    case(program)


def test_manifest_is_unchanged_after_its_writer_is_killed(case, server, written):
    path = written("m.jsonl")
    before = path.read_bytes()

    def program() -> None:
        pid = os.fork()
        if not pid:
            try:
                os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # written, but not yet renamed
                TableFile(str(path), path=path)._replace(b"x" * 1000)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)

    case(program)
    assert path.read_bytes() == before
