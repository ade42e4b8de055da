"""Beginning of an epoch, new or restored: checks and seeds."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
)

from headrace._base.text import warn_user
from headrace._order.order import EpochOrder
from headrace._order.samplers import SeededRandomSampler
from headrace._order.spec import LoaderSpec, TorchLoader, deciding_sampler, samplers_of
from headrace._order.state import Fingerprint, LoaderState
from headrace._ranks.distributed import check_given_rank
from headrace._ranks.rankinfo import RankInfo, has_process_group
from headrace._records.failure import Failure, Stage
from headrace._streams.kinds import DatasetKind, ranks_differ, splits_by_rank
from headrace.errors import StateError


def check_fit(saved: LoaderState, now: Fingerprint) -> None:
    """Raise `StateError` if the state was saved by another loader.

    The error lists each difference.
    """
    differences = now.differences(saved.fingerprint)
    if differences:
        raise StateError(
            f"the state was saved by another loader: {'; '.join(differences)}. To begin epoch "
            f"{saved.epoch} anew with this loader, call set_epoch({saved.epoch}) in place of "
            f"load_state_dict."
        )


def check_rank(saved: LoaderState, order: EpochOrder, rank: RankInfo) -> None:
    """Raise `StateError` if this rank cannot continue the state.

    A state of another rank, or of another number of ranks, is accepted if ranks do not matter.
    Batches given out of order need the same batch size.
    """
    size = saved.run.batch_size
    if saved.delivered and not order.is_stream and size not in (0, order.batch_size):
        raise StateError(
            f"batches were given out of order, with batch_size={size}, and batch_size is "
            f"{order.batch_size} now: change batch_size after the end of epoch {saved.epoch}"
        )
    rank = order.rank_of(rank)
    if (saved.rank, saved.ranks) == (rank.rank, rank.world_size):
        return
    divided = order.division(saved)
    if divided is not None and saved.ranks != rank.world_size:
        raise StateError(
            f"the state was saved with {saved.ranks} ranks, and there are {rank.world_size} now: "
            f"{divided}. Use {saved.ranks} ranks until the end of epoch {saved.epoch}. Any number "
            f"of ranks can continue the epoch of a headrace.ElasticSampler, and of shards with an "
            f"index (headrace.TarDataset.index(...))."
        )
    if saved.rank is not None:
        raise StateError(
            f"the state was saved by rank {saved.rank} of {saved.ranks}, and this is rank "
            f"{rank.rank} of {rank.world_size}. Load the state of each rank on the same rank; or "
            f"on every rank those of all, from headrace.gather_state(loader) or "
            f"headrace.merge_states. Of a map-style dataset with seed= or a "
            f"headrace.ElasticSampler, and in_order=True, one state fits all."
        )


def check_reading(
    spec: LoaderSpec, loader: TorchLoader, rank: RankInfo, done: set[str]
) -> None:
    """Warn if each of several workers or ranks reads the whole dataset.

    `done` holds the warnings that were given, so that each warning is given once.
    """
    name, workers = type(spec.source).__name__, loader.num_workers
    if workers > 1 and spec.kind is DatasetKind.ITERABLE and "workers" not in done:
        done.add("workers")
        # torch's loader takes no other stream, and divides a data pipe among workers.
        if isinstance(spec.source, IterDataPipe) or not isinstance(
            spec.source, IterableDataset
        ):
            warn_user(
                f"each of {workers} workers reads all of {name}, so that each sample comes "
                f"{workers} times: use num_workers=0. If {name} divides itself by "
                f"torch.utils.data.get_worker_info(), say so by the base class "
                f"torch.utils.data.IterableDataset. Data pipes of torch are not divided"
            )
    several = spec.kind is DatasetKind.MAP and spec.options["data_parallel"] is not None
    checked = several or spec.kind.is_async or isinstance(spec.source, IterDataPipe)
    if rank.world_size > 1 and checked and "ranks" not in done:
        done.add("ranks")
        # Whether neither `sampler=` nor `batch_sampler=` divides the dataset.
        draws_all = deciding_sampler(loader) is loader.sampler and type(
            loader.sampler
        ) in (
            RandomSampler,
            SequentialSampler,
            SeededRandomSampler,
        )
        if (spec.kind.is_iterable or draws_all) and not splits_by_rank(spec.source):
            remedy = (
                "Split it by its .split(), or have it read the part of its rank, which "
                "headrace.get_rank_info() returns in __aiter__, and declare this by an attribute: "
                "splits_by_rank = True"
                if spec.kind.is_iterable
                else "Divide it by sampler=headrace.ElasticSampler(dataset, seed=0). If it has "
                "the samples of its rank alone, or all ranks are to have all, declare this by an "
                "attribute of it: splits_by_rank = True"
            )
            what = f"each of {rank.world_size} ranks reads all of {name}"
            warn_user(
                f"{what}, unless it splits itself: they train on the same samples. {remedy}"
            )
        elif (
            has_process_group()
            and spec.kind.is_iterable
            and ranks_differ(spec.source)
            and not spec.options["coordinated"]
        ):
            warn_user(
                f"the {rank.world_size} ranks may get different numbers of batches, since each "
                f"reads shards of its own or draws from a mix, or a filter, pack or "
                f"batch_by_tokens comes last: training then waits for ever at the end of an epoch. "
                f"Use coordinated=True, apply .split() or .repeat() last, or read the shards by an "
                f"index (headrace.TarDataset.index(...))"
            )


def check_data_parallel(loader: TorchLoader, rank: RankInfo, seed: int | None) -> None:
    """Raise `ValueError` if ranks would get different batches.

    Ranks of the same data-parallel rank have to get the same batches.
    """
    for part in samplers_of(loader):
        own, ranks = getattr(part, "rank", None), getattr(part, "num_replicas", None)
        if isinstance(own, int) and isinstance(ranks, int):
            check_given_rank(f"the loader's {type(part).__name__}", own, ranks, rank)
    world = torch.distributed.get_world_size() if has_process_group() else 1
    if world > rank.world_size:
        shared = (
            f"data_parallel= has {rank.world_size} of {world} ranks, "
            f"so that the others get the same batches"
        )
        if seed is None and loader.generator is None:
            raise ValueError(
                f"{shared}. They must draw the same random numbers: give the loader seed="
            )
        if not loader.in_order:
            raise ValueError(
                f"{shared}, but in_order=False gives each rank an order of its own: leave it out"
            )


class EpochSeeds:
    """Draws the seeds of a loader's epochs.

    Attributes:
        kept: the seed that persistent workers began with. None before the first epoch, and without
            persistent workers.
    """

    def __init__(self, spec: LoaderSpec) -> None:
        self._spec = spec
        self.kept: int | None = None

    def draw(
        self, loader: TorchLoader, order: EpochOrder, resumed: LoaderState | None
    ) -> tuple[Iterator[Any], int]:
        """Return the sampler's draws and the base seed, from `resumed` on.

        The seeds of the batches are derived from the base seed.
        """
        saved = None if resumed is None else resumed.base_seed
        if resumed is not None and loader.persistent_workers:
            self.kept = resumed.kept_seed
        try:
            if resumed is None or order.resumed is None:
                draws = order.draws()
                twice = self._spec.copies(loader) and not self.kept
                base_seed = self._base_seed(loader, saved)
                # torch calls iter() twice too. A sampler that draws in `__iter__` depends on the
                # calls.
                return order.draws() if twice else draws, base_seed
            order.restore_generator(resumed)
            # If the user gives a generator, the base seed is drawn as in the saved run. So later
            # epochs draw the same numbers.
            if saved is None or (
                loader.generator is not None and resumed.kept_seed is None
            ):
                drawn = self._base_seed(loader)
            draws = order.draws()
        except StateError:
            raise
        except Exception as error:  # user code: the sampler
            raise Failure.caught(
                error, stage=Stage.SAMPLING, batch=0
            ).exception() from error.__cause__
        if saved is None:
            return draws, drawn
        if self._spec.reads_in_persistent_workers(loader):
            self.kept = saved
        return draws, saved

    def _base_seed(self, loader: TorchLoader, saved: int | None = None) -> int:
        seed: int | None = self._spec.options["seed"]
        if seed is not None:
            return seed
        # The same draws as torch's, in the same place: the same torch.manual_seed gives the same
        # order. Drawn at each iter(), but only once for persistent workers.
        if self.kept is not None:
            return self.kept
        drawn = int(
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        )
        drawn = drawn if saved is None else saved
        if self._spec.reads_in_persistent_workers(loader):
            self.kept = drawn
        return drawn


def state_for_rank(states: Sequence[LoaderState], rank: RankInfo) -> LoaderState:
    """Return the state that this rank continues from.

    The state is the state of all ranks, or this rank's state. `check_rank` checks the state. If
    the last batch's indices are another rank's, the indices are left out.
    """
    saved = states[rank.rank] if len(states) == rank.world_size else states[0]
    drawn = saved.last_draw
    if drawn is not None and (drawn.rank, saved.ranks) != (rank.rank, rank.world_size):
        saved = saved._replace(last_draw=None)
    return saved


def batches_left(order: EpochOrder, state: LoaderState) -> int | None:
    """Return how many batches follow a position.

    The number holds for the present ranks and batch size. None for a stream, and for an order
    whose positions are not computed.
    """
    if not order.is_by_arithmetic:
        return None
    computed = order.computed
    size = len(order.sampler if computed is None else computed.order_in(state.epoch))
    ranks = order.sampler.num_replicas if order.shared else 1
    left = 0 if state.over else max(0, size - state.cursor)
    drops = order.shared and order.sampler.drop_last
    left = left // ranks if drops else -(-left // ranks)
    of_batch = order.batch_size or 1
    return left // of_batch if order.drop_last else -(-left // of_batch)


def of_all_ranks(states: Sequence[LoaderState]) -> tuple[LoaderState, ...]:
    """Return the states of all ranks in order, or a shared state.

    A rank may end an epoch before other ranks. Then the rank has saved the state before the next
    epoch, and nothing is left of the rank's part of a stream.
    """
    first = min(states, key=lambda state: state.epoch)
    every = []
    for state in states:
        follows = state.epoch == first.epoch + 1 and state.is_between_epochs
        if follows and state.fingerprint.order == "stream":
            # The epoch has ended on this rank. The state keeps the state of a user's dataset, for
            # later epochs.
            streams = {
                reader: {**stream, "ended": True}
                for reader, stream in state.streams.items()
            }
            state = state._replace(
                epoch=first.epoch,
                batches=first.batches,
                cursor=first.cursor,
                base_seed=first.base_seed,
                over=not streams,
                streams=streams,
            )
        differences = first.fingerprint.differences(state.fingerprint)
        if state.epoch != first.epoch:
            differences.append(f"epoch was {state.epoch}, and is {first.epoch}")
        if state.ranks != first.ranks:
            differences.append(f"world size was {state.ranks}, and is {first.ranks}")
        if differences:
            raise StateError(
                f"states of different runs cannot be merged: {'; '.join(differences)}"
            )
        every.append(state)
    if all(state.rank is None for state in every):
        left = [state for state in every if not state.over] or [
            max(every, key=lambda state: state.cursor)
        ]
        if (
            len({state.cursor for state in left}) > 1
            or len({state.batches for state in every}) > 1
        ):
            cursors = sorted({(state.cursor, state.batches) for state in every})
            raise StateError(
                f"the ranks were not at the same batch: (cursor, batches) were {cursors}"
            )
        return (left[0],)
    missing = iter(sorted(set(range(first.ranks)) - {state.rank for state in states}))
    for number, state in enumerate(every):
        if state.rank is None:
            every[number] = state._replace(rank=next(missing, first.ranks))
    ordered = sorted(every, key=operator.attrgetter("rank"))
    ranks = [state.rank for state in ordered]
    if ranks != list(range(first.ranks)):
        raise StateError(
            f"states of all {first.ranks} ranks are needed, but these are of the ranks {ranks}"
        )
    return tuple(ordered)
