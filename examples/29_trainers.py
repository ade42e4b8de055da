"""
Trainers: accelerate and Lightning
==================================

One loader, three loops: your own, accelerate's and Lightning's. What changes is one line each.

This page is not run when the site is built, since the trainers are not in its environment; a test
runs it::

    pip install accelerate lightning
    python examples/29_trainers.py
"""

# %%
# The loader
# ----------

import lightning
import torch
from accelerate import Accelerator

import headrace as hr
from headrace.integrations.accelerate import prepare


class Points(hr.AsyncDataset):
    """Stands for a bucket: points of a line."""

    def __len__(self):
        return 640

    async def aget(self, index):
        x = torch.tensor([index / 640])
        return x, 3 * x - 1


def make_loader():
    return hr.DataLoader(Points(), batch_size=32, shuffle=True, seed=0)


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


# %%
# Your own loop
# -------------


def own_loop():
    model, optimizer = make_model()
    with make_loader() as loader:
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
    return loss.item()


# %%
# accelerate
# ----------
# `accelerator.prepare` rebuilds every loader, without headrace's engine: give it to `prepare` of
# `headrace.integrations.accelerate` instead. It divides the batches over the ranks, and
# `accelerator.save_state` has the loader's position.


def with_accelerate():
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make_model())
    loader = prepare(accelerator, make_loader())
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    loader.close()
    return loss.item()


# %%
# Lightning
# ---------
# The Trainer takes the loader as it is. An installed headrace registers a callback, so that
# checkpoints have its position; from a source tree give it as
# ``callbacks=headrace.integrations.lightning.callbacks()``.


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.optimizer = make_model()

    def training_step(self, batch):
        x, y = batch
        self.loss = torch.nn.functional.mse_loss(self.model(x), y)
        return self.loss

    def configure_optimizers(self):
        return self.optimizer


def with_lightning():
    line = Line()
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(line, make_loader())
    return line.loss.item()


# %%
# One rank: all three end with the same loss, to the last bit.

if __name__ == "__main__":
    losses = {
        loop.__name__: loop() for loop in (own_loop, with_accelerate, with_lightning)
    }
    print(losses)
    assert len(set(losses.values())) == 1
