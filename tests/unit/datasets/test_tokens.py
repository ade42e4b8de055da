"""`TokenDataset` gives windows or documents of tokens, near ones of one call by one ranged request."""

import json
import shutil
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.errors import ShardError
from tests.unit.datasets.formats import npy
from tests.unit.shards.resuming import in_folder, in_memory

TOKENS = np.random.default_rng(0).integers(0, 60_000, size=(3, 1000))
OBJECTS = {
    "a/0.bin": TOKENS[0].astype("<u2").tobytes(),
    "a/1.bin": TOKENS[1][:777].astype("<u2").tobytes(),
    "a/2.bin": TOKENS[2][:5].astype("<u2").tobytes(),
}


FIXTURES = Path(__file__).parents[2] / "fixtures/tokens"
# of each shard, by its original reader
DOCUMENTS = json.loads((FIXTURES / "expected.json").read_text())


def opened(server, shards, **options):
    return hr.TokenDataset(shards, store=server.store(), **options)


def test_each_shard_has_a_type_of_its_own():
    first, second = np.arange(10, dtype="<u4"), np.arange(10, 20, dtype="<u2")
    data = {"a.NPY": npy(first), "b.BIN": second.tobytes(), "c.npy": npy(second)}
    windows = hr.TokenDataset(in_memory(data), seq_len=10)
    assert [window.tolist() for window in windows] == [[*first], [*second], [*second]]


def test_dtype_is_that_of_raw_shards_whose_ending_names_none(tmp_path):
    tokens = np.arange(70_000, 70_010, dtype="<u4")
    (tmp_path / "b.tokens").write_bytes(tokens.tobytes())
    for shards in (tmp_path / "b.tokens", tmp_path / "b.*"):
        dataset = hr.TokenDataset(shards, seq_len=10, dtype="uint32")
        assert dataset[0].tolist() == tokens.tolist()


def llmc(magic, tokens, version=1):
    return (
        np.array([magic, version, len(tokens), *[0] * 253], "<i4").tobytes()
        + tokens.tobytes()
    )


@pytest.mark.parametrize(
    ("name", "dtype", "content"),
    [
        ("a.bin", None, llmc(20240520, np.arange(700, dtype="<u2"))),  # of llm.c, GPT-2
        # Of llm.c, Llama 3.
        ("a.bin", "uint16", llmc(20240801, np.arange(700, dtype="<u4"), 7)),
        ("a.bin", None, npy(np.arange(700, dtype="<u4"))),
        ("a.npy", "uint16", np.arange(700, dtype="<u2").tobytes()),  # of OLMo
        ("a.npy", None, npy(np.arange(700, dtype=">u2"))),
        ("a.npy", "uint8", (np.arange(700) % 256).astype("u1").tobytes()),
        # Of Megatron, without its index.
        ("a.bin", "int32", np.arange(700, dtype="<i4").tobytes()),
    ],
)
def test_first_bytes_say_the_layout_before_the_name_and_dtype(
    tmp_path, name, dtype, content
):
    (tmp_path / name).write_bytes(content)
    dataset = hr.TokenDataset(tmp_path, seq_len=100, dtype=dtype)
    wanted = np.arange(700) % (256 if dtype == "uint8" else 700)
    assert (
        torch.cat([dataset[i] for i in range(len(dataset))]).tolist() == wanted.tolist()
    )


@pytest.mark.parametrize(
    ("name", "dtype", "error", "what"),
    [
        ("a.tokens", None, ValueError, r"a\.tokens does not name a type; give dtype="),
        ("a.bin.gz", "uint16", ShardError, r"compressed.*a\.bin\.gz"),
    ],
)
def test_ending_that_names_no_type_is_refused(tmp_path, name, dtype, error, what):
    (tmp_path / name).write_bytes(bytes(8))
    for shards in (tmp_path / name, tmp_path / "a.*"):
        with pytest.raises(error, match=what):
            hr.TokenDataset(shards, seq_len=1, dtype=dtype)


