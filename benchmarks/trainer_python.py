"""How much the trainer's own Python slows the loader, and the loader the trainer.

A store that takes 20 ms to the first byte, 256 fetches in flight, batches of 32 objects of 56 KB as
one uint8 tensor [32, 56000], and a consumer that burns 10 ms of pure Python for each batch, as a
training loop's bookkeeping does. The limit is the burn alone, calibrated and measured anew in each
round. Claimed: headrace with its loop in a process of its own takes at most 12 ms a step (the first
batch is not counted), and its burns take at most 15 % longer than alone; loaders in the trainer's
process compete with it for the interpreter.

The store is the one of `store.py`, read over plain HTTP as objects of unknown length; it shares the
machine's cores with the loader under test. Peers that are not installed (torchdata, SPDL, Grain)
are left out, and the table says so.

    python benchmarks/trainer_python.py
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from contents import content_of, key_of
from getting import BatchInThreads, GetWhole, OneAtATime
from harness import (
    Figure,
    claim,
    describe_machine,
    interleave_figures,
    is_installed,
    parse_arguments,
)
from store import serve

import headrace as hr

OBJECT_SIZE = 56_000  # bytes: a JPEG of 500 × 375 pixels
BATCH = 32
CONCURRENCY = 256
LATENCY = 0.020  # seconds to the first byte
# every so many words of 8 bytes are compared: the trainer's Python is what is measured, not a check
LOOKED_AT = 1000
BURN = 0.010  # seconds of pure Python for each batch
# of torch with blocking GETs, which takes 30 times as long for each; odd, as it has two workers
BLOCKING_BATCHES = 5

HEADRACE = "headrace, process"
ALONE = "the burn alone"


class Burn:
    """Pure Python that takes `BURN` seconds when nothing else runs."""

    loops = 50_000

    def __call__(self) -> float:
        began = time.perf_counter()
        x = 0
        for _ in range(self.loops):
            x = (x * 5 + 1) % 1009
        return time.perf_counter() - began

    def calibrate(self) -> None:
        for _ in range(5):
            self.loops = int(self.loops * BURN / min(self() for _ in range(5)))


burn = Burn()


def burn_alone(batches: int) -> tuple[float, float]:
    burn.calibrate()
    burns = [burn() for _ in range(batches)]
    return sum(burns) / batches * 1e3, sum(burns) / batches * 1e3


def train(batches: Iterable[Any], expected: int) -> tuple[float, float]:
    """Milliseconds a step and milliseconds a burn, the first batch not counted."""
    marks, burns, seen = [], [], []
    for batch in batches:
        # what is checked afterwards: a few words of each
        seen.append(batch.view(torch.int64)[:, ::LOOKED_AT].clone())
        burns.append(burn())
        marks.append(time.perf_counter())
    check(torch.cat(seen), expected)
    steps = len(marks) - 1
    return (marks[-1] - marks[0]) / steps * 1e3, sum(burns[1:]) / steps * 1e3


def check(seen: torch.Tensor, expected: int) -> None:
    in_order = seen[seen[:, 0].argsort()]  # an object begins with its number
    stored = stack([content_of(number, OBJECT_SIZE) for number in range(expected)])
    if not torch.equal(in_order, stored.view(torch.int64)[:, ::LOOKED_AT]):
        raise RuntimeError(
            "objects are missing, doubled or wrong: this run does not count"
        )


def stack(objects: Sequence[Any]) -> torch.Tensor:
    """Objects' bytes as one tensor; the same function for everyone."""
    out = np.empty((len(objects), OBJECT_SIZE), np.uint8)
    for row, data in zip(out, objects, strict=True):
        row[:] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(out)


def stack_samples(samples: Sequence[hr.types.ObjectSample]) -> torch.Tensor:
    return stack([sample.data for sample in samples])


def torch_loader(dataset: OneAtATime) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=BATCH,
        collate_fn=stack,
        num_workers=2,
        # 256 objects in flight, where the batch's GETs are made at once.
        prefetch_factor=4,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )


def torchdata_nodes(get: GetWhole, length: int) -> Any:
    from torchdata import nodes

    node: Any = nodes.IterableWrapper(range(length))
    node = nodes.ParallelMapper(node, get, num_workers=CONCURRENCY, method="thread")
    node = nodes.Mapper(nodes.Batcher(node, BATCH), stack)
    return nodes.Loader(nodes.Prefetcher(node, 4))


