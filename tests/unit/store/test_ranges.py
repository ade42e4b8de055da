"""Ranges are coalesced: each is covered, little is read in vain, and the requested bytes are returned."""

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._store.ranges import Ranges, plan_spans, read_ranges

OBJECTS = [bytes((i * 7 + number) % 251 for i in range(5000)) for number in range(4)]
RANGES = st.lists(
    st.builds(
        lambda number, start, length: (number, start, start + length),
        st.integers(0, 3),
        st.integers(0, 4500),
        st.integers(0, 500),
    ),
    max_size=40,
)
GAPS, LARGEST = st.integers(0, 600), st.integers(1, 3000)


def ranges_of(triples):
    return Ranges(
        *(np.array([triple[i] for triple in triples], dtype=np.int64) for i in range(3))
    )


@given(RANGES, GAPS, LARGEST)
def test_each_range_is_covered_once_and_neighbours_are_joined_as_far_as_allowed(
    triples, gap, largest
):
    ranges = ranges_of(triples)
    spans = plan_spans(ranges, gap=gap, largest=largest)
    covered = sorted(i for span in spans for i in span.members)
    assert covered == [i for i, (_, start, stop) in enumerate(triples) if stop > start]
    for span in spans:
        members = [triples[i] for i in span.members]
        assert members == sorted(members, key=lambda member: member[1])
        assert span.stop - span.start <= max(
            largest, *(stop - start for _, start, stop in members)
        )
        reached = span.start
        for number, start, stop in members:
            assert number == span.object
            assert start - reached <= gap
            reached = max(reached, stop)
        assert reached == span.stop, "bytes behind the last range are read for nothing"
    for before, behind in itertools.pairwise(plan_spans(ranges, gap=gap, largest=10**9)):
        assert before.object < behind.object or behind.start - before.stop > gap


@given(RANGES, LARGEST)
def test_what_is_read_is_what_was_asked_for(triples, largest):
    requests = []

    async def read(number, start, stop):
        requests.append((number, start, stop))
        return memoryview(OBJECTS[number])[start:stop]

    ranges = ranges_of(triples)
    views = asyncio.run(read_ranges(ranges, read, largest=largest))
    assert [bytes(view) for view in views] == [
        OBJECTS[number][start:stop] for number, start, stop in triples
    ]
    assert len(requests) == len(plan_spans(ranges, largest=largest))


def test_objects_of_a_terabyte_and_numbers_far_apart_are_kept_apart():
    big = 2**40
    spans = plan_spans(
        ranges_of([(2**60, big, big + 5), (7, 0, 1), (2**60, big + 5, big + 9)])
    )
    assert [
        (span.object, span.start, span.stop, span.members.tolist()) for span in spans
    ] == [
        (7, 0, 1, [1]),
        (2**60, big, big + 9, [0, 2]),
    ]


async def test_one_error_is_raised_as_itself_and_ends_the_others():
    ended = []

    async def read(number, start, stop):
        if start:
            raise OSError("gone")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(start)
            raise

    with pytest.raises(OSError, match="gone"):
        await read_ranges(Ranges.of([(0, 1), (1_000_000, 1_000_001)]), read)
    assert ended == [0]


@pytest.mark.parametrize("wrong", [(-1, 5), (1, 0)])
def test_a_range_before_the_beginning_is_refused(wrong):
    with pytest.raises(ValueError, match="must not begin before 0"):
        plan_spans(Ranges.of([wrong]))
