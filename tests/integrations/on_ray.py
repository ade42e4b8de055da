"""Programs on a Ray cluster: loaders whose engines are lost, and jobs of Ray Train."""

import asyncio
import functools
import gc
import json
import os
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed

import headrace as hr
from tests.faults.watching import digest
from tests.integrations.common import Numbers, Stream, flat, tenfold

SEED = 5

# Engines.

BATCH, BATCHES = 5, 400
LARGE = 1_000_000  # bytes of a large sample
STORE = 80_000_000  # bytes of the object store
BROKEN = 405  # index of a sample that cannot be fetched
LOST_AT = 20  # batches


class Slow(Numbers):
    async def aget(self, index):
        await asyncio.sleep(0.001)  # latency
        if self.count == BROKEN + 5 and index == BROKEN:
            raise LookupError(f"no sample {index}")
        return index


def noisy(index):
    return index + torch.rand(2)


def enlarged(index):
    return {
        "bytes": np.full(LARGE, index % 251, np.uint8),
        "empty": np.empty((0, 3), np.float32),
    }


def made_loader(**options):
    # A few batches at once: most of the epoch is made after the loss.
    options = {"seed": SEED, "transform": noisy, "concurrency": 8, **options}
    return hr.DataLoader(Slow(BATCH * BATCHES), BATCH, shuffle=True, **options)


def slow_int(line):
    time.sleep(0.005)  # so that the engine still reads when it is lost
    return int(line)


def made_stream_loader(pattern, **options):
    lines = hr.LinesDataset(pattern, shuffle=True, seed=SEED).map(slow_int)
    return hr.DataLoader(lines, BATCH, seed=SEED, transform=noisy, **options)


def engine_actors():
    """The processes of the actors of engines, oldest first."""
    every = psutil.process_iter(["cmdline", "create_time"])
    found = [
        each for each in every if "HostedEngine" in "".join(each.info["cmdline"] or ())
    ]
    return sorted(found, key=lambda process: process.info["create_time"])


def kill_actor():
    engine_actors()[0].send_signal(signal.SIGKILL)


def kill_engine_process():
    # The first that the helper forks, which is a child of the actor.
    forks = [each.children() for each in engine_actors()[0].children()]
    (process,) = [min(each, key=psutil.Process.create_time) for each in forks if each]
    process.send_signal(signal.SIGKILL)


def kill_all_actors():
    for actor in engine_actors():
        actor.send_signal(signal.SIGKILL)


def interrupted(loader, interrupt):
    """The digest of an epoch in which something happens after some batches, and the warnings."""
    loader.set_epoch(0)
    batches = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            batches.append(batch)
            if len(batches) == LOST_AT:
                interrupt()
    return digest(batches), [
        str(each.message) for each in caught if each.category is RuntimeWarning
    ]


def lost_and_continued(stream):
    """The digest of an epoch whose only engine is lost, and that is continued from the last state."""
    batches, states = [], []

    def read():
        for batch in stream:
            batches.append(batch)
            states.append(stream.state_dict())
            if len(batches) == LOST_AT:
                assert len(engine_actors()) == 1
                kill_actor()

    with pytest.raises(
        hr.errors.EngineDiedError, match="the only engine that reads the stream has ended"
    ):
        read()
    stream.load_state_dict(states[-1])
    return digest([*batches, *stream])


def of_dataset(report, loader):
    """Two epochs, a state in the third, and losses."""
    report["two epochs"] = [digest(loader), digest(loader)]
    assert loader.stats().placement == "ray"
    assert len(engine_actors()) == 2
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    report["state"] = iterator.state_dict()
    iterator.close()
    for name, loss in LOSSES.items():
        report[name] = interrupted(loader, loss)


LOSSES = {
    "SIGKILL of an actor": kill_actor,
    "SIGKILL of an engine's process": kill_engine_process,
    "SIGKILL of all actors": kill_all_actors,
}


def check_collected_by_ray(folder, make, use):
    """A loader that was left to the garbage collector ends its engines from a thread of Ray's."""
    import ray

    cycle = [make()]
    use(cycle[0])
    gc.disable()
    cycle.append(cycle)
    del cycle
    threads, collected = [], threading.Event()

    def collect(_):
        threads.append(threading.get_ident())
        gc.collect()
        collected.set()

    os.mkfifo(folder / "begin")
    reading = ray.remote(Path.read_bytes).remote(folder / "begin")
    reading.future().add_done_callback(collect)
    (folder / "begin").write_bytes(b"now")
    assert collected.wait(30)
    assert threads != [threading.main_thread().ident]
    gc.enable()
    psutil.wait_procs(engine_actors(), timeout=30)
    assert not engine_actors()


