"""
Two ranks of two engines
========================

Two ranks, each with a loader of two engines, on one object store: every sample once, and as many
steps on each rank.

::

    torchrun --standalone --nproc-per-node 2 examples/28_ranks_and_engines.py s3://bucket/train

Without a URL it makes a folder of samples, and run with plain python it starts torchrun for itself.
Each rank's loader has its part of the samples, by `ElasticSampler`, which finds the rank by itself;
the two engines of a loader are processes that fetch and decode batches of that part in turn."""

import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import headrace as hr

SAMPLES, BATCH, EPOCHS, ENGINES = 480, 16, 3, 2


def write_samples(folder):
    """One object for each sample: a point of a line, with noise."""
    random = torch.Generator().manual_seed(0)
    for number in range(SAMPLES):
        x = torch.rand(1, generator=random)
        y = 3 * x - 1 + 0.01 * torch.randn(1, generator=random)
        (folder / f"{number:05d}.bin").write_bytes(torch.cat([x, y]).numpy().tobytes())


def decode(sample):
    """Number, input and target; the process that has decoded it."""
    x, y = torch.frombuffer(bytearray(sample.data), dtype=torch.float32)
    return int(pathlib.Path(sample.key).stem), x.unsqueeze(0), y.unsqueeze(0), os.getpid()


def gathered(value):
    """The values of all ranks, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train(url):
    rank = dist.get_rank()
    dataset = hr.ObjectDataset(url, suffix=".bin")
    sampler = hr.ElasticSampler(dataset, seed=0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with hr.DataLoader(
        dataset, BATCH, sampler=sampler, transform=decode, engines=ENGINES
    ) as loader:
        for epoch in range(EPOCHS):
            mine, engines, steps = [], set(), 0
            for numbers, x, y, processes in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                # averages gradients over the ranks: one with more steps would wait for ever
                loss.backward()
                optimizer.step()
                mine += numbers.tolist()
                engines.update(processes.tolist())
                steps += 1
            parts = gathered((mine, steps, len(engines)))
            assert sorted(
                number for numbers, _, _ in parts for number in numbers
            ) == list(range(len(dataset)))
            assert len({steps for _, steps, _ in parts}) == 1
            if rank == 0:
                for each, (numbers, steps, used) in enumerate(parts):
                    print(
                        f"epoch {epoch}, rank {each}: {steps} steps of {used} engines, {len(numbers)} samples: "
                        f"{', '.join(map(str, numbers[:4]))}, …"
                    )
                print(
                    f"epoch {epoch}: together all {len(dataset)} samples, each once; loss {loss:.5f}"
                )


def main(url):
    dist.init_process_group("gloo")
    train(url)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group() sometimes aborts in gloo's threads


def run_torchrun(url):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        sys.argv[0],
        url,
    ]
    one_thread = {"OMP_NUM_THREADS": "1", **os.environ}  # torchrun warns if it is not set
    print(
        subprocess.run(
            command, env=one_thread, check=True, stdout=subprocess.PIPE, text=True
        ).stdout,
        end="",
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1])
    elif len(sys.argv) > 1:
        run_torchrun(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as name:
            write_samples(pathlib.Path(name))
            run_torchrun(pathlib.Path(name).as_uri())
