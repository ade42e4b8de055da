"""transformers' Trainer with headrace's loaders: trained, evaluated, killed and continued, by one and by two ranks."""

import collections

import pytest

pytest.importorskip("transformers")

from tests.integrations import hf_jobs as jobs

IMPORTS = ("transformers.trainer", "datasets", "headrace.integrations.transformers")
ALL = jobs.ALL
TRAINER = "transformers Trainer"
NOT_PROVEN = {
    (TRAINER, "equal steps for streams of unknown length"): "`max_steps` ends training"
}


@pytest.fixture(scope="module")
def launch(launcher):
    return launcher.run


@pytest.fixture(scope="module")
def interrupted(launch, tmp_path_factory):
    """After further jobs of one process, which have the assertions."""
    return launch(jobs.alone, tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.proves(
    TRAINER,
    "headrace fetches",
    "transform is applied once",
    "another order in each epoch",
)
def test_each_epoch_is_all_samples_transformed_in_another_order(interrupted):
    whole, _, _ = interrupted
    assert [sorted(epoch) for epoch in whole.epochs] == [ALL] * 3
    assert len(set(map(tuple, whole.epochs))) == 3
    assert whole.most > 8  # several batches of 4 are fetched at once
    assert whole.warnings == []


@pytest.mark.proves(TRAINER, "nothing left behind")
def test_no_thread_or_process_is_left_after_training_or_an_error(interrupted):
    whole, begun, _ = interrupted
    assert whole.left == begun.left == []


@pytest.mark.proves(TRAINER, "exact resume in mid-epoch", "resume at the end of an epoch")
@pytest.mark.parametrize("step", [2, 6, 8])  # the epoch ends with step 6
def test_continued_training_has_the_remaining_samples_and_equal_weights(
    interrupted, step
):
    whole, _, continued = interrupted
    given = 8 * step if step < 6 else 44 + 8 * (step - 6)
    assert continued[step].samples == whole.samples[given:]
    assert continued[step].weights == whole.weights
    assert continued[step].progress == whole.progress[step:]


@pytest.fixture(scope="module")
def ranks(launch, tmp_path_factory):
    return launch(jobs.on_ranks, tmp_path_factory.mktemp("ranks"), ranks=2)


@pytest.fixture(scope="module")
def killed(launcher, tmp_path_factory):
    """The folder of a run of two ranks that were killed."""
    folder = tmp_path_factory.mktemp("killed")
    ended, _ = launcher.run_to_end(jobs.ranks_killed, folder, ranks=2)
    assert [status for status, _ in ended] == [-9, -9]
    return folder


def together(reports, epoch):
    return sorted(number for report in reports for number in report.epochs[epoch])


@pytest.mark.proves(TRAINER, "each sample once, on two ranks", "evaluation")
def test_two_ranks_share_each_epoch_and_streams(ranks):
    whole = [report["whole"] for report in ranks]
    assert [together(whole, epoch) for epoch in range(3)] == [ALL] * 3
    for name in jobs.STREAMS:
        counts = collections.Counter(
            number for report in ranks for number in report[name].epochs[0]
        )
        assert sorted(counts) == ALL
        assert (
            sum(counts.values()) - len(ALL) <= 4
        )  # accelerate fills the last batch of torch's streams


@pytest.mark.proves(TRAINER, "equal weights after an interruption")
def test_two_killed_ranks_continue_with_equal_weights(launch, ranks, killed):
    for continued, report in zip(
        launch(jobs.ranks_continued, killed, ranks=2), ranks, strict=True
    ):
        assert continued.samples == report["whole"].samples[22 + 8 :]
        assert continued.weights == report["whole"].weights


@pytest.mark.proves(TRAINER, "resume on another number of ranks")
def test_one_rank_continues_what_two_began(launch, ranks, killed):
    (one,) = launch(jobs.ranks_continued, killed)
    begun = [number for report in ranks for number in report["whole"].epochs[1][:8]]
    assert sorted(begun + one.epochs[0]) == ALL
    assert sorted(one.epochs[1]) == ALL
    assert len(one.epochs) == 2
    assert one.progress[-1] == (4 + 4 + 6, 3.0)  # 28 samples are 4 steps, a whole epoch 6
    assert "Training ends after step 14" in str(one.warnings)


@pytest.mark.proves(TRAINER, "resume on another number of ranks")
def test_two_ranks_continue_what_one_began(launch, tmp_path, interrupted):
    whole, _, _ = interrupted
    launch(jobs.one_begun, tmp_path)
    two = launch(jobs.ranks_continued, tmp_path, ranks=2)
    assert sorted(whole.samples[:32] + together(two, 0)) == ALL
    assert [together(two, epoch) for epoch in (1, 2)] == [ALL] * 2
    assert [report.progress[-1] for report in two] == [(4 + 1 + 3 + 3, 3.0)] * 2
