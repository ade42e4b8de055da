"""The control of a loader: it begins the epochs, and has their number, their position, and the engine.

`DataLoader` and the integrations of trainers use a loader by it. Its public methods are this interface: the position
(`states`, `restore`, `pending`, `last_point`), the next epoch (`next_epoch`, `set_epoch`, `skip`,
`skip_rest`), what is left of it (`batches_left`), and its start (`ranked`, `begin`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DistributedSampler

from headrace._core.cgroup import usable_cores
from headrace._core.consumer.agreement import StepGroup, begin_agreement, close_all
from headrace._core.consumer.deliver import Finish, checked_length, opened, should_pin
from headrace._core.consumer.epoch import Epoch
from headrace._core.consumer.next_epoch import NextEpoch, NextEpochReader
from headrace._core.consumer.worker_search import RECORDS, EngineSearch, WorkerChanges, WorkerSearch
from headrace._core.descriptors import explained
from headrace._core.device.copy import Copier
from headrace._core.device.pinning import pin
from headrace._core.device.stage import DeviceStage
from headrace._core.device.streams import streams_of
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.config import EngineConfig
from headrace._core.links.inline import InlineLink
from headrace._core.links.placement import snapshot
from headrace._core.links.select import PlacementSelector
from headrace._core.links.session import Session
from headrace._core.look_ahead import (
    MOST_OF_A_WORKER,
    MOST_SMALL,
    LookAheadSize,
    look_ahead,
    most_ahead,
    most_concurrency,
    most_fetches,
)
from headrace._core.messages import Begin, TraceRequest
from headrace._core.order.lanes import LaneChoice
from headrace._core.order.order import EpochOrder
from headrace._core.order.progress import EpochProgress
from headrace._core.order.restore import (
    EpochSeeds,
    EpochSpec,
    batches_before,
    check_data_parallel,
    check_fit,
    check_rank,
    check_reading,
    epoch_spec,
    of_rank,
)
from headrace._core.order.spec import LoaderSpec, TorchLoader
from headrace._core.order.state import Fingerprint, LoaderState, Past, Run, encoded
from headrace._core.pool.launch import start_early
from headrace._core.ranks.data_parallel import group_of, rank_among
from headrace._core.ranks.rankinfo import RankInfo, bound, provided_rank, ranks_on_host
from headrace._core.ray_placement import RayPlacement
from headrace._core.streams.epochs import counted_epoch, session_seed
from headrace._core.streams.kinds import (
    DatasetKind,
    capabilities,
    given_rank,
    propagate_epoch,
    translates_epochs,
    walk_datasets,
)
from headrace._core.streams.other_ranks import remainder_of
from headrace._core.streams.resumable import is_stateful
from headrace._core.streams.torch_views import without_adapter
from headrace._core.text import warn_user
from headrace._core.torchcompat.datapipes import divide_pipe
from headrace._core.torchcompat.portable_collate import PortableCollate
from headrace._core.torchcompat.private import batches_skipped_by_hook
from headrace.errors import NotPicklableError, StateError
from headrace.options import Automatic, Unset, engine_options
from headrace.telemetry.counters import Counters

if TYPE_CHECKING:
    from headrace.telemetry.diagnosis import Setup

E = TypeVar("E", bound=Epoch)
_log = logging.getLogger("headrace")


def copied(loader: Any) -> Any:
    """A copy of a loader, with samplers of its own."""
    clone = copy.copy(loader)
    batches, sampler = copy.copy(loader.batch_sampler), copy.copy(loader.sampler)
    if getattr(batches, "sampler", None) is not None:
        batches.sampler = sampler = copy.copy(batches.sampler)
    clone.__dict__.update(batch_sampler=batches, sampler=sampler)
    return clone


trainers: list[Any] = []
"""The trainers that run in this process, and cannot call the loader themselves.

