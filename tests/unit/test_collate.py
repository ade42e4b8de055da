"""Batches are put together by torch's rules; what a store gives undecoded is kept."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import headrace as hr
from headrace.collate import HUGE, default_collate


def test_undecoded_memory_stays_a_list_and_missing_labels_none():
    views = [memoryview(b"one"), memoryview(b"three")]
    assert default_collate([(view, None) for view in views]) == [views, None]


@pytest.mark.parametrize(
    ("samples", "remedy"),
    [
        ([torch.zeros(1), torch.zeros(2)], "torch's pad_sequence"),
        ([object, object], "transform="),
        ([None, None], "leave out samples that are None"),
        ([{"x": 1}, {"x": None}], "leave out samples that are None"),
        (
            [{"a": torch.zeros(1)}, {"a": torch.zeros(2)}],
            "sample['a'] is [2] at index 1, and [1] at index 0",
        ),
        (
            [{"a": 0, "b": "x"}, {"b": "y"}],
            "sample['a'] is missing at index 1, and a number at index 0",
        ),
        (
            [(0, None), (0, 1)],
            "sample[1] is a number at index 1, and NoneType at index 0",
        ),
        ([(0, [object])] * 2, "it is sample[1][0]"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_of_torchs_collate_has_a_remedy(samples, remedy, num_workers):
    loader = hr.DataLoader(samples, 2, num_workers=num_workers)
    with loader, pytest.raises((RuntimeError, TypeError, KeyError)) as caught:
        list(loader)
    assert [note for note in caught.value.__notes__ if remedy in note]


@pytest.mark.parametrize(
    "samples", [[3, -1], [1, True], [1, 2.5], [1.5, 2], [2**70, 1]], ids=str
)
def test_numbers_are_collated_as_by_torch(samples):
    def outcome(loader):
        try:
            batch = next(iter(loader(samples, 2)))
        except (ValueError, RuntimeError) as error:
            return str(error)
        return batch.dtype, batch.tolist()

    assert outcome(hr.DataLoader) == outcome(torch.utils.data.DataLoader)


@pytest.mark.parametrize(
    "change",
    [
        lambda sample, index: sample,
        lambda sample, index: sample.bfloat16(),
        lambda sample, index: sample.to(memory_format=torch.channels_last),
        lambda sample, index: sample.transpose(1, 3),
        lambda sample, index: (
            sample.transpose(1, 3) if index % 2 else sample.transpose(1, 3).contiguous()
        ),
        lambda sample, index: sample.requires_grad_(),
    ],
    ids=[
        "as it is",
        "bfloat16",
        "channels last",
        "transposed",
        "transposed in part",
        "with gradient",
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_large_batches_are_laid_out_as_by_torch(change, num_workers):
    samples = [change(torch.rand(2, 4, 128, 256), index) for index in range(8)]
    assert sum(sample.nbytes for sample in samples) >= HUGE

    def outcome(loader):
        try:
            batch = next(iter(loader(samples, 8, num_workers=num_workers)))
        except RuntimeError as error:
            return type(error), torch.empty(0)
        return (
            batch.dtype,
            batch.stride(),
            batch.requires_grad,
            batch.data_ptr() % 64,
        ), batch

    (ours, batch), (torchs, same) = map(
        outcome, (hr.DataLoader, torch.utils.data.DataLoader)
    )
    assert ours == torchs
    assert torch.equal(batch, same)


@pytest.mark.parametrize(
    "rows", [torch.rand(16, 1024, 512), torch.rand(16, 1024, 512).transpose(1, 2)]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_large_rows_of_a_tensor_dataset_are_those_of_torch(rows, num_workers):
    dataset = torch.utils.data.TensorDataset(rows, torch.arange(16))
    (ours, numbers), (theirs, same) = (
        next(iter(loader(dataset, 8, sampler=range(15, -1, -1), num_workers=num_workers)))
        for loader in (hr.DataLoader, torch.utils.data.DataLoader)
    )
    assert torch.equal(ours, theirs)
    assert numbers.tolist() == same.tolist()


NUMBERS = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64")


@pytest.mark.parametrize("of", ["list", "large_list", "list_view", "fixed"])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_column_of_lists_is_values_and_lengths(of, dtype):
    kind = pa.bool_() if dtype == "bool" else pa.from_numpy_dtype(dtype)
    lists = {"list": pa.list_, "large_list": pa.large_list, "list_view": pa.list_view}
    kind = pa.list_(kind, 2) if of == "fixed" else lists[of](kind)
    rows = [[0, 1], [1, 1], [1, 0]] if of == "fixed" else [[0, 1, 1], [], [1]]
    rows = [np.array(row, dtype).tolist() for row in rows]
    table = pa.table({"lists": pa.array([[*rows[0]], *rows], kind)}).slice(1)
    (column,) = hr.collate_table(table).values()
    assert column["values"].dtype == getattr(torch, dtype)
    assert (
        column["values"].tolist() == table["lists"].combine_chunks().flatten().to_pylist()
    )
    assert column["lengths"].dtype == torch.int64
    assert column["lengths"].tolist() == [len(row) for row in rows]


def test_columns_of_other_types_are_tensors_or_lists():
    table = pa.table(
        {
            "number": [1.5, 2.5],
            "text": ["a", "b"],
            "category": pa.array(["a", "a"]).dictionary_encode(),
            "nested": [[[1], []], [[2, 3]]],
            "texts": [["x", "y"], []],
            "struct": [{"x": 1}, {"x": 2}],
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
        }
    )
    batch = hr.collate_table(pa.concat_tables([table, table]))
    assert batch.pop("number").tolist() == [1.5, 2.5] * 2
    nested, texts = batch.pop("nested"), batch.pop("texts")
    assert nested["lengths"].tolist() == [2, 1] * 2
    assert nested["values"]["lengths"].tolist() == [1, 0, 2] * 2
    assert nested["values"]["values"].tolist() == [1, 2, 3] * 2
    assert texts["values"] == ["x", "y"] * 2
    assert texts["lengths"].tolist() == [2, 0] * 2
    assert batch == {name: table[name].to_pylist() * 2 for name in batch}
    assert (
        hr.collate_table(table.slice(0, 0))["nested"]["values"]["values"].tolist() == []
    )


@pytest.mark.parametrize("rows", [[[1], None], [[1, None], [2]]])
def test_nulls_in_a_table_are_an_error(rows):
    with pytest.raises(ValueError, match="column 'x' has nulls"):
        hr.collate_table(pa.table({"x": rows}))
