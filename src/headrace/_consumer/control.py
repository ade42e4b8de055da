"""The control of a loader: iterations and engines.

`DataLoader` begins and closes epochs here. The position is in `consumer/position.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from headrace._base.cgroup import usable_cores
from headrace._base.descriptors import explained
from headrace._consumer.agreement import StepGroup, begin_agreement
from headrace._consumer.deliver import Finish, checked_length, opened, should_pin
from headrace._consumer.epoch import Epoch
from headrace._consumer.position import Position
from headrace._consumer.worker_search import RECORDS, WorkerSearch
from headrace._device.copy import Copier, pin
from headrace._device.stage import DeviceStage
from headrace._device.streams import streams_of
from headrace._engine.assemble import Assembler
from headrace._engine.config import EngineConfig
from headrace._engine.look_ahead import LookAheadSize, most_concurrency
from headrace._links.inline import InlineLink
from headrace._links.select import PlacementSelector
from headrace._links.session import Session
from headrace._order.progress import EpochProgress
from headrace._order.spec import LoaderSpec, TorchLoader, is_automatic
from headrace._pool.launch import start_early
from headrace._random.seeding import batch_seed
from headrace._ranks.data_parallel import group_of, rank_among
from headrace._ranks.rankinfo import RankInfo, ranks_on_host, temporary_rank
from headrace._records.messages import WorkersRequest
from headrace._streams.composition import gives_tables
from headrace._streams.kinds import DatasetKind, given_rank
from headrace._streams.torch_views import without_adapter
from headrace._torchcompat.portable_collate import without_transform
from headrace.collate import destined
from headrace.errors import LoaderClosedError
from headrace.options import engine_options
from headrace.telemetry.counters import Counters

if TYPE_CHECKING:
    from headrace.telemetry.diagnosis import Setup

E = TypeVar("E", bound=Epoch)
_log = logging.getLogger("headrace")
trainers: list[Any] = []
"""Trainers in this process which cannot call the loader.

