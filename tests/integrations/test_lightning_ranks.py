"""Under Lightning's own launcher, which sets no RANK, datasets made before `fit()` are read once by two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is not installed (24 MB: pip install lightning)")

JOB = Path(__file__).parent / "lightning_ranks.py"
TIMEOUT = 300  # seconds; each of the two processes imports Lightning


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """For each rank, its samples in each epoch."""
    folder = tmp_path_factory.mktemp("job")
    folder.joinpath("lines").mkdir()
    for shard in range(4):
        text = "".join(f"{shard * 10 + line}\n" for line in range(10))
        folder.joinpath("lines", f"{shard}.txt").write_text(text)
    environment = {**os.environ, "FOLDER": str(folder)}
    done = subprocess.run(
        [sys.executable, JOB], env=environment, timeout=TIMEOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(folder.joinpath(f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", ["lines", "blocks"])
def test_ranks_share_all_samples_in_each_epoch(seen, data, workers):
    name = f"{data}, {workers} workers"
    orders = []
    for ours, theirs in zip(*seen, strict=True):
        assert sorted(ours[name] + theirs[name]) == list(range(40))
        assert len(ours[name]) == len(theirs[name]) == 20
        orders.append(ours[name] + theirs[name])
    assert orders[0] != orders[1]
