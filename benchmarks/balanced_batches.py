"""Batches of samples of different lengths: how equal and how full those of all ranks are, and the time to plan them.

Three distributions of lengths: files and docstrings of installed packages (4 bytes a token; drawn
again and again up to the number of samples) and a log-normal one. Balance is the tokens of the
fullest rank of a step, of the mean: the worst step, without the last. Torch's `BatchSampler` has
the largest batch size with which no batch has more tokens than the budget. Each sample comes once,
or the run does not count; so too with 50 changes of the number of ranks.

A trainer on 8 simulated ranks then sleeps in each step for the cost of its costliest batch, a token
and a pair of tokens of a document taking some time. Balance is here of the costs, before and after
`hr.fit_cost`.

    python benchmarks/balanced_batches.py
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Figure, claim, describe_machine, parse_arguments
from torch.utils.data import BatchSampler, RandomSampler

import headrace as hr

RANKS = (8, 64, 512)
MAX_TOKENS = {"log-normal": 16_384, "files": 65_536, "docstrings": 8192}


def distributions(count: int, files: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    paths = list(
        itertools.islice(
            sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")), files
        )
    )
    found: dict[str, list[int]] = {"files": [], "docstrings": []}
    for path in paths:
        try:
            text = path.read_text()
            parsed = [
                node
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            ]
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        found["files"].append(len(text) // 4)
        found["docstrings"] += [
            len(words) // 4 for node in parsed if (words := ast.get_docstring(node))
        ]
    yield (
        "log-normal",
        rng.lognormal(5.8, 1.2, count).clip(1, MAX_TOKENS["log-normal"]).astype(np.int64),
    )
    for name, lengths in found.items():
        yield name, rng.choice(np.array(lengths).clip(1, MAX_TOKENS[name]), count)


def balance(tokens: Sequence[int], ranks: int, max_tokens: int) -> tuple[float, float]:
    """The worst of all steps but the last, and the share of the budget that they fill."""
    steps = np.array(tokens[: len(tokens) // ranks * ranks]).reshape(-1, ranks)
    return float((steps.max(axis=1) / steps.mean(axis=1)).max()), float(
        steps.mean() / max_tokens
    )


def of_torch(lengths: np.ndarray[Any, Any], max_tokens: int) -> list[int]:
    order = np.array(
        [*RandomSampler(lengths, generator=torch.Generator().manual_seed(0))]
    )
    size = int(max_tokens / lengths.mean())
    while (
        size > 1
        and np.add.reduceat(lengths[order], range(0, len(order), size)).max() > max_tokens
    ):
        size = size * 15 // 16
    batches = BatchSampler(order.tolist(), size, drop_last=False)  # type: ignore[arg-type]
    return [int(lengths[batch].sum()) for batch in batches]


def restarted(lengths: np.ndarray[Any, Any], max_tokens: int) -> bool:
    """Whether each sample comes once with 50 other numbers of ranks."""
    draw, state, given = random.Random(0), None, list[int]()
    for restart in range(51):
        ranks = draw.randint(1, 16)
        parts = [
            hr.BalancedBatchSampler(lengths, max_tokens, rank=rank, world_size=ranks)
            for rank in range(ranks)
        ]
        for part in parts if state else ():
            part.load_state_dict(state)
        steps = zip(*parts, strict=True)
        for step in itertools.islice(steps, 1) if restart < 50 else steps:
            given += itertools.chain.from_iterable(step)
        state = parts[0].state_dict()
    return sorted(given) == list(range(len(lengths)))


def train(
    lengths: np.ndarray[Any, Any],
    true: hr.quadratic,
    cost: hr.quadratic | None,
    steps: int,
) -> tuple[list[float], float, hr.quadratic]:
    """Return the balance of each step, the seconds of a token, and the fitted cost."""
    ranks, max_tokens = 8, MAX_TOKENS["log-normal"]
    samplers = [
        hr.BalancedBatchSampler(
            lengths, max_tokens, cost=cost, rank=rank, world_size=ranks
        )
        for rank in range(ranks)
    ]
    planned = [*itertools.islice(zip(*samplers, strict=True), steps)]
    costs = np.array([[true(lengths[batch]).sum() for batch in step] for step in planned])
    samplers[0].set_epoch(0)
    loader = hr.DataLoader(
        range(len(lengths)), batch_sampler=samplers[0], collate_fn=list
    )  # type: ignore[arg-type]
    for seconds, step, batch in zip(costs.max(axis=1), planned, loader, strict=False):
        if batch != step[0]:
            raise RuntimeError("another batch than was planned: this run does not count")
        time.sleep(seconds)
    tokens = sum(int(lengths[batch].sum()) for step in planned for batch in step)
    balances = costs.max(axis=1) / costs.mean(axis=1)
    return balances.tolist(), float(costs.max(axis=1).sum()) / tokens, hr.fit_cost(loader)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=5_000)
    parser.add_argument(
        "--steps", type=int, default=200, help="of the trainer, before and after"
    )
    arguments = parse_arguments(parser, samples=150_000, files=200, steps=20)
    print(describe_machine())
    worst, fills, costs = [], [], []
    for name, lengths in distributions(arguments.samples, arguments.files):
        max_tokens = MAX_TOKENS[name]
        began = time.thread_time()
        # Of all ranks, in turn.
        batches = list(hr.BalancedBatchSampler(lengths, max_tokens))
        costs.append((time.thread_time() - began) / len(lengths) * 1e6)
        if not np.array_equal(np.sort(np.concatenate(batches)), np.arange(len(lengths))):
            raise RuntimeError("samples are missing or doubled: this run does not count")
        if not restarted(lengths[: int(900 * max_tokens / lengths.mean())], max_tokens):
            raise RuntimeError(
                "samples are missing or doubled after 50 restarts: this run does not count"
            )
        tokens, torchs = (
            [int(lengths[batch].sum()) for batch in batches],
            of_torch(lengths, max_tokens),
        )
        print(
            f"\n{name}: mean {lengths.mean():.0f}, most {lengths.max()}, {max_tokens} a batch: {costs[-1]:.2f} µs each"
        )
        for ranks in RANKS:
            if min(len(tokens), len(torchs)) < ranks:
                continue
            found, theirs = (
                balance(tokens, ranks, max_tokens),
                balance(torchs, ranks, max_tokens),
            )
            print(
                f"  {ranks:3} ranks: balance {found[0]:.4f}, filled {found[1]:.2%}; ",
                end="",
            )
            print(f"BatchSampler: {theirs[0]:.2f}, {theirs[1]:.1%}")
            worst.append(found[0])
            fills.append(found[1])
    claim(
        "balanced batches, 8 to 512 ranks",
        Figure(
            "of the mean of ranks, the worst step", worst, at_most=1.02, stated=max(worst)
        ),
        Figure("of the budget filled", fills, at_least=0.97, stated=min(fills)),
        Figure("µs a sample", costs, at_most=5, stated=max(costs)),
    )
    name, lengths = next(distributions(arguments.samples, 0))
    true = hr.quadratic(2e-6, 2e-6 / 2048)  # seconds
    before, of_token_before, fitted = train(lengths, true, None, arguments.steps)
    after, of_token, _ = train(lengths, true, fitted, arguments.steps)
    off = [abs(found / stated - 1) for found, stated in zip(fitted, true, strict=True)]
    print(f"\n{name}, 8 ranks: fitted {fitted}, {off[0]:.1%} and {off[1]:.1%} off")
    for when, balances in (("before", before), ("after", after)):
        print(
            f"  {when}: balance {np.mean(balances):.3f}, of 95 % of the steps at most "
            f"{np.quantile(balances, 0.95):.3f}, of all {max(balances):.3f}"
        )
    claim(
        "batches by cost, 8 ranks",
        Figure("of the mean of ranks", after, at_most=1.03, stated=float(np.mean(after))),
        Figure("off, a and b of the fit", off, at_most=0.05, stated=max(off)),
        Figure("of the time of a token", [of_token / of_token_before], at_most=0.9),
    )


if __name__ == "__main__":
    main()
