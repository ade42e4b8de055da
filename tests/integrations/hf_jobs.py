"""Jobs of transformers' Trainer, run by each rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

import headrace as hr
from headrace.integrations.transformers import Trainer
from tests.integrations import common

SAMPLES = 44  # 11 batches of 4: the last step of an epoch with 2 in a step has one batch
ALL = list(range(0, 10 * SAMPLES, 10))


class Numbers(common.Numbers):
    """Samples for the model."""

    def __init__(self, count=SAMPLES):
        super().__init__(count)

    async def aget(self, index):
        return sample_of(await super().aget(index)) | {"unused": "by the model"}


def stream(count=SAMPLES):
    return common.Stream(count).map(sample_of)


class TorchNumbers(common.TorchNumbers):
    """Samples for torch's loader, transformed."""

    def __getitem__(self, index):
        return tenfold(sample_of(super().__getitem__(index)))


class TorchStream(common.TorchStream):
    def __iter__(self):
        return map(sample_of, super().__iter__())


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
    **{
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    },
    **{
        "learning_rate": 0.01,
        "data_seed": 7,
        "save_strategy": "no",
        "per_device_eval_batch_size": 4,
    },
}
SAVING = {"save_strategy": "steps", "save_steps": 2}


def trainer_of(
    folder,
    dataset=None,
    *,
    kind=Trainer,
    ends_after=None,
    killed=False,
    of_trainer=None,
    **arguments,
):
    torch.manual_seed(0)
    model = Recorder()
    follower = Follower(model, ends_after, killed)
    args = TrainingArguments(str(folder), **{**USUAL, **arguments})
    options = (
        {"loader_options": {"transform": tenfold}} if issubclass(kind, Trainer) else {}
    )
    options |= {
        "train_dataset": Numbers() if dataset is None else dataset,
        "callbacks": [follower],
    }
    return kind(model, args, **options | (of_trainer or {})), follower


