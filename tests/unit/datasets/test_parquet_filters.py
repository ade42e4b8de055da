"""`filters=` gives the rows that pyarrow gives for it, and reads no row group without any; one schema for all files."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.errors import ShardError

X = pc.field("x")
FILTERS = [
    (X > 5) & (X <= 41) & (pc.field("year") == 2025),
    pc.field("label").is_null(),
    pc.field("pair", "b") == "1",
    pc.starts_with(pc.field("text"), "row 4") & ~(X == 44),
    pc.scalar(value=True),
    X < 0,
    [("x", ">", 33)],
    [("label", "=", "cat"), ("x", "not in", {3, 4})],
    [[("x", "<", 4)], [("year", "=", 2026), ("text", "in", ["row 5", "row 8"])]],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """60 rows in row groups of 3 rows, in one file for each label and year."""
    path = tmp_path_factory.mktemp("table")
    table = pa.table(
        {
            "x": range(60),
            "text": [f"row {i}" for i in range(60)],
            "pair": [{"a": i, "b": str(i % 2)} for i in range(60)],
            "part": np.arange(60) / 4,
            "label": ["cat", "a b/c", None] * 20,
            "year": np.repeat([2024, 2025, 2026], 20),
        }
    )
    pq.write_to_dataset(table, path, partition_cols=["label", "year"], row_group_size=3)
    return path


def whole(dataset):
    return pa.concat_tables(dataset.__getitems__(range(len(dataset))))


def by_x(rows):
    return sorted(rows, key=lambda row: row["x"])


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("columns", [None, ["x"], ["part", "label", "x"]], ids=str)
def test_rows_and_tables_are_those_of_pyarrow(folder, filters, columns):
    expected = by_x(pq.read_table(folder, filters=filters, columns=columns).to_pylist())
    options = {"filters": filters, "columns": columns}
    assert (
        by_x(pickle.loads(pickle.dumps(hr.ParquetDataset(folder, **options)))) == expected
    )
    dataset = hr.ParquetDataset(folder, format="arrow", **options)
    assert len(dataset) == len(expected)
    assert by_x(whole(dataset).to_pylist() if expected else []) == expected


def test_rows_stay_in_order_in_large_row_groups(tmp_path):
    pq.write_table(pa.table({"x": range(300_000)}), tmp_path / "0.parquet")
    table = whole(
        hr.ParquetDataset(tmp_path, filters=pc.bit_wise_and(X, 3) == 0, format="arrow")
    )
    assert table["x"].to_pylist() == list(range(0, 300_000, 4))


def test_row_groups_and_columns_that_the_filter_does_not_need_are_not_read(
    tmp_path, serve
):
    count = 60_000  # columns of more than 64 KiB in each row group
    columns = {
        name: np.random.default_rng(0).integers(1 << 62, size=count) for name in "abc"
    }
    pq.write_table(
        pa.table({"x": range(count), **columns}),
        tmp_path / "0.parquet",
        row_group_size=count // 3,
    )
    server = serve({"0.parquet": (tmp_path / "0.parquet").read_bytes()})
    dataset = hr.ParquetDataset(
        ["0.parquet"], columns=["b"], filters=[("x", ">=", 59_990)], store=server.store()
    )
    assert len(server.seen()) == 2, "the footer, and column x of the last row group"
    server.misbehave()
    assert [row["b"] for row in dataset] == columns["b"][-10:].tolist()
    assert len(server.seen()) == 1, "column b of the last row group"
    assert "1 row groups" in repr(dataset)


def test_one_condition_is_a_list_of_one(folder):
    expected = list(hr.ParquetDataset(folder, filters=[("x", ">", 30)]))
    for filters in (
        ("x", ">", 30),
        ["x", ">", 30],
        [[("x", ">", 30)]],
        (("x", ">", 30),),
    ):
        assert list(hr.ParquetDataset(folder, filters=filters)) == expected != []


def test_filters_that_do_not_fit_are_errors(folder, tmp_path):
    for filters, says in [
        ([("z", ">", 3)], r"No match for FieldRef.Name\(z\)"),
        (X > "a", "no kernel matching input types"),
        (X + 1, "must evaluate to bool"),
        (pc.field(0) > 3, "must name columns"),
        ([("x", "like", 3)], "is not a valid operator"),
        *(
            (bad, "must be an expression of pyarrow.compute, or")
            for bad in ([[]], "x", [("x", ">")])
        ),
    ]:
        with pytest.raises(ValueError, match=says):
            hr.ParquetDataset(folder, filters=filters)
    pq.write_table(
        pa.table({"x": pa.array([1, 2**63], pa.uint64())}), tmp_path / "0.parquet"
    )
    with pytest.raises(ValueError, match="Integer value 9223372036854775808"):
        hr.ParquetDataset(tmp_path, filters=X > 2)
    part = hr.ParquetDataset(
        folder, columns=["pair.a"], filters=pc.field("pair", "b") == "1"
    )
    assert sorted(row["pair"]["a"] for row in part) == [*range(1, 60, 2)]


# One schema for all files


@pytest.mark.parametrize(
    ("types", "value", "unified"),
    [
        ((pa.string(), pa.large_string()), "a", pa.large_string()),
        ((pa.dictionary(pa.int32(), pa.string()), pa.string()), "a", pa.string()),
        ((pa.list_(pa.null()), pa.list_(pa.int64())), [], pa.list_(pa.int64())),
        (
            (
                pa.struct({"a": pa.int8(), "b": pa.string()}),
                pa.struct({"b": pa.string(), "a": pa.int8()}),
            ),
            {"a": 1, "b": ""},
            None,
        ),
    ],
    ids=str,
)
def test_files_of_different_types_give_equal_rows_and_tables_of_one_schema(
    tmp_path, types, value, unified
):
    for order in (types, types[::-1]):
        for number, kind in enumerate(order):
            columns = {"x": pa.array([value], kind), "n": [number]}
            names = sorted(columns, reverse=bool(number))  # another order of columns
            pq.write_table(
                pa.table(columns).select(names), tmp_path / f"{number}.parquet"
            )
        rows = [{"x": value, "n": number} for number in range(2)]
        assert list(hr.ParquetDataset(tmp_path)) == rows
        tables = hr.ParquetDataset(tmp_path, format="arrow").__getitems__([0, 1])
        assert tables[0].schema.equals(tables[1].schema, check_metadata=True)
        assert unified in (None, tables[0].schema.field("x").type)
        assert [row for table in tables for row in table.to_pylist()] == rows


def test_types_that_no_type_holds_are_an_error_that_names_both_files(tmp_path):
    for number, value in enumerate([1, "a"]):
        pq.write_table(
            pa.table({"x": [value], "n": [number]}), tmp_path / f"{number}.parquet"
        )
    assert [row["x"] for row in hr.ParquetDataset(tmp_path)] == [1, "a"]
    with pytest.raises(
        ShardError, match=r"x string.*x int64.*0\.parquet.*or read rows.*1\.parquet"
    ):
        hr.ParquetDataset(tmp_path, format="arrow")
    tables = hr.ParquetDataset(tmp_path, format="arrow", columns=["n"])
    assert [table["n"].to_pylist() for table in tables] == [[0], [1]]


def test_value_that_the_common_type_cannot_hold_is_an_error(tmp_path):
    pq.write_table(
        pa.table({"x": [2**63]}, pa.schema({"x": pa.uint64()})), tmp_path / "0.parquet"
    )
    pq.write_table(pa.table({"x": [1]}), tmp_path / "1.parquet")
    with pytest.raises(
        ShardError, match=r"cannot decode: Integer value .*0\.parquet.*row group 0"
    ):
        hr.ParquetDataset(tmp_path, format="arrow")[0]


def test_partition_without_a_value_has_the_type_of_the_others(tmp_path):
    pq.write_to_dataset(
        pa.table({"x": [1, 2], "year": [2024, None]}), tmp_path, partition_cols=["year"]
    )
    tables = list(hr.ParquetDataset(tmp_path, format="arrow"))
    assert {str(table.schema.field("year").type) for table in tables} == {"int64"}
    assert [
        row["x"]
        for row in hr.ParquetDataset(tmp_path, filters=pc.field("year").is_null())
    ] == [2]
