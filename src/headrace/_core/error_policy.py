"""`on_error` as an object: what the engine does with a failed sample, and what the consumer does with its failure.

A new policy is a subclass of `ErrorPolicy` here, and for a word a line in `_BY_NAME`.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from headrace._core.batches import HostBatch
from headrace._core.failure import Failure, Stage
from headrace._core.text import check_number, short_repr, shorten, whole_number
from headrace.errors import TooManySkippedError

Decision: TypeAlias = Literal["raise", "skip"]

EXAMPLES = 3  # failures quoted by a `TooManySkippedError`
EXAMPLE_LIMIT = 400  # characters of each
EXPECTED = (
    10  # failures at `max_share` from which on a share is compared: fewer are no estimate of it
)


class Tolerance(NamedTuple):
    """How the engine treats failed samples: the part of a policy that is sent to workers."""

    # whether a batch is completed without the samples that failed, or the first failure is the
    # batch's
    skips: bool
    max_in_a_row: int = (
        100  # failures in a row to read a sample of a stream, after which the stream has ended
    )


@dataclass(slots=True)
class EpochFailures:
    """The counts of one epoch that a policy decides by."""

    delivered: int = 0  # samples delivered
    skipped: int = 0  # samples skipped
    in_a_row: int = 0  # samples skipped since the last that was delivered
    longest: int = 0  # most samples skipped in a row, up to and within the last batch
    # The last failures. Not as text, which would take longer than skipping them.
    examples: deque[Failure] = field(default_factory=lambda: deque(maxlen=EXAMPLES))

    def add(self, host: HostBatch) -> None:
        self.delivered += host.size
        if not host.failures:
            if host.size:
                self.in_a_row = self.longest = 0
            return
        self.skipped += host.skipped
        self.examples.extend(host.failures[-EXAMPLES:])
        failed = {repr(failure.index) for failure in host.failures}
        self.longest = self.in_a_row
        for index in host.plan.indices:
            self.in_a_row = self.in_a_row + 1 if host.empty or repr(index) in failed else 0
            self.longest = max(self.longest, self.in_a_row)

    def error(self, reason: str) -> TooManySkippedError:
        """The error that so many samples were skipped; the last failure is its cause."""
        examples = tuple(shorten(str(failure), EXAMPLE_LIMIT) for failure in self.examples)
        error = TooManySkippedError(
            reason=reason,
            failures="; ".join(examples),
            skipped=self.skipped,
            delivered=self.delivered,
            examples=examples,
        )
        if self.examples:  # not of an epoch that was restored after them
            error.__cause__ = self.examples[-1].exception()
        return error


class ErrorPolicy:
    """The treatment of errors of user code: decided for each failure, and checked against the counts of the epoch.

    This one skips all samples that fail.
    """

    __slots__ = ()
    tolerance: Tolerance = Tolerance(skips=True)
    """The part of the policy that the engine follows."""

    def decide(self, failure: Failure) -> Decision:
        """Whether `next()` raises the failure, or its samples are skipped. Called on the consumer's thread."""
        return "skip"

    def excess(self, counts: EpochFailures, *, ended: bool) -> str | None:
        """The reason why too many samples were skipped, or None; with `ended`, by the end of the epoch."""
        return None


class _Raise(ErrorPolicy):
    tolerance = Tolerance(skips=False)

    def decide(self, failure: Failure) -> Decision:
        return "raise"


@dataclass(frozen=True, slots=True)
class SkipErrors(ErrorPolicy):
    """Skip samples that fail, up to a limit: an `on_error` of `DataLoader`.

    As ``on_error="skip"``; beyond a limit `next()` raises `TooManySkippedError`, with the counts
    and examples.

    Attributes:
        max_share: largest share of an epoch's samples that may be skipped, from 0 to 1. Compared
            once it amounts to 10 samples (1,000 samples into the epoch for 0.01), and at the end of
            the epoch. The rest of a shard that cannot be read on counts as its samples: as many as
            are known, else an estimate, at least one.
        max_in_a_row: largest number of errors that may be skipped one after the other.

    Raises:
        TypeError: `max_in_a_row` is not a whole number.
        ValueError: a limit is out of its range.

    Example:
        >>> SkipErrors(max_share=0.05)
        SkipErrors(max_share=0.05, max_in_a_row=100)
    """

    max_share: float = 0.01
    max_in_a_row: int = 100

    def __post_init__(self) -> None:
        check_number("SkipErrors: max_share", self.max_share, 0, 1)
        whole_number("SkipErrors: max_in_a_row", self.max_in_a_row)

    @property
    def tolerance(self) -> Tolerance:  # type: ignore[override]
        # One more than is allowed, so that the consumer counts the excess and raises.
        return Tolerance(skips=True, max_in_a_row=self.max_in_a_row + 1)

    def excess(self, counts: EpochFailures, *, ended: bool) -> str | None:
        if counts.longest > self.max_in_a_row:
            return f"{counts.longest:,} samples in a row failed, and max_in_a_row is {self.max_in_a_row:,}"
        allowed = self.max_share * (counts.delivered + counts.skipped)
        compared = ended or not self.max_share or allowed >= EXPECTED
        if compared and counts.skipped > allowed:
            share = counts.skipped / (counts.delivered + counts.skipped)
            return f"{share:.2%} of the samples failed, and max_share is {self.max_share:.2%}"
        return None


class _Ask(ErrorPolicy):
    """A function of the user's that decides for each failure."""

    def __init__(self, function: Callable[[Failure], Decision]) -> None:
        self._function = function

    def decide(self, failure: Failure) -> Decision:
        try:
            decision = self._function(failure)
        except Exception as error:
            if error is failure.error:
                return "raise"
            raised = Failure.caught(
                error, Stage.ON_ERROR, failure.batch, index=failure.index
            ).exception()
            raise raised from error.__cause__ or failure.exception()
        if decision not in ("raise", "skip"):
            raise TypeError(
                f'on_error must return "raise" or "skip", but returned {short_repr(decision)}: {failure}'
            )
        return decision


OnError: TypeAlias = Decision | SkipErrors | Callable[[Failure], Decision]

_BY_NAME: dict[str, ErrorPolicy] = {"raise": _Raise(), "skip": ErrorPolicy()}


def error_policy(on_error: OnError) -> ErrorPolicy:
    """The policy that an `on_error=` argument means; `ValueError` if it means none."""
    if isinstance(on_error, ErrorPolicy):
        return on_error
    if isinstance(on_error, str) and on_error in _BY_NAME:
        return _BY_NAME[on_error]
    if (
        callable(on_error)
        and not isinstance(on_error, type)
        and not inspect.iscoroutinefunction(on_error)
    ):
        return _Ask(on_error)
    raise ValueError(
        f'on_error must be "raise", "skip", SkipErrors(...) or a plain function of the failure, but got {on_error!r}'
    )
