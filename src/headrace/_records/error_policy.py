"""Policies for the `on_error` option.

A policy says how the engine treats failed samples, and how the consumer treats failures. To add a
policy, write a subclass of `ErrorPolicy`, and for a policy with a name, an entry in `_BY_NAME`.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from headrace._base.text import check_number, short_repr, shorten, whole_number
from headrace._records.batches import HostBatch
from headrace._records.failure import Failure, Stage
from headrace.errors import TooManySkippedError

Decision: TypeAlias = Literal["raise", "skip"]

EXAMPLES = 3  # number of failures quoted by a `TooManySkippedError`
EXAMPLE_LIMIT = 400  # characters of a quoted failure
# A share is compared once `max_share` allows this number of failures. Fewer failures give no
# estimate of the share.
EXPECTED = 10


class Tolerance(NamedTuple):
    """The part of a policy for the engine and the workers.

    Attributes:
        skips: whether to complete a batch without the failed samples. False: the first failure is
            the failure of the batch.
        max_in_a_row: number of consecutive failures after which a stream ends.
    """

    skips: bool
    max_in_a_row: int = 100


@dataclass(slots=True)
class EpochFailures:
    """Counts of an epoch for the decisions of a policy.

    Attributes:
        delivered: number of samples delivered.
        skipped: number of samples skipped.
        in_a_row: number of samples skipped since the last delivered sample.
        longest: largest number of samples skipped in a row, up to and within the last batch.
        examples: the last failures. Failures are not kept as text, because making text takes longer
            than skipping.
    """

    delivered: int = 0
    skipped: int = 0
    in_a_row: int = 0
    longest: int = 0
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
            self.in_a_row = (
                self.in_a_row + 1 if host.empty or repr(index) in failed else 0
            )
            self.longest = max(self.longest, self.in_a_row)

    def error(self, reason: str) -> TooManySkippedError:
        """Return the error for too many skipped samples.

        The last failure is the cause of the error.
        """
        examples = tuple(
            shorten(str(failure), EXAMPLE_LIMIT) for failure in self.examples
        )
        error = TooManySkippedError(
            reason=reason,
            failures="; ".join(examples),
            skipped=self.skipped,
            delivered=self.delivered,
            examples=examples,
        )
        if self.examples:  # empty if the epoch was restored after the failures
            error.__cause__ = self.examples[-1].exception()
        return error


class ErrorPolicy:
    """Treatment of errors of user code.

    A policy decides for each failure, and compares the counts of the epoch with limits. The base
    class skips all failed samples.
    """

    __slots__ = ()
    tolerance: Tolerance = Tolerance(skips=True)
    """The part of the policy for the engine."""
    all_may_fail = False
    """Whether an epoch without a delivered sample is no error."""

    def decide(self, failure: Failure) -> Decision:
        """Return whether to raise the failure or to skip the samples.

        Runs on the consumer's thread.
        """
        return "skip"

    def excess(self, counts: EpochFailures, *, ended: bool) -> str | None:
        """Return the reason if too many samples were skipped, or None.

        `ended` is True at the end of the epoch.
        """
        return None


class _Raise(ErrorPolicy):
    tolerance = Tolerance(skips=False)

    def decide(self, failure: Failure) -> Decision:
        return "raise"


@dataclass(frozen=True, slots=True)
class SkipErrors(ErrorPolicy):
    """Skip failed samples up to a limit.

    A value for ``on_error=`` of `DataLoader`. Works as ``on_error="skip"``, but beyond a limit
    `next()` raises `TooManySkippedError` with counts and examples.

    Attributes:
        max_share: largest share of skipped samples in an epoch, from 0 to 1. The share is compared
            once `max_share` allows 10 samples (for 0.01, after 1,000 samples of the epoch), and at
            the end of the epoch. With 1, an epoch without a good sample is no error. The unreadable
            rest of a shard counts with its number of samples: the known number, or else an
            estimate, at least 1.
        max_in_a_row: largest number of consecutive errors to skip.

    Raises:
        TypeError: `max_in_a_row` is not a whole number.
        ValueError: a limit is out of range.

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
        # One more than allowed: the consumer counts the excess and raises the error.
        return Tolerance(skips=True, max_in_a_row=self.max_in_a_row + 1)

    @property
    def all_may_fail(self) -> bool:  # type: ignore[override]
        return self.max_share == 1

    def excess(self, counts: EpochFailures, *, ended: bool) -> str | None:
        if counts.longest > self.max_in_a_row:
            return (
                f"{counts.longest:,} samples in a row failed, "
                f"and max_in_a_row is {self.max_in_a_row:,}"
            )
        allowed = self.max_share * (counts.delivered + counts.skipped)
        compared = ended or not self.max_share or allowed >= EXPECTED
        if compared and counts.skipped > allowed:
            share = counts.skipped / (counts.delivered + counts.skipped)
            return f"{share:.2%} of the samples failed, and max_share is {self.max_share:.2%}"
        return None


class _Ask(ErrorPolicy):
    """Policy with a user's function for each failure."""

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
                'on_error must return "raise" or "skip", '
                f"but returned {short_repr(decision)}: {failure}"
            )
        return decision


OnError: TypeAlias = Decision | SkipErrors | Callable[[Failure], Decision]

_BY_NAME: dict[str, ErrorPolicy] = {"raise": _Raise(), "skip": ErrorPolicy()}


def error_policy(on_error: OnError) -> ErrorPolicy:
    """Return the policy for an `on_error=` argument.

    Raises:
        ValueError: `on_error` is not a policy.
    """
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
        'on_error must be "raise", "skip", SkipErrors(...) or a plain function of the failure, '
        f"but got {on_error!r}"
    )
