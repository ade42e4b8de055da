"""The network that the demo trains."""

from __future__ import annotations

from torch import nn

from demo.digits import CLASSES

__all__ = ["digit_net"]


def digit_net() -> nn.Module:
    """A CNN of 66,000 parameters for pictures of 1 × 8 × 8; gives one logit for each class."""
    return nn.Sequential(
        *_block(1, 32),
        *_block(32, 64),
        nn.MaxPool2d(2),
        *_block(64, 64),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, CLASSES),
    )


def _block(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )
