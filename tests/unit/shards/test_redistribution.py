"""What readers had left is dealt anew: every sample once, in ranges of equal length where they must be equal."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._core.shards.positions import PartPosition
from headrace._core.shards.redistribution import Dealing, Division, Readers, deal_parts


def samples(parts, counts):
    """All samples of parts, as pairs of part and number."""
    found = []
    for part in parts:
        if isinstance(part, int):
            found += [(part, number) for number in range(counts[part])]
        else:
            stop = counts[part.part] if part.stop is None else part.stop
            found += [(part.part, number) for number in range(part.given, stop)]
    return found


@st.composite
def stopped(draw, lists, counts, readers):
    """A division of readers of these parts, some of which are open, and what they have left."""
    opened, rests, left = [], [], []
    for parts in lists:
        number = draw(st.integers(0, len(parts)))
        opened.append(number)
        for part in draw(st.lists(st.sampled_from(parts[:number]), unique=True) if number else st.just([])):
            position = PartPosition(part) if isinstance(part, int) else part
            stop = counts[position.part] if position.stop is None else position.stop
            taken = draw(st.integers(0, stop - position.given))
            rests.append(position.after(taken))
        left += parts[number:]
    return Division(readers, tuple(opened), tuple(rests), None, 0), [*rests, *left]


@st.composite
def streams(draw):
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    order = draw(st.permutations(range(len(counts))))
    return counts, order


def check(dealt, left, remainder):
    """Compare samples dealt to readers with those that were left."""
    together = Counter(sample for one in dealt for sample in one)
    if remainder in ("keep", "drop"):
        assert together == Counter(left)
    else:
        assert len({len(one) for one in dealt}) == 1
        assert together.keys() == Counter(left).keys()
        assert together.total() - len(left) < len(dealt)


@given(st.data(), streams(), st.integers(1, 4), st.integers(1, 5), st.sampled_from(["keep", "drop", "pad", "repeat"]))
def test_every_sample_is_dealt_once(data, stream, old, new, remainder):
    counts, order = stream
    lists = [list(order[index::old]) for index in range(old)]
    division, left = data.draw(stopped(lists, counts, Readers(old, old)))
    dealing = Dealing(order, counts, remainder)
    dealt = deal_parts(dealing, [division], Readers(new, new))
    equal = new > 1 and remainder != "keep"
    check([samples(one.parts, counts) for one in dealt], samples(left, counts), remainder if equal else "keep")
    lengths = {one.length for one in dealt}
    if not equal:
        assert lengths == {None}
    elif remainder == "drop":
        assert lengths == {len(samples(left, counts)) // new}
    else:
        assert lengths == {len(samples(one.parts, counts)) for one in dealt}
    later, left_later = data.draw(stopped([list(one.parts) for one in dealt], counts, Readers(new, new)))
    again = deal_parts(dealing, [division, later], Readers(old, old))
    check([samples(one.parts, counts) for one in again], samples(left_later, counts), remainder if old > 1 else "keep")


@given(st.data(), streams(), st.integers(1, 4), st.integers(1, 5))
def test_parts_of_unknown_size_are_dealt_whole(data, stream, old, new):
    counts, order = stream
    lists = [list(order[index::old]) for index in range(old)]
    division, left = data.draw(stopped(lists, counts, Readers(old, old)))
    dealt = deal_parts(Dealing(order, None, "drop"), [division], Readers(new, new))
    check([samples(one.parts, counts) for one in dealt], samples(left, counts), "keep")
    assert max(len(one.parts) for one in dealt) - min(len(one.parts) for one in dealt) <= 1


@pytest.mark.parametrize(("remainder", "length"), [("drop", 5), ("pad", 6), ("repeat", 6)])
def test_windows_count_among_equal_lengths(remainder, length):
    division = Division(Readers(2, 2), (1, 2), (PartPosition(0, given=3),), None, 10)
    dealing = Dealing(range(4), [5, 6, 5, 7], remainder)
    dealt = deal_parts(dealing, [division], Readers(3, 3), [4, 6])
    assert [stop - start for _, start, stop in dealt[0].windows] == [4, length - 4]
    for one in dealt:
        in_windows = sum(stop - start for _, start, stop in one.windows)
        assert in_windows + one.length == length
        surplus = 2 if remainder == "drop" and one is dealt[-1] else 0
        assert len(samples(one.parts, [5, 6, 5, 7])) == one.length + surplus


def test_declared_numbers_are_what_is_left_of_them():
    division = Division(Readers(2, 2), (1, 1), (), 11, 4)
    dealt = deal_parts(Dealing(range(9), None, "pad"), [division], Readers(3, 3), [4])
    assert [one.length + sum(stop - start for _, start, stop in one.windows) for one in dealt] == [5, 5, 5]


def test_order_of_the_epoch_is_kept():
    division = Division(Readers(2, 2), (1, 2), (PartPosition(7, given=1),), None, 0)
    (dealt,) = deal_parts(Dealing([7, 3, 5, 0, 2], None, "keep"), [division], Readers(1, 1))
    assert dealt.parts == [PartPosition(7, given=1), 5, 2]


def test_workers_of_one_rank_may_get_unequal_numbers():
    division = Division(Readers(2, 2), (0, 0), (), None, 0)
    dealt = deal_parts(Dealing(range(5), [3, 3, 3, 3, 3], "drop"), [division], Readers(2, 1))
    assert [(list(one.parts), one.length) for one in dealt] == [([0, 2, 4], None), ([1, 3], None)]
