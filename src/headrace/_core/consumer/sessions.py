"""The sessions of a loader: opened on its engines, of which the number of workers and of engines may be searched."""

from __future__ import annotations

import copy
import functools
import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace._core.cgroup import usable_cores
from headrace._core.consumer.next_epoch import NextEpochReader
from headrace._core.consumer.worker_search import (
    LOOK_SECONDS,
    RECORDS,
    EngineSearch,
    Search,
    WorkerChanges,
    WorkerSearch,
)
from headrace._core.descriptors import explained
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.config import EngineConfig
from headrace._core.links.inline import InlineLink
from headrace._core.links.select import PlacementSelector
from headrace._core.links.session import ChangingSession, Session
from headrace._core.look_ahead import LookAheadSize, most_concurrency
from headrace._core.messages import Begin, TraceRequest
from headrace._core.order.lanes import LaneChoice
from headrace._core.order.progress import EpochProgress
from headrace._core.order.restore import EpochSpec
from headrace._core.order.spec import LoaderSpec, TorchLoader, drawn_freely
from headrace._core.pool.launch import start_early
from headrace._core.ranks.rankinfo import provided_rank, ranks_on_host
from headrace._core.ray_placement import RayPlacement
from headrace._core.seeding import batch_seed
from headrace._core.streams.kinds import capabilities, walk_datasets
from headrace._core.torchcompat.datapipes import divide_pipe
from headrace._core.torchcompat.portable_collate import PortableCollate
from headrace.collate import destined
from headrace.errors import NotPicklableError
from headrace.options import Automatic, Unset, engine_options
from headrace.telemetry.counters import Counters

if TYPE_CHECKING:
    from headrace.telemetry.diagnosis import Setup

_log = logging.getLogger("headrace")


