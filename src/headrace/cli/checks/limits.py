"""Limits of this process, its container and the machine."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.cli.cgroups import CgroupLimits
from headrace.cli.checks.finding import Finding, limit_text, size_text

__all__ = [
    "available_memory",
    "check_cores",
    "check_descriptors",
    "check_memory",
    "check_processes",
    "check_shared_memory",
]

USUAL_DESCRIPTORS = 1024
SHM = Path("/dev/shm")
LEAST_SHM = 64 << 20  # bytes: the default of docker, and less than torch's workers use for a few batches of images
LEAST_PROCESSES = 64  # that may still be started: the zygote, the loader's process, workers, and their threads


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
            _more_cores(machine, quota < affinity, affinity < machine),
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


def _more_cores(machine: int, has_quota: bool, has_affinity: bool) -> str:
    if has_quota:
        return "docker run --cpus=4, or a larger limit of resources.limits.cpu in Kubernetes"
    if not has_affinity:
        return "a machine with more cores"
    cores = f"0-{machine - 1}"
    if "SLURM_JOB_ID" in os.environ:
        return f"srun --cpus-per-task={min(machine, 8)}"
    return f"taskset -c {cores} before the command, or docker run --cpuset-cpus={cores}"


def check_processes() -> Iterator[Finding]:
    """How many processes may be started, and how."""
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
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    yield Finding(
        "start method", f"{method} for torch datasets; workers of async datasets are forked from a clean process"
    )


def available_memory() -> float:
    """Bytes of memory that the machine has available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), math.inf)
