"""Where an epoch begins: on the consumer's side and in the engine, for a whole epoch and for a restored one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace._core.batches import SessionStart
from headrace._core.order.order import EpochOrder
from headrace._core.order.spec import TorchLoader
from headrace._core.order.state import Fingerprint, LoaderState
from headrace._core.ranks.distributed import Remainder, ShardOptions
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.streams.merged import divided_state
from headrace._core.streams.resumable import expect
from headrace.errors import StateError


@dataclass(frozen=True, slots=True)
class EpochSpec:
    """An epoch that begins on this rank, anew or from a resume point: for its plans, its session and its progress.

    Attributes:
        begun: the state at its beginning: of the whole epoch, or the one restored.
        order: draws the indices.
        base_seed: the seed that the batches' seeds derive from.
        rank: of this process.
        session: where it begins in the engine.
        origin: the cursor before this epoch's sample 0.
        ranks: number of ranks that share the order; 1 where each has its own.
        first: position of this rank's sample 0 among the samples of all ranks.
        stride: the number of ranks.
        block: number of consecutive positions that this rank has before the next rank's turn.
    """

    begun: LoaderState
    order: EpochOrder
    base_seed: int
    rank: RankInfo
    session: SessionStart
    origin: int
    ranks: int
    first: int
    stride: int
    block: int

    @property
    def over(self) -> bool:
        """Whether a stream has nothing left but replacements of lost batches."""
        return self.order.is_stream and (self.begun.over or self.begun.streams.get(None, {}).get("repeats") is True)


def check_fit(saved: LoaderState, now: Fingerprint) -> None:
    """Raise `StateError`, with each difference, where the state was saved by another loader."""
    differences = now.differences(saved.fingerprint)
    if differences:
        raise StateError(
            f"the state was saved by another loader: {'; '.join(differences)}. To begin epoch {saved.epoch} anew with "
            f"this loader, use load_state_dict(state, strict=False)."
        )


def check_rank(saved: LoaderState, order: EpochOrder, rank: RankInfo) -> None:
    """Raise `StateError` where the state is of another rank, or of another number of ranks, and that matters."""
    if (saved.rank, saved.ranks) == (rank.rank, rank.world_size):
        return
    if saved.rank is not None:
        raise StateError(
            f"the state was saved by rank {saved.rank} of {saved.ranks}, and this is rank {rank.rank} of "
            f"{rank.world_size}. Load the state of each rank on the same rank; or on every rank those of all, from "
            f"headrace.gather_state(loader) or headrace.merge_states. Of a map-style dataset with seed= or a "
            f"headrace.ElasticSampler, and in_order=True, one state fits all."
        )
    if saved.ranks != rank.world_size and saved.batches and order.may_be_divided:
        raise StateError(
            f"the state was saved with {saved.ranks} ranks, and there are {rank.world_size} now: "
            f"{order.sampler_name} may give each rank other samples. Any number of ranks can continue the epoch "
            f"of a headrace.ElasticSampler."
        )


def epoch_spec(
    begun: LoaderState,
    order: EpochOrder,
    base_seed: int,
    rank: RankInfo,
    *,
    remainder: Remainder,
) -> EpochSpec:
    """The epoch with the state `begun`; `remainder` is a stream's policy for samples that cannot be divided equally."""
    origin, ranks = 0, 1
    place, stride, block = rank.rank, rank.world_size, 1
    if order.shared:
        block = order.sampler.dealt_at_once
        origin, place, stride = begun.cursor, order.sampler.rank, order.sampler.num_replicas
        ranks = stride
    elif order.is_stream:
        origin, ranks = begun.cursor - begun.samples * begun.ranks, stride
        if order.first_sample != begun.samples:
            of_rank = max(1, len(begun.merged) // begun.ranks)  # its lanes
            read = max(map(_position, begun.merged or begun.streams.values()), default=0)
            origin = max(begun.cursor, origin + read * of_rank * begun.ranks)
    session = SessionStart(
        batch=begun.batches,
        streams=_streams(begun, order, rank, remainder),
        next_worker=begun.next_worker,
        delivered=tuple(range(batch[3], batch[4] + 1) for batch in begun.delivered if len(batch) > 3),
        lanes=begun.lanes or 1,
        epoch=begun.epoch,
    )
    first = origin + place * block
    return EpochSpec(begun, order, base_seed, rank, session, origin, ranks, first, stride, block)


def of_rank(states: Sequence[LoaderState], rank: RankInfo) -> LoaderState:
    """The state to continue from on this rank: that of all ranks, its own, or those of other numbers of ranks merged.

    Without the last batch's indices, where those are another rank's.

    Raises:
        StateError: there are the states of another number of ranks, which cannot be merged.
    """
    if len(states) == 1:
        (saved,) = states
    else:
        saved = states[rank.rank] if len(states) == rank.world_size else merged(states)
    if saved.last_indices is not None and (saved.last_indices[2], saved.ranks) != (rank.rank, rank.world_size):
        saved = saved._replace(last_indices=None)
    return saved


def batches_before(loader: TorchLoader, order: EpochOrder, state: LoaderState, rank: RankInfo) -> int | None:
    """The number of an epoch's batches before a position, if they were of as many ranks and samples as they are now.

    None if the epoch's length is unknown, or the order gives no other position to other ranks.
    """
    ranks = order.sampler.num_replicas if order.shared else rank.world_size if order.is_stream else 1
    try:
        batches, size = len(loader), order.size() or len(loader.dataset) * ranks  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a dataset or sampler without a length
        return None
    if (state.ranks == rank.world_size) if order.is_stream else not order.is_by_arithmetic:
        return None
    left = 0 if state.over else max(0, size - state.cursor)
    drops = order.shared and order.sampler.drop_last
    left = left // ranks if drops else -(-left // ranks)
    of_batch = loader.batch_size or 1
    return batches - (left // of_batch if loader.drop_last else -(-left // of_batch))


def merged(states: Sequence[LoaderState]) -> LoaderState:
    """One state for all ranks, of the states of every rank.

    Raises:
        StateError: they are not of all ranks of one run at the same epoch.
    """
    first = states[0]
    for state in states[1:]:
        differences = first.fingerprint.differences(state.fingerprint)
        for name, old, new in (
            ("epoch", state.epoch, first.epoch),
            ("world size", state.ranks, first.ranks),
            ("number of lanes, which that of engines= gives,", state.lanes, first.lanes),
        ):
            if old != new:
                differences.append(f"{name} was {old}, and is {new}")
        if differences:
            raise StateError(f"states of different runs cannot be merged: {'; '.join(differences)}")
    if all(state.rank is None for state in states):
        cursors = sorted({(state.cursor, state.batches) for state in states})
        if len(cursors) > 1:
            raise StateError(f"the ranks were not at the same batch: (cursor, batches) were {cursors}")
        return first
    ranks = sorted(-1 if state.rank is None else state.rank for state in states)
    if ranks != list(range(first.ranks)):
        raise StateError(f"states of all {first.ranks} ranks are needed, but these are of the ranks {ranks}")
    ordered = sorted(states, key=lambda state: state.rank or 0)
    of_stream = first.fingerprint.order == "stream"
    if not of_stream or first.fingerprint.readers or any(state.delivered for state in states):
        raise StateError(
            "these states cannot be merged: each rank had an order of its own, batches out of order, or a stream that "
            "workers read. Load each on its own rank; or use seed=, an ElasticSampler or a stream of headrace, with "
            "in_order=True"
        )
    if not any(state.streams for state in ordered):  # nothing was read since the epoch began, or was restored
        return first._replace(rank=None)
    lanes_of_rank = first.lanes or 1
    readers = _readers(lanes_of_rank)
    if late := [number for number, state in enumerate(ordered) if not state.streams.keys() >= set(readers)]:
        raise StateError(
            f"the ranks {late} have not given out a batch since they began, or were restored, or not one of each lane: "
            f"save the states after {lanes_of_rank} steps or more"
        )
    streams = [state.streams[reader] for reader in readers for state in ordered]
    parts = [expect(state, "stream", dict) for state in streams]
    from headrace._core.shards.division import is_part_state, merge_part_states  # with the stores, for restoring only

    if all(map(is_part_state, parts)):
        position = max(map(_position, streams)) * lanes_of_rank
        streams = [{"position": position, "stream": merge_part_states(parts)}]
    else:
        streams = [{**state, "ranks": first.ranks} for state in streams]
    return first._replace(
        rank=None,
        cursor=max(state.cursor for state in states),
        batches=max(state.batches for state in states),
        streams={},
        lanes=None,
        next_worker=0,
        merged=tuple(streams),
        skipped=tuple(map(max, zip(*(state.skipped for state in states), strict=True))),
    )


def _readers(lanes: int) -> Sequence[int | None]:
    """What reads a stream: its lanes, or the loader itself."""
    return range(lanes) if lanes > 1 else (None,)


def _streams(
    begun: LoaderState, order: EpochOrder, rank: RankInfo, remainder: Remainder
) -> Mapping[int | None, Mapping[str, object]]:
    lanes = begun.lanes or 1
    if begun.merged:
        from headrace._core.shards.division import is_part_state  # as above

        states = [expect(state, "stream", dict) for state in begun.merged]
        if is_part_state(states[0]):
            merged: Mapping[str, object] = {"position": 0, "stream": states[0]}
            return {**dict.fromkeys(_readers(lanes), merged), **begun.streams}
        divided: dict[int | None, Mapping[str, object]] = {}
        for number in range(lanes):
            new = ShardOptions(number * rank.world_size + rank.rank, lanes * rank.world_size)
            state = divided_state(states, max(1, expect(begun.merged[0], "ranks", int)), new, remainder)
            divided[number if lanes > 1 else None] = {"position": 0, "stream": state}
        return {**divided, **begun.streams}
    if order.first_sample == begun.samples:
        return begun.streams
    return {worker: {**state, "position": 0} for worker, state in begun.streams.items()}


def _position(stream: Mapping[str, object]) -> int:
    """The number of samples that were read of a stream."""
    position = stream.get("position", 0)
    return position if isinstance(position, int) else 0
