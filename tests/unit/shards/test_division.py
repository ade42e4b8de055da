"""Readers are stopped, their states merged, and another number of readers continues: no sample is lost.

None is given twice, but for those of the window of a shuffle buffer.
"""

import asyncio
import contextlib
import contextvars
import functools
import json
import warnings
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace._core.ranks.distributed import ShardOptions, current_lane
from headrace._core.shards.division import merge_part_states
from headrace.errors import HeadraceError, StateError
from tests.unit.shards.resuming import in_memory, resumes_at_every_position
from tests.unit.shards.test_state import damaged_shards, tar_bytes
from tests.unit.streams.reading import outcomes

COUNTS = (4, 1, 6, 3, 5, 2)
OBJECTS = {f"{number}.tar": tar_bytes(number, count) for number, count in enumerate(COUNTS)}
STORE = in_memory(OBJECTS)
ALL = Counter(f"{number}/{sample:03}" for number, count in enumerate(COUNTS) for sample in range(count))


def tar_reader(rank, world, **options):
    common = {"chunk_bytes": 700, "shards_in_parallel": 2, "shuffle": True, **options}
    return hr.TarDataset(list(OBJECTS), store=STORE, rank=rank, world_size=world, **common)


async def merged(iterators):
    """The merged state of iterators, as JSON."""
    states = [json.loads(json.dumps(iterator.state_dict())) for iterator in iterators]
    for iterator in iterators:
        await iterator.aclose()
    return json.dumps(merge_part_states(states))


def read_in_stages(make, worlds, steps):
    """Read some samples on each rank, merge the states, and go on with another number of ranks; lists by stage."""

    async def run():
        state, stages = None, []
        for world, step in zip(worlds, [*steps, None], strict=True):
            iterators = [aiter(make(rank, world)) for rank in range(world)]
            if state is not None:
                for iterator in iterators:
                    iterator.load_state_dict(json.loads(state))
            stages.append([await outcomes(iterator, step) for iterator in iterators])
            if step is not None:
                state = await merged(iterators)
        return stages

    return asyncio.run(run())


def keys(stages):
    return Counter(sample["__key__"] for stage in stages for rank in stage for sample in rank)


def check_given(found, readers, buffer_size, lost=1):
    """Compare what all stages gave with all samples: of each reader's shuffle buffer, some may be given again."""
    assert len(ALL) - len(found) < lost
    assert found.total() - len(found) <= readers * buffer_size


