"""ignite, skorch, fastai and torchtitan iterate the loader that they are given: what models see, what is resumed."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

from tests.integrations import loops

IMPORTS = (
    "ignite.distributed",
    "ignite.handlers",
    "skorch",
    "fastai.learner",
    "torchtitan.components.dataloader",
)
pytestmark = [  # without importing them here, which takes long
    pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"{name} is not installed"
    )
    for name in ("ignite", "skorch", "fastai", "torchtitan")
]

RANKS = {"ignite": 2, "skorch": 1, "fastai": 2, "torchtitan": 2}
COLUMNS = tuple(RANKS)
ALONE = "it trains in one process"
NOT_PROVEN = {
    ("skorch", "each sample once, on two ranks"): ALONE,
    ("skorch", "resume on another number of ranks"): ALONE,
    ("skorch", "equal steps for streams of unknown length"): ALONE,
    ("fastai", "equal steps for streams of unknown length"): "it needs `len(loader)`",
}


def of_each(*rows, without=()):
    """Runs a test for each trainer, and fills these rows of its column."""
    marked = [
        pytest.param(name, marks=pytest.mark.proves(name, *rows))
        for name in COLUMNS
        if name not in without
    ]
    return pytest.mark.parametrize("reports", marked, indirect=True)


class Reports:
    """What the jobs of a trainer did, for each rank."""

    def __init__(self, launcher, trainer, folder):
        ranks = RANKS[trainer]
        ended, _ = launcher.run_to_end(loops.be_killed, trainer, folder, ranks=ranks)
        assert ended[-1][0] == -9, ended[-1][1]
        self.killed = [
            json.loads(Path(folder, f"steps{rank}.json").read_text())
            for rank in range(ranks)
        ]
        self.of_ranks = launcher.run(loops.run_and_continue, trainer, folder, ranks=ranks)
        (self.alone,) = launcher.run(loops.continue_alone, trainer, folder)


@pytest.fixture(scope="module")
def reports(request, launcher, tmp_path_factory):
    return Reports(launcher, request.param, str(tmp_path_factory.mktemp(request.param)))


def together(steps):
    """The indices of all steps of all ranks."""
    return sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(steps)))


@of_each("headrace fetches", "transform is applied once", "another order in each epoch")
def test_model_sees_each_sample_once_in_another_order_in_each_epoch(reports):
    assert all(report["most in flight"] > 2 * loops.BATCH for report in reports.of_ranks)
    epochs = [
        [report["epochs"][number] for report in reports.of_ranks]
        for number in range(loops.EPOCHS)
    ]
    assert together(epochs[0]) == together(epochs[1]) == list(range(loops.SAMPLES))
    assert epochs[0] != epochs[1]


@of_each("each sample once, on two ranks", without=["skorch"])
def test_two_ranks_share_the_samples_of_an_epoch(reports):
    first, second = (set(together([report["epochs"][0]])) for report in reports.of_ranks)
    assert first.isdisjoint(second)
    assert len(first) == len(second) == loops.SAMPLES / 2


@of_each("equal steps for streams of unknown length", without=["skorch", "fastai"])
def test_ranks_that_cannot_share_a_stream_evenly_take_the_same_steps(reports):
    assert [report["steps of the stream"] for report in reports.of_ranks] == [
        5 * loops.EPOCHS
    ] * 2


@of_each("evaluation")
def test_evaluation_sees_every_sample_in_each_epoch(reports):
    evaluated = [report["evaluated"] for report in reports.of_ranks]
    assert sorted(itertools.chain(*evaluated)) == sorted(
        [*range(loops.SAMPLES)] * loops.EPOCHS
    )


@of_each(
    "exact resume in mid-epoch",
    "resume at the end of an epoch",
    "equal weights after an interruption",
)
def test_job_killed_in_an_epoch_continues_after_its_checkpoint_with_equal_weights(
    reports,
):
    for killed, report in zip(reports.killed, reports.of_ranks, strict=True):
        whole = [*report["epochs"][0], *report["epochs"][1]]
        assert killed == whole[: len(killed)]
        assert len(killed) > loops.SAVED_AT
        assert report["resumed"] == whole[loops.SAVED_AT :]
        assert report["from the end of an epoch"] == report["epochs"][1]
        weights, *others = report["weights"]
        assert others == [weights, weights]


@of_each("resume on another number of ranks", without=["skorch"])
def test_one_process_reads_the_rest_of_an_epoch_of_two(reports):
    rest = reports.alone["resumed"]
    given = [report["epochs"][0][: loops.SAVED_AT] for report in reports.of_ranks]
    length = loops.SAMPLES // loops.BATCH - 2 * loops.SAVED_AT
    assert together([*given, rest[:length]]) == list(range(loops.SAMPLES))
    assert together([rest[length:]]) == list(range(loops.SAMPLES))


@of_each("nothing left behind")
def test_no_engine_is_left_when_the_loader_is_dropped(reports):
    assert reports.alone["engines"] != []
    assert reports.alone["engines left"] == []
