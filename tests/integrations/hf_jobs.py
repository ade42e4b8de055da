"""Jobs of transformers' Trainer, run by each rank."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import warnings
from pathlib import Path

import anyio
import datasets
import numpy as np
import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

import headrace as hr
from headrace.integrations.transformers import Trainer

SAMPLES = 44  # 11 batches of 4: the last step of an epoch with 2 in a step has one batch


class Numbers(hr.AsyncDataset):
    """Numbers by index; knows how many were fetched at once."""

    def __init__(self, count=SAMPLES):
        self.count = count
        self.in_flight = self.most = 0

    def __len__(self):
        return self.count

    async def aget(self, index):
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await anyio.lowlevel.checkpoint()
        self.in_flight -= 1
        return sample_of(index) | {"unused": "by the model"}


class Stream(hr.AsyncIterableDataset):
    """Numbers, of unknown length, not divided among ranks."""

    def __init__(self, count=SAMPLES):
        self.count = count

    async def __aiter__(self):
        for number in range(self.count):
            yield sample_of(number)


def sample_of(number):
    return {"x": number, "labels": number}


def tenfold(sample):
    return {**sample, "x": sample["x"] * 10}


class Recorder(torch.nn.Module):
    """A model that records its samples by epoch, and whose noise depends on torch's random numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0))
        self.epochs = []

    def forward(self, x, labels=None):
        if self.training:
            self.epochs[-1] += x.tolist()
        noise = 1 + 0.1 * torch.rand(()) if self.training else 1
        loss = noise * ((self.weight[x // 10 % 4] - x / 100) ** 2).mean()
        return {"loss": loss, "logits": x.float()[:, None]}


class Follower(TrainerCallback):
    """Follows the epochs; after the step `ends_after` it raises, or kills the process."""

    def __init__(self, model, ends_after, killed):
        self.model = model
        self.ends_after, self.killed = ends_after, killed
        self.progress = []

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.model.epochs.append([])

    def on_step_begin(self, args, state, control, **kwargs):
        if self.ends_after == state.global_step:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise InterruptedError

    def on_step_end(self, args, state, control, **kwargs):
        self.progress.append((state.global_step, round(state.epoch, 9)))


class Report(dict):
    """What a job has done; items are attributes too."""

    __getattr__ = dict.__getitem__

    @property
    def samples(self):
        return [number for epoch in self.epochs for number in epoch]


USUAL = {
    **{"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True},
    "ddp_backend": "gloo" if "WORLD_SIZE" in os.environ else None,
    **{"num_train_epochs": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    **{"learning_rate": 0.01, "data_seed": 7, "save_strategy": "no", "per_device_eval_batch_size": 4},
}
SAVING = {"save_strategy": "steps", "save_steps": 2}


def trainer_of(folder, dataset=None, *, kind=Trainer, ends_after=None, killed=False, of_trainer=None, **arguments):
    torch.manual_seed(0)
    model = Recorder()
    follower = Follower(model, ends_after, killed)
    args = TrainingArguments(str(folder), **{**USUAL, **arguments})
    options = {"loader_options": {"transform": tenfold}} if issubclass(kind, Trainer) else {}
    options |= {"train_dataset": Numbers() if dataset is None else dataset, "callbacks": [follower]}
    return kind(model, args, **options | (of_trainer or {})), follower


def train(folder, dataset=None, *, resume=None, **arguments):
    """Train, and report on it. `resume` is the step of the checkpoint in `folder`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, follower = trainer_of(folder, dataset, **arguments)
        with contextlib.suppress(InterruptedError):
            trainer.train(resume_from_checkpoint=resume if resume is None else checkpoint(folder, resume))
    return Report(
        epochs=follower.model.epochs,
        weights=follower.model.weight.tolist(),
        progress=follower.progress,
        most=getattr(trainer.train_dataset, "most", None),
        left=[thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        + multiprocessing.active_children(),
        warnings=[str(each.message) for each in caught if each.category in (UserWarning, RuntimeWarning)],
        metrics=[entry for entry in trainer.state.log_history if "eval_loss" in entry],
    )


def checkpoint(folder, step):
    return str(Path(folder, f"checkpoint-{step}"))


def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return None


def counted(prediction):
    assert (prediction.predictions[:, 0] == 10 * prediction.label_ids).all()
    return {"count": len(prediction.predictions), "sum": int(np.sum(prediction.predictions))}


class TorchNumbers(torch.utils.data.Dataset):
    """Numbers for torch's loader, transformed."""

    def __init__(self, count=SAMPLES):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:  # the Trainer iterates over it for the lengths
            raise IndexError(index)
        return tenfold(sample_of(index))


# One process.


def interrupted(folder):
    """A whole run, one that ends within its second epoch, and one continued from each of its checkpoints."""
    whole = train(Path(folder, "whole"))
    begun = train(folder, **SAVING, ends_after=9)
    return whole, begun, {step: train(folder, resume=step) for step in (2, 6, 8)}


def continued_otherwise(folder):
    """Continued with other batches, without a state, or from the beginning of the epoch."""
    train(folder, **SAVING, ends_after=9)
    other = train(folder, resume=8, per_device_train_batch_size=7, gradient_accumulation_steps=1)
    most = train(folder, resume=8, per_device_train_batch_size=7, gradient_accumulation_steps=1, max_steps=14)
    thirds = train(folder, resume=8, gradient_accumulation_steps=3)
    for step in (6, 8):
        os.remove(Path(checkpoint(folder, step), "headrace_loader_rank_0.pth"))
    missing = error_of(train, folder, resume=8)
    anew = train(folder, resume=8, ignore_data_skip=True)
    ended = train(folder, resume=6)
    unfit = error_of(train, folder, Numbers(SAMPLES + 4), resume=2)
    only_model = Path(folder, "model")
    train(only_model, **SAVING, save_only_model=True, ends_after=3)
    return other, most, thirds, missing, anew, ended, unfit, os.listdir(checkpoint(only_model, 2))


def of_a_stream(folder):
    """More epochs of a stream of unknown length than its state has; saved in mid-epoch and at the end of one."""
    steps = {"max_steps": 15, "num_train_epochs": 1, "gradient_accumulation_steps": 1}
    stream = functools.partial(lambda: Stream(16).shuffle(8, seed=3))
    whole = train(Path(folder, "whole"), stream(), **steps)
    train(folder, stream(), **SAVING, **steps, ends_after=9)
    continued = {step: train(folder, stream(), resume=step, **steps) for step in (6, 8)}
    return whole, continued, error_of(train, folder, stream(), resume=6, **steps | {"gradient_accumulation_steps": 4})


def with_samplers(folder):
    """Orders of other samplers, continued."""
    outcomes = {}
    for name, kind, options in (
        ("by length", Trainer, {"train_sampling_strategy": "group_by_length"}),
        ("rebalanced", Trainer, {"train_sampling_strategy": "batch_rebalance"}),
        ("own", OwnSampler, {}),
    ):
        path = Path(folder, name)
        options = {**options, "num_train_epochs": 2}
        whole = train(path, Texts(), kind=kind, **options, **SAVING)
        outcomes[name] = whole, train(path, Texts(), kind=kind, **options, resume=4)
    swapped = error_of(train, Path(folder, "own"), Texts(), resume=4)
    few = train(Path(folder, "few"), Texts(), kind=FewSamples, num_train_epochs=1)
    return outcomes, swapped, few


class Texts(TorchNumbers):
    """Numbers as texts of different lengths."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "x": index, "input_ids": [0] * (index % 5 + 1)}


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False)


class FewSamples(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(range(20))


class OwnLoader(Trainer):
    """Makes its loader itself."""

    def get_train_dataloader(self):
        return hr.DataLoader(self.train_dataset, 4, shuffle=True, seed=5, transform=tenfold, collate_fn=collate)


class StockWithOwnLoader(transformers.Trainer):
    get_train_dataloader = OwnLoader.get_train_dataloader


def collate(samples):
    return {"x": torch.tensor([sample["x"] for sample in samples])}


class Unreadable(torch.utils.data.SequentialSampler):
    """A sampler with a state that torch.load refuses."""

    def state_dict(self):
        return {"position": self}

    def load_state_dict(self, state):
        raise NotImplementedError


class UnreadableState(Trainer):
    def get_train_dataloader(self):
        sampler = Unreadable(range(SAMPLES))
        return hr.DataLoader(self.train_dataset, 4, sampler=sampler, transform=tenfold, collate_fn=collate)


def unreadable(folder):
    return error_of(train, folder, kind=UnreadableState, **SAVING), os.listdir(checkpoint(folder, 2))


def of_own_loaders(folder):
    whole = train(Path(folder, "whole"), kind=OwnLoader)
    outcomes = [whole]
    for kind in (OwnLoader, StockWithOwnLoader):
        path = Path(folder, kind.__name__)
        train(path, kind=kind, **SAVING, ends_after=9)
        outcomes.append(train(path, kind=kind, resume=8))
    return outcomes


def with_workers(folder):
    """Workers, evaluation in training, the best model at its end, one checkpoint kept."""
    options = {
        **{"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"},
        **{"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True},
        **{"save_total_limit": 1, "save_strategy": "steps", "save_steps": 4, "num_train_epochs": 2},
    }
    of_trainer = {"eval_dataset": Numbers(10), "compute_metrics": counted}
    whole = train(Path(folder, "whole"), of_trainer=of_trainer, **options)
    train(folder, of_trainer=of_trainer, **options, ends_after=9)
    return whole, os.listdir(folder), train(folder, of_trainer=of_trainer, **options, resume=8)


def refused(folder):
    """Training arguments that cannot be honoured."""
    refused = {"dispatch_batches": True, "even_batches": False}
    errors = {name: error_of(trainer_of, folder, accelerator_config={name: value}) for name, value in refused.items()}
    method = transformers.Trainer._run_epoch
    del transformers.Trainer._run_epoch  # as a version without it
    errors["_run_epoch"] = error_of(trainer_of, folder)
    transformers.Trainer._run_epoch = method
    errors["batch_size"] = error_of(train, folder, of_trainer={"loader_options": {"batch_size": 3}})
    return errors


# Several ranks.


def evaluated(folder):
    """Metrics and predictions of this Trainer, and of the one that it derives from."""
    outcomes = {}
    for name, kind, dataset in (
        ("headrace", Trainer, Numbers(21)),
        ("stream", Trainer, Stream(21)),
        ("torch's stream", Trainer, TorchStream(21)),
        ("stock", transformers.Trainer, TorchNumbers(21)),
    ):
        trainer, _ = trainer_of(folder, kind=kind, of_trainer={"compute_metrics": counted, "eval_dataset": dataset})
        metrics = trainer.evaluate()
        predictions = trainer.predict(dataset).predictions[:, 0].tolist()
        outcomes[name] = {key: metrics[f"eval_{key}"] for key in ("loss", "count", "sum")}, predictions
    outcomes["left"] = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return outcomes


class TorchStream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            yield sample_of(number)


def ranks_whole(folder):
    return train(Path(folder, "whole")), error_of(train, folder, kind=OwnLoader)


def ranks_killed(folder):
    train(folder, **SAVING, ends_after=5, killed=True)


def one_begun(folder):
    """One rank begins in a folder in which several have left the files of another run."""
    os.makedirs(checkpoint(folder, 4))
    for rank in range(3):
        Path(checkpoint(folder, 4), f"headrace_loader_rank_{rank}.pth").write_bytes(b"")
    train(folder, **SAVING, ends_after=5)


def ranks_continued(folder):
    """Continued from where two ranks were killed, and from where one was."""
    return train(folder, resume=4)


STREAMS = {
    "split": lambda: Stream().split(),
    "torch's": lambda: TorchStream(SAMPLES),
    "Hugging Face's": lambda: hf_stream(SAMPLES),
}


def ranks_of_streams(folder):
    outcomes = {}
    for name, stream in STREAMS.items():
        options = {"max_steps": 8, "num_train_epochs": 1}
        path = Path(folder, name)
        outcomes[name] = train(path, stream(), **options, **SAVING), train(path, stream(), **options, resume=4)
    return outcomes


def hf_stream(count):
    numbers = list(range(count))
    rows = datasets.Dataset.from_dict({"x": [10 * number for number in numbers], "labels": numbers})
    return rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=1).map(as_tenth)


def as_tenth(sample):
    return {**sample, "x": sample["x"] // 10}
