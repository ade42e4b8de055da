"""Programs for each rank, with loaders that headrace.integrations.accelerate has prepared, or accelerate rebuilt."""

import gc
import itertools
import json
import os
import pickle
import signal
import warnings
from pathlib import Path

import accelerate
import pytest
import torch
import torch.distributed
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import GradientState
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader

import headrace as hr
from headrace.integrations.accelerate import PreparedLoader, prepare
from tests.faults import watching
from tests.integrations.common import Numbers, Stream, flat, tenfold

SAMPLES = 24
ALL = list(range(0, 10 * SAMPLES, 10))
EPOCHS = 2


class OwnBatches(BatchSampler):
    """Of a class that is not torch's own: its batches are not divided."""


def with_noise(sample, generator):
    return sample, generator.standard_normal()


def accelerator_with(**configuration):
    steps = configuration.pop("gradient_accumulation_steps", 1)
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(**configuration),
    )


def batches_of(loader):
    return [batch.tolist() for batch in loader]


def observed(accelerator, loader):
    """Of one epoch: this rank's batches, what accelerate knows at each, and what it gathers for metrics."""
    batches, gathered = [], []
    for batch in loader:
        state = accelerator.gradient_state
        assert state.active_dataloader is loader
        batches.append((batch.tolist(), state.end_of_dataloader, state.remainder))
        gathered += accelerator.gather_for_metrics(batch).tolist()
    assert not GradientState().in_dataloader
    return batches, gathered


def divisions():
    """Sequential loaders of headrace and of torch."""
    accelerator = accelerator_with()
    for samples, drop_last in itertools.product((3, 8, 11), (True, False)):
        options = {"batch_size": 4, "drop_last": drop_last}
        ours = prepare(accelerator, hr.DataLoader(list(range(samples)), **options))
        theirs = accelerator.prepare(TorchDataLoader(range(samples), **options))
        batches, gathered = found = observed(accelerator, ours)
        assert found == observed(accelerator, theirs), (samples, drop_last)
        assert len(ours) == len(batches)
        assert drop_last or gathered == list(range(samples))


def orders(pattern):
    """The samples of each epoch, by kind of loader."""
    accelerator = accelerator_with()
    torch.manual_seed(accelerator.process_index)
    ranks = {"num_replicas": accelerator.num_processes, "rank": accelerator.process_index}
    weighted = WeightedRandomSampler([1.0] * SAMPLES, 16, replacement=False)
    distributed = DistributedSampler(range(SAMPLES), **ranks)
    loaders = {
        "seed": hr.DataLoader(Numbers(SAMPLES), batch_size=2, shuffle=True, seed=5, transform=tenfold),
        "seed, workers": hr.DataLoader(Numbers(SAMPLES), 2, shuffle=True, seed=5, transform=tenfold, num_workers=1),
        "unseeded": hr.DataLoader(Numbers(SAMPLES), batch_size=2, shuffle=True, transform=tenfold),
        "generator": hr.DataLoader(Numbers(SAMPLES), 2, shuffle=True, generator=torch.Generator(), transform=tenfold),
        "unequal generators": hr.DataLoader(
            Numbers(SAMPLES), 2, True, generator=torch.Generator().manual_seed(ranks["rank"]), transform=tenfold
        ),
        "batches of ElasticSampler": hr.DataLoader(
            Numbers(SAMPLES), batch_sampler=OwnBatches(hr.ElasticSampler(SAMPLES), 2, False), transform=tenfold
        ),
        "batch sampler": hr.DataLoader(
            Numbers(SAMPLES), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 2, False), transform=tenfold
        ),
        "weighted": hr.DataLoader(Numbers(SAMPLES), 2, sampler=weighted, transform=tenfold),
        "torch's dataset": hr.DataLoader(list(range(SAMPLES)), batch_size=2, shuffle=True, seed=5, transform=tenfold),
        "DistributedSampler": hr.DataLoader(Numbers(SAMPLES), 2, sampler=distributed, transform=tenfold),
        "ElasticSampler": hr.DataLoader(Numbers(SAMPLES), 2, sampler=hr.ElasticSampler(SAMPLES), transform=tenfold),
        "one at a time": hr.DataLoader(Numbers(SAMPLES), batch_size=None, transform=tenfold),
        "lines by shard": hr.DataLoader(lines(pattern), 2, transform=tenfold),
        "lines by sample": hr.DataLoader(lines(pattern, split=True), 2, transform=tenfold),
        "split stream": hr.DataLoader(Stream(SAMPLES).split(), 2, transform=tenfold),
    }  # fmt: skip
    report = {}
    for name, loader in loaders.items():
        dataset = loader.dataset
        prepared = prepare(accelerator, loader)
        assert prepare(accelerator, prepared) is accelerator.prepare(prepared) is prepared
        with prepared:
            report[name] = [flat(prepared) for _ in range(2)]
        if name == "seed":
            report["most in flight"] = dataset.most
    unequal = prepare(accelerator, hr.DataLoader(Stream(SAMPLES - 1).split(), 1))
    report["steps of an unequal stream"] = len(list(unequal))
    return report


