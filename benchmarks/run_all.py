"""Runs every benchmark, one after the other: a table of what each claims and what it reached, and a file of results.

A benchmark that fails, or takes longer than its limit, is reported; the others still run, and the
exit status is 1. Those that cannot run here are named with the reason. The results, as JSON in
`benchmarks/results`, hold the commit, the machine, the load before and after each benchmark, and
each figure in every repetition; they are written after each benchmark. With `--quick` every
benchmark does little work in a few seconds and checks its bytes: nothing is claimed.

Some benchmarks run with fewer stores, or less work for a repetition, than by themselves, so that
all take about an hour on two cores: `SHORTER` has them. With `--long` each does what it does by
itself.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --quick
    python benchmarks/run_all.py --only fetch_rate engines
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import QUICK, RECORDS, commit, describe_machine, is_installed, machine

PEERS = (
    "torchdata",
    "spdl-core",
    "grain",
    "webdataset",
    "s3torchconnector",
    "litdata",
    "datasets",
    "ray",
    "pyarrow",
    "pillow",
)
HERE = Path(__file__).parent
RESULTS = HERE / "results"
SHARED = {
    "contents.py",
    "contestants.py",
    "event_queue.py",
    "format_readers.py",
    "getting.py",
    "gpu_accelerator.py",
    "harness.py",
    "jpeg_chart.py",
    "jpeg_peers.py",
    "peers.py",
    "processes.py",
    "served.py",
    "servers.py",
    "simulated_gpus.py",
    "simulated_runs.py",
    "simulation.py",
    "sizing.py",
    "store.py",
    "stored_readers.py",
}
FORMAT = 1  # of the file of results
# What those that take longest do in a run of all; five repetitions remain.
SHORTER: dict[str, list[str]] = {
    "auto_concurrency.py": ["--stores", "20 ms"],
    "catalog_costs.py": ["--keys", "500000"],
    "engines.py": ["--batches", "80"],
    "epoch_of_jpegs.py": ["--images", "2048"],
    "fair_engines.py": ["--stores", "throttled", "--seconds", "5", "--engines", "1", "4"],
    "fetch_rate.py": ["--objects", "4800"],
    "hedging.py": ["--objects", "1600"],
    "object_store.py": ["--objects", "3584"],
    "pipelines.py": ["--only", "consumer,latency,throttling,event loop,workers"],
    "random_windows.py": ["--links", "200"],
    "resume.py": ["--powers", "6", "9"],
    "simulate_scale.py": ["--limits", "latency, spread"],
    "watchdog_run.py": ["--minutes", "0.25"],
}
# Seconds after which a benchmark has failed.
LIMIT, QUICK_LIMIT = 1800.0, 180.0


def benchmarks() -> list[Path]:
    """Every benchmark, by name."""
    return sorted(
        file for file in HERE.glob("*.py") if file.name not in SHARED | {"run_all.py"}
    )


def reason_not_to_run(name: str, *, quick: bool) -> str:
    """Why a benchmark cannot run here, or is not part of this; empty if it runs."""
    if name.startswith("gpu_") and not quick:
        import torch  # takes a second or two, and nothing else here needs it

        return "" if torch.cuda.is_available() else "it needs a CUDA device"
    if name == "parquet.py" and not is_installed("pyarrow"):
        return "pyarrow is not installed"
    if name == "engines_on_ray.py" and not is_installed("ray"):
        return "ray is not installed"
    if name == "jpeg_decode.py" and not is_installed("pillow"):
        return "pillow is not installed"
    if name == "epoch_of_jpegs.py" and not (
        is_installed("pillow") and is_installed("simplejpeg")
    ):
        return "pillow or simplejpeg is not installed"
    if name == "first_batch.py" and not is_installed("scikit-learn"):
        return "scikit-learn is not installed"
    return ""


def cpu_seconds() -> float:
    """Of this program's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(
    file: Path, records: Path, words: Sequence[str], *, limit: float
) -> dict[str, Any]:
    """Run a benchmark; how it ended, its seconds, and the load before and after it."""
    environment = {name: value for name, value in os.environ.items() if name != QUICK}
    before, cpu, began = os.getloadavg(), cpu_seconds(), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, file, *words],
        env={**environment, RECORDS: str(records)},
        start_new_session=True,  # so that it can be ended with all its processes
    )
    reason = ""
    try:
        if status := process.wait(limit):
            reason = (
                f"exit status {status}"
                if status > 0
                else f"ended by {signal.Signals(-status).name}"
            )
    except subprocess.TimeoutExpired:
        reason = f"took more than {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {
        "status": "failed" if reason else "ran",
        "reason": reason,
        "arguments": list(words),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu, 1),
        "load_before": before,
        "load_after": os.getloadavg(),
    }


