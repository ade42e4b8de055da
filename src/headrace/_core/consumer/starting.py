"""The start of an epoch on the consumer's thread: its order, seeds, session and planner are put together."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from headrace._core.consumer.agreement import Coordinator
from headrace._core.consumer.data_parallel_checks import check_data_parallel
from headrace._core.consumer.delivery import Delivery, opened, should_pin
from headrace._core.consumer.epoch import Epoch
from headrace._core.consumer.iterators import BatchIterator
from headrace._core.consumer.lane_choice import LaneChoice
from headrace._core.consumer.lane_turns import LaneTurns
from headrace._core.consumer.lightning_loops import Request
from headrace._core.consumer.opening import SessionOpener
from headrace._core.consumer.order import EpochOrder, TorchLoader
from headrace._core.consumer.planning import Planner
from headrace._core.consumer.position import LoaderPosition
from headrace._core.consumer.progress import EpochProgress
from headrace._core.consumer.restoring import (
    batches_before,
    check_fit,
    check_rank,
    ended_state,
    epoch_start,
    is_renumbered,
    of_rank,
    without_indices_of_others,
)
from headrace._core.consumer.stream_checks import StreamChecks
from headrace._core.data_parallel import group_of, rank_among
from headrace._core.device.copy import Copier
from headrace._core.device.pinning import Pinning, pinned
from headrace._core.device.stage import DeviceStage
from headrace._core.device.streams import streams_of
from headrace._core.error_policy import error_policy
from headrace._core.failure import Failure, Stage
from headrace._core.interface.kinds import DatasetKind, capabilities
from headrace._core.interface.merged import remainder_of
from headrace._core.interface.order import counted_epoch
from headrace._core.interface.replication import is_divided_by_sample
from headrace._core.interface.torch_adapters import without_adapter
from headrace._core.interface.traversal import propagate_epoch, translates_epochs
from headrace._core.rankinfo import RankInfo, provided_rank
from headrace._core.runtime.inline import InlineSession
from headrace.errors import StateError
from headrace.options import AllOptions
from headrace.telemetry.counters import Counters
from headrace.telemetry.limits import Setup

if TYPE_CHECKING:
    from headrace.telemetry.report import Report

_ALONE = contextlib.nullcontext()
_log = logging.getLogger("headrace")


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
        position: its position.
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
        self._options = options
        self._policy = error_policy(options["on_error"])
        self._device = device
        self._stream_checks = StreamChecks(source, kind)
        self._prepared: int | None = None  # Lightning's number of the epoch for which it began the last iteration
        self._gave_end = False  # whether the iteration before the restored one was begun
        self.position = LoaderPosition(source, kind, options)
        self.counters = Counters(type(source).__qualname__)
        self._lanes = LaneChoice(source, kind, options)
        self._sessions = SessionOpener(source, kind, maps, options, self._policy, device, self.counters, self._lanes)
        self._reset()

    def _reset(self) -> None:
        self._open_epochs: weakref.WeakKeyDictionary[Epoch, int] = weakref.WeakKeyDictionary()  # and their numbers
        self._coordinator = Coordinator()

    def __getstate__(self) -> dict[str, object]:
        left = ("_open_epochs", "_coordinator")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        # A copy of a loader has an engine, a position and counts of its own.
        self.position, self._sessions = copy.copy(self.position), copy.copy(self._sessions)
        self.counters = copy.copy(self.counters)
        self._sessions.set_counters(self.counters)
        self._reset()

    def start_early(self, loader: TorchLoader) -> None:
        """Start what the first epoch would wait for."""
        self._sessions.start_early(loader)

    def follow(self, loader: TorchLoader, rank: RankInfo, asked: Request) -> bool:
        """Let the next `begin` begin where Lightning is; returns whether it must be given an empty iteration first.

        It ends an epoch when each of several loaders has ended once, and does not save which of them have.
        """
        position = self.position
        if asked.state is not None and not position.resumed:
            loader.load_state_dict(asked.state)  # type: ignore[attr-defined]
        if position.resumed:
            if asked.skips_rest or asked.reads_nothing:
                position.resumed = tuple(ended_state(state) for state in position.resumed)
            self._recount(loader, rank, asked)
            if asked.skips_rest:
                for _ in BatchIterator(self.begin(loader, rank, for_lightning=True), loader):
                    raise AssertionError("an epoch that is over gave a batch")
            ended_once = any(state.batches < asked.trained and not state.over for state in position.resumed)
            self._gave_end = asked.cycles and ended_once and not self._gave_end
            return self._gave_end
        if asked.trained and not (asked.has_states or asked.skips_rest or asked.reads_nothing):
            asked.warn_of_missing_state()
        is_new = position.progress is None and not position.next_epoch
        if asked.epoch is not None and (asked.evaluates or is_new):
            self.set_epoch(loader, asked.epoch)
        elif asked.begins and asked.epoch == self._prepared:  # the iteration before was not read
            self.set_epoch(loader, position.next_epoch - 1)
        if asked.prepares or asked.begins:
            self._prepared = asked.epoch if asked.prepares else None
        return False

    def _recount(self, loader: TorchLoader, rank: RankInfo, asked: Request) -> None:
        """Correct Lightning's number of batches for a state of another number of ranks or another batch size."""
        order, state = EpochOrder(loader, stream=self._kind.is_iterable), of_rank(self.position.resumed, rank)
        with self.counted():
            before = batches_before(loader, order, state, rank)
        if before is not None and before != asked.trained:
            asked.recount(before, saved_ranks=state.ranks, ranks=rank.world_size)

    @contextlib.contextmanager
    def ranked(self) -> Iterator[RankInfo]:
        """The rank of this process; with `data_parallel`, also the result of `get_rank_info` inside the block."""
        data_parallel = self._options["data_parallel"]
        rank = rank_among(data_parallel)
        with contextlib.nullcontext() if data_parallel is None else provided_rank(rank):
            yield rank

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """The process group of `data_parallel`; None without it."""
        return group_of(self._options["data_parallel"])

    def begin(self, loader: TorchLoader, rank: RankInfo, *, for_lightning: bool = False) -> Epoch:
        """Begin the next epoch, or continue the restored one.

        Args:
            loader: the loader.
            rank: of this process, from `ranked`; engine and workers are given it, and do not determine it again.
            for_lightning: whether Lightning's number of the epoch may reach samplers later than this.
        """
        coordinated = self._options["coordinated"] and rank.world_size > 1
        with self._coordinator.agreement(rank, self.group, loader.timeout) if coordinated else _ALONE as agreement:
            if self._options["data_parallel"] is not None:
                check_data_parallel(loader, rank, seed=self._options["seed"], stream=self._kind.is_iterable)
            position = self.position
            resumed = without_indices_of_others(of_rank(position.resumed, rank), rank) if position.resumed else None
            epoch = position.next_epoch if resumed is None else resumed.epoch
            self._stream_checks.check(rank, loader.num_workers)
            # A sampler whose epoch the program sets, or never does, keeps it; within an epoch it is in the state.
            between = resumed is None or resumed.is_between_epochs
            keeps = between and not for_lightning and (resumed is None or not self._sessions.epoch_set)
            saved = None if resumed is None or between else resumed.sampler_epoch
            propagate_epoch(loader._index_sampler, epoch if saved is None else saved, only_wanted=keeps)
            stream = self._kind.is_iterable
            renumbered = resumed is not None and stream and is_renumbered(resumed, rank)
            order = EpochOrder(loader, stream=stream, resumed=resumed, renumbered=renumbered, at_once=for_lightning)
            if resumed is not None:
                check_rank(resumed, order, rank)
                check_fit(resumed, position.fingerprint(loader, order))
            continued = order.resumed
            pipe_seed = position.seeds.draw_for_pipe(loader, epoch, continued)
            try:
                draws, base_seed = position.seeds.draw(loader, epoch, order, resumed)
            except StateError:
                raise
            except Exception as error:  # user code: the sampler
                raise Failure.caught(error, stage=Stage.SAMPLING, batch=0).exception() from error.__cause__
            begun = position.state_at_start(loader, order, epoch, base_seed, pipe_seed)
            if continued is not None:
                begun = continued if continued.base_seed is not None else continued._replace(base_seed=begun.base_seed)
            elif resumed is not None:
                begun = begun._replace(streams=resumed.streams)
            begun = begun._replace(lanes=self._lanes.of_epoch(continued))
            start = epoch_start(begun, order, rank, stream=stream, remainder=remainder_of(self._source))
            self.counters.begin()
            session = self._sessions.open(loader, epoch, base_seed, pipe_seed, rank, start.session)
            _log.debug(
                "epoch %d begins with batch %d, on rank %d of %d: %s; %d workers, %d batches ahead",
                epoch,
                start.session.batch,
                rank.rank,
                rank.world_size,
                self.counters.placement,
                loader.num_workers,
                self._sessions.look_ahead(loader),
            )
            inline = isinstance(session, InlineSession)
            if resumed is None and position.progress is not None:
                begun = begun._replace(streams=position.progress.kept_streams)  # which the dataset has already
            progress = EpochProgress(
                begun,
                order,
                streams=begun.streams if begun.merged or resumed is None else start.session.streams,
                origin=start.origin,
                ranks=start.ranks,
                workers=(begun.lanes or 0) if self._kind.is_async else loader.num_workers,
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
                turns=LaneTurns(start.session) if start.session.lanes > 1 else None,
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
            position.begin(epoch, progress)
            opened_epoch = Epoch(
                planner,
                session,
                look_ahead=None if inline else self._sessions.plan_ahead(loader),
                together=self._kind.is_iterable or capabilities(self._source).ranges,
                bounded_engines=self._sessions.bounded_engines,
                policy=self._policy,
                stream=self._kind.is_iterable,
                as_torch=not self._kind.is_async,
                timeout=loader.timeout,
                finish=self._delivery(loader, finalize),
                counters=self.counters,
                progress=progress,
                state=functools.partial(position.state_of, progress, loader),
                rank=rank,
                agreement=agreement,
            )
            self._open_epochs[opened_epoch] = epoch
            return opened_epoch

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Let streams have the length of the epoch under way; without one, of that which the next `begin` begins."""
        if not self._kind.is_iterable or translates_epochs(self._source):
            yield
            return
        under_way = [number for epoch, number in list(self._open_epochs.items()) if not epoch.closed]
        token = counted_epoch.set(under_way[-1] if under_way else self.position.next_epoch)
        try:
            yield
        finally:
            counted_epoch.reset(token)

    def batches(self, loader: TorchLoader) -> int | None:
        """The number of batches of an epoch of a stream that is read by lanes; None of any other dataset."""
        return self._lanes.batches(loader.dataset, loader.batch_size, drop_last=loader.drop_last)

    def report(self, loader: TorchLoader) -> Report:
        """The report on the iteration begun last."""
        from headrace.telemetry.report import make_report

        return make_report(self.counters.log.records(), self.setup(loader))

    def setup(self, loader: TorchLoader) -> Setup:
        """The arguments that decide on the loader's speed."""
        return self._sessions.setup(loader)

    def on_device(self, device: torch.device | None) -> EpochStarter:
        """A copy whose batches go to another device."""
        clone = copy.copy(self)
        clone._device = device
        clone._sessions.set_device(device)
        return clone

    def _delivery(self, loader: TorchLoader, finalize: Callable[[Any, int], Any] | None) -> Delivery:
        dataset = without_adapter(loader.dataset)
        asked = loader._IterableDataset_len_called is not None  # set by torch's `__len__`, of streams only
        return Delivery(
            finalize=finalize,
            dataset=dataset,
            announced=len(dataset) if asked else None,
            copies=loader.num_workers > 0 and not self._kind.is_async,
        )

    def set_epoch(self, loader: TorchLoader, epoch: int) -> None:
        """Set the next epoch's number, also of samplers and of the dataset; not while a restored epoch is pending."""
        self._sessions.epoch_set = True
        if self.position.resumed:
            return
        self.position.set_epoch(epoch)
        for part in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            propagate_epoch(part, epoch)
        self._sessions.set_epoch(epoch)

    def close_epochs(self) -> None:
        """Close the open epochs; does not wait."""
        for epoch in list(self._open_epochs):
            epoch.close()

    def close_engine(self) -> None:
        """End the engine and its workers; blocks until they have ended."""
        self._coordinator.close()
        self._sessions.close()
