"""The loader that accelerate leaves as it is, and what its `GradientState` needs of an iteration."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from accelerate.state import GradientState
from accelerate.utils import synchronize_rng_states

from headrace._core.consumer.epoch import BatchIterator
from headrace._core.ranks.rankinfo import RankInfo, provided_rank
from headrace._core.torchcompat.portable_collate import PortableCollate
from headrace.integrations._batchwise import BatchwiseSampler
from headrace.loader import DataLoader

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Division:
    """How a prepared loader is divided among the ranks.

    Attributes:
        rank: the data-parallel rank, which is that of `headrace.get_rank_info` in the loader.
        batch_size: number of samples in a batch of one rank; None where a batch sampler decides.
        total_batch_size: number of samples in the batches of all ranks at one step; None if unknown.
        samples: number of samples of an epoch of all ranks, where accelerate may cut off the rest of the last step;
            None if it must not.
        rng_types: the generators that accelerate makes equal on all ranks before each epoch.
        generator: that of the sampler, if it is one of those.
    """

    rank: RankInfo
    batch_size: int | None
    total_batch_size: int | None
    samples: int | None
    rng_types: tuple[str, ...] = ()
    generator: torch.Generator | None = None


@dataclass(eq=False, slots=True)
class _Iteration:
    """What accelerate asks of the iteration that is under way.

    Attributes:
        end_of_dataloader: whether the batch given out is the last.
        remainder: number of samples in the last step of all ranks; 0 if it is full, -1 if unknown.
        ahead: number of calls of `next()` that the loader's position is ahead.
    """

    remainder: int
    end_of_dataloader: bool = False
    ahead: int = 0


class PreparedLoader(DataLoader[T_co]):
    """A headrace loader that has been prepared for accelerate; made by `headrace.integrations.accelerate.prepare`.

    `Accelerator.prepare` returns it unchanged. While it is iterated over it is the active loader of accelerate's
    `GradientState`, which has to know of a batch that it is the last: therefore one more batch has been received when
    a batch is given out. `state_dict()` does not count it.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = False  # accelerate would save one state for all ranks
    _division: Division
    _iterations: list[_Iteration]
    _latest: _Iteration | None
    _skipped: int  # batches of a stream to be dropped by the next iteration

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch given out last is the last of its epoch."""
        return bool(self._iterations) and self._iterations[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples of all ranks in the last step, without padding; 0 if it is full, -1 if unknown."""
        return self._iterations[-1].remainder if self._iterations else -1

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples of all ranks at one step; None if a batch sampler decides."""
        return self._division.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        """Begin the next epoch, or continue the restored one."""
        if self._division.rng_types:
            synchronize_rng_states(list(self._division.rng_types), self._division.generator)
        pending = self._control.pending
        if pending is None:
            self.set_epoch(self._control.next_epoch)  # as accelerate does for each epoch
        remainder = self._remainder(0 if pending is None else pending.cursor)
        skipped, self._skipped = self._skipped, 0
        with self._as_rank():
            batches = super().__iter__()
        self._latest = _Iteration(remainder)
        return _PreparedIterator(self, batches, self._latest, skipped)

    def _as_rank(self) -> contextlib.AbstractContextManager[None]:
        rank = self._division.rank
        return provided_rank(rank) if rank.world_size > 1 else contextlib.nullcontext()

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Refused: accelerate's training loops are synchronous.

        Raises:
            TypeError: always.
        """
        raise TypeError("a loader prepared for accelerate is iterated by `for`, and not by `async for`")

    def _remainder(self, cursor: int) -> int:
        if isinstance(self.sampler, BatchwiseSampler):
            return -1 if self.drop_last else self.sampler.remainder(cursor)
        division = self._division
        if division.samples is None or division.total_batch_size is None or self.drop_last:
            return -1
        return division.samples % division.total_batch_size

    def state_dict(self, lag: int = 0) -> dict[str, Any]:
        """As `DataLoader.state_dict`: the position after the last batch that was given out."""
        return super().state_dict(lag + (0 if self._latest is None else self._latest.ahead))

    def _portable(self, collate_fn: Callable[[Any], object]) -> Callable[[Any], object]:
        collate = collate_fn.collate if isinstance(collate_fn, PortableCollate) else collate_fn
        return PortableCollate(
            collate, self._control.spec.options["transform"], batched=self._auto_collation, warn=refuse
        )

    def skip(self, batches: int) -> None:
        """Let the next iteration begin after a number of batches; see `skip_first_batches`.

        Raises:
            ValueError: a restored position is another one.
        """
        pending = self._control.pending
        if pending is not None and not (pending.over and batches == 0):
            if pending.batches != batches:
                raise ValueError(
                    f"skip_first_batches(loader, {batches}), but load_state() has restored this loader after "
                    f"{pending.batches} batches of epoch {pending.epoch}: leave out skip_first_batches()"
                )
            return
        self._control.skip_rest()
        if self._control.spec.kind.is_iterable:
            self._skipped = batches
        elif batches:
            self._control.skip(
                self, batches, batch_size=self._division.batch_size, ranks=self._division.rank.world_size
            )


