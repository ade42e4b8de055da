"""`headrace doctor`: what on this machine a loader will suffer from, a line for each finding."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace._version import __version__
from headrace.cli.limits import CgroupLimits, available_memory

__all__ = [
    "CHECKS",
    "Finding",
    "check_cores",
    "check_descriptors",
    "check_device",
    "check_event_loop",
    "check_memory",
    "check_processes",
    "check_shared_memory",
    "check_versions",
    "examine",
    "findings",
    "limit_text",
    "size_text",
]

USUAL_DESCRIPTORS = 1024
SHM = Path("/dev/shm")
LEAST_SHM = 64 << 20  # bytes: the default of docker, and less than torch's workers use for a few batches of images
LEAST_PROCESSES = 64  # that may still be started: the zygote, the loader's process, workers, and their threads
REQUIRED = ("torch", "numpy", "anyio", "obstore", "uvloop", "aiofiles", "cloudpickle")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the output.

    Attributes:
        name: what was looked at.
        text: what was found, and what suffers from it.
        remedy: the command or the option that helps; None where all is well.
    """

    name: str
    text: str
    remedy: str | None = None

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return self.remedy is None


def limit_text(number: int) -> str:
    """A limit of the system as text."""
    return "unlimited" if number < 0 or number >= 1 << 62 else f"{number:,}"


def size_text(count: float) -> str:
    """A number of bytes as text."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def check_descriptors() -> Iterator[Finding]:
    """File descriptors: one for each request in flight."""
    try:
        import resource
    except ImportError:  # Windows
        return
    from headrace._core.look_ahead import MOST_CONCURRENCY, most_concurrency  # which imports torch

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f'{limit_text(soft)} (hard limit {limit_text(hard)}): concurrency="auto" uses up to {most_concurrency():,}'
    if soft != resource.RLIM_INFINITY and soft < USUAL_DESCRIPTORS:
        if hard == resource.RLIM_INFINITY or hard >= USUAL_DESCRIPTORS:
            most = 2 * MOST_CONCURRENCY if hard == resource.RLIM_INFINITY else min(hard, 2 * MOST_CONCURRENCY)
            raising = f"ulimit -n {most}"
        else:
            raising = "docker run --ulimit nofile=4096; outside of a container, as root: ulimit -n 4096"
        yield Finding("descriptors", f"{text} of {MOST_CONCURRENCY:,} requests, and workers may fail to start", raising)
    else:
        yield Finding("descriptors", f"{text} requests")


def check_memory() -> Iterator[Finding]:
    """Memory of the machine and of the control group, against the default `memory_budget`."""
    from headrace.options import MEMORY_BUDGET as BUDGET

    limits = CgroupLimits.here()
    left = min(limits.memory_left, available_memory())
    if math.isinf(left):
        return
    of = f" of the container's {size_text(limits.memory)}" if math.isfinite(limits.memory) else ""
    text = f"{size_text(left)} available{of}"
    if left < 2 * BUDGET:
        smaller = max(1 << 24, int(left) // 4) >> 20
        text += f"; batches that are fetched ahead may take {size_text(BUDGET)}: the kernel may kill the job"
        yield Finding("memory", text, f"memory_budget={smaller} << 20, or more memory for the container")
    else:
        yield Finding("memory", text)


def check_shared_memory() -> Iterator[Finding]:
    """Memory that processes share: memfd for batches of headrace, /dev/shm for torch's workers."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("headrace-doctor", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, bytes(4096))
        finally:
            os.close(descriptor)
        yield Finding("memfd", "usable: batches of workers are shared, not copied")
    else:
        yield Finding("memfd", "absent: batches of workers are copied through sockets", "run on Linux")
    if not SHM.is_dir():
        return
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    text = f"{size_text(free)} free; "
    if free <= LEAST_SHM:
        text += "torch's own workers use it and may die of a bus error; batches of headrace do not use it"
        yield Finding("/dev/shm", text, f"mount -o remount,size=2G {SHM}, or docker run --shm-size=2g")
    else:
        yield Finding("/dev/shm", f"{text}used by torch's own workers, not for batches of headrace")


