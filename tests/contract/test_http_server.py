"""Shards from ``python -m http.server``, which has neither ranges nor entity tags."""

import contextlib
import os
import re
import subprocess
import sys
import tarfile

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
        hr.TarDataset.index(shards)
        if is_indexed
        else hr.TarDataset(shards, chunk_bytes=500_000)
    )
    samples = read(
        dataset, batch_size=10, num_workers=int(not is_indexed), shuffle=is_indexed
    )
    assert {sample["__key__"]: sample["bin"] for sample in samples} == {
        path.stem: path.read_bytes() for path in folder.glob("*.bin")
    }