class LoaderSessions:
    """Opens the sessions of one loader, and owns their engines. A copy has none, and begins both searches anew.

    Attributes:
        spec: the loader's dataset and options; with ``engines="auto"`` it has the present number.
        counters: the loader's counts.
        search: of the number of workers; None where that is given.
        next: the reader of the first batches of the next epoch.
        ahead: the look-ahead of the epoch begun last; None before the first.
    """

    def __init__(self, spec: LoaderSpec, counters: Counters, lanes: LaneChoice, search: WorkerSearch | None) -> None:
        self.spec = spec
        self.counters = counters
        self.search = search
        self._lanes = lanes
        self._engine_search = EngineSearch() if isinstance(spec.options["engines"], Automatic) else None
        self.ahead: LookAheadSize | None = None
        self._here = search is not None and not search.asked  # the engine stays, and has workers by requests
        self._compared: tuple[Callable[[Any], Any], ...] = ()  # the functions that may move to them
        self._placements = PlacementSelector(spec.placement, spec.engines)
        self.next = NextEpochReader(self._placements)
        self._changes = None if search is None else WorkerChanges(search, self._placements)
        # At exit, the placements' own hook closes everything, in order.
        weakref.finalize(self, self._placements.drop).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        search = None if self.search is None else WorkerSearch(asked=self.search.asked)
        return LoaderSessions, (self.spec, copy.copy(self.counters), self._lanes, search)

    def begin_with(self, loader: TorchLoader, found: Mapping[str, int]) -> None:
        """Begin with the numbers that an earlier run has found, as far as there are cores for them."""
        if self.search is not None:
            workers = min(found.get("num_workers", 0), self._cores())
            loader.num_workers = type(loader.num_workers)(max(loader.num_workers, workers))
        if self._engine_search is not None:
            engines = min(found.get("engines", 0), self._most_engines(loader))
            self._set_engines(loader, max(self.spec.engines, engines))

    def found(self, loader: TorchLoader) -> dict[str, int]:
        """The numbers that the searches have found, for a state."""
        search = self.search
        number = 0 if search is None else search.proposed or int(loader.num_workers)
        workers = {"num_workers": number} if number or (search is not None and search.asked) else {}
        return workers if self._engine_search is None else {**workers, "engines": self.spec.engines}

    def open(
        self, loader: TorchLoader, spec: EpochSpec, *, epoch_set: bool, resumed: bool
    ) -> Session | ChangingSession:
        """Open a session on the engine that runs, or on a new one; in the caller's thread where torch reads there.

        `epoch_set` says whether the epoch's number was set since the last one.
        """
        search, functions = self.search, self._functions(loader)
        if search is not None and not search.asked:
            if self._compared and [*map(id, functions)] != [*map(id, self._compared)]:
                search.moves = False
            self._compared = functions
            if not search.moves and loader.num_workers:  # which another loader has found, or for other functions
                search.proposed, loader.num_workers = int(loader.num_workers), Unset(0)
        session = self._open(loader, spec, epoch_set=epoch_set, resumed=resumed)
        return session if self._engine_search is None else ChangingSession(session)

    def open_next(self, loader: TorchLoader, spec: EpochSpec, seen: list[object]) -> Session | None:
        """Open the session of the epoch that is expected next, if the dataset is as it was `seen`."""
        start = spec.session._replace(set_epoch=True, early=True)
        session = self._placements.open_next(seen, start, 0 if self._here else loader.num_workers)
        if session is not None:
            session.send(TraceRequest(self.counters.traced))
        return session

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch`."""
        self._placements.set_epoch(self.spec.source, epoch, only_wanted=False)

    def begin_ahead(self, loader: TorchLoader) -> LookAheadSize:
        """The look-ahead of the epoch that begins: what one epoch has found is where the next one begins."""
        limits, fixed = self.look_ahead(loader), math.isfinite(drawn_freely(loader))
        searches = self.search is not None or self._engine_search is not None
        if self.ahead is None or self.ahead.fixed != fixed:
            self.ahead = LookAheadSize(*limits, fixed=fixed)
        elif not (fixed and searches):
            self.ahead = self.ahead.resized(*limits)
        return self.ahead

    def tuner(
        self, loader: TorchLoader, spec: EpochSpec, session: Session | ChangingSession, progress: EpochProgress
    ) -> Callable[[], float] | None:
        """The function that changes the numbers between two batches; None if none is searched."""
        if self.search is None and self._engine_search is None:
            return None
        return functools.partial(self._tune, loader, spec, session, progress)

    def close(self) -> None:
        """End the engines and their workers; blocks until they have ended."""
        self._placements.close()

    def start_early(self, loader: TorchLoader) -> None:
        """Start the process that forks the engine and its workers, if there will be any."""
        placement = self.spec.placement
        if not self.spec.kind.is_async or isinstance(placement, RayPlacement) or loader.multiprocessing_context:
            return
        with_workers = placement == "auto" or self.spec.options["executor"] == "process"
        if placement == "process" or (loader.num_workers > 0 and with_workers):
            start_early()

    def look_ahead(self, loader: TorchLoader) -> tuple[int, int]:
        """How many batches are planned before the one that is delivered: at least, and at most."""
        return self.spec.look_ahead(loader, self._lanes.own)

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
            chosen=tuple(said for search in (self.search, self._engine_search) if search for said in search.chosen),
            remedies=frozenset(("hedge",) * hedged).union(
                *(getattr(type(part), "_remedies", ()) for part in walk_datasets(self.spec.source))
            ),
        )

    def _cores(self) -> int:
        """CPUs that the loader may use; of a search those of this rank, among the ranks of the host."""
        placement = self.spec.placement
        if isinstance(placement, RayPlacement):
            return max(1, int(self.spec.engines * placement.cpus_per_engine))
        ranks = 1 if self.search is None and self._engine_search is None else ranks_on_host()
        return max(1, int(usable_cores() / ranks))

    def _open(self, loader: TorchLoader, spec: EpochSpec, *, epoch_set: bool, resumed: bool) -> Session:
        rank, start, base_seed = spec.rank, spec.session, spec.base_seed
        # A torch dataset without `wants_epoch` gets the epoch by `loader.set_epoch` alone, as in torch.
        set_epoch = self.spec.kind.is_async or epoch_set
        only_wanted = not (self.spec.kind.is_async or (set_epoch and start.batch))
        self._placements.set_epoch(self.spec.source, start.epoch, only_wanted=only_wanted)
        start = start._replace(set_epoch=set_epoch)
        options = self.spec.options
        *transforms, collate_fn = self._functions(loader)
        tolerance = self.spec.policy.tolerance
        assembler = Assembler(tuple(transforms), destined(collate_fn), loader._auto_collation, tolerance)
        if options["seed"] is not None and not self.spec.kind.is_async:
            # For workers that seed themselves by torch's rule: they draw differently in each epoch and rank.
            base_seed += (start.epoch * rank.world_size + rank.rank) * loader.num_workers
        elif not self.spec.kind.is_async and resumed and (start.batch or (loader.persistent_workers and start.epoch)):
            # Workers that begin anew must not draw again what those before them drew.
            base_seed = batch_seed(base_seed, start.epoch, start.batch) >> 1
        config = EngineConfig(
            dataset=self.spec.source,
            kind=self.spec.kind,
            assembler=assembler,
            num_workers=0 if self._here else loader.num_workers,
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
        if (expected := self.next.take(spec, config, resumed=resumed)) is not None:
            self._give_workers(loader, expected)
            expected.send(Begin())
            return expected
        if resumed and self.spec.reads_in_persistent_workers(loader):  # the workers' dataset and generators are others
            self._placements.change(self.spec.placement, self.spec.engines)
        # As in torch, workers that do not persist hold a copy of the dataset as it is now, and end with the epoch.
        persistent = loader.persistent_workers
        with explained("start the loader"):
            try:
                session = self._placements.open(config, start, persistent=persistent)
            except NotPicklableError as error:
                if self._engine_search is None or self.spec.engines == 1:
                    raise
                self._engine_search.end(str(error))
                self._set_engines(loader, 1)
                config = config._replace(deferred=self._defers(loader, assembler))
                session = self._placements.open(config, start, persistent=persistent)
        self.counters.placement = self._placements.where + self._lanes.describe()
        self._give_workers(loader, session)
        return session

    def _functions(self, loader: TorchLoader) -> tuple[Callable[[Any], Any], ...]:
        """The transforms and the collate function."""
        transform, collate_fn = self.spec.options["transform"], loader.collate_fn
        collate_fn = collate_fn.collate if isinstance(collate_fn, PortableCollate) else collate_fn
        return *self.spec.maps, *(() if transform is None else (transform,)), collate_fn

    def _give_workers(self, loader: TorchLoader, session: Session) -> None:
        """Have the engine's workers make the session's batches, or one to be compared, if it has any by a search."""
        if self._changes is None:
            return
        self._changes.begin(session)
        if not (self._here and loader.num_workers):
            return
        if self._changes.keep(session, loader.num_workers):
            self.counters.placement = (
                "thread: functions moved to workers, and the dataset stays" + self._lanes.describe()
            )
        else:
            loader.num_workers = Unset(0)

    def _defers(self, loader: TorchLoader, assembler: Assembler) -> bool:
        """Whether batches are made in the consumer's thread."""
        in_thread = self.spec.placement in ("auto", "thread") and (self._here or not loader.num_workers)
        return in_thread and assembler.runs_user_code

    def _most_engines(self, loader: TorchLoader) -> int:
        """As many as have a core beside the trainer and the workers; workers of a given number are divided."""
        most = max(1, self._cores() // 2)
        return min(most, loader.num_workers) if loader.num_workers and self.search is None else most

    def _set_engines(self, loader: TorchLoader, number: int) -> None:
        if number == self.spec.engines:
            return
        self.spec = self.spec._replace(options={**self.spec.options, "engines": Automatic(number)})
        if self.search is not None and loader.num_workers:  # which the engines divide
            loader.num_workers = type(loader.num_workers)(max(number, loader.num_workers))
        self.next.drop()
        self._placements.change(self.spec.placement, number)

    def _change_engines(
        self, loader: TorchLoader, spec: EpochSpec, session: ChangingSession, progress: EpochProgress, number: int
    ) -> None:
        """Have other engines make the rest of the epoch's batches, once those that were planned have been taken."""
        before = self.spec.engines
        self._set_engines(loader, number)
        start = spec.session._replace(
            batch=progress.next_number, concurrency=progress.found.get("concurrency", spec.session.concurrency)
        )
        try:
            with provided_rank(spec.rank):
                later = self._open(loader, spec._replace(session=start), epoch_set=False, resumed=False)
        except Exception as error:  # a trial is not worth the epoch, which goes on with those that it has
            assert self._engine_search is not None
            self._engine_search.end(str(error))
            self._set_engines(loader, before)
        else:
            later.send(TraceRequest(self.counters.traced))
            session.change_to(later)

    def _tune(
        self, loader: TorchLoader, spec: EpochSpec, session: Session | ChangingSession, progress: EpochProgress
    ) -> float:
        """Change the number of workers or of engines, if the last batches say so; returns when to look again."""
        self._placements.close_idle()
        records = self.counters.records(RECORDS)
        if not records or records[-1].iteration != self.counters.epochs:
            return 0.0  # until there is a batch of this epoch
        if isinstance(session, ChangingSession) and session.changes:
            return records[-1].returned + LOOK_SECONDS
        setup, looks = self.setup(loader), []
        workers, engines, changes = self.search, self._engine_search, self._changes
        if workers is not None and changes is not None and not (engines is not None and engines.tries):
            if (number := changes.look(session, records, setup)) is not None:
                loader.num_workers = type(loader.num_workers)(number)
                self.next.drop()  # its engine, or its pool, may be another one
                self._changed(loader, engines)
            looks.append(changes.next_look)
        if isinstance(session, ChangingSession) and engines is not None and not (workers is not None and workers.tries):
            if (number := engines.look(records, setup, self._most_engines(loader))) is not None:
                self._change_engines(loader, spec, session, progress, number)
                self._changed(loader, workers)
            looks.append(engines.next_look)
        return min(looks)

    def _changed(self, loader: TorchLoader, other: Search | None) -> None:
        if other is not None:
            other.measure_anew()
        if self.ahead is not None:
            self.ahead.raise_to(*self.look_ahead(loader))
