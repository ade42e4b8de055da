"""The delivered samples of a run, computed from states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import SequentialSampler

from headrace._base.array_types import IntArray, index_array
from headrace._consumer.rewind import with_exclusions, with_own_samplers
from headrace._order.exclusion import Order, taken
from headrace._order.order import COMPUTED
from headrace._order.samplers import MixSampler, RankSampler
from headrace._order.state import LoaderState
from headrace._ranks.distributed import ReaderShare
from headrace._streams.kinds import sample_key
from headrace.errors import StateError


class EpochDelivery(NamedTuple):
    """How often the samples of an epoch were delivered.

    Attributes:
        epoch: Number of the epoch.
        ended: Whether a part of the run reached the end of the epoch.
        once: Number of samples delivered once.
        others: Indices of the other samples of the dataset, by kind: delivered more than once
            ("repeated"), "never" delivered, or not delivered because of `DataLoader.exclude`
            ("excluded"). Samples that an epoch of a mix repeats are "repeated", and samples that
            an epoch of a mix leaves out are "never" delivered.
        dataset: The dataset. `str()` shows a few indices with the keys of the samples.
    """

    epoch: int
    ended: bool
    once: int
    others: Mapping[str, IntArray]
    dataset: Any

    def __str__(self) -> str:
        found = [f"{self.once:,} once"]
        for kind, indices in self.others.items():
            some = indices[:5].tolist()
            named = [
                f"{index} {sample_key(self.dataset, index) or ''}".rstrip()
                for index in some
            ]
            found.append(
                f"{len(indices):,} {kind}" + f" ({', '.join(named)})" * bool(named)
            )
        return (
            f"epoch {self.epoch}{'' if self.ended else ', not ended'}: {', '.join(found)}"
        )


def verify(
    parts: Iterable[Sequence[Mapping[str, Any] | None]], loader: Any
) -> list[EpochDelivery]:
    """Compute the delivered samples of a run from states.

    Nothing is read. See docs/resuming.md for more.

    Args:
        parts: Two states for each part of the run. A part goes from a start of the program to the
            next start. The first state is the restored state (None for the beginning of epoch 0).
            The second state is the state restored by the next part, or the last state.
        loader: A loader with the dataset, order, seed and `drop_last` of the run.

    Returns:
        The deliveries in each epoch, from epoch 0 on.

    Raises:
        StateError: The order is not computed. Or a part has a state of another loader, a state with
            batches out of order, or two states in the wrong order.
        ValueError: The number of states in a part is not two.

    Example:
        >>> import headrace as hr
        >>> loader = hr.DataLoader(range(8), batch_size=2, shuffle=True, seed=0)
        >>> states = [loader.state_dict() for batch in loader]
        >>> print(*hr.verify([(None, states[1]), (states[0], states[2])], loader))
        epoch 0, not ended: 4 once, 2 repeated (0, 1), 2 never (2, 5), 0 excluded
    """
    position = loader._control.position
    order = position.order(with_own_samplers(loader))
    own = position.fingerprint(loader, order)
    if type(order.sampler) is SequentialSampler:
        order.computed = RankSampler(
            len(order.sampler), shuffle=False, rank=0, world_size=1
        )
    sampler = order.computed
    coordinated = position.spec.options["coordinated"]
    if sampler is None or sampler.dealt_at_once > 1 or (sampler.exact and coordinated):
        raise StateError(
            f"a state of {own.order} does not say what was delivered: {COMPUTED}"
        )
    spans, stop = [], 0
    for number, part in enumerate(parts):
        begin, last = (
            LoaderState(0, own) if state is None else LoaderState.from_dict(state)
            for state in part
        )
        if not last.run.ranks:  # no epoch has begun
            continue
        problems = own.differences(begin.fingerprint) or own.differences(last.fingerprint)
        if begin.delivered or last.delivered:
            problems.append("batches were given out of order")
        if last.ranks > 1 and not order.shared:
            problems.append(
                f"it is of {last.ranks} ranks, and {order.sampler_name} does not divide the order "
                f"among ranks: give the loader of a rank, with its sampler"
            )
        run = last.run
        begin = with_exclusions(order, begin, last.excluded)
        start = begin.epoch, begin.cursor
        later = (begin.epoch + begin.over, 0)  # after the end of an epoch: the next epoch
        unchanged = (run.epoch, run.cursor) <= max(start, later)
        if not unchanged or (last.epoch, last.cursor) < start:
            problems.append(
                "its states are in the wrong order, or ranks, batch_size= or exclusions changed "
                "between them: give two parts"
            )
        if problems:
            raise StateError(f"part {number} cannot be verified: {'; '.join(problems)}")
        spans.append((begin, last))
        stop = max(stop, last.epoch + 1)
    is_mix = isinstance(sampler, MixSampler)
    size = len(sampler.dataset) if is_mix else sampler.epoch_size
    found = []
    for epoch in range(stop):
        counts = np.zeros(size, np.int64)
        excluded = counts > 0
        ended = False
        for begin, last in spans:
            if not begin.epoch <= epoch <= last.epoch:
                continue
            order.leave_out(last.excluded)
            indices = _indices(sampler.order_in(epoch))
            first = begin if begin.epoch == epoch else LoaderState(epoch, own)
            delivered = _left(order, first, last, len(indices))
            if last.epoch == epoch:
                delivered -= _left(order, last, last, len(indices))
            np.add.at(counts, indices, delivered)
            ended |= last.epoch > epoch or last.over
            if last.excluded:
                whole = _indices(sampler._order(epoch))
                excluded[np.setdiff1d(whole, indices)] = True
        never = counts < 1
        others = {
            "repeated": np.flatnonzero(counts > 1),
            "never": np.flatnonzero(never & ~excluded),
            "excluded": np.flatnonzero(never & excluded),
        }
        once = int(np.count_nonzero(counts == 1))
        found.append(EpochDelivery(epoch, ended, once, others, position.spec.source))
    return found


def _indices(order: Order) -> IntArray:
    """Return all indices of an order."""
    return _joined(taken(order, range(len(order))))


def _joined(pieces: Iterable[range | IntArray]) -> IntArray:
    """Join pieces of an order in a new array."""
    return np.concatenate([np.empty(0, np.int64), *map(index_array, pieces)])


def _left(order: Any, state: LoaderState, last: LoaderState, size: int) -> IntArray:
    """Count the deliveries of each position of an order after `state`.

    The ranks and the batch size are taken from `last`, the last state of a part of the run.
    """
    batch_size = last.run.batch_size or order.batch_size or 1
    left = np.zeros(size, np.int64)
    for rank in range(0 if state.over else last.ranks):
        own = _joined(
            order.computed._dealt(
                range(size), ReaderShare(rank, last.ranks), state.cursor
            )
        )
        if order.drop_last:
            own = own[: len(own) // batch_size * batch_size]
        left += np.bincount(own, minlength=size)
    return left
