"""Training with `for` and evaluation with `async for`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import headrace as hr
from demo.flow import Flow, FlowMeter
from demo.model import digit_net

__all__ = ["Trainer", "accuracy_of"]

# of the one-cycle schedule; 98.9-99.4 % after six epochs, 97.5-98.9 % after three, six seeds
HIGHEST_RATE = 3e-3


class Trainer:
    """A new model with its optimizer, to be trained for a number of epochs.

    Args:
        loader: batches of images and labels.
        epochs: number of calls of `epoch`, for the learning rate's schedule.
        seed: of the model's initial weights.
    """

    def __init__(self, loader: hr.DataLoader[Any], *, epochs: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = digit_net()
        self._loader = loader
        self._optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=1e-2)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, max_lr=HIGHEST_RATE, total_steps=epochs * len(loader)
        )

    def epoch(self, on_batch: Callable[[Flow], object]) -> tuple[float, Flow]:
        """Train for one epoch.

        Args:
            on_batch: called after each batch with the flow so far.

        Returns:
            The mean loss, and the flow of the epoch.
        """
        self.model.train()
        total = 0.0
        meter = FlowMeter(self._loader)
        for pictures, labels in self._loader:
            loss = cross_entropy(self.model(pictures), labels)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._schedule.step()
            total += loss.item() * len(labels)
            on_batch(meter.read())
        flow = meter.read()
        return total / flow.samples, flow


async def accuracy_of(model: nn.Module, loader: hr.DataLoader[Any]) -> float:
    """Share of the loader's samples that the model classifies correctly, from 0 to 1."""
    model.eval()
    right = seen = 0
    with torch.inference_mode():
        async for pictures, labels in loader:
            right += int((model(pictures).argmax(dim=1) == labels).sum())
            seen += len(labels)
    return right / seen
