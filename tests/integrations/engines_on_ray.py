"""A program: one loader on a Ray cluster of two nodes, whose engines and nodes are lost; writes a report to a file."""

import asyncio
import faulthandler
import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import torch

import headrace as hr

SAMPLES, BATCH, SEED = 2_000, 5, 7
BATCHES = SAMPLES // BATCH
LARGE = 1_000_000  # bytes of a large sample
STORE = 80_000_000  # bytes of a node's object store
LOST_AT = 20  # batches
AHEAD = {"concurrency": 8}  # a few batches: most of the epoch is made after the loss
LONGEST = 270  # seconds, after which the program prints the stacks of its threads and ends; it takes one minute alone


class Report(dict):
    """Results by name; each is announced on stderr, so that the output of a run that is cut off says where it was."""

    def __setitem__(self, name, result):
        super().__setitem__(name, result)
        print(f"{time.process_time():.1f} s of CPU time, {time.monotonic() - BEGAN:.1f} s: {name}", file=sys.stderr)


BEGAN = time.monotonic()


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return SAMPLES

    async def aget(self, index):
        await asyncio.sleep(0.001)  # latency
        return index


class Broken(Numbers):
    async def aget(self, index):
        if index == 7:
            raise LookupError("no sample 7")
        return index


def noisy(index):
    return index + torch.rand(2)


def enlarged(index):
    return {"bytes": np.full(LARGE, index % 251, np.uint8), "empty": np.empty((0, 3), np.float32)}


def made_loader(**options):
    return hr.DataLoader(Numbers(), BATCH, shuffle=True, seed=SEED, transform=noisy, **AHEAD, **options)


def digest(batches):
    sha = hashlib.sha256()
    for batch in batches:
        sha.update(batch.numpy().tobytes())
    return sha.hexdigest()


def engine_actors():
    """The processes of the actors of engines, oldest first."""
    every = psutil.process_iter(["cmdline", "create_time"])
    found = [each for each in every if "EngineActor" in "".join(each.info["cmdline"] or ())]
    return sorted(found, key=lambda process: process.info["create_time"])


def engine_processes(actor):
    """The engine's own process: the first that the helper forks, which is a child of the actor."""
    forks = [each.children() for each in actor.children()]
    return [min(each, key=psutil.Process.create_time) for each in forks if each]


def collected_by_ray(folder):
    """Whether a loader that was left to the garbage collector ends its engines from a thread of Ray's."""
    import ray

    gc.disable()
    dropped = made_loader(placement=hr.RayPlacement(engines=2))
    next(iter(dropped))
    cycle = [dropped]
    cycle.append(cycle)
    del dropped, cycle
    threads, collected = [], threading.Event()

    def collect(_):
        threads.append(threading.get_ident())
        gc.collect()
        collected.set()

    os.mkfifo(folder / "begin")
    reading = ray.remote(Path.read_bytes).remote(folder / "begin")
    reading.future().add_done_callback(collect)
    (folder / "begin").write_bytes(b"now")
    done = collected.wait(30) and threads != [threading.main_thread().ident]
    gc.enable()
    psutil.wait_procs(engine_actors(), timeout=30)
    return done and not engine_actors()


def kill_actor(cluster, nodes):
    engine_actors()[0].send_signal(signal.SIGKILL)


def kill_all_actors(cluster, nodes):
    for actor in engine_actors():
        actor.send_signal(signal.SIGKILL)


def kill_engine_process(cluster, nodes):
    (process,) = engine_processes(engine_actors()[0])
    process.send_signal(signal.SIGKILL)


def remove_node(cluster, nodes):
    cluster.remove_node(nodes.pop(), allow_graceful=False)


def write_lines(folder):
    """Four files of 100 numbers each."""
    for shard in range(4):
        Path(folder, f"{shard}.txt").write_text("".join(f"{100 * shard + line}\n" for line in range(100)))


def made_stream_loader(folder, **options):
    lines = hr.LinesDataset(str(Path(folder, "*.txt")), shuffle=True, seed=SEED).map(int)
    loader = hr.DataLoader(lines, BATCH, seed=SEED, transform=noisy, **options)
    loader._control._lanes.wanted = 2
    return loader


def interrupted(loader, interrupt, *arguments):
    """The digest of an epoch in which something happens after some batches, and the warnings."""
    loader.set_epoch(0)
    batches = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            batches.append(batch)
            if len(batches) == LOST_AT:
                interrupt(*arguments)
    return {
        "digest": digest(batches),
        "warnings": [str(each.message) for each in caught if each.category is RuntimeWarning],
    }


def error_of(run):
    """The class and the text of an error."""
    try:
        run()
    except Exception as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
    return None


def on_large_batches():
    """Whether all bytes of an epoch arrive, five times the size of a node's store, and can be written to."""
    placement = hr.RayPlacement(engines=2, cpus_per_engine=0.5)
    right = 0
    options = {"transform": enlarged, "concurrency": 4, "placement": placement}  # some 30 MB of batches at once
    with hr.DataLoader(Numbers(), BATCH, sampler=range(400), **options) as loader:
        for number, batch in enumerate(loader):
            batch["bytes"] += 1
            values = torch.arange(BATCH * number, BATCH * (number + 1)) % 251 + 1
            sums = batch["bytes"].sum(1, dtype=torch.int64)
            right += torch.equal(sums, values * LARGE) and batch["empty"].shape == (BATCH, 0, 3)
    return right


def main(file):
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    report = Report()
    report["without a cluster"] = error_of(lambda: next(iter(made_loader(placement=hr.RayPlacement()))))

    import ray
    from ray.cluster_utils import Cluster

    assert not ray.is_initialized()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": STORE,
            "_system_config": {"automatic_object_spilling_enabled": False},
        },
    )
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=STORE) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)

    report["no room"] = error_of(
        lambda: next(iter(made_loader(placement=hr.RayPlacement(engines=2, cpus_per_engine=3, start_timeout=0.5))))
    )
    report["collected by Ray"] = collected_by_ray(Path(file).parent)
    loader = made_loader(placement=hr.RayPlacement(engines=2))
    report["two epochs"] = [digest(loader), digest(loader)]
    report["placement"] = loader.stats().placement
    report["actors"] = len(engine_actors())
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    report["state"] = iterator.state_dict()
    del iterator
    report["SIGKILL of an actor"] = interrupted(loader, kill_actor, cluster, nodes)
    report["SIGKILL of an engine's process"] = interrupted(loader, kill_engine_process, cluster, nodes)
    report["loss of a node"] = interrupted(loader, remove_node, cluster, nodes)

    report["SIGKILL of all actors"] = interrupted(loader, kill_all_actors, cluster, nodes)
    loader.close()
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    write_lines(Path(file).parent)
    with made_stream_loader(Path(file).parent, placement=hr.RayPlacement(engines=2)) as stream:
        report["stream"] = digest(stream)
        report["stream, SIGKILL of an actor"] = interrupted(stream, kill_actor, cluster, nodes)
        report["placement of the stream"] = stream.stats().placement
    report["large batches"] = on_large_batches()
    few = hr.RayPlacement(engines=9, cpus_per_engine=2, min_engines=1)
    with hr.DataLoader(Broken(), BATCH, sampler=range(10), placement=few) as short:
        iterator = iter(short)
        report["first of few engines"] = next(iterator).tolist()
        report["error of a sample"] = error_of(lambda: next(iterator))
        ray.shutdown()
        report["after ray.shutdown"] = error_of(lambda: next(iter(short)))
    report["started by headrace"] = ray.is_initialized()
    cluster.shutdown()
    Path(file).write_text(json.dumps(report))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
