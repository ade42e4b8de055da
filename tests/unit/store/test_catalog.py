"""The keys of a dataset behave as a tuple, and other processes map them."""

import operator
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._store.listing import StringArray
from headrace._transport.shared_pickle import SharedPickle

anything = st.lists(
    st.text(st.characters(exclude_categories=()), max_size=12), max_size=12
)


@given(anything, anything)
def test_strings_are_those_of_a_tuple(strings, more):
    packed, wanted = StringArray(strings), (*strings, *more)
    packed.extend(StringArray(more))
    assert packed == wanted
    assert tuple(packed) == wanted
    assert [packed[i] for i in range(-len(wanted), len(wanted))] == [*wanted, *wanted]
    for protocol in (2, 4, 5):
        assert (
            pickle.loads(pickle.dumps(packed, protocol)) == packed == StringArray(wanted)
        )


def test_indices_are_those_of_a_tuple():
    packed = StringArray([str(i) for i in range(300)])
    assert (packed[np.uint8(255)], packed[np.int64(-1)], packed[1:7:2]) == (
        "255",
        "299",
        ("1", "3", "5"),
    )
    for index in (300, -301):
        with pytest.raises(IndexError):
            packed[index]
    with pytest.raises(TypeError):
        operator.getitem(packed, "1")
    with pytest.raises(TypeError, match=r"b'a' is not a str"):
        StringArray(["a", b"a"])


def test_other_processes_map_it_and_a_mapped_one_behaves_as_the_tuple_too():
    strings = tuple(f"train/class{i:09}.jpg" for i in range(20_000))
    shared = SharedPickle.dumps(StringArray(strings))
    assert len(shared.extents) == 2
    assert len(shared.pickled) < 500
    mapped = shared.loads()
    assert mapped == strings
    assert (mapped[-1], mapped[:2]) == (strings[-1], strings[:2])
    assert SharedPickle.dumps(mapped).loads() == StringArray(strings)
