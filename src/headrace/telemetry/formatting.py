"""Numbers as text, with the digits that a reader needs."""

from __future__ import annotations

__all__ = ["digits", "rate", "seconds", "share"]


def seconds(value: float) -> str:
    """Seconds as text, with two digits."""
    unit, size = ("s", 1.0) if value >= 1 else ("ms", 1e-3) if value >= 1e-3 else ("µs", 1e-6)
    return f"{digits(value / size)} {unit}"


def share(value: float) -> str:
    """A share as per cent."""
    return f"{100 * value:.0f} %"


def rate(value: float) -> str:
    """A number for each second, with thousands separated."""
    return f"{value:,.0f}" if value >= 100 else digits(value)


def digits(value: float) -> str:
    """With two or three digits."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"