def lines(pattern, split=False, **options):
    stream = hr.LinesDataset(pattern, shuffle=True, **options)
    return (stream.split() if split else stream).map(int)


def loader_of(kind, pattern):
    """The loader of a training program."""
    options = {"batch_size": 2, "transform": hr.randomized(with_noise)}
    if kind in ("seed", "generator"):
        order = (
            {"seed": 7}
            if kind == "seed"
            else {"generator": torch.Generator().manual_seed(3)}
        )
        return hr.DataLoader(Numbers(SAMPLES), shuffle=True, **order, **options)
    return hr.DataLoader(lines(pattern, split=kind == "samples"), seed=7, **options)


class Progress:
    """The running epoch, which is saved with the rest."""

    epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class Training:
    """A linear model, and its optimizer."""

    def __init__(self, **configuration):
        self.accelerator = accelerator_with(
            gradient_accumulation_steps=5, **configuration
        )
        model = torch.nn.Linear(1, 1).double()
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, samples, noise):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(
                (self.model(samples[:, None].double()) - noise[:, None]).square().mean()
            )
            self.optimizer.step()
            self.optimizer.zero_grad()

    def end(self):
        """The weights. The model goes before the process group: gloo may wait for ever for a rank that has ended."""
        weights = [
            each.item() for each in self.accelerator.unwrap_model(self.model).parameters()
        ]
        self.model = self.optimizer = None
        self.accelerator.free_memory()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return weights


def train(folder, pattern, kind, kill_after=None, stateful=False):
    """Train from the checkpoint in `folder`, if it is there; or save it after a number of steps, and be killed.

    Returns the samples of each step with their noise, and the weights.
    """
    training = Training(use_stateful_dataloader=stateful)
    accelerator, checkpoint = training.accelerator, Path(folder, "checkpoint")
    loader, progress = prepare(accelerator, loader_of(kind, pattern)), Progress()
    accelerator.register_for_checkpointing(
        *([progress, loader] if kind == "seed" else [progress])
    )
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    seen, step = [], 0
    for epoch in range(progress.epoch, EPOCHS):
        progress.epoch = epoch
        for samples, noise in loader:
            training.step(samples, noise)
            seen.append(
                (epoch, samples.tolist(), noise.tolist(), accelerator.sync_gradients)
            )
            step += 1
            if step == kill_after:
                accelerator.save_state(str(checkpoint))
                Path(folder, f"seen{accelerator.process_index}").write_text(
                    json.dumps(seen)
                )
                accelerator.wait_for_everyone()
                os.kill(os.getpid(), signal.SIGKILL)
    return seen, training.end()