`begins(loader)` of a trainer runs at the beginning of an iteration. `begins` sets the position of
the loader, and returns True if the iteration must be empty."""


class LoaderControl:
    """The iterations and the engines of a loader.

    A copy (in a copy of the loader) has the same position, no iteration and no engine.

    Attributes:
        spec: Dataset and options of the loader.
        position: The position of the loader.
        counters: Counts of the loader.
        search: The search for the number of workers, with ``num_workers="auto"``. A copy begins a
            new search.
        placements: The engines, owned by the control.
    """

    def __init__(
        self, spec: LoaderSpec, position: Position | None = None, workers: int = 0
    ) -> None:
        self.spec = spec
        self.position = Position(spec) if position is None else position
        self.counters = Counters(type(spec.source).__qualname__)
        # Engines divide the workers.
        self.search = WorkerSearch(spec.engines, max(spec.engines, workers))
        self._ahead = LookAheadSize(0, 0)  # empty before the first epoch
        self.placements = PlacementSelector(spec.placement, spec.remote, spec.engines)
        # At exit, the exit hook of the placements closes everything in order.
        weakref.finalize(self, self.placements.drop).atexit = False
        # Open iterations, with the numbers of the epochs.
        self._open_epochs: weakref.WeakKeyDictionary[Epoch, int] = (
            weakref.WeakKeyDictionary()
        )
        self._closings = 0  # number of calls of `close_epochs`
        # Of the last epoch with `coordinated=True`.
        self._agreement: StepGroup | None = None

    def __reduce__(self) -> tuple[object, ...]:
        copied = self.position.copied(self.spec)
        return LoaderControl, (self.spec, copied, self.search.number)

    def with_spec(self, spec: LoaderSpec) -> LoaderControl:
        """Return a copy with another `spec` for the same dataset."""
        return LoaderControl(spec, self.position.copied(spec), self.search.number)

    # An epoch.

    def set_epoch(self, loader: TorchLoader, epoch: int) -> None:
        """Set the number of the next epoch, also of samplers and of the dataset.

        While a restored epoch is pending, no number is set.
        """
        self.position.set_epoch(loader, epoch)
        if not self.position.resumed:
            self.placements.set_epoch(self.spec.source, epoch)

    @contextlib.contextmanager
    def ranked(self) -> Iterator[RankInfo]:
        """The rank of this process, or the rank given to a stream.

        With `data_parallel`, `get_rank_info` returns the same rank inside the block.
        """
        data_parallel = self.spec.options["data_parallel"]
        of_stream = self.spec.kind.is_iterable and data_parallel is None
        rank = (given_rank(self.spec.source) if of_stream else None) or rank_among(
            data_parallel
        )
        with contextlib.nullcontext() if data_parallel is None else temporary_rank(rank):
            yield rank

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """The process group of `data_parallel`; None without it."""
        return group_of(self.spec.options["data_parallel"])

    def begin(
        self,
        kind: type[E],
        loader: TorchLoader,
        rank: RankInfo,
        *,
        late_epoch: bool = False,
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
            previous, timeout = self._agreement, loader.timeout or None
            agreement = begin_agreement(previous, rank, self.group, timeout)
            if agreement is not previous:
                weakref.finalize(self, agreement.close)
            self._agreement = agreement
        try:
            progress = self.position.next_progress(loader, rank, late_epoch=late_epoch)
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

    def open(
        self,
        iterator: type[E],
        loader: TorchLoader,
        progress: EpochProgress,
        agreement: StepGroup | None,
    ) -> E:
        """Open a session for an epoch of `Position.next_progress`, and return the iterator."""
        spec, begun, rank = self.spec, progress.begun, progress.rank
        self.counters.begin()
        session = self._open_session(loader, progress)
        progress.before_first = session.inline_state
        # The look-ahead found in the last epoch is kept, within the present limits.
        least, most = spec.look_ahead(loader)
        self._ahead.resize(least, most)
        _log.debug(
            "epoch %d begins with batch %d, on rank %d of %d: %s; %d workers, %d batches ahead",
            begun.epoch,
            begun.batches,
            rank.rank,
            rank.world_size,
            self.counters.stats.placement,
            loader.num_workers,
            least,
        )
        delivers: Session | DeviceStage = session
        finish: Finish | None = None
        if spec.device is not None:
            copier = Copier(streams_of(spec.device))
            delivers = DeviceStage(
                session, copier, spec.options["device_prefetch"], opened
            )
            finish = delivers.claim
        elif should_pin(loader.pin_memory, loader.pin_memory_device):
            finish = pin
        # Set by `__len__` of torch's loader, only for streams.
        asked: object = loader._IterableDataset_len_called
        if asked is not None:
            copies = spec.copies(loader)
            finish = checked_length(
                finish, without_adapter(loader.dataset), copies=copies > 0
            )
        self.position.begin(progress)
        epoch = iterator(
            loader,
            self.position,
            self.counters,
            progress,
            delivers,
            look_ahead=None if session.inline_state is not None else self._ahead,
            finish=finish,
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
        return [
            (epoch, self._open_epochs[epoch]) for epoch in epochs if epoch is not None
        ]

    def close_epochs(self) -> None:
        """Close the open epochs, without waiting."""
        self._closings += 1
        for epoch, _ in self.open_epochs:
            epoch.close()

    def close_engine(self) -> None:
        """End the engine and the workers, and wait for the end."""
        if self._agreement is not None:
            self._agreement.close()
        self.placements.close()

    # The engine.

    def start_early(self, loader: TorchLoader) -> None:
        """Start the zygote early, if engine or workers will be forks."""
        here = self.spec.remote is None
        forks = self.spec.placement == "process" or loader.num_workers > 0
        if (
            self.spec.kind.is_async
            and here
            and forks
            and not loader.multiprocessing_context
        ):
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
            placement=self.counters.stats.placement,
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
        return max(
            1, int(usable_cores() / (ranks_on_host() if is_automatic(loader) else 1))
        )

    def _open_session(self, loader: TorchLoader, progress: EpochProgress) -> Session:
        """Open a session on the running engine, or on a new engine.

        Without workers, a torch dataset is read in the caller's thread, as in torch.
        """
        spec, options, automatic = self.spec, self.spec.options, is_automatic(loader)
        rank, start, base_seed = progress.rank, progress.session_start, progress.base_seed
        # A torch dataset without `wants_epoch` gets the epoch only from `loader.set_epoch`, as in
        # torch.
        set_epoch = spec.kind.is_async or self.position.epoch_set
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
            base_seeds=self._base_seeds(loader, progress),
            worker_init_fn=loader.worker_init_fn,
            context=loader.multiprocessing_context,
            rank=rank,
        )
        if not spec.kind.is_async and loader.num_workers == 0:
            self.counters.stats.placement = "inline"
            link = InlineLink(config, start)
            return Session(link, inline_state=link.state_dict)
        # As in torch, workers that do not persist have a copy of the dataset as of now, and end
        # with the epoch.
        with explained("start the loader"):
            # After a restore, running workers have another state of the dataset and of random
            # generators.
            anew = bool(self.position.resumed) and spec.reads_in_persistent_workers(
                loader
            )
            session = self.placements.open(
                config, start, persistent=loader.persistent_workers, anew=anew
            )
        self.counters.stats.placement = self.placements.where
        if automatic:
            session.send(WorkersRequest(self.search.number))
        return session

    def _base_seeds(
        self, loader: TorchLoader, progress: EpochProgress
    ) -> Mapping[int | None, int]:
        """Return the seed of each worker, from which torch's rule derives the generators."""
        start, base_seed = progress.session_start, progress.base_seed
        workers = range(loader.num_workers)
        if self.spec.options["seed"] is not None:
            # Workers draw different numbers in each epoch and rank.
            rank = progress.rank
            base_seed += (start.epoch * rank.world_size + rank.rank) * loader.num_workers
            return dict.fromkeys(workers, base_seed)
        base_seeds: dict[int | None, int] = dict.fromkeys(workers, base_seed)
        later = start.batch or (loader.persistent_workers and start.epoch)
        if self.position.resumed and later:
            # New workers must not repeat the draws of earlier workers. If the dataset has a state,
            # a worker without a state has given no batch, and has to repeat its draws.
            new_seed = batch_seed(base_seed, start.epoch, start.batch) >> 1
            base_seeds |= dict.fromkeys(start.streams.keys() or workers, new_seed)
        return base_seeds

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
