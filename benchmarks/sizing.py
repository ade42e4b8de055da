"""The arithmetic of docs/benchmarks.md: what a host with 8 GPUs, and 64 of them, need of engines, store and network.

Every figure is a constant below, with its source, or computed from them. `simulate_scale.py` prints
the tables, and tests/test_documents.py compares them with the document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace._store.listing import AT_ONCE as LIST_AT_ONCE
from headrace._store.store import LARGE, PAGE, PART

__all__ = [
    "MODELS",
    "WORKLOADS",
    "Model",
    "Workload",
    "cluster_tables",
    "cost_table",
    "host_tables",
    "other_costs",
]

GPUS, HOSTS, OBJECTS = 8, 64, 10**9
# CPU seconds a second of an engine's event loop: a quarter more engines than it computes
LOOP_FULL = 0.8

# Cited, in docs/benchmarks.md: Amazon's guide to the performance of S3.
PREFIX_GETS = 5_500  # a second, of a partition
FIRST_BYTE = 0.100  # seconds; 100 to 200 ms
CONNECTION_BANDWIDTH = 87.5e6  # bytes a second of one request; 85 to 90 MB/s
# seconds to the first byte of a store nearby: an assumption, that of the other benchmarks
NEAR = 0.020

# Measured: catalog_costs.py.
KEY_CPU = {"a listing": 3.3e-6, "a table": 1.0e-6}  # seconds of CPU a key
KEY_BYTES, KEY_LENGTH = 96, 38  # of an object in memory, of which the key's own
ENGINE_BYTES = 14e6
KEY_START = 0.05e-6  # seconds until the first batch of engines in processes, a key
# with engines in processes, however many: the consumer's, and one that all of them map
KEY_COPIES = 2

# Measured: engine_costs.py.
BATCH_CPU = {  # seconds of the engine with its worker, and of the consumer
    "4 KB": (0.38e-3, 0.13e-3),
    "38 MB": (218e-3, 0.79e-3),
    "38 MB, made in a worker": (3.9e-3, 0.78e-3),
}

REQUESTS, KEYS = "`engine_costs.py`", "`catalog_costs.py`"


@dataclass(frozen=True)
class Cost:
    """CPU time of an engine for a sample over HTTPS, as engine_costs.py has measured.

    Attributes:
        python: seconds of its Python threads, which share a core.
        native: seconds of obstore's threads.
    """

    python: float
    native: float


@dataclass(frozen=True)
class Workload:
    """A workload of MLPerf Storage, each sample an object.

    Attributes:
        name: of the model.
        nbytes: of a sample.
        samples: a second, of a GPU.
        cost: of a sample.
    """

    name: str
    nbytes: float
    samples: float
    cost: Cost

    @property
    def requests(self) -> int:
        """Requests of a sample: large objects are read in parts."""
        return 1 if self.nbytes <= LARGE else math.ceil(self.nbytes / PART)

    def latency(self, first_byte: float) -> float:
        """Seconds of a request."""
        return first_byte + self.nbytes / self.requests / CONNECTION_BANDWIDTH


SMALL = 4_000, Cost(35e-6, 106e-6)


@dataclass(frozen=True)
class Model:
    """A workload of MLPerf Storage for one H100 (mlcommons/storage, configs/dlio/workload/*_h100.yaml)."""

    name: str
    batch_size: int
    seconds: float
    utilization: float
    sample_bytes: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second with which a GPU is busy as much as the benchmark demands."""
        return self.batch_size * self.sample_bytes / self.seconds * self.utilization


MODELS = (
    Model("ResNet-50", 400, 0.224, 0.9, 114_660),
    Model("CosmoFlow", 1, 0.0035, 0.7, 2_828_486),
    Model("3D U-Net", 7, 0.323, 0.9, 146_600_628),
)
_COSTS = {
    "ResNet-50": Cost(48e-6, 168e-6),
    "CosmoFlow": Cost(230e-6, 1.45e-3),
    "3D U-Net": Cost(91e-3, 78e-3),
}

WORKLOADS = tuple(
    Workload(
        model.name,
        model.sample_bytes,
        model.bandwidth / model.sample_bytes,
        _COSTS[model.name],
    )
    for model in MODELS
)


@dataclass(frozen=True)
class Need:
    """What GPUs need of a workload.

    Attributes:
        workload: it.
        gpus: their number.
    """

    workload: Workload
    gpus: int

    @property
    def samples(self) -> float:
        return self.gpus * self.workload.samples

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.samples * self.workload.nbytes

    @property
    def requests(self) -> float:
        """A second."""
        return self.samples * self.workload.requests

    def in_flight(self, first_byte: float) -> float:
        """By Little's law: the rate times the latency."""
        return self.requests * self.workload.latency(first_byte)

    @property
    def prefixes(self) -> int:
        return math.ceil(self.requests / PREFIX_GETS)

    @property
    def engines(self) -> int:
        """At least, each with its interpreter busy four fifths of the time."""
        return math.ceil(self.samples * self.workload.cost.python / LOOP_FULL)

    @property
    def cores(self) -> float:
        """Busy with fetching."""
        return self.samples * (self.workload.cost.python + self.workload.cost.native)


def cost_table() -> str:
    """What one engine gives."""
    samples = [
        ("small", *SMALL),
        *((each.name, each.nbytes, each.cost) for each in WORKLOADS),
    ]
    rows = [
        (
            name,
            quantity(nbytes, "B"),
            duration(cost.python),
            duration(cost.native),
            quantity(LOOP_FULL / cost.python),
            quantity(LOOP_FULL / cost.python * nbytes, "B/s"),
        )
        for name, nbytes, cost in samples
    ]
    head = (
        "objects",
        "size",
        "CPU of Python's threads",
        "of obstore's threads",
        "objects/s, at most",
        "bytes/s",
    )
    return table(head, rows)


def other_costs() -> str:
    """What else an engine costs."""
    batches = [
        (
            f"CPU for a batch of {name}: engine, consumer",
            f"{duration(engine)}, {duration(consumer)}",
            REQUESTS,
        )
        for name, (engine, consumer) in BATCH_CPU.items()
    ]
    return table(
        ("", "", "`benchmarks/`"),
        [
            ("connections for each request in flight", "1.0 to 1.1", REQUESTS),
            *batches,
            (
                "memory of an engine that no other process shares",
                quantity(ENGINE_BYTES, "B"),
                KEYS,
            ),
            (
                f"memory of a key of {KEY_LENGTH} bytes, its size and its entity tag",
                f"{KEY_BYTES} bytes",
                KEYS,
            ),
            ("copies of them, with engines in processes", str(KEY_COPIES), KEYS),
            ("start of the engines, for each key", duration(KEY_START), KEYS),
            *(
                (f"CPU of {name}, for each key", duration(seconds), KEYS)
                for name, seconds in KEY_CPU.items()
            ),
        ],
    )


def host_tables() -> Iterator[str]:
    """A host: its demand, and what that takes."""
    needs = [Need(workload, GPUS) for workload in WORKLOADS]
    yield _demand(needs)
    yield table(
        (
            "",
            "engines, at least",
            "for each of 8 ranks",
            "cores that fetch",
            "MB in flight, 100 ms",
        ),
        [
            (
                need.workload.name,
                f"{need.engines}",
                f"{math.ceil(need.engines / GPUS)}",
                f"{need.cores:.1f}",
                f"{need.in_flight(FIRST_BYTE) * need.workload.nbytes / need.workload.requests / 1e6:,.0f}",
            )
            for need in needs
        ],
    )


def cluster_tables() -> Iterator[str]:
    """The cluster: its demand, and what a thousand million keys take."""
    needs = [Need(workload, HOSTS * GPUS) for workload in WORKLOADS]
    yield _demand(needs)
    yield table(
        (
            "",
            "bytes of 10⁹ objects",
            "an epoch",
            f"engines of {HOSTS * GPUS} ranks, at least",
        ),
        [
            (
                need.workload.name,
                quantity(OBJECTS * need.workload.nbytes, "B"),
                duration(OBJECTS / need.samples),
                f"{need.gpus * math.ceil(need.engines / need.gpus):,}",
            )
            for need in needs
        ],
    )
    pages = OBJECTS / PAGE
    yield table(
        ("10⁹ keys", "", "by"),
        [
            ("LIST requests", f"{pages:,.0f}", f"pages of {PAGE:,}"),
            (
                "listing, one request at a time",
                duration(pages * FIRST_BYTE),
                "100 ms a page",
            ),
            (
                "listing, 16 at a time",
                duration(pages * FIRST_BYTE / LIST_AT_ONCE),
                "the same",
            ),
            *(
                (
                    f"CPU time of {name}",
                    duration(OBJECTS * seconds),
                    f"{duration(seconds)} a key",
                )
                for name, seconds in KEY_CPU.items()
            ),
            (
                "memory of one copy",
                quantity(OBJECTS * KEY_BYTES, "B"),
                f"{KEY_BYTES} bytes a key",
            ),
            (
                "8 ranks, the engine in a thread",
                quantity(8 * OBJECTS * KEY_BYTES, "B"),
                "1 copy a rank",
            ),
            (
                "8 ranks, engines in processes",
                quantity(8 * KEY_COPIES * OBJECTS * KEY_BYTES, "B"),
                f"{KEY_COPIES} copies a rank",
            ),
            (
                "one rank's part of 512, one copy",
                quantity(OBJECTS / 512 * KEY_BYTES, "B"),
                f"{KEY_BYTES} bytes a key",
            ),
            (
                "start of the engines",
                duration(OBJECTS * KEY_START),
                f"{duration(KEY_START)} a key",
            ),
        ],
    )
    samples = 1251  # of a file of MLPerf Storage's ResNet-50
    shards = math.ceil(OBJECTS / samples)
    yield table(
        (f"10⁹ samples in shards of {samples:,}", ""),
        [
            ("shards", f"{shards:,}"),
            ("LIST requests", f"{math.ceil(shards / PAGE):,}"),
            (
                "listing, 16 at a time",
                duration(shards / PAGE * FIRST_BYTE / LIST_AT_ONCE),
            ),
            ("memory of one copy", quantity(shards * KEY_BYTES, "B")),
            (
                "requests/s of ResNet-50, ranges of 8 MiB",
                f"{needs[0].bandwidth / PART:,.0f}",
            ),
        ],
    )


def _demand(needs: Sequence[Need]) -> str:
    head = (
        "",
        "samples/s",
        "GB/s",
        "network, Gbit/s",
        "requests/s",
        "S3 partitions",
        "in flight, 20 ms",
        "100 ms",
    )
    return table(
        head,
        [
            (
                need.workload.name,
                f"{need.samples:,.0f}",
                figure(need.bandwidth / 1e9),
                figure(need.bandwidth * 8 / 1e9),
                f"{need.requests:,.0f}",
                f"{need.prefixes:,}",
                f"{math.ceil(need.in_flight(NEAR)):,}",
                f"{math.ceil(need.in_flight(FIRST_BYTE)):,}",
            )
            for need in needs
        ],
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns after the first are aligned to the right where they begin with a digit."""
    right = [
        all(row[column][:1].isdigit() for row in rows) for column in range(len(head))
    ]
    rule = "|" + "|".join("---:" if each else "---" for each in right) + "|"
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join([first.replace("|  |", "| |"), rule, *others])


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def quantity(value: float, unit: str = "") -> str:
    """Three digits, with a decimal prefix where there is a unit."""
    if not unit:
        return figure(float(f"{value:.2g}"))
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def duration(seconds: float) -> str:
    """Two digits."""
    for limit, unit, size in (
        (1e-3, "µs", 1e-6),
        (1, "ms", 1e-3),
        (120, "s", 1),
        (7200, "min", 60),
        (172_800, "h", 3600),
    ):
        if seconds < limit:
            return f"{float(f'{seconds / size:.2g}'):,.4g} {unit}"
    return f"{float(f'{seconds / 86_400:.2g}'):,.4g} days"
