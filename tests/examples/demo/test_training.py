"""Training with `for`, evaluation with `async for`, and how the data's flow is measured."""

import torch
from torch import nn

import headrace as hr
from demo.flow import Flow, FlowMeter
from demo.training import Trainer, accuracy_of


class Stripes(hr.AsyncDataset):
    """Pictures that a glance tells apart: the row `label` is bright."""

    def __len__(self):
        return 80

    async def aget(self, index):
        picture = torch.zeros(1, 8, 8)
        picture[0, index % 8] = 1
        return picture, index % 8


class FirstBrightRow(nn.Module):
    def forward(self, pictures):
        logits = torch.zeros(len(pictures), 10)
        logits[:, :8] = pictures[:, 0, :, 0]
        return logits


def test_training_lowers_the_loss_and_reports_each_batch():
    flows: list[Flow] = []
    with hr.DataLoader(Stripes(), batch_size=16, shuffle=True, seed=0) as loader:
        trainer = Trainer(loader, epochs=5, seed=0)
        losses = [trainer.epoch(flows.append)[0] for _ in range(5)]
    assert losses[-1] < losses[0] / 2
    assert [flow.batches for flow in flows] == [1, 2, 3, 4, 5] * 5
    assert [flow.samples for flow in flows[-5:]] == [16, 32, 48, 64, 80]


async def test_accuracy_is_the_share_of_right_answers():
    with hr.DataLoader(Stripes(), batch_size=16) as loader:
        assert await accuracy_of(FirstBrightRow(), loader) == 1.0

    class Never(FirstBrightRow):
        def forward(self, pictures):
            return -super().forward(pictures)

    with hr.DataLoader(Stripes(), batch_size=16) as loader:
        assert await accuracy_of(Never(), loader) == 0.0


def test_a_meter_counts_from_when_it_was_made():
    with hr.DataLoader(Stripes(), batch_size=16) as loader:
        list(loader)
        meter = FlowMeter(loader)
        assert (meter.read().batches, meter.read().samples) == (0, 0)
        list(loader)
        flow = meter.read()
    assert (flow.batches, flow.samples) == (5, 80)
    assert 0 <= flow.wait_seconds <= flow.seconds
