"""Messages between the consumer of an epoch and the engines.

Each message type has a handler in the engine's `Session.handle`. A `Link` carries messages.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace._records.batches import BatchPlan, HostBatch
from headrace.errors import ForkedError

# Messages to an engine. A list of plans is a message too.


class Consumed(NamedTuple):
    """The consumer has taken all batches up to a number.

    Sent if no plan carries the number.
    """

    number: int


class StatusRequest(NamedTuple):
    """Request for the progress of a batch.

    The answer is a `Status`.
    """

    number: int


class TraceRequest(NamedTuple):
    """Request to begin or end the measurement of single fetches."""

    on: bool


class WorkersRequest(NamedTuple):
    """Request for a number of worker processes, over all engines."""

    number: int


EngineRequest = list[BatchPlan] | Consumed | StatusRequest | TraceRequest | WorkersRequest

# Messages from an engine. A batch is a message too.


class SessionStarted:
    """An engine among several engines has begun the session."""


class Status(NamedTuple):
    """Progress of a batch, as text."""

    text: str


class Call(NamedTuple):
    """A function for the consumer's thread.

    The engine needs the call during a wait of the consumer for a batch.
    """

    function: Callable[[], None]


class SessionEnd(NamedTuple):
    """The last message of a session.

    Attributes:
        error: the error that ended the session, or None.
        death: description of the loss of the engine, if another engine can make the batches; None
            for an error of user code.
    """

    error: BaseException | None
    death: str | None = None


Answer = HostBatch | SessionStarted | Status | Call | SessionEnd


class Link:
    """The consumer's end of a session in an engine.

    The engine may run in a thread, in a process or on another machine. A single thread uses a link,
    except for `leave`.

    Attributes:
        messages: received messages, the oldest first. The caller removes messages. A `SessionEnd`
            is the last message.
        source: descriptor that becomes readable with an arriving message; None: no wait.
        is_current: whether the caller is on the engine's own thread.
        guarded: whether `send` and `receive` must not overlap with `close`.
        look_by: time of `time.monotonic` for a call of `receive` without an arriving message; None
            for no call.
    """

    messages: deque[Answer]
    source: Any = None
    is_current = False
    guarded = False
    look_by: float | None = None

    def send(self, message: EngineRequest) -> None:
        """Send a message without waiting for an answer.

        The message is dropped if the engine has ended.
        """
        raise NotImplementedError  # each subclass sends in another way

    def receive(self) -> None:
        """Append arrived messages to `messages`.

        Does nothing if another thread appends messages.
        """

    def must_wait(self) -> bool:
        """Whether there is no message, and `source` signals the next message."""
        return not self.messages

    def leave(self) -> None:
        """End the session without waiting.

        Wakes a thread waiting for `source`. Any thread may call `leave`, also repeatedly.
        """

    def close(self) -> None:
        """Close the descriptors after `leave`.

        Repeated calls have no effect.
        """


def check_not_forked(made_in: int) -> None:
    """Raise `ForkedError` in a forked child.

    The engine belongs to the process `made_in`, which opened the session.
    """
    if made_in != os.getpid():
        raise ForkedError(
            what="an iterator of headrace", made_in=made_in, used_in=os.getpid()
        )
