"""
Pre-training a language model
=============================

Documents are filtered and tokenised in the workers, and packed into rows of one length; a small model trains on them,
and goes on from a state with the same losses.

For documents of your own: ``hr.LinesDataset("s3://bucket/web/*.jsonl.zst", shuffle=True, seed=0)``.
"""

# %%
# Documents
# ---------
# Four files of JSON lines; some documents are too short.

import json
import pathlib
import tempfile

import matplotlib.pyplot as plt
import torch

import headrace as hr

ROW = 96  # tokens
SEPARATOR = 0

folder = tempfile.TemporaryDirectory()
for shard in range(4):
    sums = [[(number * each + shard) % 50 for each in range(number % 9)] for number in range(300)]
    texts = [" ".join(f"{a} plus {a % 7} is {a + a % 7}." for a in terms) for terms in sums]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    pathlib.Path(folder.name, f"{shard}.jsonl").write_text(lines)

# %%
# The loader
# ----------
# `filter` and `map` are CPU work: before and after `pipe` they run in the worker processes. `Pack` runs on the loader's
# event loop and only combines samples. An async generator would do; a class can have a state, so that a restored loader
# continues in the middle of a document, without reading the stream again.


def long_enough(line):
    return len(line["text"]) >= 40


def tokenise(line):  # a byte is a token here; yours calls a tokenizer
    return [*line["text"].encode(), SEPARATOR]


class Pack:
    """Documents concatenated into rows of one length; an incomplete last row is dropped."""

    def __init__(self, documents):
        self.documents = documents
        self.tokens = []  # not yet in a row

    def __aiter__(self):
        return self

    async def __anext__(self):
        while len(self.tokens) < ROW:
            self.tokens += await anext(self.documents)
        row, self.tokens = self.tokens[:ROW], self.tokens[ROW:]
        return row

    def state_dict(self):
        return {"tokens": self.tokens}

    def load_state_dict(self, state):
        self.tokens = list(state["tokens"])


def make_loader():
    lines = hr.LinesDataset(f"{folder.name}/*.jsonl", shuffle=True, buffer_size=200, seed=0)
    rows = lines.filter(long_enough).map(tokenise).pipe(Pack).map(torch.tensor)
    return hr.DataLoader(rows, batch_size=16, num_workers=2, drop_last=True, seed=0)


with make_loader() as loader:
    batch = next(iter(loader))
print(batch.shape, "the first row:", bytes(batch[0].tolist()).replace(b"\0", b" | ").decode())

# %%
# Each row of this batch is filled; a colour is a document.

figure, panel = plt.subplots(figsize=(9, 2.6), layout="constrained")
document = (batch == SEPARATOR).flatten().cumsum(0).reshape(batch.shape)
panel.imshow(document % 20, cmap="tab20", aspect="auto", interpolation="nearest")
panel.set(xlabel="token", ylabel="row of the batch", yticks=[0, 5, 10, 15])
plt.show()

# %%
# Training, and a checkpoint in the middle
# ----------------------------------------


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 32)
        self.read = torch.nn.GRU(32, 96, batch_first=True)
        self.predict = torch.nn.Linear(96, 256)

    def forward(self, tokens):
        return self.predict(self.read(self.embed(tokens))[0])


def train(loader, model, optimizer):
    """Train for an epoch; yields each step's loss."""
    for rows in loader:
        scores = model(rows[:, :-1])  # each token from those before it
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def begin():
    torch.manual_seed(0)
    model = Reader()
    return make_loader(), model, torch.optim.Adam(model.parameters(), lr=0.01)


loader, model, optimizer = parts = begin()
losses = []
with loader:
    for loss in train(*parts):
        losses.append(loss)
        if len(losses) == 30:
            torch.save([part.state_dict() for part in parts], f"{folder.name}/checkpoint.pt")
print(f"{len(losses)} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}")

# %%
# The next job
# ------------
# It loads the checkpoint, and reads on with the next row.

parts = begin()
for part, state in zip(parts, torch.load(f"{folder.name}/checkpoint.pt"), strict=True):
    part.load_state_dict(state)
with parts[0]:
    resumed = list(train(*parts))
assert resumed == losses[30:]
print(f"resumed after step 30: the other {len(resumed)} losses are those of the whole run, to the last bit")

figure, panel = plt.subplots(figsize=(7, 3.5), layout="constrained")
panel.plot(range(1, len(losses) + 1), losses, label="whole run", lw=4, color="#b8c9dc")
panel.plot(range(31, 31 + len(resumed)), resumed, label="resumed after step 30", color="#c44e52")
panel.set(xlabel="step", ylabel="loss")
panel.legend(frameon=False)
plt.show()

folder.cleanup()
