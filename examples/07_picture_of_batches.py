"""
A picture of batches
====================

A figure of the contents of batches: a grid of samples, and the number of samples of each class in
every batch.

::

    python examples/07_picture_of_batches.py [PICTURE.png]

Without a name it is written to the folder for temporary files. A torch program with one line
changed: `from headrace import DataLoader`.
"""

import pathlib
import sys
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Dataset, WeightedRandomSampler

from headrace import DataLoader

CLASSES = {"disc": 440, "square": 120, "star": 40}  # number of samples of each
COLOURS = ["#3b6fb6", "#d08a1d", "#b8423a"]
# ImageNet's, for red, green and blue.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
BATCH = 40
SIDE = 96  # pixels


class Shapes(Dataset):
    """Shapes drawn on access; normalised float tensors [3, SIDE, SIDE]."""

    def __init__(self):
        self.labels = [
            label for label, count in enumerate(CLASSES.values()) for _ in range(count)
        ]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        random, label = np.random.default_rng(index), self.labels[index]
        picture = Image.new(
            "RGB", (4 * SIDE, 4 * SIDE), f"hsl({random.integers(360)}, 25%, 85%)"
        )
        paint, ink = ImageDraw.Draw(picture), f"hsl({random.integers(360)}, 75%, 40%)"
        x, y, radius, turn = (
            *random.uniform(160, 224, 2),
            random.uniform(80, 145),
            random.uniform(0, 360),
        )
        if label == 0:
            paint.circle((x, y), radius, fill=ink)
        elif label == 1:
            paint.regular_polygon((x, y, radius), 4, rotation=turn, fill=ink)
        else:
            angles, radii = (
                np.radians(turn + 36 * np.arange(10)),
                radius * np.where(np.arange(10) % 2, 0.45, 1.1),
            )
            paint.polygon(
                [
                    *zip(
                        x + radii * np.cos(angles),
                        y + radii * np.sin(angles),
                        strict=True,
                    )
                ],
                fill=ink,
            )
        pixels = (
            torch.from_numpy(np.array(picture.resize((SIDE, SIDE)))).permute(2, 0, 1)
            / 255
        )
        return (pixels - MEAN) / DEVIATION, label


def draw_samples(figure, images, labels):
    """A grid of the first samples of a batch, with the normalisation undone."""
    figure.suptitle("25 samples of a weighted batch, drawn with replacement", fontsize=13)
    for axes, image, label in zip(
        figure.subplots(5, 5).flat, images, labels, strict=False
    ):
        pixels = (image * DEVIATION + MEAN).clamp(0, 1)  # undoes the normalisation
        axes.imshow(pixels.permute(1, 2, 0))
        axes.set_title([*CLASSES][label], fontsize=9, color=COLOURS[label], pad=3)
        axes.set_axis_off()


def draw_histogram(axes, counts, title):
    """Number of samples of each class in each batch, as stacked bars."""
    batches, below = range(1, len(counts) + 1), torch.zeros(len(counts))
    for label, name in enumerate(CLASSES):
        share = counts[:, label].sum() / counts.sum()
        axes.bar(
            batches,
            counts[:, label],
            bottom=below,
            width=0.85,
            color=COLOURS[label],
            label=f"{name} {share:.0%}",
        )
        below = below + counts[:, label]
    print(
        f"{title}. The first batch: {dict(zip(CLASSES, counts[0].tolist(), strict=True))}"
    )
    axes.set(
        title=title, xlabel="batch", ylabel="samples", xticks=batches, ylim=(0, BATCH)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        title="of the epoch",
        reverse=True,
    )


def main(target):
    torch.manual_seed(0)
    shapes = Shapes()
    per_class = torch.tensor([*CLASSES.values()])
    sampler = WeightedRandomSampler(1 / per_class[shapes.labels], num_samples=len(shapes))
    shuffled = DataLoader(shapes, BATCH, shuffle=True, num_workers=2)
    weighted = DataLoader(shapes, BATCH, sampler=sampler, num_workers=2)
    picture = plt.figure(figsize=(14, 7), layout="constrained")
    left, right = picture.subfigures(1, 2, width_ratios=[1, 1.2], wspace=0.03)
    upper, lower = right.subplots(2, 1)
    counts = [labels.bincount(minlength=len(CLASSES)) for _, labels in shuffled]
    draw_histogram(
        upper, torch.stack(counts), "Shuffled: every batch is as imbalanced as the data"
    )
    batches = list(weighted)
    counts = [labels.bincount(minlength=len(CLASSES)) for _, labels in batches]
    draw_histogram(
        lower, torch.stack(counts), "Weighted: every batch holds each class about equally"
    )
    draw_samples(left, *batches[0])
    picture.savefig(target, dpi=110)
    print(f"drawn to {target}")


if __name__ == "__main__":
    named = sys.argv[1:]
    main(
        pathlib.Path(
            named[0] if named else pathlib.Path(tempfile.gettempdir()) / "batches.png"
        )
    )
