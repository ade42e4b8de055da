"""Lightning's Trainer on two ranks: each sample once, exact resume, also on another number of ranks."""

import json

import pytest

pytest.importorskip(
    "lightning", reason="lightning is not installed: make test-integrations"
)

from tests.integrations import lightning_jobs as jobs

IMPORTS = ("lightning", "headrace.integrations.lightning", jobs.__name__)
LINES = jobs.SAMPLES
TRAINER = "Lightning Trainer"
EPOCH = 5  # batches of a rank, on two ranks
TENFOLD = [10 * number for number in range(jobs.SAMPLES)]


@pytest.fixture(scope="module")
def runs(launcher, tmp_path_factory, pattern):
    """By kind of loader, an uninterrupted run on two ranks, and runs that continue from its checkpoints."""
    folder, kinds = str(tmp_path_factory.mktemp("two")), tuple(jobs.ON_RANKS)
    on_two = launcher.run(jobs.whole_and_resumed, folder, pattern, kinds, (2, 5), ranks=2)
    (on_one,) = launcher.run(jobs.resumed, folder, pattern, kinds, (2, 5))
    return {kind: ([run[kind] for run in on_two], on_one[kind]) for kind in kinds}


def samples(run, epoch):
    return [
        sample for number, batch in run["seen"] if number == epoch for sample in batch
    ]


by_kind = pytest.mark.parametrize("kind", jobs.ON_RANKS)


@by_kind
@pytest.mark.proves(
    TRAINER, "each sample once, on two ranks", "another order in each epoch"
)
def test_ranks_share_all_samples_in_another_order_each_epoch(runs, kind):
    orders = []
    for epoch in range(jobs.EPOCHS):
        ours, theirs = (samples(run["whole"], epoch) for run in runs[kind][0])
        assert sorted(ours + theirs) == TENFOLD
        assert len(ours) == len(theirs)
        orders.append(ours + theirs)
    assert len({tuple(order) for order in orders}) == jobs.EPOCHS


@by_kind
@pytest.mark.proves(TRAINER, "exact resume in mid-epoch", "resume at the end of an epoch")
@pytest.mark.proves(TRAINER, "equal weights after an interruption")
def test_resumed_ranks_train_on_the_batches_that_would_have_followed(runs, kind):
    for run in runs[kind][0]:
        for step in (2, 5):
            assert run[step]["seen"] == run["whole"]["seen"][step:]
            assert run[step]["weight"] == run["whole"]["weight"]


@by_kind
@pytest.mark.proves(TRAINER, "resume on another number of ranks")
def test_one_rank_continues_the_epoch_of_two(runs, kind):
    on_two, on_one = runs[kind]
    for step, resumed in on_one.items():
        if kind == "unseeded":
            assert "sampler was DistributedSampler" in resumed
            continue
        if kind == "shards" or (kind == "split by samples" and step % EPOCH):
            assert "saved with 2 ranks, and there are 1 now" in resumed
            continue
        first = step // EPOCH
        given = [
            sample
            for run in on_two
            for _, batch in run["whole"]["seen"][first * EPOCH : step]
            for sample in batch
        ]
        for epoch in range(first, jobs.EPOCHS):
            assert (
                sorted(samples(resumed, epoch) + (given if epoch == first else []))
                == TENFOLD
            )


@pytest.mark.proves(TRAINER, "resume on another number of ranks")
def test_two_ranks_continue_the_epoch_of_one(launcher, tmp_path, pattern):
    kinds, folder = ("seeded",), str(tmp_path)
    (report,) = launcher.run(jobs.whole_and_resumed, folder, pattern, kinds, ())
    given = [
        sample for _, batch in report["seeded"]["whole"]["seen"][:4] for sample in batch
    ]
    on_two = launcher.run(jobs.resumed, folder, pattern, kinds, (4,), ranks=2)
    for epoch in range(jobs.EPOCHS):
        now = [sample for run in on_two for sample in samples(run["seeded"][4], epoch)]
        assert sorted((given if epoch == 0 else []) + now) == TENFOLD


