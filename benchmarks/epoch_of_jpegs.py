r"""An epoch of JPEGs behind a store with the latencies of S3, through other loaders and through headrace.

3,072 JPEGs of about 56 KB, one object each, or in 16 shards (tar, MDS). A request takes 30 ms in
the median and 120 ms in one case of 100 (log-normal), and one in 1,000 takes a second longer. Two
worker processes decode, cut and flip; the loop that takes the batches adds up all pixels. Nothing
is shuffled or cached. In the same run, the limit: two processes that decode the same files from
memory and send nothing.

`--sweep` first looks for each one's best setting, also with the environment's options for glibc by
which a process keeps the memory that it frees. Loaders that are faster with more than two workers
have them. Then all take turns, round after round: each starts a program of its own, reads an epoch
that does not count and one that does, and ends. An epoch in which an image is missing, twice there,
has another's label or other pixels, or did not come from the store, is excluded. The store is nginx
with Lua; it shares the machine's cores, and its CPU time is in the results.

mosaicml-streaming needs an older NumPy than the others: `--mds-python` is an interpreter that has
it and what headrace requires.

    python benchmarks/epoch_of_jpegs.py --mds-python /path/to/python
    # Continue earlier results for nine minutes, then draw the chart.
    python benchmarks/epoch_of_jpegs.py --results benchmarks/results/epoch_of_jpegs.json --minutes 9
    python benchmarks/epoch_of_jpegs.py --results benchmarks/results/epoch_of_jpegs.json \
        --plot docs/_static
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import (
    Rounds,
    claim,
    commit,
    describe_machine,
    is_installed,
    is_quick,
    machine,
    parse_arguments,
)
from jpeg_chart import draw
from jpeg_decode import HEIGHT, WIDTH
from jpeg_peers import (
    CLASSES,
    CONTESTANTS,
    LIMIT,
    OURS,
    OURS_ON_SHARDS,
    TORCH,
    Job,
    photo,
    sums_of,
)
from PIL import Image
from store import nginx_is_installed, serve_objects

PEERS = ("torchdata", "spdl-core", "litdata", "webdataset", "ray", "simplejpeg")
# Seconds, median of log-normal latencies: one in 100 takes 120 ms.
LATENCY, SPREAD = 0.030, 0.596
STALLED, STALL = 0.001, 1.0  # share of requests, seconds
SHARDS = 16
SHORT = {
    TORCH: 512
}  # images of an epoch, for those whose rate does not depend on how many there are
HANGS = 240  # seconds; time-out of a contestant's program
KEEPS = "memory_kept"  # a setting of any contestant
KEEPING = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}
MOSAIC = "mosaicml-streaming"
QUICK = [
    name for name in CONTESTANTS if name not in ("Ray Data", "torch DataLoader, best")
]  # which start in seconds


def key_of(number: int) -> str:
    return f"{number % CLASSES}/{number:06d}.jpg"


def write_photos(folder: Path, images: int) -> None:
    """Noise over gradients, in the size and with the detail of a photo of ImageNet, and the sums of their pixels."""
    noise = (
        np.random.default_rng(0)
        .normal(128, 11.8, (2 * HEIGHT, 2 * WIDTH, 3))
        .astype(np.float32)
    )
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    waves = [
        np.stack([np.sin(x / (9 + kind + c)) + np.cos(y / (7 + c)) for c in range(3)], -1)
        for kind in range(64)
    ]
    sums = []
    for number in range(images):
        top, left = number * 7 % HEIGHT, number * 13 % WIDTH
        pixels = noise[top : top + HEIGHT, left : left + WIDTH] + 50 * waves[number % 64]
        file, out = folder / "photos" / key_of(number), io.BytesIO()
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        picture.save(out, "JPEG", quality=85, comment=b"%06d" % number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(out.getvalue())
        sums.append(sums_of(photo(out.getvalue(), 0)[0][None])[0].item())
    np.save(folder / "sums.npy", np.array(sums))


def tar_shards(photos: dict[str, bytes]) -> dict[str, bytes]:
    """As WebDataset has them: ``000123.jpg`` and ``000123.cls``."""
    shards = {}
    files = sorted(photos.items(), key=lambda item: item[0].partition("/")[2])
    size = -(-len(files) // SHARDS)
    for start in range(0, len(files), size):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for key, data in files[start : start + size]:
                label, _, name = key.partition("/")
                for member, content in (
                    (name, data),
                    (name.replace(".jpg", ".cls"), label.encode()),
                ):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        shards[f"{start // size:04d}.tar"] = stream.getvalue()
    return shards


class Failed(Exception):
    """Why a contestant has no figure."""


def compete(python: str, job: Job) -> list[dict[str, Any]]:
    """Run a contestant's program to its end; the figures of its epochs."""
    setting = dict(job.setting)
    kept = KEEPING if setting.pop(KEEPS, False) else {}
    command = [
        python,
        str(Path(__file__).with_name("jpeg_peers.py")),
        json.dumps(asdict(replace(job, setting=setting))),
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, **kept},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that it can be ended with all its processes
    )
    try:
        out, errors = process.communicate(timeout=HANGS)
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {HANGS} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = [
            line for line in errors.splitlines() if line and not line.startswith(" ")
        ][-1:]
        raise Failed(last[0][:200] if last else f"exit status {process.returncode}")
    return [json.loads(line) for line in out.splitlines()]


