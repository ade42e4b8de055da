"""Ranges are joined so that each is covered, little is read for nothing, and what comes back is what was asked for."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.io.ranges import Range, plan_spans, read_ranges

OBJECT = bytes(i * 7 % 251 for i in range(5000))
RANGES = st.lists(st.builds(Range, st.integers(0, 4500), st.integers(0, 500)), max_size=40)
GAPS, LARGEST = st.integers(0, 600), st.integers(1, 3000)


@given(RANGES, GAPS, LARGEST)
def test_every_range_that_is_not_empty_is_covered_once(ranges, gap, largest):
    spans = plan_spans(ranges, gap=gap, largest=largest)
    members = [i for span in spans for i in span.members]
    assert sorted(members) == [i for i, wanted in enumerate(ranges) if wanted.length]
    for span in spans:
        for i in span.members:
            assert span.start <= ranges[i].start
            assert ranges[i].stop <= span.start + span.length


@given(RANGES, GAPS, LARGEST)
def test_no_gap_is_wider_than_allowed_and_no_joined_request_larger(ranges, gap, largest):
    for span in plan_spans(ranges, gap=gap, largest=largest):
        longest = max(ranges[i].length for i in span.members)
        assert span.length <= max(largest, longest)
        reached = span.start
        for wanted in sorted((ranges[i] for i in span.members), key=lambda wanted: wanted.start):
            assert wanted.start - reached <= gap
            reached = max(reached, wanted.stop)
        assert reached == span.start + span.length, "bytes behind the last range are read for nothing"


@given(RANGES, GAPS)
def test_neighbours_that_may_be_joined_are(ranges, gap):
    spans = plan_spans(ranges, gap=gap, largest=10**9)
    for before, behind in itertools.pairwise(spans):
        assert behind.start - (before.start + before.length) > gap


@given(RANGES, GAPS, LARGEST)
def test_what_is_read_is_what_was_asked_for(ranges, gap, largest):
    requests = []

    async def read(start, length):
        requests.append((start, length))
        return memoryview(OBJECT)[start : start + length]

    views = asyncio.run(read_ranges(ranges, read, gap=gap, largest=largest))
    assert [bytes(view) for view in views] == [OBJECT[wanted.start : wanted.stop] for wanted in ranges]
    assert len(requests) == len(plan_spans(ranges, gap=gap, largest=largest))


async def test_one_error_is_raised_as_itself_and_ends_the_others():
    ended = []

    async def read(start, length):
        if start:
            raise OSError("gone")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(start)
            raise

    with pytest.raises(OSError, match="gone"):
        await read_ranges([Range(0, 1), Range(1000, 1)], read, gap=0)
    assert ended == [0]


@pytest.mark.parametrize("wrong", [(-1, 5), (0, -1)])
def test_a_range_before_the_beginning_is_refused(wrong):
    with pytest.raises(ValueError, match="before zero"):
        Range(*wrong)