@pytest.mark.counts
def test_window_is_one_request_and_opening_is_one_per_shard_and_one_for_an_index(server):
    dataset = opened(server, "a/{0..2}.bin", seq_len=10)
    assert (server.requests()["HEAD"], server.requests()["GET"]) == (0, 6)
    dataset[5]
    assert server.requests()["GET"] == 7
    assert dataset.range(101) == (1, 20, 40)
    assert dataset.sample_key(101) == "a/1.bin[20:40]"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.bin", b"123", "3 bytes are not a whole number of uint16"),
        ("a.npy", b"", "not a .npy file"),
        ("a.npy", npy(np.zeros((2, 2), np.uint16)), "tokens are one-dimensional"),
        ("a.npy", npy(np.zeros(4)), "tokens are one-dimensional"),
        ("a.npy", npy(np.zeros(100, np.uint16))[:-2], "99 tokens, but 100 in the header"),
        ("a.npy", bytes(20), "not a .npy file.*raw tokens need dtype="),
        (
            "a.bin",
            llmc(20240801, np.zeros(100, "<u4")),
            "not a header of llm.c's tokens: kind 20240801, version 1",
        ),
        (
            "a.bin",
            llmc(20240520, np.zeros(100, "<u2"))[:1000],
            "not a header of llm.c's tokens.*1000 bytes",
        ),
        (
            "a.bin",
            np.arange(100_000, 100_100, dtype="<u4").tobytes(),
            "tokens of more bits, but are read as 16; give dtype='int32'",
        ),
        (
            "a.bin",
            np.arange(-100, 100, dtype="<i4").tobytes(),
            "tokens of more bits, but are read as 16; give dtype='int32'",
        ),
        (
            "a.bin",
            b"LITPKDS" + bytes(17) + np.arange(100, dtype="<u2").tobytes(),
            "a packed dataset of lit-gpt",
        ),
        ("a.ds", bytes(20), r"its \.index is missing; .*give dtype="),
    ],
)
def test_file_without_tokens_is_refused(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardError, match=what):
        hr.TokenDataset(tmp_path / name, seq_len=1)


def test_too_few_tokens_for_a_window_are_an_error(server):
    with pytest.raises(ValueError, match="none of 3 shards has the 1001 tokens"):
        opened(server, "a", seq_len=1001)
    with pytest.raises(ValueError, match="at least 1"):
        opened(server, "a", seq_len=0)
    with pytest.raises(ValueError, match="dtype='float32' must be one of uint8"):
        opened(server, "a", seq_len=1, dtype="float32")
    with pytest.raises(ValueError, match="stride=2 is of windows"):
        opened(server, "a", seq_len=None, stride=2)
    with pytest.raises(
        ShardError, match=r"no index of its documents.*give seq_len= \(shard .*a/\d\.bin"
    ):
        opened(server, "a", seq_len=None)


@pytest.mark.counts
async def test_neighbouring_windows_are_one_request_per_shard_in_requested_order(server):
    dataset = opened(server, "a", seq_len=10)
    before = server.requests()["GET"]
    windows = await dataset.agets([99, 101, 0, 50, 0, 120])
    places = [(0, 990), (1, 10), (0, 0), (0, 500), (0, 0), (1, 200)]
    for window, (shard, begin) in zip(windows, places, strict=True):
        assert window.tolist() == TOKENS[shard][begin : begin + 10].tolist()
    assert server.requests()["GET"] == before + 2


async def test_window_does_not_keep_the_joined_read_alive(server):
    windows = await opened(server, "a", seq_len=10).agets(range(100))
    assert all(window.untyped_storage().nbytes() == 80 for window in windows)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_of_the_original_writers_are_read_by_window_and_documents_have_lengths(
    name,
):
    tokens = [*chain(*DOCUMENTS[name])]
    windows = hr.TokenDataset(FIXTURES / name, seq_len=11, stride=3)
    assert windows.lengths.tolist() == [11] * 30
    assert [window.tolist() for window in windows] == [
        tokens[i : i + 11] for i in range(0, 90, 3)
    ]
    documents = hr.TokenDataset(FIXTURES / name, seq_len=None)
    assert documents.lengths.tolist() == [*map(len, DOCUMENTS[name])]
    assert repr(documents) == "TokenDataset(1 shards, 7 samples)"


@pytest.mark.counts
def test_windows_read_only_the_ends_of_an_index(serve):
    names = ("int32.bin", "int32.idx", "bare4.ds", "bare4.ds.index")
    server = serve({name: (FIXTURES / name).read_bytes() for name in names})
    server.misbehave()  # counts from here on
    for number, name in ((4, "int32.bin"), (6, "bare4.ds")):
        opened(server, name, seq_len=1)
        assert server.requests()["GET"] == number


def patch(at, format, *values):
    return lambda data: (
        data[:at]
        + struct.pack(f"<{format}", *values)
        + data[at + struct.calcsize(f"<{format}") :]
    )


