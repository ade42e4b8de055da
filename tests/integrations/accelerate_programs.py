"""Programs for each rank, with loaders that headrace.integrations.accelerate has prepared, or accelerate rebuilt."""

import asyncio
import gc
import itertools
import json
import os
import signal
import warnings
from pathlib import Path

import accelerate
import torch
import torch.distributed
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import GradientState
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler
from torch.utils.data import DataLoader as TorchDataLoader

import headrace as hr
from headrace.integrations.accelerate import PreparedLoader, prepare, skip_first_batches
from tests.faults import watching

SAMPLES = 24
SHARDS = 4
EPOCHS = 2


class Numbers(hr.AsyncDataset):
    """Its samples are their indices; it records which it fetched, and how many fetches were in flight."""

    def __init__(self, samples=SAMPLES):
        self.samples = samples
        self.fetched = []
        self.in_flight = self.most_in_flight = 0

    def __len__(self):
        return self.samples

    async def aget(self, index):
        self.fetched.append(index)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return index


class Stream(hr.AsyncIterableDataset):
    """Gives its samples to every rank."""

    def __init__(self, samples=SAMPLES):
        self.samples = samples

    async def __aiter__(self):
        for number in range(self.samples):
            yield number


class OwnBatches(BatchSampler):
    """Of a class that is not torch's own: its batches are divided."""


def tenfold(sample):
    return sample * 10


def with_noise(sample, generator):
    return sample, generator.standard_normal()


def accelerator_with(**configuration):
    steps = configuration.pop("gradient_accumulation_steps", 1)
    return Accelerator(
        cpu=True, gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(**configuration)
    )


def batches_of(accelerator, loader):
    """Of one epoch: this rank's batches, what accelerate knows at each, and what it gathers for metrics."""
    batches, gathered = [], []
    for batch in loader:
        state = accelerator.gradient_state
        assert state.active_dataloader is loader
        batches.append((batch.tolist(), state.end_of_dataloader, state.remainder))
        if accelerator.even_batches:
            gathered += accelerator.gather_for_metrics(batch).tolist()
    assert not GradientState().in_dataloader
    return batches, gathered


def divisions():
    """Sequential loaders of headrace and of torch in every configuration: batches, length, gathered samples."""
    outcomes = []
    for even in (True, False):
        for split in (True, False):
            accelerator = accelerator_with(even_batches=even, split_batches=split)
            for samples in (3, 8, 11):
                for drop_last in (True, False):
                    options = {"batch_size": 4, "drop_last": drop_last}
                    ours = prepare(accelerator, hr.DataLoader(list(range(samples)), **options))
                    theirs = accelerator.prepare(TorchDataLoader(range(samples), **options))
                    pair = [
                        (
                            *batches_of(accelerator, loader),
                            loader.total_batch_size,
                            loader.total_dataset_length,
                        )
                        for loader in (ours, theirs)
                    ]
                    assert len(ours) == len(pair[0][0])  # theirs is one too many where no sample is left for the rank
                    outcomes.append(((even, split, samples, drop_last), *pair))
    return outcomes


def orders(folder):
    """The samples of each epoch, by kind of loader."""
    accelerator = accelerator_with()
    torch.manual_seed(accelerator.process_index)
    ranks = {"num_replicas": accelerator.num_processes, "rank": accelerator.process_index}
    weighted = WeightedRandomSampler([1.0] * SAMPLES, 16, replacement=False)
    distributed = DistributedSampler(range(SAMPLES), **ranks)
    loaders = {
        "seed": hr.DataLoader(Numbers(), batch_size=2, shuffle=True, seed=5, transform=tenfold),
        "seed, workers": hr.DataLoader(Numbers(), batch_size=2, shuffle=True, seed=5, transform=tenfold, num_workers=1),
        "unseeded": hr.DataLoader(Numbers(), batch_size=2, shuffle=True, transform=tenfold),
        "generator": hr.DataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator(), transform=tenfold),
        "unequal generators": hr.DataLoader(
            Numbers(), 2, True, generator=torch.Generator().manual_seed(ranks["rank"]), transform=tenfold
        ),
        "unequal batches": hr.DataLoader(
            Numbers(), batch_sampler=OwnBatches(RandomSampler(range(SAMPLES)), 2, False), transform=tenfold
        ),
        "weighted": hr.DataLoader(Numbers(), 2, sampler=weighted, transform=tenfold),
        "torch's dataset": hr.DataLoader(list(range(SAMPLES)), batch_size=2, shuffle=True, seed=5, transform=tenfold),
        "DistributedSampler": hr.DataLoader(Numbers(), 2, sampler=distributed, transform=tenfold),
        "ElasticSampler": hr.DataLoader(Numbers(), 2, sampler=hr.ElasticSampler(SAMPLES), transform=tenfold),
        "one at a time": hr.DataLoader(Numbers(), batch_size=None, transform=tenfold),
        "lines by shard": hr.DataLoader(lines(folder, counts=COUNTS), 2, transform=tenfold),
        "lines by sample": hr.DataLoader(lines(folder, split="samples"), 2, transform=tenfold),
        "split stream": hr.DataLoader(Stream().split(), 2, transform=tenfold),
    }  # fmt: skip
    report = {}
    for name, loader in loaders.items():
        dataset = loader.dataset
        prepared = prepare(accelerator, loader)
        assert prepare(accelerator, prepared) is accelerator.prepare(prepared) is prepared
        with prepared:
            report[name] = [
                [sample for batch in prepared for sample in torch.as_tensor(batch).view(-1).tolist()] for _ in range(2)
            ]
        if name == "seed":
            report["most in flight"] = dataset.most_in_flight
    unequal = prepare(accelerator, hr.DataLoader(Stream(SAMPLES - 1).split(), 1))
    report["steps of an unequal stream"] = len(list(unequal))
    return report


