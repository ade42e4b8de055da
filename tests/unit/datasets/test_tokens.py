"""`TokenDataset` gives fixed windows of tokens, near ones of one call by one ranged request."""

import asyncio
import io

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.errors import ShardError, StoreError
from headrace.testing import DatasetContract
from object_server import ObjectServer


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


TOKENS = np.random.default_rng(0).integers(0, 60_000, size=(3, 1000))
OBJECTS = {
    "a/0.bin": TOKENS[0].astype("<u2").tobytes(),
    "a/1.bin": TOKENS[1][:777].astype("<u2").tobytes(),
    "a/2.bin": TOKENS[2][:5].astype("<u2").tobytes(),
    "b/0.npy": npy(TOKENS[0].astype(np.uint32)),
    "b/1.npy": npy(TOKENS[1].astype(">u2")),
}


def opened(server, shards, **options):
    return hr.TokenDataset(
        f"{server.url}/{shards}", store=hr.Store(server.url, options=server.store_options), **options
    )


class TestWindows(DatasetContract):
    @pytest.fixture(autouse=True)
    def _served(self, server):
        self.server = server

    def make_dataset(self):
        return opened(self.server, "a", seq_len=33, stride=32)


@pytest.mark.parametrize(("seq_len", "stride"), [(10, 10), (33, 32), (5, 7), (777, 1), (1, 1)])
def test_windows_do_not_cross_shards(server, seq_len, stride):
    wanted = [
        tokens[at : at + seq_len]
        for tokens in (TOKENS[0], TOKENS[1][:777], TOKENS[2][:5])
        for at in range(0, len(tokens) - seq_len + 1, stride)
    ]
    dataset = opened(server, "a", seq_len=seq_len, stride=stride)
    assert len(dataset) == len(wanted)
    for index in {0, 1, len(wanted) // 2, len(wanted) - 1} & set(range(len(wanted))):
        assert dataset[index].tolist() == wanted[index].tolist()
    assert dataset[-1].tolist() == wanted[-1].tolist()


def test_npy_shards_have_their_own_dtype(server):
    dataset = opened(server, "b", seq_len=100)
    assert torch.equal(torch.cat([dataset[i] for i in range(20)]), torch.from_numpy(TOKENS[:2].reshape(-1)))
    assert dataset[0].dtype == torch.int64


def test_ending_of_each_shard_gives_the_type_of_its_tokens(tmp_path):
    types = {"a.BIN": "<u2", "b.U16": "<u2", "c.u32": "<u4", "D.NPY": "<u4", "e.npy": "<u2"}
    arrays = {name: np.arange(10 * at, 10 * at + 10, dtype=type) for at, (name, type) in enumerate(types.items())}
    data = {f"d/{name}": npy(a) if name.lower().endswith("npy") else a.tobytes() for name, a in arrays.items()}
    with ObjectServer(data) as server:
        store = hr.Store(server.url, options=server.store_options)
        for shards in ("d", "d/*", list(data)):
            dataset = hr.TokenDataset(shards, store=store, seq_len=10)
            read = dataset.cache(tmp_path / "cache")
            given = {dataset.sample_key(i).partition("[")[0]: read[i].tolist() for i in range(len(dataset))}
            assert given == {f"d/{name}": array.tolist() for name, array in arrays.items()}


def test_dtype_is_that_of_raw_shards_whose_ending_names_none(tmp_path):
    for name in ("a.bin", "b.tokens"):
        (tmp_path / name).write_bytes(np.arange(70_000, 70_010, dtype="<u4").tobytes())
    for shards in (tmp_path / "a.bin", tmp_path / "b.tokens", tmp_path / "b.*"):
        assert hr.TokenDataset(shards, seq_len=10, dtype="uint32")[0].tolist() == [*range(70_000, 70_010)]


def llmc(magic, tokens):
    return np.array([magic, 1, len(tokens), *[0] * 253], "<i4").tobytes() + tokens.tobytes()


@pytest.mark.parametrize(
    ("name", "dtype", "content"),
    [
        ("a.bin", None, llmc(20240520, np.arange(700, dtype="<u2"))),  # of llm.c, GPT-2
        ("a.bin", "uint16", llmc(20240801, np.arange(700, dtype="<u4"))),  # of llm.c, Llama 3
        ("a.bin", None, npy(np.arange(700, dtype="<u4"))),
        ("a.npy", "uint16", np.arange(700, dtype="<u2").tobytes()),  # of OLMo
        ("a.npy", "uint16", npy(np.arange(700, dtype="<u4"))),
        ("a.bin", "uint32", np.arange(700, dtype="<i4").tobytes()),  # of Megatron
    ],
)
def test_first_bytes_say_the_layout_before_the_name_and_dtype(tmp_path, name, dtype, content):
    (tmp_path / name).write_bytes(content)
    dataset = hr.TokenDataset(tmp_path, seq_len=100, dtype=dtype)
    assert torch.cat([dataset[i] for i in range(len(dataset))]).tolist() == [*range(700)]


@pytest.mark.parametrize(
    ("name", "dtype", "error", "what"),
    [
        ("a.u16", "uint32", ValueError, r"dtype='uint32', but .*a\.u16 is 'uint16'"),
        ("a.U32", "uint16", ValueError, r"dtype='uint16', but .*a\.U32 is 'uint32'"),
        ("a.tokens", None, ValueError, r"a\.tokens does not name a type; give dtype="),
        ("a.bin.gz", "uint16", ShardError, r"compressed.*a\.bin\.gz"),
        ("a.npy.bz2", None, ShardError, r"compressed.*a\.npy\.bz2"),
    ],
)
def test_ending_that_contradicts_the_type_or_names_none_is_refused(tmp_path, name, dtype, error, what):
    (tmp_path / name).write_bytes(bytes(8))
    for shards in (tmp_path / name, tmp_path / "a.*"):
        with pytest.raises(error, match=what):
            hr.TokenDataset(shards, seq_len=1, dtype=dtype)


@pytest.mark.counts
def test_window_is_one_request_and_opening_is_one_per_shard(server):
    names = [f"{server.url}/a/{i}.bin" for i in range(3)]
    dataset = hr.TokenDataset(names, seq_len=10, store=hr.Store(server.url, options=server.store_options))
    assert (server.requests()["HEAD"], server.requests()["GET"]) == (0, 3)
    dataset[5]
    assert server.requests()["GET"] == 4
    assert dataset.range(101) == (1, 20, 40)
    assert dataset.sample_key(101) == "a/1.bin[20:40]"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.bin", b"123", "3 bytes are not a whole number of uint16"),
        ("a.npy", b"not npy at all", "not a .npy file"),
        ("a.npy", b"", "not a .npy file"),
        ("a.npy", npy(np.zeros((2, 2), np.uint16)), "tokens are one-dimensional"),
        ("a.npy", npy(np.zeros(4)), "tokens are one-dimensional"),
        ("a.npy", npy(np.array([{}, {}], dtype=object)), "tokens are one-dimensional"),
        ("a.npy", npy(np.zeros(100, np.uint16))[:-2], "99 tokens, but 100 in the header"),
        ("a.bin", llmc(20240520, np.zeros(100, "<u2"))[:-2], "99 tokens, but 100 in the header"),
        ("a.npy", bytes(20), "not a .npy file.*raw tokens need dtype="),
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
    with pytest.raises(ValueError, match="dtype='int64'"):
        opened(server, "a", seq_len=1, dtype="int64")


@pytest.mark.counts
async def test_neighbouring_windows_are_one_request_per_shard_in_requested_order(server):
    dataset = opened(server, "a", seq_len=10)
    before = server.requests()["GET"]
    windows = await dataset.agets([99, 101, 0, 50, 0, 120])
    wanted = [TOKENS[0][990:], TOKENS[1][10:20], TOKENS[0][:10], TOKENS[0][500:510], TOKENS[0][:10], TOKENS[1][200:210]]
    assert [window.tolist() for window in windows] == [tokens.tolist() for tokens in wanted]
    assert server.requests()["GET"] == before + 2


async def test_window_does_not_keep_the_joined_read_alive(server):
    windows = await opened(server, "a", seq_len=10).agets(range(100))
    assert all(window.untyped_storage().nbytes() == 80 for window in windows)


async def test_deleted_shard_raises_with_its_key_and_leaves_no_task(server):
    dataset = opened(server, "a", seq_len=10)
    server.delete("a/1.bin")
    before = asyncio.all_tasks()
    with pytest.raises(StoreError, match=r"a/1\.bin"):
        await dataset.agets([0, 1, 101, 102])
    assert asyncio.all_tasks() == before
    assert [len(window) for window in await dataset.agets([0, 1])] == [10, 10]