@pytest.mark.proves(TRAINER, "evaluation", "equal steps for streams of unknown length")
def test_ranks_evaluate_each_sample_once_and_make_equally_many_steps_with_a_stream(
    launcher, pattern
):
    runs = launcher.run(jobs.evaluated, pattern, ranks=2)
    assert sorted(sample for run in runs for sample in run["predicted"]) == TENFOLD
    for epoch in range(2):
        seen = [
            sample
            for run in runs
            for number, batch in run["validated"]
            if number == epoch
            for sample in batch
        ]
        assert sorted(seen) == TENFOLD
    assert [run["steps"] for run in runs] == [5, 5]  # 37 samples in batches of 4


@pytest.fixture(scope="module")
def by_fabric(launcher, tmp_path_factory, pattern):
    """For two ranks, the whole run of each rank, and those that continue, also on one rank."""
    folder = str(tmp_path_factory.mktemp("fabric"))
    runs = {"whole": launcher.run(jobs.with_fabric, folder, pattern, ranks=2)}
    for point in ("middle", "end"):
        runs[point] = launcher.run(jobs.with_fabric, folder, pattern, point, ranks=2)
    return runs | {
        "two by one": launcher.run(jobs.with_fabric, folder, pattern, "middle")
    }


FABRIC = "Lightning Fabric"
NOT_PROVEN = {(FABRIC, "evaluation"): "your loop"}


@pytest.mark.proves(
    FABRIC,
    "headrace fetches",
    "transform is applied once",
    "each sample once, on two ranks",
)
@pytest.mark.proves(FABRIC, "another order in each epoch")
def test_fabric_gives_each_sample_once_in_another_order_each_epoch(by_fabric):
    whole = by_fabric["whole"]
    for kind in ("seeded", "shards"):
        epochs = zip(*(run["seen"][kind] for run in whole), strict=True)
        orders = [
            [sample for part in parts for batch in part for sample in batch]
            for parts in epochs
        ]
        assert all(sorted(order) == TENFOLD for order in orders)
        assert orders[0] != orders[1] != orders[2]
    assert all(run["most"] == 3 for run in whole)
    assert whole[0]["sampler"] == "RankSampler"


@pytest.mark.proves(FABRIC, "exact resume in mid-epoch", "resume at the end of an epoch")
@pytest.mark.proves(FABRIC, "equal weights after an interruption")
@pytest.mark.parametrize("point", ["middle", "end"])
def test_loader_restored_by_fabric_continues_and_has_the_orders_that_would_have_followed(
    by_fabric, point
):
    for whole, resumed in zip(by_fabric["whole"], by_fabric[point], strict=True):
        for kind, (_, second, third) in whole["seen"].items():
            assert resumed["seen"][kind] == (
                [second[2:], third] if point == "middle" else [third]
            )
        assert resumed["weight"] == whole["weight"]


@pytest.mark.proves(FABRIC, "resume on another number of ranks")
def test_loader_restored_by_fabric_on_one_rank_gives_the_rest_of_two(by_fabric):
    (resumed,) = by_fabric["two by one"]
    given = [
        sample
        for run in by_fabric["whole"]
        for batch in run["seen"]["seeded"][1][:2]
        for sample in batch
    ]
    rest = [sample for batch in resumed["seen"]["seeded"][0] for sample in batch]
    assert sorted(given + rest) == TENFOLD


@pytest.mark.proves(
    FABRIC, "equal steps for streams of unknown length", "nothing left behind"
)
def test_fabric_makes_equally_many_steps_on_ranks_and_leaves_no_thread(by_fabric):
    ranks = by_fabric["whole"]
    assert [run["steps"] for run in ranks] == [5, 5]  # 37 samples in batches of 4
    assert [run["left"] for run in ranks] == [["MainThread"], ["MainThread"]]


def test_ranks_of_lightnings_launcher_share_all_samples_in_each_epoch(
    launcher, tmp_path, pattern
):
    launcher.run(jobs.launch, str(tmp_path), pattern)
    both = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for name, expected in (
        ("lines, workers", list(range(jobs.SAMPLES))),
        ("blocks", TENFOLD),
    ):
        orders = [
            [
                [
                    sample
                    for number, batch in seen
                    if number == epoch
                    for sample in batch[name]
                ]
                for seen in both
            ]
            for epoch in range(2)
        ]
        for ours, theirs in orders:
            assert sorted(ours + theirs) == expected
            assert len(ours) == len(theirs)
        assert orders[0] != orders[1]
