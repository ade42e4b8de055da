"""`engines=`: the rate of several engines of one, with transforms that wait, and the time until the first batch.

    python benchmarks/engines.py

A transform that sleeps stands for one that takes a core, so that a machine with few cores can show how dealing scales.
Both are compared within each round; each epoch's samples are checked.
"""

from __future__ import annotations

import time

from harness import claim, describe_machine, interleave

import headrace as hr

ROUNDS, BATCHES, BATCH_SIZE = 5, 320, 4
TRANSFORM = 0.01  # seconds
ENGINES = (1, 2, 4, 8)


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return BATCHES * BATCH_SIZE

    async def aget(self, index):
        return index


def wait(sample):
    time.sleep(TRANSFORM)
    return sample


def new(engines):
    return hr.DataLoader(Numbers(), BATCH_SIZE, engines=engines, placement="process", transform=wait, concurrency=256)


def check(samples):
    if samples != list(range(BATCHES * BATCH_SIZE)):
        raise AssertionError("wrong samples")


def rate(loader):
    """Samples/s of the second half of an epoch: engines have started."""

    def run():
        samples, began = [], 0.0
        for number, batch in enumerate(loader):
            if number == BATCHES // 2:
                began = time.perf_counter()
            samples += batch.tolist()
        seconds = time.perf_counter() - began
        check(samples)
        return BATCHES * BATCH_SIZE / 2 / seconds

    return run


def first_batch(engines):
    def run():
        began = time.perf_counter()
        with new(engines) as loader:
            next(iter(loader))
            return time.perf_counter() - began

    return run


if __name__ == "__main__":
    print(describe_machine())
    loaders = {engines: new(engines) for engines in ENGINES}
    rates = interleave({f"{n} engines": rate(loaders[n]) for n in ENGINES}, rounds=ROUNDS, unit="samples/s")
    rates.show(against="1 engines")
    for loader in loaders.values():
        loader.close()
    ratio = rates.ratio("8 engines", "1 engines")
    claim("8 engines, transforms that wait", reached=f"{ratio:.2f} of one", aim="7 of one", met=ratio >= 7)
    starts = interleave({f"{n} engines": first_batch(n) for n in ENGINES}, rounds=ROUNDS, unit="s to the first batch")
    starts.show(against="1 engines")
    ratio = starts.ratio("4 engines", "1 engines")
    claim("first batch of 4 engines", reached=f"{ratio:.2f} of one", aim="at most 1.5 of one", met=ratio <= 1.5)
