"""Loaders prepared by headrace.integrations.accelerate, or rebuilt by accelerate, in one process and two ranks."""

import collections
import functools
import json
import signal

import pytest

pytest.importorskip("accelerate")

from tests.integrations import accelerate_programs as programs

IMPORTS = ("accelerate", "headrace.integrations.accelerate", programs.__name__)
SAMPLES = programs.SAMPLES


def write_lines(folder):
    for shard in range(programs.SHARDS):
        numbers = range(SAMPLES)[shard :: programs.SHARDS]
        (folder / f"{shard}.txt").write_text("".join(f"{number}\n" for number in numbers))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_lines(tmp_path)


STATEFUL = {"seed": False, "generator": True, "samples": False, "shards": True}  # use_stateful_dataloader


@pytest.fixture(scope="module")
def whole(launcher, tmp_path_factory):
    """Runs of `train` without an interruption, by kind of loader and number of ranks."""
    folder = write_lines(tmp_path_factory.mktemp("whole"))
    return functools.cache(
        lambda kind, ranks: launcher.run(programs.train, str(folder), kind, None, STATEFUL[kind], ranks=ranks)
    )


@pytest.mark.proves("accelerate", "evaluation")
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_and_what_accelerate_is_told_of_them_are_those_of_torchs_loader(launcher, ranks):
    results = launcher.run(programs.divisions, ranks=ranks)
    assert len(results[0]) == 24
    for outcomes in results:
        for configuration, ours, theirs in outcomes:
            assert ours == theirs, configuration
    for configuration, (_, gathered, *_), _ in results[0]:
        even, _, samples, drop_last = configuration
        if even and not drop_last:
            assert gathered == list(range(samples)), configuration


@pytest.mark.proves(
    "accelerate",
    "headrace fetches",
    "transform is applied once",
    "each sample once, on two ranks",
    "another order in each epoch",
    "equal steps for streams of unknown length",
)
def test_ranks_share_the_samples_of_every_kind_of_loader_in_another_order_each_epoch(launcher, folder):
    reports = launcher.run(programs.orders, str(folder), ranks=2)
    assert all(report.pop("most in flight") >= 8 for report in reports), "four batches at once"
    assert len({report.pop("steps of an unequal stream") for report in reports}) == 1
    for name in reports[0]:
        epochs = [[sample for report in reports for sample in report[name][epoch]] for epoch in range(2)]
        if name == "weighted":
            assert [len(set(epoch)) for epoch in epochs] == [16, 16], "without replacement"
            assert {sample % 10 for epoch in epochs for sample in epoch} == {0}
        else:
            assert [sorted(epoch) for epoch in epochs] == [list(range(0, 10 * SAMPLES, 10))] * 2, name
        if name not in ("one at a time", "split stream"):
            assert epochs[0] != epochs[1], name
    assert reports[0]["seed"] == reports[0]["seed, workers"] == reports[0]["torch's dataset"]


@pytest.mark.parametrize(("kind", "ranks"), [("generator", 1), ("seed", 2), ("shards", 2)])
@pytest.mark.proves("accelerate", "exact resume in mid-epoch", "equal weights after an interruption")
def test_killed_training_continues_with_the_same_batches_and_weights(launcher, whole, folder, ranks, kind):
    arguments = (str(folder), kind), (STATEFUL[kind], kind == "seed")
    killed, _ = launcher.run_to_end(programs.train, *arguments[0], 5, *arguments[1], ranks=ranks)
    assert [status for status, _ in killed] == [-signal.SIGKILL] * ranks
    resumed = launcher.run(programs.train, *arguments[0], None, *arguments[1], ranks=ranks)
    for rank, (seen, weights) in enumerate(whole(kind, ranks)):
        begun = steps_of(folder, rank)
        assert len(begun) == 5
        assert begun + resumed[rank][0] == seen
        assert resumed[rank][1] == weights


def steps_of(folder, rank):
    """The steps of a rank that was killed."""
    return [tuple(step) for step in json.loads((folder / f"seen{rank}").read_text())]


@pytest.mark.proves("accelerate", "resume at the end of an epoch")
def test_training_killed_after_the_last_step_of_an_epoch_continues_with_the_next(launcher, whole, folder):
    launcher.run_to_end(programs.train, str(folder), "seed", 6, ranks=2)
    resumed = launcher.run(programs.train, str(folder), "seed", ranks=2)
    assert resumed == [(seen[6:], weights) for seen, weights in whole("seed", 2)]


@pytest.mark.parametrize(("kind", "before", "after"), [("seed", 1, 2), ("samples", 2, 1), ("shards", 2, 1)])
@pytest.mark.proves("accelerate", "resume on another number of ranks")
def test_another_number_of_ranks_continues_the_epoch(launcher, whole, folder, kind, before, after):
    killed, _ = launcher.run_to_end(programs.train, str(folder), kind, 5, ranks=before)
    assert [status for status, _ in killed] == [-signal.SIGKILL] * before
    resumed = launcher.run(programs.train, str(folder), kind, ranks=after)
    steps = [step for rank in range(before) for step in steps_of(folder, rank)]
    steps += [step for seen, _ in resumed for step in seen]
    for epoch in range(programs.EPOCHS):
        seen = collections.Counter(number for step in steps if step[0] == epoch for number in step[1])
        assert seen.keys() == set(range(SAMPLES))
        assert sum(seen.values()) - SAMPLES <= 2, "what pads a last step"
    if kind == "seed":
        ((reference, _),) = whole(kind, 1)
        assert noise_of(reference).items() <= noise_of(steps).items(), "each with the noise that it would have had"


