"""Faults that an `ObjectServer` injects, over real sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Fault", "FaultKind", "Seen"]

FaultKind = Literal[
    "status",
    "cut",
    "reset",
    "overwrite",
    "refuse",
    "silence",
    "trickle",
    "stall",
    "flip",
    "whole",
    "misplaced",
    "shorten",
    "page",
    "redirect",
    "hang up",
    "retag",
    "repeat",
    "throttle",
    "bandwidth",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the requests that meet it.

    ============  ==============================================================================================
    kind          effect
    ============  ==============================================================================================
    status        responds with `status`, `headers` and `body`
    cut           closes the connection after `at` bytes of a longer body
    reset         the same with a TCP reset
    overwrite     the same as cut, and replaces the object by `body`
    refuse        resets the connection before responding
    silence       never responds
    trickle       sends the body in ten pieces, `seconds` apart
    stall         waits `seconds`, then responds correctly
    flip          flips one bit of the body, at byte `at`
    whole         ignores `Range`: responds with 200 and the whole object
    misplaced     responds with a range that starts one byte too late
    shorten       omits the last byte of the body, with the headers of all of it
    page          responds with 200 and the HTML page `body` instead of the object
    redirect      responds with 302 and `body` as `Location`
    hang up       responds correctly, then closes the connection without notice
    retag         responds correctly with another entity tag, and ignores `If-Match`
    repeat        repeats the entries of each page of a listing
    throttle      responds with 503 above `rate` requests a second (a token bucket, `at` tokens deep)
    bandwidth     sends all bodies together at `rate` bytes a second
    ============  ==============================================================================================

    Attributes:
        kind: the effect.
        key: pattern of keys, with ``*``; a listing's key is its prefix.
        method: ``"GET"`` or ``"HEAD"`` of an object, or ``"LIST"``.
        times: number of requests that meet it; None for all.
        per_key: whether `times` and `skip` count for each key.
        skip: number of matching requests that are answered correctly first.
        share: share of the matching requests that meet it, drawn at random with a fixed seed.
        unless: a header and its value; requests that have it are answered correctly.
        etag: whether the response has an entity tag.
    """

    kind: FaultKind
    key: str = "*"
    method: Literal["GET", "HEAD", "LIST"] = "GET"
    times: int | None = None
    per_key: bool = False
    skip: int = 0
    share: float = 1.0
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    at: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    etag: bool = True
    unless: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that an `ObjectServer` with faults received.

    Attributes:
        at: seconds of `time.monotonic`, which all processes of a machine share on Linux.
        method: ``"GET"``, ``"HEAD"``, ``"LIST"``, …
        key: key of the object, or prefix of the listing.
        span: its `Range` header, or ``""``.
        fault: kind of the fault it met, or ``""``.
    """

    at: float
    method: str
    key: str
    span: str
    fault: str
