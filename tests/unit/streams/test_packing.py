"""Packed sequences have every token of the documents once, in order, with segments, positions and labels."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._streams.resumable import start_stream
from tests.model import reference
from tests.unit.streams.reading import Count, outcomes, stream


def pack(documents, *args, **options):
    """The sequences as dicts of lists."""
    packed = stream(*documents).pack(*args, **options)
    return [
        {
            name: row if type(row) is list else row.tolist()
            for name, row in sequence.items()
        }
        for sequence in packed
    ]


def numbered(lengths):
    """Documents in which all tokens differ."""
    ends = list(itertools.accumulate(lengths))
    return [
        list(range(end - length + 1, end + 1))
        for length, end in zip(lengths, ends, strict=True)
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=60),
    st.integers(1, 17),
    st.sampled_from(["concat", "first_fit", "best_fit"]),
    st.integers(1, 4),
    st.fixed_dictionaries(
        {
            "carry": st.just(("number", "images")),
            "too_long": st.sampled_from(["cut", "truncate", "drop"]),
        },
        optional={
            "limits": st.just({"images": 5}),
            "align": st.integers(1, 4),
            "pad_to": st.integers(1, 20),
        },
    ),
)
def test_every_token_comes_once_in_the_order_of_its_document(
    lengths, seq_len, strategy, window, options
):
    """In the places of the reference of the model, whatever the options."""
    tokens = numbered([length for length, _ in lengths])
    documents = [
        {"tokens": document, "images": images, "number": number}
        for number, (document, (_, images)) in enumerate(
            zip(tokens, lengths, strict=True)
        )
    ]
    packed = pack(documents, seq_len, strategy, window=window, labels="next", **options)
    kept = seq_len if options["too_long"] == "truncate" else None
    following = dict(
        pair for document in tokens for pair in itertools.pairwise(document[:kept])
    )
    for each in packed:
        assert each.pop("labels") == [
            following.get(token, -100) for token in each["tokens"]
        ]
    assert packed == reference.packed(documents, seq_len, strategy, window, **options)
    if options["too_long"] == "cut":
        given_tokens = [token for each in packed for token in each["tokens"] if token]
        assert sorted(given_tokens) == [*range(1, sum(map(len, tokens)) + 1)]


def test_labels_of_models_that_shift_them_leave_out_the_first_token_of_each_document():
    assert pack([[5, 6, 7], [8, 9]], 7, "first_fit", labels="same")[0]["labels"] == [
        -100,
        6,
        7,
        -100,
        9,
        -100,
        -100,
    ]


def test_fields_of_dicts_are_packed_beside_their_tokens():
    documents = [
        {
            "ids": torch.tensor([1, 2, 3]),
            "labels": np.uint16([1, 2, 3]),
            "weight": np.float32([0.5, 1, 1]),
        },
        {
            "ids": np.uint16([4, 5]),
            "labels": np.uint16([4, 5]),
            "weight": np.array([2, 2], ">f4"),
        },
    ]
    (packed,) = stream(*documents).pack(6, "best_fit", fields=("ids", "labels", "weight"))
    assert {name: row.tolist() for name, row in packed.items()} == {
        "ids": [1, 2, 3, 4, 5, 0],
        "labels": [1, 2, 3, 4, 5, -100],
        "weight": [0.5, 1, 1, 2, 2, 0],
        "segment_ids": [1, 1, 1, 2, 2, 0],
        "positions": [0, 1, 2, 0, 1, 0],
    }
    assert [row.dtype for row in packed.values()] == [
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int32,
        torch.int32,
    ]


MASKED = {"ids": [7], "mask": [1]}
COUNTED = {"tokens": [7], "images": 2, "source": "a"}


@pytest.mark.parametrize(
    ("good", "options", "wrong"),
    [
        (
            MASKED,
            {"fields": ("ids", "mask")},
            [
                (
                    {"tokens": [1], "mask": [1]},
                    r"has 'ids': object \(\), 'mask': int64 \(1,\)",
                ),
                (
                    {"ids": [1, 2], "mask": [1]},
                    r"'ids': int64 \(2,\), 'mask': int64 \(1,\)",
                ),
                ({"ids": [0.5], "mask": [1]}, "float64"),
                ({"ids": [[1]], "mask": [[1]]}, r"\(1, 1\)"),
                ({"ids": [1], "mask": ["text"]}, "'mask': <U4"),
                ([1, 2], "of one length"),
                (
                    {**MASKED, "text": "a"},
                    r"the keys \['ids', 'mask', 'text'\] in place of \['ids', 'mask'\]",
                ),
            ],
        ),
        (
            COUNTED,
            {"carry": ("source",), "limits": {"images": 3}},
            [
                (
                    {**COUNTED, "images": 4},
                    r"a document alone has \[4\], more than limits={'images': 3}",
                ),
                (
                    {"tokens": [7], "source": "a"},
                    r"in place of \['images', 'source', 'tokens'\]",
                ),
                ([7], r"the keys \['tokens'\] in place of"),
            ],
        ),
    ],
    ids=["fields", "limits"],
)
async def test_documents_that_cannot_be_packed_are_errors_of_theirs(good, options, wrong):
    for document, error in wrong:
        packed = aiter(stream(good, document, good).pack(1, **options))
        first = await anext(packed)
        with pytest.raises(ValueError, match=error):
            await anext(packed)
        assert repr(await anext(packed)) == repr(first)


async def test_documents_that_differ_after_a_restore_are_an_error():
    packed = Count(90).map(lambda number: [1] * 7).pack(7, "first_fit", window=2)
    state, restored = start_stream(packed).state_dict(), start_stream(packed)
    restored.load_state_dict({**state, "used": [[6], [6]], "opened": [0, 0]})
    assert "the stream has other documents now" in str(await outcomes(restored))


# Test vectors of Grain 0.2.18: lengths of documents, length of a sequence, strategy, and the lengths
# of the documents in each sequence.
GRAIN = [
    ([4, 8, 2], 10, "first_fit", [[4, 2], [8]]),
    ([4, 8, 2], 10, "best_fit", [[4], [8, 2]]),
    ([10, 15, 4], 20, "first_fit", [[10, 4], [15]]),
    ([10, 15, 4], 20, "best_fit", [[10], [15, 4]]),
    ([50, 70, 25, 40], 100, "first_fit", [[50, 25], [70], [40]]),
    ([50, 70, 25, 40], 100, "best_fit", [[50, 40], [70, 25]]),
    ([10, 15, 4, 10], 20, "first_fit", [[10, 4], [15], [10]]),
    ([10, 15, 4, 10], 20, "best_fit", [[10, 10], [15, 4]]),
]


@pytest.mark.parametrize(("lengths", "seq_len", "strategy", "expected"), GRAIN)
def test_documents_are_placed_as_by_grain(lengths, seq_len, strategy, expected):
    packed = pack(numbered(lengths), seq_len, strategy, window=3)
    found = [[*Counter(filter(None, one["segment_ids"])).values()] for one in packed]
    assert sorted(found) == sorted(expected)
