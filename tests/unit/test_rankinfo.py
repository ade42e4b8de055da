"""The rank of a process is found for each launcher, and an unknown one is an error."""

import os

import pytest
import torch
import torch.distributed

import headrace as hr
from tests.datasets import Numbers
from tests.unit.streams.reading import stream

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NAME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def set_all(monkeypatch, variables):
    for assignment in variables.split():
        monkeypatch.setenv(*assignment.split("="))


@pytest.mark.parametrize(
    ("variables", "rank", "world_size"),
    [
        ("", 0, 1),
        ("RANK=0", 0, 1),
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 NODE_RANK=0", 3, 4),
        ("RANK=3 WORLD_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=2", 3, 4),
        ("SLURM_PROCID=1 SLURM_NTASKS=2", 1, 2),
        (
            "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NAME=train",
            1,
            2,
        ),
        # The batch script, without srun.
        ("SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_NTASKS=4", 0, 1),
        (
            "SLURM_JOB_ID=9 SLURM_STEP_ID=4294967290 SLURM_JOB_NAME=interactive SLURM_PROCID=0 SLURM_NTASKS=4",
            0,
            1,
        ),
        (
            "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_JOB_NAME=bash SLURM_PROCID=0 SLURM_NTASKS=4",
            0,
            1,
        ),
        ("SLURM_JOB_ID=9 SLURM_NTASKS=4", 0, 1),  # salloc
        ("WORLD_SIZE=4 NODE_RANK=0 LOCAL_RANK=1", 1, 4),
        ("WORLD_SIZE=4 NODE_RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", 3, 4),
        ("WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", 1, 2),
    ],
)
def test_rank_is_found_in_environment(monkeypatch, variables, rank, world_size):
    set_all(monkeypatch, variables)
    info = hr.get_rank_info()
    assert (info.rank, info.world_size) == (rank, world_size)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("WORLD_SIZE=2", "has only WORLD_SIZE=2"),
        (
            "WORLD_SIZE=4 NODE_RANK=1 LOCAL_RANK=0",
            "has only WORLD_SIZE=4, NODE_RANK=1, LOCAL_RANK=0",
        ),
        ("WORLD_SIZE=2 RANK=2", "rank 2 is not one of 2"),
        ("WORLD_SIZE=two RANK=0", "WORLD_SIZE='two'"),
        ("RANK=1", "has only RANK=1"),
        ("SLURM_JOB_NAME=bash SLURM_PROCID=1 SLURM_NTASKS=2", "may be that of a shell"),
    ],
)
def test_unknown_rank_is_an_error_that_says_what_to_set(monkeypatch, variables, message):
    set_all(monkeypatch, variables)
    with pytest.raises(hr.errors.UnknownRankError, match=message) as caught:
        hr.get_rank_info()
    assert "Set RANK and WORLD_SIZE" in str(caught.value)


def test_loader_of_unknown_rank_raises_at_iter_and_not_before(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = hr.DataLoader(stream(*range(8)).split())
    with pytest.raises(hr.errors.UnknownRankError):
        iter(loader)


def test_process_group_comes_before_environment(monkeypatch):
    set_all(monkeypatch, "RANK=1 WORLD_SIZE=2")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        assert hr.get_rank_info() == hr.types.RankInfo(0, 1, "torch.distributed")
        assert hr.get_rank_info().source == "torch.distributed"
    finally:
        torch.distributed.destroy_process_group()


class Said(Numbers):
    """What `get_rank_info` answers in `aget`."""

    splits_by_rank = True

    async def aget(self, index):
        info = hr.get_rank_info()
        return info.rank, info.world_size, os.environ.get("RANK"), os.getpid()


@pytest.mark.parametrize(("placement", "num_workers"), [("thread", 0), ("process", 1)])
def test_rank_that_changes_between_epochs_reaches_the_engine(
    monkeypatch, placement, num_workers
):
    with hr.DataLoader(
        Said(1), placement=placement, num_workers=num_workers, collate_fn=_first
    ) as loader:
        assert next(iter(loader))[:2] == (0, 1)
        set_all(monkeypatch, "RANK=1 WORLD_SIZE=2")
        rank, world_size, in_environment, pid = next(iter(loader))
        assert (rank, world_size, in_environment) == (1, 2, "1")
        assert next(iter(loader))[3] == pid  # the same rank, the same engine


def _first(samples):
    return samples[0]
