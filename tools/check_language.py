"""Check the language of the project: forbidden words, pronouns, first lines of docstrings, density.

python tools/check_language.py            # print each excess; exit status 1 if there are any
python tools/check_language.py --table    # print the measures of each file
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Budgets of src and docs as a whole, and of each file. The prose of src is docstrings and comments;
# the first line of a docstring is its first paragraph, and the mean of all counts.
COLUMNS = 100
BUDGETS: dict[str, float] = {
    "tokens a line of code": 8.0,
    "lines over 100 columns": 0,
    "pronouns in 1,000 words": 30,
    "words in a docstring's first line": 11,
}
BUDGETS_OF_FILE: dict[str, float] = {
    "lines over 100 columns": 0,
    "pronouns in 1,000 words": 45,
    "words in a docstring's first line": 16,
}

PRONOUN = re.compile(
    r"\b(it|its|that|those|which|one|ones|what|whose|whoever|they|them|their|such|these)\b",
    re.I,
)
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

DOCUMENTS = ("docs", "README.md")
CHECKED = (
    "src",
    *DOCUMENTS,
    "tests",
    "examples",
    "benchmarks",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
SUFFIXES = {".py", ".md", ".toml", ""}  # of files in which forbidden words are searched

# English that says less than the technical term: for "told", say given or notified.
PHRASES = (
    *(
        "told",
        "somebody",
        "nobody",
        "whoever",
        "at hand",
        "heard",
        "foreseen",
        "lets go of",
    ),
    *("let go of", "what becomes of", "comes back", "begins a trip"),
)

# Old identifiers, as whole words, with their case. A comment names the terms that are used.
IDENTIFIERS = (
    *("aside", "_Trips"),  # run_blocking
    *("Verdict", "verdicts", "MISPLACED"),  # classify_error, RequestFailure, WRONG_RANGE
    *("Packer", "Parted", "Evened"),  # StringArrayBuilder, ShardIterator, EqualLength
    # RequestStats, report_throttled, throttle_events.
    *("Traffic", "push_back", "pushed_back"),
    *("_deaf_until", "_quiet_until", "HASTE", "CLIMB"),  # AdaptiveLimit
    *("fenced", "NOWHERE"),  # restrict_redirects, BLACKHOLE_PROXY
    *("cacheclaims", "cachespace", "cachetogether"),  # in_flight, quota, get_many
    *("rangedrow", "_Row", "take_apart", "gatherer"),  # concatenation, unwrap
    *("keyrules", "syncface", "call_one"),  # key_validation, background_loop, wake_one
    *("hired", "must_rest", "SteeredWindow"),  # spawned, should_park, AdaptiveFetcherPool
    *("_spread", "_ask", "Round", "Races"),  # prefix listing, ReadPlan, HedgedRequests
    *("InWorkers", "Takeover"),  # DispatchToWorkers, ProcessMain
    *("Parcel", "travelling"),  # PickledPayload
    *("Shipment", "Surroundings", "pass_on"),  # BootMessage, ProcessEnvironment, forward
    *("Lender", "Borrower", "lend", "hollow"),  # Allocator, Mapper, allocate, punch_hole
    # Delivery, BatchQueue, Prefetcher.
    *("LastStep", "Arrivals", "LookAhead", "came_back"),
    *("ByDefault", "WindowDataset", "WorkerDied"),  # Unset, TokenDataset, WorkerDiedError
    # Remainder, prefetch_row_groups, prefetch_bytes.
    *("uneven", "groups_ahead", "ahead_bytes"),
    # initial_backoff, max_backoff, cached_reads.
    *("first_wait", "longest_wait", "at_hand"),
    *(
        "CutShardError",
        "DamagedObjectError",
        "ReentrantError",
        "UserStopError",
        "CaptureError",
    ),
)
FORBIDDEN = re.compile(
    rf"(?<!\w)(?:(?i:{'|'.join(PHRASES)})|{'|'.join(IDENTIFIERS)})(?!\w)"
)


@dataclass
class Measures:
    """Sizes of a file, or of several files together."""

    tokens: int = 0
    code_lines: int = 0
    long_lines: int = 0
    words: int = 0
    pronouns: int = 0
    docstrings: int = 0
    first_words: int = 0

    def add_prose(self, prose: str) -> None:
        """Count words and pronouns."""
        self.words += len(re.findall(r"[A-Za-z']+", prose))
        self.pronouns += len(PRONOUN.findall(prose))

    def values(self) -> dict[str, float]:
        """Give the measures that have a budget, under the names of the budgets."""
        return {
            "tokens a line of code": self.tokens / max(1, self.code_lines),
            "lines over 100 columns": self.long_lines,
            "pronouns in 1,000 words": 1000 * self.pronouns / max(1, self.words),
            "words in a docstring's first line": self.first_words
            / max(1, self.docstrings),
        }


def measure_source(text: str) -> Measures:
    """Measure a module of Python."""
    measures = Measures(long_lines=sum(len(line) > COLUMNS for line in text.splitlines()))
    documented: set[int] = set()  # numbers of the lines of docstrings
    for node in ast.walk(ast.parse(text)):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
            measures.add_prose(re.sub(r"(?m)^\s*(>>>|\.\.\.).*$", "", docstring))
            measures.docstrings += 1
            measures.first_words += len(docstring.split("\n\n")[0].split())
    code: set[int] = set()  # numbers of the lines of code
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            measures.add_prose(token.string)
        elif token.type not in LAYOUT and token.start[0] not in documented:
            measures.tokens += 1
            code.update(range(token.start[0], token.end[0] + 1))
    measures.code_lines = len(code)
    return measures


def measure_document(text: str) -> Measures:
    """Measure a page of Markdown, without its blocks of code."""
    measures = Measures()
    measures.add_prose(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return measures


def total(files: Iterable[Measures]) -> Measures:
    """Add the measures of files."""
    rows = [vars(each).values() for each in files]
    return Measures(*map(sum, zip(*rows, strict=True)))


def texts(
    root: Path, names: Iterable[str], suffixes: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield names and texts of files; without `docs/gallery`, a copy that `make docs` writes."""
    for name in names:
        path = root / name
        for each in [path] if path.is_file() else sorted(path.rglob("*")):
            if each.is_file() and each.suffix in suffixes and "gallery" not in each.parts:
                yield each.relative_to(root).as_posix(), each.read_text(encoding="utf-8")


