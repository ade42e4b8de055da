"""`LinesDataset` gives every line of every file once, whatever pieces the file comes in."""

import codecs
import gzip

import pytest

import headrace as hr
from headrace.errors import ShardError, TruncatedShardError
from tests.unit.shards import tars
from tests.unit.shards.resuming import in_folder, in_memory

BOM = codecs.BOM_UTF8


@pytest.mark.parametrize(
    ("content", "format", "lines"),
    [
        (b"a\nb\n", "text", ["a", "b"]),
        (b"a\r\n\nb", "text", ["a", "", "b"]),
        (b"", "text", []),
        (b"\xff\n", "bytes", [b"\xff"]),
        (b"1\n\n 2 \n", "json", [1, 2]),
        ("ü\u2028ü\n".encode(), "text", ["ü\u2028ü"]),
        (BOM + b"a\r\n" + BOM + b"b\n", "text", ["a", "\ufeffb"]),
        (BOM + b"\n1\n", "json", [1]),
        (BOM + b"a\n", "bytes", [BOM + b"a"]),
    ],
)
def test_line_endings(content, format, lines):
    store = in_memory({"a.txt": content})
    assert list(hr.LinesDataset(["a.txt"], store=store, format=format)) == lines


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html></html>\n"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.json", b'[{"a": 0}, {"a": 1}]', "one JSON document"),
        ("a.jsonl", b"[[0], [1]]\n", "one JSON document"),
        ("a.json", b'{"data": [{"a": 0}]}\n\n', "one JSON document"),
        ("a.json", b'{"a": {"0": 1, "1": 2}}', "one JSON document"),
        ("a.json", b'[\n {"a": 0},\n {"a": 1}\n]', "if the file is one JSON document"),
        ("a.jsonl", LFS, "Git LFS pointer"),
        ("a.txt.gz", LFS, "Git LFS pointer"),
        ("a.txt", PAGE, "web page"),
        (
            "a.csv",
            b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
            "web page",
        ),
    ],
)
def test_file_that_is_not_lines_is_an_error_that_says_what_the_file_is(
    tmp_path, name, content, what
):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "whole.txt").write_bytes(b"line")
    with hr.DataLoader(
        hr.LinesDataset(tmp_path), batch_size=None, on_error="skip"
    ) as loader:
        assert list(loader) == ["line"]
        assert loader.stats().skipped_samples == 1
    with pytest.raises(ShardError, match=what):
        list(hr.LinesDataset(tmp_path))


@pytest.mark.parametrize(
    ("content", "format", "lines"),
    [
        (
            b'{"m": [{"a": 0}]}\n{"m": [{"a": 1}]}\n',
            "auto",
            [{"m": [{"a": 0}]}, {"m": [{"a": 1}]}],
        ),
        (b'{"boxes": [[0, 1]], "label": 2}', "auto", [{"boxes": [[0, 1]], "label": 2}]),
        (b'[{"a": 0}, {"a": 1}]', "json", [[{"a": 0}, {"a": 1}]]),
        (b"<html>\n", "text", ["<html>"]),
    ],
)
def test_lines_that_look_like_a_document_or_a_page_are_samples(content, format, lines):
    store = in_memory({"a.json": content})
    assert list(hr.LinesDataset(["a.json"], store=store, format=format)) == lines


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.json", [1, True]),
        ("a.JSONL", [1, True]),
        ("a.ndjson.gz", [1, True]),
        ("ids.json.txt", ["1", "true"]),
        ("dump.jsonl/part-0", ["1", "true"]),
        ("ids.json.gz/a.csv", ["1", "true"]),
    ],
)
def test_ending_of_the_file_alone_says_whether_lines_are_json(tmp_path, name, lines):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(
        gzip.compress(b"1\ntrue\n") if name.endswith(".gz") else b"1\ntrue\n"
    )
    assert list(hr.LinesDataset(f"{tmp_path}/**")) == lines


@pytest.mark.parametrize("ending", [".bz2", ".XZ"])
def test_compression_that_is_not_supported_is_refused(tmp_path, ending):
    (tmp_path / f"a.txt{ending}").write_bytes(b"packed\n")
    for shards in (tmp_path / f"a.txt{ending}", tmp_path / "*"):
        for format in ("auto", "bytes"):
            with pytest.raises(
                ShardError,
                match=rf"compression is not supported.* \.gz, \.zst.*\{ending}",
            ):
                hr.LinesDataset(shards, format=format)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_invalid_line_is_an_error_with_its_number_and_offset(tmp_path, num_workers):
    files = {"a.jsonl": b'{"x": 1}\n\n{"x": \n{"x": 3}\n', "b.jsonl": b'{"x": 4}\n'}
    dataset = hr.LinesDataset(in_folder(tmp_path, files), shards_in_parallel=1)
    with hr.DataLoader(
        dataset, batch_size=1, num_workers=num_workers, on_error="skip"
    ) as loader:
        assert [batch["x"].item() for batch in loader] == [1, 3, 4]
        (failure,) = loader.stats().skipped
    assert failure.type_name == "ShardError"
    assert "invalid line 3: Expecting value" in failure.message
    assert "a.jsonl, offset 10)" in failure.message


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".zst", tars.zstd)]
)
def test_every_truncation_of_a_compressed_file_is_an_error(tmp_path, suffix, pack):
    packed = pack(b"one\ntwo\n" * 20)
    file = tmp_path / f"a.txt{suffix}"
    for length in range(len(packed)):
        file.write_bytes(packed[:length])
        with pytest.raises(TruncatedShardError):
            list(hr.LinesDataset(file))


def test_line_longer_than_the_limit_is_refused_before_its_end(serve):
    server = serve({"a.txt": b"x" * 1_000_000})
    dataset = hr.LinesDataset(
        f"{server.http_url}/a.txt",
        line_limit=2000,
        chunk_bytes=1000,
        requests_per_shard=1,
    )
    with pytest.raises(ShardError, match="longer than line_limit=2000"):
        list(dataset)
    assert server.requests()["GET"] < 10
