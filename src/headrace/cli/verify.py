"""`headrace verify STATE…`: list samples delivered twice or never."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from headrace._consumer.delivery import verify
from headrace._streams.kinds import sample_key
from headrace.cli.pack import function_of

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> bool:
    """Compute from saved states which samples a run delivered.

    Args:
        arguments: parsed arguments of the command.

    Returns:
        Whether no sample is missing or repeated.

    Raises:
        ValueError: the number of states is odd, or a file has no state.
    """
    states = [None if name == "-" else _state_in(name) for name in arguments.states]
    if len(states) % 2:
        raise ValueError(
            "give two states for each part of the run: the restored state (- for none), "
            "and the last"
        )
    loader = function_of(arguments.loader, "--loader")()
    found = verify(zip(states[::2], states[1::2], strict=True), loader)
    problems = 0
    for epoch in found:
        print(epoch)
        # A running epoch may still deliver the missing samples.
        kinds = ["repeated"] if epoch is found[-1] and not epoch.ended else ["repeated", "never"]
        for kind in kinds:
            for index in epoch.others[kind].tolist():
                print(f"  {kind}: {index} {sample_key(epoch.dataset, index) or ''}".rstrip())
                problems += 1
    return not problems


def _state_in(name: str) -> Any:
    """Load a state from a file of `torch.save`.

    The file holds the state alone, or a checkpoint with the state under "loader".
    """
    try:
        saved = torch.load(name, "cpu", weights_only=True)
        return saved.get("loader", saved)
    except Exception as error:
        raise ValueError(f"{name} has no state that torch.save wrote: {error}") from error
