"""A line of `headrace doctor`, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "limit_text", "size_text"]


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
