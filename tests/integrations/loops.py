"""Jobs of trainers that iterate the loader they are given: ignite, skorch, fastai, and a loop like torchtitan's.

Each is run on the same model and samples, and can be killed and continued. A job writes the batches
that its model saw, after each batch, to `steps.json`, and checkpoints to its folder."""

import contextlib
import functools
import gc
import json
import os
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

import headrace as hr
from tests.integrations.common import Numbers, Stream

SAMPLES, BATCH, EPOCHS = 48, 4, 2
SAVED_AT, KILLED_AT = 2, 4  # batches of the first epoch
SEED = 5
ENGINE = "headrace-engine"  # the name of an engine's thread
ENDING = 30  # seconds in which the thread of a dropped loader's engine ends
LEARNING_RATE = 1e-7


def pair(index):
    """Input and target; other indices if it is applied twice."""
    return torch.tensor([10.0 * index]), torch.tensor([30.0 * index])


class Line(torch.nn.Module):
    """A line, which records the batches that it sees: whether in training, and their indices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []
        self.engines = []  # those there were after the last step

    def forward(self, batch):
        self.seen.append((self.training, (batch[:, 0] / 10).int().tolist()))
        return self.layer(batch)

    def steps(self):
        """The indices of each training step."""
        return [indices for training, indices in self.seen if training]

    def evaluated(self):
        return [
            index for training, indices in self.seen if not training for index in indices
        ]

    def weights(self):
        return [parameter.tolist() for parameter in self.parameters()]


class Interruption:
    """Counts the steps of a job, and kills its process at one of them.

    Args:
        folder: where the steps are written.
        kill: whether it does, on the last rank.
    """

    def __init__(self, folder, kill):
        self.file = Path(folder, f"steps{hr.get_rank_info().rank}.json")
        self.kill = kill and hr.get_rank_info().rank == hr.get_rank_info().world_size - 1

    def __call__(self, model):
        steps = model.steps()
        self.file.write_text(json.dumps(steps))
        model.engines = engines()
        if self.kill and len(steps) == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def training_loader():
    return hr.DataLoader(
        Numbers(SAMPLES),
        BATCH,
        sampler=hr.ElasticSampler(SAMPLES, seed=SEED),
        transform=pair,
    )


def stream_loader():
    # which two ranks cannot share evenly
    return hr.DataLoader(Stream(41).split(), BATCH, transform=pair)


def evaluation_loader():
    sampler = hr.ElasticSampler(SAMPLES, shuffle=False)
    return hr.DataLoader(Numbers(SAMPLES), BATCH, sampler=sampler, transform=pair)


def parallel(model):
    """The model, on several ranks in DDP."""
    if torch.distributed.is_initialized():
        return torch.nn.parallel.DistributedDataParallel(model)
    return model


def save(folder, step, epoch, **parts):
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"epoch": epoch, **states}, Path(folder, f"checkpoint_{step}.pt"))


def restore(folder, step, **parts):
    """Restores the parts; returns the epoch, which is 0 without a step."""
    if step is None:
        return 0
    saved = torch.load(Path(folder, f"checkpoint_{step}.pt"))
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


def ignite_job(folder, loader, evaluation=None, *, resume=None, kill=False):
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    line = Line()
    model = idist.auto_model(line)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    interruption = Interruption(folder, kill)

    def train(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    trainer = Engine(train)
    objects = {"trainer": trainer, "model": line, "loader": loader}
    save = Checkpoint(objects, DiskSaver(folder, require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=SAVED_AT), save)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: interruption(line))
    if evaluation is not None:
        evaluator = Engine(lambda engine, batch: line(batch[0]))

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate():
            line.eval()
            evaluator.run(evaluation)
            line.train()

    if resume is not None:
        saved = torch.load(Path(folder, f"checkpoint_{resume}.pt"))
        counts = saved["trainer"]  # of the ranks that saved them
        counts["iteration"] = counts["iteration"] * len(loader) // counts["epoch_length"]
        counts["epoch_length"] = len(loader)
        Checkpoint.load_objects(objects, saved)
    trainer.run(loader, max_epochs=EPOCHS)
    return line


def skorch_job(folder, loader, evaluation=None, *, resume=None, kill=False):
    from skorch import NeuralNetRegressor
    from skorch.callbacks import Callback
    from skorch.helper import predefined_split

    interruption = Interruption(folder, kill)

    class Save(Callback):
        def on_batch_end(self, net, batch=None, training=None, **options):
            if training:
                step = (resume or 0) + len(net.module_.steps())
                if step % SAVED_AT == 0:
                    save(
                        folder,
                        step,
                        len(net.history) - 1,
                        loader=loader,
                        model=net.module_,
                    )
                interruption(net.module_)

    net = NeuralNetRegressor(
        Line,
        optimizer=torch.optim.SGD,
        lr=LEARNING_RATE,
        max_epochs=EPOCHS,
        iterator_train=lambda dataset, batch_size: loader,
        iterator_valid=lambda dataset, batch_size: evaluation,
        train_split=None if evaluation is None else predefined_split(evaluation.dataset),
        callbacks=[Save()],
        verbose=0,
    )
    net.initialize()
    begun = restore(folder, resume, loader=loader, model=net.module_)
    net.partial_fit(loader.dataset, epochs=EPOCHS - begun)
    return net.module_


def fastai_job(folder, loader, evaluation=None, *, resume=None, kill=False):
    import fastai.callback.progress  # noqa: F401  # gives `Learner` no_bar()
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    line = Line()
    interruption = Interruption(folder, kill)
    model = parallel(line)

    class Save(Callback):
        def after_batch(self):
            if self.training:
                step = (resume or 0) + len(line.steps())
                if step % SAVED_AT == 0 and hr.get_rank_info().rank == 0:
                    save(folder, step, self.epoch, loader=loader, model=line)
                interruption(line)

    learn = Learner(
        DataLoaders(
            loader,
            evaluation_loader() if evaluation is None else evaluation,
            device=torch.device("cpu"),
        ),
        model,
        loss_func=torch.nn.functional.mse_loss,
        opt_func=functools.partial(OptimWrapper, opt=torch.optim.SGD),
        lr=LEARNING_RATE,
        cbs=[Save()],
    )
    learn.create_opt()
    begun = restore(folder, resume, loader=loader, model=line)
    with learn.no_bar(), learn.no_logging():
        learn.fit(EPOCHS, start_epoch=begun)
    return line


def torchtitan_job(folder, loader, evaluation=None, *, resume=None, kill=False):
    """As `torchtitan.trainer.Trainer.train` does, which needs an accelerator: steps on one iterator, saved by DCP."""
    import torch.distributed.checkpoint as dcp
    from torchtitan.components.dataloader import BaseDataLoader

    from headrace.integrations.torchtitan import HeadraceDataLoader

    class Component(HeadraceDataLoader, BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            epochs: int

        def __init__(self, config, *, dp_rank, dp_world_size, loader):
            super().__init__(
                loader, dp_rank=dp_rank, dp_world_size=dp_world_size, epochs=config.epochs
            )

    ranks = hr.get_rank_info()
    build = functools.partial(
        Component.Config.build, dp_rank=ranks.rank, dp_world_size=ranks.world_size
    )
    dataloader = build(Component.Config(epochs=EPOCHS), loader=loader)
    line = Line()
    model = parallel(line)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    parts = {"dataloader": dataloader, "model": line}
    interruption = Interruption(folder, kill)
    if resume is not None:
        dcp.load(parts, checkpoint_id=Path(folder, f"checkpoint_{resume}"))
    for x, y in dataloader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step = (resume or 0) + len(line.steps())
        at_end = step == SAMPLES // BATCH // ranks.world_size
        if step == SAVED_AT or at_end:
            dcp.save(parts, checkpoint_id=Path(folder, f"checkpoint_{step}"))
        interruption(line)
        if evaluation is not None and step * BATCH * ranks.world_size % SAMPLES == 0:
            line.eval()
            # As its validator does: a component of its own, which it closes.
            validation = build(Component.Config(epochs=1), loader=evaluation_loader())
            for x, _ in validation:
                line(x)
            validation.close()
            line.train()
    dataloader.close()
    return line


JOBS = {
    "ignite": ignite_job,
    "skorch": skorch_job,
    "fastai": fastai_job,
    "torchtitan": torchtitan_job,
}
STREAMED = ("ignite", "torchtitan")  # take streams of unknown length, on several ranks


@contextlib.contextmanager
def process_group():
    """That of the ranks which a launcher has started; none for a single process."""
    if hr.get_rank_info().world_size == 1:
        yield
        return
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.barrier()  # gloo may wait for ever for a rank that has ended
    torch.distributed.destroy_process_group()


def engines():
    """The threads of loaders' engines."""
    return [each.name for each in threading.enumerate() if each.name == ENGINE]


