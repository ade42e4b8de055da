"""`headrace doctor`: what on this machine a loader will suffer from, a line for each finding."""

from __future__ import annotations

import functools
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from headrace._core.terminal import columns
from headrace.cli.checks.finding import Finding
from headrace.cli.checks.limits import (
    check_cores,
    check_descriptors,
    check_memory,
    check_processes,
    check_shared_memory,
)
from headrace.cli.checks.software import (
    check_clock,
    check_device,
    check_environment,
    check_event_loop,
    check_extras,
    check_versions,
)

__all__ = ["examine", "findings"]

GREEN, YELLOW, PLAIN = "\033[32m", "\033[33m", "\033[0m"
NAME = 18  # columns


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_descriptors,
    check_memory,
    check_shared_memory,
    check_cores,
    check_processes,
    check_event_loop,
    check_device,
    check_clock,
    check_environment,
    check_versions,
    check_extras,
)


def findings() -> Iterator[Finding]:
    """Everything, in the order of the output; a check that fails is a finding too."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # a file of the system that has another form, a package that fails at import
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(name, f"could not be examined: {type(error).__name__}: {error}", "please report this")


def examine(*, as_json: bool, stream: TextIO | None = None) -> int:
    """Print the findings.

    Args:
        as_json: one JSON object, for programs: ``{"ok": bool, "findings": [{"name", "ok", "text", "remedy"}, …]}``.
        stream: where to; by default standard output.

    Returns:
        The number of problems.
    """
    stream = stream or sys.stdout
    if as_json:
        found = list(findings())
        lines = [{"name": each.name, "ok": each.ok, "text": each.text, "remedy": each.remedy} for each in found]
        json.dump({"ok": all(each.ok for each in found), "findings": lines}, stream, indent=2, ensure_ascii=False)
        stream.write("\n")
        return sum(not each.ok for each in found)
    found = []
    terminal = stream.isatty()
    width = columns(stream) if terminal else None
    for each in findings():
        found.append(each)
        stream.write(_line(each, width=width, colored=terminal and not os.environ.get("NO_COLOR")))
        stream.flush()
    stream.write(_summary(found))
    return sum(not each.ok for each in found)


def _line(finding: Finding, *, width: int | None, colored: bool) -> str:
    mark = "ok     " if finding.ok else "problem"
    remedy = "" if finding.ok else f"Remedy: {finding.remedy}"
    head = f"{mark}  {finding.name:<{NAME}}"
    if width is None:
        line = f"{head}{finding.text}{'. ' * bool(remedy)}{remedy}"
    else:  # the remedy, which has commands to be copied, on lines of its own
        indent = " " * len(head)
        wrap = functools.partial(
            textwrap.wrap, width=max(width - 1, 50), break_long_words=False, break_on_hyphens=False
        )
        lines = wrap(head + finding.text, subsequent_indent=indent)
        line = "\n".join([*lines, *wrap(remedy, initial_indent=indent, subsequent_indent=indent + "  ")])
    if colored:
        line = f"{GREEN if finding.ok else YELLOW}{line[: len(mark)]}{PLAIN}{line[len(mark) :]}"
    return f"{line}\n"


def _summary(found: Sequence[Finding]) -> str:
    problems = sum(not each.ok for each in found)
    return "no problems\n" if not problems else f"{problems} problem{'s' * (problems > 1)}\n"
