"""The messages between the consumer of an epoch and its engines, and the link that carries them.

A verb is a message type here and its handler in the engine's `Session.handle`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace._core.batches import BatchPlan, HostBatch
from headrace.errors import ForkedError

# To an engine; besides these, lists of plans.


class Consumed(NamedTuple):
    """All batches up to this number have been taken, where no plan shows it."""

    number: int


class StatusRequest(NamedTuple):
    """The request for the progress of a batch, which a `Status` answers."""

    number: int


class TraceRequest(NamedTuple):
    """The request to measure single fetches from now on, or no longer."""

    on: bool


class WorkersRequest(NamedTuple):
    """The request for so many worker processes, of all engines together."""

    number: int


Request = list[BatchPlan] | Consumed | StatusRequest | TraceRequest | WorkersRequest

# From an engine; besides these, batches.


class Started:
    """One of several engines has begun its session."""


class Status(NamedTuple):
    """The progress of a batch, in words."""

    text: str


class Call(NamedTuple):
    """A function that the engine needs called on the consumer's thread, when that waits for a batch."""

    function: Callable[[], None]


class SessionEnd(NamedTuple):
    """The last message, with the error that ended the session, if any."""

    error: BaseException | None
    death: str | None = (
        None  # how the engine was lost, so that another can make its batches; None if by user code
    )


Answer = HostBatch | Started | Status | Call | SessionEnd


class Link:
    """The consumer's end of a session in one engine, wherever that runs. Used by one thread, except for `leave`."""

    messages: deque[
        Answer
    ]  # received, the oldest first; the caller removes them. A `SessionEnd` is the last
    source: Any = (
        None  # a descriptor that is readable when something can be received; None: no wait
    )
    is_current = False  # whether the caller is on the engine's own thread
    guarded = False  # whether `send` and `receive` must not overlap with `close`
    look_by: float | None = (
        None  # when `receive` is called even if nothing arrives, by `time.monotonic`; None: never
    )

    def send(self, message: Request) -> None:
        """Send a message, or drop it if the engine has ended; does not wait for an answer."""
        raise NotImplementedError  # each carrier has its own

    def receive(self) -> None:
        """Add the messages that have arrived to `messages`, unless another thread adds them."""

    def must_wait(self) -> bool:
        """Whether there is no message, and `source` will be readable when one arrives."""
        return not self.messages

    def leave(self) -> None:
        """End the session without waiting, and wake who waits for `source`; from any thread, idempotent."""

    def close(self) -> None:
        """Close the descriptors, after `leave`; idempotent."""


def check_not_forked(made_in: int) -> None:
    """Raise `ForkedError` in a fork of the process that opened a session; its engine is that process's."""
    if made_in != os.getpid():
        raise ForkedError(what="an iterator of headrace", made_in=made_in, used_in=os.getpid())
