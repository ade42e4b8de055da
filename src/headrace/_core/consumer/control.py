"""The control of a loader: epochs, position and engine.

The control begins the epochs. `DataLoader` and the integrations of trainers use a loader through
the public methods of the control: the position (`states`, `restore`, `pending`, `last_point`), the
next epoch (`next_epoch`, `set_epoch`, `skip`, `skip_rest`), the rest of the epoch (`batches_left`),
and the start of the epoch (`ranked`, `begin`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DistributedSampler

from headrace._core.cgroup import usable_cores
from headrace._core.consumer.agreement import StepGroup, begin_agreement, close_all
from headrace._core.consumer.deliver import Finish, checked_length, opened, should_pin
from headrace._core.consumer.epoch import Epoch
from headrace._core.consumer.worker_search import RECORDS, WorkerSearch
from headrace._core.descriptors import explained
from headrace._core.device.copy import Copier
from headrace._core.device.pinning import pin
from headrace._core.device.stage import DeviceStage
from headrace._core.device.streams import streams_of
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.config import EngineConfig
from headrace._core.links.inline import InlineLink
from headrace._core.links.select import PlacementSelector
from headrace._core.links.session import Session
from headrace._core.look_ahead import LookAheadSize, most_concurrency
from headrace._core.messages import WorkersRequest
from headrace._core.order.order import EpochOrder
from headrace._core.order.progress import EpochProgress
from headrace._core.order.restore import (
    EpochSeeds,
    batches_left,
    check_data_parallel,
    check_fit,
    check_rank,
    check_reading,
    of_rank,
)
from headrace._core.order.spec import LoaderSpec, TorchLoader, is_automatic, samplers_of
from headrace._core.order.state import Fingerprint, LoaderState, Past, Run, encoded
from headrace._core.pool.launch import start_early
from headrace._core.ranks.data_parallel import group_of, rank_among
from headrace._core.ranks.rankinfo import RankInfo, provided_rank, ranks_on_host
from headrace._core.seeding import batch_seed
from headrace._core.streams.composition import gives_tables
from headrace._core.streams.kinds import DatasetKind, given_rank, propagate_epoch
from headrace._core.streams.resumable import is_stateful
from headrace._core.streams.torch_views import without_adapter
from headrace._core.torchcompat.portable_collate import without_transform
from headrace.collate import destined
from headrace.errors import LoaderClosedError
from headrace.options import engine_options
from headrace.telemetry.counters import Counters

if TYPE_CHECKING:
    from headrace.telemetry.diagnosis import Setup

E = TypeVar("E", bound=Epoch)
_log = logging.getLogger("headrace")


def copied(loader: Any) -> Any:
    """Return a copy of a loader, with separate samplers."""
    clone = copy.copy(loader)
    batches, sampler = copy.copy(loader.batch_sampler), copy.copy(loader.sampler)
    if getattr(batches, "sampler", None) is not None:
        batches.sampler = sampler = copy.copy(batches.sampler)
    clone.__dict__.update(batch_sampler=batches, sampler=sampler)
    return clone


trainers: list[Any] = []
"""Trainers in this process which cannot call the loader.

