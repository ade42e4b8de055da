"""`ParquetDataset` gives rows and tables by reading no more than the columns that are wanted, each footer once."""

import io
import pickle
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.errors import ObjectChangedError, ShardError
from object_server import ObjectServer

ROWS, GROUP = 100, 30  # rows of a file, and of a row group: four groups, the last with 10


def written(table, **options):
    stream = io.BytesIO()
    pq.write_table(table, stream, **options)
    return stream.getvalue()


def numbers(first, count=ROWS):
    ids = range(first, first + count)
    return pa.table({"id": ids, "text": [f"row {i}" for i in ids], "square": [float(i) ** 2 for i in ids]})


OBJECTS = {f"a/{n}.parquet": written(numbers(n * ROWS), row_group_size=GROUP) for n in range(3)}


def opened(server, shards="a", **options):
    return hr.ParquetDataset(
        f"{server.url}/{shards}", store=hr.Store(server.url, options=server.store_options), **options
    )


def ids(rows):
    return [row["id"] for row in rows]


@pytest.mark.counts
def test_footer_is_read_once_and_pickled_with_the_dataset(server):
    names = [f"{server.url}/a/{n}.parquet" for n in range(3)]
    dataset = hr.ParquetDataset(names, store=hr.Store(server.url, options=server.store_options))
    assert len(server.seen()) == 3
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == 300
    assert len(server.seen()) == 3
    assert ids(copy) == list(range(300))
    assert len(server.seen()) == 3 + 12, "one request for each row group, whose columns are neighbours"


@pytest.mark.counts
def test_large_footer_takes_a_second_read(server):
    wide = pa.table({f"column number {i}": [i] for i in range(1000)})
    server.put("wide.parquet", written(wide))
    server.misbehave()
    dataset = opened(server, "wide.parquet", columns=["column number 7"])
    assert len(server.seen()) == 2
    assert list(dataset) == [{"column number 7": 7}]


def test_only_requested_columns_are_read():
    count = 20_000  # far more than 64 KiB to a column, so that the one in the middle is not read along
    table = pa.table({name: [f"{name} {i * 7919 % count}" for i in range(count)] for name in "abc"})
    data = written(table, use_dictionary=False, compression="none")
    with ObjectServer({"a.parquet": data}) as server:
        dataset = opened(server, "a.parquet", columns=["a", "c"], format="arrow")
        server.misbehave()
        assert next(iter(dataset)).equals(table.select(["a", "c"]))
        chunks = [pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(i) for i in (0, 2)]
        wanted = [(c.data_page_offset, c.data_page_offset + c.total_compressed_size - 1) for c in chunks]
        assert sorted(seen.span for seen in server.seen()) == sorted(f"bytes={a}-{b}" for a, b in wanted)


def test_large_column_chunk_is_read_by_several_requests():
    table = pa.table({"blob": [i.to_bytes(4, "little") * 250_000 for i in range(20)]})
    with ObjectServer({"a.parquet": written(table, use_dictionary=False, compression="none")}) as server:
        dataset = opened(server, "a.parquet", format="arrow")
        server.misbehave()
        assert next(iter(dataset)).equals(table)
        assert len(server.seen()) == 3, "20 MB in pieces of 8 MiB"


@pytest.mark.parametrize("table_rows", [None, 7])
def test_tables_are_row_groups_or_parts_of_row_groups(server, table_rows):
    dataset = opened(server, format="arrow", table_rows=table_rows)
    tables = list(dataset)
    assert pa.concat_tables(tables).equals(pa.concat_tables(numbers(n * ROWS) for n in range(3)))
    sizes = [30, 30, 30, 10] if table_rows is None else ([7] * 4 + [2]) * 3 + [7, 3]
    assert [table.num_rows for table in tables] == sizes * 3
    assert len(dataset) == len(tables)


def test_small_table_is_pickled_without_its_neighbours(server):
    server.put("large.parquet", written(pa.table({"id": range(4096), "text": ["row"] * 4096})))
    tables = list(opened(server, "large.parquet", format="arrow", table_rows=8))
    assert len(tables) == 512
    assert pa.concat_tables(tables).to_pylist() == [{"id": i, "text": "row"} for i in range(4096)]
    assert all(len(pickle.dumps(table)) < 2000 for table in tables)


def test_files_without_rows_yield_nothing(server):
    server.put("none/0.parquet", written(numbers(0).slice(0, 0)))
    stream = io.BytesIO()
    pq.ParquetWriter(stream, numbers(0).schema).close()
    server.put("none/1.parquet", stream.getvalue())
    server.put("none/2.parquet", OBJECTS["a/0.parquet"])
    assert list(opened(server, "none/{0,1}.parquet")) == []
    assert [table.num_rows for table in opened(server, "none", columns=["id"], format="arrow")] == [30, 30, 30, 10]


