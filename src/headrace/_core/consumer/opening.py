"""The session of an epoch: the engine's configuration from the loader's arguments, and the place where it runs."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from headrace._core.descriptors import explained
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.config import EngineConfig
from headrace._core.links.inline import InlineLink
from headrace._core.links.select import PlacementSelector
from headrace._core.links.session import Session
from headrace._core.look_ahead import LookAheadSize, look_ahead, most_ahead, most_concurrency, most_fetches
from headrace._core.order.lanes import LaneChoice
from headrace._core.order.restore import EpochSpec
from headrace._core.order.spec import LoaderSpec, TorchLoader
from headrace._core.pool.launch import start_early
from headrace._core.ray_placement import RayPlacement
from headrace._core.streams.kinds import DatasetKind, capabilities
from headrace._core.torchcompat.datapipes import divide_pipe
from headrace._core.torchcompat.portable_collate import PortableCollate
from headrace.options import Unset, engine_options
from headrace.telemetry.counters import Counters

if TYPE_CHECKING:
    from headrace.telemetry.diagnosis import Setup


class SessionOpener:
    """Opens the sessions of one loader, and owns its engine.

    Args:
        spec: the loader's dataset and options.
        counters: the loader's counts, which get the engine's placement.
        lanes: the number of lanes of its epochs.

    Attributes:
        epoch_set: whether the next epoch's number was set since the last session was opened.
    """

    def __init__(self, spec: LoaderSpec, counters: Counters, lanes: LaneChoice) -> None:
        self._spec = spec
        self._lanes = lanes
        self._counters = counters
        self.epoch_set = False
        self._ahead: LookAheadSize | None = None
        self._placements = PlacementSelector(spec.placement, spec.engines)
        # At exit, the placements' own hook closes everything, in order.
        weakref.finalize(self, self._placements.drop).atexit = False

    def start_early(self, loader: TorchLoader) -> None:
        """Start the process that forks the engine and its workers, if there will be any."""
        if (
            not self._spec.kind.is_async
            or isinstance(self._spec.placement, RayPlacement)
            or loader.multiprocessing_context
        ):
            return
        with_workers = self._spec.placement == "auto" or self._spec.options["executor"] == "process"
        if self._spec.placement == "process" or (loader.num_workers > 0 and with_workers):
            start_early()

    def look_ahead(self, loader: TorchLoader) -> int:
        """How many batches are planned before the one that is delivered, at least."""
        # A fetch that is begun again takes twice the usual time and a bit, in which the others must not run dry.
        covered = most_fetches(self._spec.options) * (3 if self._spec.options["hedge"] else 1)
        one_or_many = 1 if self._spec.kind.is_iterable else covered
        batch_size = _batch_size(loader)
        ahead = look_ahead(
            prefetch_factor=None if isinstance(loader.prefetch_factor, Unset) else loader.prefetch_factor,
            num_workers=loader.num_workers,
            concurrency=one_or_many if self._spec.kind.is_async else 0,
            batch_size=batch_size,
            engines=self._spec.engines,
        )
        if isinstance(loader.prefetch_factor, Unset | None):
            ahead = max(ahead, self._samples_ahead(loader) // (batch_size or 1))
        if self._lanes.own > 1:  # so that each of them reads while a batch of it is ready
            ahead = max(ahead, 2 * self._lanes.own)
        # What waits on the device has left the workers nothing to do: it does not count.
        return ahead if self._spec.device is None else ahead + self._spec.options["device_prefetch"]

    def _samples_ahead(self, loader: TorchLoader) -> int:
        """How many samples a sampler has ahead, so that ranges near each other are read together; 0 without ranges."""
        samples: int = getattr(loader.sampler, "samples_ahead", 0) if capabilities(self._spec.source).ranges else 0
        return samples

    def most_ahead(self, loader: TorchLoader) -> int:
        """How many batches are planned before the one that is delivered, at most."""
        least = self.look_ahead(loader)
        given = not isinstance(loader.prefetch_factor, Unset | None)
        if given or self._spec.kind is not DatasetKind.ASYNC_MAP or self._samples_ahead(loader):
            return least
        return most_ahead(least, concurrency=most_fetches(self._spec.options), batch_size=_batch_size(loader))

    def plan_ahead(self, loader: TorchLoader) -> LookAheadSize:
        """The look-ahead of an epoch that begins; what one epoch found is where the next one begins."""
        limits = self.look_ahead(loader), self.most_ahead(loader)
        self._ahead = LookAheadSize(*limits) if self._ahead is None else self._ahead.resized(*limits)
        return self._ahead

    def open(self, loader: TorchLoader, spec: EpochSpec, pipe_seed: int | None) -> Session:
        """Open a session on the engine that runs, or on a new one; in the caller's thread where torch reads there."""
        rank, start, base_seed = spec.rank, spec.session, spec.base_seed
        # A torch dataset without `wants_epoch` gets the epoch by `loader.set_epoch` alone, as in torch.
        set_epoch, self.epoch_set = self._spec.kind.is_async or self.epoch_set, False
        only_wanted = not (self._spec.kind.is_async or (set_epoch and start.batch))
        self._placements.set_epoch(self._spec.source, start.epoch, only_wanted=only_wanted)
        start = start._replace(set_epoch=set_epoch)
        options = self._spec.options
        transforms = self._spec.maps if options["transform"] is None else (*self._spec.maps, options["transform"])
        collate_fn = loader.collate_fn.collate if isinstance(loader.collate_fn, PortableCollate) else loader.collate_fn
        assembler = Assembler(transforms, collate_fn, loader._auto_collation, self._spec.policy.tolerance)
        if not self._spec.kind.is_async and loader.num_workers == 0:
            self._counters.placement = "inline: a torch dataset with num_workers=0 is read in the caller's thread"
            iterable = self._spec.kind.is_iterable
            divide_pipe(self._spec.source, rank)
            link = InlineLink(
                self._spec.source,
                iterable=iterable,
                assembler=assembler,
                drop_last=loader.drop_last,
                rank=rank,
                start=start,
                seeds=options["seed"] is not None,
            )
            return Session(lambda _: link, inline_state=link.state_dict)
        if options["seed"] is not None and not self._spec.kind.is_async:
            # For workers that seed themselves by torch's rule: they draw differently in each epoch and rank.
            base_seed += (start.epoch * rank.world_size + rank.rank) * loader.num_workers
        in_thread = self._spec.placement in ("auto", "thread") and not loader.num_workers
        deferred = in_thread and assembler.runs_user_code
        config = EngineConfig(
            dataset=self._spec.source,
            kind=self._spec.kind,
            assembler=assembler,
            num_workers=loader.num_workers,
            options=engine_options(options),
            deferred=deferred,
            look_ahead=self.look_ahead(loader),
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
            lanes=self._lanes.own,
        )
        # As in torch, workers that do not persist hold a copy of the dataset as it is now, and end with the epoch.
        persistent = loader.persistent_workers
        with explained("start the loader"):
            session = self._placements.open(config, start, persistent=persistent)
        self._counters.placement = self._placements.where + self._lanes.describe()
        return session

    def setup(self, loader: TorchLoader) -> Setup:
        """The arguments that decide on the loader's speed."""
        from headrace.telemetry.diagnosis import Setup

        options = self._spec.options
        return Setup(
            concurrency=options["concurrency"],
            num_workers=loader.num_workers,
            look_ahead=self.look_ahead(loader),
            most_ahead=self.most_ahead(loader),
            batch_size=loader.batch_size,
            in_order=loader.in_order,
            memory_budget=options["memory_budget"],
            placement=self._counters.placement.partition(":")[0],
            stream=self._spec.kind.is_iterable,
            is_async=self._spec.kind.is_async,
            cores=self._cores(),
            most_concurrency=self._spec.engines * most_concurrency(),
            engines=self._spec.engines,
            by_engines=not self._spec.kind.is_iterable or self._lanes.possible,
            fixed_look_ahead=not isinstance(loader.prefetch_factor, Unset | None),
        )

    def _cores(self) -> int:
        """The cores that the engines and workers can use."""
        if isinstance(self._spec.placement, RayPlacement):
            return max(1, int(self._spec.engines * self._spec.placement.cpus_per_engine))
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def set_epoch(self, epoch: int) -> None:
        """Give the epoch's number to the dataset, also in workers."""
        self._placements.set_epoch(self._spec.source, epoch, only_wanted=False)

    def close(self) -> None:
        """End the engine and its workers; blocks until they have ended."""
        self._placements.close()


def _batch_size(loader: TorchLoader) -> int | None:
    size: int | None = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size
