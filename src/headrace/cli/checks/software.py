"""Packages, the event loop, the device, and the environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace._version import __version__
from headrace.cli.checks.finding import Finding

__all__ = [
    "check_clock",
    "check_device",
    "check_environment",
    "check_event_loop",
    "check_extras",
    "check_versions",
    "within",
]

SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "refined-jiffies", "jiffies"})
REQUIRED = ("torch", "numpy", "anyio", "obstore", "uvloop", "aiofiles", "cloudpickle")
OPTIONAL = (  # module, what it is for, how it is installed
    ("pyarrow", "Parquet datasets and listing files", "'headrace[parquet]'"),
    ("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", "shards in zstd", "'headrace[zstd]'"),
    ("boto3", "profiles of AWS", "'headrace[aws]'"),
    ("aiohttp", "the demo", "'headrace[demo]'"),
    ("matplotlib", "plots of headrace bench", "'headrace[plot]'"),
    ("prometheus_client", "metrics for Prometheus", "'headrace[prometheus]'"),
    ("opentelemetry.metrics", "metrics for OpenTelemetry", "'headrace[opentelemetry]'"),
)
VARIABLES = (
    *("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
)


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
    """Versions of what headrace needs, against the ranges that it declares."""
    yield Finding("headrace", f"{__version__}, Python {platform.python_version()}, {platform.system()}")
    try:
        requirements = importlib.metadata.requires("headrace") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        requirements = []
    ranges = {
        match[1]: match[2]
        for each in requirements
        if "extra ==" not in each and (match := re.match(r"([\w.-]+)\s*([<>=!~][^;]*)?", each)) and match[2]
    }
    for name in REQUIRED:
        wanted = ranges.get(name, "").replace(" ", "")
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "uvloop":  # the event loop's line
                yield Finding(name, "is not installed", f"pip install '{name}{wanted}'")
            continue
        if within(version, wanted):
            yield Finding(name, version)
        else:
            yield Finding(name, f"{version} is outside of the tested range {wanted}", f"pip install '{name}{wanted}'")


def within(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as ``>=2.6,<3``; release numbers only."""
    found = _release(version)
    for each in filter(None, wanted.split(",")):
        operator, bound = re.match(r"([<>=!~]+)(.*)", each).groups()  # type: ignore[union-attr]
        limit = _release(bound)
        holds = {">=": found >= limit, "<": found < limit, ">": found > limit, "<=": found <= limit}
        if not holds.get(operator, True):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(each) for each in re.findall(r"\d+", re.split(r"[a-z+]", version)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_extras() -> Iterator[Finding]:
    """Optional packages, and what they are for."""
    for module, purpose, install in OPTIONAL:
        parent = module.partition(".")[0]
        installed = importlib.util.find_spec(parent) is not None and importlib.util.find_spec(module) is not None
        text = f"{purpose}: installed" if installed else f"{purpose}: not installed, pip install {install}"
        yield Finding(module, text)


def check_clock() -> Iterator[Finding]:
    """The clock, which is read for each request and each batch."""
    file = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = file.read_text().strip() if file.exists() else "unknown"
    resolution = time.get_clock_info("monotonic").resolution
    text = f"{source}, resolution {resolution * 1e9:g} ns"
    if source in SLOW_CLOCKS:
        remedy = "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource"
        yield Finding("clock", f"{text}: reading it is a slow system call", remedy)
    else:
        yield Finding("clock", text)
    yield Finding("ptrace", "not needed: headrace samples its own threads, and py-spy is only for benchmarks")


def check_environment(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Proxies and credentials: present or not, never their values."""
    present = [each for each in VARIABLES if environment.get(each) or environment.get(each.lower())]
    text = f"set: {', '.join(present) or 'no proxies, no credentials'}"
    key, secret = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
    if (key in present) != (secret in present):
        missing = secret if key in present else key
        yield Finding(
            "environment", f"{text}, without {missing}: requests to S3 will be refused", f"export {missing}=…"
        )
    else:
        yield Finding("environment", text)