def test_files_with_different_columns_need_columns_argument(server):
    server.put("b/0.parquet", OBJECTS["a/0.parquet"])
    server.put("b/1.parquet", written(numbers(100).drop_columns(["square"])))
    with pytest.raises(ShardError, match=r"b/1\.parquet"):
        opened(server, "b")
    assert ids(opened(server, "b", columns=["id", "text"])) == list(range(200))


def test_changed_file_raises_and_other_files_are_read(server):
    dataset = opened(server)
    server.put("a/1.parquet", written(numbers(1000), row_group_size=GROUP))
    failures = []
    given = ids(passed_over(dataset, failures))
    assert given == [*range(100), *range(200, 300)]
    assert [type(failure) for failure in failures] == [ObjectChangedError] * 4
    assert all(failure.key.endswith("a/1.parquet") for failure in failures)


def passed_over(dataset, failures):
    stream = iter(dataset)
    while True:
        try:
            yield next(stream)
        except StopIteration:
            return
        except (ShardError, ObjectChangedError) as error:
            failures.append(error)


def test_unconvertible_value_is_an_error_in_place_of_its_block_and_the_rest_of_its_row_group(server):
    values = pa.array([0] * 1299 + [10**18] + [0] * 1200, pa.timestamp("us"))
    server.put("bad.parquet", written(pa.table({"id": range(2500), "value": values}), row_group_size=1500))
    dataset = opened(server, "bad.parquet")
    failures = []
    assert ids(passed_over(dataset, failures)) == [*range(1024), *range(1500, 2500)]
    (failure,) = failures
    assert failure.shard.endswith("bad.parquet")
    assert failure.member == "row group 0"
    assert "read it with format='arrow': OverflowError" in str(failure)
    with hr.DataLoader(dataset, batch_size=None, collate_fn=lambda row: row["id"], on_error="skip") as loader:
        assert list(loader) == [*range(1024), *range(1500, 2500)]
        (record,) = loader.stats().skipped
    assert record.message == str(failure)
    assert sum(table.num_rows for table in opened(server, "bad.parquet", format="arrow")) == 2500


def test_missing_pyarrow_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(hr.errors.MissingExtraError, match=r"headrace\[parquet\]"):
        hr.ParquetDataset("x.parquet")


def test_invalid_arguments_are_errors(server):
    wrong = {"format": "torch", "table_rows": 5, "prefetch_row_groups": 0}
    for name, value in {**wrong, "rank": 1, "columns": ["id", "id"]}.items():
        with pytest.raises(ValueError, match=name):
            opened(server, **{name: value})
    with pytest.raises(ValueError, match=r"no column 'idd'; it has 'id', 'text', 'square'"):
        opened(server, columns=["id", "idd"])
    for data, says in ((b"", "truncated"), (OBJECTS["a/0.parquet"][:-4] + b"PARE", "b'PARE'")):
        server.put("a/1.parquet", data)
        with pytest.raises(ShardError, match=rf"{says}.*a/1\.parquet"):
            opened(server)


def test_columns_of_one_name_are_an_error_and_never_one_of_them(tmp_path):
    arrays = [pa.array([1]), pa.array([10]), pa.array([100])]
    pq.write_table(pa.Table.from_arrays(arrays, names=["id", "value", "value"]), tmp_path / "j.parquet")
    for columns in (None, ["value"]):
        with pytest.raises(ValueError, match=r"several columns called 'value'.*format='arrow'"):
            hr.ParquetDataset(tmp_path, columns=columns)
    assert list(hr.ParquetDataset(tmp_path, columns=["id"])) == [{"id": 1}]
    (table,) = hr.ParquetDataset(tmp_path, format="arrow")
    assert table.column_names == ["id", "value", "value"]


def test_column_whose_name_begins_as_another_is_not_that_column(tmp_path):
    columns = {"foo.ints": [1], "user": [2], "user.id": [3], "s": [{"a": 4, "b": 5}], "s.c": [6]}
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    for name in ("foo", "user.name", "s.d", "foo.ints.x"):
        with pytest.raises(ValueError, match=f"has no column '{name}'; it has 'foo.ints'"):
            hr.ParquetDataset(tmp_path, columns=[name])
    rows = {"user": {"user": 2}, "s": {"s": {"a": 4, "b": 5}}, "s.a": {"s": {"a": 4}}, "s.c": {"s.c": 6}}
    for name, row in rows.items():
        assert list(hr.ParquetDataset(tmp_path, columns=[name])) == [row]
