"""The sessions of a loader: opened on its engines, of which the number of workers may be searched."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from headrace._core.cgroup import usable_cores
from headrace._core.consumer.worker_search import RECORDS, WorkerSearch
from headrace._core.descriptors import explained
from headrace._core.device.stage import DeviceStage
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.config import EngineConfig
from headrace._core.links.inline import InlineLink
from headrace._core.links.select import PlacementSelector
from headrace._core.links.session import Session
from headrace._core.look_ahead import LookAheadSize, most_concurrency
from headrace._core.messages import WorkersRequest
from headrace._core.order.progress import EpochProgress
from headrace._core.order.spec import LoaderSpec, TorchLoader, is_automatic
from headrace._core.pool.launch import start_early
from headrace._core.ranks.rankinfo import ranks_on_host
from headrace._core.ray_placement import RayPlacement
from headrace._core.seeding import batch_seed
from headrace._core.streams.composition import gives_tables
from headrace._core.streams.kinds import DatasetKind
from headrace._core.torchcompat.portable_collate import without_transform
from headrace.collate import destined
from headrace.options import engine_options
from headrace.telemetry.counters import Counters

if TYPE_CHECKING:
    from headrace.telemetry.diagnosis import Setup


class LoaderSessions:
    """Opens the sessions of one loader, and owns their engines. A copy has none; its search and its counts begin anew.

    Attributes:
        spec: the loader's dataset and options.
        counters: the loader's counts.
        search: of the number of workers, with ``num_workers="auto"``.
    """

    def __init__(self, spec: LoaderSpec, counters: Counters, workers: int = 0) -> None:
        self.spec = spec
        self.counters = counters
        self.search = WorkerSearch(spec.engines, max(spec.engines, workers))  # engines divide the workers
        self._ahead = LookAheadSize(0, 0)  # before the first epoch
        self._placements = PlacementSelector(spec.placement, spec.engines)
        # At exit, the placements' own hook closes everything, in order.
        weakref.finalize(self, self._placements.drop).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return LoaderSessions, (self.spec, Counters(self.counters.name), self.search.number)

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch`."""
        self._placements.set_epoch(self.spec.source, epoch, only_wanted=False)

    def size_ahead(self, loader: TorchLoader) -> LookAheadSize:
        """The look-ahead, with the limits of now: what one epoch has found is where the next one begins."""
        self._ahead.resize(*self.spec.look_ahead(loader))
        return self._ahead

    def close(self) -> None:
        """End the engines and their workers; blocks until they have ended."""
        self._placements.close()

    def start_early(self, loader: TorchLoader) -> None:
        """Start the process that forks the engine and its workers, if there will be any."""
        placement = self.spec.placement
        if not self.spec.kind.is_async or isinstance(placement, RayPlacement) or loader.multiprocessing_context:
            return
        if placement == "process" or loader.num_workers > 0:
            start_early()

    def setup(self, loader: TorchLoader) -> Setup:
        """The arguments that decide on the loader's speed."""
        from headrace.telemetry.diagnosis import Setup

        options = self.spec.options
        return Setup(
            concurrency=options["concurrency"],
            num_workers=loader.num_workers,
            look_ahead=self.spec.look_ahead(loader)[0],
            in_order=loader.in_order,
            memory_budget=options["memory_budget"],
            placement=self.counters.placement.partition(":")[0],
            stream=self.spec.kind.is_iterable,
            cores=self._cores(loader),
            most_concurrency=self.spec.engines * most_concurrency(),
            engines=self.spec.engines,
            fixed_look_ahead=vars(loader)["prefetch_factor"] is not None,
        )

    def _cores(self, loader: TorchLoader) -> int:
        """CPUs that the loader may use; of a search those of this rank, among the ranks of the host."""
        placement = self.spec.placement
        if isinstance(placement, RayPlacement):
            return max(1, int(self.spec.engines * placement.cpus_per_engine))
        return max(1, int(usable_cores() / (ranks_on_host() if is_automatic(loader) else 1)))

    def open(self, loader: TorchLoader, progress: EpochProgress, *, epoch_set: bool, resumed: bool) -> Session:
        """Open a session on the engine that runs, or on a new one; in the caller's thread where torch reads there.

        `epoch_set` says whether the epoch's number was set since the last one.
        """
        rank, start, base_seed = progress.rank, progress.session_start, progress.base_seed
        # A torch dataset without `wants_epoch` gets the epoch by `loader.set_epoch` alone, as in torch.
        set_epoch = self.spec.kind.is_async or epoch_set
        only_wanted = not (self.spec.kind.is_async or (set_epoch and start.batch))
        self._placements.set_epoch(self.spec.source, start.epoch, only_wanted=only_wanted)
        start = start._replace(set_epoch=set_epoch)
        options, automatic = self.spec.options, is_automatic(loader)
        transforms, collate_fn = self.spec.maps, without_transform(loader.collate_fn)
        if options["transform"] is not None:
            transforms = (*transforms, options["transform"])
        tolerance = self.spec.policy.tolerance
        assembler = Assembler(
            transforms,
            destined(collate_fn),
            loader._auto_collation,
            tolerance,
            gives_tables(self.spec.source),
        )
        in_thread = self.spec.placement in ("auto", "thread") and not loader.num_workers
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
            num_workers=self.search.least if automatic else loader.num_workers,
            options=engine_options(options),
            deferred=in_thread and assembler.runs_user_code,
            look_ahead=self.spec.look_ahead(loader)[0],
            drop_last=loader.drop_last,
            in_order=loader.in_order or self.spec.kind is DatasetKind.ASYNC_ITERABLE,
            base_seed=base_seed,
            worker_init_fn=loader.worker_init_fn,
            context=loader.multiprocessing_context,
            rank=rank,
        )
        if not self.spec.kind.is_async and loader.num_workers == 0:
            self.counters.placement = "inline: a torch dataset with num_workers=0 is read in the caller's thread"
            link = InlineLink(config, start)
            return Session(link, inline_state=link.state_dict)
        # As in torch, workers that do not persist hold a copy of the dataset as it is now, and end with the epoch.
        with explained("start the loader"):
            anew = resumed and self.spec.reads_in_persistent_workers(loader)  # whose dataset and generators are others
            session = self._placements.open(config, start, persistent=loader.persistent_workers, anew=anew)
        self.counters.placement = self._placements.where
        if automatic:
            session.send(WorkersRequest(self.search.number))
        return session

    def tune(self, loader: TorchLoader, session: Session | DeviceStage) -> float:
        """Change the number of workers, if the last batches say so; returns when to look again."""
        if not is_automatic(loader):
            return math.inf
        records = self.counters.records(RECORDS)
        if not records:
            return 0.0
        if self.search.look(records, self.setup(loader)):
            session.send(WorkersRequest(self.search.number))
            self.size_ahead(loader)
        return self.search.next_look
