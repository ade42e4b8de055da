"""Where an epoch begins: on the consumer's side and in the engine, for a whole epoch and for a restored one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace._core.batches import SessionStart
from headrace._core.consumer.loader_state import Fingerprint, LoaderState
from headrace._core.consumer.order import EpochOrder
from headrace._core.consumer.planning import PlanStart
from headrace._core.rankinfo import RankInfo
from headrace.errors import StateError


@dataclass(frozen=True, slots=True)
class EpochStart:
    """Where an epoch begins.

    Attributes:
        plans: for the planner.
        session: for the engine.
        origin: the cursor before the planner's sample 0.
        ranks: number of ranks that share the order; 1 where each has its own.
    """

    plans: PlanStart
    session: SessionStart
    origin: int
    ranks: int


def check_fit(saved: LoaderState, now: Fingerprint) -> None:
    """Raise `StateError`, with each difference, where the state was saved by another loader."""
    differences = now.differences(saved.fingerprint)
    if differences:
        raise StateError(
            f"the state was saved by another loader: {'; '.join(differences)}. To begin epoch {saved.epoch} anew with "
            f"this loader, use load_state_dict(state, strict=False)."
        )


def check_rank(saved: LoaderState, rank: RankInfo) -> None:
    """Raise `StateError` where the state is of another rank, or of another number of ranks."""
    if saved.rank is None or (saved.rank, saved.ranks) == (rank.rank, rank.world_size):
        return
    if saved.ranks != rank.world_size:
        remedy = (
            "Each rank has read other samples: pass the states of all ranks to headrace.merge_states, or save "
            "headrace.gather_state(loader), and load the result on every rank."
        )
    else:
        remedy = "Save the state of each rank, and load it on the same rank; or save headrace.gather_state(loader)."
    raise StateError(
        f"the state was saved by rank {saved.rank} of {saved.ranks}, and this is rank {rank.rank} of "
        f"{rank.world_size}. {remedy}"
    )


def epoch_start(begun: LoaderState, order: EpochOrder, rank: RankInfo, *, stream: bool) -> EpochStart:
    """Where the epoch with the state `begun` begins on this rank."""
    origin, ranks = 0, 1
    place, stride = rank.rank, rank.world_size
    if order.shared:
        origin, place, stride = begun.cursor, order.sampler.rank, order.sampler.num_replicas
        ranks = stride
    elif stream:
        origin, ranks = begun.cursor - begun.samples * begun.ranks, stride
        if order.first_sample != begun.samples:
            origin = max(begun.cursor, origin + _position(begun) * begun.ranks)
    plans = PlanStart(
        first=origin + place,
        stride=stride,
        batches=begun.batches,
        samples=order.first_sample,
        repeats=begun.skipped[-1],
    )
    session = SessionStart(
        batch=begun.batches,
        streams=begun.streams if order.first_sample == begun.samples else _renumbered(begun.streams),
        ended=begun.ended,
        next_worker=begun.next_worker,
        delivered=tuple(range(batch[3], batch[4] + 1) for batch in begun.delivered if len(batch) > 3),
    )
    return EpochStart(plans, session, origin, ranks)


def _position(begun: LoaderState) -> int:
    """The number of samples that were read of the loader's stream."""
    position = begun.streams.get(None, {}).get("position", 0)
    return position if isinstance(position, int) else 0


def _renumbered(streams: Mapping[int | None, Mapping[str, object]]) -> Mapping[int | None, Mapping[str, object]]:
    """The states with their samples numbered from 0."""
    return {worker: {**state, "position": 0} for worker, state in streams.items()}
