"""Documents packed into sequences: the share of tokens that are no padding, and the time for a document.

The same documents, in memory, go through headrace's `pack` and Grain's packers, each with as many
open sequences. The lengths are log-normal; a document longer than a sequence is cut before, since
Grain truncates it where documents stay whole. Both make tokens, segments and positions. The row of
each without packing is its time to hand the documents on. Each token's count is compared.

    python benchmarks/packing.py
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
from harness import (
    Figure,
    claim,
    describe_machine,
    interleave_figures,
    is_installed,
    parse_arguments,
)

import headrace as hr

SEQUENCE = 2048  # tokens
LENGTHS = {
    "pages": (6.0, 1.2),
    "instructions": (5.0, 1.0),
    "articles": (7.0, 0.5),
}  # of the normal distribution
STRATEGIES = ("concat", "first_fit", "best_fit")
VALUES = 1000  # tokens differ by their numbers modulo this

Documents = list[np.ndarray[Any, Any]]


def make_documents(name: str, count: int) -> Documents:
    lengths = np.random.default_rng(0).lognormal(*LENGTHS[name], count).astype(int) + 1
    ends = lengths.cumsum()
    tokens = np.arange(ends[-1]) % VALUES
    whole = np.split(tokens.astype(np.int32), ends[:-1])
    return [
        document[at : at + SEQUENCE]
        for document in whole
        for at in range(0, len(document), SEQUENCE)
    ]


class InMemory(hr.AsyncIterableDataset[Any]):
    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    async def __aiter__(self) -> AsyncIterator[Any]:
        for document in self.documents:
            yield document


def by_headrace(documents: Documents, strategy: str, window: int) -> Iterator[Any]:
    async def read() -> list[Any]:
        stream: Any = InMemory(documents)
        packed = stream.pack(SEQUENCE, strategy, window=window) if strategy else stream
        return [sequence async for sequence in packed]

    return iter(asyncio.run(read()))


def by_grain(documents: Documents, strategy: str, window: int) -> Iterator[Any]:
    import grain

    dicts = [{"tokens": document} for document in documents]
    read: Any = grain.MapDataset.source(dicts).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    lengths: Any = {"length_struct": {"tokens": SEQUENCE}}
    if strategy == "concat":
        read = grain.experimental.ConcatThenSplitIterDataset(read, **lengths)
    elif strategy:
        packer: Any = {
            "first_fit": grain.experimental.FirstFitPackIterDataset,
            "best_fit": grain.experimental.BestFitPackIterDataset,
        }
        read = packer[strategy](read, num_packing_bins=window, **lengths)
    return iter(read)


def measure(
    run: Callable[[Documents, str, int], Iterator[Any]],
    documents: Documents,
    strategy: str,
    window: int,
) -> tuple[float, float]:
    """The microseconds for a document, and the share of tokens."""
    began = time.perf_counter()
    packed = list(run(documents, strategy, window))
    elapsed = time.perf_counter() - began
    if not strategy:
        return elapsed / len(documents) * 1e6, 1.0
    counts = np.zeros(VALUES, np.int64)
    for sequence in packed:
        segments = sequence[
            "segment_ids" if "segment_ids" in sequence else "tokens_segment_ids"
        ]
        counts += np.bincount(
            np.asarray(sequence["tokens"])[np.asarray(segments) > 0], minlength=VALUES
        )
    expected = np.bincount(np.concatenate(documents), minlength=VALUES)
    if not np.array_equal(counts, expected):
        raise RuntimeError("tokens are missing or doubled: this run does not count")
    return elapsed / len(documents) * 1e6, expected.sum() / (len(packed) * SEQUENCE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=5_000)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, documents=500, rounds=1)
    print(describe_machine("grain"))
    contestants = {"headrace": by_headrace}
    if is_installed("grain"):
        contestants["grain"] = by_grain
    for name in LENGTHS:
        documents = make_documents(name, arguments.documents)
        mean = sum(map(len, documents)) / len(documents)
        print(
            f"\n{name}: {len(documents):,} documents of {mean:.0f} tokens, {arguments.window} open sequences"
        )
        costs, shares = interleave_figures(
            {
                f"{who}, {strategy or 'not packed'}": (
                    lambda run=run, strategy=strategy, documents=documents: measure(
                        run, documents, strategy, arguments.window
                    )
                )
                for strategy in ("", *STRATEGIES)
                for who, run in contestants.items()
            },
            rounds=arguments.rounds,
            units=("µs a document", "tokens"),
        )
        costs.show(against="headrace, not packed")
        for each, values in shares.values.items():
            if "not packed" not in each:
                print(f"{each:21} {values[0]:7.2%} filled")
        if "grain" in contestants:
            for strategy in STRATEGIES:
                ours, theirs = f"headrace, {strategy}", f"grain, {strategy}"
                fill = Figure(
                    "of Grain's fill",
                    shares.ratios(ours, theirs),
                    at_least=1,
                    higher_is_better=True,
                )
                claim(
                    f"packed, {name}, {strategy}",
                    costs.share(ours, theirs, "of Grain's time", at_most=1),
                    fill,
                )


if __name__ == "__main__":
    main()