def skipping():
    """A loader that accelerate rebuilds to skip batches says what restores the position."""
    accelerator = accelerator_with()
    loader = prepare(accelerator, hr.DataLoader(Numbers(SAMPLES), 2))
    with pytest.raises(RuntimeError, match=r"accelerator.load_state\(\) restores"):
        list(accelerator.skip_first_batches(loader, 3))
    plain = accelerator.prepare(TorchDataLoader(range(8), batch_size=2))
    assert batches_of(accelerator.skip_first_batches(plain, 1)) == [
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def nesting():
    """A loader is evaluated inside another's epoch, and iterators are dropped."""
    accelerator = accelerator_with(gradient_accumulation_steps=2)
    training = prepare(accelerator, hr.DataLoader(Numbers(6), 2, seed=0))
    evaluation = prepare(accelerator, hr.DataLoader(Numbers(5), 2))
    state, ends = accelerator.gradient_state, []
    peeked = iter(evaluation)
    next(peeked)
    for _ in training:
        next(iter(evaluation))  # dropped at once
        assert state.active_dataloader is training
        assert flat(map(accelerator.gather_for_metrics, evaluation)) == list(range(5))
        with accelerator.accumulate():
            ends.append(state.end_of_dataloader)
    assert ends == [False] * (len(ends) - 1) + [True]
    assert accelerator.sync_gradients, "the last step"
    del peeked
    for _ in training:
        assert state.active_dataloader is training
        break
    assert not state.in_dataloader
    rest = prepare(accelerator, hr.DataLoader(Numbers(6), 2, seed=0))
    rest.load_state_dict(training.state_dict())
    assert batches_of(rest) == batches_of(training)[1:]


class Fragile(Numbers):
    async def aget(self, index):
        if index == 5:
            raise OSError("no such sample")
        return index


def failing():
    """A sample that cannot be fetched: its error comes in its turn, and ends the iteration."""
    accelerator = accelerator_with()
    loader = prepare(accelerator, hr.DataLoader(Fragile(9), 2))
    batches = iter(loader)
    for expected, left in (([0, 1], 7), ([2, 3], 5), (None, 3)):
        if expected is None:
            with pytest.raises(OSError, match="no such sample"):
                next(batches)
        else:
            assert next(batches).tolist() == expected
        fresh = prepare(accelerator, hr.DataLoader(Numbers(9), 2))
        fresh.load_state_dict(loader.state_dict())
        assert len(flat(fresh)) == left
    assert next(batches, None) is None
    assert not accelerator.gradient_state.in_dataloader


def closing():
    """Workers and threads end when a loader is closed in mid-epoch, or dropped."""
    accelerator = accelerator_with()
    with hr.DataLoader(Numbers(SAMPLES), 2, num_workers=1, transform=tenfold) as first:
        list(first)  # starts the process from which workers are forked, which is kept
    for how in ("closed", "dropped"):
        before = watching.workers(), watching.children(), watching.threads()
        loader = prepare(
            accelerator,
            hr.DataLoader(Numbers(SAMPLES), 2, num_workers=1, transform=tenfold),
        )
        batches = iter(loader)
        next(batches)
        assert watching.workers() != before[0]
        if how == "closed":
            loader.close()
        del loader, batches
        accelerator.free_memory()
        gc.collect()
        assert (watching.workers(), watching.children(), watching.threads()) == before, (
            how
        )


def errors():
    def refused(error, text, dataset, batch_size=1, prepared=prepare, **options):
        with pytest.raises(error, match=text):
            prepared(accelerator_with(), hr.DataLoader(dataset, batch_size, **options))

    numbers = Numbers(SAMPLES)
    own = OwnBatches(RandomSampler(numbers), 2, False)
    refused(ValueError, "all batches of OwnBatches", numbers, batch_sampler=own)
    refused(
        ValueError,
        "all batches of BatchSampler",
        numbers,
        None,
        sampler=BatchSampler(range(9), 2, False),
    )
    for option in (
        {"split_batches": True},
        {"dispatch_batches": True},
        {"even_batches": False},
    ):
        with pytest.raises(ValueError, match="headrace loaders do not support"):
            prepare(accelerator_with(**option), hr.DataLoader(numbers))
    refused(ValueError, r"split\(\)", Stream(SAMPLES))
    other = DistributedSampler(range(9), num_replicas=4, rank=3)
    refused(ValueError, "rank 3 of 4", numbers, sampler=other)
    refused(
        TypeError,
        "DataLoaderShard",
        numbers,
        prepared=lambda own, loader: prepare(own, own.prepare(loader)),
    )
    refused(
        TypeError, "", numbers, prepared=lambda own, loader: aiter(prepare(own, loader))
    )
    with pytest.raises(TypeError, match=r"accelerator.prepare\(\)"):
        prepare(accelerator_with(), TorchDataLoader(range(3)))


class Renamed(hr.DataLoader):
    """A subclass with a constructor of its own."""

    def __init__(self, count):
        super().__init__(Numbers(count), batch_size=2)
        self.label = "mine"

    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch


def subclasses():
    accelerator, loader = accelerator_with(), Renamed(8)
    prepared, restored = prepare(accelerator, loader), prepare(accelerator, Renamed(8))
    assert isinstance(prepared, Renamed)
    assert isinstance(prepared, PreparedLoader)
    assert (type(loader), prepared.label) == (Renamed, "mine")
    batches = iter(prepared)
    first = next(batches).tolist()
    restored.load_state_dict(prepared.state_dict())
    assert [first, *batches_of(restored)] == [[0, 2], [4, 6], [8, 10], [12, 14]][
        accelerator.process_index :: 2
    ]


# Loaders that accelerate rebuilds.


def warned():
    """A loader that was given to `Accelerator.prepare` itself warns once, in two epochs."""
    accelerator, loader = (
        accelerator_with(),
        hr.DataLoader(list(range(4)), on_error="skip"),
    )
    with pytest.warns(RuntimeWarning) as caught:
        flat(itertools.chain.from_iterable(accelerator.prepare(loader) for _ in range(2)))
    (warning,) = caught
    assert "headrace.integrations.accelerate.prepare(accelerator, loader)" in str(
        warning.message
    )


def pickled():
    """An accelerator with a prepared loader."""
    accelerator = accelerator_with()
    prepare(accelerator, hr.DataLoader(list(range(8)), batch_size=2))
    (loader,) = pickle.loads(pickle.dumps(accelerator))._dataloaders
    assert batches_of(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


class OwnSplit(hr.AsyncIterableDataset):
    splits_by_rank = True

    async def __aiter__(self):
        info = hr.get_rank_info()
        for number in range(info.rank, SAMPLES, info.world_size):
            yield number


def everything(loader):
    """The samples of all ranks."""
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, flat(loader))
    return [sample for part in parts for sample in part]


def rebuilt(pattern):
    """Each sample of streams, and of two epochs of a dataset, is seen once on two ranks."""
    streams = {
        "undivided": lambda: Stream(SAMPLES),
        "own split": OwnSplit,
        "by sample": lambda: lines(pattern, split=True),
        "by shard": lambda: lines(pattern),
    }
    for dispatch in (None, False):
        accelerator = accelerator_with(dispatch_batches=dispatch)
        for name, make in streams.items():
            loader = accelerator.prepare(
                hr.DataLoader(make(), batch_size=3, transform=tenfold)
            )
            assert sorted(everything(loader)) == ALL, name
        loader = hr.DataLoader(
            OwnSplit(),
            2,
            num_workers=2,
            multiprocessing_context="fork",
            transform=tenfold,
        )
        # Accelerate pads.
        assert sorted(set(everything(accelerator.prepare(loader)))) == ALL
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    with pytest.raises(
        ValueError, match="rank=0, world_size=2" if ranks["rank"] == 0 else "world_size=2"
    ):
        list(accelerator.prepare(hr.DataLoader(lines(pattern, **ranks), batch_size=3)))

    def made(workers=0):
        loader = hr.DataLoader(
            Numbers(SAMPLES),
            3,
            shuffle=True,
            seed=5,
            num_workers=workers,
            transform=tenfold,
        )
        return accelerator.prepare(loader)

    loader = made()
    first, second = everything(loader), everything(loader)
    resumed = everything(
        [*itertools.islice(made(), 2), *accelerate.skip_first_batches(made(), 2)]
    )
    assert sorted(first) == sorted(second) == sorted(resumed) == ALL
    assert first != second
    assert everything(made(2)) == first


def on_one_rank():
    """Several programs, since starting a process takes longer than they do."""
    for program in (warned, closing, failing, divisions, pickled, skipping):
        program()


def on_two_ranks(pattern):
    warnings.simplefilter("ignore")
    for program in (divisions, nesting, errors, subclasses):
        program()
    rebuilt(pattern)
    report = orders(pattern)
    torch.distributed.destroy_process_group()
    return report
