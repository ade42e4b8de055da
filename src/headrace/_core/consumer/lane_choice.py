"""The number of lanes in which an epoch of a stream is read."""

from __future__ import annotations

import warnings
from typing import Any

from headrace._core.call_site import users_stacklevel
from headrace._core.consumer.loader_state import LoaderState
from headrace._core.interface.distributed import ShardOptions, current_lane
from headrace._core.interface.kinds import DatasetKind
from headrace._core.interface.lanes import most_lanes, why_not_by_lanes
from headrace.options import AllOptions, number_of_engines


def check_lanes(source: object, kind: DatasetKind, options: AllOptions) -> bool:
    """Whether a dataset is to be read by lanes.

    Raises:
        ValueError: `lanes` is given, and is less than `engines`, or the dataset is no async stream.
    """
    lanes, engines = options["lanes"], number_of_engines(options)
    if lanes is not None and kind is not DatasetKind.ASYNC_ITERABLE:
        raise ValueError(f"lanes={lanes} needs a stream of shards: a map-style dataset is divided by batches")
    if lanes is not None and lanes < engines:
        raise ValueError(f"lanes={lanes} must be at least engines={engines}: each engine reads a lane")
    return kind is DatasetKind.ASYNC_ITERABLE and (lanes or engines) > 1 and why_not_by_lanes(source) is None


class LaneChoice:
    """Chooses the number of lanes for the epochs of one loader, and warns where engines have nothing to read.

    Args:
        source: the dataset that is fetched from.
        kind: its kind.
        options: headrace's own options, checked.

    Attributes:
        own: the number of lanes of an epoch that begins anew, as last determined; 1 where the dataset is read as a
            whole.
        current: the number of lanes of the epoch begun last.
    """

    def __init__(self, source: object, kind: DatasetKind, options: AllOptions) -> None:
        self._source = source
        self._is_stream = kind is DatasetKind.ASYNC_ITERABLE
        self._engines = number_of_engines(options)
        self._asked = options["lanes"]
        self._why_whole = why_not_by_lanes(source) if self._is_stream else None
        self._warned: set[str] = set()
        self.own = self.current = 1

    @property
    def possible(self) -> bool:
        """Whether the dataset is a stream that can be read by lanes."""
        return self._is_stream and self._why_whole is None

    @property
    def _wanted(self) -> int:
        return self._asked or self._engines

    def of_epoch(self, resumed: LoaderState | None) -> int | None:
        """The number of lanes of the next epoch; None if the dataset is no stream that an engine reads.

        Args:
            resumed: the state that it continues from.
        """
        if not self._is_stream:
            return None
        self.own = self.current = self._of_new_epoch()
        if resumed is not None and resumed.lanes is not None:
            self.current = resumed.lanes
            if self.current < min(self._engines, self.own):
                self._warn(
                    f"the rest of the epoch is read by {_engines(self.current)} of {self._engines}, since its state "
                    f"was saved with {_lanes(self.current)}; later epochs have {_lanes(self.own)}. With the same "
                    f"lanes= before and after, batches are the same, and any number of engines up to that divides them"
                )
        return self.current

    def _of_new_epoch(self) -> int:
        wanted = self._wanted
        if wanted == 1:
            return 1
        if self._why_whole is not None:
            if self._asked is not None:
                self._warn(f"lanes={self._asked} has no effect, and one engine reads the stream: {self._why_whole}")
            return 1
        most = max(1, most_lanes(self._source))
        if most < wanted:
            given = f"lanes={self._asked}" if self._asked else f"engines={self._engines}"
            self._warn(
                f"{given}, but the stream has only {most} shards (or row groups) for each rank: it is read in "
                f"{_lanes(most)}, by {_engines(min(most, self._engines))}. Write smaller shards for more"
            )
        return min(wanted, most)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"{message}.", UserWarning, stacklevel=users_stacklevel())

    def describe(self) -> str:
        """How engines read the stream of the epoch begun last, for `stats()`."""
        if not self._is_stream or self._wanted == 1 == self.current:
            return ""
        if self.current > 1:
            readers = min(self._engines, self.current)
            return f", {self.current} lanes" if readers == self._engines else f", of which {readers} read a lane each"
        reason = "" if self._why_whole is None else f": {self._why_whole}"
        return f", of which one reads the stream{reason}" if self._engines > 1 else f", as a whole{reason}"

    def batches(self, dataset: Any, batch_size: int | None, *, drop_last: bool) -> int | None:
        """The number of batches of an epoch, each lane's counted by itself; None of a stream that is read as a whole.

        Raises:
            TypeError: the stream has no length.
        """
        lanes = self._of_new_epoch() if self._is_stream else 1
        if lanes == 1:
            return None
        batches = 0
        for lane in range(lanes):
            token = current_lane.set(ShardOptions(lane, lanes))
            try:
                samples = len(dataset)
            finally:
                current_lane.reset(token)
            size = batch_size or 1
            batches += samples // size if drop_last and batch_size is not None else -(-samples // size)
        return batches


def _lanes(number: int) -> str:
    return "1 lane" if number == 1 else f"{number} lanes"


def _engines(number: int) -> str:
    return "1 engine" if number == 1 else f"{number} engines"
