"""Functions and predicates on samples of a stream before they are batched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from headrace._core.failure import as_exception
from headrace._core.notes import add_note


class Step(NamedTuple):
    """A function of `map`, or a predicate of `filter`."""

    function: Callable[[Any], Any]
    is_filter: bool


class Raised(NamedTuple):
    """An error in place of a sample."""

    error: Exception


RunSteps = Callable[[Sequence[Any], int], Awaitable[list[Any]]]
"""Applies steps to samples, of which the first is at a position of the stream; as `apply_steps`."""


class Compute(Protocol):
    """Applies steps for a loader's session, off its event loop."""

    @property
    def parallel(self) -> int:
        """Number of requests that keep it busy."""

    def prepare(self, steps: tuple[Step, ...]) -> RunSteps:
        """A function that applies these steps."""


compute: ContextVar[Compute | None] = ContextVar("headrace_compute", default=None)
"""The `Compute` of the session that reads; None without a loader."""


def apply_steps(
    steps: Sequence[Step],
    samples: Sequence[Any],
    prepare: Callable[[int], object] | None,
    catch: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
) -> list[Any]:
    """Apply steps to samples.

    Args:
        steps: applied in order.
        samples: the samples.
        prepare: called before each sample with its position among these.
        catch: exceptions of user code that are caught.

    Returns:
        The samples that were kept, in their order; `Raised` where a function raised.

    Example:
        >>> apply_steps([Step(abs, is_filter=False), Step(lambda x: x > 1, is_filter=True)], [-1, -2, 3], None)
        [2, 3]
    """
    outcomes: list[Any] = []
    for position, sample in enumerate(samples):
        step = steps[0]
        try:
            if prepare is not None:
                prepare(position)
            for step in steps:
                result = step.function(sample)
                if not step.is_filter:
                    sample = result
                elif not result:
                    break
            else:
                outcomes.append(sample)
        except catch as error:  # user code
            outcomes.append(Raised(_with_note(as_exception(error), step)))
    return outcomes


def _with_note(error: Exception, step: Step) -> Exception:
    name = getattr(step.function, "__qualname__", type(step.function).__name__)
    add_note(error, f"headrace: in {'filter' if step.is_filter else 'map'}({name}), before batching")
    return error