def run_and_continue(trainer, folder):
    """A program: a whole job with evaluation, and jobs that go on from a killed one, and from the end of an epoch."""
    job = JOBS[trainer]
    with process_group(), tempfile.TemporaryDirectory() as own:
        loader = training_loader()
        whole = job(own, loader, evaluation_loader())
        epoch = len(whole.steps()) // EPOCHS
        resumed = job(folder, training_loader(), resume=SAVED_AT)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # the first rank writes the checkpoints
        at_end = job(folder, training_loader(), resume=epoch)
        takes_streams = trainer in STREAMED and torch.distributed.is_initialized()
        stream = job(own, stream_loader()) if takes_streams else Line()
    return {
        "epochs": [whole.steps()[:epoch], whole.steps()[epoch:]],
        "weights": [each.weights() for each in (whole, resumed, at_end)],
        "resumed": resumed.steps(),
        "from the end of an epoch": at_end.steps(),
        "evaluated": whole.evaluated(),
        "most in flight": loader.dataset.most,
        "steps of the stream": len(stream.steps()),
    }


def be_killed(trainer, folder):
    """A program: a job that is killed in the first epoch."""
    with process_group():
        JOBS[trainer](folder, training_loader(), kill=True)


def continue_alone(trainer, folder):
    """A program: one process goes on from a checkpoint of two."""
    loader = training_loader()
    line = JOBS[trainer](folder, loader, resume=SAVED_AT)
    report = {"resumed": line.steps(), "engines": line.engines}
    del loader, line
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == ENGINE:
            thread.join(ENDING)
    return {**report, "engines left": engines()}
