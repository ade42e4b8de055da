"""Iterators of users' streams, whose position is saved and restored by `start_stream`."""

import asyncio

import pytest

from headrace import DataLoader, StateError
from headrace._core.streams.resumable import start_stream, warn_of_rereading
from tests.unit.streams.reading import Plain, PlainIterator, outcomes


class CountOfCaller:
    """A stream whose `state_dict` needs arguments, as that of litdata's StreamingDataset."""

    def __iter__(self):
        return iter(range(12))

    def state_dict(self, num_samples_yielded, num_workers=0):
        raise AssertionError("these are the loader's numbers, which only litdata's loader knows")

    def load_state_dict(self, state):
        raise AssertionError


def test_state_dict_with_arguments_is_no_state():
    def make():
        return DataLoader(CountOfCaller(), batch_size=4)

    loader = make()
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    restored = make()
    restored.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="it is read again from its start, .* must be the same, in the same order"):
        assert [batch.tolist() for batch in restored] == [[4, 5, 6, 7], [8, 9, 10, 11]]


class StatefulDataset(Plain):
    """Its iterators continue after the last sample that the dataset gave."""

    position = 0

    async def __aiter__(self):
        while self.position < self.stop:
            self.position += 1
            yield self.position - 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("position", range(1, 6))
def test_stream_without_state_is_read_again_from_its_start_with_a_warning(position):
    async def run():
        first = start_stream(Plain(5, bad=(1,)))
        before = await outcomes(first, position)
        second = start_stream(Plain(5, bad=(1,)))
        second.load_state_dict(first.state_dict())
        with pytest.warns(UserWarning, match=f"Plain has no state_dict: to continue after {position} samples"):
            warn_of_rereading({"children": [first.state_dict()]})
        assert second.state_dict() == first.state_dict()
        assert before + await outcomes(second) == [0, "ValueError(1)", 2, 3, 4]

    asyncio.run(run())


def test_state_at_the_start_needs_no_warning(recwarn):
    async def run():
        second = start_stream(Plain(2))
        state = start_stream(Plain(2)).state_dict()
        second.load_state_dict(state)
        warn_of_rereading(state)
        assert await outcomes(second) == [0, 1]

    asyncio.run(run())
    assert not recwarn.list


def test_state_is_a_copy():
    async def run():
        dataset = StatefulDataset(5)
        dataset.state_dict = lambda: dataset.__dict__
        iterator = start_stream(dataset)
        await anext(iterator)
        state = iterator.state_dict()
        await anext(iterator)
        assert state["dataset"]["position"] == 1

    asyncio.run(run())


async def test_state_of_a_dataset_that_has_none_now_is_refused():
    state = start_stream(StatefulDataset(5)).state_dict()
    with pytest.raises(StateError, match="one of Plain, which has no load_state_dict"):
        start_stream(Plain(5)).load_state_dict(state)


class FailsForEver(Plain):
    """When it is started after `fails` was set, each read fails."""

    fails = False

    def __aiter__(self):
        return PlainIterator(Plain(1000, bad=range(1000)) if self.fails else self)


async def test_stream_that_fails_for_ever_when_its_start_is_read_again_is_an_error():
    stream = FailsForEver(2)
    dataset = stream.split(remainder="repeat", rank=3, world_size=4)
    restored = aiter(dataset)
    restored.load_state_dict(aiter(dataset).state_dict())
    reading = asyncio.ensure_future(anext(restored))
    stream.fails = True  # before the task runs
    with pytest.raises(ValueError, match="100"):
        await reading
