"""What an `ObjectServer` can be asked to do wrong, over real sockets."""

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
    """One way to misbehave, and at which requests.

    ============  ==============================================================================================
    kind          what the server does
    ============  ==============================================================================================
    status        answers `status`, with `headers` and `body`
    cut           ends the connection after `at` bytes of a body that was to be longer
    reset         the same with a TCP reset
    overwrite     the same as cut, and from then on the object is `body`
    refuse        resets the connection before it answers anything
    silence       never answers
    trickle       sends the body in ten pieces, `seconds` apart
    stall         waits `seconds`, then answers as it should
    flip          flips one bit of the body, at byte `at`
    whole         ignores `Range`, and answers 200 with the whole object
    misplaced     answers a range that begins one byte too late
    shorten       leaves out the last byte of the body, under the headers of all of it
    page          answers 200 with `body` in place of the object
    redirect      answers 302 with `body` as `Location`
    hang up       answers as it should, then closes the connection without having said so
    retag         answers as it should under another entity tag, and without looking at `If-Match`
    repeat        gives each page of a listing a second time
    throttle      answers 503 to what comes faster than `rate` requests a second (a token bucket, `at` tokens deep)
    bandwidth     sends all bodies together at `rate` bytes a second
    ============  ==============================================================================================

    Attributes:
        kind: what is done.
        key: which objects, as a pattern with ``*``; a listing's key is its prefix.
        method: ``"GET"`` of an object, ``"HEAD"`` of one, or ``"LIST"``.
        times: how many requests are met; None for all.
        per_key: whether `times` and `skip` count for each key.
        skip: how many requests that fit are answered well before.
        share: which part of the requests that fit is met, drawn at random from a fixed seed.
        unless: a request that carries this header, with this value, is answered well.
        etag: whether the answer tells an entity tag.
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
    """A request as a misbehaving `ObjectServer` saw it.

    Attributes:
        at: when, in seconds of `time.monotonic`, which all processes of a machine share on Linux.
        method: ``"GET"``, ``"HEAD"``, ``"LIST"``, …
        key: the object's key, or a listing's prefix.
        span: its `Range` header, or ``""``.
        fault: the kind of fault it met, or ``""``.
    """

    at: float
    method: str
    key: str
    span: str
    fault: str
