"""
A Ray cluster
=============

Engines on a Ray cluster: two nodes fetch, transform and collate; the trainer, on a third, gets
finished batches.

::

    pip install 'headrace[ray]'
    python examples/30_ray_cluster.py

The cluster is simulated on this machine, with `ray.cluster_utils.Cluster`; in mid-epoch one of its
nodes is lost. On a real cluster, leave out `cluster`, and call `ray.init(address="auto")` on a node
of it.

This page is not run when the site is built, since Ray is not in its environment; a test runs it.
"""

import asyncio
import hashlib
import warnings

import ray
import torch
from ray.cluster_utils import Cluster

import headrace as hr

SAMPLES, BATCH = 2_000, 20
LOST_AT = 30  # batches


class Pictures(hr.AsyncDataset):
    """Stands for a bucket: each object takes some time to arrive."""

    def __len__(self):
        return SAMPLES

    async def aget(self, index):
        await asyncio.sleep(0.2)  # the processes of the lost node run for a second more
        return index


def decoded(index):
    """A transform with random numbers, which are the same wherever it runs."""
    return torch.full((3, 32, 32), float(index)) + torch.rand(3, 32, 32)


def loader(**options):
    # Few enough batches are made ahead that the lost node would have made some of those that are
    # left.
    return hr.DataLoader(
        Pictures(),
        BATCH,
        shuffle=True,
        seed=0,
        transform=decoded,
        concurrency=64,
        **options,
    )


def read(batches, on_batch=lambda number: None):
    """The SHA-256 of an epoch's order and bytes."""
    sha = hashlib.sha256()
    for number, batch in enumerate(batches):
        sha.update(batch.numpy().tobytes())
        on_batch(number)
    return sha.hexdigest()[:16]


def main():
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        compare(lambda: cluster.remove_node(nodes.pop(), allow_graceful=True))
    finally:
        ray.shutdown()
        cluster.shutdown()


def compare(remove_node):
    def lose_node(number):
        if number == LOST_AT:
            remove_node()

    with loader() as here, loader(placement=hr.RayPlacement(engines=2)) as there:
        expected = read(here)
        print(f"one process on this machine:       {expected}")
        print(f"two engines on two nodes:          {read(there)}")
        there.set_epoch(0)
        with warnings.catch_warnings(record=True) as lost:
            warnings.simplefilter("always")
            found = read(there, lose_node)
        print(f"two engines, one node is lost:     {found}")
        print(
            f"  {str(lost[0].message).partition(':')[0]}: its batches were made by the other"
        )
        assert found == expected


if __name__ == "__main__":
    main()
