"""Lightning's Trainer on two ranks: each sample once, exact resume, also on another number of ranks."""

import json

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")

from tests.integrations import lightning_jobs as jobs

IMPORTS = ("lightning", "headrace.integrations.lightning", jobs.__name__)
TRAINER = "Lightning Trainer"
EPOCH = 5  # batches of a rank, on two ranks


@pytest.fixture(scope="module", params=jobs.ON_RANKS)
def runs(request, launcher, tmp_path_factory):
    """For a kind of loader: an uninterrupted run on two ranks, and runs that continue from its checkpoints."""
    folder = tmp_path_factory.mktemp(request.param)
    on_two = launcher.run(jobs.whole_and_resumed, request.param, str(folder), (2, 5), ranks=2)
    on_one = launcher.run(jobs.resumed, request.param, str(folder), (2, 5))[0]
    return request.param, on_two, on_one


def samples(run, epoch):
    return [sample for number, batch in run["seen"] if number == epoch for sample in batch]


@pytest.mark.proves(TRAINER, "each sample once, on two ranks", "another order in each epoch")
def test_ranks_share_all_samples_in_another_order_each_epoch(runs):
    _, on_two, _ = runs
    orders = []
    for epoch in range(jobs.EPOCHS):
        ours, theirs = (samples(run["whole"], epoch) for run in on_two)
        assert sorted(ours + theirs) == [10 * number for number in range(jobs.SAMPLES)]
        assert len(ours) == len(theirs)
        orders.append(ours + theirs)
    assert len({tuple(order) for order in orders}) == jobs.EPOCHS


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


@pytest.fixture(scope="module")
def alone(launcher, tmp_path_factory):
    """An uninterrupted run on one rank, and the folder of its checkpoints."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return launcher.run(jobs.whole_and_resumed, "seeded", folder, ())[0]["whole"], folder


@pytest.mark.proves(TRAINER, "resume on another number of ranks")
def test_two_ranks_continue_the_epoch_of_one(launcher, alone):
    whole, folder = alone
    resumed = launcher.run(jobs.resumed, "seeded", folder, (4, 10), ranks=2)
    for step in (4, 10):
        given = [sample for _, batch in whole["seen"][:step] for sample in batch]
        for epoch in range(jobs.EPOCHS):
            now = [sample for run in resumed for sample in samples(run[step], epoch)]
            seen = given if epoch == 0 else []
            assert sorted(seen + now) == [10 * number for number in range(jobs.SAMPLES)]
    assert resumed[0][10]["seen"][0][0] == 1


@pytest.mark.proves(TRAINER, "equal weights after an interruption")
def test_killed_job_is_resumed_with_equal_weights(launcher, tmp_path, alone):
    save = {"dirpath": str(tmp_path / "killed"), "every_n_train_steps": 1, "save_last": True}
    ended, _ = launcher.run_to_end(jobs.kill, "seeded", str(tmp_path), save, 7)
    assert ended[0][0] == -9
    (resumed,) = launcher.run(jobs.from_checkpoint, "seeded", str(tmp_path), str(tmp_path / "killed" / "last.ckpt"))
    assert resumed["seen"] == alone[0]["seen"][7:]
    assert resumed["weight"] == alone[0]["weight"]


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
    """For two ranks, the whole run of each rank, and those that continue, also on one rank."""
    folder = str(tmp_path_factory.mktemp("fabric"))
    runs = {"whole": launcher.run(jobs.with_fabric, folder, ranks=2)}
    for point in ("middle", "end"):
        runs[point] = launcher.run(jobs.with_fabric, folder, point, ranks=2)
    return runs | {"two by one": launcher.run(jobs.with_fabric, folder, "middle")}


FABRIC = "Lightning Fabric"
NOT_PROVEN = {(FABRIC, "evaluation"): "your loop"}


@pytest.mark.proves(FABRIC, "headrace fetches", "transform is applied once", "each sample once, on two ranks")
@pytest.mark.proves(FABRIC, "another order in each epoch")
def test_fabric_gives_each_sample_once_in_another_order_each_epoch(by_fabric):
    whole = by_fabric["whole"]
    for kind in ("seeded", "shards"):
        epochs = zip(*(run["seen"][kind] for run in whole), strict=True)
        orders = [[sample for part in parts for batch in part for sample in batch] for parts in epochs]
        assert all(sorted(order) == [10 * number for number in range(jobs.SAMPLES)] for order in orders)
        assert orders[0] != orders[1] != orders[2]
    assert all(run["most"] == 3 for run in whole)
    assert whole[0]["sampler"] == "SeededRankSampler"


@pytest.mark.proves(FABRIC, "exact resume in mid-epoch", "resume at the end of an epoch")
@pytest.mark.proves(FABRIC, "equal weights after an interruption")
@pytest.mark.parametrize("point", ["middle", "end"])
def test_loader_restored_by_fabric_continues_and_has_the_orders_that_would_have_followed(by_fabric, point):
    for whole, resumed in zip(by_fabric["whole"], by_fabric[point], strict=True):
        for kind, (_, second, third) in whole["seen"].items():
            assert resumed["seen"][kind] == ([second[2:], third] if point == "middle" else [third])
        assert resumed["weight"] == whole["weight"]


@pytest.mark.proves(FABRIC, "resume on another number of ranks")
@pytest.mark.parametrize("kind", ["seeded", "shards"])
def test_loader_restored_by_fabric_on_one_rank_gives_the_rest_of_two(by_fabric, kind):
    (resumed,) = by_fabric["two by one"]
    given = [sample for run in by_fabric["whole"] for batch in run["seen"][kind][1][:2] for sample in batch]
    rest = [sample for batch in resumed["seen"][kind][0] for sample in batch]
    assert sorted(given + rest) == [10 * number for number in range(jobs.SAMPLES)]


@pytest.mark.proves(FABRIC, "equal steps for streams of unknown length", "nothing left behind")
def test_fabric_makes_equally_many_steps_on_ranks_and_leaves_no_thread(by_fabric):
    ranks = by_fabric["whole"]
    assert [run["steps"] for run in ranks] == [5, 5]  # 37 samples in batches of 4
    assert [run["left"] for run in ranks] == [["MainThread"], ["MainThread"]]


def test_ranks_of_lightnings_launcher_share_all_samples_in_each_epoch(launcher, tmp_path):
    launcher.run(jobs.launch, str(tmp_path))
    both = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for name in ("lines", "lines, workers", "blocks"):
        orders = [
            [[sample for number, batch in seen if number == epoch for sample in batch[name]] for seen in both]
            for epoch in range(2)
        ]
        for ours, theirs in orders:
            assert sorted(ours + theirs) == list(range(jobs.SAMPLES))
            assert len(ours) == len(theirs)
        assert orders[0] != orders[1]
