"""A program: Ray Train prepares headrace loaders on two workers; prints each worker's samples as JSON."""

import json
import os
import sys
import warnings
from pathlib import Path

import ray
import torch.distributed
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader

import headrace as hr


def tenfold(sample):
    return sample * 10


def read(config):
    class Numbers(hr.AsyncDataset):
        def __len__(self):
            return 40

        async def aget(self, index):
            return index

    class DuckStream:
        async def __aiter__(self):
            info = hr.get_rank_info()
            for number in range(info.rank, 40, info.world_size):
                yield number

    warnings.simplefilter("ignore")
    report = {}
    lines = hr.LinesDataset(config["lines"], split="samples").map(int)
    for name, dataset, shuffle in (("map", Numbers(), True), ("duck", DuckStream(), None), ("lines", lines, None)):
        loader = prepare_data_loader(hr.DataLoader(dataset, batch_size=4, shuffle=shuffle, transform=tenfold))
        report[name] = [None, None]
        torch.distributed.all_gather_object(report[name], [number for batch in loader for number in batch.tolist()])
    if torch.distributed.get_rank() == 0:
        Path(config["report"]).write_text(json.dumps(report))


def main(lines, report):
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=80_000_000)
    TorchTrainer(
        read,
        train_loop_config={"lines": lines, "report": report},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=os.path.dirname(report)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
