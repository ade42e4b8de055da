"""The start of an epoch on the consumer's thread: rank and seeds are drawn, an engine session is opened."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterDataPipe

from headrace._core.batches import SessionStart
from headrace._core.consumer.delivery import Delivery, should_pin
from headrace._core.consumer.epoch import Epoch, opened
from headrace._core.consumer.loader_state import Fingerprint, LoaderState
from headrace._core.consumer.order import EpochOrder, encoded
from headrace._core.consumer.planning import Planner
from headrace._core.consumer.progress import EpochProgress
from headrace._core.consumer.restoring import check_fit, check_rank, epoch_start, without_indices_of_others
from headrace._core.descriptors import explained
from headrace._core.device.copy import Copier
from headrace._core.device.pinning import Pinning, pinned
from headrace._core.device.stage import DeviceStage
from headrace._core.device.streams import streams_of
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.config import EngineConfig
from headrace._core.error_policy import error_policy
from headrace._core.failure import Failure, Stage
from headrace._core.interface.kinds import DatasetKind, capabilities
from headrace._core.interface.merged import remainder_of
from headrace._core.interface.replication import is_divided_by_sample, is_replicated
from headrace._core.interface.stream_state import is_stateful
from headrace._core.interface.torch_adapters import without_adapter
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.look_ahead import look_ahead, most_fetches
from headrace._core.open_session import OpenSession
from headrace._core.rankinfo import RankInfo, get_rank_info
from headrace._core.runtime.assembling import AssemblingSession
from headrace._core.runtime.inline import InlineSession
from headrace._core.runtime.select import PlacementSelector
from headrace._core.runtime.thread import ThreadSession
from headrace._core.seeding import batch_seed
from headrace._core.torchcompat.datapipes import PipeSeeds, divide_pipe, seed_pipe
from headrace._core.torchcompat.portable_collate import PortableCollate
from headrace.errors import StateError
from headrace.options import AllOptions, Unset, engine_options
from headrace.telemetry.counters import Counters

TorchLoader: TypeAlias = TorchDataLoader[Any]


class EpochStarter:
    """Starts the epochs of one loader, and owns its engine and the epochs that are open.

    Reads the attributes of torch's loader at each epoch, since they may be set between epochs.

    Args:
        source: the dataset that is fetched from.
        kind: its kind.
        maps: functions that `map` put before the loader's transform.
        options: headrace's own options, checked.
        device: the device that batches are copied to; None for host memory.

    Attributes:
        counters: the loader's counts.
    """

    def __init__(
        self,
        source: Any,
        kind: DatasetKind,
        maps: tuple[Callable[[Any], Any], ...],
        options: AllOptions,
        device: torch.device | None,
    ) -> None:
        self._source = source
        self._kind = kind
        self._maps = maps
        self._options = options
        self._policy = error_policy(options["on_error"])
        self._device = device
        self._next_epoch = 0
        self._epoch_set = False  # by `set_epoch`, since the last iteration began
        self._split_checked = False
        self._kept_seed: int | None = None
        self._pipe_seeds = PipeSeeds()
        self._resumed: LoaderState | None = None  # until the next epoch begins
        self.counters = Counters()
        self._reset()

    def _reset(self) -> None:
        """Make the state in which no engine runs and no epoch is open."""
        self._placements = PlacementSelector(self._options["placement"])
        # At exit, the placements' own hook closes everything, in order.
        weakref.finalize(self, self._placements.close).atexit = False
        self._open_epochs: weakref.WeakSet[Epoch] = weakref.WeakSet()
        self._progress: EpochProgress | None = None  # of the epoch begun last

    def __getstate__(self) -> dict[str, object]:
        left = ("_placements", "_open_epochs", "_progress")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()

    def begin(self, loader: TorchLoader) -> Epoch:
        """Begin the next epoch, or continue the restored one."""
        # The only call; engine and workers are given the result. A process group chosen by the user would be
        # used here.
        rank = get_rank_info()
        resumed = None if self._resumed is None else without_indices_of_others(self._resumed, rank)
        epoch = self._next_epoch if resumed is None else resumed.epoch
        if rank.world_size > 1 and self._kind.is_iterable and not self._split_checked:
            self._check_split(rank)
        propagate_epoch(loader._index_sampler, epoch, only_wanted=resumed is None)
        stream = self._kind.is_iterable
        renumbered = resumed is not None and stream and (bool(resumed.merged) or resumed.ranks != rank.world_size)
        order = EpochOrder(loader, stream=stream, resumed=resumed, renumbered=renumbered)
        if resumed is not None:
            check_rank(resumed, order, rank)
            check_fit(resumed, self._fingerprint(loader, order))
        pipe_seed = self._pipe_seed(loader, epoch, resumed)
        try:
            draws, base_seed = self._draw_seeds(loader, epoch, order, resumed)
        except StateError:
            raise
        except Exception as error:  # user code: the sampler
            raise Failure.caught(error, stage=Stage.SAMPLING, batch=0).exception() from error.__cause__
        begun = resumed or self._state_at_start(loader, order, epoch, base_seed, pipe_seed)
        start = epoch_start(begun, order, rank, stream=stream, remainder=remainder_of(self._source))
        self.counters.begin()
        session = self._open_session(loader, epoch, base_seed, pipe_seed, rank, start.session)
        inline = isinstance(session, InlineSession)
        if resumed is None and self._progress is not None:
            begun = replace(begun, streams=self._progress.kept_streams)  # which the dataset has already
        progress = EpochProgress(
            begun,
            order,
            origin=start.origin,
            ranks=start.ranks,
            workers=0 if self._kind.is_async else loader.num_workers,
            rank=rank,
            of_rank=stream and not is_divided_by_sample(self._source),
            keeps_dataset=self._kind.is_async or not loader.num_workers or loader.persistent_workers,
            before_first=session.state_dict if isinstance(session, InlineSession) else lambda: None,
        )
        planner = Planner(
            draws,
            batched=loader._auto_collation,
            stream=stream,
            base_seed=base_seed,
            epoch=epoch,
            start=start.plans,
            on_plan=progress.on_plan,
            on_exhausted=progress.on_exhausted,
        )
        finalize: Callable[[Any, int], Any] | None
        if self._device is None:
            finalize = Pinning(pinned) if should_pin(loader.pin_memory, loader.pin_memory_device) else None
        else:
            copier = Copier(streams_of(self._device), self._options["device_prefetch"])
            session = stage = DeviceStage(session, copier, self._options["device_prefetch"], opened)
            finalize = stage.claim
        self._resumed, self._next_epoch, self._progress = None, epoch + 1, progress
        opened_epoch = Epoch(
            planner,
            session,
            look_ahead=0 if inline else self._look_ahead(loader),
            together=capabilities(self._source).ranges,
            policy=self._policy,
            stream=self._kind.is_iterable,
            as_torch=not self._kind.is_async,
            timeout=loader.timeout,
            finish=self._delivery(loader, finalize),
            counters=self.counters,
            progress=progress,
            state=functools.partial(self._state_of, progress, loader),
        )
        self._open_epochs.add(opened_epoch)
        return opened_epoch

    def _draw_seeds(
        self, loader: TorchLoader, epoch: int, order: EpochOrder, resumed: LoaderState | None
    ) -> tuple[Iterator[Any], int]:
        """The draws of the sampler, and the seed of the batches' seeds."""
        if resumed is None:
            draws = order.draws()
            if not loader.num_workers or self._kind.is_async or self._kept_seed:
                return draws, self._base_seed(loader)
            base_seed = self._base_seed(loader)
            draws = order.draws()  # torch does so too; it shows where a sampler draws in `__iter__`
            self._pipe_seed(loader, epoch, None)  # as does torch, which uses the first
            return draws, base_seed
        order.restore_generator(resumed)
        if loader.generator is not None:
            self._base_seed(loader)  # so that later epochs draw what they would have drawn
        draws = order.draws()
        if resumed.base_seed is None:
            return draws, self._base_seed(loader)
        if loader.persistent_workers and not self._kind.is_async:
            self._kept_seed = resumed.base_seed
        return draws, resumed.base_seed

    def _fingerprint(self, loader: TorchLoader, order: EpochOrder) -> Fingerprint:
        # Each worker's copy of the dataset has a state of its own, for which there must be a worker.
        copies = self._kind is DatasetKind.ITERABLE or (self._kind is DatasetKind.MAP and is_stateful(self._source))
        readers = loader.num_workers if copies else None
        return Fingerprint(self._kind.value, order.size(), order.describe(), self._options["seed"], readers)

    def _state_at_start(
        self, loader: TorchLoader, order: EpochOrder, epoch: int, base_seed: int | None, pipe_seed: int | None
    ) -> LoaderState:
        drawn = base_seed if self._options["seed"] is None else None
        return LoaderState(epoch, self._fingerprint(loader, order), base_seed=drawn, pipe_seed=pipe_seed)

    def _next_state(self, loader: TorchLoader) -> LoaderState:
        """The state before the next epoch."""
        order = EpochOrder(loader, stream=self._kind.is_iterable)
        state = self._state_at_start(loader, order, self._next_epoch, self._kept_seed, None)
        return replace(state, generator=encoded(order.generator))

    def state(self, loader: TorchLoader, lag: int) -> LoaderState:
        """The state of the iteration begun last, or before the next one if there is none."""
        if self._resumed is not None:
            return self._resumed
        return self._state_of(self._progress, loader, lag)

    def _state_of(self, progress: EpochProgress | None, loader: TorchLoader, lag: int) -> LoaderState:
        if progress is not None and not (progress.over and lag == 0):
            return progress.state(lag)
        if lag:
            raise ValueError(f"lag={lag}: no iteration has begun, so that there is no earlier state")
        fresh = self._next_state(loader)
        return fresh if progress is None else progress.next_state(fresh)

    def restore(self, loader: TorchLoader, state: LoaderState, *, strict: bool) -> None:
        """Continue from `state` at the next `iter()`."""
        order = EpochOrder(loader, stream=self._kind.is_iterable)
        now = self._fingerprint(loader, order)
        try:
            check_fit(state, now)
        except StateError as error:
            if strict:
                raise
            warnings.warn(f"{error.args[0]} Epoch {state.epoch} begins anew.", UserWarning, stacklevel=3)
            state = LoaderState(state.epoch, now)
        self._resumed = state

    def _check_split(self, rank: RankInfo) -> None:
        self._split_checked = True
        if is_replicated(self._source):
            warnings.warn(
                f"each of {rank.world_size} ranks reads all of {type(self._source).__name__}: they train on the same "
                f"samples. Split the stream by its .split() or by headrace.split(), or have it read the part of its "
                f"rank, which headrace.get_rank_info() returns in __aiter__ or __iter__. A stream that is not the same "
                f"on all ranks declares this by an attribute: splits_by_rank = True",
                UserWarning,
                stacklevel=4,
            )

    def _pipe_seed(self, loader: TorchLoader, epoch: int, resumed: LoaderState | None) -> int | None:
        if not isinstance(self._source, IterDataPipe):
            return None
        seed = self._options["seed"]
        drawn = self._pipe_seeds.draw(loader.generator) if seed is None else batch_seed(seed, epoch, 0) >> 1
        if resumed is not None and resumed.pipe_seed is not None:
            drawn = resumed.pipe_seed
        seed_pipe(self._source, drawn)
        return drawn

    def _base_seed(self, loader: TorchLoader) -> int:
        if self._options["seed"] is not None:
            return self._options["seed"]
        # As torch does, and in the same place, so that the same torch.manual_seed gives the same order: at each iter(),
        # but only once for workers that persist.
        if self._kept_seed is None:
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
            if not (loader.persistent_workers and not self._kind.is_async):
                return drawn
            self._kept_seed = drawn
        return self._kept_seed

    def _look_ahead(self, loader: TorchLoader) -> int:
        # A fetch that is begun again takes twice the usual time and a bit, in which the others must not run dry.
        covered = most_fetches(self._options) * (3 if self._options["hedge"] else 1)
        one_or_many = 1 if self._kind.is_iterable else covered
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        ahead = look_ahead(
            prefetch_factor=None if isinstance(loader.prefetch_factor, Unset) else loader.prefetch_factor,
            num_workers=loader.num_workers,
            concurrency=one_or_many if self._kind.is_async else 0,
            batch_size=batch_size,
        )
        if isinstance(loader.prefetch_factor, Unset | None) and capabilities(self._source).ranges:
            ahead = max(ahead, getattr(loader.sampler, "samples_ahead", 0) // (batch_size or 1))
        # What waits on the device has left the workers nothing to do: it does not count.
        return ahead if self._device is None else ahead + self._options["device_prefetch"]

    def _open_session(
        self,
        loader: TorchLoader,
        epoch: int,
        base_seed: int,
        pipe_seed: int | None,
        rank: RankInfo,
        start: SessionStart,
    ) -> OpenSession:
        # A torch dataset without `wants_epoch` gets the epoch by `loader.set_epoch` alone, as in torch.
        set_epoch, self._epoch_set = self._kind.is_async or self._epoch_set, False
        only_wanted = not (self._kind.is_async or (set_epoch and start.batch))
        self._placements.set_epoch(self._source, epoch, only_wanted=only_wanted)
        options = self._options
        transforms = self._maps if options["transform"] is None else (*self._maps, options["transform"])
        collate_fn = loader.collate_fn.collate if isinstance(loader.collate_fn, PortableCollate) else loader.collate_fn
        assembler = Assembler(transforms, collate_fn, loader._auto_collation, self._policy.tolerance)
        if not self._kind.is_async and loader.num_workers == 0:
            self.counters.placement = "inline: a torch dataset with num_workers=0 is read in the caller's thread"
            iterable = self._kind.is_iterable
            divide_pipe(self._source, rank)
            return InlineSession(
                self._source,
                iterable=iterable,
                assembler=assembler,
                drop_last=loader.drop_last,
                epoch=epoch,
                rank=rank,
                start=start,
                seeds=options["seed"] is not None,
            )
        if options["seed"] is not None and not self._kind.is_async:
            # For workers that seed themselves by torch's rule: they draw differently in each epoch and rank.
            base_seed += (epoch * rank.world_size + rank.rank) * loader.num_workers
        deferred = not loader.num_workers and options["placement"] != "process" and assembler.runs_user_code
        config = EngineConfig(
            dataset=self._source,
            kind=self._kind,
            assembler=assembler,
            num_workers=loader.num_workers,
            options=engine_options(options),
            deferred=deferred,
            look_ahead=self._look_ahead(loader),
            batched=loader._auto_collation,
            drop_last=loader.drop_last,
            in_order=loader.in_order,
            base_seed=base_seed,
            common_seed=options["seed"] or 0,
            worker_init_fn=loader.worker_init_fn,
            context=loader.multiprocessing_context,
            rank=rank,
            pipe_seed=pipe_seed,
            seeds_batches=options["seed"] is not None,
        )
        # As in torch, workers that do not persist hold a copy of the dataset as it is now, and end with the epoch.
        persistent = loader.persistent_workers
        with explained("start the loader"):
            session: OpenSession = self._placements.open(
                config, epoch, set_epoch=set_epoch, persistent=persistent, start=start
            )
        self.counters.placement = self._placements.where
        if isinstance(session, ThreadSession) and (deferred or config.steps_on_consumers_thread):
            return AssemblingSession(session, self._source, assembler, rank)
        return session

    def _delivery(self, loader: TorchLoader, finalize: Callable[[Any, int], Any] | None) -> Delivery:
        return Delivery(
            finalize=finalize,
            dataset=without_adapter(loader.dataset),
            announced=loader._IterableDataset_len_called,  # set by torch's `__len__`, of streams only
            copies=loader.num_workers > 0 and not self._kind.is_async,
        )

    def set_epoch(self, loader: TorchLoader, epoch: int) -> None:
        """Set the next epoch's number, also of samplers and of the dataset; not while a restored epoch is pending."""
        self._epoch_set = True
        if self._resumed is not None:
            return
        self._next_epoch = epoch
        for part in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            propagate_epoch(part, epoch)
        self._placements.set_epoch(self._source, epoch, only_wanted=False)

    def close_epochs(self) -> None:
        """Close the open epochs; does not wait."""
        for epoch in list(self._open_epochs):
            epoch.close()

    def close_engine(self) -> None:
        """End the engine and its workers; blocks until they have ended."""
        self._placements.close()
