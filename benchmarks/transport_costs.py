"""What a batch costs on its way to a worker and back, in CPU time: a bound for what a loader with workers can reach.

The engine's and the worker's end of a channel in one process, one batch after the other: the
request is pickled and sent, the worker reads and collates its samples and sends the answer, which
is received and unpickled. What is not in it: the event loop and the session, the consumer's part of
`next()`, waking another process, and what the consumer does with a batch. On as many cores as there
are workers a loader can give at most the last column of what bare loops make that read and collate,
and send nothing; those of `drop_in.py` (samples of 4 KB) and of `many_tensors.py` (114 small
tensors).

Of each stage the smallest of 1,000 batches is taken, which other programs disturb least. Every
batch is compared with what the bare loop makes.

    python benchmarks/transport_costs.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from drop_in import BATCH, CASES, Stored
from harness import describe_machine, interleave_figures, parse_arguments
from many_tensors import BATCH as FEW
from many_tensors import Numbers, many

from headrace._consumer.deliver import opened
from headrace._engine.assemble import Assembler
from headrace._engine.worker_tasks import ReadTask
from headrace._pool.worker import INHERITED, Request, Worker
from headrace._ranks.rankinfo import RankInfo
from headrace._records.batches import BatchPlan, HostBatch
from headrace._records.error_policy import Tolerance
from headrace._transport.channel import BlockingChannel, Connection
from headrace._transport.pickling import dump_message
from headrace.collate import destined

UNITS = (
    "µs, the bare loop",
    "µs, request pickled and sent",
    "µs, the worker",
    "µs, answer received",
    "µs, batch unpickled",
    "bare loop / all of it",
)


@dataclass(frozen=True)
class Work:
    """A dataset, what a batch of it is made by, and what a bare loop does in its place."""

    dataset: Any
    size: int
    collate: Callable[[Any], Any]
    bare: Callable[[Sequence[int]], Any]


def samples_of_4_kb() -> Work:
    dataset = Stored(CASES[0])
    out = torch.empty(BATCH, *CASES[0].shape)

    def bare(indices: Sequence[int]) -> list[torch.Tensor]:
        samples, labels = zip(*(dataset[index] for index in indices), strict=True)
        return [torch.stack(samples, out=out), torch.tensor(labels)]

    return Work(dataset, BATCH, torch.utils.data.default_collate, bare)


def small_tensors() -> Work:
    return Work(Numbers(10_000), FEW, many, lambda indices: many([indices[0]]))


def measure(work: Work, batches: int) -> tuple[float, ...]:
    """The figures in `UNITS`, in this process."""
    assembler = Assembler(
        (), destined(work.collate), batched=True, tolerance=Tolerance(skips=False)
    )
    task = ReadTask(
        dataset=work.dataset,
        iterable=False,
        assembler=assembler,
        drop_last=False,
        base_seeds={0: 0},
        rank=RankInfo(0, 1, "none"),
        seeds=False,
    )
    ours, theirs = Connection.pair()
    engine, channel = BlockingChannel(ours), BlockingChannel(theirs)
    worker = Worker(channel, 0, 1)
    worker.add(INHERITED, lambda: task)
    smallest = [float("inf")] * 5
    generator = torch.Generator().manual_seed(0)
    for number in range(batches):
        indices = torch.randint(
            len(work.dataset), (work.size,), generator=generator
        ).tolist()
        plan = BatchPlan(number, tuple(indices), seed=number, positions=range(work.size))
        times = [time.thread_time()]
        expected = work.bare(indices)
        times.append(time.thread_time())
        engine.send_message(
            dump_message(tuple(Request(tuple(plan), INHERITED)), plain=True)
        )
        times.append(time.thread_time())
        worker.answer_next()
        times.append(time.thread_time())
        answer = engine.receive()
        times.append(time.thread_time())
        batch = opened(HostBatch.from_flat(answer, plan))
        times.append(time.thread_time())
        pairs = zip(values(batch), values(expected), strict=True)
        if not all(torch.equal(came, made) for came, made in pairs):
            raise RuntimeError("a batch is wrong: this run does not count")
        smallest = [
            min(least, after - before)
            for least, before, after in zip(smallest, times, times[1:], strict=False)
        ]
    engine.close()
    channel.close()
    return *(1e6 * each for each in smallest), smallest[0] / sum(smallest[1:])


def values(batch: Any) -> list[torch.Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=1000)
    arguments = parse_arguments(parser, batches=20, rounds=1)
    torch.set_num_threads(1)
    first, second = "64 samples of 4 KB", "114 tensors of 512 bytes"
    works = {first: samples_of_4_kb(), second: small_tensors()}
    tables = interleave_figures(
        {
            first: lambda: measure(works[first], arguments.batches),
            second: lambda: measure(works[second], arguments.batches),
        },
        rounds=arguments.rounds,
        units=UNITS,
    )
    print(describe_machine())
    for table in tables:
        table.show(against=first)


if __name__ == "__main__":
    main()
