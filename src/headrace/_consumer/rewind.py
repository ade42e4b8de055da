"""Batches of any step, computed from seed and position."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

from torch.utils.data import DistributedSampler

from headrace._consumer.control import LoaderControl
from headrace._consumer.epoch import BatchIterator
from headrace._consumer.position import Position
from headrace._order.exclusion import Exclusion, excluded_indices
from headrace._order.order import COMPUTED, EpochOrder
from headrace._order.progress import EpochProgress
from headrace._order.state import LoaderState, Past, Run
from headrace._ranks.distributed import RankChoice
from headrace._ranks.rankinfo import RankInfo, temporary_rank
from headrace._streams.kinds import (
    DatasetKind,
    has_method,
    propagate_epoch,
    sample_key,
    walk_datasets,
)
from headrace._streams.map_style import positions
from headrace._streams.resumable import is_stateful
from headrace.errors import StateError


def batch_at(
    loader: Any, epoch: int, step: int, rank: int | None, world_size: int | None
) -> Any:
    """Return the batch of a step, for `DataLoader.batch_at`."""
    with _loader_at(loader, epoch, step, rank, world_size) as (clone, progress):
        progress.draws = itertools.islice(progress.draws, 1)
        try:
            return next(clone._control.open(BatchIterator, clone, progress, None))
        except StopIteration:
            raise _no_step(epoch, step) from None


def samples_at(
    loader: Any,
    epoch: int,
    steps: Iterable[int],
    rank: int | None,
    world_size: int | None,
) -> list[list[Any]]:
    """Return the keys of the samples of steps, for `DataLoader.samples_at`."""
    source = loader._control.spec.source
    found = []
    for step in steps:
        with _loader_at(loader, epoch, step, rank, world_size) as (_, progress):
            plan = next(progress, None)
        if plan is None:
            raise _no_step(epoch, step)
        found.append(
            [
                index if (key := sample_key(source, index)) is None else key
                for index in plan.indices
            ]
        )
    return found


def exclude(loader: Any, steps: Mapping[int, Iterable[int]], keys: Iterable[Any]) -> None:
    """Leave samples out from the next `iter()` on, for `DataLoader.exclude`."""
    control: LoaderControl = loader._control
    position = control.position
    order, states = position.order(with_own_samplers(loader)), position.states(loader, 0)
    if order.is_stream:
        raise ValueError("samples are left out of a stream by its .filter(function)")
    if steps:
        _check_in_order(loader)
    (state, *others), sampler = states, order.computed
    if sampler is None or others or state.delivered:
        why = (
            f"{order.sampler_name} is drawn"
            if sampler is None
            else "batches were out of order"
        )
        raise ValueError(
            f"nothing can be left out of this order, since {why}: {COMPUTED}"
        )
    with control.ranked() as here:
        ranks = order.rank_of(here).world_size
    left_out = excluded_indices(_indices_of(control.spec.source, keys))
    for epoch, numbers in steps.items():
        epoch = operator.index(epoch)
        for step in map(operator.index, numbers):
            if step < 0:
                raise _no_step(epoch, step)
            run, number = _run_of(state, epoch, step, ranks, loader.batch_size or 0)
            of_step = (run.batch_size or 1) * (run.ranks if order.shared else 1)
            first = run.cursor + (number - run.batches) * of_step
            stop = first + of_step
            sampler.exclusions = state.excluded[: run.exclusions]
            if first >= len(sampler.order_in(epoch)):
                raise _no_step(epoch, step)
            whole = sampler.whole(epoch, first), sampler.whole(epoch, stop)
            left_out.append(Exclusion(epoch, *whole))
    state = with_exclusions(order, state, (*state.excluded, *left_out))
    position.continue_from(loader, (state,))


def with_exclusions(
    order: Any, state: LoaderState, excluded: tuple[Exclusion, ...]
) -> LoaderState:
    """Return a state with other exclusions.

    The position in the whole order stays the same.
    """
    order.leave_out(state.excluded)
    position = order.computed.whole(state.epoch, state.cursor)
    order.leave_out(excluded)
    cursor = order.computed.left(state.epoch, position)
    return state._replace(cursor=cursor, excluded=excluded)


def _indices_of(source: Any, keys: Iterable[Any]) -> list[int]:
    wanted = dict.fromkeys(keys)
    indices = [int(key) for key in wanted if isinstance(key, Integral)]
    if names := {str(key) for key in wanted if not isinstance(key, Integral)}:
        found = {
            index: key
            for index in range(len(source))
            if (key := sample_key(source, index)) in names
        }
        if missing := names - set(found.values()):
            raise KeyError(f"{type(source).__name__} has no sample {min(missing)!r}")
        indices += found
    positions(indices, len(source))  # raises an IndexError for a wrong index
    return indices


def with_own_samplers(loader: Any) -> Any:
    """Return a copy of a loader, with separate samplers."""
    clone = copy.copy(loader)
    batches, sampler = copy.copy(loader.batch_sampler), copy.copy(loader.sampler)
    if getattr(batches, "sampler", None) is not None:
        batches.sampler = sampler = copy.copy(batches.sampler)
    clone.__dict__.update(batch_sampler=batches, sampler=sampler)
    return clone


def _no_step(epoch: int, step: int) -> IndexError:
    return IndexError(f"epoch {epoch} ends before step {step}")


@contextlib.contextmanager
def _loader_at(
    loader: Any, epoch: int, step: int, rank: int | None, world_size: int | None
) -> Iterator[tuple[Any, EpochProgress]]:
    """Yield a copy of the loader, positioned at a step."""
    epoch, step = operator.index(epoch), operator.index(step)
    if epoch < 0 or step < 0:
        raise ValueError(f"epoch={epoch} and step={step} must not be negative")
    control: LoaderControl = loader._control
    position = control.position
    order = position.order(loader)
    _check_computable(loader, order, epoch)
    with control.ranked() as here:
        own = order.rank_of(here)
    present = position.states(loader, 0)[0]
    ranks = own.world_size if world_size is None else world_size
    run, number = _run_of(present, epoch, step, ranks, loader.batch_size or 0)
    if world_size not in (None, run.ranks):
        raise StateError(
            f"step {step} of epoch {epoch} was made on {run.ranks} ranks, and {world_size=}"
        )
    place = RankInfo(own.rank if rank is None else rank, run.ranks, "batch_at")
    if not 0 <= place.rank < run.ranks:
        raise ValueError(
            f"rank={place.rank}, but step {step} of epoch {epoch} is of {run.ranks} ranks"
        )
    clone = _copy(loader, place)
    there: Position = clone._control.position
    order = there.order(clone)
    if run.batches and not order.is_by_arithmetic:
        raise StateError(
            f"the ranks or the batch size changed at batch {run.batches}, "
            f"and {order.sampler_name} is drawn"
        )
    reader = here if place == own else place
    order.restore_sampler(_sampler_at_start(position.progress, order))
    there.past = Past(excluded=present.excluded[: run.exclusions])
    there.resumed, there.next_epoch = (), epoch
    if position.epoch_was_set:
        clone._control.set_epoch(clone, epoch)
    else:
        propagate_epoch(clone._index_sampler, _sampler_epoch(order, present, epoch))
    there.skip(clone, number - run.batches, reader, run)
    try:
        with temporary_rank(reader), contextlib.closing(clone):
            yield clone, there.next_progress(clone, reader, late_epoch=False)
    finally:
        # The copy has set the epoch of the dataset, which both loaders share. Set the epoch back.
        if position.epoch_was_set and position.progress is not None:
            control.placements.set_epoch(
                control.spec.source, position.progress.begun.epoch
            )


def _sampler_at_start(progress: EpochProgress | None, order: EpochOrder) -> object:
    """Return a user's sampler state at the epoch's beginning.

    None if the sampler is at the beginning already, or has no state.
    """
    if (
        progress is None
        or progress.over
        or order.stateful is None
        or order.samples_at_most
    ):
        return None
    if progress.begun.batches:
        raise ValueError(
            f"{order.sampler_name} was restored within the epoch: look at its steps after the epoch"
        )
    return progress.begun.sampler


def _sampler_epoch(order: EpochOrder, present: LoaderState, epoch: int) -> int:
    """Return the epoch number of a sampler with `set_epoch`.

    Raises:
        ValueError: The number in the epoch is unknown.
    """
    if order.sampler_epoch is None or order.wants_epoch:
        return epoch
    if epoch == present.epoch and present.sampler_epoch is not None:
        return present.sampler_epoch
    if present.epoch and present.sampler_epoch == present.epoch:
        return epoch
    raise ValueError(
        f"the program decides on the epoch of {order.sampler_name}, by set_epoch(), and the number "
        f"for epoch {epoch} is not known: call loader.set_epoch(epoch) before each epoch, or use "
        "a headrace.ElasticSampler"
    )


def _check_in_order(loader: Any) -> None:
    if not loader.in_order:
        raise ValueError(
            "with in_order=False the number of a step does not say which batch it was"
        )


def _check_computable(loader: Any, order: EpochOrder, epoch: int) -> None:
    """Raise an error if the seed does not decide a step.

    Order and randomness of the step must follow from the seed.
    """
    control: LoaderControl = loader._control
    if order.is_stream:
        raise TypeError(
            "the samples of a stream are known only when it is read: index the shards"
        )
    if control.spec.options["seed"] is None:
        raise ValueError(
            "a batch can be computed again only if all its randomness has a seed: give the loader "
            "seed="
        )
    _check_in_order(loader)
    if order.is_drawn_anew:
        name = order.sampler_name
        raise ValueError(
            f"the order of {name} does not follow from the seed: "
            "use shuffle=True or an ElasticSampler"
        )
    if epoch and any(is_stateful(part) for part in walk_datasets(control.spec.source)):
        raise ValueError(
            f"{type(control.spec.source).__name__} has a state of its own, "
            "which later epochs begin with"
        )
    under_way = {number for open, number in control.open_epochs if not open.closed}
    follows = any(
        has_method(part, "set_epoch") for part in walk_datasets(control.spec.source)
    )
    if follows and under_way - {epoch}:
        raise RuntimeError(
            f"the dataset is read in epoch {max(under_way)}: "
            f"look at epoch {epoch} after that iteration"
        )


def _run_of(
    present: LoaderState, epoch: int, step: int, ranks: int, batch_size: int
) -> tuple[Run, int]:
    """Return the run of a step, and the number of the step's batch.

    A step after the present position belongs to a new run with `ranks` ranks.

    Raises:
        StateError: The step is before the run.
    """
    number = present.number_of(epoch, step)
    if not present.run.ranks or (epoch, number) >= (present.epoch, present.batches):
        present = present.noted(ranks, batch_size)
    run = present.run
    if (epoch, number) < (run.epoch, run.batches):
        raise StateError(
            f"step {step} of epoch {epoch} was made before the number of ranks, batch_size= or the "
            f"exclusions changed, at step {run.batches} of epoch {run.epoch}: load a state from "
            "before the change"
        )
    if run.batch_size != batch_size:
        raise StateError(
            f"step {step} had batches of {run.batch_size} samples: give the loader batch_size="
        )
    if run.epoch != epoch:
        run = run._replace(epoch=epoch, batches=0, cursor=0)
    return run, number


def _copy(loader: Any, rank: RankInfo) -> Any:
    """Return a copy of the loader on another rank.

    The copy shares only the dataset and the functions with the loader.
    """
    clone = with_own_samplers(loader)
    spec = clone._control.spec
    options = {**spec.options, "coordinated": False, "data_parallel": None}
    # A batch of an async map-style dataset does not depend on the reader.
    if spec.kind is DatasetKind.ASYNC_MAP:
        options.update(placement="thread", engines=1)
        clone.__dict__["num_workers"] = (
            0 if loader.worker_init_fn is None else min(1, loader.num_workers)
        )
    clone._control = clone._control.with_spec(spec._replace(options=options))
    for part in (clone.sampler, clone.batch_sampler):
        # A sampler of headrace: go to the beginning of an epoch.
        if isinstance(getattr(part, "_ranks", None), RankChoice):
            vars(part).update(
                _ranks=RankChoice(rank.rank, rank.world_size), _restored=None
            )
        elif isinstance(part, DistributedSampler) and (part.rank, part.num_replicas) != (
            rank.rank,
            rank.world_size,
        ):
            made = f"rank {part.rank} of {part.num_replicas}"
            raise ValueError(
                f"{type(part).__name__} was made for {made}: "
                f"make one for {rank.rank} of {rank.world_size}"
            )
    return clone
