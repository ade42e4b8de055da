"""`StringArray` behaves as the tuple it stands for."""

import operator
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._core.store.etags import Etags
from headrace._core.store.string_array import StringArray
from headrace._core.transport.shared_pickle import SharedPickle

anything = st.lists(st.text(st.characters(exclude_categories=()), max_size=12), max_size=12)


@given(anything)
def test_it_holds_what_a_tuple_of_the_same_strings_holds(strings):
    packed, wanted = StringArray(strings), tuple(strings)
    assert packed == wanted
    assert tuple(packed) == wanted
    assert len(packed) == len(wanted)
    assert [packed[i] for i in range(-len(wanted), len(wanted))] == [*wanted, *wanted]
    assert pickle.loads(pickle.dumps(packed)) == packed == StringArray(wanted)


@pytest.mark.parametrize("index", [3, -4, 100, -100])
def test_beyond_its_ends_there_is_nothing(index):
    with pytest.raises(IndexError):
        StringArray(["a", "b", "c"])[index]


def test_indices_are_whatever_a_tuple_takes():
    packed = StringArray([str(i) for i in range(300)])
    assert packed[np.uint8(255)] == "255"
    assert packed[np.int64(-1)] == "299"
    assert packed[1:7:2] == ("1", "3", "5")
    with pytest.raises(TypeError):
        operator.getitem(packed, "1")


def test_what_is_no_string_is_refused():
    with pytest.raises(TypeError, match=r"b'a' is not a str"):
        StringArray(["a", b"a"])


def test_each_takes_its_bytes_and_four_more_and_so_does_its_pickle():
    packed = StringArray(f"train/class{i:09}.jpg" for i in range(10_000))
    assert packed.nbytes == 24 * 10_000 + 4 * 10_001
    assert len(pickle.dumps(packed, 5)) < packed.nbytes + 500


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_each_protocol_of_pickle_carries_it(protocol):
    packed = StringArray(["a", "\udcff", "ü" * 300])
    copy = pickle.loads(pickle.dumps(packed, protocol))
    assert tuple(copy) == tuple(packed)
    assert pickle.loads(pickle.dumps(copy, protocol)) == packed


def test_other_processes_map_it_and_a_mapped_one_behaves_as_the_tuple_too():
    strings = tuple(f"train/class{i:09}.jpg" for i in range(20_000))
    shared = SharedPickle.dumps(StringArray(strings))
    assert len(shared.buffers) == 2
    assert isinstance(shared.pickled, bytes)
    assert len(shared.pickled) < 500
    mapped = shared.loads()
    assert mapped == strings
    assert (mapped[-1], mapped[:2], len(mapped), mapped.nbytes) == (
        strings[-1],
        strings[:2],
        20_000,
        24 * 20_000 + 80_004,
    )
    assert SharedPickle.dumps(mapped).loads() == StringArray(strings)


def test_others_are_not_equal():
    packed = StringArray(["ab", "c"])
    assert packed != StringArray(["a", "bc"])
    assert packed != ("ab",)
    assert packed != ["ab", "c"], "as with a tuple"


@pytest.mark.parametrize("tags", [['"' + "0f" * 16 + '"', '"' + "a0" * 16 + '"'], ['"a-2"', None, "0x8DE"], [None]])
def test_tags_come_back_as_they_were_given(tags):
    packed = Etags(tags)
    assert [packed[i] for i in range(len(tags))] == tags
    assert packed[-1] == tags[-1]
    assert bool(packed) == any(tags)