def show(results: dict[str, Any]) -> None:
    """Print the table of claims, and what did not run."""
    print(f"\n{describe_machine(*PEERS)}\n")
    claims = [record for record in results["records"] if "claim" in record]
    if claims:
        print("| what | aim | reached | |")
        print("|---|---|---|---|")
    for record in claims:
        met = {True: "met", False: "**missed**", None: ""}[record["met"]]
        print(
            f"| {record['claim']} | {record['aim'] or 'none'} | {record['reached']} | {met} |"
        )
    for name, ended in results["benchmarks"].items():
        if ended["status"] != "ran":
            print(f"{name}: {ended['status']}: {ended['reason']}")
    ran = [ended for ended in results["benchmarks"].values() if ended["status"] == "ran"]
    print(
        f"\n{len(ran)} benchmarks ran, in {results['seconds']:.0f} s; load {os.getloadavg()[0]:.1f}"
    )


def write(results: dict[str, Any], path: Path) -> None:
    """Replace the file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(
        json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    partial.replace(path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [file.stem for file in benchmarks()]
    parser.add_argument(
        "--quick",
        action="store_true",
        help="seconds in place of minutes: do they run? Claims nothing",
    )
    parser.add_argument(
        "--long", action="store_true", help="each as by itself; about two hours"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names)
    parser.add_argument(
        "--limit",
        type=float,
        help=f"seconds for each: {LIMIT:.0f}, with --quick {QUICK_LIMIT:.0f}",
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder for the results"
    )
    arguments = parser.parse_args(words)
    quick = arguments.quick
    limit = arguments.limit or (QUICK_LIMIT if quick else LIMIT)
    began, at = time.monotonic(), datetime.now(UTC)
    revision, changed = commit()
    results: dict[str, Any] = {
        "format": FORMAT,
        "began": at.isoformat(timespec="seconds"),
        "complete": False,
        "quick": quick,
        "commit": revision,
        "changed": changed,
        "machine": machine(*PEERS),
        "benchmarks": {},
        "records": [],
    }
    path = (
        arguments.results
        / f"{at:%Y%m%d-%H%M%S}-{revision}{'-quick' if quick else ''}.json"
    )
    chosen = [file for file in benchmarks() if file.stem in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        for file in chosen:
            if why := reason_not_to_run(file.name, quick=quick):
                results["benchmarks"][file.name] = {"status": "not run", "reason": why}
                print(f"\n== benchmarks/{file.name}: not run: {why}", flush=True)
                continue
            words = (
                ["--quick"]
                if quick
                else []
                if arguments.long
                else SHORTER.get(file.name, [])
            )
            print(f"\n== benchmarks/{file.name} {shlex.join(words)}".rstrip(), flush=True)
            records = Path(folder, file.stem)
            records.touch()
            ended = run(file, records, words, limit=limit)
            results["benchmarks"][file.name] = ended
            results["records"] += map(
                json.loads, records.read_text(encoding="utf-8").splitlines()
            )
            results["seconds"] = round(time.monotonic() - began, 1)
            write(results, path)
            print(
                f"-- {ended['seconds']:.0f} s, {ended['cpu_seconds']:.0f} s of CPU; load {ended['load_after'][0]:.1f}"
            )
            if ended["reason"]:
                print(f"-- FAILED: {ended['reason']}", flush=True)
    results["seconds"] = round(time.monotonic() - began, 1)
    results["complete"] = True
    write(results, path)
    show(results)
    print(f"results: {path}")
    if failed := [
        name
        for name, ended in results["benchmarks"].items()
        if ended["status"] == "failed"
    ]:
        sys.exit(f"these failed: {', '.join(failed)}")


if __name__ == "__main__":
    # so that the benchmark ends with this
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
