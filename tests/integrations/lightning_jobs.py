"""Training jobs of Lightning's: what each rank trained on, and its last weight."""

from __future__ import annotations

import tests.integrations.torchvision_ops  # noqa: F401  # before Lightning, which imports torchvision

# isort: split
import gc
import itertools
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader

import headrace as hr
from tests.integrations.common import Numbers, TorchStream, plain, tenfold

SAMPLES = 40
EPOCHS = 3
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)


class Model(lightning.LightningModule):
    """A weight that depends on all batches and their order, and the batches."""

    def __init__(self, stop: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, Any]] = []
        self.validated: list[tuple[int, list[int]]] = []
        self.predicted: list[int] = []
        self._stop = stop

    def training_step(self, batch, _):
        if self._stop is not None:
            self._stop(self.global_step)
        self.seen.append((self.current_epoch, plain(batch)))
        numbers = torch.cat([part.float().flatten() for part in leaves(batch)])
        return (self.weight - numbers.mean() / 100) ** 2

    def validation_step(self, batch, _):
        if not self.trainer.sanity_checking:
            self.validated.append((self.current_epoch, plain(batch)))

    def predict_step(self, batch, _):
        self.predicted += plain(batch)
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def leaves(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif batch is not None:
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from leaves(part)


def raises_at(step: int, now: int) -> None:
    """Stops a job before a step by an exception."""
    if now == step:
        raise RuntimeError("stopped by the test")


def trainer_of(epochs: int = EPOCHS, **options: Any) -> lightning.Trainer:
    """A Trainer for the ranks that the launcher has started."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = {
        "devices": world_size,
        "num_nodes": 1,
        "strategy": "ddp" if world_size > 1 else "auto",
    }
    known = {
        "accelerator": "cpu",
        "max_epochs": epochs,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    }
    return lightning.Trainer(**{**known, **ranks, **QUIET, **options})


def train(
    loaders: Any,
    *,
    resume: Any = None,
    stop: Callable[[int], None] | None = None,
    saves: tuple[dict[str, Any], ...] = (),
    validation: Any = None,
    model: Model | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit a model; each of `saves` is for a `ModelCheckpoint`."""
    warnings.filterwarnings("ignore", module="lightning")
    model = Model(stop) if model is None else model
    if saves:
        callbacks = [ModelCheckpoint(save_top_k=-1, **save) for save in saves]
        options |= {"callbacks": callbacks, "enable_checkpointing": True}
    trainer = trainer_of(**options)
    trainer.fit(model, loaders, validation, ckpt_path=resume)
    return {
        "seen": model.seen,
        "weight": model.weight.item(),
        "validated": model.validated,
    }


def each_step(folder: Any) -> dict[str, Any]:
    """Save after each step."""
    return {"dirpath": folder, "every_n_train_steps": 1, "filename": "{step}"}


def lines(pattern: str, split: bool = False, **options: Any) -> Any:
    """A stream of four shards of ten numbers each; the ranks divide the samples with `split`, else the shards."""
    stream = hr.LinesDataset(pattern, **options)
    return (stream.split() if split else stream).map(int)


def map_style(batch_size: int = 4, **options: Any) -> hr.DataLoader[Any]:
    return hr.DataLoader(Numbers(SAMPLES), batch_size, transform=tenfold, **options)


def of_lines(pattern: str, batch_size: int = 4, **options: Any) -> hr.DataLoader[Any]:
    return hr.DataLoader(lines(pattern, **options), batch_size, transform=tenfold)


def both(pattern: str, mode: str) -> CombinedLoader:
    """A dataset and a shorter stream of unknown length, in one mode."""
    return CombinedLoader(
        {"map": KINDS["seeded"](""), "stream": of_lines(pattern, 12, shuffle=True)}, mode
    )


# By kind, a function that makes a loader; its argument is the pattern of shards.
ON_RANKS: dict[str, Callable[[str], Any]] = {
    "seeded": lambda _: map_style(shuffle=True, seed=5, concurrency=3),
    "unseeded": lambda _: map_style(shuffle=True),
    "shards": lambda pattern: of_lines(pattern, shuffle=True),
    "split by samples": lambda pattern: of_lines(pattern, shuffle=True, split=True),
}
KINDS: dict[str, Callable[[str], Any]] = {  # for one process
    "seeded": lambda _: map_style(8, shuffle=True, seed=5),
    "generator": lambda _: map_style(
        8, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "torch's stream": lambda _: hr.DataLoader(TorchStream(SAMPLES), 8, transform=tenfold),
    "unknown length": lambda pattern: hr.DataLoader(
        lines(pattern, shuffle=True).shuffle(8, seed=1), 8
    ),
    "max_size_cycle": lambda pattern: both(pattern, "max_size_cycle"),
    "max_size": lambda pattern: both(pattern, "max_size"),
    "min_size": lambda pattern: both(pattern, "min_size"),
}


def whole_and_resumed(
    folder: str, pattern: str, kinds: tuple[str, ...], steps: tuple[int, ...]
) -> dict[str, Any]:
    """By kind, a run that saves a checkpoint after each step, and runs that continue after some."""
    report = {}
    for kind in kinds:
        whole = train(ON_RANKS[kind](pattern), saves=(each_step(f"{folder}/{kind}"),))
        report[kind] = {"whole": whole, **resumed(folder, pattern, (kind,), steps)[kind]}
    return report


def resumed(
    folder: str, pattern: str, kinds: tuple[str, ...], steps: tuple[int, ...]
) -> dict[str, Any]:
    """By kind and step, runs that continue after the step; of one that fails the error."""
    report: dict[str, Any] = {kind: {} for kind in kinds}
    for kind, step in itertools.product(kinds, steps):
        try:
            report[kind][step] = train(
                ON_RANKS[kind](pattern), resume=f"{folder}/{kind}/step={step}.ckpt"
            )
        except (hr.StateError, RuntimeError) as error:
            # Lightning's own clean-up fails after one of its `iter()`
            report[kind][step] = str(
                error if isinstance(error, hr.StateError) else error.__context__
            )
    return report


def over_two(number):
    return number > 2


def evaluated(pattern: str) -> dict[str, Any]:
    """What a rank validates and predicts on, and the number of its batches of a stream."""
    model, counted = Model(), Model()
    trainer = trainer_of(epochs=2)
    trainer.fit(model, map_style(shuffle=True, seed=1), map_style())
    trainer.predict(model, map_style(concurrency=3))
    trainer_of(epochs=1).fit(
        counted, hr.DataLoader(lines(pattern, split=True).filter(over_two), 4)
    )
    return {
        "validated": model.validated,
        "predicted": model.predicted,
        "steps": len(counted.seen),
    }


class Weight(torch.nn.Module):
    """A weight that depends on all batches and their order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self.weight - numbers.float().mean() / 100) ** 2


def with_fabric(folder: str, pattern: str, resume: str | None = None) -> dict[str, Any]:
    """Three epochs by Fabric, with a checkpoint in the second ("middle") and after it ("end"); or the rest of them."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
    )
    fabric.launch()
    # A stream of shards that two ranks read is not continued by one.
    kinds = ("seeded",) if resume and world_size == 1 else ("seeded", "shards")
    made = {kind: ON_RANKS[kind](pattern) for kind in kinds}
    dataset = made["seeded"].dataset
    prepared = fabric.setup_dataloaders(*made.values())
    loaders = dict(zip(made, prepared if len(made) > 1 else [prepared], strict=True))
    model = Weight()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # Each rank reads shards of its own, and Fabric keeps one state: that of all ranks is saved.
    parts = {
        "seeded": loaders["seeded"],
        "shards": {},
        "model": model,
        "optimizer": optimizer,
    }
    seen: dict[str, list[list[list[int]]]] = {name: [] for name in loaders}
    if resume:
        fabric.load(f"{folder}/{resume}.ckpt", parts)
        if "shards" in made:
            made["shards"].load_state_dict(parts["shards"])
    for epoch in range({None: 0, "middle": 1, "end": 2}[resume], EPOCHS):
        for epochs in seen.values():
            epochs.append([])
        for number, batches in enumerate(zip(*loaders.values(), strict=True)):
            for name, batch in zip(loaders, batches, strict=True):
                seen[name][-1].append(batch.tolist())
                fabric.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
            if (epoch, number, resume) == (1, 1, None):
                fabric.save(
                    f"{folder}/middle.ckpt",
                    {**parts, "shards": hr.gather_state(made["shards"])},
                )
        if (epoch, resume) == (1, None):
            fabric.save(
                f"{folder}/end.ckpt", {**parts, "shards": hr.gather_state(made["shards"])}
            )
    sampler, weight = type(loaders["seeded"].sampler).__name__, model.module.weight.item()
    counted = fabric.setup_dataloaders(
        hr.DataLoader(lines(pattern, split=True).filter(over_two), 4)
    )
    steps = len(list(counted))
    del loaders, prepared, made, parts, batches, counted
    gc.collect()
    left = [
        each.name
        for each in threading.enumerate()
        if each.name != "headrace-background-loop"
    ]  # of the process
    return {
        "seen": seen,
        "most": dataset.most,
        "sampler": sampler,
        "weight": weight,
        "steps": steps,
        "left": left,
    }


def launch(folder: str, pattern: str) -> None:
    """As `launched`, in a program that Lightning's launcher starts again for the second rank: ``python -m``."""
    sys.modules["__main__"].__spec__ = ModuleSpec(
        "tests.integrations.lightning_jobs", None
    )
    sys.argv[:] = ["", folder, pattern]
    launched(folder, pattern)


def launched(folder: str, pattern: str) -> None:
    """A job of two ranks, each of which writes what it was trained on.

    Datasets and loaders are made before `fit()`, when Lightning has not yet said how many processes
    there are."""
    sampler = hr.BlockShuffleSampler(
        Numbers(SAMPLES), block_size=4, blocks_at_once=2, seed=1
    )
    loaders = {
        "lines, workers": hr.DataLoader(lines(pattern, shuffle=True), 4, num_workers=2),
        "blocks": map_style(sampler=sampler),
    }
    model = Model()
    trainer = trainer_of(2, strategy="ddp", devices=2)
    trainer.fit(model, CombinedLoader(loaders, "max_size"))
    assert trainer.train_dataloader["blocks"].sampler is sampler, (
        "the sampler was replaced"
    )
    Path(folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(model.seen))
    for loader in loaders.values():
        loader.close()


if __name__ == "__main__":
    launched(*sys.argv[1:])
