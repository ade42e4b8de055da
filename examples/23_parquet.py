"""
A table in Parquet
==================

Rows of two columns shuffled over two ranks, and whole tables converted to tensors.

::

    pip install 'headrace[parquet]'; python examples/23_parquet.py

For files of your own::

    hr.ParquetDataset("s3://bucket/train/", columns=["text", "label"], shuffle=True)
"""

import pathlib
import tempfile

import pyarrow
import pyarrow.parquet
import torch

import headrace as hr


def write(path, first, count):
    ids = range(first, first + count)
    table = pyarrow.table(
        {
            "id": ids,
            "label": [number % 10 for number in ids],
            "features": [[number / 100, number % 7] for number in ids],
            "remark": [f"unused {number}" for number in ids],
        }
    )
    pyarrow.parquet.write_table(table, path, row_group_size=50, write_page_checksum=True)


def tensors(table):
    """Tensors from a table, without a Python object for each value."""
    flat = table["features"].combine_chunks().flatten().to_numpy()
    return torch.from_numpy(flat.copy()).reshape(len(table), -1), torch.tensor(table["label"].to_numpy())


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for number in range(2):
        write(folder / f"{number}.parquet", first=number * 200, count=200)

    seen = set()
    for rank in range(2):
        rows = hr.ParquetDataset(
            folder, columns=["id", "label"], shuffle=True, buffer_size=100, rank=rank, world_size=2
        )
        with hr.DataLoader(rows, batch_size=20) as loader:
            for batch in loader:
                seen.update(batch["id"].tolist())
    print(f"two ranks gave {len(seen)} different rows")
    assert len(seen) == 400

    tables = hr.ParquetDataset(folder, columns=["features", "label"], format="arrow", table_rows=25)
    with hr.DataLoader(tables, batch_size=None, transform=tensors) as loader:
        shapes = [(tuple(features.shape), tuple(labels.shape)) for features, labels in loader]
    print(f"{len(shapes)} batches, the first of shapes {shapes[0]}")
    assert shapes == [((25, 2), (25,))] * 16
