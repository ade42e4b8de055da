"""Streams that are interrupted at each position and restored from their state."""

import asyncio
import json

from obstore.store import MemoryStore

import headrace as hr
from headrace.errors import ShardError, StoreError
from tests.unit.streams.reading import outcomes


def in_memory(objects, **options):
    """A store in memory."""
    backend = MemoryStore()
    for key, data in objects.items():
        backend.put(key, data)
    return hr.Store("memory://", backend=backend, **options)


def in_folder(folder, objects):
    """A folder with the objects as files."""
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def samples_and_errors(stream):
    """All samples of a stream, with the errors of shards and stores in their places."""
    samples, found = iter(stream), []
    while True:
        try:
            found.append(next(samples))
        except StopIteration:
            return found
        except (ShardError, StoreError) as error:
            found.append(error)


async def states(dataset):
    """All samples and errors, and the state at each position between them, as JSON."""
    iterator = aiter(dataset)
    found, saved = [], [iterator.state_dict()]
    dumps = [json.dumps(saved[0])]
    while one := await outcomes(iterator, 1):
        found += one
        saved.append(iterator.state_dict())
        dumps.append(json.dumps(saved[-1]))
    saved.append(iterator.state_dict())  # after StopAsyncIteration
    dumps.append(json.dumps(saved[-1]))
    assert [json.dumps(state) for state in saved] == dumps, (
        "a state must not change after it was taken"
    )
    return found, dumps


async def restored(dataset, state):
    """An iterator of `dataset` that continues from a state."""
    iterator = aiter(dataset)
    iterator.load_state_dict(json.loads(state))
    assert json.dumps(iterator.state_dict()) == state
    return iterator


def resumes_at_every_position(make):
    """Check that a stream continues from each position as if it had not been interrupted; returns its samples."""

    async def run():
        found, dumps = await states(make())
        for position, state in enumerate(dumps):
            iterator = await restored(make(), state)
            assert await outcomes(iterator) == found[position:], position
        return found

    return asyncio.run(run())


async def state_after(dataset, count):
    iterator = aiter(dataset)
    await outcomes(iterator, count)
    state = iterator.state_dict()
    await iterator.aclose()
    return state