class Run:
    """The results so far, written after each step.

    Args:
        path: of the file; None to keep them in memory.
        images: of an epoch.
        mds_python: interpreter with mosaicml-streaming, or "".
        stop: `time.monotonic` after which no step begins.
    """

    def __init__(
        self, path: Path | None, images: int, mds_python: str, stop: float
    ) -> None:
        self.path, self.images, self.mds_python, self.stop = (
            path,
            images,
            mds_python,
            stop,
        )
        found = (
            json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
        )
        if found.get("runs") and found["conditions"]["images"] != images:
            sys.exit(
                f"{path} has runs of {found['conditions']['images']} images: continue with --images, or remove it"
            )
        reads = {name: contestant.reads for name, contestant in CONTESTANTS.items()}
        empty = {"complete": False, "sweep": {}, "best": {}, "runs": {}, "absent": {}}
        self.results: dict[str, Any] = {**empty, "limit": LIMIT, "reads": reads, **found}

    def write(self, **entries: Any) -> None:
        self.results |= entries
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(
                json.dumps(self.results, indent=1, ensure_ascii=False) + "\n",
                encoding="utf-8",
            )
            partial.replace(self.path)

    def python(self, name: str) -> str:
        return self.mds_python if CONTESTANTS[name].package == MOSAIC else sys.executable

    def reason_not_to_run(self, name: str) -> str:
        package = CONTESTANTS[name].package
        if package == MOSAIC:
            return (
                ""
                if self.mds_python
                else f"{MOSAIC} needs NumPy < 2.2, an interpreter of its own: --mds-python"
            )
        return (
            "" if not package or is_installed(package) else f"{package} is not installed"
        )

    @contextlib.contextmanager
    def stores(self) -> Iterator[Job]:
        """The files and the stores, as a job that has yet no contestant."""
        with contextlib.ExitStack() as open_now:
            folder = Path(
                open_now.enter_context(
                    tempfile.TemporaryDirectory(prefix="headrace-jpegs-")
                )
            )
            write_photos(folder, self.images)
            photos = {
                key: (folder / "photos" / key).read_bytes()
                for key in map(key_of, range(self.images))
            }
            contents = {"photos": photos, "tar": tar_shards(photos)}
            size = sum(map(len, photos.values()))
            job = Job(
                "write mds",
                {"bytes": size // SHARDS + (1 << 16)},
                {},
                str(folder),
                self.images,
            )
            mds_version = "not installed"
            if self.mds_python:
                mds_version = str(compete(self.mds_python, job)[0]["version"])
                contents["mds"] = {
                    file.name: file.read_bytes() for file in (folder / "mds").iterdir()
                }
            stores = {}
            for name, objects in contents.items():
                latencies = {
                    "latency": LATENCY,
                    "spread": SPREAD,
                    "stalled": STALLED,
                    "stall": STALL,
                }
                store = open_now.enter_context(
                    serve_objects(dict(sorted(objects.items())), **latencies)
                )
                stores[name] = asdict(store)
            given = conditions(self.images, size / self.images, store.kind)
            self.write(conditions={**given, MOSAIC: mds_version})
            yield replace(job, stores=stores)

    def one(
        self, job: Job, name: str, setting: dict[str, Any], epochs: int = 1
    ) -> dict[str, float]:
        """The figures of the epoch with the median rate."""
        load = os.getloadavg()[0]
        images = min(job.images, SHORT.get(name, job.images))
        job = replace(job, contestant=name, setting=setting, images=images, epochs=epochs)
        figures = sorted(compete(self.python(name), job), key=lambda each: each["rate"])[
            epochs // 2
        ]
        return {
            **{key: round(value, 3) for key, value in figures.items()},
            "load": round(load, 2),
        }

    def sweep(self, job: Job, names: list[str]) -> None:
        """Look for each one's best setting, unless it is known."""
        for name in names:
            if why := self.reason_not_to_run(name):
                self.results["absent"][name] = why
                continue
            if self.results["absent"].get(name, "").startswith("failed"):
                continue
            self.results["absent"].pop(name, None)
            found = self.results["sweep"].setdefault(name, {})
            settings = CONTESTANTS[name].settings
            if is_quick() or name in (LIMIT, TORCH):
                self.results["best"][name] = settings[0]
            if name in self.results["best"]:
                continue
            for setting in settings:
                self.attempt(job, name, setting, found)
            rates = {
                words: rate for words, rate in found.items() if isinstance(rate, int)
            }
            if not rates:
                if len(found) == len(settings):
                    self.results["absent"][name] = f"failed: {next(iter(found.values()))}"
                continue
            best = json.loads(max(rates, key=rates.__getitem__))
            if KEEPS not in best:
                self.attempt(job, name, {**best, KEEPS: True}, found)
                rates = {
                    words: rate for words, rate in found.items() if isinstance(rate, int)
                }
                best = json.loads(max(rates, key=rates.__getitem__))
            if time.monotonic() < self.stop:
                self.results["best"][name] = best
            self.write()

    def attempt(
        self, job: Job, name: str, setting: dict[str, Any], found: dict[str, int | str]
    ) -> None:
        words = json.dumps(setting)
        if words in found or time.monotonic() > self.stop:
            return
        try:
            # one request in 1,000 stalls
            found[words] = round(self.one(job, name, setting, epochs=3)["rate"])
        except Failed as error:
            found[words] = str(error)
        print(f"{name} {words}: {found[words]}", flush=True)
        self.write()

    def measure(self, job: Job, names: list[str], rounds: int) -> bool:
        """All in turn; whether it is complete."""
        runs = self.results["runs"]
        for number in range(rounds):
            for name in names:
                if (
                    name in self.results["absent"]
                    or len(runs.setdefault(name, [])) > number
                ):
                    continue
                if time.monotonic() > self.stop or name not in self.results["best"]:
                    print("no time left: continue with the same --results")
                    return False
                try:
                    runs[name].append(self.one(job, name, self.results["best"][name]))
                except Failed as error:
                    self.results["absent"][name] = (
                        f"failed in round {number + 1}: {error}"
                    )
                    del runs[name]
                    print(f"{name}: {self.results['absent'][name]}")
                else:
                    print(
                        f"round {number + 1}, {name}: {runs[name][-1]['rate']:.0f} images/s",
                        flush=True,
                    )
                self.write()
        return True


def conditions(images: int, size: float, store: str) -> dict[str, Any]:
    revision, changed = commit()
    return {
        "images": images,
        "images_of_an_epoch_if_fewer": SHORT,
        "bytes_of_an_image": round(size),
        "shards": SHARDS,
        "latency_median_s": LATENCY,
        "latency_spread": SPREAD,
        "stalled_share": STALLED,
        "stall_s": STALL,
        "store": store,
        "commit": revision,
        "changed": changed,
        "machine": machine(*PEERS),
    }


def report(results: dict[str, Any]) -> None:
    """The table, and the claims."""
    rates = Rounds(
        "images/s",
        {
            name: [run["rate"] for run in runs]
            for name, runs in results["runs"].items()
            if runs
        },
    )
    for key, unit in (
        ("cpu", "µs of CPU for an image"),
        ("cpu_of_store", "µs of CPU of the store for an image"),
    ):
        print(f"{unit}: ", end="")
        means = {
            name: statistics.median(run[key] for run in runs)
            for name, runs in results["runs"].items()
            if runs
        }
        print("; ".join(f"{name} {mean:.0f}" for name, mean in means.items()))
    print(
        "settings: "
        + "; ".join(f"{name} {setting}" for name, setting in results["best"].items())
    )
    if LIMIT not in rates.values:
        return
    rates.show(against=LIMIT, absent=results["absent"])
    for ours, reads in ((OURS, {"photos"}), (OURS_ON_SHARDS, {"tar", "mds"})):
        peers = [
            name
            for name in rates.values
            if CONTESTANTS[name].reads in reads and name not in (OURS, OURS_ON_SHARDS)
        ]
        if ours in rates.values and peers:
            best = max(peers, key=rates.median)
            claim(
                f"an epoch of JPEGs, {ours}",
                rates.share(ours, best, f"× {best}", at_least=1.0),
                rates.share(ours, LIMIT),
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=3072, help="a multiple of 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CONTESTANTS,
        metavar="NAME",
        default=list(CONTESTANTS),
    )
    parser.add_argument(
        "--results", type=Path, help="file in which a run is kept, and continued"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="only look for the best settings"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin nothing after that"
    )
    parser.add_argument(
        "--mds-python", default=os.environ.get("HEADRACE_MDS_PYTHON", ""), metavar="PATH"
    )
    parser.add_argument(
        "--provisional",
        default="",
        help="why the results are not to be shown, noted in the file",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="draw the chart from the results, and measure nothing",
    )
    arguments = parse_arguments(parser, images=256, rounds=1, only=QUICK)
    if arguments.plot:
        draw(json.loads(arguments.results.read_text(encoding="utf-8")), arguments.plot)
        return
    if not nginx_is_installed() and not is_quick():
        print(
            "nginx with its Lua module is not installed: there is no store with the latencies of S3"
        )
        return
    torch.set_num_threads(1)
    began = time.monotonic()
    run = Run(
        arguments.results,
        arguments.images,
        arguments.mds_python,
        began + 60 * arguments.minutes,
    )
    if arguments.provisional:
        run.write(provisional=arguments.provisional)
    print(describe_machine(*PEERS))
    with run.stores() as job:
        print(
            f"{run.results['conditions']}\nthe files were made in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        run.sweep(job, arguments.only)
        if not arguments.sweep and run.measure(job, arguments.only, arguments.rounds):
            report(run.results)
            run.write(complete=True)
    if failures := {
        name: why
        for name, why in run.results["absent"].items()
        if why.startswith("failed")
    }:
        sys.exit(f"these failed: {failures}")


if __name__ == "__main__":
    # which ends the stores too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
