"""The programs of docs/trainers.md, and of others that need what `make test` does not install."""

import numpy as np
import pytest
from PIL import Image

from tests.documents import ROOT, python_blocks

IMPORTS = (
    "accelerate",
    "lightning",
    "transformers.trainer",
    "torchtitan.components.dataloader",
)
for package in (
    "lightning",
    "accelerate",
    "transformers",
    "ray",
    "torchtitan",
    "webdataset",
):
    pytest.importorskip(
        package, reason=f"{package} is not installed: make test-integrations"
    )

LIGHTNING, ACCELERATE, TRANSFORMERS, RAY, TORCHTITAN, WEBDATASET = python_blocks(
    "docs/trainers.md"
)
*_, RAY_ENGINES = python_blocks("docs/ranks.md")

DATASET = """
import headrace as hr
import torch

seen = []

class Pairs(hr.AsyncDataset):
    def __len__(self):
        return 64

    async def aget(self, index):
        seen.append(index)
        return torch.tensor([float(index)]), torch.tensor([float(index)])

dataset = Pairs()
"""


@pytest.fixture
def run(launcher, tmp_path):
    """Run a program between two texts, with some of its words changed; returns the indices that it has seen."""

    def run(before, program, after="", *changes):
        for old, new in changes:
            assert program.count(old) == 1, f"{old!r} is not in the program once"
            program = program.replace(old, new)
        source = "\n".join((DATASET, before, program, after))

        def main(folder=str(tmp_path), source=source):
            import os
            import warnings

            os.chdir(folder)
            warnings.simplefilter("ignore")
            names = {"__name__": "__main__"}
            exec(compile(source, "docs/trainers.md", "exec"), names)
            return sorted(set(names["seen"]))

        return launcher.run(main)[0]

    return run


def test_lightning_program_runs(run):
    before = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

def augment(sample):
    return sample

model = Model()
"""
    change = (
        "devices=8",
        "accelerator='cpu', devices=1, max_epochs=1, logger=False, enable_progress_bar=False",
    )
    assert run(before, LIGHTNING, "loader.close()", change) == list(range(64))


def test_accelerate_program_runs(run, tmp_path):
    before = """
epochs = 1
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
"""
    change = "Accelerator(gradient", "Accelerator(cpu=True, gradient"
    assert run(before, ACCELERATE, "accelerator.end_training()", change) == list(
        range(64)
    )
    assert (tmp_path / "checkpoint").is_dir()


def test_transformers_program_runs(run, tmp_path):
    for name in ("images", "validation"):
        (tmp_path / name).mkdir()
        for number in range(8):
            (tmp_path / name / f"{number}.txt").write_text(str(number))
    before = """
import transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, **others):
        seen.extend(x.tolist())
        return {"loss": (self.weight * x.float()).mean()}

def decode(sample):
    return {"x": int(bytes(sample.data))}

model = Model()
"""
    changes = [
        ("s3://bucket/images/", f"{tmp_path}/images/"),
        ("s3://bucket/validation/", f"{tmp_path}/validation/"),
        (
            "dataloader_num_workers=4",
            "num_train_epochs=1, use_cpu=True, report_to=[], disable_tqdm=True",
        ),
        # There is none yet.
        ("resume_from_checkpoint=True", "resume_from_checkpoint=None"),
    ]
    assert run(before, TRANSFORMERS, "", *changes) == list(range(8))


def test_ray_program_runs(run):
    before = """
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def build_model():
    return torch.nn.Linear(1, 1)
"""
    after = """
TorchTrainer(
    train,
    train_loop_config={},
    scaling_config=ScalingConfig(num_workers=0),  # in this process
    run_config=RunConfig(storage_path=os.getcwd()),
).fit()
"""
    assert run(before, RAY, after, ("step % 1000 == 999", "step % 2 == 1")) == list(
        range(64)
    )


def test_program_with_engines_on_ray_runs(run, tmp_path):
    for number in range(8):
        (tmp_path / f"{number}").mkdir()
        Image.new("RGB", (12, 10)).save(tmp_path / f"{number}/photo.jpg")
    changes = [
        ('address="auto"', "num_cpus=2, include_dashboard=False"),
        ("s3://bucket/train", f"{tmp_path}"),
        ("engines=16, cpus_per_engine=8", "engines=1, cpus_per_engine=1"),
        ("num_workers=128", "num_workers=1"),
        ("print(labels.tolist())", "seen.extend(labels.tolist())"),
    ]
    assert run("", RAY_ENGINES, "loader.close()\nray.shutdown()", *changes) == list(
        range(8)
    )


TOKENS = """
import numpy

