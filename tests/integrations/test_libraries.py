"""Libraries whose loader is made of torch's: with headrace's in its place they give the same batches."""

import contextlib
import importlib.util
import random
import sys

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import DataLoader as TorchDataLoader

import headrace as hr

LIBRARIES = ("timm", "ultralytics", "torch_geometric", "monai")
for package in LIBRARIES:
    pytest.importorskip(
        package, reason=f"{package} is not installed: make test-integrations"
    )

IDENTICAL = ("identical batches", "identical batches with workers")
workers_or_none = pytest.mark.parametrize("workers", [0, 2])
_PLACES = (torch.utils.data, torch.utils.data.dataloader)


@contextlib.contextmanager
def with_loader(kind, *names):
    """The modules of these names, in this order, imported anew while torch's loader is `kind`, as after a patch."""
    before = {name: importlib.import_module(name) for name in names}
    try:
        for place in _PLACES:
            place.DataLoader = kind
        for name in names:
            spec = importlib.util.find_spec(name)
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        yield sys.modules[names[-1]]
    finally:
        sys.modules.update(before)
        for place in _PLACES:
            place.DataLoader = TorchDataLoader


def epochs(make, count=2, modules=(), **arguments):
    """The batches of `count` epochs for torch's loader and for headrace's, as nested lists; equal seeds for both."""
    results = []
    for kind in (TorchDataLoader, hr.DataLoader):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        with (
            with_loader(kind, *modules) if modules else contextlib.nullcontext() as module
        ):
            loader = make(module or kind, **arguments)
            results.append([[plain(batch) for batch in loader] for _ in range(count)])
            inner = getattr(loader, "loader", loader)  # timm's PrefetchLoader holds it
            assert isinstance(inner, kind)
            if kind is hr.DataLoader:
                assert inner.stats().batches >= sum(map(len, results[-1])), (
                    "torch's iterator was used"
                )
                hr.DataLoader.close(inner)
    return results


def plain(value):
    """A batch as lists and numbers, which can be compared."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return plain(value.to_dict()) if hasattr(value, "to_dict") else value


class Images(torch.utils.data.Dataset):
    """Images that are their index; timm sets `transform`."""

    transform = None

    def __len__(self):
        return 12

    def __getitem__(self, index):
        from PIL import Image

        pixels = np.random.default_rng(index).integers(
            0, 255, (24, 24, 3), dtype=np.uint8
        )
        image = Image.fromarray(pixels)
        return (image if self.transform is None else self.transform(image)), index


@workers_or_none
@pytest.mark.parametrize("keeps_iterator", [False, True], ids=["plain", "multi-epochs"])
@pytest.mark.proves("timm", *IDENTICAL)
def test_timm(workers, keeps_iterator):
    def make(module):
        return module.create_loader(
            Images(),
            input_size=(3, 16, 16),
            batch_size=4,
            is_training=True,
            num_workers=workers,
            persistent_workers=False,
            use_multi_epochs_loader=keeps_iterator,
            device=torch.device("cpu"),
        )

    torchs, ours = epochs(make, modules=["timm.data.loader"])
    assert torchs == ours
    assert [len(epoch) for epoch in ours] == [3, 3]


class Samples(torch.utils.data.Dataset):
    """Samples as ultralytics' datasets make them: a dict, with random augmentation, and a collate function."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {
            "img": torch.full((3, 4, 4), index),
            "cls": torch.tensor([random.random()]),
            "index": index,
        }

    @staticmethod
    def collate_fn(samples):
        return {
            "img": torch.stack([sample["img"] for sample in samples]),
            "cls": torch.cat([sample["cls"] for sample in samples]),
            "index": [sample["index"] for sample in samples],
        }


@workers_or_none
@pytest.mark.proves("ultralytics", *IDENTICAL)
def test_ultralytics(workers):
    def make(module):
        return module.build_dataloader(Samples(), batch=4, workers=workers, shuffle=True)

    torchs, ours = epochs(make, count=3, modules=["ultralytics.data.build"])
    assert torchs == ours
    assert [
        sorted(index for batch in epoch for index in batch["index"]) for epoch in ours
    ] == [[*range(10)]] * 3


@workers_or_none
@pytest.mark.proves("PyTorch Geometric", *IDENTICAL)
def test_pytorch_geometric(workers):
    from torch_geometric.data import Data

    edges = [torch.tensor([[0], [number]]) for number in range(10)]
    graphs = [
        Data(x=torch.full((number + 1, 2), float(number)), edge_index=edges[number])
        for number in range(10)
    ]

    def make(module):
        return module.DataLoader(
            graphs, batch_size=3, shuffle=True, num_workers=workers, follow_batch=["x"]
        )

    torchs, ours = epochs(make, modules=["torch_geometric.loader.dataloader"])
    assert torchs == ours
    assert all("x_batch" in batch for batch in ours[0])


@workers_or_none
@pytest.mark.proves("MONAI", *IDENTICAL)
def test_monai(workers):
    from monai.data import Dataset
    from monai.transforms import (
        Compose,
        RandFlipd,
        RandGaussianNoised,
        ScaleIntensityd,
        ToTensord,
    )

    items = [
        {"image": np.arange(16.0, dtype=np.float32).reshape(1, 4, 4) + number}
        for number in range(8)
    ]
    keys = ["image"]
    steps = [
        ScaleIntensityd(keys),
        RandFlipd(keys, prob=0.5),
        RandGaussianNoised(keys, prob=0.5),
        ToTensord(keys),
    ]

    def make(module):
        return module.DataLoader(
            Dataset(items, Compose(steps)),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
        )

    torchs, ours = epochs(make, modules=["monai.data.dataloader"])
    assert torchs == ours
    assert ours[0] != ours[1]
