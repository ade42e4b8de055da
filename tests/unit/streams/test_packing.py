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
    return [{name: row.tolist() for name, row in sequence.items()} for sequence in packed]


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


def test_positions_of_a_batch_give_cu_seqlens_with_padding_as_a_document():
    packed = pack(numbered([3, 4, 2]), 6, "best_fit")
    positions = torch.tensor([each["positions"] for each in packed])
    starts = (positions.flatten() == 0).nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([positions.numel()])]).int()
    assert cu_seqlens.tolist() == [0, 4, 6, 9, 12]


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
        ({**good, "text": "a"}, r"would leave out \['text'\]"),
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
    restored.load_state_dict({**state, "used": [6, 6], "opened": [0, 0]})
    assert "the stream has other documents now" in str(await outcomes(restored))
