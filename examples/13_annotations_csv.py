"""
Images and a table of labels
============================

Objects of a store with labels in a CSV: pandas reads the table, and nothing is listed.

The CSV has an identifier without the suffix, a column of classes, and columns that are not used.
The store is a local one with 20 ms to the first byte. For a real one, leave the server out::

    table = pandas.read_csv("s3://bucket/train.csv")  # with s3fs
    dataset = hr.ObjectDataset("s3://bucket/images", keys=table["image_id"],
    labels=table["species"])
"""

import csv
import io
import pathlib
import pickle
import random
import tempfile

import numpy as np
import obstore
import pandas
import torch
from PIL import Image, ImageDraw

import headrace as hr
from object_server import ObjectServer

SPECIES = ["disc", "frame", "stripe"]
SIDE = 64  # pixels


def drawn(species, chance):
    """A PNG of one of three shapes, in any colour and place."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    ink = tuple(chance.randrange(200) for _ in range(3))
    left, top = chance.randrange(SIDE // 2), chance.randrange(SIDE // 2)
    box = (left, top, left + SIDE // 3, top + SIDE // 3)
    if species == "disc":
        pen.ellipse(box, fill=ink)
    elif species == "frame":
        pen.rectangle(box, outline=ink, width=3)
    else:
        pen.line(box, fill=ink, width=4)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def bucket(count):
    """The objects of the store: images/img_0000.png etc., and train.csv."""
    chance = random.Random(0)
    objects, table = {}, io.StringIO()
    rows = csv.writer(table)
    rows.writerow(["image_id", "photographer", "species"])
    for number in range(count):
        species = SPECIES[number % 3]
        rows.writerow([f"img_{number:04}", chance.choice(["Ada, L.", "Emmy"]), species])
        objects[f"images/img_{number:04}.png"] = drawn(species, chance)
    return {**objects, "train.csv": table.getvalue().encode()}


def decode(sample):
    """Pixels [3, SIDE, SIDE] in [0, 1], and the number of the class; runs in the loader's workers."""
    with Image.open(io.BytesIO(sample.data)) as picture:
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
    return pixels, sample.label


def ink_by_class(dataset):
    """Mean share of pixels that are not white, by class."""
    sums, counts = torch.zeros(len(SPECIES)), torch.zeros(len(SPECIES))
    with hr.DataLoader(
        dataset, batch_size=32, shuffle=True, num_workers=2, transform=decode, seed=1
    ) as loader:
        for pixels, labels in loader:
            sums.index_add_(0, labels, (1 - pixels).mean(dim=(1, 2, 3)))
            counts.index_add_(0, labels, torch.ones(len(labels)))
    return {
        name: round(share, 4)
        for name, share in zip(SPECIES, (sums / counts).tolist(), strict=True)
    }


with (
    ObjectServer(bucket(300), latency=0.020) as server,
    tempfile.TemporaryDirectory() as folder,
):
    images = hr.Store(server.url + "/images", options=server.store_options)
    bucket_store = obstore.store.from_url(server.url, **server.store_options)
    table = pandas.read_csv(io.BytesIO(obstore.get(bucket_store, "train.csv").bytes()))
    table["key"] = table["image_id"] + ".png"
    table["class"] = table["species"].map(SPECIES.index)
    dataset = hr.ObjectDataset(images, keys=table["key"], labels=table["class"])
    print(f"{dataset}, {server.requests()['LIST']} listings: ink {ink_by_class(dataset)}")

    # A pickled dataset keeps the listing, with sizes and ETags.
    file = pathlib.Path(folder, "images.pickle")
    file.write_bytes(pickle.dumps(hr.ObjectDataset(images, suffix=".png")))
    listed = pickle.loads(file.read_bytes())
    print(
        f"{len(listed)} objects, listed {server.requests()['LIST']} time for two starts"
    )