def spdl_builder(get: GetWhole, length: int) -> Any:
    from spdl.pipeline import PipelineBuilder

    builder = (
        PipelineBuilder()
        .add_source(range(length))
        .pipe(get.aget, concurrency=CONCURRENCY)
    )
    return builder.aggregate(BATCH).pipe(stack).add_sink(4)


def train_on_spdl(get: GetWhole, length: int) -> tuple[float, float]:
    pipeline = spdl_builder(get, length).build(num_threads=4)
    with pipeline.auto_stop():
        return train(pipeline.get_iterator(), length)


def spdl_in_subprocess(get: GetWhole, length: int) -> Any:
    from spdl.pipeline import run_pipeline_in_subprocess

    return run_pipeline_in_subprocess(
        spdl_builder(get, length).get_config(),
        num_threads=4,
        mp_context="spawn",
        buffer_size=4,
    )


def grain_dataset(get: GetWhole, length: int) -> Any:
    import grain

    fetched = grain.MapDataset.range(length).map(get)
    options = grain.ReadOptions(
        num_threads=CONCURRENCY, prefetch_buffer_size=2 * CONCURRENCY
    )
    return fetched.to_iter_dataset(options).batch(BATCH, batch_fn=stack)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, batches=6, rounds=1)
    length = BATCH * arguments.batches
    few = BATCH * BLOCKING_BATCHES
    with contextlib.ExitStack() as open_now:
        store = open_now.enter_context(serve(length, OBJECT_SIZE, latency=LATENCY))
        get = GetWhole(store.http_url, {"client_options": {"allow_http": True}})
        keys = [key_of(index) for index in range(length)]

        def headrace_loader(**placed: Any) -> hr.DataLoader[Any]:
            objects = hr.ObjectDataset(store.http_url, keys=keys)
            loader = hr.DataLoader(
                objects,
                batch_size=BATCH,
                collate_fn=stack_samples,
                concurrency=CONCURRENCY,
                **placed,
            )
            return open_now.enter_context(loader)

        in_process = headrace_loader(num_workers=1, placement="process")
        in_thread = headrace_loader(placement="thread")
        blocking, threaded = (
            torch_loader(OneAtATime(get, few)),
            torch_loader(BatchInThreads(get, length, BATCH)),
        )
        contestants: dict[str, Callable[[], tuple[float, float]]] = {
            ALONE: lambda: burn_alone(arguments.batches),
            HEADRACE: lambda: train(in_process, length),
            "headrace, thread": lambda: train(in_thread, length),
            "torch, 2 workers, blocking GETs": lambda: train(blocking, few),
            "torch, 2 workers, threads in each": lambda: train(threaded, length),
        }
        absent = {}
        if is_installed("torchdata"):
            nodes = torchdata_nodes(get, length)
            contestants["torchdata.nodes, threads"] = lambda: train(nodes, length)
        else:
            absent["torchdata.nodes, threads"] = "torchdata is not installed"
        if is_installed("spdl-core"):
            subprocess_pipeline = spdl_in_subprocess(get, length)
            contestants["SPDL"] = lambda: train_on_spdl(get, length)
            contestants["SPDL, in a subprocess"] = lambda: train(
                subprocess_pipeline, length
            )
        else:
            absent["SPDL"] = "spdl is not installed"
        if is_installed("grain"):
            grain = grain_dataset(get, length)
            contestants["Grain"] = lambda: train(grain, length)
        else:
            absent["Grain"] = "grain is not installed"
        steps, burns = interleave_figures(
            contestants, rounds=arguments.rounds, units=("ms a step", "ms a burn")
        )
        print(
            f"{length} objects of {OBJECT_SIZE} bytes, {LATENCY * 1000:.0f} ms, {CONCURRENCY} in flight, batches of "
            f"{BATCH}, {BURN * 1000:.0f} ms of Python for each"
        )
        print(f"the store: {store.kind}; it shares the machine's cores")
        print(describe_machine("torchdata", "spdl-core", "grain"))
        steps.show(against=ALONE, absent=absent)
        print()
        burns.show(against=ALONE, absent=absent)
        slower = [100 * (ratio - 1) for ratio in burns.ratios(HEADRACE, ALONE)]
        claim(
            "a step with 10 ms of Python in the trainer",
            steps.figure(HEADRACE, "ms", at_most=12),
            Figure("% slower burn", slower, at_most=15),
        )


if __name__ == "__main__":
    main()
