"""`headrace doctor`: check this machine for problems of a loader."""

from __future__ import annotations

import argparse
import math
import os
import resource
from collections.abc import Callable, Iterator
from typing import NamedTuple

from headrace._base.cgroup import CgroupLimits, available_memory
from headrace._eventloop.loop_thread import import_event_loop

USUAL_DESCRIPTORS = 1024
GIB = 1 << 30  # bytes


class Finding(NamedTuple):
    """A line of the output.

    Attributes:
        name: subject of the check.
        text: result of the check, and the effect on a loader.
        remedy: command or option to solve the problem; None without a problem.
    """

    name: str
    text: str
    remedy: str | None = None


def _check_descriptors() -> Iterator[Finding]:
    """Check the limit of file descriptors.

    Each request in flight needs a descriptor.
    """
    # Imported here: the module imports torch.
    from headrace._engine.look_ahead import MOST_CONCURRENCY, most_concurrency

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = (
        f"{soft:,} (hard limit {hard:,}): "
        f'concurrency="auto" uses up to {most_concurrency():,} requests'
    )
    remedy = None
    if 0 <= soft < USUAL_DESCRIPTORS:  # a negative limit means unlimited
        text += f" of {MOST_CONCURRENCY:,}, and workers may fail to start"
        remedy = "docker run --ulimit nofile=4096; outside of a container, as root: ulimit -n 4096"
        if not 0 <= hard < USUAL_DESCRIPTORS:
            remedy = (
                f"ulimit -n {2 * MOST_CONCURRENCY if hard < 0 else min(hard, 2 * MOST_CONCURRENCY)}"
            )
    yield Finding("descriptors", text, remedy)


def _check_memory() -> Iterator[Finding]:
    """Check available memory against the default `memory_budget`.

    Available memory is limited by the machine and by the control group.
    """
    from headrace.options import MEMORY_BUDGET as BUDGET

    limits = CgroupLimits.here()
    left = min(limits.memory_left, available_memory())
    if math.isinf(left):
        return
    of = (
        f" of the container's {limits.memory / GIB:.1f} GiB" if math.isfinite(limits.memory) else ""
    )
    text, remedy = f"{left / GIB:.1f} GiB available{of}", None
    if left < 2 * BUDGET:
        text += (
            f"; batches that are fetched ahead may take {BUDGET / GIB:.1f} GiB: "
            "the kernel may kill the job"
        )
        remedy = (
            f"memory_budget={max(1 << 24, int(left) // 4) >> 20} << 20, "
            "or more memory for the container"
        )
    yield Finding("memory", text, remedy)


def _check_cores() -> Iterator[Finding]:
    """Check the number of usable cores and of library threads."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0))
    quota = CgroupLimits.here().cores
    granted = min(affinity, quota)
    text, remedy = f"{granted:g} of {machine}", "a machine with more cores"
    if quota < affinity:
        text += " (the container's quota)"
        remedy = f"a larger quota, for example docker run --cpus={min(machine, 4)}"
    elif affinity < machine:
        text += " (CPU affinity)"
        remedy = (
            f"taskset -c 0-{machine - 1} before the command, "
            "or more cores from the scheduler of your cluster"
        )
    if granted < 2:
        yield Finding("cores", f"{text}: fetching, workers and training share them", remedy)
    else:
        yield Finding("cores", f"{text}: num_workers up to {int(granted)}")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    started = int(threads) if threads.isdecimal() else affinity if quota < affinity else 0
    if started > granted:
        text = (
            f"libraries start {started} for {granted:g} cores (OMP_NUM_THREADS): "
            "they compete for them"
        )
        yield Finding("threads", text, f"export OMP_NUM_THREADS={max(1, int(granted))}")


def _check_event_loop() -> Iterator[Finding]:
    """Check that the loader's event loop is uvloop."""
    name, remedy = import_event_loop().__name__, None
    if name != "uvloop":
        remedy = "pip install uvloop; unset HEADRACE_EVENT_LOOP"
    yield Finding("event loop", name if remedy is None else f"{name}: slower than uvloop", remedy)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _check_descriptors,
    _check_memory,
    _check_cores,
    _check_event_loop,
)


def run(arguments: argparse.Namespace) -> bool:
    """Print all findings.

    Args:
        arguments: parsed arguments of the command; not used.

    Returns:
        Whether there is no problem.
    """
    problems = 0
    for check in CHECKS:
        try:
            found = [*check()]
        except Exception as error:
            # A system file may have an unknown format, and an import may fail.
            name = check.__name__.removeprefix("_check_").replace("_", " ")
            found = [
                Finding(
                    name,
                    f"could not be examined: {type(error).__name__}: {error}",
                    "please report this",
                )
            ]
        for each in found:
            is_problem = each.remedy is not None
            remedy = f". Remedy: {each.remedy}" if is_problem else ""
            print(f"{'problem' if is_problem else 'ok':<9}{each.name:<18}{each.text}{remedy}")
            problems += is_problem
    print("no problems" if not problems else f"{problems} problem{'s' * (problems > 1)}")
    return not problems