Their `begins(loader)` sets the position of a loader whose iteration begins; it returns whether that has to be empty.
"""


class LoaderControl:
    """The epochs of one loader, and its engine. A copy, as a copy of the loader has, has begun no iteration.

    Reads the attributes of torch's loader at each epoch, since they may be set between epochs.

    Attributes:
        spec: the loader's dataset and options.
        counters: the loader's counts.
        resumed: states that the next `iter()` continues, one of all ranks or one of each; empty if it begins an epoch.
        past: what is known of the steps before the epoch begun last, and what is left out of it.
        progress: of the epoch begun last; None before the first.
    """

    def __init__(self, spec: LoaderSpec, search: WorkerSearch | None = None) -> None:
        self.spec = spec
        self.search = search  # of the number of workers
        self.counters = Counters(type(spec.source).__qualname__)
        self.resumed: tuple[LoaderState, ...] = ()
        self.progress: EpochProgress | None = None
        self._next_epoch = 0
        self.past = Past()
        self._seeds = EpochSeeds(spec)
        self._checked: set[str] = set()  # of the warnings that are given once
        self._lanes = LaneChoice(spec)
        self.engine_search = EngineSearch() if isinstance(spec.options["engines"], Automatic) else None
        self._reset()

    def _reset(self) -> None:
        self._open_epochs: weakref.WeakKeyDictionary[Epoch, int] = weakref.WeakKeyDictionary()  # and their numbers
        self._agreements: list[StepGroup] = []  # one at most
        weakref.finalize(self, close_all, self._agreements)
        self._epoch_set = False  # whether the next epoch's number was set since the last session was opened
        self._ahead: LookAheadSize | None = None
        here = self.search is not None and not self.search.asked
        self._placements = PlacementSelector("here" if here else self.spec.placement, self.spec.engines)
        self._next = NextEpochReader(self._placements)
        self._changes = None if self.search is None else WorkerChanges(self.search, self._placements)
        # At exit, the placements' own hook closes everything, in order.
        weakref.finalize(self, self._placements.drop).atexit = False

    def __getstate__(self) -> dict[str, object]:
        left = ("_open_epochs", "_agreements", "_placements", "_next", "_changes")
        return {name: value for name, value in self.__dict__.items() if name not in left} | {"progress": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._seeds, self.counters = copy.copy(self._seeds), copy.copy(self.counters)
        self.search = None if self.search is None else WorkerSearch(asked=self.search.asked)
        self.engine_search = None if self.engine_search is None else EngineSearch()
        self._reset()

    def with_spec(self, spec: LoaderSpec) -> LoaderControl:
        """A copy with another `spec` of the same dataset."""
        clone = copy.copy(self)
        clone.spec = spec
        clone._reset()
        return clone

    # The position.

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

    def states(self, loader: TorchLoader, lag: int) -> tuple[LoaderState, ...]:
        """The states of the iteration begun last, `lag` batches before the last, or before the next one.

        One of all ranks, or this rank's; or those of each, where these were restored.
        """
        if self.resumed:
            return self.resumed
        return (self._state_of(self.progress, loader, lag),)

    def restore(self, loader: TorchLoader, states: tuple[LoaderState, ...], *, strict: bool) -> None:
        """Continue from a state of all ranks, or this rank's among those of each, at the next `iter()`."""
        now = self._fingerprint(loader, self.order(loader))
        try:
            for state in states:
                check_fit(state, now)
        except StateError as error:
            if strict:
                raise
            epoch = states[0].epoch
            warn_user(f"{error.args[0]} Epoch {epoch} begins anew.")
            states = (LoaderState(epoch, now),)
        self.continue_from(loader, states)

    def continue_from(self, loader: TorchLoader, states: tuple[LoaderState, ...]) -> None:
        """Continue from states that fit, at the next `iter()`."""
        self.resumed = states
        if self.search is not None:
            found = min(states[0].found.get("num_workers", 0), self._cores())
            loader.num_workers = type(loader.num_workers)(max(loader.num_workers, found))
        if self.engine_search is not None:
            found = min(states[0].found.get("engines", 0), self._most_engines(loader))
            self._set_engines(loader, max(self.spec.engines, found))
        self.order(loader).leave_out(states[0].excluded)

    def set_epoch(self, loader: TorchLoader, epoch: int) -> None:
        """Set the next epoch's number, also of samplers and of the dataset; not while a restored epoch is pending."""
        self._epoch_set = True
        if self.resumed:
            return
        self._next_epoch = epoch
        for part in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            propagate_epoch(part, epoch)
        self._placements.set_epoch(self.spec.source, epoch, only_wanted=False)

    def skip(self, loader: TorchLoader, batches: int, ranks: int, since: Run | None = None) -> None:
        """Let the next `iter()`, of a map-style dataset, begin after as many batches on each rank.

        They count from the beginning of the epoch, or of a run of other ranks.
        """
        order = self.order(loader)
        samples = 0 if order.sampler is None else batches * (order.batch_size or 1)  # a batch sampler draws batches
        cursor = samples * order.sampler.num_replicas if order.shared else samples
        fresh = self._next_state(loader)
        if since is not None:
            batches, cursor = since.batches + batches, since.cursor + cursor
        self.resumed = (fresh._replace(batches=batches, samples=samples, cursor=cursor, ranks=ranks, base_seed=None),)

    def skip_rest(self) -> None:
        """Let the next `iter()` begin the epoch after the one that was to be continued."""
        if self.resumed:
            self._next_epoch, self.resumed = self.resumed[0].epoch + 1, ()

    def is_of_rank(self, loader: TorchLoader) -> bool:
        """Whether each rank has a state of its own; the same on all ranks."""
        if self.spec.kind.is_iterable:
            return not getattr(self.spec.source, "divides_samples", False)
        order = self.order(loader)
        of_all_ranks = order.is_by_arithmetic or isinstance(order.sampler, DistributedSampler) or order.samples_at_most
        return not (loader.in_order and of_all_ranks)

    def batches_left(self, loader: TorchLoader, rank: RankInfo) -> int | None:
        """The number of batches of the restored epoch that are left on this rank; None if it is unknown."""
        state = of_rank(self.resumed, rank, remainder_of(self.spec.source))
        with self.counted():
            before = batches_before(loader, self.order(loader), state, rank)
            return None if before is None else len(loader) - before

    def order(self, loader: TorchLoader) -> EpochOrder:
        return EpochOrder(loader, stream=self.spec.kind.is_iterable)

    def _state_of(self, progress: EpochProgress | None, loader: TorchLoader, lag: int) -> LoaderState:
        """The state of an iteration (None before the first), after its last call of `next()` or `lag` calls before."""
        state = self._position_of(progress, loader, lag)
        search = self.search
        number = 0 if search is None else search.proposed or int(loader.num_workers)
        workers = {"num_workers": number} if number or (search is not None and search.asked) else {}
        engines = {} if self.engine_search is None else {"engines": self.spec.engines}
        return state._replace(found={**state.found, **workers, **engines})

    def _position_of(self, progress: EpochProgress | None, loader: TorchLoader, lag: int) -> LoaderState:
        if progress is not None and not (progress.over and lag == 0):
            return progress.state(lag)
        if lag:
            raise ValueError(f"lag={lag}: no iteration has begun, so that there is no earlier state")
        fresh = self._next_state(loader)
        return fresh if progress is None else progress.next_state(fresh)

    def _next_state(self, loader: TorchLoader) -> LoaderState:
        """The state before the next epoch."""
        order = self.order(loader)
        sampler, generator = order.sampler_between_epochs(), encoded(order.generator)
        drawn = {"base_seed": self._seeds.ahead(loader), "kept_seed": self._seeds.kept}
        return self._fresh(loader, order, self._next_epoch, generator=generator, sampler=sampler, **drawn)

    def _fresh(self, loader: TorchLoader, order: EpochOrder, epoch: int, **drawn: Any) -> LoaderState:
        drawn |= {"sampler_epoch": order.sampler_epoch, **self.past._asdict()}
        return LoaderState(epoch, self._fingerprint(loader, order), **drawn)

    def _fingerprint(self, loader: TorchLoader, order: EpochOrder) -> Fingerprint:
        """The properties of the loader that a state has to fit."""
        kind = self.spec.kind
        # Each worker's copy of the dataset has a state of its own, for which there must be a worker.
        copies = kind is DatasetKind.ITERABLE or (kind is DatasetKind.MAP and is_stateful(self.spec.source))
        readers = loader.num_workers if copies else None
        return Fingerprint(kind.value, order.size(), order.describe(), self.spec.options["seed"], readers)

    # An epoch.

    def start_early(self, loader: TorchLoader) -> None:
        """Start the process that forks the engine and its workers, if there will be any."""
        placement = self.spec.placement
        if not self.spec.kind.is_async or isinstance(placement, RayPlacement) or loader.multiprocessing_context:
            return
        with_workers = placement == "auto" or self.spec.options["executor"] == "process"
        if placement == "process" or (loader.num_workers > 0 and with_workers):
            start_early()

    @contextlib.contextmanager
    def ranked(self) -> Iterator[RankInfo]:
        """The rank of this process, or the one that a stream was given in place of it.

        With `data_parallel` it is also the result of `get_rank_info` inside the block.
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

    def begin(self, kind: type[E], loader: TorchLoader, rank: RankInfo, *, late_epoch: bool = False) -> E:
        """Begin the next epoch, or continue the restored one: an iterator of the class `kind`.

        Engine and workers are given the `rank`, from `ranked`, and do not determine it again. With `late_epoch` a
        trainer's number of the epoch may reach samplers later than this.
        """
        search, agreement = self.search, None
        if search is not None and not search.moves and loader.num_workers:  # which another loader has found
            search.proposed, loader.num_workers = int(loader.num_workers), Unset(0)
        if self.spec.options["coordinated"] and rank.world_size > 1:
            agreement = begin_agreement(self._agreements, rank, self.group, loader.timeout or None)
        if self.engine_search is not None and not self.resumed and self.progress is not None and self.progress.over:
            self._tune_engines(loader, self.engine_search)
        follows = loader.persistent_workers or (self.progress is not None and self.progress.over)
        try:
            spec = self.next_spec(loader, rank, late_epoch=late_epoch)
            epoch = self.open(kind, loader, spec, agreement)
        except Exception as error:
            if agreement is not None:  # the other ranks would wait for it
                agreement.leave(error)
            raise
        if follows and self._next.reads and self._next_is_known(spec.order):
            epoch.read_next = functools.partial(self._read_next, loader, spec, late_epoch, snapshot(self.spec.source))
        return epoch

    def next_spec(self, loader: TorchLoader, rank: RankInfo, *, late_epoch: bool) -> EpochSpec:
        seed, stream = self.spec.options["seed"], self.spec.kind.is_iterable
        skipped = 0 if self.resumed else batches_skipped_by_hook(loader)
        if skipped:
            if stream or (seed is not None and not self._epoch_set):
                raise StateError(
                    f"a library lets torch's iterators begin after {skipped} batches, which the loader of a stream "
                    f"cannot, and one with seed= only after set_epoch(epoch). Save loader.state_dict() instead"
                )
            self.skip(loader, skipped, rank.world_size)
        if self.spec.options["data_parallel"] is not None:
            check_data_parallel(loader, rank, seed)
        remainder = remainder_of(self.spec.source)
        resumed = of_rank(self.resumed, rank, remainder) if self.resumed else None
        epoch = self._next_epoch if resumed is None else resumed.epoch
        check_reading(self.spec, loader, rank, self._checked)
        # A sampler whose epoch the program sets, or never does, keeps it; within an epoch it is in the state.
        between = resumed is None or resumed.is_between_epochs
        keeps = skipped > 0 or (between and not late_epoch and (resumed is None or not self._epoch_set))
        saved = None if resumed is None or between else resumed.sampler_epoch
        propagate_epoch(loader._index_sampler, epoch if saved is None else saved, only_wanted=keeps)
        renumbered = False  # a stream continues with other readers than before: its samples are numbered anew
        if resumed is not None and stream:
            renumbered = (bool(resumed.merged) and not resumed.streams) or resumed.ranks != rank.world_size
        order = EpochOrder(loader, stream=stream, resumed=resumed, renumbered=renumbered, at_once=late_epoch)
        if resumed is not None:
            self.past = resumed.past
            check_rank(resumed, order, rank)
            check_fit(resumed, self._fingerprint(loader, order))
        order.leave_out(self.past.excluded)
        continued = order.resumed
        drawn = self._seeds.draw(loader, epoch, order, resumed)
        base_seed = drawn[1] if seed is None else None
        if continued is None:
            begun = self._fresh(
                loader, order, epoch, base_seed=base_seed, pipe_seed=drawn[2], sampler=order.sampler_at_start
            )
            if resumed is not None:
                begun = begun._replace(streams=resumed.streams, found=resumed.found)
        else:
            begun = continued if continued.base_seed is not None else continued._replace(base_seed=base_seed)
        begun = begun._replace(lanes=self._lanes.of_epoch(continued))
        begun = begun.noted(self.past, order.rank_of(rank).world_size, loader.batch_size or 0)
        self.past = begun.past
        spec = epoch_spec(begun, order, drawn, rank)
        if resumed is None and self.progress is not None:  # what the dataset has already
            kept = begun._replace(streams=self.progress.kept_streams, found=self.progress.found)
            spec = replace(spec, begun=kept)
        return spec

    def open(self, iterator: type[E], loader: TorchLoader, spec: EpochSpec, agreement: StepGroup | None) -> E:
        rank = spec.rank
        self.counters.begin()
        session = self._open_session(loader, spec)
        text = "epoch %d begins with batch %d, on rank %d of %d: %s; %d workers, %d batches ahead"
        begun = spec.begun.epoch, spec.begun.batches, rank.rank, rank.world_size
        _log.debug(text, *begun, self.counters.placement, loader.num_workers, self.look_ahead(loader)[0])
        progress = self._progress(loader, spec, session)
        delivers: Session | DeviceStage = session
        finalize: Finish | None
        if self.spec.device is None:
            finalize = pin if should_pin(loader.pin_memory, loader.pin_memory_device) else None
        else:
            ahead = self.spec.options["device_prefetch"]
            delivers = stage = DeviceStage(session, Copier(streams_of(self.spec.device)), ahead, opened)
            finalize = stage.claim
        asked: object = loader._IterableDataset_len_called  # set by torch's `__len__`, of streams only
        if asked is not None:
            copies = loader.num_workers > 0 and not self.spec.kind.is_async
            finalize = checked_length(finalize, without_adapter(loader.dataset), copies=copies)
        self.resumed, self._next_epoch, self.progress = (), spec.begun.epoch + 1, progress
        limits = self.look_ahead(loader)  # what one epoch found is where the next one begins
        self._ahead = LookAheadSize(*limits) if self._ahead is None else self._ahead.resized(*limits)
        # Not in an epoch in which a number of engines is tried: one thing is changed at a time.
        changes = None if self.engine_search is not None and self.engine_search.tries else self._changes
        epoch = iterator(
            loader,
            self.spec,
            spec,
            delivers,
            look_ahead=None if session.inline_state is not None else self._ahead,
            finish=finalize,
            counters=self.counters,
            progress=progress,
            state=functools.partial(self._state_of, progress, loader),
            agreement=agreement,
            tune=None if changes is None else functools.partial(self._tune, loader, changes, session),
        )
        self._open_epochs[epoch] = spec.begun.epoch
        return epoch

    def _progress(self, loader: TorchLoader, spec: EpochSpec, session: Session) -> EpochProgress:
        kind = self.spec.kind
        return EpochProgress(
            spec,
            batched=loader._auto_collation,
            readers=(spec.session.lanes if kind.is_async else loader.num_workers) or 1,
            of_rank=kind.is_iterable and not getattr(self.spec.source, "divides_samples", False),
            keeps_dataset=kind.is_async or not loader.num_workers or loader.persistent_workers,
            before_first=session.inline_state,
            searches=kind is DatasetKind.ASYNC_MAP and self.spec.options["concurrency"] == "auto",
        )

    def _next_is_known(self, order: EpochOrder) -> bool:
        """Whether the next epoch's order is computed here, and read by datasets of which a snapshot tells all."""
        if self.spec.kind is not DatasetKind.ASYNC_MAP or not order.is_by_arithmetic:
            return False
        parts = (order.sampler, *walk_datasets(self.spec.source))
        return all(type(part).__module__.startswith(("headrace.", "torch.utils.")) for part in parts)

    def _read_next(
        self, loader: TorchLoader, spec: EpochSpec, late_epoch: bool, seen: list[object], *load: Any
    ) -> None:
        """Have the first batches of the epoch after `spec` fetched, which began with the dataset as `seen`."""
        if self.resumed or not self._next.reads or self._next_epoch != spec.begun.epoch + 1 or self._ahead is None:
            return
        begin = functools.partial(self._open_next, loader, spec.rank, late_epoch, seen)
        self._next.read(self._next_epoch, begin, self._ahead.batches, *load)

    def _open_next(self, loader: TorchLoader, rank: RankInfo, late_epoch: bool, seen: list[object]) -> NextEpoch | None:
        generator = loader.generator or torch.default_generator
        state = generator.get_state()
        try:
            clone = copied(loader)
            spec = clone._control.next_spec(clone, rank, late_epoch=late_epoch)
        finally:
            generator.set_state(state)  # which is drawn from when the epoch begins
        start = spec.session._replace(set_epoch=True, early=True)
        session = self._placements.open_next(seen, start, loader.num_workers)
        if session is None:
            return None
        session.send(TraceRequest(self.counters.traced))
        can, budget = capabilities(self.spec.source), self.spec.options["memory_budget"]
        calls = self.spec.options["concurrency"] == "auto" and can.agets and not can.ranges and loader._auto_collation
        of_batch = 1 if calls else loader.batch_size or 1
        return NextEpoch(spec, session, self._progress(loader, spec, session), seen, of_batch, can.ranges, budget)

    def _open_session(self, loader: TorchLoader, spec: EpochSpec) -> Session:
        """Open a session on the engine that runs, or on a new one; in the caller's thread where torch reads there."""
        rank, start, base_seed = spec.rank, spec.session, spec.base_seed
        # A torch dataset without `wants_epoch` gets the epoch by `loader.set_epoch` alone, as in torch.
        set_epoch, self._epoch_set = self.spec.kind.is_async or self._epoch_set, False
        only_wanted = not (self.spec.kind.is_async or (set_epoch and start.batch))
        self._placements.set_epoch(self.spec.source, start.epoch, only_wanted=only_wanted)
        start = start._replace(set_epoch=set_epoch)
        options = self.spec.options
        transforms = self.spec.maps if options["transform"] is None else (*self.spec.maps, options["transform"])
        collate_fn = loader.collate_fn.collate if isinstance(loader.collate_fn, PortableCollate) else loader.collate_fn
        assembler = Assembler(transforms, collate_fn, loader._auto_collation, self.spec.policy.tolerance)
        if options["seed"] is not None and not self.spec.kind.is_async:
            # For workers that seed themselves by torch's rule: they draw differently in each epoch and rank.
            base_seed += (start.epoch * rank.world_size + rank.rank) * loader.num_workers
        config = EngineConfig(
            dataset=self.spec.source,
            kind=self.spec.kind,
            assembler=assembler,
            num_workers=loader.num_workers,
            options=engine_options(options),
            deferred=self._defers(loader, assembler),
            look_ahead=self.look_ahead(loader)[0],
            drop_last=loader.drop_last,
            in_order=loader.in_order,
            base_seed=base_seed,
            worker_init_fn=loader.worker_init_fn,
            context=loader.multiprocessing_context,
            rank=rank,
            pipe_seed=spec.pipe_seed,
            lanes=self._lanes.own,
        )
        if not self.spec.kind.is_async and loader.num_workers == 0:
            self.counters.placement = "inline: a torch dataset with num_workers=0 is read in the caller's thread"
            divide_pipe(self.spec.source, rank)
            link = InlineLink(config, start)
            return Session(link, inline_state=link.state_dict)
        if (expected := self._next.take(spec, config, resumed=bool(self.resumed))) is not None:
            if self._changes is not None:
                self._changes.begin(expected)
            expected.send(Begin())
            return expected
        # As in torch, workers that do not persist hold a copy of the dataset as it is now, and end with the epoch.
        persistent = loader.persistent_workers
        with explained("start the loader"):
            try:
                session = self._placements.open(config, start, persistent=persistent)
            except NotPicklableError as error:
                if self.engine_search is None or self.spec.engines == 1:
                    raise
                self.engine_search.end(str(error))
                self._set_engines(loader, 1)
                config = config._replace(deferred=self._defers(loader, assembler))
                session = self._placements.open(config, start, persistent=persistent)
        self.counters.placement = self._placements.where + self._lanes.describe()
        if self._changes is not None:
            self._changes.begin(session)
        return session

    def _defers(self, loader: TorchLoader, assembler: Assembler) -> bool:
        """Whether batches are made in the consumer's thread."""
        in_thread = self.spec.placement in ("auto", "thread") and not loader.num_workers
        return in_thread and assembler.runs_user_code

    def _tune_engines(self, loader: TorchLoader, search: EngineSearch) -> None:
        """Change the number of engines, if the last epoch says so, and no number of workers is being tried."""
        if self.search is not None and self.search.tries:
            return
        number = search.look(self.counters.records(RECORDS), self.setup(loader), self._most_engines(loader))
        if number is not None:
            self._set_engines(loader, number)

    def _most_engines(self, loader: TorchLoader) -> int:
        """As many as have a core beside the trainer and the workers; workers of a given number are divided."""
        most = max(1, self._cores() // 2)
        return min(most, loader.num_workers) if loader.num_workers and self.search is None else most

    def _set_engines(self, loader: TorchLoader, number: int) -> None:
        if number == self.spec.engines:
            return
        self.spec = replace(self.spec, options={**self.spec.options, "engines": Automatic(number)})
        if self.search is not None and number > 1:
            loader.num_workers = Automatic(max(number, loader.num_workers))
        self._next.drop()
        self._placements.change(self.spec.placement, number)

    def _tune(self, loader: TorchLoader, changes: WorkerChanges, session: Session) -> float:
        """Change the number of workers, if the last batches say so; returns when to look again."""
        number = changes.look(session, self.counters.records(RECORDS), self.setup(loader))
        if number is not None:
            loader.num_workers = type(loader.num_workers)(number)
            self._next.drop()  # its engine, or its pool, may be another one
            if self._ahead is not None:
                self._ahead.raise_to(*self.look_ahead(loader))
        return changes.next_look

    def look_ahead(self, loader: TorchLoader) -> tuple[int, int]:
        """How many batches are planned before the one that is delivered: at least, and at most."""
        spec, options = self.spec, self.spec.options
        fetches = most_fetches(options)
        # A fetch that is begun again takes twice the usual time and a bit, in which the others must not run dry.
        concurrency = 1 if spec.kind.is_iterable else fetches * (3 if options["hedge"] else 1)
        batch_size: int | None = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        given = None if isinstance(loader.prefetch_factor, Unset) else loader.prefetch_factor
        concurrency = concurrency if spec.kind.is_async else 0
        workers = max(spec.engines, loader.num_workers)
        least = look_ahead(workers, prefetch_factor=given, concurrency=concurrency, batch_size=batch_size)
        # What a sampler has ahead, so that ranges near each other are read together.
        samples = getattr(loader.sampler, "samples_ahead", 0) if capabilities(spec.source).ranges else 0
        if given is None:
            least = max(least, samples // (batch_size or 1))
        if self._lanes.own > 1:  # so that each of them reads while a batch of it is ready
            least = max(least, 2 * self._lanes.own)
        if spec.device is not None:  # what waits there has left the workers nothing to do: it does not count
            least += options["device_prefetch"]
        if given is None and spec.kind is DatasetKind.ASYNC_ITERABLE:
            return least, max(least, MOST_SMALL)
        if given is None and spec.kind is DatasetKind.MAP and loader.in_order:
            return least, max(least, min(MOST_SMALL, MOST_OF_A_WORKER * loader.num_workers))
        if given is not None or spec.kind is not DatasetKind.ASYNC_MAP or samples:
            return least, least
        return least, most_ahead(least, concurrency=fetches, batch_size=batch_size)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Let streams have the length of the epoch under way; without one, of that which the next `begin` begins."""
        if not self.spec.kind.is_iterable or translates_epochs(self.spec.source):
            yield
            return
        under_way = [number for epoch, number in self.open_epochs if not epoch.closed]
        epoch, seed = under_way[-1] if under_way else self.next_epoch, self.spec.options["seed"]
        with bound(counted_epoch, epoch), bound(session_seed, seed):
            yield

    @property
    def reads_lanes(self) -> bool:
        """Whether the dataset is a stream that is read by lanes, if it has the shards."""
        return self._lanes.possible and self._lanes.wanted > 1

    def batches(self, loader: TorchLoader) -> int | None:
        """The number of batches of an epoch of a stream that is read by lanes; None of any other dataset."""
        return self._lanes.batches(loader.dataset, loader.batch_size, drop_last=loader.drop_last)

    def setup(self, loader: TorchLoader) -> Setup:
        """The arguments that decide on the loader's speed."""
        from headrace.telemetry.diagnosis import Setup

        options = self.spec.options
        least, most = self.look_ahead(loader)
        can = capabilities(self.spec.source)
        hedged = can.ranges or (can.aget and not (can.agets and loader._auto_collation))
        return Setup(
            concurrency=options["concurrency"],
            num_workers=int(loader.num_workers),
            look_ahead=least,
            most_ahead=most,
            batch_size=loader.batch_size,
            in_order=loader.in_order,
            memory_budget=options["memory_budget"],
            placement=self.counters.placement.partition(":")[0],
            stream=self.spec.kind.is_iterable,
            is_async=self.spec.kind.is_async,
            cores=self._cores(),
            most_concurrency=self.spec.engines * most_concurrency(),
            engines=self.spec.engines,
            least_workers=self.spec.engines if self.spec.placement == "process" or self.spec.engines > 1 else 0,
            by_engines=not self.spec.kind.is_iterable or self._lanes.possible,
            executor=options["executor"],
            fixed_look_ahead=not isinstance(loader.prefetch_factor, Unset | None),
            chosen=tuple(said for search in (self.search, self.engine_search) if search for said in search.chosen),
            remedies=frozenset(("hedge",) * hedged).union(
                *(getattr(type(part), "_remedies", ()) for part in walk_datasets(self.spec.source))
            ),
        )

    def _cores(self) -> int:
        """CPUs that the loader may use; of a search those of this rank, among the ranks of the host."""
        placement = self.spec.placement
        if isinstance(placement, RayPlacement):
            return max(1, int(self.spec.engines * placement.cpus_per_engine))
        ranks = 1 if self.search is None and self.engine_search is None else ranks_on_host()
        return max(1, int(usable_cores() / ranks))

    @property
    def open_epochs(self) -> list[tuple[Epoch, int]]:
        """The iterations of this loader that were begun and are still there, with the numbers of their epochs."""
        return list(self._open_epochs.items())

    def close_epochs(self) -> None:
        """Close the open epochs, and the one that is expected; does not wait."""
        for epoch in list(self._open_epochs):
            epoch.close()
        if self._next.drop():
            self._next.reads = False

    def close_engine(self) -> None:
        """End the engine and its workers; blocks until they have ended."""
        close_all(self._agreements)
        self._placements.close()
