"""Lightning's Trainer on two ranks: each sample once, exact resume, also on another number of ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")

from tests.integrations import lightning_jobs as jobs
from tests.integrations.harness import Launcher

JOB = Path(__file__).parent / "lightning_ranks.py"
TIMEOUT = 300  # seconds; each of the two processes imports Lightning
TRAINER = "Lightning Trainer"
EPOCH = 5  # batches of a rank, on two ranks


@pytest.fixture(scope="module")
def launcher():
    with Launcher("lightning", "tests.integrations.lightning_jobs") as launcher:
        yield launcher


@pytest.fixture(scope="module", params=jobs.ON_RANKS)
def runs(request, launcher, tmp_path_factory):
    """For a kind of loader: an uninterrupted run on two ranks, and runs that continue from its checkpoints."""
    folder = tmp_path_factory.mktemp(request.param)
    on_two = launcher.run(jobs.whole_and_resumed, request.param, str(folder), (2, 5, 8), ranks=2)
    on_one = launcher.run(jobs.resumed, request.param, str(folder), (2, 5, 8))[0]
    return request.param, on_two, on_one


def samples(run, epoch):
    return [sample for number, batch in run["seen"] if number == epoch for sample in batch]


@pytest.mark.proves(TRAINER, "each sample once, on two ranks", "another order in each epoch")
def test_ranks_share_all_samples_in_another_order_each_epoch(runs):
    kind, on_two, _ = runs
    orders = []
    for epoch in range(jobs.EPOCHS):
        ours, theirs = (samples(run["whole"], epoch) for run in on_two)
        assert sorted(ours + theirs) == [10 * number for number in range(jobs.SAMPLES)]
        assert len(ours) == len(theirs)
        orders.append(ours + theirs)
    assert kind in jobs.UNSHUFFLED or len({tuple(order) for order in orders}) == jobs.EPOCHS


@pytest.mark.proves(TRAINER, "exact resume in mid-epoch", "resume at the end of an epoch")
@pytest.mark.proves(TRAINER, "equal weights after an interruption")
def test_resumed_ranks_train_on_the_batches_that_would_have_followed(runs):
    for run in runs[1]:
        for step, resumed in run["resumed"].items():
            assert resumed["seen"] == run["whole"]["seen"][step:]
            assert resumed["weight"] == run["whole"]["weight"]


@pytest.mark.proves(TRAINER, "resume on another number of ranks")
def test_one_rank_continues_the_epoch_of_two(runs):
    kind, on_two, on_one = runs
    for step, resumed in on_one.items():
        if kind == "unseeded":
            assert "sampler was DistributedSampler" in resumed
            continue
        first = step // EPOCH
        given = [
            sample for run in on_two for _, batch in run["whole"]["seen"][first * EPOCH : step] for sample in batch
        ]
        for epoch in range(first, jobs.EPOCHS):
            now = samples(resumed, epoch) + (given if epoch == first else [])
            assert sorted(now) == [10 * number for number in range(jobs.SAMPLES)]


@pytest.mark.proves(TRAINER, "resume on another number of ranks")
def test_two_ranks_continue_the_epoch_of_one(launcher, tmp_path):
    (alone,) = launcher.run(jobs.whole_and_resumed, "seeded", str(tmp_path), ())
    resumed = launcher.run(jobs.resumed, "seeded", str(tmp_path), (4, 10), ranks=2)
    for step in (4, 10):
        given = [sample for _, batch in alone["whole"]["seen"][:step] for sample in batch]
        for epoch in range(jobs.EPOCHS):
            now = [sample for run in resumed for sample in samples(run[step], epoch)]
            seen = given if epoch == 0 else []
            assert sorted(seen + now) == [10 * number for number in range(jobs.SAMPLES)]
    assert resumed[0][10]["seen"][0][0] == 1


@pytest.mark.proves(TRAINER, "equal weights after an interruption")
def test_killed_job_is_resumed_with_equal_weights(launcher, tmp_path):
    (job,) = launcher.run(jobs.whole_and_resumed, "seeded", str(tmp_path), ())
    save = {"dirpath": str(tmp_path / "killed"), "every_n_train_steps": 1, "save_last": True}
    ended, _ = launcher.run_to_end(jobs.kill, "seeded", str(tmp_path), save, 7)
    assert ended[0][0] == -9
    (resumed,) = launcher.run(jobs.from_checkpoint, "seeded", str(tmp_path), str(tmp_path / "killed" / "last.ckpt"))
    assert resumed["seen"] == job["whole"]["seen"][7:]
    assert resumed["weight"] == job["whole"]["weight"]


@pytest.fixture(scope="module")
def evaluation(launcher, tmp_path_factory):
    return launcher.run(jobs.evaluated, str(tmp_path_factory.mktemp("lines")), ranks=2)


@pytest.mark.proves(TRAINER, "evaluation")
@pytest.mark.parametrize("use", ["predicted", "shuffled"])
def test_ranks_predict_for_each_sample_once(evaluation, use):
    ours, theirs = (run[use] for run in evaluation)
    assert sorted(ours + theirs) == [10 * number for number in range(jobs.SAMPLES)]


@pytest.mark.proves(TRAINER, "evaluation")
def test_ranks_validate_on_each_sample_once_in_each_epoch(evaluation):
    for epoch in range(2):
        seen = [
            sample for run in evaluation for number, batch in run["validated"] if number == epoch for sample in batch
        ]
        assert sorted(seen) == [10 * number for number in range(jobs.SAMPLES)]


@pytest.mark.proves(TRAINER, "equal steps for streams of unknown length")
def test_ranks_make_equally_many_steps_with_a_stream_that_cannot_be_divided(evaluation):
    assert [run["steps"] for run in evaluation] == [5, 5]  # 37 samples in batches of 4


@pytest.fixture(scope="module")
def by_fabric(launcher, tmp_path_factory):
    """For one process and two ranks, the whole run of each rank, and those that continue, also on one rank."""
    runs = {}
    for ranks in (1, 2):
        folder = str(tmp_path_factory.mktemp("fabric"))
        runs[ranks, "whole"] = launcher.run(jobs.with_fabric, folder, ranks=ranks)
        for point in ("middle", "end"):
            runs[ranks, point] = launcher.run(jobs.with_fabric, folder, point, ranks=ranks)
    runs["two by one"] = launcher.run(jobs.with_fabric, folder, "middle")
    return runs


FABRIC = "Lightning Fabric"
NOT_PROVEN = {(FABRIC, "evaluation"): "your loop"}


@pytest.mark.proves(FABRIC, "headrace fetches", "transform is applied once", "each sample once, on two ranks")
@pytest.mark.proves(FABRIC, "another order in each epoch")
@pytest.mark.parametrize("ranks", [1, 2])
def test_fabric_gives_each_sample_once_in_another_order_each_epoch(by_fabric, ranks):
    whole = by_fabric[ranks, "whole"]
    for kind in ("seeded", "shards"):
        epochs = zip(*(run["seen"][kind] for run in whole), strict=True)
        orders = [[sample for part in parts for batch in part for sample in batch] for parts in epochs]
        assert all(sorted(order) == [10 * number for number in range(jobs.SAMPLES)] for order in orders)
        assert orders[0] != orders[1] != orders[2]
    assert all(run["most"] == 3 for run in whole)
    assert ranks == 1 or whole[0]["sampler"] == "SeededRankSampler"


@pytest.mark.proves(FABRIC, "exact resume in mid-epoch", "resume at the end of an epoch")
@pytest.mark.proves(FABRIC, "equal weights after an interruption")
@pytest.mark.parametrize("point", ["middle", "end"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_loader_restored_by_fabric_continues_and_has_the_orders_that_would_have_followed(by_fabric, ranks, point):
    for whole, resumed in zip(by_fabric[ranks, "whole"], by_fabric[ranks, point], strict=True):
        for kind, (_, second, third) in whole["seen"].items():
            assert resumed["seen"][kind] == ([second[2:], third] if point == "middle" else [third])
        assert resumed["weight"] == whole["weight"]


@pytest.mark.proves(FABRIC, "resume on another number of ranks")
@pytest.mark.parametrize("kind", ["seeded", "shards"])
def test_loader_restored_by_fabric_on_one_rank_gives_the_rest_of_two(by_fabric, kind):
    (resumed,) = by_fabric["two by one"]
    given = [sample for run in by_fabric[2, "whole"] for batch in run["seen"][kind][1][:2] for sample in batch]
    rest = [sample for batch in resumed["seen"][kind][0] for sample in batch]
    assert sorted(given + rest) == [10 * number for number in range(jobs.SAMPLES)]


@pytest.mark.proves(FABRIC, "equal steps for streams of unknown length", "nothing left behind")
def test_fabric_makes_equally_many_steps_on_ranks_and_leaves_no_thread(by_fabric):
    ranks = by_fabric[2, "whole"]
    assert [run["steps"] for run in ranks] == [5, 5]  # 37 samples in batches of 4
    assert [run["left"] for run in ranks] == [["MainThread"], ["MainThread"]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Under Lightning's own launcher, for each rank its samples in each epoch."""
    folder = tmp_path_factory.mktemp("job")
    environment = {**os.environ, "FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", f"tests.integrations.{JOB.stem}"]
    root = JOB.parents[2]
    done = subprocess.run(run, cwd=root, env=environment, timeout=TIMEOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(folder.joinpath(f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", ["lines", "blocks"])
def test_ranks_of_lightnings_launcher_share_all_samples_in_each_epoch(seen, data, workers):
    name = f"{data}, {workers} workers"
    orders = []
    for ours, theirs in zip(*seen, strict=True):
        assert sorted(ours[name] + theirs[name]) == list(range(40))
        assert len(ours[name]) == len(theirs[name]) == 20
        orders.append(ours[name] + theirs[name])
    assert orders[0] != orders[1]
