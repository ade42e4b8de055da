"""transformers' Trainer with headrace's loaders: trained, evaluated, killed and continued, by one and by two ranks."""

import collections

import pytest

pytest.importorskip("transformers")

from tests.integrations import hf_jobs as jobs

IMPORTS = ("transformers.trainer", "datasets", "headrace.integrations.transformers")
ALL = list(range(0, 10 * jobs.SAMPLES, 10))
TRAINER = "transformers Trainer"
NOT_PROVEN = {
    (TRAINER, "equal steps for streams of unknown length"): "no: `max_steps` ends training",
}


@pytest.fixture(scope="module")
def launch(launcher):
    return launcher.run


@pytest.fixture(scope="module")
def interrupted(launch, tmp_path_factory):
    return launch(jobs.interrupted, tmp_path_factory.mktemp("interrupted"))[0]


@pytest.mark.proves(TRAINER, "headrace fetches", "transform is applied once", "another order in each epoch")
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
def test_continued_training_has_the_remaining_samples_and_equal_weights(interrupted, step):
    whole, _, continued = interrupted
    given = 8 * step if step < 6 else 44 + 8 * (step - 6)
    assert continued[step].samples == whole.samples[given:]
    assert continued[step].weights == whole.weights
    assert continued[step].progress == whole.progress[step:]


def test_checkpoint_without_a_fitting_state_is_an_error_unless_its_data_is_ignored(launch, tmp_path, interrupted):
    whole, _, _ = interrupted
    other, most, thirds, missing, anew, ended, unfit, only_model = launch(jobs.continued_otherwise, tmp_path)[0]
    rest = whole.samples[44 + 16 :]
    assert other.samples == rest  # in batches of 7
    assert "28 of 44" not in str(other.warnings)
    assert "4 of 7 batches are left" in str(other.warnings)
    assert [len(other.progress), other.progress[-1][1]] == [4 + 7, 3.0]
    assert most.samples == rest[: 6 * 7]
    assert most.progress[-1][0] == 14
    assert thirds.samples == rest
    assert [len(thirds.progress), thirds.progress[-1][1]] == [3 + 4, 3.0]  # 7 batches are left, and then 11
    assert missing[0] == unfit[0] == "StateError"
    assert "has no state of the loader" in missing[1]
    assert "ignore_data_skip=True" in missing[1]
    assert "len(dataset) was 44, and is 48" in unfit[1]
    assert "ignore_data_skip=True" in unfit[1]
    assert anew.samples[: len(whole.epochs[1])] == whole.epochs[1]
    assert ended.samples == whole.samples[44:]
    assert "headrace_loader_rank_0.pth" not in only_model


def test_stream_of_unknown_length_is_continued_in_and_after_a_later_pass(launch, tmp_path):
    whole, continued, unfit = launch(jobs.of_a_stream, tmp_path)[0]
    assert len({tuple(epoch) for epoch in whole.epochs[:3]}) == 3
    for step, each in continued.items():
        assert each.samples == whole.samples[4 * step :]
        assert (each.weights, each.progress) == (whole.weights, whole.progress[step:])
    assert "gradient_accumulation_steps=4" in unfit[1]


