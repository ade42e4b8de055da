"""The position of a loader, and the next epoch.

`Position` knows the epoch, the delivered batches, the seeds and the excluded samples, and computes
the next epoch. `Position` starts no engine and reads no sample. The integrations of trainers use
the public methods too.
"""

from __future__ import annotations

import copy

from torch.utils.data import DistributedSampler

from headrace._order.order import EpochOrder, StreamOrder
from headrace._order.progress import EpochProgress
from headrace._order.restore import (
    EpochSeeds,
    batches_left,
    check_data_parallel,
    check_fit,
    check_rank,
    check_reading,
    state_for_rank,
)
from headrace._order.spec import LoaderSpec, TorchLoader, samplers_of
from headrace._order.state import Fingerprint, LoaderState, Past, Run, encoded
from headrace._ranks.rankinfo import RankInfo
from headrace._streams.kinds import propagate_epoch
from headrace._streams.resumable import copies_have_state


class Position:
    """The position of a loader.

    The next `iter()` continues the states in `resumed`. Without states, the next `iter()` begins
    the epoch `next_epoch`. The attributes of torch's loader are read at each call, because a
    program may set the attributes between epochs.

    Attributes:
        spec: Dataset and options of the loader.
        resumed: States to continue: a single state of all ranks, or a state of each rank.
        progress: Progress of the last begun epoch; None before the first epoch.
        past: Facts about earlier steps, and the exclusions.
        next_epoch: Number of the epoch of the next `iter()`.
        epoch_set: Whether `set_epoch` was called since the last epoch was begun.
        epoch_was_set: Whether `set_epoch` set the number of the last begun epoch.
    """

    def __init__(self, spec: LoaderSpec) -> None:
        self.spec = spec
        self._order_class = StreamOrder if spec.kind.is_iterable else EpochOrder
        self.resumed: tuple[LoaderState, ...] = ()
        self.progress: EpochProgress | None = None
        self.past = Past()
        self.next_epoch = 0
        self.epoch_set = self.epoch_was_set = False
        self._seeds = EpochSeeds(spec)
        self._warnings: set[str] = set()  # warnings already given

    def copied(self, spec: LoaderSpec) -> Position:
        """Return the position of a copy of the loader. The copy has begun no epoch."""
        clone = copy.copy(self)
        clone.spec, clone.progress, clone.epoch_set = spec, None, False
        clone._seeds = copy.copy(self._seeds)
        return clone

    # The present position.

    def states(self, loader: TorchLoader, lag: int) -> tuple[LoaderState, ...]:
        """Return the states of the last iteration, or before the next epoch.

        Args:
            loader: The loader.
            lag: Number of batches to go back from the last batch.

        Returns:
            A single state, of all ranks or of this rank. Or the states of each rank, if restored.
        """
        return self.resumed or (self.state_of(self.progress, loader, lag),)

    def state_of(
        self, progress: EpochProgress | None, loader: TorchLoader, lag: int
    ) -> LoaderState:
        """Return the state of an iteration, `lag` calls of `next()` ago.

        `progress` is None before the first iteration.
        """
        if progress is not None and not (progress.over and lag == 0):
            return progress.state(lag)
        if lag:
            raise ValueError(
                f"lag={lag}: no iteration has begun, so that there is no earlier state"
            )
        return self._next_state(loader)

    def is_of_rank(self, loader: TorchLoader) -> bool:
        """Whether each rank has a separate state.

        The result is the same on all ranks.
        """
        if self.spec.kind.is_iterable:
            return not getattr(self.spec.source, "divides_samples", False)
        order = self.order(loader)
        of_all_ranks = (
            order.is_by_arithmetic
            or isinstance(order.sampler, DistributedSampler)
            or order.samples_at_most
        )
        return not (loader.in_order and of_all_ranks)

    def batches_left(self, loader: TorchLoader, rank: RankInfo) -> int | None:
        """Return the number of batches of the restored epoch left on this rank.

        See `restore.batches_left`.
        """
        order = self.order(loader)
        return batches_left(order, state_for_rank(self.resumed, order.rank_of(rank)))

    def order(self, loader: TorchLoader) -> EpochOrder:
        return self._order_class(loader)

    def fingerprint(self, loader: TorchLoader, order: EpochOrder) -> Fingerprint:
        """Return the properties of the loader to compare with a state."""
        kind = self.spec.kind
        # The copy of the dataset in each worker has a separate state. A restored state needs the
        # same number of workers.
        readers = None
        if copies_have_state(kind, self.spec.source):
            readers = self.spec.copies(loader)
        return Fingerprint(
            kind.value, order.size(), order.describe(), self.spec.options["seed"], readers
        )

    # Moves of the position, before the next `iter()`.

    def restore(self, loader: TorchLoader, states: tuple[LoaderState, ...]) -> None:
        """Continue from states at the next `iter()`, after a check.

        Args:
            loader: The loader.
            states: A single state of all ranks, or the states of each rank. In the second case,
                this rank continues from the state of this rank.
        """
        now = self.fingerprint(loader, self.order(loader))
        for state in states:
            check_fit(state, now)
        self.continue_from(loader, states)

    def continue_from(self, loader: TorchLoader, states: tuple[LoaderState, ...]) -> None:
        """Continue from checked states at the next `iter()`."""
        self.resumed, self.next_epoch = states, states[0].epoch
        self.order(loader).leave_out(states[0].excluded)

    def set_epoch(self, loader: TorchLoader, epoch: int) -> None:
        """Set the number of the next epoch, also of samplers.

        While a restored epoch is pending, no number is set.
        """
        self.epoch_set = True
        if not self.resumed:
            self.next_epoch = epoch
            for part in samplers_of(loader):
                propagate_epoch(part, epoch)

    def skip(self, loader: TorchLoader, batches: int, rank: RankInfo, since: Run) -> None:
        """Let the next `iter()` begin after some batches.

        For map-style datasets. Each rank skips `batches` batches, from the beginning of the run
        `since`.
        """
        order = self.order(loader)
        # A batch sampler draws batches, and not samples.
        cursor = 0 if order.sampler is None else batches * (order.batch_size or 1)
        if order.shared:
            cursor *= order.sampler.num_replicas
        state = self._next_state(loader)._replace(
            batches=since.batches + batches,
            cursor=since.cursor + cursor,
            ranks=order.rank_of(rank).world_size,
            # Earlier batches are drawn again, even from a sampler with a state.
            sampler=None,
            streams={},
        )
        self.resumed = (state,)

    def skip_rest(self) -> None:
        """Skip the rest of the restored epoch.

        The next `iter()` begins the epoch after the restored epoch.
        """
        if self.resumed:
            self.next_epoch, self.past = self.resumed[0].epoch + 1, self.resumed[0].past
            self.resumed, self.progress = (), None

    # The next epoch.

    def next_progress(
        self, loader: TorchLoader, rank: RankInfo, *, late_epoch: bool
    ) -> EpochProgress:
        """Return the progress of the next epoch, or of the restored epoch.

        The progress has no plans yet. The position stays the same until `begin`.

        Args:
            loader: The loader.
            rank: The rank of this process.
            late_epoch: Whether a trainer may set the epoch of samplers later than this call.
        """
        seed, copies = self.spec.options["seed"], self.spec.copies(loader)
        if self.spec.options["data_parallel"] is not None:
            check_data_parallel(loader, rank, seed)
        resumed: LoaderState | None = None
        if self.resumed:
            resumed = state_for_rank(self.resumed, self.order(loader).rank_of(rank))
        check_reading(self.spec, loader, rank, self._warnings)
        # Between epochs, samplers without `wants_epoch` keep the number: only the program sets the
        # number. Within a restored epoch, the state has the number.
        epoch = sampler_epoch = self.next_epoch
        keeps = not late_epoch
        if resumed is not None:
            epoch = sampler_epoch = resumed.epoch
            if resumed.is_between_epochs:
                keeps = keeps and not self.epoch_set
            else:
                keeps = False
                if resumed.sampler_epoch is not None:
                    sampler_epoch = resumed.sampler_epoch
        propagate_epoch(loader._index_sampler, sampler_epoch, only_wanted=keeps)
        order = self._order_class(loader, resumed=resumed, at_once=late_epoch)
        if resumed is not None:
            check_rank(resumed, order, rank)
            check_fit(resumed, self.fingerprint(loader, order))
        order.leave_out((self.past if resumed is None else resumed.past).excluded)
        kept_seed = self._seeds.kept  # before the epoch draws a new seed
        draws, base_seed = self._seeds.draw(loader, order, resumed)
        begun = order.resumed
        if begun is None:
            begun = self._fresh(loader, order, epoch) if resumed is None else resumed
            begun = begun._replace(
                kept_seed=kept_seed,
                sampler_epoch=order.sampler_epoch,
                sampler=order.sampler_at_start,
            )
        begun = begun._replace(base_seed=base_seed if seed is None else None)
        per_rank = not loader.in_order and rank.world_size > 1
        if order.is_stream:
            per_rank = self.is_of_rank(loader)
        return EpochProgress(
            begun.noted(order.rank_of(rank).world_size, loader.batch_size or 0),
            order,
            draws,
            base_seed,
            rank,
            restored=resumed is not None,
            batched=loader._auto_collation,
            readers=copies or 1,
            per_rank=per_rank,
            keeps_dataset=not copies or loader.persistent_workers,
        )

    def begin(self, progress: EpochProgress) -> None:
        """Move into an epoch of `next_progress`."""
        begun = progress.begun
        self.resumed, self.progress, self.past = (), progress, begun.past
        self.next_epoch = begun.epoch + 1
        self.epoch_was_set, self.epoch_set = self.epoch_set, False

    def _next_state(self, loader: TorchLoader) -> LoaderState:
        """Return the state before the next epoch."""
        order = self.order(loader)
        return self._fresh(loader, order, self.next_epoch)._replace(
            generator=encoded(order.generator),
            sampler=order.sampler_state(),
            kept_seed=self._seeds.kept,
        )

    def _fresh(self, loader: TorchLoader, order: EpochOrder, epoch: int) -> LoaderState:
        """Return the state before an epoch, with remains of the epoch before."""
        fresh = LoaderState(
            epoch,
            self.fingerprint(loader, order),
            sampler_epoch=order.sampler_epoch,
            **self.past._asdict(),
        )
        return fresh if self.progress is None else self.progress.next_state(fresh)
