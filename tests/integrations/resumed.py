"""A program: Hugging Face's Trainer is stopped in mid-epoch and resumed; its headrace loader is not prepared."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import headrace as hr

SAMPLES = 32


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return SAMPLES

    async def aget(self, index):
        return index


def tenfold(sample):
    return sample * 10


def collate(samples):
    return {"x": torch.tensor(samples)}


class Recorder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, x, **others):
        self.seen += x.tolist()
        return {"loss": (self.weight * x.float()).mean()}


class StreamingTrainer(Trainer):
    def get_train_dataloader(self):
        return hr.DataLoader(
            Numbers(), batch_size=4, shuffle=True, seed=5, transform=tenfold, collate_fn=collate, num_workers=0
        )


def train(folder, *, steps=-1, resume=None):
    options = {"num_train_epochs": 2, "max_steps": steps, "save_steps": 3, "per_device_train_batch_size": 4}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    model = Recorder()
    arguments = TrainingArguments(folder, **options, **quiet)
    StreamingTrainer(model, arguments, train_dataset=Numbers()).train(resume_from_checkpoint=resume)
    return model.seen


def main(folder):
    warnings.simplefilter("ignore")
    whole = train(os.path.join(folder, "whole"))
    begun = train(os.path.join(folder, "resumed"), steps=3)
    rest = train(os.path.join(folder, "resumed"), resume=os.path.join(folder, "resumed", "checkpoint-3"))
    Path(folder, "report.json").write_text(json.dumps({"whole": whole, "begun": begun, "rest": rest}))


if __name__ == "__main__":
    main(sys.argv[1])
