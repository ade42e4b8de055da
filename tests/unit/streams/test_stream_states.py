"""Positions of streams: an iterator restored from a saved state continues exactly, from every position."""

import asyncio
import contextlib
import itertools
import json
import random
import re

import numpy as np
import pytest

import headrace as hr
from headrace._engine.sample_functions import SessionFunctions
from headrace._random.seeding import isolated_generators
from headrace._streams.epochs import keys_within, session_epoch
from headrace._streams.resumable import start_stream, warn_of_rereading
from headrace._streams.sample_functions import compute
from tests.unit.streams.reading import Count, Inside, Plain, outcomes

pytestmark = pytest.mark.filterwarnings("ignore:.*has no state_dict")


class OwnState(Count):
    """The dataset itself has a state, and its generators continue after the last sample that it gave."""

    async def __aiter__(self):
        while self.start < self.stop:
            self.start += 1
            yield self.start - 1

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]


def fail_at(*numbers):
    def function(sample):
        if sample in numbers:
            raise ValueError(f"map {sample}")
        return sample

    return function


def odd(sample):
    return sample % 2


def jittered(sample):
    return sample, random.random()


def often(sample):
    return random.random() < 0.6


def document(number):
    return [number + 1] * (number * 7 % 24)


def listed(sequence):
    return [np.asarray(row).tolist() for row in sequence.values()]


N = np.int64  # states have plain values, whatever the types of parameters

COMPOSITIONS = {
    "user, errors": lambda: Count(7, bad=[0, 3, 6]),
    "user, without state, errors": lambda: Plain(5, bad=[1]),
    "user, state of the dataset": lambda: OwnState(6),
    "map, filter": lambda: Count(12, bad=[2]).map(fail_at(5, 7)).filter(odd).map(str),
    "concat": lambda: hr.concat([Count(3), Count(0), Count(4, bad=[0, 3]), Count(2)]),
    "mix": lambda: hr.mix(
        {np.str_("a"): Count(5), N(1): Count(20, 10, bad=[12])},
        {"a": N(1), 1: np.float32(2)},
        seed=N(3),
    ),
    "mix, all, filtered": lambda: hr.mix(
        [
            Count(4).filter(lambda sample: False),
            Count(3),
            Count(0),
            Count(12, 10, bad=[11]),
        ],
        [2, 1, 1, 2],
        stop="all",
    ),
    "mix, all, only errors": lambda: hr.mix(
        [Count(2, bad=[0, 1]), Count(6, 10)], [1, 1], stop="all"
    ),
    "mix, once, by a schedule": lambda: hr.mix(
        [Count(5, bad=[2]), Count(14, 10), Count(100, 100)],
        [(0, [1, 0, 1]), (N(4), np.array([1, 2, 0]))],
        stop=np.str_("once"),
    ),
    "mix, a dataset twice": lambda: (lambda part: hr.mix([part, part], [1, 2]))(
        Count(9).shuffle(4)
    ),
    "mix of mixes": lambda: hr.mix(
        [
            hr.mix([Count(3).shuffle(2), Count(14, 10)], [1, 1], stop="all"),
            Count(106, 100),
        ],
        [1, 1],
        stop="all",
    ),
    "repeat": lambda: Count(3, bad=[1]).repeat(N(3)),
    "shuffle, errors": lambda: Count(14, bad=[0, 3, 4, 9, 13]).shuffle(N(4), N(1)),
    "shuffle of shuffle": lambda: Count(13, bad=[5]).shuffle(3).shuffle(4),
    "split": lambda: Count(8, bad=[1, 5]).shuffle(3).split(rank=1, world_size=3),
    "tokens, errors": lambda: hr.batch_by_tokens(
        Count(15, 1, bad=[2, 7]), N(12), length=N
    ),
    "tokens, buckets": lambda: hr.batch_by_tokens(
        Count(30).map(lambda i: i * 7 % 10 + 1),
        14,
        length=int,
        boundaries=np.array([3, 6]),
        padded=np.bool_(False),
    ),
    "tokens of filter, errors, drop last": lambda: hr.batch_by_tokens(
        Count(40, bad=[4, 21]).filter(odd).map(lambda i: i * 7 % 10),
        20,
        length=int,
        boundaries=[4],
        drop_last=True,
    ),
    "pack, errors": lambda: Count(30, bad=[2, 7]).map(document).pack(9).map(listed),
    "pack, limits": lambda: (
        Count(40, bad=[2, 7])
        .map(
            lambda number: {
                "tokens": document(number),
                "images": number % 4,
                "number": number,
            }
        )
        .pack(
            N(17),
            "first_fit",
            window=2,
            carry=["number"],
            limits={np.str_("images"): N(5)},
            align=N(3),
            pad_to=N(2),
            too_long=np.str_("truncate"),
        )
        .map(listed)
    ),
    "pack of filter": lambda: (
        Count(30, bad=[4])
        .filter(odd)
        .map(document)
        .pack(N(9), np.str_("first_fit"), window=N(3))
        .map(listed)
    ),
    "inside a generator": lambda: Inside(
        Count(5).shuffle(2), Count(9, 5).filter(odd)
    ).map(str),
    "from_async_iterable of a stream": lambda: hr.from_async_iterable(
        lambda: Count(9, bad=[2]).shuffle(3)
    ).take(N(7)),
}


