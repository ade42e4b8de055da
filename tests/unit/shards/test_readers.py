"""The readers of a stream of shards: damaged states."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import HeadraceError
from tests.unit.shards.resuming import in_memory, state_after
from tests.unit.shards.test_state import tar_bytes
from tests.unit.streams.reading import outcomes

COUNTS = (4, 1, 6, 3, 5, 2)
OBJECTS = {f"{number}.tar": tar_bytes(number, count) for number, count in enumerate(COUNTS)}
STORE = in_memory(OBJECTS)


def tar_reader(rank, world, **options):
    common = {"chunk_bytes": 700, "shards_in_parallel": 2, "shuffle": True, **options}
    return hr.TarDataset(list(OBJECTS), store=STORE, rank=rank, world_size=world, **common)


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


@pytest.mark.parametrize("options", [{}, {"buffer_size": 4}], ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_damaged_states_raise_no_other_error(options, data):
    state = json.loads(json.dumps(asyncio.run(state_after(tar_reader(0, 2, **options), 4))))
    damage(data, state)

    async def run():
        iterator = aiter(tar_reader(0, 2, **options))
        try:
            iterator.load_state_dict(state)
            json.dumps(iterator.state_dict())
            await outcomes(iterator, 30)
        except HeadraceError:
            pass
        finally:
            await iterator.aclose()

    asyncio.run(run())
