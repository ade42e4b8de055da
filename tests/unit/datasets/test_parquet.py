"""`ParquetDataset` gives rows and tables by reading no more than the columns that are wanted, each footer once."""

import io
import itertools
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.errors import ObjectChangedError, ShardError
from tests.unit.shards.tars import parquet as written

ROWS, GROUP = 100, 30  # rows of a file, and of a row group: four groups, the last with 10


def numbers(first, count=ROWS):
    ids = range(first, first + count)
    return pa.table(
        {
            "id": ids,
            "text": [f"row {i}" for i in ids],
            "square": [float(i) ** 2 for i in ids],
        }
    )


OBJECTS = {
    f"a/{n}.parquet": written(numbers(n * ROWS), row_group_size=GROUP) for n in range(3)
}


def opened(server, shards="a", **options):
    return hr.ParquetDataset(shards, store=server.store(), **options)


def whole(dataset):
    """The table of a loader's only batch."""
    with hr.DataLoader(dataset, len(dataset)) as loader:
        (table,) = loader
    return table


def ids(rows):
    return [row["id"] for row in rows]


@pytest.mark.counts
def test_footer_is_read_once_and_pickled_with_the_dataset(server):
    dataset = opened(server, [*OBJECTS])
    assert len(server.seen()) == 3
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == 300
    assert len(server.seen()) == 3
    assert ids(copy) == list(range(300))
    assert len(server.seen()) == 3 + 12, (
        "one request for each row group, whose columns are neighbours"
    )


@pytest.mark.counts
def test_large_footer_takes_a_second_read(server):
    wide = pa.table({f"column number {i}": [i] for i in range(1000)})
    server.put("wide.parquet", written(wide))
    server.misbehave()
    dataset = opened(server, "wide.parquet", columns=["column number 7"])
    assert len(server.seen()) == 2
    assert list(dataset) == [{"column number 7": 7}]


def test_only_requested_columns_are_read(serve):
    # far more than 64 KiB to a column, so that the one in the middle is not read along
    count = 20_000
    table = pa.table(
        {name: [f"{name} {i * 7919 % count}" for i in range(count)] for name in "abc"}
    )
    data = written(table, use_dictionary=False, compression="none")
    server = serve({"a.parquet": data})
    dataset = opened(server, "a.parquet", columns=["a", "c"], format="arrow")
    server.misbehave()
    assert whole(dataset).equals(table.select(["a", "c"]))
    row_group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    spans = set()
    for column in (row_group.column(0), row_group.column(2)):
        begin = column.data_page_offset
        spans.add(f"bytes={begin}-{begin + column.total_compressed_size - 1}")
    assert {seen.span for seen in server.seen()} == spans


def test_large_column_chunk_is_read_by_several_requests(serve):
    table = pa.table({"blob": [i.to_bytes(4, "little") * 250_000 for i in range(20)]})
    server = serve(
        {"a.parquet": written(table, use_dictionary=False, compression="none")}
    )
    dataset = opened(server, "a.parquet", format="arrow")
    server.misbehave()
    assert whole(dataset).equals(table)
    assert len(server.seen()) == 5, "20 MB in pieces of 4 MiB"


def test_files_without_rows_yield_nothing(server):
    server.put("none/0.parquet", written(numbers(0).slice(0, 0)))
    stream = io.BytesIO()
    pq.ParquetWriter(stream, numbers(0).schema).close()
    server.put("none/1.parquet", stream.getvalue())
    assert list(opened(server, "none")) == []


def test_files_with_different_columns_need_columns_argument(server):
    server.put("b/0.parquet", OBJECTS["a/0.parquet"])
    server.put("b/1.parquet", written(numbers(100).drop_columns(["square"])))
    with pytest.raises(ShardError, match=r"b/1\.parquet"):
        opened(server, "b")
    assert ids(opened(server, "b", columns=["id", "text"])) == list(range(200))


def test_invalid_arguments_are_errors(server):
    wrong = {"format": "torch", "unpacked_bytes": 0}
    for name, value in {**wrong, "columns": ["id", "id"]}.items():
        with pytest.raises(ValueError, match=name):
            opened(server, **{name: value})
    with pytest.raises(
        ValueError, match=r"no column 'idd'; it has 'id', 'text', 'square'"
    ):
        opened(server, columns=["id", "idd"])
    for data, says in (
        (b"", "truncated"),
        (OBJECTS["a/0.parquet"][:-4] + b"PARE", "b'PARE'"),
    ):
        server.put("a/1.parquet", data)
        with pytest.raises(ShardError, match=rf"{says}.*a/1\.parquet"):
            opened(server)


