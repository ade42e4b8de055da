"""A stream of numbers, and reading of iterators in tests of their states."""

import asyncio

import headrace as hr
from headrace.errors import ShardError


class Plain(hr.AsyncIterableDataset):
    """A stream of numbers without a state, and errors in place of some of them."""

    def __init__(self, stop, start=0, bad=()):
        self.start, self.stop, self.bad = start, stop, frozenset(bad)
        self.reads = 0

    def __aiter__(self):
        return PlainIterator(self)

    def __repr__(self):
        return f"Count({self.stop})"


class PlainIterator:
    def __init__(self, stream):
        self.stream = stream
        self.number = stream.start

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if self.number >= self.stream.stop:
            raise StopAsyncIteration
        self.number += 1
        self.stream.reads += 1
        if self.number - 1 in self.stream.bad:
            raise ValueError(self.number - 1)
        return self.number - 1


class Count(Plain):
    """The same, with a state."""

    def __aiter__(self):
        return CountIterator(self)


class CountIterator(PlainIterator):
    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Inside(hr.AsyncIterableDataset):
    """A user's generator that reads streams of ours, one after the other."""

    def __init__(self, *streams):
        self.streams = streams

    async def __aiter__(self):
        for stream in self.streams:
            async for sample in stream:
                yield sample


def stream(*samples):
    async def make():
        for sample in samples:
            yield sample

    return hr.from_async_iterable(make)


async def outcomes(iterator, count=None):
    """Samples and errors until the end, or `count` of them."""
    found = []
    while count is None or len(found) < count:
        try:
            found.append(await anext(iterator))
        except StopAsyncIteration:
            break
        except ValueError as error:
            found.append(
                (type(error), error.shard, error.offset)
                if isinstance(error, ShardError)
                else repr(error)
            )
    return found
