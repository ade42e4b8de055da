"""
Pre-training a language model
=============================

Documents are filtered and tokenised in the workers, and packed into rows of one length; a small
model trains on them, and goes on from a state with the same losses.

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

folder = tempfile.TemporaryDirectory()
for shard in range(4):
    sums = [
        [(number * each + shard) % 50 for each in range(number % 9)]
        for number in range(300)
    ]
    texts = [
        " ".join(f"{a} plus {a % 7} is {a + a % 7}." for a in terms) for terms in sums
    ]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    pathlib.Path(folder.name, f"{shard}.jsonl").write_text(lines)

# %%
# The loader
# ----------
# `filter` and `map` are CPU work and run in the worker processes. `pack` runs on the loader's event
# loop, and only combines what they return: a document that does not fit goes on in the next row.
# Its state is exact, so that a restored loader continues in the middle of a document.


def long_enough(line):
    return len(line["text"]) >= 40


def tokenise(line):  # a byte is a token here; yours calls a tokenizer
    return list(line["text"].encode())


def make_loader():
    lines = hr.LinesDataset(
        f"{folder.name}/*.jsonl", shuffle=True, buffer_size=200, seed=0
    )
    rows = lines.filter(long_enough).map(tokenise).pack(ROW, labels="next")
    return hr.DataLoader(rows, batch_size=16, num_workers=2, drop_last=True, seed=0)


with make_loader() as loader:
    batch = next(iter(loader))
print({name: tuple(rows.shape) for name, rows in batch.items()})
print("the first row:", bytes(batch["tokens"][0].tolist()).decode())

# %%
# Each row of this batch is filled; a colour is a document.

figure, panel = plt.subplots(figsize=(9, 2.6), layout="constrained")
document = (batch["positions"] == 0).flatten().cumsum(0).reshape(16, ROW)
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
    for batch in loader:
        scores = model(batch["tokens"])
        # the next tokens
        loss = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), batch["labels"].flatten()
        )
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
            torch.save(
                [part.state_dict() for part in parts], f"{folder.name}/checkpoint.pt"
            )
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
print(
    f"resumed after step 30: the other {len(resumed)} losses are those of the whole run, to the last bit"
)

figure, panel = plt.subplots(figsize=(7, 3.5), layout="constrained")
panel.plot(range(1, len(losses) + 1), losses, label="whole run", lw=4, color="#b8c9dc")
panel.plot(
    range(31, 31 + len(resumed)), resumed, label="resumed after step 30", color="#c44e52"
)
panel.set(xlabel="step", ylabel="loss")
panel.legend(frameon=False)
plt.show()

folder.cleanup()