class FakeExecutor:
    """Applies steps on the loop after some turns of it, so that answers overtake each other."""

    def __init__(self):
        self.delays = random.Random(0)

    async def apply(self, task, chunk):
        for _ in range(self.delays.randrange(7)):
            await asyncio.sleep(0)
        return task.apply(chunk)


@contextlib.contextmanager
def loader():
    """What a loader's session sets while it reads a stream."""
    with contextlib.ExitStack() as stack:
        for variable, value in (
            (compute, SessionFunctions(FakeExecutor().apply, lambda: 2, 5, 6)),
            (session_epoch, 0),
        ):
            stack.callback(variable.reset, variable.set(value))
        yield


def in_a_loader(dataset):
    """Start a stream as a session does."""
    with keys_within(0):
        return start_stream(dataset)


def is_plain(value):
    parts = (
        value.values() if type(value) is dict else value if type(value) is list else ()
    )
    return type(value) in (dict, list, str, int, float, bool, type(None)) and all(
        map(is_plain, parts)
    )


def saved(iterator):
    """A state that was written to a file and read again."""
    state = iterator.state_dict()
    assert is_plain(state)
    text = json.dumps(state)
    assert len(text) < 1024
    return json.loads(text)


async def check_every_position(make, start):
    """Restored from a state saved once, and from those that one iterator saves at each sample."""
    asked = start(make())
    expected, states = [], [saved(start(make()))]
    while found := await outcomes(asked, 1):
        expected += found
        states.append(saved(asked))
    await asked.aclose()
    for position in range(len(expected) + 2):  # also after the end
        iterator = start(make())
        assert await outcomes(iterator, position) == expected[:position]
        state = saved(iterator)
        assert saved(iterator) == state
        await iterator.aclose()
        assert saved(iterator) == state, "also after it was closed"
        for each in (state, *states[position : position + 1]):
            restored = start(make())
            restored.load_state_dict(each)
            assert saved(restored) == each
            assert await outcomes(restored) == expected[position:], position
            await restored.aclose()


@pytest.mark.parametrize(
    ("start", "place"),
    [(start_stream, contextlib.nullcontext), (in_a_loader, loader)],
    ids=["alone", "in a loader"],
)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_restored_stream_continues_from_every_position(name, start, place):
    with place():
        asyncio.run(check_every_position(COMPOSITIONS[name], start))


@pytest.mark.parametrize(
    "name", [name for name in COMPOSITIONS if not re.search("without state|inside", name)]
)
async def test_cancelled_wait_keeps_the_position(
    name,
):  # of others, a cancelled generator has ended
    make = COMPOSITIONS[name]
    expected = await outcomes(start_stream(make()))
    for position in range(0, len(expected), 2):
        iterator = start_stream(make())
        before = await outcomes(iterator, position)
        # First while it reads on, then while a restored one reads again.
        for turns in range(4):
            task = asyncio.ensure_future(anext(iterator))
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                with contextlib.suppress(ValueError, StopAsyncIteration):
                    task.result()
                break
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            state = saved(iterator)
            iterator = start_stream(make())
            iterator.load_state_dict(state)
        else:
            assert before + await outcomes(iterator) == expected