def check_cores() -> Iterator[Finding]:
    """Cores that this process may use, and the threads that libraries start."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    quota = CgroupLimits.here().cores
    granted = min(affinity, quota)
    text = f"{granted:g} of {machine}"
    if quota < affinity:
        text += " (the container's quota)"
    elif affinity < machine:
        text += " (CPU affinity)"
    if granted < 2:
        yield Finding(
            "cores",
            f"{text}: fetching, workers and training share {'it' if granted <= 1 else 'them'}",
            f"a larger quota, for example docker run --cpus={min(machine, 4)}"
            if quota < affinity
            else f"taskset -c 0-{machine - 1} before the command, or more cores from the scheduler of your cluster"
            if affinity < machine
            else "a machine with more cores",
        )
    else:
        yield Finding("cores", f"{text}: num_workers up to {int(granted)}")
    name = "OMP_NUM_THREADS"
    threads = os.environ.get(name)
    if threads is None and quota < affinity:
        text = f"{name} is not set: libraries start {affinity} threads for {quota:g} cores, in each worker"
        yield Finding("threads", text, f"export {name}={max(1, int(quota))}")
    elif threads is not None and threads.isdecimal() and int(threads) > granted:
        text = f"{name}={threads} for {granted:g} cores: threads of each worker compete for them"
        yield Finding("threads", text, f"export {name}={max(1, int(granted))}")
    else:
        yield Finding("threads", f"{name} is {threads or 'not set'}; torch has one thread in each worker of headrace")


def check_processes() -> Iterator[Finding]:
    """How many processes may be started."""
    limits = CgroupLimits.here()
    if math.isfinite(limits.pids):
        text = f"{limits.pids_left:,.0f} of the container's {limits.pids:,.0f} are left"
        few = limits.pids_left < LEAST_PROCESSES
        remedy = "docker run --pids-limit=4096" if few else None
        yield Finding("container PIDs", text + ": workers may fail to start" * few, remedy)
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    few = soft != resource.RLIM_INFINITY and soft < 4 * LEAST_PROCESSES and os.geteuid() != 0
    enough = hard == resource.RLIM_INFINITY or hard >= 4 * LEAST_PROCESSES
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    raising = f"ulimit -u {most}" if enough else "as root: ulimit -u 4096"
    text = f"limit {limit_text(soft)} for this user (ulimit -u)" + ": workers may fail to start" * few
    yield Finding("user processes", text, raising if few else None)


def check_event_loop() -> Iterator[Finding]:
    """uvloop, and the variable that chooses asyncio's loop."""
    if os.environ.get("HEADRACE_EVENT_LOOP") == "asyncio":
        yield Finding("event loop", "HEADRACE_EVENT_LOOP=asyncio: slower than uvloop", "unset HEADRACE_EVENT_LOOP")
        return
    try:
        import uvloop

        uvloop.new_event_loop().close()
        yield Finding("event loop", "uvloop")
    except (ImportError, OSError) as error:
        text = f"uvloop is not usable ({error}): asyncio's loop is slower"
        yield Finding("event loop", text, "pip install uvloop")


def check_device() -> Iterator[Finding]:
    """The accelerator, and whether host memory can be page-locked for copies to it."""
    import torch

    present = any(Path(each).exists() for each in ("/dev/nvidiactl", "/dev/kfd"))
    if not torch.cuda.is_available():
        accelerator = getattr(torch, "accelerator", None)
        if accelerator is not None and accelerator.is_available():
            yield Finding("device", f"{accelerator.current_accelerator()}; copies with device= are made for CUDA")
        elif present:
            text = f"this machine has a GPU, and torch {torch.__version__} cannot use it: batches stay in host memory"
            yield Finding("device", text, "install torch for your driver: https://pytorch.org/get-started/locally")
        else:
            yield Finding("device", "no accelerator: batches stay in host memory")
        return
    try:
        pinned = torch.empty(1 << 20, dtype=torch.uint8).pin_memory().is_pinned()
        reason = "" if pinned else "torch says so"
    except RuntimeError as error:
        pinned, reason = False, str(error).splitlines()[0]
    text = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    if pinned:
        yield Finding("device", f"{text}; memory can be pinned")
    else:
        yield Finding("device", f"{text}; memory cannot be pinned ({reason}): copies block", "ulimit -l unlimited")


def check_versions() -> Iterator[Finding]:
    """Versions of what headrace needs."""
    yield Finding("headrace", f"{__version__}, Python {platform.python_version()}, {platform.system()}")
    for name in REQUIRED:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if name != "uvloop":  # the event loop's line
                yield Finding(name, "is not installed", f"pip install {name}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_descriptors,
    check_memory,
    check_shared_memory,
    check_cores,
    check_processes,
    check_event_loop,
    check_device,
    check_versions,
)


def findings() -> Iterator[Finding]:
    """Everything, in the order of the output; a check that fails is a finding too."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # a file of the system that has another form, a package that fails at import
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(name, f"could not be examined: {type(error).__name__}: {error}", "please report this")


def examine(*, as_json: bool) -> int:
    """Print the findings; returns the number of problems.

    Args:
        as_json: one JSON object, for programs: ``{"ok": bool, "findings": [{"name", "ok", "text", "remedy"}, …]}``.
    """
    found = []
    for each in findings():
        found.append(each)
        if not as_json:
            remedy = "" if each.ok else f". Remedy: {each.remedy}"
            print(f"{'ok' if each.ok else 'problem':<9}{each.name:<18}{each.text}{remedy}", flush=True)
    problems = sum(not each.ok for each in found)
    if as_json:
        lines = [{**asdict(each), "ok": each.ok} for each in found]
        print(json.dumps({"ok": not problems, "findings": lines}, indent=2, ensure_ascii=False))
    else:
        print("no problems" if not problems else f"{problems} problem{'s' * (problems > 1)}")
    return problems
