"""
Compressed logs
===============

Compressed log files as one stream, split over the workers: each worker reads its share of the
files.

A torch program with one line changed: `from headrace import DataLoader`.
"""

import collections
import gzip
import json
import pathlib
import random
import tempfile

from torch.utils.data import IterableDataset, get_worker_info

from headrace import DataLoader


class LogLines(IterableDataset):
    """The lines of a folder's .jsonl.gz files, parsed. Every worker has a copy of this object, and runs `__iter__`."""

    def __init__(self, folder):
        self.files = sorted(folder.glob("*.jsonl.gz"))

    def __iter__(self):
        me = get_worker_info()  # None without workers: this process reads all files
        mine = self.files if me is None else self.files[me.id :: me.num_workers]
        for file in mine:
            with gzip.open(file, "rt") as lines:
                for number, line in enumerate(lines):
                    yield {
                        **json.loads(line),
                        "line": f"{file.name}:{number}",
                        "worker": 0 if me is None else me.id,
                    }


class Unsplit(LogLines):
    """The mistake of not splitting: every worker reads the whole stream."""

    def __iter__(self):
        for file in self.files:
            with gzip.open(file, "rt") as lines:
                yield from (f"{file.name}:{number}" for number, _ in enumerate(lines))


def write_logs(folder, files):
    """Log files of unequal length; returns the total number of lines."""
    chance = random.Random(0)
    lengths = [chance.randint(100, 1500) for _ in range(files)]
    for number, length in enumerate(lengths):
        with gzip.open(folder / f"access-{number:02d}.jsonl.gz", "wt") as log:
            for _ in range(length):
                status = chance.choices([200, 304, 404, 500], [90, 5, 4, 1])[0]
                log.write(
                    json.dumps(
                        {
                            "status": status,
                            "milliseconds": round(chance.expovariate(0.05), 1),
                        }
                    )
                    + "\n"
                )
    return sum(lengths)


def main(folder):
    written = write_logs(folder, files=7)
    statuses, seen, share = (
        collections.Counter(),
        collections.Counter(),
        collections.Counter(),
    )
    slowest = 0.0
    for batch in DataLoader(LogLines(folder), batch_size=256, num_workers=2):
        statuses.update(batch["status"].tolist())
        seen.update(batch["line"])
        share.update(batch["worker"].tolist())
        slowest = max(slowest, batch["milliseconds"].max().item())
    print(
        "statuses:",
        ", ".join(f"{status} {count}" for status, count in sorted(statuses.items())),
    )
    print(f"the slowest request took {slowest} ms")
    print("lines from each worker:", dict(sorted(share.items())))
    assert len(seen) == written
    assert set(seen.values()) == {1}
    print(f"{written} lines written, {len(seen)} different lines read, each once")
    unsplit = collections.Counter(
        line
        for batch in DataLoader(Unsplit(folder), 256, num_workers=2)
        for line in batch
    )
    print(
        f"without the split: {unsplit.total()} lines, each {max(unsplit.values())} times"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(pathlib.Path(temporary))