async def test_streams_with_the_same_functions_draw_different_random_numbers():
    def mix(streams):
        return hr.mix(streams, [1, 1], stop="all")

    with loader(), isolated_generators():
        for combine in (hr.concat, mix, lambda streams: Inside(*streams)):
            iterator = in_a_loader(
                combine([Count(20).map(jittered).filter(bool) for _ in range(2)])
            )
            drawn = [number for _, number in await outcomes(iterator)]
            assert len(set(drawn)) == len(drawn) > 20
        drawn = [
            number
            for _, number in await outcomes(
                in_a_loader(Count(10).map(jittered).filter(bool).repeat(3))
            )
        ]
        assert len(set(drawn)) == 30


def test_operations_read_again_only_what_they_held():
    async def reads(operation, position):
        iterator = start_stream(operation(Count(10_000)))
        for _ in range(position):
            await anext(iterator)
            state = saved(iterator)
        dataset = Count(10_000)
        restored = start_stream(operation(dataset))
        restored.load_state_dict(state)
        await anext(restored)
        return dataset.reads

    def batches(stream):
        return hr.batch_by_tokens(
            stream.map(lambda i: i % 10 + 1), 40, length=int, boundaries=[5]
        )

    assert asyncio.run(reads(lambda stream: stream.shuffle(50), 725)) == 50 + 24 + 1
    assert asyncio.run(reads(batches, 600)) < 50
    assert (
        asyncio.run(
            reads(lambda stream: stream.map(document).pack(30, "best_fit", window=3), 500)
        )
        < 5 * 3 * 30
    )


HOLDING = pytest.mark.parametrize(
    "operation",
    [
        lambda stream: stream.shuffle(4),
        lambda stream: hr.batch_by_tokens(stream, 40, length=int, boundaries=[2]),
        lambda stream: stream.map(document).pack(15, "best_fit", window=2),
        lambda stream: stream.map(fail_at()).filter(bool),
    ],
    ids=["shuffle", "tokens", "pack", "map, filter"],
)


@HOLDING
async def test_samples_that_cannot_be_read_again_are_an_error(operation):
    """Without them, other samples would be given twice or never."""
    with loader():
        iterator = in_a_loader(operation(Count(20, 1)))
        await outcomes(iterator, 5)  # in the midst of what is held, or of a request
        state = saved(iterator)
        await iterator.aclose()
        for stream, message, times in (
            (
                Count(20, 1, bad=range(20)),
                r"cannot be read again.* ValueError: \d+. Restore",
                3,
            ),
            (Count(2, 1), r"ended after \d samples, but \d had been read", 1),
        ):
            restored = in_a_loader(operation(stream))
            restored.load_state_dict(state)
            for _ in range(times):
                with pytest.raises(hr.StateError, match=message):
                    await anext(restored)
            assert saved(restored) == state
            await restored.aclose()


def mixed(**weights):
    return hr.mix({part: Count(9) for part in weights}, weights)


WRONG = {
    "another operation": (
        Count(9).take(4),
        Count(9).shuffle(4),
        "saved of 'take', but the stream is 'shuffle' now",
    ),
    "a user's stream": (
        Count(9),
        Count(9).shuffle(4),
        "saved of a stream without operations",
    ),
    "an option": (
        Count(9).take(4),
        Count(9).take(5),
        "saved with count=4, but now there is count=5",
    ),
    "seed": (
        hr.mix([Count(9)], [1]),
        hr.mix([Count(9)], [1], seed=2),
        "saved with seed=0",
    ),
    "names of a mix": (
        mixed(a=1, b=2),
        mixed(a=1, b=2, c=1),
        "saved with names=['a', 'b'], but now there is names=['a', 'b', 'c']",
    ),
    "weights of a mix": (
        mixed(a=1, b=2),
        mixed(a=1, b=5),
        "saved with weights=[[0, [1.0, 2.0]]], but now there is weights=[[0, [1.0, 5.0]]]",
    ),
    "number of parts": (
        hr.concat([Count(9)]),
        hr.concat([Count(9), Count(9)]),
        "saved with parts=1",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), WRONG.values(), ids=WRONG)
