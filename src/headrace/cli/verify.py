"""`headrace verify STATE…`: which samples a run delivered, by its saved states."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from headrace._core.consumer.delivery import verify
from headrace._core.streams.kinds import sample_key
from headrace.cli.pack import function_of

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> bool:
    """Print what was delivered; returns whether no sample is missing or repeated."""
    states = [None if name == "-" else _state_in(name) for name in arguments.states]
    if len(states) % 2:
        raise ValueError(
            "give two states for each part of the run: the restored state (- for none), and the last"
        )
    loader = function_of(arguments.loader, "--loader")()
    found = verify(zip(states[::2], states[1::2], strict=True), loader)
    problems = 0
    for epoch in found:
        print(epoch)
        # The rest of the last epoch may still come.
        kinds = ["repeated"] if epoch is found[-1] and not epoch.ended else ["repeated", "never"]
        for kind in kinds:
            for index in epoch.others[kind].tolist():
                print(f"  {kind}: {index} {sample_key(epoch.dataset, index) or ''}".rstrip())
                problems += 1
    return not problems


def _state_in(name: str) -> Any:
    """The state in a file of `torch.save`, alone or as "loader" of a checkpoint."""
    try:
        saved = torch.load(name, "cpu", weights_only=True)
        return saved.get("loader", saved)
    except Exception as error:
        raise ValueError(f"{name} has no state that torch.save wrote: {error}") from error
