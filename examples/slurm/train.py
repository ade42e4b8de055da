"""The program that `train.sbatch` starts once for each GPU: data-parallel training, with a loader for each rank.

Rank and number of ranks are those of the task (SLURM_PROCID, SLURM_NTASKS): headrace reads them by
itself, and torch is given them here. The loader has an engine for every four cores of the task.
Every rank makes the same number of steps, since `ElasticSampler` gives each as many samples. For
jobs that are preempted, save the loader's state in each checkpoint: docs/resuming.md.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import headrace as hr

BATCH, EPOCHS, CORES_PER_ENGINE = 16, 2, 4


def decode(sample):
    """Input and target of a sample: two numbers here; an image to be decoded in a real program."""
    x, y = torch.frombuffer(bytearray(sample.data), dtype=torch.float32)
    return x.unsqueeze(0), y.unsqueeze(0)


def train(url, device, engines):
    dataset = hr.ObjectDataset(url, suffix=".bin")
    sampler = hr.ElasticSampler(dataset, seed=0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with hr.DataLoader(
        dataset,
        BATCH,
        sampler=sampler,
        transform=decode,
        engines=engines,
        placement="process",
        device=device,
    ) as loader:
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            samples, steps = 0, 0
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                samples += len(x)
                steps += 1
            print(
                f"epoch {epoch}, rank {dist.get_rank()}: {steps} steps, {samples} samples, loss {loss:.5f}",
                flush=True,
            )


def main(url):
    rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    engines = max(1, int(os.environ["SLURM_CPUS_PER_TASK"]) // CORES_PER_ENGINE)
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{int(os.environ['SLURM_LOCALID']) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    # Addresses are those of MASTER_ADDR and MASTER_PORT, which the batch script sets.
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", rank=rank, world_size=ranks
    )
    if rank == 0:
        print(f"{ranks} ranks, {engines} engines each, on {device}", flush=True)
    train(url, device, engines)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group() sometimes aborts in gloo's threads


if __name__ == "__main__":
    main(sys.argv[1])
