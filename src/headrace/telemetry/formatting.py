"""Numbers as text, with the digits that a reader needs."""

from __future__ import annotations

__all__ = ["digits", "rate", "seconds", "share"]


def seconds(value: float) -> str:
    """Seconds as text, with two digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value / 1e-6)} µs"


def share(value: float) -> str:
    """A share as per cent."""
    return f"{100 * value:.0f} %"


def rate(value: float) -> str:
    """A number for each second, with thousands separated."""
    return f"{value:,.0f}" if value >= 100 else digits(value)


def digits(value: float) -> str:
    """With two or three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"
