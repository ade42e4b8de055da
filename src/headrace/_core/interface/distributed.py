"""Which part of a stream this process reads: of so many ranks, and where torch's own loader reads it, workers."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, get_args

from torch.utils.data import get_worker_info

from headrace._core.rankinfo import own_rank, reader_divides

Remainder = Literal["drop", "pad", "repeat", "keep"]
"""What is done where ranks would get unequal numbers of samples.

``"drop"``: those that the smallest part has no counterpart for are left out. ``"pad"``: a part that has ended gives its
last sample again. ``"repeat"``: it begins again. ``"keep"``: nothing is done; ranks may differ.
"""


undivided: ContextVar[bool] = ContextVar("headrace_undivided", default=False)
"""Whether streams that begin now are read whole by all ranks and workers, because a `split` outside divides them."""


@dataclass(frozen=True, slots=True)
class Place:
    """One of several readers who share a stream.

    Attributes:
        number: which, from 0.
        count: how many there are.
    """

    number: int
    count: int

    def in_worker(self) -> Place:
        """This place, divided among the workers of a torch loader where one of them asks."""
        worker = get_worker_info()
        if worker is None or undivided.get():
            return self
        return Place(self.number * worker.num_workers + worker.id, self.count * worker.num_workers)


class RankChoice:
    """The rank whose part of a stream is read: as given, or that of the process when reading begins.

    Args:
        rank: as given; None for `headrace.get_rank_info`, called whenever a pass begins.
        world_size: the same.

    Raises:
        ValueError: only one of the two is given, or they do not go together.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank} and world_size={world_size}: give both or neither")
        self._given: Place | None = None
        self._noted: Place | None = None  # in a spawned worker: that of the process which started it
        self._divided = False  # and whether the reader there divides the stream
        if rank is not None and world_size is not None:
            if not 0 <= rank < world_size:
                raise ValueError(f"rank={rank} is not one of world_size={world_size} ranks, which count from 0")
            self._given = Place(rank, world_size)

    @property
    def given(self) -> Place | None:
        """The given rank and world size; None if they are determined when reading begins."""
        return self._given

    def place(self) -> Place:
        """The present rank and world size; 0 of 1 if the caller divides the stream among ranks.

        Raises:
            UnknownRankError: there are several ranks, and it is not known which one this is.
            ValueError: a rank was given, and the reader divides the stream among ranks as well.
        """
        if not self._is_divided():
            return self._own()
        if self._given is not None and self._given.count > 1:
            raise ValueError(
                f"this stream was given rank={self._given.number}, world_size={self._given.count}, and split() or "
                f"accelerate divides its samples among ranks again: most of them would never be read. Leave out "
                f"rank= and world_size=; or split() and accelerator.prepare(), which a headrace loader can do without."
            )
        return Place(0, 1)

    def share(self) -> int:
        """The number of ranks that one pass is for: all of them where the reader divides it among them, else one."""
        return self._own().count if self._is_divided() else 1

    def _own(self) -> Place:
        if self._given is not None:
            return self._given
        if self._noted is not None:
            return self._noted
        info = own_rank()
        return Place(info.rank, info.world_size)

    def _is_divided(self) -> bool:
        return self._divided or undivided.get() or reader_divides()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return self.__dict__
        # A worker that torch's own loader spawns has the environment of this process, but not its process group; nor
        # the call stack of the code that iterates over the loader.
        return {"_given": self._given, "_noted": self._own(), "_divided": self._is_divided()}


def check_remainder(remainder: str) -> None:
    """Raise `ValueError` for what is no such policy."""
    if remainder not in get_args(Remainder):
        raise ValueError(f"remainder={remainder!r} must be one of {', '.join(map(repr, get_args(Remainder)))}")
