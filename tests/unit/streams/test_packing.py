"""Packed sequences have every token of the documents once, in order, with segments, positions and labels."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._streams.resumable import start_stream
from tests.unit.streams.reading import Count, outcomes, stream


def pack(documents, *args, **options):
    """The sequences as dicts of lists."""
    packed = stream(*documents).pack(*args, **options)
    return [
        {name: row if type(row) is list else row.tolist() for name, row in sequence.items()}
        for sequence in packed
    ]


def segments(sequence, field="tokens"):
    """The pieces of a sequence; its segment numbers ascend from 1, with padding at the end."""
    numbers = sequence["segment_ids"]
    used = len(numbers) - numbers.count(0)
    found = [[*piece] for _, piece in itertools.groupby(range(used), key=numbers.__getitem__)]
    assert list(dict.fromkeys(numbers[:used])) == [*range(1, len(found) + 1)]
    assert not any(numbers[used:])
    positions = [
        place for piece in [*found, range(used, len(numbers))] for place in range(len(piece))
    ]
    assert sequence["positions"] == positions
    assert not any(sequence["tokens"][used:])
    return [[sequence[field][place] for place in piece] for piece in found]


def numbered(lengths):
    """Documents in which all tokens differ."""
    ends = list(itertools.accumulate(lengths))
    return [
        list(range(end - length + 1, end + 1)) for length, end in zip(lengths, ends, strict=True)
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.integers(1, 17),
    st.sampled_from(["concat", "first_fit", "best_fit"]),
    st.integers(1, 4),
)
def test_every_token_comes_once_in_the_order_of_its_document(lengths, seq_len, strategy, window):
    documents = numbered(lengths)
    packed = pack(documents, seq_len, strategy, window=window, labels="next")
    pieces = [piece for each in packed for piece in segments(each)]
    expected = [
        document[at : at + seq_len]
        for document in documents
        for at in range(0, len(document), seq_len)
    ]
    if strategy == "concat":
        assert list(itertools.chain(*pieces)) == list(range(1, sum(lengths) + 1))
        assert all(all(each["segment_ids"]) for each in packed[:-1])
    else:
        assert sorted(pieces) == expected
    following = {
        token: after for document in documents for token, after in itertools.pairwise(document)
    }
    for each in packed:
        assert each["labels"] == [following.get(token, -100) for token in each["tokens"]]


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
        {"ids": np.uint16([4, 5]), "labels": np.uint16([4, 5]), "weight": np.array([2, 2], ">f4")},
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


async def test_documents_that_cannot_be_packed_are_errors_of_theirs():
    good = {"ids": [7], "mask": [1]}
    for document, found in (
        ({"tokens": [1], "mask": [1]}, r"has 'ids': object \(\), 'mask': int64 \(1,\)"),
        ({"ids": [1, 2], "mask": [1]}, r"'ids': int64 \(2,\), 'mask': int64 \(1,\)"),
        ({"ids": [0.5], "mask": [1]}, "float64"),
        ({"ids": [[1]], "mask": [[1]]}, r"\(1, 1\)"),
        ({"ids": [1], "mask": ["text"]}, "'mask': <U4"),
        ([1, 2], "of one length"),
        (
            {**good, "text": "a"},
            r"the keys \['ids', 'mask', 'text'\] in place of \['ids', 'mask'\]",
        ),
    ):
        packed = aiter(stream(good, document, good).pack(2, fields=("ids", "mask")))
        with pytest.raises(ValueError, match=found):
            await anext(packed)
        assert (await anext(packed))["ids"].tolist() == [7, 7]


def test_no_document_waits_for_more_than_four_windows_of_sequences():
    packed = pack([[1], *[[2] * 4 for _ in range(100)]], 4, "best_fit", window=3)
    assert [1, 0, 0, 0] in [each["tokens"] for each in packed[: 4 * 3 + 1]]


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
    assert sorted([len(each) for each in segments(one)] for one in packed) == sorted(expected)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=40),
    st.integers(1, 17),
    st.sampled_from(["concat", "first_fit", "best_fit"]),
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from(["cut", "truncate", "drop"]),
)
def test_options_together(lengths, seq_len, strategy, align, pad_to, too_long):
    tokens = numbered([length for length, _ in lengths])
    documents = [
        {"tokens": document, "images": images, "number": number}
        for number, (document, (_, images)) in enumerate(zip(tokens, lengths, strict=True))
    ]
    packed = pack(
        documents,
        seq_len,
        strategy,
        window=3,
        carry=("number", "images"),
        limits={"images": 5},
        align=align,
        pad_to=pad_to,
        too_long=too_long,
    )
    found = [[] for _ in documents]
    for sequence in packed:
        ids = np.array(sequence["segment_ids"])
        used = int(np.flatnonzero(ids)[-1]) + 1
        assert used <= seq_len
        assert len(ids) == -(-used // pad_to) * pad_to
        assert sum(sequence["images"]) <= 5
        assert len(sequence["number"]) == ids.max()
        for segment, number in enumerate(sequence["number"], 1):
            (places,) = np.nonzero(ids == segment)
            assert places[0] % align == 0
            assert [sequence["positions"][place] for place in places] == [*range(len(places))]
            found[number] += [sequence["tokens"][place] for place in places]
    kept = {"cut": 20, "truncate": seq_len, "drop": 0}[too_long]
    for document, given_tokens in zip(tokens, found, strict=True):
        assert sorted(given_tokens) == document[: kept if len(document) > seq_len else 20]
    if too_long != "cut" and packed:
        left_out = sum(len(document) > seq_len for document in tokens)
        assert packed[-1]["too_long"] <= left_out
        if 0 < len(tokens[-1]) <= seq_len:  # then a sequence follows each long document
            assert packed[-1]["too_long"] == left_out


async def test_document_that_exceeds_a_limit_alone_is_an_error_of_its_own():
    good = {"tokens": [7], "images": 2, "source": "a"}
    for document, error in (
        ({**good, "images": 4}, r"a document alone has \[4\], more than limits={'images': 3}"),
        ({"tokens": [7], "source": "a"}, r"in place of \['images', 'source', 'tokens'\]"),
        ([7], r"the keys \['tokens'\] in place of"),
    ):
        packed = aiter(
            stream(good, document, good).pack(1, carry=("source",), limits={"images": 3})
        )
        assert (await anext(packed))["source"] == ["a"]
        with pytest.raises(ValueError, match=error):
            await anext(packed)
        assert (await anext(packed))["tokens"].tolist() == [7]