@pytest.mark.parametrize("worlds", [(1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"remainder": "keep"},
        {"remainder": "keep", "buffer_size": 4},
        {"remainder": "drop", "counts": COUNTS, "buffer_size": 4},
    ],
    ids=str,
)
def test_every_sample_is_given_once(worlds, options):
    remainder = options["remainder"]
    for step in range(0, sum(COUNTS) // worlds[0], 3):
        stages = read_in_stages(lambda rank, world: tar_reader(rank, world, **options), worlds, [step])
        if remainder != "keep":
            assert len({len(rank) for rank in stages[1]}) == 1
        lost = worlds[1] if remainder == "drop" else 1
        check_given(keys(stages), worlds[0], options.get("buffer_size", 0), lost=lost)


@pytest.mark.parametrize(
    ("counts", "lanes", "warns"),
    [
        ((9, 10, 11, 10), None, 0),
        ((9, 10, 10, 10), None, 1),
        ((7, 10, 7, 10), None, 1),
        ((10, 10, 1, 10), None, 1),
        ((10, 10, 10, 10), 2, 0),
        ((9, 10, 11, 10), 2, 1),
        ((7, 10, 7, 10), 2, 1),
        ((10, 10, 1, 10), 2, 1),
    ],
    ids=str,
)
def test_shards_of_unequal_sizes_warn_once_where_ranks_leave_out_samples(counts, warns, lanes):
    shards = [f"{number}.tar" for number in range(4)]
    make = functools.partial(hr.TarDataset, shards, store=STORE, counts=counts, rank=1, world_size=2)
    context = contextvars.copy_context()
    if lanes is not None:
        context.run(current_lane.set, ShardOptions(1, lanes))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tars = context.run(make)
        context.run(len, tars)
    assert [(str(each.message)[:38], each.filename) for each in caught] == [
        ("remainder='drop' leaves out samples in", __file__)
    ] * warns


def test_errors_are_reported_once():
    objects = damaged_shards()
    store = in_memory(objects)

    def make(rank, world):
        return hr.TarDataset(
            list(objects), store=store, rank=rank, world_size=world, remainder="keep", chunk_bytes=700
        )  # fmt: skip

    whole = [outcome for rank in read_in_stages(make, [1], [])[0] for outcome in rank]
    for step in range(0, 14, 3):
        found = [outcome for stage in read_in_stages(make, [2, 3], [step]) for rank in stage for outcome in rank]
        assert sorted(map(str, found)) == sorted(map(str, whole))


class _Merged:
    """A rank that continues from a merged state."""

    def __init__(self, dataset, state):
        self.dataset, self.state = dataset, state

    def __aiter__(self):
        iterator = aiter(self.dataset)
        iterator.load_state_dict(json.loads(self.state))
        return iterator


@pytest.mark.parametrize("buffer_size", [0, 4])
def test_readers_of_a_merged_state_are_resumed_at_every_position(buffer_size):
    def make(rank, world):
        return tar_reader(rank, world, remainder="drop", counts=COUNTS, buffer_size=buffer_size)

    async def stop():
        iterators = [aiter(make(rank, 2)) for rank in range(2)]
        for iterator in iterators:
            await outcomes(iterator, 3)
        return await merged(iterators)

    state = asyncio.run(stop())
    assert len(state) < 2048 * (1 + bool(buffer_size))
    for rank in range(3):
        assert resumes_at_every_position(lambda: _Merged(make(rank, 3), state))  # noqa: B023


# States that cannot be merged


async def stopped(world, step=3, **options):
    """States of all ranks."""
    states = []
    for rank in range(world):
        iterator = aiter(tar_reader(rank, world, **{"remainder": "keep", **options}))
        await outcomes(iterator, step)
        states.append(iterator.state_dict())
        await iterator.aclose()
    return states


def test_states_of_other_ranks_streams_and_steps_are_not_merged():
    states, other = asyncio.run(stopped(3)), asyncio.run(stopped(3, seed=5))
    for wrong in ([states[0], states[2]], [*states, states[1]], states[:2], [merge_part_states(states)]):
        with pytest.raises(StateError):
            merge_part_states(wrong)
    with pytest.raises(StateError, match="not of one stream in one epoch: 'of' is"):
        merge_part_states([*states[:2], other[2]])


VALUES = st.sampled_from([None, -1, 0, 1, 3, 10**9, "x", True, 1.5, (), ("x",)])


def damage(data, value):
    """Replace or remove something in a state, at any depth."""
    while isinstance(value, dict | list) and value:
        parent = value
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        value = value[key]
        if not data.draw(st.booleans()):
            break
    if isinstance(parent, dict) and data.draw(st.booleans()):
        del parent[key]
    else:
        drawn = data.draw(VALUES)
        parent[key] = list(drawn) if isinstance(drawn, tuple) else drawn


OPTIONS = [
    {},
    {"remainder": "drop", "counts": COUNTS, "buffer_size": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_damaged_states_raise_no_other_error(options, data):
    states = json.loads(json.dumps(asyncio.run(stopped(2, 4, **options))))
    world = data.draw(st.sampled_from([2, 3]))
    state = states[0] if world == 2 else json.loads(json.dumps(merge_part_states(states)))
    damage(data, state)

    async def run():
        iterator = aiter(tar_reader(0, world, **{"remainder": "keep", **options}))
        try:
            iterator.load_state_dict(state)
            json.dumps(iterator.state_dict())
            await outcomes(iterator, 30)
        except HeadraceError:
            pass
        finally:
            await iterator.aclose()

    asyncio.run(run())
    damage(data, states[0])
    with contextlib.suppress(StateError):
        merge_part_states(states)