CONTRADICTIONS = {  # by shard and file: changes of the file, and what the error says
    ("int32.bin", "int32.bin"): [
        (lambda data: data[:-4], 1, "396 bytes, but 100 tokens of int32 by .*int32.idx"),
    ],
    ("int32.bin", "int32.idx"): [
        (
            lambda data: data[:-1],
            1,
            "181 bytes are not those of 7 sequences and 8 bounds",
        ),
        (patch(17, "B", 7), 1, "type 7"),
        (patch(18, "Q", 2**63), None, "bytes are not those of 9223372036854775808"),
        (patch(34, "i", 8), None, "sequence 1 does not begin where .*offset 70"),
        (patch(34, "i", -1), None, "sequence 0 does not begin"),
        (patch(62 + 8 * 6, "q", 288), 1, "400 bytes, but 101 tokens"),
        (patch(62 + 8 * 6, "q", 285), 1, "sequence 6 does not begin where .*offset 110"),
        (patch(118, "q", 1), None, "its documents are not all of its 7 sequences"),
        (None, None, "no index of its documents"),
    ],
    ("4.ds", "4.ds.index"): [
        (lambda data: data[:-8], None, "400 bytes, but 71 tokens of uint32 by .*index"),
        (lambda data: data[:-1], None, "55 bytes are not whole numbers"),
        (patch(8, "Q", 6), None, "document 1 ends before it begins .*offset 8"),
        (None, None, "its .index is missing"),
    ],
}


@pytest.mark.parametrize(
    ("shard", "file", "change", "seq_len", "what"),
    [(*names, *row) for names, rows in CONTRADICTIONS.items() for row in rows],
)
def test_index_that_contradicts_its_shard_is_refused(
    tmp_path, shard, file, change, seq_len, what
):
    shutil.copytree(FIXTURES, tmp_path, dirs_exist_ok=True)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    if change is not None:
        (tmp_path / file).write_bytes(change(data))
    with pytest.raises(ShardError, match=what) as caught:
        hr.TokenDataset(tmp_path / shard, seq_len=seq_len)
    assert Path(caught.value.shard).name.startswith(shard.partition(".")[0])


def test_dtype_has_to_agree_with_an_index_and_does_without_an_unusable_one(tmp_path):
    shutil.copytree(FIXTURES, tmp_path, dirs_exist_ok=True)
    for shard, other in (("int32.bin", "int16"), ("4.ds", "uint16")):
        with pytest.raises(
            ValueError,
            match=f"dtype='{other}', but .*{shard} is 'u?int32' by .*leave dtype= out",
        ):
            hr.TokenDataset(tmp_path / shard, seq_len=1, dtype=other)
    assert len(hr.TokenDataset(tmp_path / "int32.bin", seq_len=1, dtype="int32")) == 100
    (tmp_path / "int32.idx").write_bytes(b"of another program")
    assert len(hr.TokenDataset(tmp_path / "int32.bin", seq_len=1, dtype="int32")) == 100
    with pytest.raises(
        ShardError, match=r"not an index of Megatron.*raw tokens need dtype="
    ):
        hr.TokenDataset(tmp_path / "int32.bin", seq_len=1)
    (tmp_path / "4.ds.index").unlink()
    assert len(hr.TokenDataset(tmp_path / "4.ds", seq_len=1, dtype="uint32")) == 100


@pytest.mark.parametrize(("written", "read"), [(32, 16), (64, 32)])
def test_raw_tokens_that_are_read_as_fewer_bits_warn(tmp_path, written, read):
    np.arange(70_000, 70_100, dtype=f"<u{written // 8}").tofile(tmp_path / "a.npy")
    with pytest.warns(
        UserWarning,
        match=rf"look like tokens of more bits, but are read as {read}: .*a\.npy",
    ):
        hr.TokenDataset(tmp_path / "a.npy", seq_len=1, dtype=f"uint{read}")


def test_shard_without_documents_gives_none_and_alone_is_an_error(tmp_path):
    index = struct.pack("<9sQBQQq", b"MMIDIDX", 1, 8, 0, 1, 0)
    in_folder(tmp_path, {"a.ds": b"", "a.ds.index": b"", "b.bin": b"", "b.idx": index})
    shutil.copy(FIXTURES / "2.ds", tmp_path / "c.ds")
    shutil.copy(FIXTURES / "2.ds.index", tmp_path / "c.ds.index")
    dataset = hr.TokenDataset(tmp_path, seq_len=None)
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS["2.ds"]
    assert len(hr.TokenDataset(tmp_path, seq_len=1)) == 100
    with pytest.raises(ValueError, match="none of 2 shards has a document"):
        hr.TokenDataset([tmp_path / "a.ds", tmp_path / "b.bin"], seq_len=None)
