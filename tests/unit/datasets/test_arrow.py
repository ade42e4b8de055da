"""`ArrowDataset` gives what pyarrow and Hugging Face's datasets wrote; see also `test_formats` and `test_mutations`."""

import io
import shutil
import struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headrace as hr
from headrace.errors import ObjectNotFoundError, ShardError, TruncatedShardError
from tests.unit.datasets.formats import FIXTURES
from tests.unit.shards.resuming import in_memory


def written(*tables, new=pa.ipc.new_stream, **options):
    stream = io.BytesIO()
    with new(
        stream, tables[0].schema, options=pa.ipc.IpcWriteOptions(**options)
    ) as writer:
        for table in tables:
            writer.write_table(table)
    return stream.getvalue()


def arrow(data, **options):
    return hr.ArrowDataset(["0.arrow"], store=in_memory({"0.arrow": data}), **options)


def test_split_that_datasets_saved_is_read_without_its_cached_results(tmp_path):
    shutil.copytree(FIXTURES / "save_to_disk/splits", tmp_path / "splits")
    rows = [
        {"id": n, "text": f"text {n} " * (n % 3), "vector": [n / 2, None], "label": n % 3}
        for n in range(25)
    ]
    train = tmp_path / "splits/train"
    assert [*train.glob("cache-*.arrow")]
    assert (
        list(hr.ArrowDataset(train))
        == list(hr.ArrowDataset(hr.Store(train.as_uri())))
        == rows
    )
    assert list(hr.ArrowDataset(f"{train}/data-0000[01]-of-*.arrow")) == rows[:17]
    with pytest.raises(
        ValueError,
        match=r"several splits or saves.*splits/test.*splits/train.*give the folder",
    ):
        hr.ArrowDataset(tmp_path / "splits")
    (train / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(ObjectNotFoundError, match="data-00001-of-00003"):
        hr.ArrowDataset(train)


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
@pytest.mark.parametrize(
    "options", [{}, {"compression": "zstd"}, {"compression": "lz4"}], ids=str
)
def test_every_type_and_selection_equals_pyarrows(new, options):
    table = pa.table(
        {
            "id": range(3),
            "null": pa.nulls(3),
            "list": pa.array([[1, 2], [], None]),
            "struct": pa.array([{"x": 1, "y": "a"}, {"x": None, "y": "b"}, None]),
            "category": pa.array(["a", "b", "a"]).dictionary_encode(),
            "nested": pa.array(
                [["p"], ["q", "p"], []], pa.list_(pa.dictionary(pa.int8(), pa.string()))
            ),
            "view": pa.array(["a long text in a view", "", None], pa.string_view()),
            "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        }
    )
    data = written(table, table, new=new, **options)
    rows = table.to_pylist()
    assert list(arrow(data)) == rows * 2
    given = pa.concat_tables(arrow(data, format="arrow").__getitems__(range(6)))
    assert given.to_pylist() == rows * 2
    assert given.schema == table.schema
    for columns in (["nested"], ["struct", "id"], ["category", "view"]):
        assert list(arrow(data, columns=columns)) == table.select(columns).to_pylist() * 2
        assert (
            list(arrow(data, columns=columns, filters=pc.field("id") == 1))
            == [{name: rows[1][name] for name in columns}] * 2
        )
    with pytest.raises(ValueError, match=r"has no column 'struct\.x'"):
        arrow(data, columns=["struct.x"])


def test_dictionaries_that_grow_and_are_replaced():
    texts = [["a", "b"], ["a", "b", "c"], ["x"]]
    tables = [pa.table({"t": pa.array(each).dictionary_encode()}) for each in texts]
    expected = [text for each in texts for text in each]
    for deltas in (False, True):
        data = written(*tables, emit_dictionary_deltas=deltas)
        assert [row["t"] for row in arrow(data)] == expected


def test_record_batch_is_one_request(serve):
    table = pa.table({"id": range(400), "text": ["a" * 3000] * 400})
    server = serve(
        {"0.feather": written(*(table.slice(at, 100) for at in range(0, 400, 100)))}
    )
    dataset = hr.ArrowDataset(["0.feather"], store=server.store())
    assert len(server.seen()) == 5, "the beginning, and the end of each record batch"
    server.misbehave()
    assert [row["id"] for row in dataset] == [*range(400)]
    assert len(server.seen()) == 4


def test_files_that_are_cut_or_no_arrow_files_are_refused():
    table = pa.table({"x": [1, 2]})
    stream, file = written(table, table), written(table, new=pa.ipc.new_file)
    for data, error, says in [
        (stream[:-8], TruncatedShardError, "truncated"),  # at the border of two messages
        (stream + stream, ShardError, "no end with at most a footer"),
        (file[:-6], ShardError, "no end with at most a footer and b'ARROW1'"),
        (
            b"FEA1" + bytes(100),
            ShardError,
            r"Feather 1: read it with pyarrow.feather, and write",
        ),
        # In a column's name.
        (
            stream.replace(b"\1\0\0\0x", b"\1\0\0\0\xff", 1),
            ShardError,
            "corrupt message: UnicodeDecodeError: 'utf-8'",
        ),
    ]:
        with pytest.raises(error, match=rf"{says}.*0\.arrow"):
            arrow(data)


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_buffer_that_is_said_to_unpack_to_very_much_is_refused(tmp_path, new):
    table = pa.table(
        {
            "x": np.zeros(10_000, np.int64),
            "d": pa.array(["a"] * 10_000).dictionary_encode(),
        }
    )
    with new(
        tmp_path / "a.arrow",
        table.schema,
        options=pa.ipc.IpcWriteOptions(compression="zstd"),
    ) as writer:
        writer.write_table(table)
    data = (tmp_path / "a.arrow").read_bytes()
    assert hr.ArrowDataset(tmp_path)[9_999] == {"x": 0, "d": "a"}
    assert data.count(struct.pack("<q", 80_000)) == 1
    (tmp_path / "a.arrow").write_bytes(
        data.replace(struct.pack("<q", 80_000), struct.pack("<q", 8 << 30))
    )
    with pytest.raises(
        ShardError,
        match=r"said to unpack to 8,589,9\d\d,\d\d\d, and 268,435,456 are the most",
    ):
        hr.ArrowDataset(tmp_path)[0]
