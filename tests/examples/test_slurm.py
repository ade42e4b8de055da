"""The SLURM script, by what can be checked without SLURM: its syntax, and a run with a stand-in for `srun`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import LIMIT

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
SAMPLES, TASKS, CORES = 70, 2, 4

# As srun does, for one node: without its own options, the command once for each task.
SRUN = f"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 {TASKS - 1}); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS={TASKS} SLURM_STEP_ID=0 "$@" &
    tasks+=($!)
done
for task in "${{tasks[@]}}"; do wait "$task" || exit 1; done
"""
SCONTROL = """#!/bin/bash
[[ $* == "show hostnames localhost" ]] && echo 127.0.0.1
"""


def job_with_a_free_port() -> int:
    """The number of a job whose port, of those that the script derives from it, is free."""
    for number in range(os.getpid(), os.getpid() + 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 20_000 + number % 20_000))
            except OSError:
                continue
            return number
    raise RuntimeError("no port is free")


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="needs shellcheck (Debian: shellcheck)"
)
def test_shellcheck_finds_nothing_in_the_slurm_script() -> None:
    done = subprocess.run(
        ["shellcheck", SCRIPT], capture_output=True, text=True, check=False
    )
    assert not done.stdout


def test_the_slurm_script_trains_on_all_samples_with_a_rank_for_each_task(
    tmp_path: Path,
) -> None:
    programs, samples = tmp_path / "programs", tmp_path / "samples"
    programs.mkdir()
    samples.mkdir()
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": python}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for number in range(SAMPLES):
        (samples / f"{number:03d}.bin").write_bytes(
            struct.pack("ff", number / SAMPLES, 3 * number / SAMPLES - 1)
        )
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SLURM_")
        },
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(job_with_a_free_port()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_CPUS_PER_TASK": str(CORES),
    }
    done = subprocess.run(
        ["bash", SCRIPT, samples.as_uri()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert f"{TASKS} ranks, {CORES // 4} engines each" in done.stdout
    found = re.findall(r"epoch (\d), rank (\d): (\d+) steps, (\d+) samples", done.stdout)
    assert sorted(found) == [(epoch, rank, "3", "35") for epoch in "01" for rank in "01"]
