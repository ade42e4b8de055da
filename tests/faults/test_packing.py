"""Packing that SIGKILL ends, and that goes on: each sample once, and the bytes of a run that nothing has ended."""

import functools
import hashlib
import json
import os
import random
import signal

import pytest

import headrace as hr
from tests.datasets import SlowDataset

KILLS = int(os.environ.get("HEADRACE_PACK_KILLS", "6"))  # of each format
SAMPLES = 500


class Killed(hr.Store):
    """A store whose process is killed before or after the write with a number."""

    def __init__(self, url, last, after):
        super().__init__(url)
        self.last, self.after, self.writes = last, after, 0

    async def put(self, key, data):
        self.writes += 1
        if self.writes == self.last:
            if self.after:
                await super().put(key, data)
            os.kill(os.getpid(), signal.SIGKILL)
        await super().put(key, data)


def row(index):
    return {"__key__": f"{index:05d}", "txt": "x" * (index % 97), "cls": index}


def document(index):
    return list(range(index % 97))


MAKE = {"tar": row, "parquet": row, "tokens": document}


def pack(folder, format, last, after):
    data = SlowDataset(SAMPLES, 0, make=MAKE[format])
    store = Killed(str(folder), last, after)
    hr.pack(
        data,
        store,
        format=format,
        shard_size={"tar": 100_000, "parquet": 3_000, "tokens": 9_000}[format],
    )


def digests(folder):
    """Of the shards and the indices of tokens; a local store leaves half-written files as ``name#1``."""
    paths = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in (".tar", ".parquet", ".bin", ".idx")
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.parametrize("format", MAKE)
def test_killed_packing_continues_to_the_same_shards(format, forks, tmp_path):
    draw = random.Random(format)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pack(whole, format, 0, False)
    kills = 0
    while True:
        last = draw.randint(1, 6) if kills < KILLS else 0
        program = functools.partial(pack, killed, format, last, draw.random() < 0.5)
        done = forks.run(program)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
    assert kills
    assert digests(killed) == digests(whole)
    record = json.loads((killed / "_pack.json").read_text())
    assert record["complete"]
    assert {shard["name"]: shard["sha256"] for shard in record["shards"]}.items() <= digests(
        killed
    ).items()
    if format == "tar":
        samples = hr.TarDataset.index(killed)
        assert [int(samples[index]["cls"]) for index in range(SAMPLES)] == list(range(SAMPLES))
