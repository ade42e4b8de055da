"""Coordinated loaders on real gloo ranks: every rank makes the same number of steps, and none is left waiting."""

from pathlib import Path

import pytest

import headrace as hr
from tests.ranks import jobs

JOB = Path(__file__).parent / "coordinated_job.py"
STEPS = {
    "filter": [1, 1],  # batches of 4, of the rank of which the filter leaves least
    "none on a rank": [0, 0],
    "thread": [5, 5],
    "in the order of completion": [5, 5],
    "process": [5, 5],
    "torch, inline": [5, 5],
    "torch, workers": [5, 5],
    "no length": [5, 5],
    "on the device": [5, 5],
    "async for": [5, 5],
    "task runs": 5,
    "skipped": [2, 2],  # of the five steps of rank 1 without those that a rank has lost
    "break": [3, 5],
    "close": [5],
    "resumed": [3, 2, 5],
}


@pytest.fixture(scope="module")
def ranks(forks):
    return jobs.outputs(forks, JOB, 2)


def test_ranks_make_as_many_steps_as_the_one_with_the_fewest_batches(ranks):
    for rank in ranks:
        assert {name: rank[name] for name in STEPS} == STEPS


def test_error_raised_by_next_counts_as_a_step(ranks):
    assert ranks[0]["errors"] == [[0], "bad sample 1", [2], [3], [4]]
    assert ranks[1]["errors"] == [[0], [1], "bad sample 2", [3], "bad sample 4"]
    assert all(len(rank["errors"]) == 5 for rank in ranks)


def test_batches_of_longer_ranks_that_were_ready_are_counted_as_discarded(ranks):
    for number, rank in enumerate(ranks):
        steps, delivered, discarded = rank["discarded"]
        assert steps == delivered == 5
        assert discarded in ((1, 2), (0,))[number]  # the other rank has 2 batches less


@pytest.mark.parametrize("kind", ["lost", "lost in a stream"])
def test_step_whose_batch_lost_all_its_samples_on_one_rank_is_skipped_on_all(ranks, kind):
    for workers in (0, 1):
        for rank, lost, discarded in ((0, 2, 0), (1, 0, 2)):
            position, steps = ranks[rank][f"{kind}, {workers}"]
            assert position == [3, [[0, 0], [0, 1]], lost, discarded]
            assert steps == [6, 6]


def test_rank_that_leaves_the_epoch_or_closes_its_loader_is_an_error_on_all(ranks):
    for rank in ranks:
        for scenario in ("one leaves", "left at different steps"):
            kind, _, message = rank[scenario]
            assert kind == "CoordinationError"
            assert "not at the same step" in message
    kind, named, _ = ranks[0]["one closes"]
    assert (kind, named) == ("CoordinationError", [1])
    assert ranks[1]["one closes"][0] == "LoaderClosedError"


def test_state_gathered_after_one_rank_has_ended_continues_the_other(ranks):
    assert [rank["gathered in the tail"] for rank in ranks] == [
        [8, 17, 17, 17],
        [0, 5, 5, 5],
    ]


def test_error_that_ends_the_epoch_of_one_rank_is_named_on_the_others_in_each_epoch(
    ranks,
):
    for epoch in range(2):
        kind, named, message = ranks[0]["one fails"][epoch]
        assert (kind, named) == ("CoordinationError", [1])
        assert "OSError: the list of samples is damaged" in message
        assert ranks[1]["one fails"][epoch][0] == "OSError"


def test_rank_that_cannot_begin_is_named_on_the_others(ranks):
    assert ranks[0]["one cannot begin"][0] == "NotPicklableError"
    kind, named, message = ranks[1]["one cannot begin"]
    assert (kind, named) == ("CoordinationError", [0])
    assert "NotPicklableError" in message


def test_rank_that_does_not_answer_within_the_timeout_is_named(ranks):
    kind, _, message = ranks[0]["one does not answer"]
    assert kind == "LoaderTimeoutError"
    assert "the ranks [1] do not answer" in message
    assert ranks[1]["one does not answer"][0] == "CoordinationError"


def test_ranks_need_a_process_group_and_a_single_process_none(monkeypatch):
    assert len(list(hr.DataLoader([1, 2], coordinated=True))) == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(hr.errors.CoordinationError, match="init_process_group"):
        iter(hr.DataLoader([1, 2], coordinated=True))
    with pytest.raises(TypeError, match="coordinated must be True or False"):
        hr.DataLoader([1, 2], coordinated=1)