def measure(root: Path) -> tuple[dict[str, Measures], dict[str, Measures]]:
    """Measure the files and, under "all of …", the source and the documents as a whole."""
    source = {name: measure_source(text) for name, text in texts(root, ["src"], {".py"})}
    documents = {
        name: measure_document(text) for name, text in texts(root, DOCUMENTS, {".md"})
    }
    whole = {
        "all of src": total(source.values()),
        "all of docs": total(documents.values()),
    }
    return source | documents, whole


def over_budget(
    measured: dict[str, Measures], budgets: dict[str, float]
) -> Iterator[str]:
    """Yield a line for each measure over its budget."""
    for name, measures in measured.items():
        values = measures.values()
        for what, budget in budgets.items():
            if values[what] > budget:
                yield f"{name}: {values[what]:.2f} {what}; the budget is {budget}"


def excesses(root: Path) -> Iterator[str]:
    """Yield a line for each forbidden word, and for each measure over its budget."""
    for name, text in texts(root, (*CHECKED, "Makefile"), SUFFIXES):
        for match in FORBIDDEN.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: {match.group()}, a word to replace ({Path(__file__).name})"
    files, whole = measure(root)
    yield from over_budget(files, BUDGETS_OF_FILE)
    yield from over_budget(whole, BUDGETS)


def table(root: Path) -> Iterator[str]:
    """Yield the lines of a table of all measures."""
    files, whole = measure(root)
    yield "tokens  a line  long lines  pronouns  first line"
    for name, measures in (files | whole).items():
        density, long_lines, pronouns, first_line = measures.values().values()
        sizes = f"{measures.tokens:6}{density:8.1f}{long_lines:12}"
        yield f"{sizes}{pronouns:10.1f}{first_line:12.1f}  {name}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Check, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--table", action="store_true", help="print the measures of each file"
    )
    if parser.parse_args(arguments).table:
        print(*table(root), sep="\n")
        return 0
    found = list(excesses(root))
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