`begins(loader)` of a trainer runs at the beginning of an iteration. `begins` sets the position of
the loader, and returns True if the iteration must be empty."""


class LoaderControl:
    """The epochs of a loader, and the engine.

    The attributes of torch's loader are read at each epoch, because a program may set the
    attributes between epochs. A copy of a control (in a copy of the loader) has begun no iteration.

    Attributes:
        spec: Dataset and options of the loader.
        counters: Counts of the loader.
        search: The search for the number of workers, with ``num_workers="auto"``. A copy begins a
            new search.
        placements: The engines, owned by the control.
        resumed: States to continue at the next `iter()`: a single state of all ranks, or a state of
            each rank. Empty if the next `iter()` begins an epoch.
        past: Facts about steps before the last begun epoch, and the exclusions of this epoch.
        progress: Progress of the last begun epoch; None before the first epoch.
    """

    def __init__(self, spec: LoaderSpec) -> None:
        self.spec = spec
        self.counters = Counters(type(spec.source).__qualname__)
        self.resumed: tuple[LoaderState, ...] = ()
        self.progress: EpochProgress | None = None
        self._next_epoch = 0
        self.past = Past()
        # Whether `set_epoch` set the number of the last begun epoch.
        self.epoch_was_set = False
        # For each begun epoch: `EpochOrder.sampler_epoch`.
        self.sampler_epochs: dict[int, int | None] = {}
        self._seeds = EpochSeeds(spec)
        self._checked: set[str] = set()  # warnings already given
        self._reset(workers=0)

    def _reset(self, workers: int) -> None:
        engines = self.spec.engines
        self.search = WorkerSearch(engines, max(engines, workers))  # engines divide the workers
        self._ahead = LookAheadSize(0, 0)  # empty before the first epoch
        self.placements = PlacementSelector(self.spec.placement, self.spec.remote, engines)
        # At exit, the exit hook of the placements closes everything in order.
        weakref.finalize(self, self.placements.drop).atexit = False
        # Open iterations, with the numbers of the epochs.
        self._open_epochs: weakref.WeakKeyDictionary[Epoch, int] = weakref.WeakKeyDictionary()
        self._closings = 0  # number of calls of `close_epochs`
        self._agreements: list[StepGroup] = []  # empty, or a single group
        weakref.finalize(self, close_all, self._agreements)
        # Whether `set_epoch` was called since the last session was opened.
        self._epoch_set = False

    def __getstate__(self) -> dict[str, object]:
        left = ("_open_epochs", "_agreements", "placements")
        kept = {name: value for name, value in self.__dict__.items() if name not in left}
        return kept | {"progress": None, "counters": Counters(self.counters.name)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._seeds = copy.copy(self._seeds)
        self._reset(self.search.number)

    def with_spec(self, spec: LoaderSpec) -> LoaderControl:
        """Return a copy with another `spec` for the same dataset."""
        clone = copy.copy(self)
        clone.spec = spec
        clone._reset(self.search.number)
        return clone

    # The position.

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch.

        The next `iter()` begins or continues this epoch.
        """
        return self.resumed[0].epoch if self.resumed else self._next_epoch

    @property
    def pending(self) -> LoaderState | None:
        """The state to continue at the next `iter()`.

        None if the next `iter()` begins an epoch.
        """
        return self.resumed[0] if self.resumed else None

    @property
    def last_point(self) -> object:
        """The position after the last batch of the last iteration.

        The object is new after each batch.
        """
        return None if self.progress is None else self.progress.last_point

    def states(self, loader: TorchLoader, lag: int) -> tuple[LoaderState, ...]:
        """Return the states of the last iteration, or before the next epoch.

        Args:
            loader: The loader.
            lag: Number of batches to go back from the last batch.

        Returns:
            A single state, of all ranks or of this rank. Or the states of each rank, if restored.
        """
        if self.resumed:
            return self.resumed
        return (self._state_of(self.progress, loader, lag),)

    def restore(self, loader: TorchLoader, states: tuple[LoaderState, ...]) -> None:
        """Continue from states at the next `iter()`.

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
        self.resumed = states
        self.order(loader).leave_out(states[0].excluded)

    def set_epoch(self, loader: TorchLoader, epoch: int) -> None:
        """Set the number of the next epoch.

        Samplers and the dataset get the number too. While a restored epoch is pending, no number is
        set.
        """
        self._epoch_set = True
        if self.resumed:
            return
        self._next_epoch = epoch
        for part in samplers_of(loader):
            propagate_epoch(part, epoch)
        self.placements.set_epoch(self.spec.source, epoch)

    def begin_at(self, loader: TorchLoader, epoch: int, sampler_epoch: int) -> None:
        """Let the next `iter()` begin an epoch.

        Samplers without ``wants_epoch`` get the number `sampler_epoch`.
        """
        self.resumed, self._next_epoch = (), epoch
        if self.epoch_was_set:
            self.set_epoch(loader, epoch)
        else:
            propagate_epoch(loader._index_sampler, sampler_epoch)

    def skip(
        self, loader: TorchLoader, batches: int, rank: RankInfo, since: Run | None = None
    ) -> None:
        """Let the next `iter()` begin after some batches.

        For map-style datasets. Each rank skips `batches` batches, from the beginning of the epoch
        or of the run `since`.
        """
        order = self.order(loader)
        # A batch sampler draws batches, and not samples.
        cursor = 0 if order.sampler is None else batches * (order.batch_size or 1)
        if order.shared:
            cursor *= order.sampler.num_replicas
        if since is not None:
            batches, cursor = since.batches + batches, since.cursor + cursor
        # Earlier batches are drawn again, even from a sampler with a state.
        fresh = self._next_state(loader)._replace(
            sampler=None, streams={}, ranks=order.rank_of(rank).world_size
        )
        self.resumed = (fresh._replace(batches=batches, cursor=cursor),)

    def skip_rest(self) -> None:
        """Skip the rest of the restored epoch.

        The next `iter()` begins the epoch after the restored epoch.
        """
        if self.resumed:
            self._next_epoch, self.past = self.resumed[0].epoch + 1, self.resumed[0].past
            self.resumed, self.progress = (), None

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
        """Return the number of batches left on this rank.

        The batches belong to the restored epoch. See `restore.batches_left`.
        """
        order = self.order(loader)
        return batches_left(order, of_rank(self.resumed, order.rank_of(rank)))

    def order(self, loader: TorchLoader) -> EpochOrder:
        return EpochOrder(loader, stream=self.spec.kind.is_iterable)

    def _state_of(
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

    def _next_state(self, loader: TorchLoader) -> LoaderState:
        """Return the state before the next epoch."""
        order = self.order(loader)
        sampler = order.sampler_state()
        generator = encoded(order.generator)
        fresh = self._fresh(loader, order, self._next_epoch)
        return fresh._replace(generator=generator, sampler=sampler, kept_seed=self._seeds.kept)

    def _fresh(self, loader: TorchLoader, order: EpochOrder, epoch: int) -> LoaderState:
        """Return the state before an epoch.

        The state includes remains of the epoch before.
        """
        fingerprint = self.fingerprint(loader, order)
        fresh = LoaderState(
            epoch, fingerprint, sampler_epoch=order.sampler_epoch, **self.past._asdict()
        )
        return fresh if self.progress is None or self.resumed else self.progress.next_state(fresh)

    def fingerprint(self, loader: TorchLoader, order: EpochOrder) -> Fingerprint:
        """Return the properties of the loader to compare with a state."""
        kind = self.spec.kind
        # The copy of the dataset in each worker has a separate state. A restored state needs the
        # same number of workers.
        copies = kind is DatasetKind.ITERABLE or (
            kind is DatasetKind.MAP and is_stateful(self.spec.source)
        )
        readers = int(loader.num_workers) if copies else None
        return Fingerprint(
            kind.value, order.size(), order.describe(), self.spec.options["seed"], readers
        )

    # An epoch.

    @contextlib.contextmanager
    def ranked(self) -> Iterator[RankInfo]:
        """The rank of this process, or the rank given to a stream.

        With `data_parallel`, `get_rank_info` returns the same rank inside the block.
        """
        data_parallel = self.spec.options["data_parallel"]
        of_stream = self.spec.kind.is_iterable and data_parallel is None
        rank = (given_rank(self.spec.source) if of_stream else None) or rank_among(data_parallel)
        with contextlib.nullcontext() if data_parallel is None else provided_rank(rank):
            yield rank

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """The process group of `data_parallel`; None without it."""
        return group_of(self.spec.options["data_parallel"])

    def begin(
        self, kind: type[E], loader: TorchLoader, rank: RankInfo, *, late_epoch: bool = False
    ) -> E:
        """Begin the next epoch, or continue the restored epoch.

        Args:
            kind: The class of the iterator.
            loader: The loader.
            rank: The rank from `ranked`. Engine and workers use this rank, and determine no other
                rank.
            late_epoch: Whether a trainer may set the epoch of samplers later than this call.

        Returns:
            The iterator.
        """
        agreement, closings = None, self._closings
        if self.spec.options["coordinated"] and rank.world_size > 1:
            agreement = begin_agreement(self._agreements, rank, self.group, loader.timeout or None)
        try:
            progress = self.next_progress(loader, rank, late_epoch=late_epoch)
            epoch = self.open(kind, loader, progress, agreement)
        except Exception as error:
            if agreement is not None:  # otherwise the other ranks would wait
                agreement.leave(error)
            if closings == self._closings:
                raise
        # Another thread has closed the epochs meanwhile, but not the new epoch.
        if closings != self._closings:
            self.close_epochs()
            self.close_engine()
            raise LoaderClosedError
        return epoch

    def next_progress(
        self, loader: TorchLoader, rank: RankInfo, *, late_epoch: bool
    ) -> EpochProgress:
        """Return the progress of the next epoch, or of the restored epoch.

        The progress has no plans yet.
        """
        kind, seed = self.spec.kind, self.spec.options["seed"]
        if self.spec.options["data_parallel"] is not None:
            check_data_parallel(loader, rank, seed)
        resumed = of_rank(self.resumed, self.order(loader).rank_of(rank)) if self.resumed else None
        epoch = self._next_epoch if resumed is None else resumed.epoch
        check_reading(self.spec, loader, rank, self._checked)
        # Between epochs, samplers without `wants_epoch` keep the number: only the program sets the
        # number. Within a restored epoch, the state has the number.
        between = resumed is None or resumed.is_between_epochs
        keeps = between and not late_epoch and (resumed is None or not self._epoch_set)
        saved = None if resumed is None or between else resumed.sampler_epoch
        propagate_epoch(loader._index_sampler, epoch if saved is None else saved, only_wanted=keeps)
        order = EpochOrder(loader, stream=kind.is_iterable, resumed=resumed, at_once=late_epoch)
        if resumed is not None:
            self.past = resumed.past
            check_rank(resumed, order, rank)
            check_fit(resumed, self.fingerprint(loader, order))
        order.leave_out(self.past.excluded)
        continued = order.resumed
        kept_seed = self._seeds.kept  # before the epoch draws a new seed
        draws, base_seed = self._seeds.draw(loader, order, resumed)
        drawn_seed = base_seed if seed is None else None
        if continued is None:
            fresh = self._fresh(loader, order, epoch)
            begun = fresh._replace(
                base_seed=drawn_seed, kept_seed=kept_seed, sampler=order.sampler_at_start
            )
            if resumed is not None:
                begun = begun._replace(streams=resumed.streams)
        else:
            begun = (
                continued
                if continued.base_seed is not None
                else continued._replace(base_seed=drawn_seed)
            )
        begun = begun.noted(order.rank_of(rank).world_size, loader.batch_size or 0)
        self.past = begun.past
        self.sampler_epochs[epoch] = begun.sampler_epoch
        return EpochProgress(
            begun,
            order,
            draws,
            base_seed,
            rank,
            restored=resumed is not None,
            batched=loader._auto_collation,
            readers=(0 if kind.is_async else loader.num_workers) or 1,
            of_rank=self.is_of_rank(loader)
            if kind.is_iterable
            else not loader.in_order and rank.world_size > 1,
            keeps_dataset=kind.is_async or not loader.num_workers or loader.persistent_workers,
        )

    def open(
        self,
        iterator: type[E],
        loader: TorchLoader,
        progress: EpochProgress,
        agreement: StepGroup | None,
    ) -> E:
        begun, rank = progress.begun, progress.rank
        self.counters.begin()
        self.epoch_was_set, self._epoch_set = self._epoch_set, False
        session = self._open_session(loader, progress)
        progress.before_first = session.inline_state
        text = "epoch %d begins with batch %d, on rank %d of %d: %s; %d workers, %d batches ahead"
        place = rank.rank, rank.world_size, self.counters.placement
        _log.debug(
            text,
            begun.epoch,
            begun.batches,
            *place,
            loader.num_workers,
            self.spec.look_ahead(loader).least,
        )
        delivers: Session | DeviceStage = session
        finalize: Finish | None
        if self.spec.device is None:
            finalize = pin if should_pin(loader.pin_memory, loader.pin_memory_device) else None
        else:
            ahead = self.spec.options["device_prefetch"]
            delivers = stage = DeviceStage(
                session, Copier(streams_of(self.spec.device)), ahead, opened
            )
            finalize = stage.claim
        # Set by `__len__` of torch's loader, only for streams.
        asked: object = loader._IterableDataset_len_called
        if asked is not None:
            copies = loader.num_workers > 0 and not self.spec.kind.is_async
            finalize = checked_length(finalize, without_adapter(loader.dataset), copies=copies)
        self.resumed, self._next_epoch, self.progress = (), begun.epoch + 1, progress
        # The look-ahead found in the last epoch is kept, within the present limits.
        self._ahead.resize(*self.spec.look_ahead(loader))
        epoch = iterator(
            loader,
            self.spec,
            self.counters,
            progress,
            delivers,
            look_ahead=None if session.inline_state is not None else self._ahead,
            finish=finalize,
            state=functools.partial(self._state_of, progress, loader),
            tune=functools.partial(self._tune, loader, delivers),
            agreement=agreement,
        )
        self._open_epochs[epoch] = begun.epoch
        return epoch

    @property
    def open_epochs(self) -> list[tuple[Epoch, int]]:
        """The open iterations of this loader, with the numbers of the epochs."""
        # Another thread may begin an iteration meanwhile.
        epochs = [reference() for reference in self._open_epochs.keyrefs()]
        return [(epoch, self._open_epochs[epoch]) for epoch in epochs if epoch is not None]

    def close_epochs(self) -> None:
        """Close the open epochs, without waiting."""
        self._closings += 1
        for epoch, _ in self.open_epochs:
            epoch.close()

    def close_engine(self) -> None:
        """End the engine and the workers, and wait for the end."""
        close_all(self._agreements)
        self.placements.close()

    # The engine.

    def start_early(self, loader: TorchLoader) -> None:
        """Start the zygote early, if engine or workers will be forks."""
        if (
            not self.spec.kind.is_async
            or self.spec.remote is not None
            or loader.multiprocessing_context
        ):
            return
        if self.spec.placement == "process" or loader.num_workers > 0:
            start_early()

    def setup(self, loader: TorchLoader) -> Setup:
        """Return the arguments that decide on the loader's speed."""
        from headrace.telemetry.diagnosis import Setup

        options = self.spec.options
        return Setup(
            concurrency=options["concurrency"],
            num_workers=loader.num_workers,
            look_ahead=self.spec.look_ahead(loader).least,
            in_order=loader.in_order,
            memory_budget=options["memory_budget"],
            placement=self.counters.placement,
            stream=self.spec.kind.is_iterable,
            cores=self._cores(loader),
            most_concurrency=self.spec.engines * most_concurrency(),
            engines=self.spec.engines,
            fixed_look_ahead=vars(loader)["prefetch_factor"] is not None,
        )

    def _cores(self, loader: TorchLoader) -> int:
        """Return the number of CPUs for the loader.

        For a search of the number of workers, the ranks of a host share the CPUs.
        """
        remote = self.spec.remote
        if remote is not None:
            return max(1, int(self.spec.engines * remote.cpus_per_engine))
        return max(1, int(usable_cores() / (ranks_on_host() if is_automatic(loader) else 1)))

    def _open_session(self, loader: TorchLoader, progress: EpochProgress) -> Session:
        """Open a session on the running engine, or on a new engine.

        Without workers, a torch dataset is read in the caller's thread, as in torch.
        """
        spec, options, automatic = self.spec, self.spec.options, is_automatic(loader)
        rank, start, base_seed = progress.rank, progress.session_start, progress.base_seed
        # A torch dataset without `wants_epoch` gets the epoch only from `loader.set_epoch`, as in
        # torch.
        set_epoch = spec.kind.is_async or self.epoch_was_set
        only_wanted = not (spec.kind.is_async or (set_epoch and start.batch))
        self.placements.set_epoch(spec.source, start.epoch, only_wanted=only_wanted)
        start = start._replace(
            set_epoch=set_epoch, seed=batch_seed(base_seed, start.epoch, rank.rank)
        )
        transforms = spec.maps
        if options["transform"] is not None:
            transforms = (*transforms, options["transform"])
        assembler = Assembler(
            transforms,
            destined(without_transform(loader.collate_fn)),
            loader._auto_collation,
            spec.policy.tolerance,
            gives_tables(spec.source),
        )
        in_thread = spec.placement in ("auto", "thread") and not loader.num_workers
        resumed = bool(self.resumed)
        if options["seed"] is not None and not spec.kind.is_async:
            # Workers seed random generators by torch's rule. With this seed, workers draw
            # different numbers in each epoch and rank.
            base_seed += (start.epoch * rank.world_size + rank.rank) * loader.num_workers
        elif (
            not spec.kind.is_async
            and resumed
            and (start.batch or (loader.persistent_workers and start.epoch))
        ):
            # New workers must not repeat the draws of earlier workers.
            base_seed = batch_seed(base_seed, start.epoch, start.batch) >> 1
        config = EngineConfig(
            dataset=spec.source,
            kind=spec.kind,
            assembler=assembler,
            num_workers=self.search.least if automatic else loader.num_workers,
            options=engine_options(options),
            deferred=in_thread and assembler.runs_user_code,
            look_ahead=spec.look_ahead(loader).least,
            drop_last=loader.drop_last,
            in_order=loader.in_order or spec.kind is DatasetKind.ASYNC_ITERABLE,
            base_seed=base_seed,
            worker_init_fn=loader.worker_init_fn,
            context=loader.multiprocessing_context,
            rank=rank,
        )
        if not spec.kind.is_async and loader.num_workers == 0:
            self.counters.placement = "inline"
            link = InlineLink(config, start)
            return Session(link, inline_state=link.state_dict)
        # As in torch, workers that do not persist have a copy of the dataset as of now, and end
        # with the epoch.
        with explained("start the loader"):
            # After a restore, running workers have another state of the dataset and of random
            # generators.
            anew = resumed and spec.reads_in_persistent_workers(loader)
            session = self.placements.open(
                config, start, persistent=loader.persistent_workers, anew=anew
            )
        self.counters.placement = self.placements.where
        if automatic:
            session.send(WorkersRequest(self.search.number))
        return session

    def _tune(self, loader: TorchLoader, session: Session | DeviceStage) -> float:
        """Change the number of workers, if the last batches call for a change.

        Return the time of the next look.
        """
        if not is_automatic(loader):
            return math.inf
        records = self.counters.records(RECORDS)
        if not records:
            return 0.0
        if self.search.look(records, self.setup(loader)):
            session.send(WorkersRequest(self.search.number))
            self._ahead.resize(*self.spec.look_ahead(loader))
        return self.search.next_look