def noise_of(steps):
    """The noise of each sample, by epoch and sample; of one that also pads, the first."""
    noise = {}
    for epoch, numbers, values, _ in steps:
        for number, value in zip(numbers, values, strict=True):
            noise.setdefault((epoch, number), value)
    return noise


def test_gradients_are_accumulated_as_with_torchs_loader(launcher, whole):
    ((alone, _),) = whole("seed", 1)
    epochs = [
        [pair for number, samples, noise, _ in alone if number == epoch for pair in zip(samples, noise, strict=True)]
        for epoch in range(programs.EPOCHS)
    ]
    theirs = launcher.run(programs.train_with_torch, epochs, ranks=2)
    assert [weights for _, weights in whole("seed", 2)] == theirs
    for seen, _ in whole("seed", 2):
        for epoch in range(programs.EPOCHS):
            synced = [synced for number, _, _, synced in seen if number == epoch]
            assert not synced[0]
            assert synced[-1], "the last step"


def test_skipped_batches_are_not_fetched(launcher, folder):
    (report,) = launcher.run(programs.skipping, str(folder))
    first, second = report["whole"]
    assert report["skipped"] == [first[3:], second]
    assert sorted(report["fetched"]) == sorted(sample // 10 for batch in first[3:] for sample in batch)
    assert report["restored and skipped"] == first[3:]
    assert "after 3 batches of epoch 0" in report["other position"]
    assert report["stream"] == [12, 10, 12]
    assert "accelerator.skip_first_batches(loader, n)" in report["rebuilt"]
    assert report["torch's"] == [[2, 3], [4, 5], [6, 7]]


def test_evaluation_inside_an_epoch_leaves_the_training_loader_active(launcher):
    for rank, reported in enumerate(launcher.run(programs.nesting, ranks=2)):
        *epoch, rest, again, shorter = reported
        assert all(gathered == list(range(5)) for gathered, *_ in epoch)
        assert [end for _, end, _ in epoch] == [False] * (len(epoch) - 1) + [True]
        assert [synced for *_, synced in epoch][-1], "the last step"
        assert rest == again[1:]
        assert shorter == len(again) - rank


def test_state_is_that_of_the_batch_given_out_last(launcher):
    for (first, second), follow in launcher.run(programs.states, ranks=2):
        assert follow.pop("before") == [first, second]
        assert follow.pop("after")[0] == second
        assert len(follow) == len(first)
        for number, (rest, following) in follow.items():
            assert rest == first[number + 1 :]
            assert following == second


def test_error_of_a_sample_is_raised_in_its_turn_and_ends_the_iteration(launcher):
    ((outcomes, in_dataloader),) = launcher.run(programs.failing)
    assert outcomes == [[0, 1], 7, [2, 3], 5, "error", 3]
    assert not in_dataloader


@pytest.mark.parametrize("how", ["closed", "dropped"])
@pytest.mark.proves("accelerate", "nothing left behind")
def test_threads_and_processes_end(launcher, how):
    ((during, after, before),) = launcher.run(programs.closing, how)
    assert during != before[0]
    assert after == before


def test_refusals_name_the_remedy(launcher):
    for rank, report in enumerate(launcher.run(programs.errors, ranks=2)):
        assert "rank 3 of 4" in report.pop("other ranks")
        assert "accelerator.prepare()" in report.pop("torch's")
        assert "DataLoaderShard" in report.pop("rebuilt")
        assert report.pop("async").startswith("TypeError")
        batches = [[0, 2], [4, 6], [8, 10], [12, 14]][rank::2]
        assert report.pop("of a subclass") == ("mine", *batches)
        assert "no multiple of 2" in report.pop("split_batches")
        assert "split()" in report.pop("replicated")
        assert report == {}


def test_rebuilt_loader_warns_once_and_names_the_remedy(launcher):
    ((warning,),) = launcher.run(programs.warned)
    assert warning[0] == "RuntimeWarning"
    assert "headrace.integrations.accelerate.prepare(accelerator, loader)" in warning[1]


def test_each_sample_of_a_rebuilt_loader_is_seen_once_on_two_ranks(launcher, folder):
    samples = list(range(0, 10 * SAMPLES, 10))
    report, _ = launcher.run(programs.rebuilt, str(folder), ranks=2)
    assert len(report["streams"]) == 12
    for name, seen in report["streams"].items():
        assert sorted(seen) == samples, name
    assert len(report["workers"]) == 3
    for name, seen in report["workers"].items():
        assert sorted(set(seen)) == samples, name  # accelerate pads
    assert "rank=0, world_size=2" in report["explicit rank"]
    first, second = report["epochs"]
    assert sorted(first) == sorted(second) == sorted(report["resumed"]) == samples
    assert first != second
    assert report["epoch with workers"] == first
