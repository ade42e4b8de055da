"""Two real ranks under DDP take as many steps as each other, though batches of one of them lose all their samples."""

from pathlib import Path

from tests.ranks.jobs import outputs

JOB = Path(__file__).parent / "skipping_job.py"


def test_ranks_under_ddp_take_the_same_number_of_steps(forks):
    first, second = outputs(forks, JOB, 2)  # a rank without a partner for its step would hang
    assert first == {setting: [16, 4] for setting in first}
    assert second == {setting: [16, 0] for setting in second}
    assert len(first) == len(second) == 4
