"""Lightning's Trainer in one process: what is kept of a loader, exact resume, evaluation, and what is left behind."""

import functools
import gc
import multiprocessing
import pickle
import threading
import warnings

import pytest
from torch.utils.data import DataLoader, DistributedSampler

import headrace as hr

pytest.importorskip(
    "lightning", reason="lightning is not installed: make test-integrations"
)

from lightning.fabric.utilities import data
from lightning.pytorch import callbacks

from tests.faults import watching
from tests.integrations import lightning_jobs as jobs
from tests.integrations.common import Numbers, TorchNumbers, flat, tenfold

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning",
    "ignore::FutureWarning:lightning",
    "ignore:TorchStream has no state_dict",
)
LINES = jobs.SAMPLES
TRAINER = "Lightning Trainer"
TENFOLD = [10 * number for number in range(jobs.SAMPLES)]


@pytest.mark.proves(TRAINER, "transform is applied once")
def test_transform_is_applied_once_by_a_rebuilt_loader_with_another_sampler():
    loader = hr.DataLoader(
        Numbers(12), batch_size=4, shuffle=True, seed=5, transform=tenfold
    )
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=1, shuffle=False)
    again = data._update_dataloader(loader, sampler)
    assert type(again) is hr.DataLoader
    with again:
        assert flat(again) == [10, 30, 50, 70, 90, 110]


def check_resumed(whole, resumed, step):
    assert resumed["seen"] == whole["seen"][step:]
    assert resumed["weight"] == whole["weight"]


@pytest.mark.proves(
    TRAINER,
    "exact resume in mid-epoch",
    "resume at the end of an epoch",
    "another order in each epoch",
)
@pytest.mark.proves(TRAINER, "equal weights after an interruption")
@pytest.mark.parametrize("kind", jobs.KINDS)
def test_job_resumed_after_any_batch_or_an_epoch_goes_on_as_if_it_had_not_stopped(
    kind, tmp_path, pattern
):
    make = jobs.KINDS[kind]
    saves = jobs.each_step(tmp_path), {"dirpath": tmp_path, "filename": "{epoch}"}
    whole = jobs.train(make(pattern), saves=saves)
    of_epoch = len(whole["seen"]) // jobs.EPOCHS
    if kind != "torch's stream":
        orders = [batches for _, batches in whole["seen"][::of_epoch]]
        assert orders[0] != orders[1] != orders[2] != orders[0]
    points = {
        f"step={step}": step
        for step in (1, of_epoch - 1, of_epoch, 2 * of_epoch - 2, 2 * of_epoch)
    }
    points |= {f"epoch={epoch}": (epoch + 1) * of_epoch for epoch in (0, 1)}
    for name, step in points.items():
        check_resumed(
            whole, jobs.train(make(pattern), resume=tmp_path / f"{name}.ckpt"), step
        )
    longer = jobs.train(make(pattern), epochs=4)
    check_resumed(
        longer,
        jobs.train(make(pattern), epochs=4, resume=tmp_path / "epoch=2.ckpt"),
        3 * of_epoch,
    )


class Estimating(jobs.Model):
    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


OPTIONS_OF_TRAINERS = {
    "limit_train_batches": ("unknown length", {"limit_train_batches": 3}),
    "max_steps": ("unknown length", {"max_steps": 13, "epochs": -1}),
    "validation": ("seeded", {"validation": True, "val_check_interval": 2}),
    "validation at the end": ("unknown length", {"validation": True}),
    "estimated_stepping_batches": ("unknown length", {"model": Estimating}),
}


@pytest.mark.proves(TRAINER, "exact resume in mid-epoch", "resume at the end of an epoch")
@pytest.mark.parametrize(
    ("kind", "options"), OPTIONS_OF_TRAINERS.values(), ids=OPTIONS_OF_TRAINERS
)
def test_resumed_job_is_exact_with_options_of_the_trainer(
    kind, options, tmp_path, pattern
):
    make, options = jobs.KINDS[kind], dict(options)
    model = options.pop("model", jobs.Model)
    if options.pop("validation", False):
        options["validation"] = hr.DataLoader(Numbers(16), 8)
        saves = [{"save_on_train_epoch_end": False}]  # after each validation
    else:
        saves = [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}]
    folders = [tmp_path / f"checkpoints{number}" for number in range(len(saves))]
    saves = [
        {**save, "dirpath": folder, "filename": "{step}"}
        for save, folder in zip(saves, folders, strict=True)
    ]
    whole = jobs.train(make(pattern), saves=saves, model=model(), **options)
    for path in (path for folder in folders for path in sorted(folder.iterdir())[::3]):
        resumed = jobs.train(make(pattern), resume=path, model=model(), **options)
        check_resumed(whole, resumed, int(path.stem.removeprefix("step=")))


@pytest.mark.proves(TRAINER, "exact resume in mid-epoch")
def test_gradients_accumulate_over_the_same_batches_after_a_resume(tmp_path, pattern):
    make = jobs.KINDS["seeded"]
    whole = jobs.train(
        make(pattern), saves=[jobs.each_step(tmp_path)], accumulate_grad_batches=2
    )
    # Of 5 batches the last is a step by itself.
    for step, batch in ((2, 4), (3, 5), (4, 7)):
        resumed = jobs.train(
            make(pattern),
            resume=tmp_path / f"step={step}.ckpt",
            accumulate_grad_batches=2,
        )
        check_resumed(whole, resumed, batch)


