"""The parts of an order in a saved state: a checksum of its last indices, and the state of its generator as text."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

import torch

from headrace.errors import StateError


def checksum(indices: Sequence[object]) -> tuple[int, int]:
    """Number and checksum of a batch's indices."""
    return len(indices), zlib.crc32(repr(tuple(indices)).encode())


def encoded(state: torch.Tensor | None) -> str | None:
    """The state of a generator as text."""
    return None if state is None else base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()


def decoded(text: str) -> torch.Tensor:
    """The state of a generator that was `encoded`.

    Raises:
        StateError: it is damaged.
    """
    try:
        return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    except (ValueError, zlib.error) as error:
        raise StateError(f"the state is damaged: the generator's state cannot be read ({error})") from error