def test_samplers_of_the_training_arguments_and_of_a_subclass_are_honoured_and_continued(launch, tmp_path):
    outcomes, swapped, few = launch(jobs.with_samplers, tmp_path)[0]
    for whole, continued in outcomes.values():
        assert [sorted(epoch) for epoch in whole.epochs] == [ALL] * 2
        assert continued.samples == whole.samples[-len(continued.samples) :]
        assert (continued.weights, continued.progress) == (whole.weights, whole.progress[4:])
    lengths = [number // 10 % 5 for number in outcomes["by length"][0].epochs[0]]
    steps = [lengths[start : start + 8] for start in range(8, 40, 8)]  # the longest sample is in the first
    assert steps == [sorted(step, reverse=True) for step in steps]
    assert "WeightedRandomSampler" in swapped[1]
    assert sorted(few.samples) == ALL[:20]


def test_loader_of_a_subclass_is_saved_and_continued(launch, tmp_path):
    whole, continued, of_stock = launch(jobs.of_own_loaders, tmp_path)[0]
    assert continued.samples == whole.samples[44 + 16 :]
    assert continued.weights == whole.weights
    # transformers' own Trainer rebuilds it for the rest of the epoch, which it completes.
    assert sorted(of_stock.epochs[0]) == sorted(whole.samples[16:44])
    assert of_stock.epochs[1] == whole.epochs[2]
    assert "engine does not run" in str(of_stock.warnings)


def test_state_that_could_not_be_read_again_is_an_error_when_it_is_saved(launch, tmp_path):
    (kind, message), files = launch(jobs.unreadable, tmp_path)[0]
    assert kind == "StateError"
    assert "cannot be saved" in message
    assert not any("headrace_loader" in file for file in files)


def test_workers_evaluation_and_the_best_model_do_not_disturb_continuing(launch, tmp_path):
    whole, kept, continued = launch(jobs.with_workers, tmp_path)[0]
    assert "checkpoint-8" in kept
    assert "checkpoint-4" not in kept
    assert continued.samples == whole.samples[44 + 16 :]
    assert continued.weights == whole.weights
    assert [entry["eval_count"] for entry in whole.metrics] == [10] * 3
    assert continued.left == whole.left == []


def test_option_that_cannot_be_honoured_is_an_error(launch, tmp_path):
    (errors,) = launch(jobs.refused, tmp_path)
    assert errors.keys() == {"dispatch_batches", "even_batches", "batch_size", "_run_epoch"}
    for name, (kind, message) in errors.items():
        assert kind in ("ValueError", "TypeError", "NotImplementedError")
        assert name in message


@pytest.mark.proves(TRAINER, "evaluation")
def test_metrics_and_predictions_are_of_each_sample_once_in_order(launch, tmp_path):
    for outcome in launch(jobs.evaluated, tmp_path, ranks=2):
        assert outcome.pop("left") == []
        for metrics, predictions in outcome.values():  # 21 samples: not divisible by batches or ranks
            assert predictions == [10 * number for number in range(21)]
            assert (metrics["count"], metrics["sum"]) == (21, 10 * sum(range(21)))
        assert outcome["headrace"] == outcome["stock"]


@pytest.fixture(scope="module")
def ranks(launch, tmp_path_factory):
    """Two ranks: whole runs; and one of which both were killed, with its folder."""
    folder = tmp_path_factory.mktemp("ranks")
    whole = launch(jobs.ranks_whole, folder, ranks=2)
    ended, _ = launch.__self__.run_to_end(jobs.ranks_killed, folder, ranks=2)
    assert [status for status, _ in ended] == [-9, -9]
    return whole, folder


def together(reports, epoch):
    return sorted(number for report in reports for number in report.epochs[epoch])


@pytest.mark.proves(TRAINER, "each sample once, on two ranks")
def test_two_ranks_share_each_epoch(ranks):
    whole = [report for report, _ in ranks[0]]
    assert [together(whole, epoch) for epoch in range(3)] == [ALL] * 3
    for _, (kind, message) in ranks[0]:
        assert kind == "ValueError"  # a loader that does not divide
        assert "ElasticSampler" in message


@pytest.mark.proves(TRAINER, "equal weights after an interruption")
def test_two_killed_ranks_continue_with_equal_weights(launch, ranks):
    for continued, (whole, _) in zip(launch(jobs.ranks_continued, ranks[1], ranks=2), ranks[0], strict=True):
        assert continued.samples == whole.samples[22 + 8 :]
        assert continued.weights == whole.weights


@pytest.mark.proves(TRAINER, "resume on another number of ranks")
def test_one_rank_continues_what_two_began(launch, ranks):
    whole = [report for report, _ in ranks[0]]
    (one,) = launch(jobs.ranks_continued, ranks[1])
    begun = [number for report in whole for number in report.epochs[1][:8]]
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


def test_streams_on_two_ranks_are_divided_and_continued(launch, tmp_path):
    reports = launch(jobs.ranks_of_streams, tmp_path, ranks=2)
    for name in jobs.STREAMS:
        whole = [report[name][0] for report in reports]
        counts = collections.Counter(number for report in whole for number in report.epochs[0])
        assert sorted(counts) == ALL
        assert sum(counts.values()) - len(ALL) <= 4  # accelerate fills the last batch of torch's streams
        for report in reports:
            first, continued = report[name]
            assert continued.samples == first.samples[-len(continued.samples) :]
            assert (continued.weights, continued.progress) == (first.weights, first.progress[4:])
