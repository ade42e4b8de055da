"""
A table in Parquet
==================

Rows of two columns shuffled over two ranks, and whole tables converted to tensors, on which a small
model trains.

::

    pip install 'headrace[parquet]'; python examples/23_parquet.py

For files of your own::

    hr.ParquetDataset("s3://bucket/train/", columns=["text", "label"])
"""

# %%
# The files
# ---------
# Four row groups in each of two files; checksums of the pages are verified when they are read.

import pathlib
import tempfile

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

import headrace as hr

folder = tempfile.TemporaryDirectory()


def write(path, first, count):
    features = np.random.default_rng(first).normal(size=(count, 2))
    table = pyarrow.table(
        {
            "id": range(first, first + count),
            "features": features.tolist(),
            "label": (features @ [3.0, -2.0] > 0.5).astype(int),
            "remark": [f"unused {number}" for number in range(first, first + count)],
        }
    )
    pyarrow.parquet.write_table(table, path, row_group_size=50, write_page_checksum=True)


for number in range(2):
    write(pathlib.Path(folder.name, f"{number}.parquet"), first=number * 200, count=200)

# %%
# Rows, on two ranks
# ------------------
# A rank is given here; in training, each is a process and determines its rank itself. Only the
# columns that are named are fetched.

seen = set()
for rank in range(2):
    rows = hr.ParquetDataset(folder.name, columns=["id", "label"])
    sampler = hr.BlockShuffleSampler(
        rows, block_size=50, blocks_at_once=4, seed=0, rank=rank, world_size=2
    )
    with hr.DataLoader(rows, batch_size=20, sampler=sampler) as loader:
        batches = list(loader)
    print(
        f"rank {rank}: {len(batches)} batches, the first ids {batches[0]['id'][:5].tolist()}"
    )
    seen.update(number for batch in batches for number in batch["id"].tolist())
print(f"{len(seen)} different rows")
assert len(seen) == 400

# %%
# Whole tables
# ------------
# With ``format="arrow"`` a batch is one table of 25 rows, without a Python object for each value.


def tensors(table):
    flat = table["features"].combine_chunks().flatten().to_numpy()
    features = torch.tensor(flat, dtype=torch.float32).reshape(len(table), -1)
    return features, torch.tensor(table["label"].to_numpy())


torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
tables = hr.ParquetDataset(folder.name, columns=["features", "label"], format="arrow")
with hr.DataLoader(
    tables, batch_size=25, shuffle=True, seed=0, collate_fn=tensors
) as loader:
    for epoch in range(5):
        right = count = 0
        for features, labels in loader:
            scores = model(features)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (scores.argmax(1) == labels).sum().item()
            count += len(labels)
        print(f"epoch {epoch}: {count} rows, accuracy {right / count:.0%}")

folder.cleanup()
