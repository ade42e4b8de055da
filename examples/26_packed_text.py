"""Documents filtered and tokenised in workers, then packed into rows of one length: CPU work before batching.

python examples/26_packed_text.py
"""

import json
import pathlib
import tempfile

import torch

import headrace as hr

ROW = 64  # tokens
SEPARATOR = 0


def long_enough(line):
    return len(line["text"]) >= 40


def tokenise(line):  # a byte is a token here; yours calls a tokenizer
    return list(line["text"].encode())


async def pack(documents):
    """Documents concatenated into rows of one length; an incomplete last row is dropped."""
    row = []
    async for tokens in documents:
        row += [*tokens, SEPARATOR]
        while len(row) >= ROW:
            yield row[:ROW]
            row = row[ROW:]


with tempfile.TemporaryDirectory() as name:
    for shard in range(4):
        lines = ({"text": f"Document {shard}-{number}. " * (number % 7)} for number in range(100))
        pathlib.Path(name, f"{shard}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    documents = hr.LinesDataset(f"{name}/*.jsonl").filter(long_enough).map(tokenise)  # in the workers
    rows = documents.shuffle(200).pipe(pack).map(torch.tensor)  # packed on the event loop; tensors in the workers
    with hr.DataLoader(rows, batch_size=16, num_workers=2, drop_last=True) as loader:
        for epoch in range(2):
            shapes = [tuple(batch.shape) for batch in loader]
            print(f"epoch {epoch}: {len(shapes)} batches of {shapes[0]}")