def train(folder, dataset=None, *, resume=None, **arguments):
    """Train, and report on it. `resume` is the step of the checkpoint in `folder`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, follower = trainer_of(folder, dataset, **arguments)
        with contextlib.suppress(InterruptedError):
            trainer.train(
                resume_from_checkpoint=resume
                if resume is None
                else checkpoint(folder, resume)
            )
    return Report(
        epochs=follower.model.epochs,
        weights=follower.model.weight.tolist(),
        progress=follower.progress,
        most=getattr(trainer.train_dataset, "most", None),
        left=[
            thread.name
            for thread in threading.enumerate()
            if thread is not threading.main_thread()
        ]
        + multiprocessing.active_children(),
        warnings=[
            str(each.message)
            for each in caught
            if each.category in (UserWarning, RuntimeWarning)
        ],
        metrics=[entry for entry in trainer.state.log_history if "eval_loss" in entry],
    )


def checkpoint(folder, step):
    return str(Path(folder, f"checkpoint-{step}"))


def check_continued(whole, continued, step):
    assert (
        continued.samples == whole.samples[len(whole.samples) - len(continued.samples) :]
    )
    assert (continued.weights, continued.progress) == (
        whole.weights,
        whole.progress[step:],
    )


def counted(prediction):
    assert (prediction.predictions[:, 0] == 10 * prediction.label_ids).all()
    return {
        "count": len(prediction.predictions),
        "sum": int(np.sum(prediction.predictions)),
    }


class Texts(TorchNumbers):
    """Numbers as texts of different lengths."""

    def __init__(self):
        super().__init__(SAMPLES)

    def __getitem__(self, index):
        return {
            **super().__getitem__(index),
            "x": index,
            "input_ids": [0] * (index % 5 + 1),
        }


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.WeightedRandomSampler(
            [1.0] * SAMPLES, SAMPLES, replacement=False
        )


class FewSamples(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(range(20))


class OwnLoader(Trainer):
    """Makes its loader itself."""

    def get_train_dataloader(self):
        return hr.DataLoader(
            self.train_dataset,
            4,
            shuffle=True,
            seed=5,
            transform=tenfold,
            collate_fn=collate,
        )


class StockWithOwnLoader(transformers.Trainer):
    get_train_dataloader = OwnLoader.get_train_dataloader


def collate(samples):
    return {"x": torch.tensor([sample["x"] for sample in samples])}


class Unreadable(TorchNumbers):
    """Has a state that torch.load refuses."""

    def state_dict(self):
        return {"position": self}

    def load_state_dict(self, state):
        raise NotImplementedError


# One process.


def interrupted(folder):
    """A whole run, one that ends within its second epoch, and one continued from each of its checkpoints."""
    whole = train(Path(folder, "whole"))
    begun = train(folder, **SAVING, ends_after=9)
    return whole, begun, {step: train(folder, resume=step) for step in (2, 6, 8)}


def continued_otherwise(folder):
    """Continued with other batches, without a state, or from the beginning of the epoch."""
    whole = train(Path(folder, "whole"))
    train(folder, **SAVING, ends_after=9)
    for batch_size, accumulation, steps in (
        (7, 1, 4 + 7),
        (4, 3, 3 + 4),
    ):  # 7 batches of 4 are left, and then 11
        options = {
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": accumulation,
        }
        other = train(folder, resume=8, **options)
        assert other.samples == whole.samples[44 + 16 :]
        assert [len(other.progress), other.progress[-1][1]] == [steps, 3.0]
        assert batch_size == 4 or "4 of 7 batches are left" in str(other.warnings)
    for step in (6, 8):
        os.remove(Path(checkpoint(folder, step), "headrace_loader_rank_0.pth"))
    with pytest.raises(hr.StateError, match="has no state of the loader") as caught:
        train(folder, resume=8)
    assert "ignore_data_skip=True" in "".join(caught.value.__notes__)
    assert train(folder, resume=8, ignore_data_skip=True).samples[:44] == whole.epochs[1]
    assert train(folder, resume=6).samples == whole.samples[44:]
    with pytest.raises(hr.StateError, match=r"len\(dataset\) was 44, and is 48"):
        train(folder, Numbers(SAMPLES + 4), resume=2)
    only_model = Path(folder, "model")
    train(only_model, **SAVING, save_only_model=True, ends_after=3)
    assert "headrace_loader_rank_0.pth" not in os.listdir(checkpoint(only_model, 2))


def of_a_stream(folder):
    """More epochs of a stream of unknown length than its state has; saved in mid-epoch and at the end of one."""
    steps = {"max_steps": 15, "num_train_epochs": 1, "gradient_accumulation_steps": 1}

    def shuffled():
        return stream(16).shuffle(8, seed=3)

    whole = train(Path(folder, "whole"), shuffled(), **steps)
    assert len({tuple(epoch) for epoch in whole.epochs[:3]}) == 3
    train(folder, shuffled(), **SAVING, **steps, ends_after=9)
    for step in (6, 8):
        continued = train(folder, shuffled(), resume=step, **steps)
        assert len(continued.samples) == len(whole.samples) - 4 * step
        check_continued(whole, continued, step)
    with pytest.raises(hr.StateError, match="gradient_accumulation_steps=4"):
        train(folder, shuffled(), resume=6, **steps | {"gradient_accumulation_steps": 4})
    for dataset in (stream(21), TorchStream(21)):
        of_trainer = {"compute_metrics": counted, "eval_dataset": dataset}
        trainer, _ = trainer_of(folder, of_trainer=of_trainer)
        assert trainer.evaluate()["eval_count"] == 21


def with_samplers(folder):
    """Orders of other samplers, continued."""
    for name, kind, options in (
        ("by length", Trainer, {"train_sampling_strategy": "group_by_length"}),
        ("rebalanced", Trainer, {"train_sampling_strategy": "batch_rebalance"}),
        ("own", OwnSampler, {}),
    ):
        path = Path(folder, name)
        options = {**options, "num_train_epochs": 2}
        whole = train(path, Texts(), kind=kind, **options, **SAVING)
        assert [sorted(epoch) for epoch in whole.epochs] == [ALL] * 2
        check_continued(whole, train(path, Texts(), kind=kind, **options, resume=4), 4)
        if name == "by length":
            lengths = [number // 10 % 5 for number in whole.epochs[0]]
            steps = [
                lengths[start : start + 8] for start in range(8, 40, 8)
            ]  # the longest sample is in the first
            assert steps == [sorted(step, reverse=True) for step in steps]
    with pytest.raises(hr.StateError, match="WeightedRandomSampler"):
        train(Path(folder, "own"), Texts(), resume=4)
    few = train(Path(folder, "few"), Texts(), kind=FewSamples, num_train_epochs=1)
    assert sorted(few.samples) == ALL[:20]


def of_own_loaders(folder):
    """A loader of a subclass is saved and continued; transformers' own Trainer rebuilds it for the rest of an epoch."""
    whole = train(Path(folder, "whole"), kind=OwnLoader)
    for kind in (OwnLoader, StockWithOwnLoader):
        path = Path(folder, kind.__name__)
        train(path, kind=kind, **SAVING, ends_after=9)
        continued = train(path, kind=kind, resume=8)
        if kind is OwnLoader:
            check_continued(whole, continued, 8)
            continue
        assert sorted(continued.epochs[0]) == sorted(whole.samples[16:44])
        assert continued.epochs[1] == whole.epochs[2]
        assert "engine does not run" in str(continued.warnings)