COUNTS = [SAMPLES // SHARDS] * SHARDS


def lines(folder, **options):
    return hr.LinesDataset(Path(folder, "*.txt"), shuffle=True, **options).map(int)


def loader_of(kind, folder):
    """The loader of a training program."""
    options = {"batch_size": 2, "transform": hr.randomized(with_noise)}
    if kind == "seed":
        return hr.DataLoader(Numbers(), shuffle=True, seed=7, **options)
    if kind == "generator":
        return hr.DataLoader(Numbers(), shuffle=True, generator=torch.Generator().manual_seed(3), **options)
    division = {"split": "samples"} if kind == "samples" else {"counts": COUNTS}
    return hr.DataLoader(lines(folder, **division), seed=7, **options)


class Progress:
    """The running epoch, which is saved with the rest."""

    epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def train(folder, kind, kill_after=None, stateful=False, registered=False):
    """Train from the checkpoint in `folder`, if it is there; or save it after a number of steps, and be killed.

    Returns the samples of each step with their noise, and the weights.
    """
    folder = Path(folder)
    accelerator = accelerator_with(use_stateful_dataloader=stateful, gradient_accumulation_steps=5)
    model = torch.nn.Linear(1, 1).double()
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    loader = prepare(accelerator, loader_of(kind, folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    assert prepared is loader
    progress = Progress()
    accelerator.register_for_checkpointing(*([progress, loader] if registered else [progress]))
    if (folder / "checkpoint").exists():
        accelerator.load_state(str(folder / "checkpoint"))
    seen, step = [], 0
    for epoch in range(progress.epoch, EPOCHS):
        progress.epoch = epoch
        for samples, noise in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(samples[:, None].double()) - noise[:, None]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            seen.append((epoch, samples.tolist(), noise.tolist(), accelerator.sync_gradients))
            step += 1
            if step == kill_after:
                accelerator.save_state(str(folder / "checkpoint"))
                (folder / f"seen{accelerator.process_index}").write_text(json.dumps(seen))
                accelerator.wait_for_everyone()
                os.kill(os.getpid(), signal.SIGKILL)
    weights = [each.item() for each in accelerator.unwrap_model(model).parameters()]
    accelerator.wait_for_everyone()  # gloo may wait for ever for a rank that has ended
    accelerator.end_training()
    return seen, weights


def train_with_torch(epochs):
    """As `train`, with torch's loader of the samples of each epoch and their noise."""
    accelerator = accelerator_with(gradient_accumulation_steps=5)
    model = torch.nn.Linear(1, 1).double()
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    for samples in epochs:
        for numbers, noise in accelerator.prepare(TorchDataLoader(samples, batch_size=2)):
            with accelerator.accumulate(model):
                accelerator.backward((model(numbers[:, None].double()) - noise[:, None]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return [each.item() for each in accelerator.unwrap_model(model).parameters()]


def skipping(folder):
    """The batches after some were skipped, and the indices that were fetched for them."""
    accelerator = accelerator_with()
    report = {}

    def fresh(dataset=None):
        dataset = dataset or Numbers()
        return dataset, prepare(accelerator, hr.DataLoader(dataset, 2, shuffle=True, seed=5, transform=tenfold))

    _, loader = fresh()
    report["whole"] = [[batch.tolist() for batch in loader] for _ in range(2)]
    dataset, loader = fresh()
    report["skipped"] = [[b.tolist() for b in each] for each in (accelerator.skip_first_batches(loader, 3), loader)]
    report["fetched"] = dataset.fetched[: len(report["skipped"][0]) * 2]
    accelerator._dataloaders.clear()
    _, loader = fresh()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    accelerator.save_state(str(Path(folder, "skipping")))
    accelerator._dataloaders.clear()
    _, restored = fresh()
    accelerator.load_state(str(Path(folder, "skipping")))
    try:
        skip_first_batches(restored, 2)
    except ValueError as error:
        report["other position"] = str(error)
    report["restored and skipped"] = [batch.tolist() for batch in skip_first_batches(restored, 3)]
    stream = prepare(accelerator, hr.DataLoader(lines(folder, split="samples"), 2, transform=tenfold))
    report["stream"] = [len(list(stream)), len(list(skip_first_batches(stream, 2))), len(list(stream))]
    try:
        list(accelerate.skip_first_batches(loader, 3))
    except RuntimeError as error:
        report["rebuilt"] = str(error)
    plain = accelerator.prepare(TorchDataLoader(range(8), batch_size=2))
    report["torch's"] = [batch.tolist() for batch in accelerator.skip_first_batches(plain, 1)]
    return report


def nesting():
    """What accelerate knows while a loader is evaluated inside another's epoch, and after iterators are dropped."""
    accelerator = accelerator_with(gradient_accumulation_steps=2)
    training = prepare(accelerator, hr.DataLoader(Numbers(6), 2, seed=0))
    evaluation = prepare(accelerator, hr.DataLoader(Numbers(5), 2))
    state, reported = accelerator.gradient_state, []
    peeked = iter(evaluation)
    next(peeked)
    for _ in training:
        next(iter(evaluation))  # dropped at once
        assert state.active_dataloader is training
        gathered = [number for batch in evaluation for number in accelerator.gather_for_metrics(batch).tolist()]
        with accelerator.accumulate():
            reported.append((gathered, state.end_of_dataloader, accelerator.sync_gradients))
    del peeked
    for _ in training:
        assert state.active_dataloader is training
        break
    assert not state.in_dataloader
    state_after_break = training.state_dict()
    rest = prepare(accelerator, hr.DataLoader(Numbers(6), 2, seed=0))
    rest.load_state_dict(state_after_break)
    reported.append([batch.tolist() for batch in rest])
    reported.append([batch.tolist() for batch in training])
    training.batch_sampler.even_batches = False  # as join_uneven_inputs does
    reported.append(len(list(training)))
    return reported


def states():
    """The batches that follow each state of an epoch, and those of its last call of `next()`."""
    accelerator = accelerator_with(even_batches=False)

    def fresh():
        return prepare(accelerator, hr.DataLoader(Numbers(9), 2, shuffle=True, seed=1))

    with fresh() as loader:
        whole = [[batch.tolist() for batch in loader] for _ in range(2)]
        loader.set_epoch(0)
        saved = [(loader.state_dict(), "before")]
        saved += [(loader.state_dict(), number) for number, _ in enumerate(loader)]
        saved.append((loader.state_dict(), "after"))
    follow = {}
    for state, name in saved:
        with fresh() as restored:
            restored.load_state_dict(state)
            restored.set_epoch(7)  # as trainers call it then
            follow[name] = [[batch.tolist() for batch in restored] for _ in range(2)]
    return whole, follow


class Fragile(Numbers):
    async def aget(self, index):
        if index == 5:
            raise OSError("no such sample")
        return index


def failing():
    """The batches of a loader with a sample that cannot be fetched, and the state after each call of `next()`."""
    accelerator = accelerator_with()
    loader = prepare(accelerator, hr.DataLoader(Fragile(9), 2))
    outcomes, batches = [], iter(loader)
    while True:
        try:
            outcomes.append(next(batches).tolist())
        except OSError:
            outcomes.append("error")
        except StopIteration:
            break
        fresh = prepare(accelerator, hr.DataLoader(Numbers(9), 2))
        fresh.load_state_dict(loader.state_dict())
        outcomes.append(sum(map(len, fresh)))
    return outcomes, accelerator.gradient_state.in_dataloader


def closing(how):
    """The workers in mid-epoch; what runs after training was ended there, and what ran before it began."""
    accelerator = accelerator_with()
    with hr.DataLoader(Numbers(), 2, num_workers=1, transform=tenfold) as first:
        list(first)  # starts the process from which workers are forked, which is kept
    before = watching.workers(), watching.children(), watching.threads()
    loader = prepare(accelerator, hr.DataLoader(Numbers(), 2, num_workers=1, transform=tenfold))
    batches = iter(loader)
    next(batches)
    during = watching.workers()
    if how == "closed":
        loader.close()
    else:
        del loader, batches
    accelerator.free_memory()
    gc.collect()
    return during, (watching.workers(), watching.children(), watching.threads()), before


def errors():
    """What is refused, by name."""
    report = {}

    def attempt(name, call, **configuration):
        try:
            call(accelerator_with(**configuration))
        except (TypeError, ValueError) as error:
            report[name] = f"{type(error).__name__}: {error}"

    def loader(*arguments, **options):
        return lambda accelerator: prepare(accelerator, hr.DataLoader(*arguments, **options))

    attempt("split_batches", loader(Numbers(), 3), split_batches=True)
    attempt("replicated", loader(Stream()))
    attempt("other ranks", loader(Numbers(), sampler=DistributedSampler(range(9), num_replicas=4, rank=3)))
    attempt("torch's", lambda accelerator: prepare(accelerator, TorchDataLoader(range(3))))
    attempt("rebuilt", lambda accelerator: prepare(accelerator, accelerator.prepare(hr.DataLoader(Numbers()))))
    attempt("async", lambda accelerator: aiter(prepare(accelerator, hr.DataLoader(Numbers()))))
    attempt("subclass", lambda accelerator: subclasses(accelerator, report))
    return report


class Renamed(hr.DataLoader):
    """A subclass with a constructor of its own."""

    def __init__(self, count):
        super().__init__(Numbers(count), batch_size=2)
        self.label = "mine"

    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch


def subclasses(accelerator, report):
    loader = Renamed(8)
    prepared = prepare(accelerator, loader)
    assert isinstance(prepared, Renamed)
    assert isinstance(prepared, PreparedLoader)
    assert type(loader) is Renamed
    batches = iter(prepared)
    first = next(batches).tolist()
    restored = prepare(accelerator, Renamed(8))
    restored.load_state_dict(prepared.state_dict())
    report["of a subclass"] = (prepared.label, first, *(batch.tolist() for batch in restored))


def warned():
    """The warnings of a loader that was given to `Accelerator.prepare` itself, in two epochs."""
    accelerator = accelerator_with()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            list(accelerator.prepare(hr.DataLoader(list(range(4)), on_error="skip")))
    return [(each.category.__name__, str(each.message)) for each in caught]


# Loaders that accelerate rebuilds.


class OwnSplit(hr.AsyncIterableDataset):
    splits_by_rank = True

    async def __aiter__(self):
        info = hr.get_rank_info()
        for number in range(info.rank, SAMPLES, info.world_size):
            yield number


class Around(hr.AsyncIterableDataset):
    """A user's stream around another, which is started on the background loop."""

    def __init__(self, inner):
        self.inner = inner

    async def __aiter__(self):
        async for sample in self.inner:
            yield sample


def everything(loader):
    """The samples of all ranks."""
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, [number for batch in loader for number in batch.tolist()])
    return [sample for part in parts for sample in part]


def rebuilt(folder):
    """The samples of all ranks, by loader: of streams, and of two epochs of a dataset."""
    warnings.simplefilter("ignore")
    streams = {
        "undivided": Stream,
        "own split": OwnSplit,
        "by sample": lambda: lines(folder, split="samples"),
        "by shard": lambda: lines(folder, remainder="keep"),
        "around another": lambda: Around(lines(folder, split="samples")),
    }
    report = {"streams": {}, "workers": {}}
    for dispatch in (None, False):
        accelerator = accelerator_with(dispatch_batches=dispatch)
        for name, make in streams.items():
            loader = accelerator.prepare(hr.DataLoader(make(), batch_size=3, transform=tenfold))
            report["streams"][name, dispatch] = everything(loader)
        plain = accelerator.prepare(TorchDataLoader(streams["by sample"]().map(tenfold), batch_size=3))
        report["streams"]["torch's loader", dispatch] = everything(plain)
        for method in ("fork", "spawn")[: 1 + (dispatch is None)]:
            options = {"num_workers": 2, "multiprocessing_context": method, "transform": tenfold}
            loader = accelerator.prepare(hr.DataLoader(OwnSplit(), batch_size=2, **options))
            report["workers"][method, dispatch] = everything(loader)
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    try:
        list(accelerator.prepare(hr.DataLoader(lines(folder, split="samples", **ranks), batch_size=3)))
    except ValueError as error:
        report["explicit rank"] = str(error)

    def made(workers=0):
        loader = hr.DataLoader(Numbers(), 3, shuffle=True, seed=5, num_workers=workers, transform=tenfold)
        return accelerator.prepare(loader)

    loader = made()
    report["epochs"] = [everything(loader) for _ in range(2)]
    report["epoch with workers"] = everything(made(2))
    report["resumed"] = everything([*itertools.islice(made(), 2), *accelerate.skip_first_batches(made(), 2)])
    torch.distributed.destroy_process_group()
    return report
