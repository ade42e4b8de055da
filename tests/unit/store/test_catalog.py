"""A catalog of objects is sorted, distinct and compact, with unchanged values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._core.manifest.labels import compact
from headrace._core.store.catalog import UNKNOWN, CatalogBuilder, first_repeated

few = st.lists(st.text("ab/", max_size=3), max_size=12)


@given(few, st.sampled_from([hash, len, lambda key: 0]))
def test_the_first_key_that_is_there_again_is_found_whatever_its_hash(keys, hashed):
    again = [(keys.index(key), position) for position, key in enumerate(keys) if key in keys[:position]]
    found = first_repeated(keys, hashed)
    assert (found is None) == (not again)
    if found is not None:
        assert found == again[0]


@given(few)
def test_objects_are_sorted_and_of_those_told_twice_the_last_is_kept(keys):
    builder = CatalogBuilder()
    for position, key in enumerate(keys):
        builder.append(key, position, f'"{position}"' if position % 3 else None)
    catalog = builder.sorted()
    last = {key: position for position, key in enumerate(keys)}
    assert catalog.keys == tuple(sorted(last))
    for position, key in enumerate(catalog.keys):
        assert catalog.sizes[position] == last[key]
        assert (catalog.etags[position] if catalog.etags else None) == (f'"{last[key]}"' if last[key] % 3 else None)


def test_what_is_known_of_no_object_is_left_out():
    builder = CatalogBuilder()
    builder.append("a", UNKNOWN, None)
    assert (builder.catalog().sizes, builder.catalog().etags) == (None, None)


@pytest.mark.parametrize(
    "labels",
    [
        [1, -(2**63), 2**63 - 1],
        [1, 2**63],
        [1.5, float("inf")],
        [True, False],
        [1, True, 1.0],
        ["a", "a", 1],
        [None],
        [np.int64(3)],
        [[1], (2,), {"x": 3}],
        [],
    ],
    ids=repr,
)
def test_compact_labels_are_the_same_type_and_all(labels):
    made = compact(labels)
    assert list(made) == labels
    assert [*map(type, made)] == [*map(type, labels)]


def test_equal_strings_are_kept_once():
    one, other = "".join(["ca", "t"]), "".join(["c", "at"])
    assert one is not other
    first, second = compact([one, other])
    assert first is second
