"""Packing that SIGKILL ends: other numbers of ranks go on, to the bytes of a run that nothing has ended."""

import functools
import hashlib
import os
import random
import signal

import pytest

import headrace as hr
from tests.datasets import Numbers, SlowDataset

KILLS = int(os.environ.get("HEADRACE_PACK_KILLS", "6"))  # of each format
SAMPLES = 500
RANKS = 3  # at most


class Killed(hr.Store):
    """A store whose process is killed before or after the write with a number."""

    def __init__(self, url, last, after):
        super().__init__(url)
        self.last, self.after, self.writes = last, after, 0

    async def put(self, key, data, *, create=False):
        self.writes += 1
        if self.writes == self.last:
            if self.after:
                await super().put(key, data, create=create)
            os.kill(os.getpid(), signal.SIGKILL)
        await super().put(key, data, create=create)


def row(index):
    return {"__key__": f"{index:05d}", "txt": "x" * (index % 97), "cls": index}


def document(index):
    return list(range(index % 97))


MAKE = {"tar": row, "parquet": row, "tokens": document}


def pack(folder, format, last=0, after=False, rank=0, ranks=1):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    data = SlowDataset(SAMPLES, 0, make=MAKE[format])
    hr.pack(data, Killed(str(folder), last, after), format=format, samples_per_shard=15)


def results(folder, last=0, after=False, rank=0, ranks=1):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    loader = hr.DataLoader(Numbers(SAMPLES), 8)
    store = Killed(str(folder), last, after)
    with loader, hr.pack_results(loader, store, samples_per_shard=15) as out:
        for batch in loader:
            out.put({"square": batch * batch})


def digests(folder):
    """Of all files but the index, which has times; a local store leaves half-written files as ``name#1``."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "#" not in path.name and path.suffix != ".index"
    }


def check(forks, program):
    done = forks.run(program)
    assert done.returncode == 0, done.stderr


def run_with_kills(forks, draw, program, folder):
    """Run on 1 to 3 ranks, of which each may be killed at a random write; then without a kill."""
    kills = 0
    while kills < KILLS:
        ranks = draw.randint(1, RANKS)
        running = [
            forks.start(
                functools.partial(
                    program,
                    folder,
                    last=draw.randint(1, 6),
                    after=draw.random() < 0.5,
                    rank=rank,
                    ranks=ranks,
                )
            )
            for rank in range(ranks)
        ]
        for each in running:
            with each:
                _, errors = each.communicate()
                assert each.wait() in (0, -signal.SIGKILL), errors
                kills += each.wait() != 0
    check(forks, functools.partial(program, folder))


@pytest.mark.parametrize("format", MAKE)
def test_killed_packing_continues_to_the_same_shards(format, forks, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    check(forks, functools.partial(pack, whole, format))
    program = functools.partial(_pack, format)
    run_with_kills(forks, random.Random(format), program, killed)
    assert digests(killed) == digests(whole)
    if format == "tar":
        samples = hr.TarDataset.index(killed)
        assert [int(samples[index]["cls"]) for index in range(SAMPLES)] == list(
            range(SAMPLES)
        )


def _pack(format, folder, **options):
    pack(folder, format, **options)


def test_killed_model_writes_the_results_of_each_sample_once(forks, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    check(forks, functools.partial(results, whole))
    run_with_kills(forks, random.Random(0), results, killed)
    assert digests(killed) == digests(whole)
    rows = sorted((row["index"], row["square"]) for row in hr.ParquetDataset(killed))
    assert rows == [(index, index * index) for index in range(SAMPLES)]