def prepared_class(cls: type[DataLoader[Any]]) -> type[PreparedLoader[Any]]:
    """`PreparedLoader`, with the methods of a user's class."""
    if cls is DataLoader:
        return PreparedLoader
    return type(f"Prepared{cls.__name__}", (PreparedLoader, cls), {"__module__": cls.__module__})


@dataclass(slots=True)
class _Outcome:
    """The result of a call of `next()`: a batch, an error, or neither at the end."""

    batch: Any = None
    error: Exception | None = None
    end: bool = False
    counts: int = field(default=0)  # whether the loader's position is one call further


class _PreparedIterator(Iterator[Any]):
    """Gives out each batch after the next one was received, and is known to `GradientState` from its first batch on.

    Args:
        loader: that is iterated over.
        batches: its iterator.
        iteration: what accelerate asks for.
        skipped: number of batches to drop.
    """

    def __init__(
        self, loader: PreparedLoader[Any], batches: Iterator[Any], iteration: _Iteration, skipped: int
    ) -> None:
        self._loader = loader
        self._batches = batches  # a generator, for example, where a subclass has an `__iter__` of its own
        self._position = batches if isinstance(batches, BatchIterator) else loader._control
        self._iteration = iteration
        self._skipped = skipped
        self._received: _Outcome | None = None
        self._turn = threading.RLock()
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __next__(self) -> Any:
        with self._turn:
            if self._finalizer is None:
                self._begin()
            while self._skipped:
                next(self._batches, None)
                self._skipped -= 1
            if self._received is None:
                self._received = self._receive()
            current = self._received
            if current.error is not None or current.end:
                self._received = None
                self._iteration.ahead = 0
                if current.error is not None:
                    raise current.error
                self.close()
                raise StopIteration
            following = self._receive()
            self._received = following
            self._iteration.ahead = following.counts
            self._iteration.end_of_dataloader = following.end
            return current.batch

    def _receive(self) -> _Outcome:
        before = self._position.last_point
        try:
            with self._loader._as_rank():
                outcome = _Outcome(batch=next(self._batches))
        except StopIteration:
            return _Outcome(end=True, counts=1)
        except Exception as error:  # raised by the call of next() whose turn it is
            outcome = _Outcome(error=error)
        outcome.counts = int(self._position.last_point is not before)
        return outcome

    def _begin(self) -> None:
        self._loader._iterations.append(self._iteration)
        GradientState()._add_dataloader(self._loader)
        # Also of an iterator that is dropped in mid-epoch. The loader lives as long as its iterators.
        self._finalizer = weakref.finalize(self, _end, self._loader, self._iteration)
        self._finalizer.atexit = False

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self, lag: int = 0) -> dict[str, Any]:
        """The state of this iteration, for the `load_state_dict` of a loader."""
        if isinstance(self._batches, BatchIterator):
            return self._batches.state_dict(lag + self._iteration.ahead)
        return self._loader.state_dict(lag)

    def close(self) -> None:
        """Stop fetching for this epoch; the loader stays usable."""
        if isinstance(self._batches, BatchIterator | Generator):
            self._batches.close()
        if self._finalizer is not None:
            self._finalizer()


def _end(loader: PreparedLoader[Any], iteration: _Iteration) -> None:
    """Remove an iteration from `GradientState`: of several of one loader this one, so that the others stay."""
    number = next((number for number, each in enumerate(loader._iterations) if each is iteration), None)
    if number is None:
        return
    del loader._iterations[number]
    state = GradientState()
    references = state.dataloader_references
    places = [place for place, each in enumerate(references) if each is loader]
    if number < len(places):  # fewer where accelerate's state was reset
        del references[places[number]]
        state.dataloader_references = references


def refuse() -> NoReturn:
    """Raise the error of a plain torch loader that was rebuilt from a prepared one."""
    raise RuntimeError(
        "a plain torch DataLoader was rebuilt from a prepared headrace loader (accelerate.skip_first_batches() does "
        "so). It does not mark the end of an epoch for accelerate, and headrace's engine does not run. Use "
        "accelerator.skip_first_batches(loader, n), or skip_first_batches of headrace.integrations.accelerate."
    )
