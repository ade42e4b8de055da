"""Warnings of user code that blocks an event loop: one for each place, whatever number of loaders and processes."""

from __future__ import annotations

import logging

from headrace._core.eventloop.stack_places import Spot, advice_for, describe_call

_PLACE = "headrace_place"  # the attribute of a warning's record

_log = logging.getLogger("headrace")
_reported: set[tuple[str, int]] = set()  # file and line: one report for each place and process


def is_reported(spot: Spot, *, computes: bool) -> bool:
    """Whether there was a warning of this place."""
    return _key(spot, computes=computes) in _reported


def warn(datasets: list[str], spot: Spot, seconds: float, *, computes: bool, ended: bool) -> None:
    """Warn of a place, once.

    Args:
        datasets: names of the classes of datasets whose loop it is.
        spot: the place.
        seconds: for which it has blocked the loop.
        computes: whether it did so by computing.
        ended: whether it has ended.
    """
    key = _key(spot, computes=computes)
    if key in _reported:
        return
    _reported.add(key)
    call, advice = describe_call(spot)
    _log.warning(
        "%s: %s%s %s the loader's event loop for %.2f s%s, in which nothing else was fetched. Instead, %s. "
        "(One warning for each place.)",
        " or ".join(datasets),
        spot.place,
        f", in {call}," if call else "",
        "computed on" if computes else "blocked",
        seconds,
        "" if ended else " so far",
        advice_for(advice, computes=computes),
        extra={_PLACE: key},
    )


def is_repeated(record: logging.LogRecord) -> bool:
    """Whether a warning from a loader's process names a place that was reported before, by another one for example."""
    key = record.__dict__.get(_PLACE)
    if not isinstance(key, tuple):
        return False
    known = key in _reported
    _reported.add(key)
    return known


def _key(spot: Spot, *, computes: bool) -> tuple[str, int]:
    """What is reported once: the line of a call, the function that computes on several lines."""
    return spot.place.file, spot.place.first_line if computes else spot.place.line
