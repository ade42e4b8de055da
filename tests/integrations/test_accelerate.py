"""Loaders prepared by headrace.integrations.accelerate, or rebuilt by accelerate, in one process and two ranks."""

import collections
import functools
import json
import signal

import pytest

pytest.importorskip("accelerate")

from tests.integrations import accelerate_programs as programs

IMPORTS = ("accelerate", "headrace.integrations.accelerate", programs.__name__)
LINES = programs.SAMPLES
SAMPLES = programs.SAMPLES


STATEFUL = {
    "seed": False,
    "generator": True,
    "samples": False,
    "shards": True,
}  # use_stateful_dataloader


@pytest.fixture(scope="module")
def trained(launcher, pattern):
    """Runs of `train` in a folder, by kind of loader and number of ranks."""

    def run(folder, kind, ranks):
        return launcher.run(
            programs.train, str(folder), pattern, kind, None, STATEFUL[kind], ranks=ranks
        )

    return run


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    """Runs without an interruption."""
    return functools.cache(
        lambda kind, ranks: trained(tmp_path_factory.mktemp("whole"), kind, ranks)
    )


@pytest.fixture(scope="module")
def killed(launcher, pattern, tmp_path_factory):
    """Folders of runs that were killed after 5 steps."""

    @functools.cache
    def folder_of(kind, ranks, steps=5):
        folder = tmp_path_factory.mktemp("killed")
        arguments = str(folder), pattern, kind, steps, STATEFUL[kind]
        ended, _ = launcher.run_to_end(programs.train, *arguments, ranks=ranks)
        assert [status for status, _ in ended] == [-signal.SIGKILL] * ranks
        return folder

    return folder_of


@pytest.mark.proves("accelerate", "evaluation", "nothing left behind")
def test_one_process_evaluates_fails_and_ends_as_with_torchs_loader(launcher):
    launcher.run(programs.on_one_rank)  # which has the assertions


@pytest.mark.proves(
    "accelerate",
    "evaluation",
    "headrace fetches",
    "transform is applied once",
    "each sample once, on two ranks",
    "another order in each epoch",
    "equal steps for streams of unknown length",
)
def test_ranks_share_the_samples_of_every_kind_of_loader_in_another_order_each_epoch(
    launcher, pattern
):
    reports = launcher.run(programs.on_two_ranks, pattern, ranks=2)
    assert all(report.pop("most in flight") >= 8 for report in reports), (
        "four batches at once"
    )
    assert len({report.pop("steps of an unequal stream") for report in reports}) == 1
    for name in reports[0]:
        epochs = [
            [sample for report in reports for sample in report[name][epoch]]
            for epoch in range(2)
        ]
        if name == "weighted":
            assert [len(set(epoch)) for epoch in epochs] == [16, 16], (
                "without replacement"
            )
            assert {sample % 10 for epoch in epochs for sample in epoch} == {0}
        else:
            assert [sorted(epoch) for epoch in epochs] == [programs.ALL] * 2, name
        if name not in ("one at a time", "split stream"):
            assert epochs[0] != epochs[1], name
    assert (
        reports[0]["seed"] == reports[0]["seed, workers"] == reports[0]["torch's dataset"]
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "steps"),
    [("generator", 2, 5), ("shards", 2, 5), ("samples", 2, 5), ("seed", 2, 6)],
)
@pytest.mark.proves(
    "accelerate", "exact resume in mid-epoch", "resume at the end of an epoch"
)
@pytest.mark.proves("accelerate", "equal weights after an interruption")
def test_killed_training_continues_with_the_same_batches_and_weights(
    trained, whole, killed, kind, ranks, steps
):
    folder = killed(kind, ranks, steps)  # an epoch is of 6 steps
    for rank, (resumed, expected) in enumerate(
        zip(trained(folder, kind, ranks), whole(kind, ranks), strict=True)
    ):
        begun = steps_of(folder, rank)
        assert len(begun) == steps
        assert (begun + resumed[0], resumed[1]) == expected


def steps_of(folder, rank):
    """The steps of a rank that was killed."""
    return [tuple(step) for step in json.loads((folder / f"seen{rank}").read_text())]


@pytest.mark.parametrize(("kind", "before", "after"), [("seed", 1, 2), ("seed", 2, 1)])
@pytest.mark.proves("accelerate", "resume on another number of ranks")
def test_another_number_of_ranks_continues_the_epoch(
    trained, whole, killed, kind, before, after
):
    folder = killed(kind, before)
    resumed = trained(folder, kind, after)
    steps = [step for rank in range(before) for step in steps_of(folder, rank)]
    steps += [step for seen, _ in resumed for step in seen]
    for epoch in range(programs.EPOCHS):
        seen = collections.Counter(
            number for step in steps if step[0] == epoch for number in step[1]
        )
        assert seen.keys() == set(range(SAMPLES))
        assert sum(seen.values()) - SAMPLES <= 2, "what pads a last step"
    if kind == "seed":
        ((reference, _),) = whole(kind, 1)
        assert noise_of(reference).items() <= noise_of(steps).items(), (
            "each with the noise that it would have had"
        )


def noise_of(steps):
    """The noise of each sample, by epoch and sample; of one that also pads, the first."""
    noise = {}
    for epoch, numbers, values, _ in steps:
        for number, value in zip(numbers, values, strict=True):
            noise.setdefault((epoch, number), value)
    return noise
