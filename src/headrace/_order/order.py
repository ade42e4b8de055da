"""Order of the samples of an epoch.

The order is drawn from the loader's sampler, from the beginning or from a resume point on.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from numbers import Integral
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from headrace._order.exclusion import Exclusion
from headrace._order.samplers import (
    CursorSampler,
    Piece,
    RankSampler,
    SeededRandomSampler,
    batches,
    integers,
)
from headrace._order.spec import TorchLoader, deciding_sampler, samplers_within
from headrace._order.state import LoaderState, decoded, drawn_last
from headrace._random.seeding import isolated_generators
from headrace._ranks.rankinfo import RankInfo
from headrace._streams.resumable import Stateful, is_stateful, load_copy
from headrace.errors import StateError


class _Watched(Iterator[object]):
    """Draws of a sampler without a generator.

    At the first draw, the order notes the state of torch's default generator. A generator function
    would end with a Ctrl-C in a draw, so this is a class.
    """

    def __init__(self, draws: Iterator[object], order: EpochOrder) -> None:
        self._draws = draws
        self._order: EpochOrder | None = order

    def __next__(self) -> object:
        if self._order is None:
            return next(self._draws)
        order, self._order = self._order, None
        order.generator = torch.default_generator.get_state()
        drawn = next(self._draws)
        if torch.equal(order.generator, torch.default_generator.get_state()):
            order.generator = None  # the sampler has not used the default generator
        return drawn


# Samplers of torch that do not divide their indices among ranks.
_WHOLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
COMPUTED = (
    "use shuffle=True with seed=, an ElasticSampler (shuffle=False for the dataset's order), "
    "or a BlockShuffleSampler"
)
_SAMPLES_AT_MOST = 1 << 48  # more samples than a rank reads from a stream in an epoch
# Arguments of samplers that decide on the order, whatever the number of ranks.
_ARGUMENTS = (
    "order_of", "shuffle", "seed", "drop_last", "replacement", "block_size", "blocks_at_once",
    "blocks", "max_tokens", "window",
)  # fmt: skip


class EpochOrder:
    """Draws the indices of an epoch from a loader's sampler or batch sampler."""

    is_stream: ClassVar[bool] = False  # whether the dataset decides on the order

    def __init__(
        self,
        loader: TorchLoader,
        *,
        # State to continue from, or a state before the epoch. None for the whole epoch.
        resumed: LoaderState | None = None,
        # Whether a `DistributedSampler` decides on the order now, not at the first index.
        at_once: bool = False,
    ) -> None:
        # Not the loader, which holds this order.
        self._index_sampler: Any = loader._index_sampler
        self._dataset: Any = loader.dataset
        self._at_once = at_once
        self._batch_sampler: Any = loader.batch_sampler
        self._decides: Any = deciding_sampler(loader)
        # Sampler of single indices. None if a user's batch sampler decides on the order.
        self.sampler: Any = (
            None if self._decides is self._batch_sampler else self._decides
        )
        self.sampler_name = type(self._decides).__name__
        # A user's subclass may draw other indices.
        draws_order = (
            isinstance(self.sampler, CursorSampler)
            and type(self.sampler).__iter__ is CursorSampler.__iter__
        )
        self.computed: CursorSampler | None = self.sampler if draws_order else None
        # Whether the ranks share an order and each rank takes a part. Positions then count the
        # samples of all ranks.
        self.shared = self.computed is not None and isinstance(
            self.sampler, DistributedSampler
        )
        # Whether every position in the order is computed. Otherwise a position is found only by
        # drawing all indices before.
        self.is_by_arithmetic = (
            self.computed is not None or type(self.sampler) is SequentialSampler
        )
        self.is_walked = not (self.is_stream or self.is_by_arithmetic)
        # If set, a batch sampler has the same state on all ranks, and any number of ranks can
        # continue the epoch. So the loader counts `samples_at_most` samples for each batch,
        # whatever the size of this rank's batch.
        self.samples_at_most: int | None = getattr(
            self._batch_sampler, "samples_at_most", None
        )
        self._parts = samplers_within(self._index_sampler) if self.is_walked else []
        own = (getattr(part, "generator", None) for part in self._parts)
        self._generator: torch.Generator | None = next(
            (each for each in own if isinstance(each, torch.Generator)), loader.generator
        )
        # The user's sampler, if it has a state.
        self.stateful: Stateful | None = next(filter(is_stateful, self._parts), None)
        # Whether the sampler continues from the state. The sampler within a user's sampler may
        # have drawn ahead. Then the draws are repeated, from the state before the epoch.
        outer = [part for part in self._parts if type(part) is not BatchSampler][:1]
        self.continues_sampler = self.stateful is not None and self.stateful in outer
        # State of a user's sampler before the epoch's first draw.
        self.sampler_at_start: object = None
        # State before the epoch, to be restored at the first draw.
        self._between: LoaderState | None = None
        # If the state has a state of the default generator, an order has been drawn.
        if (
            resumed is not None
            and resumed.is_between_epochs
            and (self._generator is not None or not resumed.generator)
        ):
            self._between, resumed = resumed, None
        # State to continue from, in this order's numbers. None for the whole epoch.
        self.resumed = resumed
        # Number of the first sample drawn, among this rank's samples.
        self.first_sample = 0 if resumed is None or self.shared else resumed.cursor
        # State of the generator before the first draw. None if no generator is used.
        self.generator: torch.Tensor | None = None
        if resumed is None and self._generator is not None:
            self.generator = self._generator.get_state()

    @property
    def is_drawn_anew(self) -> bool:
        """Whether the epoch's number alone does not decide on the order.

        The order then depends on a generator, or on a sampler's own state.
        """
        has_state = self.stateful is not None and not getattr(
            self.stateful, "wants_epoch", False
        )
        return has_state or any(type(part) in _WHOLE for part in self._parts)

    def division(self, saved: LoaderState) -> str | None:
        """Return why the rest of the epoch depends on the number of ranks, or None."""
        divides = self.is_walked and type(self.sampler) not in _WHOLE
        if (
            divides
            and self.samples_at_most is None
            and saved.rank is None
            and saved.batches
        ):
            return f"{self.sampler_name} may give each rank other samples"
        return None

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the number of a batch's first sample, and the most samples in the batch.

        Args:
            first: Number of samples drawn before the batch.
            count: Number of draws for the batch.
        """
        return first, count

    def rank_of(self, process: RankInfo) -> RankInfo:
        """Return the rank whose part is drawn.

        A `DistributedSampler` may have been given a rank. Otherwise the part is this process's.
        """
        part = self._decides
        if isinstance(part, DistributedSampler):
            return RankInfo(int(part.rank), int(part.num_replicas), "")
        return process

    @property
    def is_of_one_rank(self) -> bool:
        """Whether another process would draw another order.

        The order is then drawn from torch's default generator, another generator in each process.
        """
        return self.generator is not None and self._generator is None

    @property
    def sampler_epoch(self) -> int | None:
        """Epoch set by `set_epoch` of a user's sampler, or None."""
        epochs = (
            getattr(part, "epoch", None)
            for part in self._parts
            if hasattr(part, "set_epoch")
        )
        return next((int(epoch) for epoch in epochs if isinstance(epoch, Integral)), None)

    @property
    def wants_epoch(self) -> bool:
        """Whether the loader sets the sampler's epoch."""
        return any(getattr(part, "wants_epoch", False) for part in self._parts)

    def restore_sampler(self, state: object) -> None:
        """Restore the user's sampler to a state of `sampler_state`.

        None restores nothing.
        """
        if self.stateful is not None and state is not None:
            load_copy(self.stateful, state, self.sampler_name)

    def _restore_ended(self, state: object) -> None:
        """Restore the user's sampler to a state between two epochs.

        A sampler may skip the samples of the ended epoch in the next pass, as torchdata's
        `StatefulDistributedSampler` does. That pass is made here, so that the next epoch is whole.
        """
        self.restore_sampler(state)
        if self.stateful is None or state is None:
            return
        with isolated_generators():
            draws = list(itertools.islice(self._decides, 1))
        if draws:
            self.restore_sampler(state)

    def sampler_state(self, *, ended: bool = False) -> object:
        """Return the state of the user's sampler, or None.

        If the draws are repeated after a restore, the state is from before the epoch, unless the
        epoch has `ended`.
        """
        if self.stateful is None:
            return None
        if self.sampler_at_start is not None and not (ended or self.continues_sampler):
            return self.sampler_at_start
        return copy.deepcopy(self.stateful.state_dict())

    def describe(self) -> str:
        """Return the sampler with its deciding arguments, as text."""
        part = self._decides
        # A loader with a seed has the same order on any number of ranks.
        if type(part) is RankSampler and not part.shuffle:
            return f"{SequentialSampler.__name__}()"
        if type(part) in (RankSampler, SeededRandomSampler):
            return f"{SeededRandomSampler.__name__}(seed={part.seed})"
        names: tuple[str, ...] = ()
        if type(part).__module__.partition(".")[0] in ("headrace", "torch"):
            of_ranks = isinstance(part, DistributedSampler) and not (
                self.shared or self.samples_at_most
            )
            names = (*_ARGUMENTS, "num_replicas") if of_ranks else _ARGUMENTS
        found = []
        for name in names:
            value = getattr(part, name, "")
            if value != "":
                found.append(
                    f"{name}={value.item() if isinstance(value, np.generic) else value!r}"
                )
        if (
            type(part) in (SequentialSampler, *_WHOLE)
            and (size := self.size()) is not None
            and len(part) != size
        ):
            found.append(f"length={len(part)}")
        return f"{type(part).__name__}({', '.join(found)})"

    def size(self) -> int | None:
        """Return the number of samples of the order, or None.

        None means that the number is unknown.
        """
        if self.computed is not None:
            return self.computed.epoch_size
        try:
            return len(self._dataset)
        # User code: torch does not ask for the dataset's length if there is a sampler.
        except Exception:
            return None

    def leave_out(self, exclusions: tuple[Exclusion, ...]) -> None:
        """Leave samples out of the order from now on.

        Only an order whose positions are computed has exclusions.
        """
        if self.computed is not None:
            self.computed.exclusions = exclusions

    def draws(self) -> Iterator[object]:
        """Return the loader's draws, from the resume point if there is one."""
        resumed = self.resumed
        if self._between is not None:
            between, self._between = self._between, None
            self._restore_ended(between.sampler)
            self.restore_generator(between)
        if self.is_by_arithmetic:
            if resumed is not None and resumed.over:
                return iter(())
            return self._computed_from(0 if resumed is None else resumed.cursor)
        if resumed is None:
            self.sampler_at_start = self.sampler_state()
            drawn: Iterator[object] = iter(self._index_sampler)
            if self.is_walked and self._generator is None:
                drawn = _Watched(drawn, self)
            if self._at_once and isinstance(self.sampler, DistributedSampler):
                return itertools.chain(list(itertools.islice(drawn, 1)), drawn)
            return drawn
        if not resumed.over:
            return self._resumed_draws(resumed)
        if self.stateful is not None and resumed.sampler is not None:
            self._restore_ended(resumed.sampler)
        elif self._generator is not None:  # for the order of later epochs
            next(self._resumed_draws(resumed), None)
        return iter(())

    @property
    def batch_size(self) -> int | None:
        return getattr(self._batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        return getattr(self._batch_sampler, "drop_last", False)

    def restore_generator(self, resumed: LoaderState) -> None:
        if resumed.generator is not None and self._generator is not None:
            self.generator = decoded(resumed.generator)
            self._generator.set_state(self.generator)

    def _resumed_draws(self, resumed: LoaderState) -> Iterator[object]:
        if not self.continues_sampler:
            self.sampler_at_start = resumed.sampler
        self.restore_sampler(resumed.sampler)  # before the sampler's iterator is made
        if self.continues_sampler and resumed.sampler is not None:
            draws: Iterator[object] = iter(self._decides)
        else:
            count = resumed.batches if self.sampler is None else resumed.cursor
            draws = self._walked(resumed, count)
        if self.sampler is None or self.batch_size is None:
            return draws
        return iter(BatchSampler(cast(Any, draws), self.batch_size, self.drop_last))

    def _computed_from(self, cursor: int) -> Iterator[object]:
        """Return the loader's draws from a position of a computed order on."""
        pieces: Iterator[Piece]
        if self.computed is not None:
            pieces = self.computed.pieces_from(cursor)
        else:
            pieces = iter((range(cursor, len(self.sampler.data_source)),))
        if self.batch_size is None:
            return integers(pieces)
        return batches(pieces, self.batch_size, self.drop_last)

    def _walked(self, resumed: LoaderState, count: int) -> Iterator[object]:
        """Draw and drop the first `count` draws.

        Raises:
            StateError: there are fewer draws, or other draws, than when the state was saved.
        """
        draws: Iterator[object] = iter(self._decides)
        trainers: torch.Tensor | None = None
        # The state does not say how the indices were drawn.
        if resumed.generator is None and self._generator is None:
            draws = _Watched(draws, self)
        elif self._generator is None:
            trainers = torch.default_generator.get_state()
            self.generator = decoded(cast(str, resumed.generator))
            torch.default_generator.set_state(self.generator)
        given = resumed.last_draw
        checked = 1 if self.sampler is None or given is None else given.indices
        last: deque[Any] = deque(maxlen=max(1, checked))
        drawn = samples = 0
        try:
            if trainers is not None and not count:  # the first draw decides on the order
                draws = itertools.chain(list(itertools.islice(draws, 1)), draws)
            for draw in itertools.islice(draws, count):
                last.append(draw)
                drawn += 1
                # A trainer knows only the number of batches.
                if self.sampler is None and not resumed.cursor:
                    samples += self.samples_at_most or len(cast(Any, draw))
        finally:
            if trainers is not None:
                torch.default_generator.set_state(trainers)
        if drawn < count:
            raise StateError(
                f"{self.sampler_name} ended after {drawn} draws, but {count} were given out "
                f"when the state was saved"
            )
        self.first_sample = self.first_sample or samples
        indices = (
            tuple(last)[max(0, len(last) - checked) :]
            if self.sampler is not None
            else tuple(last[-1] if last else ())
        )
        if given is not None and given != drawn_last(indices, given.rank):
            raise StateError(
                f"{self.sampler_name} gives another order than when the state was saved. Derive "
                f"the order from a seed and the epoch, or give the sampler state_dict() and "
                f"load_state_dict(state)."
            )
        return draws


class StreamOrder(EpochOrder):
    """The order of a stream: the dataset decides on the samples, and draws only count batches."""

    is_stream = True

    def division(self, saved: LoaderState) -> str | None:
        if saved.rank is None and (saved.over or saved.is_between_epochs):
            return None
        return "each rank reads a part of the stream"

    def span(self, first: int, count: int) -> tuple[int, int]:
        # Only the reader knows how many samples are in a batch.
        return 0, _SAMPLES_AT_MOST

    def describe(self) -> str:
        return "stream"

    def size(self) -> int | None:
        return None

    def _resumed_draws(self, resumed: LoaderState) -> Iterator[object]:
        return iter(self._index_sampler)
