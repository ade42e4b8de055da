"""Lightning's Trainer in one process: what is kept of a loader, exact resume, evaluation, and what is left behind."""

import gc
import multiprocessing
import threading
import warnings

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

import headrace as hr
from headrace.options import OPTIONS

pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")

from lightning.fabric.utilities import data
from lightning.pytorch import callbacks

from tests.integrations import lightning_jobs as jobs

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore::FutureWarning:lightning", "ignore:PlainStream has no state_dict"
)
TRAINER = "Lightning Trainer"
EPOCH = 5  # batches
TENFOLD = [10 * number for number in range(jobs.SAMPLES)]


class DuckStream:
    async def __aiter__(self):
        for number in range(12):
            yield number


class OnDevice(hr.DataLoader):
    """Takes any option, and has attributes of its own that are named like options."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.device = "cuda:7"


def numbers(loader):
    with loader:
        return [number for batch in loader for number in batch.tolist()]


@pytest.mark.proves(TRAINER, "transform is applied once")
@pytest.mark.parametrize("kind", [hr.DataLoader, OnDevice])
def test_transform_is_applied_once_by_a_rebuilt_loader_with_another_sampler(kind):
    loader = kind(jobs.Numbers(12), batch_size=4, shuffle=True, seed=5, transform=jobs.tenfold)
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=1, shuffle=False)
    again = data._update_dataloader(loader, sampler)
    assert type(again) is kind
    assert numbers(again) == [10, 30, 50, 70, 90, 110]


def test_rebuilt_loader_keeps_every_option():
    others = {
        "transform": jobs.tenfold, "concurrency": 3, "memory_budget": 1 << 20, "placement": "process", "retry": 2,
        "on_error": "skip", "hedge": "auto", "executor": "thread", "seed": 5, "device": "cpu", "device_prefetch": 1,
        "coordinated": True, "engines": 2,
    }  # fmt: skip
    assert others.keys() | {"data_parallel"} == OPTIONS.keys()  # which needs a process group
    loader = hr.DataLoader(jobs.Numbers(), batch_size=4, num_workers=2, **others)
    again = data._update_dataloader(loader, SequentialSampler(loader.dataset))
    assert again._control.spec.options == loader._control.spec.options


def test_stream_without_base_class_is_an_iterable_dataset():
    loader = hr.DataLoader(DuckStream(), batch_size=4, transform=jobs.tenfold)
    assert data.has_iterable_dataset(loader)
    again = data._update_dataloader(loader, loader.sampler)
    assert isinstance(again.dataset, IterableDataset)
    assert numbers(again) == numbers(loader) == list(range(0, 120, 10))


def check_resumed(whole, resumed, step):
    assert resumed["seen"] == whole["seen"][step:]
    assert resumed["weight"] == whole["weight"]


@pytest.mark.proves(TRAINER, "exact resume in mid-epoch", "equal weights after an interruption")
@pytest.mark.parametrize("kind", jobs.KINDS)
def test_job_resumed_after_any_batch_goes_on_as_if_it_had_not_stopped(kind, tmp_path):
    make = jobs.KINDS[kind]
    save = {"dirpath": tmp_path / "checkpoints", "every_n_train_steps": 1, "filename": "{step}"}
    whole = jobs.train(make(tmp_path / "lines"), save=save)
    of_epoch = len(whole["seen"]) // jobs.EPOCHS
    for step in (1, of_epoch - 1, of_epoch, 2 * of_epoch - 2, 2 * of_epoch):
        resumed = jobs.train(make(tmp_path / "lines"), resume=tmp_path / "checkpoints" / f"step={step}.ckpt")
        check_resumed(whole, resumed, step)


@pytest.mark.proves(TRAINER, "resume at the end of an epoch", "another order in each epoch")
@pytest.mark.parametrize("kind", ["seeded", "generator", "unknown length", "max_size_cycle"])
def test_job_resumed_after_an_epoch_begins_the_next_one(kind, tmp_path):
    make = jobs.KINDS[kind]
    save = {"dirpath": tmp_path / "checkpoints", "save_last": True, "filename": "{epoch}"}
    whole = jobs.train(make(tmp_path / "lines"), save=save)
    orders = [batches for _, batches in whole["seen"][::EPOCH]]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for epoch in (0, 1):
        path = tmp_path / "checkpoints" / f"epoch={epoch}.ckpt"
        check_resumed(whole, jobs.train(make(tmp_path / "lines"), resume=path), (epoch + 1) * EPOCH)
    longer = jobs.train(make(tmp_path / "lines"), epochs=4)
    resumed = jobs.train(make(tmp_path / "lines"), epochs=4, resume=tmp_path / "checkpoints" / "last.ckpt")
    check_resumed(longer, resumed, 3 * EPOCH)


class Estimating(jobs.Model):
    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


OPTIONS_OF_TRAINERS = {
    "limit_train_batches": ("unknown length", {"limit_train_batches": 3}),
    "max_steps": ("unknown length", {"max_steps": 13, "epochs": -1}),
    "validation": ("seeded", {"validation": True, "val_check_interval": 2}),
    "validation at the end": ("unknown length", {"validation": True}),
    "reload": ("seeded", {"reload_dataloaders_every_n_epochs": 1}),
    "estimated_stepping_batches": ("unknown length", {"model": Estimating}),
}


@pytest.mark.proves(TRAINER, "exact resume in mid-epoch", "resume at the end of an epoch")
@pytest.mark.parametrize(("kind", "options"), OPTIONS_OF_TRAINERS.values(), ids=OPTIONS_OF_TRAINERS)
def test_resumed_job_is_exact_with_options_of_the_trainer(kind, options, tmp_path):
    make, options = jobs.KINDS[kind], dict(options)
    model = options.pop("model", jobs.Model)
    if options.pop("validation", False):
        options["validation"] = hr.DataLoader(jobs.Numbers(16), 8)
        saves = [{"save_on_train_epoch_end": False}]  # after each validation
    else:
        saves = [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}]
    for number, save in enumerate(saves):
        folder = tmp_path / f"checkpoints{number}"
        save = {**save, "dirpath": folder, "filename": "{step}"}
        whole = jobs.train(make(tmp_path / "lines"), save=save, model=model(), **options)
        for path in sorted(folder.iterdir())[::3]:
            resumed = jobs.train(make(tmp_path / "lines"), resume=path, model=model(), **options)
            check_resumed(whole, resumed, int(path.stem.removeprefix("step=")))


@pytest.mark.proves(TRAINER, "exact resume in mid-epoch")
def test_gradients_accumulate_over_the_same_batches_after_a_resume(tmp_path):
    make = jobs.KINDS["seeded"]
    save = {"dirpath": tmp_path, "every_n_train_steps": 1, "filename": "{step}"}
    whole = jobs.train(make(tmp_path), save=save, accumulate_grad_batches=2)
    for step, batch in ((2, 4), (3, 5), (4, 7)):  # of 5 batches the last is a step by itself
        resumed = jobs.train(make(tmp_path), resume=tmp_path / f"step={step}.ckpt", accumulate_grad_batches=2)
        check_resumed(whole, resumed, batch)


def test_resumed_job_can_be_resumed(tmp_path):
    make = jobs.KINDS["unknown length"]
    save = {"dirpath": tmp_path / "first", "every_n_train_steps": 2, "filename": "{step}"}
    whole = jobs.train(make(tmp_path / "lines"), save=save)
    again = {**save, "dirpath": tmp_path / "second"}
    jobs.train(make(tmp_path / "lines"), resume=tmp_path / "first" / "step=2.ckpt", save=again)
    for step in (4, 8):
        resumed = jobs.train(make(tmp_path / "lines"), resume=tmp_path / "second" / f"step={step}.ckpt")
        check_resumed(whole, resumed, step)


@pytest.mark.proves(TRAINER, "equal weights after an interruption")
def test_checkpoint_of_an_exception_begins_with_the_batch_that_failed(tmp_path):
    make = jobs.KINDS["unknown length"]
    whole = jobs.train(make(tmp_path / "lines"))
    saving = [callbacks.OnExceptionCheckpoint(tmp_path, "failed")]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        jobs.train(make(tmp_path / "lines"), stop=jobs.raises_at(7), callbacks=saving, enable_checkpointing=True)
    check_resumed(whole, jobs.train(make(tmp_path / "lines"), resume=tmp_path / "failed.ckpt"), 7)


def test_checkpoint_without_a_state_of_the_loader_is_a_warning(tmp_path):
    save = {"dirpath": tmp_path, "every_n_train_steps": 1, "filename": "{step}"}
    jobs.train(DataLoader(jobs.PlainNumbers(), 8), save=save, epochs=1)
    with pytest.warns(UserWarning, match="saved after batch 2 of an epoch, and has no state of this loader"):
        jobs.train(hr.DataLoader(jobs.PlainNumbers(), 8), resume=tmp_path / "step=2.ckpt", epochs=1)


@pytest.mark.proves(TRAINER, "headrace fetches", "nothing left behind")
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"placement": "process"}], ids=str)
def test_nothing_is_left_after_fit(options):
    with hr.DataLoader(jobs.Numbers(), 8, num_workers=1) as other:  # starts the process that workers are forked from
        list(other)
    gc.collect()
    before = set(threading.enumerate())
    children = set(children_of_this())
    dataset = jobs.Numbers()
    loader = hr.DataLoader(dataset, 8, shuffle=True, seed=5, concurrency=3, transform=jobs.tenfold, **options)
    result = jobs.train(loader, validation=hr.DataLoader(jobs.Numbers(), 8), epochs=2)
    assert sorted(sample for epoch, batch in result["seen"] if epoch == 1 for sample in batch) == TENFOLD
    assert options or dataset.most == 3
    assert [thread.name for thread in set(threading.enumerate()) - before] == []
    assert set(children_of_this()) <= children
    assert not multiprocessing.active_children()


def children_of_this():
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return file.read().split()


@pytest.mark.proves(TRAINER, "evaluation")
def test_evaluation_reads_each_sample_once(tmp_path):
    model = jobs.Model()
    evaluation = [hr.DataLoader(jobs.Numbers(), 8, transform=jobs.tenfold), hr.DataLoader(jobs.PlainNumbers(), 8)]
    loader = jobs.KINDS["seeded"](tmp_path)
    validation = hr.DataLoader(jobs.Numbers(), 8, transform=jobs.tenfold)
    trainer = jobs.train(loader, validation=validation, model=model, num_sanity_val_steps=2, val_check_interval=2)[
        "trainer"
    ]
    for epoch in range(jobs.EPOCHS):
        validated = [sample for number, batch in model.validated if number == epoch for sample in batch]
        assert sorted(validated) == sorted(2 * TENFOLD)
    predicted = trainer.predict(Several(), evaluation)
    trainer.callbacks.append(Indices("batch"))
    trainer.predict(Several(), evaluation[0], return_predictions=False)
    assert trainer.callbacks.pop().indices == list(range(jobs.SAMPLES))
    flat = [[sample for batch in part for sample in batch.tolist()] for part in predicted]
    assert flat == [TENFOLD, list(range(jobs.SAMPLES))]
    tested = Several()
    trainer.test(tested, evaluation, verbose=False)
    assert tested.tested == TENFOLD + list(range(jobs.SAMPLES))


class Indices(callbacks.BasePredictionWriter):
    indices = ()

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, *_):
        self.indices = [*self.indices, *batch_indices]


class Several(jobs.Model):
    """Of several loaders."""

    def predict_step(self, batch, _, dataloader_idx=0):
        return batch

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.tested = [*getattr(self, "tested", []), *batch.tolist()]


def test_shuffled_validation_has_the_order_of_the_epoch_also_after_a_resume(tmp_path):
    def validation():
        return hr.DataLoader(jobs.Numbers(), 8, shuffle=True, seed=3)

    save = {"dirpath": tmp_path, "filename": "{epoch}"}
    options = {"limit_val_batches": 2, "num_sanity_val_steps": 1}
    with warnings.catch_warnings(action="ignore"):  # Lightning's: it is shuffled
        whole = jobs.train(jobs.KINDS["seeded"](tmp_path), validation=validation(), save=save, **options)
        path = tmp_path / "epoch=0.ckpt"
        resumed = jobs.train(jobs.KINDS["seeded"](tmp_path), validation=validation(), resume=path, **options)
    assert resumed["validated"] == whole["validated"][2:]
    assert whole["validated"][0][1] != whole["validated"][2][1]


def test_overfit_batches_gives_the_same_batches_in_each_epoch(tmp_path):
    seen = jobs.train(jobs.KINDS["seeded"](tmp_path), overfit_batches=2)["seen"]
    assert [batch for _, batch in seen] == jobs.EPOCHS * [TENFOLD[:8], TENFOLD[8:16]]


def test_job_that_stops_early_leaves_a_loader_that_can_be_read_again(tmp_path):
    loader = jobs.KINDS["seeded"](tmp_path)
    model = Early()
    jobs.train(loader, model=model, callbacks=[callbacks.EarlyStopping("loss", patience=1)], epochs=9)
    assert len(model.seen) < 9 * EPOCH
    assert sorted(numbers(loader)) == TENFOLD


class Early(jobs.Model):
    def training_step(self, batch, number):
        self.log("loss", 1.0)
        return super().training_step(batch, number)


def test_loaders_made_anew_for_each_epoch_have_other_orders(tmp_path):
    class Reloading(jobs.Model):
        def train_dataloader(self):
            return jobs.KINDS["seeded"](tmp_path)

    seen = jobs.train(None, model=Reloading(), reload_dataloaders_every_n_epochs=1)["seen"]
    once = jobs.train(jobs.KINDS["seeded"](tmp_path))["seen"]
    assert seen == once