@pytest.mark.proves(TRAINER, "equal weights after an interruption")
def test_checkpoint_of_an_exception_begins_with_the_batch_that_failed(tmp_path, pattern):
    make, stop = jobs.KINDS["unknown length"], functools.partial(jobs.raises_at, 7)
    whole = jobs.train(make(pattern))
    saving = [callbacks.OnExceptionCheckpoint(tmp_path, "failed")]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        jobs.train(make(pattern), stop=stop, callbacks=saving, enable_checkpointing=True)
    check_resumed(whole, jobs.train(make(pattern), resume=tmp_path / "failed.ckpt"), 7)


class TwoBatches(jobs.Model):
    """A step takes two batches itself."""

    def training_step(self, dataloader_iter):
        return super().training_step(
            [next(dataloader_iter)[0], next(dataloader_iter)[0]], None
        )


def test_job_whose_steps_take_several_batches_continues_with_the_remaining_samples(
    tmp_path, pattern
):
    loader, saves = jobs.of_lines(pattern, shuffle=True), [jobs.each_step(tmp_path)]
    with pytest.warns(UserWarning, match="training_step takes dataloader_iter"):
        whole = jobs.train(loader, model=TwoBatches(), saves=saves)
    for epoch in range(jobs.EPOCHS):
        assert (
            sorted(flat(batch for number, batch in whole["seen"] if number == epoch))
            == TENFOLD
        )
    for step in (2, 5, 7):
        resumed = jobs.train(
            loader, model=TwoBatches(), resume=tmp_path / f"step={step}.ckpt"
        )
        check_resumed(whole, resumed, step)


def test_checkpoint_without_a_state_of_the_loader_is_a_warning(tmp_path):
    jobs.train(
        DataLoader(TorchNumbers(40), 8), saves=[jobs.each_step(tmp_path)], epochs=1
    )
    with pytest.warns(
        UserWarning,
        match="saved after batch 2 of an epoch, and has no state of this loader",
    ):
        jobs.train(
            hr.DataLoader(TorchNumbers(40), 8), resume=tmp_path / "step=2.ckpt", epochs=1
        )


@pytest.mark.proves(TRAINER, "headrace fetches", "nothing left behind")
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"placement": "process"}], ids=str
)
def test_nothing_is_left_after_fit(options):
    with hr.DataLoader(
        Numbers(8), num_workers=1
    ) as other:  # starts the process that workers are forked from
        list(other)
    gc.collect()
    before = set(threading.enumerate())
    children = watching.children()
    dataset = Numbers(jobs.SAMPLES)
    loader = hr.DataLoader(
        dataset, 8, shuffle=True, seed=5, concurrency=3, transform=tenfold, **options
    )
    result = jobs.train(
        loader, validation=hr.DataLoader(Numbers(jobs.SAMPLES), 8), epochs=2
    )
    assert (
        sorted(
            sample for epoch, batch in result["seen"] if epoch == 1 for sample in batch
        )
        == TENFOLD
    )
    assert options or dataset.most == 3
    assert [thread.name for thread in set(threading.enumerate()) - before] == []
    assert watching.children() == children
    assert not multiprocessing.active_children()


@pytest.mark.proves(TRAINER, "evaluation")
def test_evaluation_reads_each_sample_once():
    evaluation = [jobs.map_style(8), hr.DataLoader(TorchNumbers(jobs.SAMPLES), 8)]
    model, trainer = (
        Several(),
        jobs.trainer_of(num_sanity_val_steps=2, val_check_interval=2),
    )
    trainer.fit(model, jobs.KINDS["seeded"](""), jobs.map_style(8))
    for epoch in range(jobs.EPOCHS):
        validated = [
            sample
            for number, batch in model.validated
            if number == epoch
            for sample in batch
        ]
        assert sorted(validated) == sorted(2 * TENFOLD)
    trainer.callbacks.append(Indices("batch"))
    trainer.predict(model, evaluation[0], return_predictions=False)
    assert trainer.callbacks.pop().indices == list(range(jobs.SAMPLES))
    assert [flat(part) for part in trainer.predict(model, evaluation)] == [
        TENFOLD,
        list(range(jobs.SAMPLES)),
    ]
    trainer.test(model, evaluation, verbose=False)
    assert model.tested == TENFOLD + list(range(jobs.SAMPLES))


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
    def trained(**how):
        validation = jobs.map_style(8, shuffle=True, seed=3)
        options = {
            "limit_val_batches": 2,
            "num_sanity_val_steps": 1,
            "validation": validation,
            **how,
        }
        return jobs.train(jobs.KINDS["seeded"](""), **options)["validated"]

    with warnings.catch_warnings(action="ignore"):  # Lightning's: it is shuffled
        whole = trained(saves=[{"dirpath": tmp_path, "filename": "{epoch}"}])
        assert trained(resume=tmp_path / "epoch=0.ckpt") == whole[2:]
    assert whole[0][1] != whole[2][1]


def test_loaders_made_anew_for_each_epoch_have_other_orders():
    class Reloading(jobs.Model):
        def train_dataloader(self):
            return jobs.KINDS["seeded"]("")

    seen = jobs.train(None, model=Reloading(), reload_dataloaders_every_n_epochs=1)[
        "seen"
    ]
    assert seen == jobs.train(jobs.KINDS["seeded"](""))["seen"]


def test_callback_is_sent_to_the_processes_that_lightning_spawns():
    (made,) = [
        each for each in jobs.trainer_of().callbacks if type(each).__name__ == "Positions"
    ]
    (sent,) = pickle.loads(pickle.dumps([made]))
    assert isinstance(sent, callbacks.Callback)
    assert type(sent).__name__ == "Positions"
