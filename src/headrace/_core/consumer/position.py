"""The position of a loader: the epoch that comes next, and the states that are saved and restored."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from headrace._core.call_site import users_stacklevel
from headrace._core.consumer.epoch_seeds import EpochSeeds
from headrace._core.consumer.lightning_loops import saving
from headrace._core.consumer.loader_state import Fingerprint, LoaderState, states_to_dict
from headrace._core.consumer.order import EpochOrder, TorchLoader
from headrace._core.consumer.progress import EpochProgress
from headrace._core.consumer.restoring import check_fit, of_all_ranks
from headrace._core.consumer.saved_order import encoded
from headrace._core.data_parallel import group_of
from headrace._core.interface.kinds import DatasetKind
from headrace._core.interface.replication import is_divided_by_sample
from headrace._core.interface.resumable import State, is_stateful
from headrace.errors import StateError
from headrace.options import AllOptions


class LoaderPosition:
    """The position of one loader between and within its epochs.

    A copy, as a copy of the loader has, has begun no iteration.

    Args:
        source: the dataset that is fetched from.
        kind: its kind.
        options: headrace's own options, checked.

    Attributes:
        seeds: draws the seeds of the epochs.
        resumed: states that the next `iter()` continues, one of all ranks or one of each; empty if it begins an epoch.
        progress: of the epoch begun last; None before the first.
    """

    def __init__(self, source: Any, kind: DatasetKind, options: AllOptions) -> None:
        self._source = source
        self._kind = kind
        self._options = options
        self._next_epoch = 0
        self.seeds = EpochSeeds(source, seed=options["seed"], is_async=kind.is_async)
        self.resumed: tuple[LoaderState, ...] = ()
        self.progress: EpochProgress | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "seeds": copy.copy(self.seeds), "progress": None}

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that the next `iter()` begins, or continues."""
        return self.resumed[0].epoch if self.resumed else self._next_epoch

    @property
    def pending(self) -> LoaderState | None:
        """A state that the next `iter()` continues from; None if it begins an epoch."""
        return self.resumed[0] if self.resumed else None

    @property
    def last_point(self) -> object:
        """The position after the last batch of the iteration begun last: another object after each."""
        return None if self.progress is None else self.progress.last_point

    def begin(self, epoch: int, progress: EpochProgress) -> None:
        """An iteration of an epoch has begun."""
        self.resumed, self._next_epoch, self.progress = (), epoch + 1, progress

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin this epoch."""
        self._next_epoch, self.resumed = epoch, ()

    def skip(self, loader: TorchLoader, batches: int, *, batch_size: int | None, ranks: int) -> None:
        """Let the next `iter()`, of a map-style dataset, begin after a number of batches, without fetching those.

        Args:
            loader: the loader.
            batches: their number, on each rank.
            batch_size: number of samples in each; None where a batch sampler decides.
            ranks: the number of ranks.
        """
        order = EpochOrder(loader, stream=False)
        samples = batches * (batch_size or 0)
        cursor = samples * ranks if order.shared else samples
        fresh = self._next_state(loader)
        self.resumed = (fresh._replace(batches=batches, samples=samples, cursor=cursor, ranks=ranks),)

    def skip_rest(self) -> None:
        """Let the next `iter()` begin the epoch after the one that was to be continued."""
        if self.resumed:
            self.set_epoch(self.resumed[0].epoch + 1)

    def restore(self, loader: TorchLoader, states: tuple[LoaderState, ...], *, strict: bool) -> None:
        """Continue from a state of all ranks, or this rank's among those of each, at the next `iter()`."""
        now = self.fingerprint(loader, EpochOrder(loader, stream=self._kind.is_iterable))
        try:
            for state in states:
                check_fit(state, now)
        except StateError as error:
            if strict:
                raise
            epoch = states[0].epoch
            warnings.warn(f"{error.args[0]} Epoch {epoch} begins anew.", UserWarning, stacklevel=users_stacklevel())
            states = (LoaderState(epoch, now),)
        self.resumed = states

    def state(self, loader: TorchLoader, lag: int) -> LoaderState:
        """The state of the iteration begun last, or before the next one if there is none."""
        return self.resumed[0] if self.resumed else self.state_of(self.progress, loader, lag)

    def state_dict(self, loader: TorchLoader, lag: int) -> State:
        """As `state`, to be saved; for a checkpoint of Lightning's that of all ranks, after the batches trained on."""
        if self.resumed:
            return states_to_dict(self.resumed)
        progress = self.progress
        saver = saving(loader, over=progress is not None and progress.over)
        if saver is not None and saver.in_epoch and progress is not None and lag == 0:
            lag = saver.lag + progress.over  # the call that ended an epoch counts as one
        state = self.state_of(progress, loader, lag)
        if saver is not None and self._is_of_rank(loader):
            return states_to_dict(of_all_ranks(state, group_of(self._options["data_parallel"])))
        return state.to_dict()

    def state_of(self, progress: EpochProgress | None, loader: TorchLoader, lag: int) -> LoaderState:
        """The state of an iteration, after its last call of `next()`, or `lag` calls before.

        Args:
            progress: of the iteration; None for the state before the first.
            loader: the loader.
            lag: number of calls.

        Raises:
            ValueError: no iteration has begun that long ago.
        """
        if progress is not None and not (progress.over and lag == 0):
            return progress.state(lag)
        if lag:
            raise ValueError(f"lag={lag}: no iteration has begun, so that there is no earlier state")
        fresh = self._next_state(loader)
        return fresh if progress is None else progress.next_state(fresh)

    def state_at_start(
        self, loader: TorchLoader, order: EpochOrder, epoch: int, base_seed: int | None, pipe_seed: int | None
    ) -> LoaderState:
        """The state before the first batch of an epoch."""
        return LoaderState(
            epoch,
            self.fingerprint(loader, order),
            base_seed=base_seed if self._options["seed"] is None else None,
            pipe_seed=pipe_seed,
            sampler=order.user_sampler.at_start,
            sampler_epoch=order.user_sampler.epoch,
        )

    def fingerprint(self, loader: TorchLoader, order: EpochOrder) -> Fingerprint:
        """The properties of the loader that a state has to fit."""
        # Each worker's copy of the dataset has a state of its own, for which there must be a worker.
        copies = self._kind is DatasetKind.ITERABLE or (self._kind is DatasetKind.MAP and is_stateful(self._source))
        readers = loader.num_workers if copies else None
        return Fingerprint(self._kind.value, order.size(), order.describe(), self._options["seed"], readers)

    def _next_state(self, loader: TorchLoader) -> LoaderState:
        """The state before the next epoch."""
        order = EpochOrder(loader, stream=self._kind.is_iterable)
        state = self.state_at_start(loader, order, self._next_epoch, None, None)
        return state._replace(
            generator=encoded(order.generator), sampler=order.user_sampler.between_epochs(), kept_seed=self.seeds.kept
        )

    def _is_of_rank(self, loader: TorchLoader) -> bool:
        """Whether each rank has a state of its own; the same on all ranks."""
        if self._kind.is_iterable:
            return not is_divided_by_sample(self._source)
        return not loader.in_order or not EpochOrder(loader, stream=False).is_of_all_ranks
