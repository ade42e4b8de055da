"""Every kind of dataset against ``python -m http.server``, which has neither ranges nor entity tags."""

import contextlib
import os
import re
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:.*does not do ranges")
SAMPLES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http")
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(SAMPLES):
                (folder / f"{shard}{i:03}.bin").write_bytes(os.urandom(100_000))
                archive.add(folder / f"{shard}{i:03}.bin", f"{shard}{i:03}.bin")
    (folder / "a.txt").write_text("".join(f"{i:0100}\n" for i in range(3000)))
    (folder / "empty.txt").write_text("")
    np.save(folder / "tokens.npy", np.arange(100_000, dtype=np.uint16))
    pq.write_table(pa.table({"a": range(10_000)}), folder / "a.parquet", row_group_size=1000)
    return folder


@pytest.fixture(scope="module")
def url(folder):
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield re.search(r"http://[^/ ]*", process.stdout.readline())[0]
        finally:
            process.terminate()


def read(dataset, **options):
    with contextlib.closing(hr.DataLoader(dataset, collate_fn=list, **options)) as loader:
        return [sample for batch in loader for sample in batch]


@pytest.mark.parametrize("is_indexed", [False, True])
def test_tar_shards_are_read_from_http_server(folder, url, is_indexed):
    shards = f"{url}/{{0..1}}.tar"
    dataset = (
        hr.TarDataset.index(shards) if is_indexed else hr.TarDataset(shards, chunk_bytes=500_000)
    )
    samples = read(dataset, batch_size=10, num_workers=int(not is_indexed), shuffle=is_indexed)
    assert {sample["__key__"]: sample["bin"] for sample in samples} == {
        path.stem: path.read_bytes() for path in folder.glob("*.bin")
    }


def test_lines_windows_and_rows_are_read_from_http_server(url):
    assert list(hr.LinesDataset(f"{url}/a.txt", chunk_bytes=50_000)) == [
        f"{i:0100}" for i in range(3000)
    ]
    assert list(hr.LinesDataset([f"{url}/empty.txt", f"{url}/a.txt"]))[-1] == f"{2999:0100}"
    windows = read(hr.TokenDataset(f"{url}/tokens.npy", seq_len=10, stride=10), batch_size=100)
    assert [window[0].item() % 65536 for window in windows] == [
        i % 65536 for i in range(0, 100_000, 10)
    ]
    assert [row["a"] for row in hr.ParquetDataset(f"{url}/a.parquet")] == list(range(10_000))

    with pytest.raises(hr.StoreError, match=r"\{000\.\.127\}\.tar"):  # it has no listing
        hr.TarDataset(f"{url}/*.tar")
