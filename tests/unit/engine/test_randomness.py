"""The same seeds give the same batches, whatever runs the transform, and leave the program's own draws alone."""

import asyncio
import random

import numpy as np
import pytest
import torch

import headrace as hr
from tests.datasets import Numbers


class Images(Numbers):
    async def aget(self, index):
        await asyncio.sleep(0.001 * (index % 5))  # latency: fetches finish out of order
        return np.full((8, 8, 3), index, dtype=np.uint8)


def draw_from_the_process(image):
    return image[0, 0, 0] + np.float64(
        random.random() + np.random.random() + torch.rand((), dtype=torch.float64).item()
    )


def batches(**options):
    options = {"shuffle": True, "transform": draw_from_the_process, **options}
    with hr.DataLoader(Images(24), 4, **options) as loader:
        return [batch.tolist() for _ in range(2) for batch in loader]


def test_albumentations_draws_another_crop_for_each_batch_and_the_same_wherever_it_runs():
    albumentations = pytest.importorskip("albumentations")
    augment = albumentations.Compose(
        [albumentations.RandomCrop(4, 4), albumentations.HorizontalFlip()]
    )

    def crop(image):
        rows, columns = np.mgrid[0:8, 0:8].astype(np.uint8)
        return augment(image=np.stack([rows, columns, image[..., 0]], axis=-1))["image"]

    drawn = batches(seed=5, transform=crop, num_workers=2)
    assert drawn == batches(seed=5, transform=crop, num_workers=0)
    corners = {(image[0][0][0], image[0][0][1]) for batch in drawn for image in batch}
    assert len(corners) > 8


def test_an_interrupted_transform_is_run_again_for_the_same_batch():
    interrupt = iter([True])

    def transform(image):
        drawn = draw_from_the_process(image)
        if image[0, 0, 0] == 6 and next(interrupt, False):
            raise KeyboardInterrupt
        return drawn

    with hr.DataLoader(Images(24), batch_size=4, seed=5, transform=transform) as loader:
        running, drawn = iter(loader), []
        drawn.append(next(running).tolist())
        with pytest.raises(KeyboardInterrupt):
            next(running)
        drawn.extend(batch.tolist() for batch in running)
    assert drawn == batches(seed=5, shuffle=False)[:6]