def test_columns_of_one_name_are_an_error_and_never_one_of_them(tmp_path):
    arrays = [pa.array([1]), pa.array([10]), pa.array([100])]
    pq.write_table(
        pa.Table.from_arrays(arrays, names=["id", "value", "value"]),
        tmp_path / "j.parquet",
    )
    for columns in (None, ["value"]):
        with pytest.raises(
            ValueError, match=r"several columns called 'value'.*format='arrow'"
        ):
            hr.ParquetDataset(tmp_path, columns=columns)
    assert list(hr.ParquetDataset(tmp_path, columns=["id"])) == [{"id": 1}]
    table = hr.ParquetDataset(tmp_path, format="arrow")[0]
    assert table.column_names == ["id", "value", "value"]


def test_column_whose_name_begins_as_another_is_not_that_column(tmp_path):
    columns = {
        "foo.ints": [1],
        "user": [2],
        "user.id": [3],
        "s": [{"a": 4, "b": 5}],
        "s.c": [6],
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    for name in ("foo", "user.name", "s.d", "foo.ints.x"):
        with pytest.raises(
            ValueError, match=f"has no column '{name}'; it has 'foo.ints'"
        ):
            hr.ParquetDataset(tmp_path, columns=[name])
    rows = {
        "user": {"user": 2},
        "s": {"s": {"a": 4, "b": 5}},
        "s.a": {"s": {"a": 4}},
        "s.c": {"s.c": 6},
    }
    for name, row in rows.items():
        assert list(hr.ParquetDataset(tmp_path, columns=[name])) == [row]


def read(dataset, **options):
    with hr.DataLoader(dataset, 16, seed=0, collate_fn=ids, **options) as loader:
        return list(loader)


@pytest.mark.counts
@pytest.mark.parametrize("shuffle", [False, True])
def test_row_group_is_requested_once_in_an_epoch(server, shuffle):
    dataset = opened(server)
    server.misbehave()
    batches = read(dataset, shuffle=shuffle)
    assert len(server.seen()) == 12
    assert sorted(itertools.chain.from_iterable(batches)) == [*range(300)]
    assert (batches == read(dataset)) is not shuffle


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"placement": "process"}, {"shuffle": True}],
    ids=str,
)
def test_batch_of_tables_is_one_table(server, options):
    dataset = opened(server, format="arrow")
    with hr.DataLoader(dataset, 16, seed=0, **options) as loader:
        tables = list(loader)
    assert {type(table) for table in tables} == {pa.Table}
    assert [len(table) for table in tables] == [16] * 18 + [12]
    expected = pa.concat_tables(numbers(n * ROWS) for n in range(3))
    assert pa.concat_tables(tables).sort_by("id").equals(expected.combine_chunks())
    doubled = hr.concat([dataset, dataset]).map(
        lambda table: table.append_column("one", pa.array([1]))
    )
    with hr.DataLoader(
        doubled, 100, collate_fn=lambda table: table["one"].to_pylist(), **options
    ) as loader:
        assert list(loader) == [[1] * 100] * 6
    with hr.DataLoader(dataset, None, **options) as loader:
        assert {len(table) for table in loader} == {1}


def test_batches_in_order_are_slices_of_one_row_group_without_a_copy(server):
    with hr.DataLoader(opened(server, format="arrow"), 16) as loader:
        tables = list(loader)
    chunks = [chunk for table in tables for chunk in table["id"].chunks]
    assert len(chunks) == 19 + 10, (
        "a part of each row group: batches begin at one of the 11 other borders"
    )
    assert len({chunk.buffers()[1].address for chunk in chunks}) == 12


@pytest.mark.parametrize("format", ["rows", "arrow"])
def test_changed_file_is_an_error_of_its_rows_alone(server, format):
    dataset = opened(server, format=format)
    server.put("a/1.parquet", written(numbers(1000), row_group_size=GROUP))
    with pytest.raises(ObjectChangedError, match=r"a/1\.parquet"):
        dataset[150]
    collate = ids if format == "rows" else lambda table: table["id"].to_pylist()
    with hr.DataLoader(dataset, 16, collate_fn=collate, on_error="skip") as loader:
        given = [number for batch in loader for number in batch]
        assert loader.stats().skipped_samples == 100
    assert given == [*range(100), *range(200, 300)]


def test_unconvertible_value_is_an_error_of_its_row(server):
    values = pa.array([0] * 12 + [10**18] + [0] * 12, pa.timestamp("us"))
    server.put(
        "bad.parquet",
        written(pa.table({"id": range(25), "value": values}), row_group_size=15),
    )
    with hr.DataLoader(
        opened(server, "bad.parquet"), 5, collate_fn=ids, on_error="skip"
    ) as loader:
        assert [*itertools.chain.from_iterable(loader)] == [
            n for n in range(25) if n != 12
        ]
        (record,) = loader.stats().skipped
    assert "read it with format='arrow': OverflowError" in record.message
    assert len(whole(opened(server, "bad.parquet", format="arrow"))) == 25
