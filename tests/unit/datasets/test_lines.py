"""`LinesDataset` gives every line of every file once, whatever pieces the file comes in."""

import gzip
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.datasets.lines import _Lines
from headrace.errors import ShardError, TruncatedShardError
from headrace.testing import ObjectServer, StreamContract


def zstd(data):
    try:
        from compression import zstd as module
    except ImportError:
        from backports import zstd as module
    return module.compress(data)


ROWS = [{"row": i, "text": "zeile ü " * (i % 40)} for i in range(300)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


class TestLines(StreamContract):
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path):
        (tmp_path / "a.jsonl").write_bytes(TEXT)
        self.folder = tmp_path

    def make_dataset(self):
        return hr.LinesDataset(self.folder, chunk_bytes=1000)


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd)])
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_json_lines_are_parsed_plain_and_compressed(tmp_path, suffix, pack, chunk):
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(TEXT))
    assert list(hr.LinesDataset(tmp_path / f"a.jsonl{suffix}", chunk_bytes=chunk)) == ROWS


@pytest.mark.parametrize(
    ("content", "format", "lines"),
    [
        (b"a\nb\n", "text", ["a", "b"]),
        (b"a\r\n\nb", "text", ["a", "", "b"]),
        (b"\n\n", "text", ["", ""]),
        (b"", "text", []),
        (b"\xff\n", "bytes", [b"\xff"]),
        (b"1\n\n 2 \n", "json", [1, 2]),
        ("ü\u2028ü\n".encode(), "text", ["ü\u2028ü"]),
    ],
)
def test_line_endings(tmp_path, content, format, lines):
    (tmp_path / "a.txt").write_bytes(content)
    assert list(hr.LinesDataset(tmp_path / "a.txt", format=format)) == lines


@given(content=st.binary(max_size=200), pieces=st.integers(1, 50))
@settings(deadline=None)
def test_chunk_size_does_not_change_lines(content, pieces):
    content = content.replace(b"\r", b"")
    lines = _Lines("x", "bytes", 1000)
    got = [line for at in range(0, len(content), pieces) for line in lines.feed(content[at : at + pieces])]
    got.extend(lines.finish())
    assert got == content.removesuffix(b"\n").split(b"\n") if content else got == []


def test_invalid_line_is_an_error_with_its_offset(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"x": 1}\n{"x": \n{"x": 3}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"x": 4}\n')
    with hr.DataLoader(hr.LinesDataset(tmp_path, shards_in_parallel=1), batch_size=1, on_error="skip") as loader:
        assert [batch["x"].item() for batch in loader] == [1, 4]
        (failure,) = loader.stats().skipped
    assert failure.error == "ShardError"
    assert "a.jsonl, offset 9)" in failure.message


def test_invalid_utf_8_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\n")
    with pytest.raises(ShardError, match=r"invalid line.*offset 5"):
        list(hr.LinesDataset(tmp_path / "a.txt"))


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd)])
def test_every_truncation_of_a_compressed_file_is_an_error(tmp_path, suffix, pack):
    packed = pack(b"one\ntwo\n" * 20)
    file = tmp_path / f"a.txt{suffix}"
    for length in range(len(packed)):
        file.write_bytes(packed[:length])
        with pytest.raises(TruncatedShardError):
            list(hr.LinesDataset(file))


def test_line_longer_than_the_limit_is_refused_before_its_end(tmp_path):
    with ObjectServer({"a.txt": b"x" * 1_000_000}) as server:
        dataset = hr.LinesDataset(
            f"{server.http_url}/a.txt", line_limit=2000, chunk_bytes=1000, requests_per_shard=1, shards_in_parallel=1
        )
        with pytest.raises(ShardError, match="longer than line_limit=2000"):
            list(dataset)
        assert server.requests()["GET"] < 10


def test_ranks_divide_files_or_lines(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number}-{line}\n" for line in range(number + 1)))
    every = Counter(f"{number}-{line}" for number in range(4) for line in range(number + 1))

    def ranks(**options):
        return [list(hr.LinesDataset(tmp_path, rank=rank, world_size=2, **options)) for rank in range(2)]

    assert sum(map(Counter, ranks(remainder="keep")), Counter()) == every
    assert sum(map(Counter, ranks(split="samples")), Counter()) == every
    assert list(map(len, ranks(counts=[1, 2, 3, 4]))) == [4, 4]
    assert list(map(len, ranks(samples_per_rank=7, remainder="repeat"))) == [7, 7]
    with pytest.raises(ValueError, match="unequal numbers"):
        ranks()


def test_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="format='xml'"):
        hr.LinesDataset(tmp_path / "a.txt", format="xml")
