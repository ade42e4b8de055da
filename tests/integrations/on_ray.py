"""A program: jobs of Ray Train, in one session of Ray; writes what they did to a folder.

In the first job, of two workers, one is killed in mid-epoch; Ray restarts both from the last checkpoint. The second is
one process (Ray's local mode, which starts quickly), and goes on from two checkpoints of the first.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import psutil
import torch
import torch.distributed

import headrace as hr

SAMPLES, BATCH, EPOCHS, SEED = 48, 4, 2, 5
SAVED_AT, KILLED_AT = 2, 4  # steps of the first epoch
LATENCY = 0.002  # seconds of a fetch


class Points(hr.AsyncDataset):
    """Numbers, and the number of fetches that were in flight with each."""

    def __init__(self):
        self.running = 0

    def __len__(self):
        return SAMPLES

    async def aget(self, index):
        self.running += 1
        await asyncio.sleep(LATENCY)
        running, self.running = self.running, self.running - 1
        return index, running


def tenfold(sample):
    index, running = sample
    return torch.tensor([10.0 * index]), index, running


async def forty_one():
    """41 samples, which two ranks cannot share evenly."""
    for number in range(41):
        yield number


class DuckStream:
    splits_by_rank = True

    async def __aiter__(self):
        info = hr.get_rank_info()
        for number in range(info.rank, 40, info.world_size):
            yield number


class Training:
    """A model, its optimizer and a loader, and the record of their steps.

    Args:
        loader: of `Points`.
        model: a linear layer, or DDP around one.
    """

    def __init__(self, loader, model):
        self.loader, self.model = loader, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
        self.steps = []  # [epoch, indices, most in flight]

    def epoch(self, epoch, after_step=lambda step: None):
        for batch in self.loader:
            self.backward(epoch, batch)
            self.optimizer.step()
            after_step(sum(done == epoch for done, *_ in self.steps))

    def backward(self, epoch, batch):
        x, index, running = batch
        assert torch.equal(x[:, 0], 10.0 * index), "the transform was not applied once"
        self.optimizer.zero_grad()
        (self.model(x) - 3 * x).square().mean().backward()
        self.steps.append([epoch, index.tolist(), int(running.max())])

    def state(self, epoch):
        parts = {"loader": self.loader, "model": plain(self.model), "optimizer": self.optimizer}
        return {"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}}

    def restore(self, state):
        parts = {"loader": self.loader, "model": plain(self.model), "optimizer": self.optimizer}
        for name, part in parts.items():
            part.load_state_dict(state[name])
        return state["epoch"]

    def weights(self):
        return [parameter.tolist() for parameter in self.model.parameters()]


def plain(model):
    return getattr(model, "module", model)


def layer():
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


def made_loader(**options):
    return hr.DataLoader(Points(), BATCH, shuffle=True, seed=SEED, transform=tenfold, concurrency=8, **options)


def uninterrupted(ranks=2):
    """Of a job without Ray, with torch's loader: the indices of each rank's steps, and the weights at the end.

    The ranks are counted out in one process, with the arithmetic of DistributedDataParallel.
    """
    samples = [tenfold((index, 0)) for index in range(SAMPLES)]
    samplers = [hr.ElasticSampler(samples, seed=SEED, rank=rank, world_size=ranks) for rank in range(ranks)]
    loaders = [torch.utils.data.DataLoader(samples, BATCH, sampler=sampler) for sampler in samplers]
    trainings = [Training(loader, layer()) for loader in loaders]
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            for training, batch in zip(trainings, batches, strict=True):
                training.backward(epoch, batch)
            for parameters in zip(*(training.model.parameters() for training in trainings), strict=True):
                mean = sum(parameter.grad / ranks for parameter in parameters)
                for parameter in parameters:
                    parameter.grad = mean.clone()
            for training in trainings:
                training.optimizer.step()
    return [[step[:2] for step in training.steps] for training in trainings], trainings[0].weights()


def reported_processes(folder):
    """The processes that the workers of a job had started, as far as there are such processes."""
    for report in Path(folder).glob("attempt*.json"):
        for pid, created in json.loads(report.read_text())["processes"]:
            try:
                process = psutil.Process(pid)
            except psutil.NoSuchProcess:
                continue
            if process.create_time() == created:
                yield process


def main(folder, lines):
    import ray
    import ray.train
    import ray.train.torch
    from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from headrace.integrations.ray import prepare_data_loader

    def descendants():
        return [(each.pid, each.create_time()) for each in psutil.Process().children(recursive=True)]

    def write(name, **report):
        Path(folder, name).write_text(json.dumps(report))

    def save(name, training, epoch):
        with tempfile.TemporaryDirectory() as local:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(training.state(epoch), Path(local, "state.pt"))
                checkpoint = Checkpoint.from_directory(local)
            ray.train.report({"epoch": epoch}, checkpoint=checkpoint, checkpoint_dir_name=name)
        ray.train.get_all_reported_checkpoints()  # returns when Ray would restart from this one

    def load(checkpoint):
        with checkpoint.as_directory() as local:
            return torch.load(Path(local, "state.pt"))

    def interrupted(config):
        rank = ray.train.get_context().get_world_rank()
        checkpoint = ray.train.get_checkpoint()
        killed = rank == 1 and not checkpoint
        loader = made_loader(num_workers=1 if killed else 0)  # a process, which must not outlive its parent
        training = Training(prepare_data_loader(loader), ray.train.torch.prepare_model(layer()))
        begun = training.restore(load(checkpoint)) if checkpoint else 0
        attempt = sum(Path(folder, f"attempt{number} rank{rank}.json").exists() for number in range(9))

        def after_step(step):
            report = {"steps": training.steps, "weights": training.weights(), "processes": descendants()}
            write(f"attempt{attempt} rank{rank}.json", **report)
            if epoch == 0 and not attempt:
                if step == SAVED_AT:
                    save("middle", training, 0)
                if step == KILLED_AT and killed:
                    os.kill(os.getpid(), signal.SIGKILL)

        for epoch in range(begun, EPOCHS):
            training.epoch(epoch, after_step)
            if epoch == 0:
                save("end", training, 1)
        others(rank)

    def others(rank):
        """Of further loaders, what each rank reads."""
        report = {}
        for name, dataset, options in (
            ("evaluation", Points(), {"transform": tenfold}),
            ("own split", DuckStream(), {"transform": tenfold_number}),
            ("lines", hr.LinesDataset(lines, split="samples").map(int), {"transform": tenfold_number}),
        ):
            with prepare_data_loader(hr.DataLoader(dataset, BATCH, **options)) as loader:
                report[name] = [one for batch in loader for one in (batch[1] if len(batch) == 3 else batch).tolist()]
        with prepare_data_loader(hr.DataLoader(hr.from_async_iterable(forty_one).split(), BATCH)) as loader:
            report["steps of the stream"] = [len(list(loader)) for _ in range(EPOCHS)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rebuilt = ray.train.torch.prepare_data_loader(hr.DataLoader(Points(), BATCH, transform=tenfold))
            report["prepared by Ray"] = [one for batch in rebuilt for one in batch[1].tolist()]
            report["most in flight, prepared by Ray"] = max(int(batch[2].max()) for batch in rebuilt)
        report["warnings"] = [str(each.message) for each in caught if each.category is RuntimeWarning]
        own = hr.DataLoader(Points(), BATCH, sampler=hr.ElasticSampler(Points(), seed=SEED))
        report["kept"] = prepare_data_loader(own) is own
        order = hr.DataLoader(Points(), BATCH, sampler=[3, 1, 2])
        try:
            prepare_data_loader(order)
        except ValueError as error:
            report["refused"] = str(error)
        report["left as it is"] = prepare_data_loader(order, add_dist_sampler=False) is order
        placement = hr.RayPlacement(cpus_per_engine=0.5)  # beside the workers, in no placement group
        with prepare_data_loader(hr.DataLoader(Points(), BATCH, transform=tenfold, placement=placement)) as loader:
            report["by engines on Ray"] = [one for batch in loader for one in batch[1].tolist()]
            report["placement"] = loader.stats().placement
        write(f"others rank{rank}.json", **report)

    def on_one_worker(config):
        for name in ("middle", "end"):
            training = Training(prepare_data_loader(made_loader()), layer())
            begun = training.restore(load(Checkpoint(config[name])))
            for epoch in range(begun, EPOCHS):
                training.epoch(epoch)
            write(f"from {name}.json", steps=training.steps)

    assert not ray.is_initialized(), "an import started Ray"
    ray.init(
        address="local",  # not a cluster that another test has left
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
    )
    jobs = RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1))
    done = TorchTrainer(
        interrupted,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=jobs,
    ).fit()
    _, alive = psutil.wait_procs(list(reported_processes(folder)), timeout=20)
    write("left.json", alive=[str(each) for each in alive])
    TorchTrainer(
        on_one_worker,
        train_loop_config={name: str(Path(done.path, name)) for name in ("middle", "end")},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    ray.shutdown()


def tenfold_number(number):
    return number * 10


if __name__ == "__main__":
    main(*sys.argv[1:])