def with_workers(folder):
    """Workers, evaluation in training, the best model at its end, one checkpoint kept."""
    options = {
        **{"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"},
        **{"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True},
        **{
            "save_total_limit": 1,
            "save_strategy": "steps",
            "save_steps": 4,
            "num_train_epochs": 2,
        },
    }
    of_trainer = {"eval_dataset": Numbers(10), "compute_metrics": counted}
    whole = train(Path(folder, "whole"), of_trainer=of_trainer, **options)
    train(folder, of_trainer=of_trainer, **options, ends_after=9)
    kept = os.listdir(folder)
    assert ("checkpoint-4" in kept, "checkpoint-8" in kept) == (False, True)
    continued = train(folder, of_trainer=of_trainer, **options, resume=8)
    check_continued(whole, continued, 8)
    assert [entry["eval_count"] for entry in whole.metrics] == [10] * 3
    assert continued.left == whole.left == []


def refused(folder):
    """What cannot be honoured."""
    with pytest.raises(ValueError, match="even_batches"):
        train(folder, accelerator_config={"even_batches": False})
    with pytest.raises(TypeError, match="batch_size"):
        train(folder, of_trainer={"loader_options": {"batch_size": 3}})
    with pytest.raises(hr.StateError, match="cannot be saved"):
        train(folder, Unreadable(SAMPLES), **SAVING)
    assert not any(
        "headrace_loader" in file for file in os.listdir(checkpoint(folder, 2))
    )


def alone(folder):
    """The jobs of one process, since starting it takes longer than they do; returns those of `interrupted`."""
    report = interrupted(folder)
    for job in (
        with_workers,
        continued_otherwise,
        of_a_stream,
        with_samplers,
        of_own_loaders,
        refused,
    ):
        job(Path(folder, job.__name__))
    return report


# Several ranks.


def evaluated(folder):
    """Metrics and predictions of this Trainer and of the one that it derives from: each sample once, in order."""
    losses = {}
    for name, kind, dataset in (
        # 21 samples: not divisible by batches or ranks.
        ("headrace", Trainer, Numbers(21)),
        ("stock", transformers.Trainer, TorchNumbers(21)),
    ):
        trainer, _ = trainer_of(
            folder,
            kind=kind,
            of_trainer={"compute_metrics": counted, "eval_dataset": dataset},
        )
        metrics = trainer.evaluate()
        assert (metrics["eval_count"], metrics["eval_sum"]) == (21, 10 * sum(range(21)))
        assert trainer.predict(dataset).predictions[:, 0].tolist() == [
            10 * number for number in range(21)
        ]
        losses[name] = metrics["eval_loss"]
    assert losses["headrace"] == losses["stock"]
    for dataset in (stream(21), TorchStream(21)):
        trainer, _ = trainer_of(folder, of_trainer={"eval_dataset": dataset})
        with pytest.raises(
            ValueError, match=r"2 ranks cannot evaluate .* or evaluate in a job of"
        ):
            trainer.evaluate()
    assert threading.enumerate() == [threading.main_thread()]


def on_ranks(folder):
    """Evaluation, a loader that does not divide, a whole run, and by kind of stream two runs, one of them continued."""
    evaluated(folder)
    with pytest.raises(ValueError, match="ElasticSampler"):
        train(folder, kind=OwnLoader)
    report = {"whole": train(Path(folder, "whole"))}
    for name, make in STREAMS.items():
        options = {"max_steps": 8, "num_train_epochs": 1}
        path = Path(folder, name)
        report[name] = train(path, make(), **options, **SAVING)
        check_continued(report[name], train(path, make(), **options, resume=4), 4)
    return report


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
    "split": lambda: stream().split(),
    "torch's": lambda: TorchStream(SAMPLES),
    "Hugging Face's": lambda: hf_stream(SAMPLES),
}


def hf_stream(count):
    numbers = list(range(count))
    rows = datasets.Dataset.from_dict(
        {"x": [10 * number for number in numbers], "labels": numbers}
    )
    return (
        rows.to_iterable_dataset(num_shards=4)
        .shuffle(seed=3, buffer_size=1)
        .map(as_tenth)
    )


def as_tenth(sample):
    return {**sample, "x": sample["x"] // 10}
