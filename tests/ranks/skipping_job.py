"""One rank of a DDP job in which some batches of rank 0 lose all their samples; run by `test_skipping.py`.

It prints a JSON object: for each setting, how many steps each of two epochs took, and how many batches came twice.
"""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist

import headrace as hr

BAD = frozenset(range(0, 16, 2))  # the first two batches of rank 0


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 64

    async def aget(self, index):
        if index in BAD:
            raise ValueError("bad")
        return float(index)


class Stream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for number in range(64):
            yield float(number)


def check(sample):
    if sample in BAD:
        raise ValueError("bad")
    return sample


def steps(model, loader, sampler):
    taken = 0
    with loader:
        for epoch in range(2):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for batch in loader:
                model(batch.float().view(-1, 1)).sum().backward()  # waits for the other rank's step
                taken += 1
        return taken, loader.stats().replaced_batches


def main():
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    said = {}
    for workers in (0, 1):
        options = {"batch_size": 4, "on_error": "skip", "num_workers": workers}
        sampler = torch.utils.data.DistributedSampler(Numbers(), shuffle=False)
        said[f"map-style, {workers}"] = steps(model, hr.DataLoader(Numbers(), sampler=sampler, **options), sampler)
        stream = hr.DataLoader(Stream().split(), transform=check, **options)
        said[f"stream, {workers}"] = steps(model, stream, None)
    print(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # the ordinary way out now and then aborts in gloo's threads


if __name__ == "__main__":
    main()
