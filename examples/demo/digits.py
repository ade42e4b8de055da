"""The objects: scikit-learn's handwritten digits as PNG files, and the transforms that run in workers.

Workers import this module, so it must not import scikit-learn at the top.
"""

from __future__ import annotations

import io
import math
import random

import numpy as np
import torch
from PIL import Image

import headrace as hr

__all__ = [
    "CLASSES",
    "HELD_OUT",
    "MANY",
    "TRAIN",
    "augment",
    "augmented",
    "decode",
    "decode_and_augment",
    "digit_objects",
    "label_of",
    "with_copies",
]

CLASSES = 10
TRAIN, HELD_OUT, MANY = "train", "held-out", "many"
BRIGHTEST = 16.0  # of scikit-learn's grey levels

# Limits of the augmentation; larger ones turn a 0 into a 6 on 8 × 8 pixels.
TURN = math.radians(12)
SHIFT = 0.8  # pixels
SCALE = 0.1


def digit_objects() -> dict[str, bytes]:
    """The 1,797 digits that ship with scikit-learn, by key: ``train/00042-7.png``; the label is the 7.

    A fifth, with the same share of every label, is held out under ``held-out/``; the split is
    fixed.

    Example:
        >>> objects = digit_objects()
        >>> len(objects), sum(key.startswith("held-out/") for key in objects)
        (1797, 360)
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    numbers = range(len(digits.target))
    split = train_test_split(
        numbers, test_size=0.2, stratify=digits.target, random_state=0
    )
    parts = zip((TRAIN, HELD_OUT), split, strict=True)
    return {
        f"{part}/{number:05d}-{digits.target[number]}.png": _png(digits.images[number])
        for part, members in parts
        for number in members
    }


def with_copies(objects: dict[str, bytes], times: int) -> dict[str, bytes]:
    """The objects, and copies of those under ``train/`` under ``many/``, for the comparison of loaders.

    Example:
        >>> sorted(with_copies({"train/00042-7.png": b"", "held-out/00001-1.png": b""}, times=2))
        ['held-out/00001-1.png', 'many/0-00042-7.png', 'many/1-00042-7.png', 'train/00042-7.png']
    """
    train = {
        key.removeprefix(f"{TRAIN}/"): data
        for key, data in objects.items()
        if key.startswith(f"{TRAIN}/")
    }
    copies = {
        f"{MANY}/{copy}-{name}": data
        for copy in range(times)
        for name, data in train.items()
    }
    return {**objects, **copies}


def _png(levels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.round(levels * (255 / BRIGHTEST)).astype(np.uint8)).save(
        sink, "PNG"
    )
    return sink.getvalue()


def label_of(key: str) -> int:
    """The label in a key.

    Example:
        >>> label_of("train/00042-7.png")
        7
    """
    return int(key.rpartition("-")[2].removesuffix(".png"))


def decode(sample: hr.types.ObjectSample) -> tuple[torch.Tensor, int]:
    """Decode an object to an image, float32 [1, 8, 8] in [0, 1], and its label."""
    return _tensor(Image.open(io.BytesIO(sample.data))), sample.label


def decode_and_augment(sample: hr.types.ObjectSample) -> tuple[torch.Tensor, int]:
    """Like `decode`, with a random rotation, shift and scale; reproducible, since batches are seeded."""
    return augmented(sample.data), sample.label


def augmented(data: bytes | memoryview) -> torch.Tensor:
    """Decode the bytes of a PNG file to an image with a random rotation, shift and scale."""
    return _tensor(augment(Image.open(io.BytesIO(data))))


def augment(picture: Image.Image) -> Image.Image:
    """Rotate, shift and scale an image at random about its centre."""
    angle, scale = random.uniform(-TURN, TURN), random.uniform(1 - SCALE, 1 + SCALE)
    right, down = random.uniform(-SHIFT, SHIFT), random.uniform(-SHIFT, SHIFT)
    x, y = (picture.width - 1) / 2, (picture.height - 1) / 2
    cosine, sine = math.cos(angle) * scale, math.sin(angle) * scale
    back = (
        cosine,
        sine,
        x - cosine * x - sine * y + right,
        -sine,
        cosine,
        y + sine * x - cosine * y + down,
    )
    return picture.transform(
        picture.size, Image.Transform.AFFINE, back, Image.Resampling.BILINEAR
    )


def _tensor(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture, dtype=np.float32)[None] / 255)
