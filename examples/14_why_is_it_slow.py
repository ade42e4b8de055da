"""
Why is it slow?
===============

A loop that waits for its data, the report that names the limit and the change, and both runs on a
time line."""

# %%
# A loop that waits
# -----------------
# 1,000 objects of a store with 20 ms to the first byte, and a training step of 20 ms for 32 of
# them. Four fetches at a time are too few; `concurrency="auto"`, the default, would find out by
# itself.

import json
import pathlib
import tempfile
import time

import matplotlib.pyplot as plt
import torch

import headrace as hr
from object_server import ObjectServer

folder = tempfile.TemporaryDirectory()
server = ObjectServer(
    {f"{number:04d}.bin": bytes(12_288) for number in range(1_000)}, latency=0.020
).start()


def decode(sample):
    return torch.frombuffer(bytearray(sample.data), dtype=torch.uint8).view(3, 64, 64)


def read(name, **options):
    """Train for an epoch; write its trace, and give its report."""
    objects = hr.ObjectDataset(hr.Store(server.url, options=server.store_options))
    with hr.DataLoader(objects, batch_size=32, transform=decode, **options) as loader:
        with hr.trace(pathlib.Path(folder.name, name)):
            for _ in loader:
                time.sleep(0.020)  # the training step
        return loader.report()


options = {"concurrency": 4}
report = read("before.json", **options)
print(report)

# %%
# The change
# ----------
# The report has it as arguments of the loader, too.

print(report.change)
after = read("after.json", **{**options, **report.change})
print(
    f"waiting: {report.wait_share:.0%} before, {report.predicted:.0%} predicted, {after.wait_share:.0%} after"
)

# %%
# On a time line
# --------------
# The trace has a slice for each fetch, each call of `next()` and each step between them.
# `ui.perfetto.dev <https://ui.perfetto.dev>`_ opens it; as it is JSON, a program can read it, too.
# Here are the first 0.6 s of both runs: a row for each fetch in flight, in a colour for each batch;
# below them, what the loop did.


def draw(panel, name):
    """Draw a trace; gives the number of fetches that were in flight at once."""
    events = json.loads(pathlib.Path(folder.name, name).read_text())["traceEvents"]
    events = [
        event for event in events if event["name"] in ("single fetch", "next()", "step")
    ]
    began = min(event["ts"] for event in events)
    begun, fetches, calls = {}, [], []
    for event in events:  # the end of each slice comes after its begin
        # in milliseconds
        key, at = ((event["name"], event["id2"]["local"]), (event["ts"] - began) / 1e3)
        if event["ph"] == "b":
            begun[key] = at, event["args"]["batch"]
        elif event["name"] == "single fetch":
            fetches.append((*begun[key], at))
        else:
            calls.append(
                (begun[key][0], at, "#4c9f70" if event["name"] == "step" else "#c44e52")
            )
    rows = []  # the end of the last fetch in each
    for begin, batch, end in sorted(fetches):
        row = next((row for row, free in enumerate(rows) if free <= begin), len(rows))
        rows[row : row + 1] = [end]
        panel.barh(
            row,
            end - begin,
            0.9,
            begin,
            color=f"C{batch % 10}",
            edgecolor="white",
            linewidth=0.3,
        )
    for begin, end, colour in calls:
        panel.barh(-len(rows) / 6, end - begin, len(rows) / 9, begin, color=colour)
    panel.spines[["top", "left", "right"]].set_visible(False)
    return len(rows)


figure, panels = plt.subplots(
    2, 1, figsize=(10, 6), sharex=True, height_ratios=[1, 2], layout="constrained"
)
for panel, name, found in zip(
    panels, ("before.json", "after.json"), (report, after), strict=True
):
    count = draw(panel, name)
    panel.set(
        title=f"{count} fetches in flight, {found.wait_share:.0%} waiting",
        xlim=(0, 600),
        yticks=[],
    )
panels[1].set_xlabel(
    "milliseconds. Below the fetches: waiting in next() (red), training step (green)"
)
plt.show()

server.close()
folder.cleanup()
