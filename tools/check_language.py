"""Refuse words that readers of the code would have to learn first, and identifiers that were renamed.

    python tools/check_language.py

Prints each occurrence as ``path:line: word``, and ends with status 1 if there is one outside of
`NOT_YET`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = (
    "src",
    "docs",
    "tests",
    "examples",
    "benchmarks",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
)
SUFFIXES = {".py", ".md", ".toml", ""}

# English that says less than the technical term: "told" (given, notified), "at hand" (cached,
# available), …
PHRASES = (
    "told",
    "somebody",
    "nobody",
    "whoever",
    "at hand",
    "heard",
    "foreseen",
    "lets go of",
    "let go of",
    "what becomes of",
    "comes back",
    "begins a trip",
)

# Old identifiers, as whole words, with their case. The comment names the term that is used.
IDENTIFIERS = (
    *("aside", "_Trips"),  # run_blocking
    *("Verdict", "verdicts", "MISPLACED"),  # classify_error, RequestFailure, WRONG_RANGE
    "Packer",  # StringArrayBuilder
    *("Traffic", "push_back", "pushed_back"),  # RequestStats, report_throttled, throttle_events
    *("_deaf_until", "_quiet_until", "HASTE", "CLIMB"),  # AdaptiveLimit
    *("fenced", "NOWHERE"),  # restrict_redirects, BLACKHOLE_PROXY
    *(
        "cacheclaims",
        "cachespace",
        "cachetogether",
        "at_hand",
    ),  # in_flight, quota, get_many, cached_reads
    *("Parted", "Evened"),  # ShardIterator, EqualLength
    *("_spread", "_ask"),  # prefix listing
    *("rangedrow", "_Row", "take_apart", "gatherer"),  # concatenation, unwrap
    *("keyrules", "syncface"),  # key_validation, background_loop
    *(
        "call_one",
        "hired",
        "must_rest",
        "SteeredWindow",
    ),  # wake_one, spawned, should_park, AdaptiveFetcherPool
    *("Round", "Races"),  # ReadPlan, HedgedRequests
    *("InWorkers", "Takeover"),  # DispatchToWorkers, ProcessMain
    *(
        "Parcel",
        "travelling",
        "Shipment",
        "Surroundings",
    ),  # PickledPayload, BootMessage, ProcessEnvironment
    *(
        "Lender",
        "Borrower",
        "lend",
        "hollow",
        "pass_on",
    ),  # Allocator, Mapper, allocate, punch_hole, forward
    *("LastStep", "Arrivals", "LookAhead", "came_back"),  # delivery, BatchQueue, Prefetcher
    "ByDefault",  # Unset
    "WindowDataset",  # TokenDataset
    *("uneven", "groups_ahead", "ahead_bytes"),  # remainder, prefetch_row_groups, prefetch_bytes
    *("first_wait", "longest_wait"),  # initial_backoff, max_backoff
    *(
        "CutShardError",
        "DamagedObjectError",
        "ReentrantError",
        "UserStopError",
        "CaptureError",
        "WorkerDied",
    ),
)

# Files and folders that have not been rewritten yet.
NOT_YET: tuple[str, ...] = ()

PATTERN = re.compile(
    rf"(?i:(?<!\w)(?:{'|'.join(PHRASES).replace(' ', '[ ]')})(?!\w))|(?<!\w)(?:{'|'.join(IDENTIFIERS)})(?!\w)"
)


def occurrences(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and words, in the order of the text."""
    for match in PATTERN.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group()


def files() -> Iterator[Path]:
    """The text files that are checked."""
    for name in CHECKED:
        path = ROOT / name
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        found = [
            each for each in found if "gallery" not in each.parts
        ]  # copies, made by `make docs`
        yield from (each for each in found if each.is_file() and each.suffix in SUFFIXES)


def main() -> int:
    """Check, print, and return the exit status."""
    bad = 0
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(NOT_YET):
            continue
        for line, word in occurrences(path.read_text(encoding="utf-8")):
            print(f"{name}:{line}: {word}")
            bad += 1
    if bad:
        print(
            f"{bad} words to replace; tools/check_language.py has the list and the terms",
            file=sys.stderr,
        )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
