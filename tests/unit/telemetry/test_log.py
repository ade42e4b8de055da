"""What a good run logs."""

import logging

import pytest

import headrace as hr


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 16

    async def aget(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers(), {}),
        (Numbers(), {"num_workers": 1, "transform": float}),
        (list(range(16)), {"num_workers": 1}),
    ],
)
def test_good_run_logs_one_record_for_an_epoch_at_debug_and_none_above(dataset, options, caplog):
    with caplog.at_level(logging.DEBUG), hr.DataLoader(dataset, 4, **options) as loader:
        for _ in range(2):
            assert len(list(loader)) == 4
        loader.report()
        loader.stats()
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    messages = [record.getMessage() for record in caplog.records if record.name.partition(".")[0] == "headrace"]
    assert [message.partition(",")[0] for message in messages] == [
        "epoch 0 begins with batch 0",
        "epoch 1 begins with batch 0",
    ]