numpy.arange(8 * 4 + 1, dtype="uint16").tofile("tokens.bin")
"""


def test_torchtitan_program_runs(run):
    after = """
run = dict(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=8, local_batch_size=2)
loader = Tokens.Config(url="tokens.bin").build(**run, snapshot_every_n_steps=None)
for inputs, labels in itertools.islice(loader, 4):
    assert torch.equal(inputs["input"] + 1, labels)
    assert inputs["positions"].tolist() == [[*range(8)]] * 2
    assert labels.shape == (2, 8)
    seen += labels.flatten().tolist()
loader.close()
validation = Tokens.Config(url="tokens.bin", infinite=False).build(**run)
assert len([*validation]) == 2
validation.close()
"""
    assert run(TOKENS, TORCHTITAN, "import itertools" + after) == [*range(1, 33)]


def test_torchtitan_program_runs_with_the_arguments_and_batches_of_the_main_branch(run):
    """As docs/trainers.md describes; `BaseDataLoader` and `Config.build` are those of the release."""
    changes = [
        ("seq_len, local_batch_size,", "max_context_length, num_tokens_per_batch,"),
        ("seq_len=seq_len + 1, stride=seq_len", "seq_len=max_context_length + 1, stride=max_context_length"),
        ("dataset, local_batch_size", "dataset, num_tokens_per_batch // max_context_length"),
        ('"input": inputs,', '"input": inputs.flatten(),'),
        ('"positions": positions}, labels', '"positions": positions.flatten()}, labels.flatten()'),
        ("infinite: bool", "repeat: bool"),
        ("config.infinite", "config.repeat"),
    ]  # fmt: skip
    after = """
run = dict(dp_world_size=2, dp_rank=1, tokenizer=None, max_context_length=8, num_tokens_per_batch=16)
loader = Tokens.Config(url="tokens.bin", repeat=False).build(**run)
for inputs, labels in loader:
    assert torch.equal(inputs["input"] + 1, labels)
    assert inputs["positions"].tolist() == [*range(8)] * 2
    assert labels.shape == (16,)
    seen += labels.tolist()
loader.close()
"""
    assert len(run(TOKENS, TORCHTITAN, after, *changes)) == 16


def test_webdataset_program_runs(run):
    before = """
import io
import tarfile
import webdataset

for shard in range(2):
    with tarfile.open(f"{shard}.tar", "w") as tar:
        for number in range(4):
            member = tarfile.TarInfo(f"{4 * shard + number}.txt")
            tar.addfile(member, io.BytesIO(b""))
"""
    after = """
with hr.DataLoader(Shards("{0..1}.tar", shardshuffle=2, detshuffle=True), batch_size=None) as loader:
    seen += [int(sample["__key__"]) for sample in loader]
"""
    assert run(before, WEBDATASET, after) == list(range(8))


def test_example_of_trainers_ends_with_the_loss_of_a_plain_loop_in_each(launcher):
    def main(path=str(ROOT / "examples/29_trainers.py")):
        import runpy
        import warnings

        warnings.simplefilter("ignore")
        return runpy.run_path(path, run_name="__main__")["losses"]

    assert len(set(launcher.run(main)[0].values())) == 1


def test_image_and_mask_of_the_page_of_validation_are_cropped_alike(launcher, tmp_path):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(8):
        left = np.indices((100, 120))[1] < 50 + number
        Image.fromarray(left.astype(np.uint8) * 200).save(
            tmp_path / f"images/{number}.jpg"
        )
        mask = Image.fromarray(left.astype(np.uint8), "P")
        mask.putpalette([0, 0, 0, 200, 0, 0])
        mask.save(tmp_path / f"masks/{number}.png")
    _, source, _ = python_blocks("docs/train-and-validate.md")
    for name in ("images", "masks"):
        assert f"s3://bucket/{name}" in source
        source = source.replace(f"s3://bucket/{name}", str(tmp_path / name))

    def main(source=source):
        names = {"__name__": "__main__"}
        exec(compile(source, "docs/train-and-validate.md", "exec"), names)
        bright = names["images"].mean(1) > 0.4
        return (bright == names["classes"].bool()).float().mean().item()

    assert launcher.run(main)[0] > 0.98