def check_large(loader):
    """Large batches arrive, and can be written to, up to a sample that cannot be fetched."""
    batches = iter(loader)
    for number in range(BROKEN // BATCH):
        batch = next(batches)
        batch["bytes"] += 1
        values = torch.arange(BATCH * number, BATCH * (number + 1)) % 251 + 1
        assert torch.equal(batch["bytes"].sum(1, dtype=torch.int64), values * LARGE)
        assert batch["empty"].shape == (BATCH, 0, 3)
    with pytest.raises(LookupError, match="no sample 405") as caught:
        next(batches)
    assert any("batch 81, index 405" in note for note in caught.value.__notes__)


def engines(address, folder, pattern):
    """A program: loaders with engines on a cluster of 4 CPUs, which are lost."""
    with pytest.raises(RuntimeError, match=r"call ray.init\(address='auto'\)"):
        next(iter(made_loader(placement=hr.RayPlacement())))
    import ray

    assert not ray.is_initialized()
    ray.init(address=address, log_to_driver=False)
    large = hr.RayPlacement(engines=2, cpus_per_engine=5, start_timeout=0.5)
    with pytest.raises(hr.errors.EngineStartError) as caught:
        next(iter(made_loader(placement=large)))
    assert str(caught.value).startswith(
        "0 of 2 engines run 0.5 seconds after they were asked for"
    )
    assert "free for RayPlacement(engines=2, cpus_per_engine=5, min_engines=None" in str(
        caught.value
    )
    report = {}
    made = functools.partial(made_loader, placement=hr.RayPlacement(engines=2))
    check_collected_by_ray(folder, made, functools.partial(of_dataset, report))
    with made_stream_loader(pattern, placement=hr.RayPlacement(engines=2)) as stream:
        report["stream"] = lost_and_continued(stream)
        assert stream.stats().placement == "ray"
    # Begins with the two of three engines that there is room for. Five times the store goes through
    # it.
    few = hr.RayPlacement(engines=3, cpus_per_engine=2, min_engines=1)
    options = {
        "transform": enlarged,
        "concurrency": 4,
        "placement": few,
    }  # some 30 MB of batches at once
    with hr.DataLoader(Slow(BROKEN + 5), BATCH, **options) as loader:
        check_large(loader)
        ray.shutdown()
        with pytest.raises(RuntimeError):
            next(iter(loader))
    assert not ray.is_initialized(), "headrace has started Ray"
    return report


# Ray Train.

SAMPLES, TRAIN_BATCH, EPOCHS = 48, 4, 2
SAVED_AT, KILLED_AT = 2, 4  # steps of the first epoch


class Training:
    """A model, its optimizer and a loader, and the record of their steps: [epoch, samples].

    Args:
        loader: of tenfold indices.
        model: a linear layer, or DDP around one.
    """

    def __init__(self, loader, model):
        self.loader, self.model = loader, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
        self.parts = {
            "loader": loader,
            "model": getattr(model, "module", model),
            "optimizer": self.optimizer,
        }
        self.steps = []

    def epoch(self, epoch, after_step=lambda step: None):
        for batch in self.loader:
            self.backward(epoch, batch)
            self.optimizer.step()
            after_step(sum(done == epoch for done, _ in self.steps))

    def backward(self, epoch, batch):
        x = batch[:, None].float()
        self.optimizer.zero_grad()
        (self.model(x) - 3 * x).square().mean().backward()
        self.steps.append([epoch, batch.tolist()])

    def state(self, epoch):
        return {
            "epoch": epoch,
            **{name: part.state_dict() for name, part in self.parts.items()},
        }

    def restore(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        return state["epoch"]

    def weights(self):
        return [parameter.tolist() for parameter in self.model.parameters()]


def layer():
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


def train_loader(**options):
    options = {"transform": tenfold, "concurrency": 8, **options}
    return hr.DataLoader(
        Numbers(SAMPLES), TRAIN_BATCH, shuffle=True, seed=SEED, **options
    )


def uninterrupted(ranks=2):
    """Of a job without Ray, with torch's loader: the steps of each rank, and the weights at the end.

    The ranks are counted out in one process, with the arithmetic of DistributedDataParallel.
    """
    samples = [*map(tenfold, range(SAMPLES))]
    samplers = [
        hr.ElasticSampler(samples, seed=SEED, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]
    loaders = [
        torch.utils.data.DataLoader(samples, TRAIN_BATCH, sampler=sampler)
        for sampler in samplers
    ]
    trainings = [Training(loader, layer()) for loader in loaders]
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            for training, batch in zip(trainings, batches, strict=True):
                training.backward(epoch, batch)
            for parameters in zip(
                *(training.model.parameters() for training in trainings), strict=True
            ):
                mean = sum(parameter.grad / ranks for parameter in parameters)
                for parameter in parameters:
                    parameter.grad = mean.clone()
            for training in trainings:
                training.optimizer.step()
    return [training.steps for training in trainings], trainings[0].weights()


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


def train(address, folder, pattern):
    """A program: in a job of two workers one is killed in mid-epoch, and Ray restarts both from the last checkpoint.

    A second job is one process (Ray's local mode, which starts quickly), and goes on from two
    checkpoints of the first. What they did is written to files in `folder`.
    """
    import ray
    import ray.train
    import ray.train.torch
    from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from headrace.integrations.ray import prepare_data_loader

    def write(name, **report):
        Path(folder, name).write_text(json.dumps(report))

    def save(name, training, epoch):
        with tempfile.TemporaryDirectory() as local:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(training.state(epoch), Path(local, "state.pt"))
                checkpoint = Checkpoint.from_directory(local)
            ray.train.report(
                {"epoch": epoch}, checkpoint=checkpoint, checkpoint_dir_name=name
            )
        # Returns when Ray would restart from this one.
        ray.train.get_all_reported_checkpoints()

    def load(checkpoint):
        with checkpoint.as_directory() as local:
            return torch.load(Path(local, "state.pt"))

    def killed_and_restarted(config):
        rank = ray.train.get_context().get_world_rank()
        checkpoint = ray.train.get_checkpoint()
        killed = rank == 1 and not checkpoint
        # a process, which must not outlive its parent
        loader = train_loader(num_workers=1 if killed else 0)
        training = Training(
            prepare_data_loader(loader), ray.train.torch.prepare_model(layer())
        )
        begun = training.restore(load(checkpoint)) if checkpoint else 0
        attempt = sum(
            Path(folder, f"attempt{number} rank{rank}.json").exists()
            for number in range(9)
        )

        def after_step(step):
            processes = [
                (each.pid, each.create_time())
                for each in psutil.Process().children(recursive=True)
            ]
            report = {
                "steps": training.steps,
                "weights": training.weights(),
                "processes": processes,
            }
            write(
                f"attempt{attempt} rank{rank}.json",
                **report,
                most=training.loader.dataset.most,
            )
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
            ("evaluation", Numbers(SAMPLES), {}),
            ("lines", hr.LinesDataset(pattern).split().map(int), {}),
            (
                "by engines on Ray",
                Numbers(SAMPLES),
                {"placement": hr.RayPlacement(cpus_per_engine=0.5)},
            ),
        ):
            with prepare_data_loader(
                hr.DataLoader(dataset, TRAIN_BATCH, transform=tenfold, **options)
            ) as loader:
                report[name] = flat(loader)
                report["placement"] = loader.stats().placement
        with prepare_data_loader(
            hr.DataLoader(Stream(41).split(), TRAIN_BATCH)
        ) as loader:  # not to be shared evenly
            report["steps of the stream"] = [len(list(loader)) for _ in range(EPOCHS)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rebuilt = ray.train.torch.prepare_data_loader(
                hr.DataLoader(Numbers(SAMPLES), transform=tenfold)
            )
            report["prepared by Ray"] = flat(rebuilt)
        report["warnings"] = [
            str(each.message) for each in caught if each.category is RuntimeWarning
        ]
        own = hr.DataLoader(
            Numbers(SAMPLES), sampler=hr.ElasticSampler(SAMPLES, seed=SEED)
        )
        assert prepare_data_loader(own) is own
        order = hr.DataLoader(Numbers(SAMPLES), sampler=[3, 1, 2])
        with pytest.raises(
            ValueError,
            match=r"list cannot be divided among them\. Give the loader a sampler",
        ):
            prepare_data_loader(order)
        assert prepare_data_loader(order, add_dist_sampler=False) is order
        write(f"others rank{rank}.json", **report)

    def on_one_worker(config):
        for name in ("middle", "end"):
            training = Training(prepare_data_loader(train_loader()), layer())
            begun = training.restore(load(Checkpoint(config[name])))
            for epoch in range(begun, EPOCHS):
                training.epoch(epoch)
            write(f"from {name}.json", steps=training.steps)

    assert not ray.is_initialized(), "an import started Ray"
    ray.init(address=address, log_to_driver=False)
    jobs = RunConfig(
        storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
    )
    workers = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    done = TorchTrainer(
        killed_and_restarted, scaling_config=workers, run_config=jobs
    ).fit()
    _, alive = psutil.wait_procs(list(reported_processes(folder)), timeout=20)
    TorchTrainer(
        on_one_worker,
        train_loop_config={
            name: str(Path(done.path, name)) for name in ("middle", "end")
        },
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=str(folder)),
    ).fit()
    ray.shutdown()
    return [str(each) for each in alive]
