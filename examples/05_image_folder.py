"""
A folder of images and a CSV
============================

Image files and a CSV of their labels, decoded in two workers and normalised as ImageNet's models
expect.

::

    python examples/05_image_folder.py [FOLDER]

FOLDER contains images and a labels.csv with the columns file and label. Without one, shapes are
drawn into a temporary folder. A torch program with one line changed: `from headrace import
DataLoader`."""

import collections
import csv
import pathlib
import random
import sys
import tempfile

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch.utils.data import Dataset

from headrace import DataLoader

SIDE = 96  # pixels
# ImageNet's, for red, green and blue in [0, 1].
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class LabelledPictures(Dataset):
    """Images of any size and mode, as float tensors [3, SIDE, SIDE], with the number of their class."""

    def __init__(self, folder):
        self.folder = folder
        with open(folder / "labels.csv", newline="") as table:
            self.rows = [(row["file"], row["label"]) for row in csv.DictReader(table)]
        self.classes = sorted({label for _, label in self.rows})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        file, label = self.rows[index]
        with Image.open(self.folder / file) as picture:
            # scaled, and cropped about the middle
            square = ImageOps.fit(picture.convert("RGB"), (SIDE, SIDE))
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255
        return (pixels - MEAN) / DEVIATION, self.classes.index(label)


def draw_shapes(folder, count):
    """Discs, squares and triangles in JPEG and PNG, of many sizes, and the CSV of their labels."""
    chance = random.Random(0)
    with open(folder / "labels.csv", "w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["file", "label"])
        for number in range(count):
            label, suffix = (
                chance.choice(["disc", "square", "triangle"]),
                chance.choice(["jpg", "png"]),
            )
            width, height = chance.randint(80, 200), chance.randint(80, 200)
            picture = Image.new(
                "RGB", (width, height), f"hsl({chance.randrange(360)}, 30%, 80%)"
            )
            middle, radius = (
                (width / 2, height / 2),
                min(width, height) * chance.uniform(0.2, 0.45),
            )
            paint, ink = (
                ImageDraw.Draw(picture),
                f"hsl({chance.randrange(360)}, 80%, 40%)",
            )
            if label == "disc":
                paint.circle(middle, radius, fill=ink)
            else:
                paint.regular_polygon(
                    (middle, radius), 4 if label == "square" else 3, fill=ink
                )
            picture.save(folder / f"{number:04d}.{suffix}")
            rows.writerow([f"{number:04d}.{suffix}", label])


def look_at(folder):
    pictures = LabelledPictures(folder)
    torch.manual_seed(0)
    loader = DataLoader(pictures, batch_size=32, shuffle=True, num_workers=2)
    seen, total = collections.Counter(), torch.zeros(3)
    for number, (images, labels) in enumerate(loader):
        if number < 3:
            names = [pictures.classes[label] for label in labels[:4]]
            print(
                f"batch {number}: {tuple(images.shape)} {images.dtype}, {', '.join(names)} …"
            )
        seen.update(labels.tolist())
        total += images.mean(dim=(2, 3)).sum(dim=0)
    assert seen == collections.Counter(
        pictures.classes.index(label) for _, label in pictures.rows
    )
    print(
        f"{len(pictures)} pictures, each once:",
        {pictures.classes[label]: seen[label] for label in sorted(seen)},
    )
    red, green, blue = (total / len(pictures)).tolist()
    print(
        f"means, in ImageNet's deviations from ImageNet's mean: red {red:+.2f}, green {green:+.2f}, blue {blue:+.2f}"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        look_at(pathlib.Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            draw_shapes(pathlib.Path(temporary), 200)
            look_at(pathlib.Path(temporary))
