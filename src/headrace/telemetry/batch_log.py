"""The last batches of a loader, with the times of their stages: the source of reports, traces and exporters."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeAlias

from headrace._core.batches import FetchTimes, RequestCounts, StageTimes

__all__ = ["KEPT", "BatchLog", "BatchRecord", "Subscriber"]

KEPT = 4096  # batches


class BatchRecord(NamedTuple):
    """A batch that `next()` returned.

    Attributes:
        iteration: number of the loader's iteration, from 1.
        number: of the batch, in its epoch.
        size: number of samples.
        planned: when it was sampled, in seconds of `time.perf_counter`, as all times here.
        times: when it passed the stages of the engine.
        called: when `next()` was called.
        taken: when the batch was there.
        refilled: when the next plans had been sampled and sent.
        returned: when `next()` returned it.
        ready: number of batches that were ready after it was taken.
        requests: requests to stores since the batch before it.
        cpu: CPU seconds of the consumer's thread until `returned`.
        skipped: samples skipped since the batch before it, its own included.
        fetches: single fetches that ended since then; only for the subscribers of `trace_all`.
    """

    iteration: int
    number: int
    size: int
    planned: float
    times: StageTimes
    called: float
    taken: float
    refilled: float
    returned: float
    ready: int
    requests: RequestCounts | None
    cpu: float = 0.0
    skipped: int = 0
    fetches: FetchTimes | None = None


# The same as a plain tuple, which takes half the time to make.
_Fields: TypeAlias = tuple[
    int, int, int, float, StageTimes, float, float, float, float, int, RequestCounts | None, float, int
]

Subscriber = Callable[[BatchRecord], None]

_changing = threading.Lock()


class BatchLog:
    """The last batches of a loader; subscribers are given each as it is delivered, on the consumer's thread.

    Args:
        name: of the loader, for people: its dataset's class.

    Attributes:
        traced: whether single fetches are measured, for the subscribers of `trace_all`.
    """

    traced: ClassVar[bool] = False
    _traces: ClassVar[tuple[Callable[[BatchLog, BatchRecord], None], ...]] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self._kept: deque[_Fields] = deque(maxlen=KEPT + 1)  # with the one before those that `records` returns
        self._subscribers: tuple[Subscriber, ...] = ()

    def add(self, record: _Fields, fetches: FetchTimes | None = None) -> None:
        """Add a batch, as the fields of a `BatchRecord`."""
        self._kept.append(record)
        for subscriber in self._subscribers:
            subscriber(BatchRecord(*record))
        for trace in self._traces:
            trace(self, BatchRecord(*record, fetches))

    def records(self, last: int = KEPT) -> list[BatchRecord]:
        """The batches of the iteration begun last, at most so many (4,096).

        The first of them has a wait of 0 s where it is not the first of its iteration, whose wait is the start-up.
        """
        kept = list(self._kept)[-last - 1 :]
        found = [BatchRecord(*each) for each in kept if each[0] == kept[-1][0]]
        if len(found) > last:
            found[:2] = [found[1]._replace(called=found[1].returned)]
        return found

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with each batch from now on; returns a function that ends this."""
        self._subscribers += (subscriber,)

        def unsubscribe() -> None:
            self._subscribers = tuple(each for each in self._subscribers if each is not subscriber)

        return unsubscribe

    @staticmethod
    def trace_all(subscriber: Callable[[BatchLog, BatchRecord], None]) -> Callable[[], None]:
        """Call `subscriber` with each batch of every loader, and have single fetches measured, until it is ended.

        Loaders that run change over when they deliver their next batch.

        Returns:
            A function that ends this.
        """
        with _changing:
            BatchLog._traces += (subscriber,)
            BatchLog.traced = True

        def end() -> None:
            with _changing:
                BatchLog._traces = tuple(each for each in BatchLog._traces if each is not subscriber)
                BatchLog.traced = bool(BatchLog._traces)

        return end