def test_state_of_another_stream_is_refused(before, after, message):
    with pytest.raises(hr.StateError, match=re.escape(message)):
        start_stream(after).load_state_dict(saved(start_stream(before)))


def test_error_while_a_filter_reads_again_is_a_state_error(tmp_path):
    (tmp_path / "0.txt").write_text("".join(f"{number}\n" for number in range(60)))
    lost = []

    def keep(line):
        if lost:
            raise Unprintable
        return int(line) % 3

    loader, restored = (
        hr.DataLoader(hr.LinesDataset(tmp_path, format="text").filter(keep), 3)
        for _ in range(2)
    )
    with loader, restored:
        assert list(itertools.islice(loader, 4))[3] == ["14", "16", "17"]
        restored.load_state_dict(loader.state_dict())
        lost.append(True)
        with pytest.raises(
            hr.StateError, match=r"cannot be read again.*Unprintable: \(no message"
        ):
            next(iter(restored))


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


STEPS = {
    "mix": lambda: hr.mix(
        [
            Count(120, bad=[50]).filter(often).map(jittered).shuffle(9),
            Count(300, 200).map(jittered).filter(bool).repeat(2),
        ],
        [1, 2],
        seed=4,
        stop="all",
    ),
    "concat": lambda: hr.concat(
        [Count(60).filter(often), Count(5), Count(80).filter(often).map(jittered)]
    ),
    "inside a generator": lambda: Inside(
        Count(80).filter(often), Count(80).filter(often)
    ),
}


@pytest.mark.parametrize("stream", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_continues_with_the_random_numbers_of_functions_before_batching(
    num_workers, stream
):
    def make():
        return hr.DataLoader(
            stream(), 8, num_workers=num_workers, seed=5, collate_fn=list, on_error="skip"
        )

    with make() as loader:
        for _ in range(2):
            batches, states = [], []
            for batch in loader:
                batches.append(batch)
                states.append(json.loads(json.dumps(loader.state_dict())))
    for number in (0, len(states) // 2, len(states) - 2):
        with make() as restored:
            restored.load_state_dict(states[number])
            assert list(restored) == batches[number + 1 :]


# Iterators of users' streams


class CountOfCaller:
    """A stream whose `state_dict` needs arguments, as that of litdata's StreamingDataset."""

    def __iter__(self):
        return iter(range(12))

    def state_dict(self, num_samples_yielded, num_workers=0):
        raise AssertionError(
            "these are the loader's numbers, which only litdata's loader knows"
        )

    def load_state_dict(self, state):
        raise AssertionError


def test_state_dict_with_arguments_is_no_state():
    loader, restored = (hr.DataLoader(CountOfCaller(), batch_size=4) for _ in range(2))
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    restored.load_state_dict(loader.state_dict())
    with pytest.warns(
        UserWarning,
        match="CountOfCaller has no state_dict: to continue after 4 samples, it is read again from "
        "its start, .* must be the same, in the same order",
    ):
        assert [batch.tolist() for batch in restored] == [[4, 5, 6, 7], [8, 9, 10, 11]]


async def test_state_at_the_start_needs_no_warning(recwarn):
    second = start_stream(Plain(2))
    state = start_stream(Plain(2)).state_dict()
    second.load_state_dict(state)
    warn_of_rereading(state)
    assert await outcomes(second) == [0, 1]
    assert not recwarn.list


async def test_state_is_a_copy():
    dataset = OwnState(5)
    dataset.state_dict = lambda: dataset.__dict__
    iterator = start_stream(dataset)
    await anext(iterator)
    state = iterator.state_dict()
    await anext(iterator)
    assert state["dataset"]["start"] == 1


async def test_state_of_a_dataset_that_has_none_now_is_refused():
    state = start_stream(OwnState(5)).state_dict()
    with pytest.raises(hr.StateError, match="one of Plain, which has no load_state_dict"):
        start_stream(Plain(5)).load_state_dict(state)
