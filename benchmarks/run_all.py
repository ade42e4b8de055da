"""Runs every benchmark, one after the other, and prints one table of what each claims and what it reached.

python benchmarks/run_all.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from harness import CLAIMS, describe_machine

PEERS = ("torchdata", "spdl-core", "grain", "webdataset", "s3torchconnector", "litdata", "pyarrow")
HERE = Path(__file__).parent
SHARED = {
    *("contents.py", "contestants.py", "getting.py", "harness.py", "peers.py", "processes.py", "served.py"),
    *("simulated_runs.py", "simulation.py", "sizing.py", "store.py"),
}
NOT_RUN = {*SHARED, "run_all.py", "gpu_accelerator.py", "watchdog_run.py"}


def main() -> None:
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        claims = Path(folder) / "claims"
        claims.touch()
        for file in sorted(HERE.glob("*.py")):
            if file.name in NOT_RUN:
                continue
            if file.name.startswith("gpu_") and not torch.cuda.is_available():
                print(f"\n== benchmarks/{file.name}: left out, it needs a CUDA device", flush=True)
                continue
            print(f"\n== benchmarks/{file.name}", flush=True)
            ended = subprocess.run([sys.executable, file], env={**os.environ, CLAIMS: str(claims)}, check=False)
            if ended.returncode:
                failed.append(file.name)
        rows = [json.loads(line) for line in claims.read_text(encoding="utf-8").splitlines()]
    print(f"\n{describe_machine(*PEERS)}\n")
    print("| what | aim | reached | |")
    print("|---|---|---|---|")
    for what, aim, reached, verdict in rows:
        print(f"| {what} | {aim} | {reached} | {verdict if verdict == 'met' else '**missed**'} |")
    if failed:
        sys.exit(f"\nthese did not finish, and have no figures: {', '.join(failed)}")


if __name__ == "__main__":
    main()
