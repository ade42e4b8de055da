"""One rank of a job that saves loaders by torch.distributed.checkpoint, or loads them; run by `test_checkpoint.py`.

It prints a JSON object: for each loader, the samples that this rank was given, or the error. The
environment has STEP ("save" or "load"), and FOLDER, which the processes share.
"""

import json
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import headrace as hr
from tests.datasets import Numbers
from tests.model.parts import Shifted

LENGTH = 103
BATCHES = 4  # given out before the first save; two more before the second
NONE_OR_NESTED = {
    "none": None,
    "nested": {"list": [1, {"two": 2.5}], "tensor": torch.arange(3)},
}


class Stateful(Shifted):
    """A sampler that remembers its position, with a state of many types."""

    def state_dict(self):
        return {**super().state_dict(), **NONE_OR_NESTED}

    def load_state_dict(self, state):
        assert state["nested"]["tensor"].tolist() == [0, 1, 2]
        assert state["none"] is None
        super().load_state_dict(state)


def lines():
    """A stream of text lines, whose shards are divided among the ranks."""
    return hr.LinesDataset(os.environ["LINES"], shuffle=True, seed=0)


LOADERS = {
    "ElasticSampler": lambda: hr.DataLoader(
        Numbers(LENGTH), 3, sampler=hr.ElasticSampler(LENGTH, seed=1)
    ),
    "shuffled by seed": lambda: hr.DataLoader(Numbers(LENGTH), 3, shuffle=True, seed=0),
    "sampler with a state": lambda: hr.DataLoader(
        Numbers(LENGTH), 3, sampler=Stateful(LENGTH)
    ),
    "DistributedSampler": lambda: hr.DataLoader(
        Numbers(LENGTH),
        3,
        sampler=torch.utils.data.DistributedSampler(Numbers(LENGTH), seed=2),
    ),
    "lines by shards": lambda: hr.DataLoader(lines().map(int), 3),
    "lines by shards, gathered": lambda: hr.DataLoader(lines().map(int), 3),
}


def save(name, folder):
    """Give out some batches; save twice into the same folder."""
    loader = LOADERS[name]()
    iterator = iter(loader)
    given = []
    for batches in (BATCHES, 2):
        given += [next(iterator).tolist() for _ in range(batches)]
        state = hr.gather_state(loader) if name.endswith("gathered") else loader
        dcp.save({"loader": state}, checkpoint_id=folder / name)
    iterator.close()
    return given


def load(name, folder):
    """The rest of the epoch, by a loader that was never iterated over."""
    loader = LOADERS[name]()
    state = loader.state_dict()
    try:
        dcp.load({"loader": loader}, checkpoint_id=folder / name)
        assert loader.state_dict().keys() == state.keys()
        return [batch.tolist() for batch in loader]
    except hr.StateError as error:
        return str(error)


def main():
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")  # of dcp
    step = {"save": save, "load": load}[os.environ["STEP"]]
    print(json.dumps({name: step(name, Path(os.environ["FOLDER"])) for name in LOADERS}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
