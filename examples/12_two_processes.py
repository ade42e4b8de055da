"""
Two ranks
=========

Data-parallel training in two processes (DDP on gloo): each reads its part of the data, both end
with the same model.

::

    torchrun --standalone --nproc-per-node 2 examples/12_two_processes.py

Run with plain python, it starts torchrun for itself. A torch program, but for one line:
`from headrace import DataLoader`.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from headrace import DataLoader

EPOCHS = 5


class Line(Dataset):
    """Points on a line, with noise; each sample includes its index."""

    def __init__(self, count):
        random = torch.Generator().manual_seed(0)
        self.x = torch.rand(count, 1, generator=random)
        self.y = 3 * self.x - 1 + 0.01 * torch.randn(count, 1, generator=random)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


def gathered(value):
    """The values of all ranks, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train():
    # Ranks start with different models; DDP broadcasts rank 0's.
    torch.manual_seed(dist.get_rank())
    line = Line(1000)
    # Gets the rank from torch.distributed.
    sampler = DistributedSampler(line, shuffle=True)
    # With workers use another start method than fork: gloo has threads in this process.
    loader = DataLoader(line, batch_size=50, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # otherwise every epoch has the order of the first
        mine = []
        for indices, x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()  # gradients are averaged over the ranks here
            optimizer.step()
            mine += indices.tolist()
        parts = gathered(mine)
        assert sorted(parts[0] + parts[1]) == list(range(len(line)))
        if dist.get_rank() == 0:
            begin = " and ".join(f"{part[:3]} …" for part in parts)
            print(
                f"epoch {epoch}: ranks read {begin}, {len(set(parts[0]) & set(parts[1]))} in common, loss {loss:.5f}"
            )
    models = gathered([parameter.tolist() for parameter in model.parameters()])
    assert models[0] == models[1]
    if dist.get_rank() == 0:
        (((slope,),), (offset,)) = models[0]
        print(
            f"both ranks end with y = {slope:.2f} x {offset:+.2f}, identical to the last bit"
        )


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train()
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # destroy_process_group() sometimes aborts in gloo's threads
    else:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            sys.argv[0],
        ]
        # Torchrun warns if it is not set.
        one_thread = {"OMP_NUM_THREADS": "1", **os.environ}
        print(
            subprocess.run(
                torchrun, env=one_thread, check=True, stdout=subprocess.PIPE, text=True
            ).stdout,
            end="",
        )
