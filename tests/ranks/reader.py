"""What `get_rank_info` says in all code that a loader runs; run by `test_processes.py`, once for each rank.

It prints a JSON object: the answers, by placement and number of workers.
"""

import itertools
import os

import torch.distributed as dist

import headrace as hr
from tests.datasets import Numbers
from tests.ranks.jobs import answer

PLACES = list(itertools.product(("thread", "process"), (0, 2)))


class Infos(Numbers):
    """The result of `get_rank_info` in `aget`."""

    async def aget(self, index):
        return said()


def said():
    info = hr.get_rank_info()
    return [info.rank, info.world_size]


def said_in_transform(sample):
    return [*sample, *said(), *in_worker_init, int(os.environ.get("RANK", -1))]


def said_in_collate(samples):
    return [*samples[0], *said()]


in_worker_init = []


def init_worker(number):
    in_worker_init.extend(said())


def main():
    # Loaders are made before anything in the process knows its rank, as in a script that makes
    # them before `trainer.fit()`.
    loaders = {
        f"{placement}, {workers} workers": hr.DataLoader(
            Infos(1),
            transform=said_in_transform,
            collate_fn=said_in_collate,
            worker_init_fn=init_worker,
            placement=placement,
            num_workers=workers,
        )
        for placement, workers in PLACES
    }
    # Neither the launcher nor the environment says which rank this is.
    if "GLOO" in os.environ:
        rank, world_size, file = os.environ["GLOO"].split(",")
        dist.init_process_group(
            "gloo", f"file://{file}", rank=int(rank), world_size=int(world_size)
        )
    answers = {}
    for place, loader in loaders.items():
        in_worker_init.clear()
        with loader:
            answers[place] = list(loader)
    answer(answers)


if __name__ == "__main__":
    main()
