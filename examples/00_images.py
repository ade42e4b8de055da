"""
Images in a bucket, to a trained model
======================================

JPEGs of an S3 bucket are streamed, decoded and augmented, and a small network learns from them.

The bucket is on a local server here, with 20 ms to the first byte of each object. For a real one
leave the server out::

    photos = hr.ObjectDataset("s3://bucket/train", suffix=".jpg", labels="folder")
"""

# %%
# The bucket
# ----------
# 600 drawings in a folder for each class: ``train/disc/0000.jpg``, ``train/square/0001.jpg``, …

import io
import random

import matplotlib.pyplot as plt
import torch
from PIL import Image, ImageDraw
from torch import nn

import headrace as hr
from object_server import ObjectServer


def drawing(shape, chance):
    picture = Image.new(
        "RGB",
        (chance.randint(80, 200), chance.randint(80, 200)),
        f"hsl({chance.randrange(360)}, 30%, 80%)",
    )
    middle, radius = (
        (picture.width / 2, picture.height / 2),
        min(picture.size) * chance.uniform(0.2, 0.45),
    )
    paint, ink = ImageDraw.Draw(picture), f"hsl({chance.randrange(360)}, 80%, 40%)"
    if shape == "disc":
        paint.circle(middle, radius, fill=ink)
    else:
        paint.regular_polygon((middle, radius), 4 if shape == "square" else 3, fill=ink)
    file = io.BytesIO()
    picture.save(file, "JPEG")
    return file.getvalue()


chance = random.Random(0)
shapes = [chance.choice(["disc", "square", "triangle"]) for _ in range(600)]
bucket = {
    f"train/{shape}/{number:04d}.jpg": drawing(shape, chance)
    for number, shape in enumerate(shapes)
}
server = ObjectServer(bucket, latency=0.020).start()

# %%
# The loader
# ----------
# `labels="folder"` makes the name of an object's folder its class. The transform is CPU work. It
# runs inside `next()`, or in worker processes with `num_workers=`. The random numbers follow from
# the seed, the epoch and the sample, whatever the number of workers.

photos = hr.ObjectDataset(
    hr.Store(server.url + "/train", options=server.store_options),
    suffix=".jpg",
    labels="folder",
)
decode = hr.decode.image(size=64, dtype=torch.float32)


@hr.randomized
def augment(sample, rng):
    image, label = decode(sample)
    return image.flip(-1) if rng.random() < 0.5 else image, label


loader = hr.DataLoader(photos, 32, shuffle=True, seed=0, transform=augment)
print(photos, photos.classes)

# %%
# A batch
# -------

images, labels = next(iter(loader))
figure, axes = plt.subplots(3, 6, figsize=(9, 5), layout="constrained")
for panel, image, label in zip(axes.flat, images, labels, strict=False):
    panel.imshow(image.permute(1, 2, 0))
    panel.set_title(photos.classes[label], fontsize=10)
    panel.set_axis_off()
plt.show()

# %%
# Training
# --------

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 5, 2),
    nn.ReLU(),
    nn.Conv2d(32, 64, 5, 2),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(2),
    nn.Flatten(),
    nn.Linear(256, len(photos.classes)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
for epoch in range(3):
    loader.set_epoch(epoch)
    right = 0
    for images, labels in loader:
        scores = model(images)
        loss = nn.functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (scores.argmax(1) == labels).sum().item()
    print(f"epoch {epoch}: loss {loss:.2f}, accuracy {right / len(photos):.0%}")

loader.close()
server.close()
