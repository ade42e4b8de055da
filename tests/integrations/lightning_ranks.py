"""A training job of Lightning's, which starts its second process itself; run by `test_lightning_ranks.py`.

Each rank writes the samples that it was given to a file in the folder FOLDER: for each epoch, of each loader. Datasets
and loaders are made before `fit()`, when Lightning has not yet said how many processes there are.
"""

import tests.integrations.torchvision_ops  # noqa: F401, I001  # before Lightning, which imports torchvision
import json
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.utilities import CombinedLoader

import headrace as hr
from tests.integrations.lightning_jobs import lines

EPOCHS = 2
FOLDER = Path(os.environ["FOLDER"])


class Numbers(hr.AsyncDataset):
    """Numbers by index."""

    def __len__(self):
        return 40

    async def aget(self, index):
        return index


class Recorder(lightning.LightningModule):
    """A model that records the samples of each step."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def on_train_epoch_start(self):
        self.seen.append({name: [] for name in self.trainer.train_dataloader})

    def training_step(self, batch, _):
        for name, samples in batch.items():
            self.seen[-1][name] += samples.tolist()
        return self.layer(batch["blocks, 0 workers"][:, None].float()).mean()

    def on_fit_end(self):
        FOLDER.joinpath(f"rank{self.global_rank}.json").write_text(json.dumps(self.seen))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def main():
    loaders = {}
    for workers in (0, 2):
        stream = lines(str(FOLDER / "lines"), shuffle=True, counts=[10] * 4)
        sampler = hr.BlockShuffleSampler(Numbers(), block_size=4, blocks_at_once=2, seed=1)
        loaders[f"lines, {workers} workers"] = hr.DataLoader(stream, 4, num_workers=workers)
        loaders[f"blocks, {workers} workers"] = hr.DataLoader(Numbers(), 4, sampler=sampler, num_workers=workers)
    parts = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=EPOCHS, **dict.fromkeys(parts, False)
    )
    trainer.fit(Recorder(), CombinedLoader(loaders, "max_size"))
    assert trainer.train_dataloader["blocks, 2 workers"].sampler is sampler, "the sampler was replaced"
    for loader in loaders.values():
        loader.close()


if __name__ == "__main__":
    main()
