"""Two real ranks under DDP take as many steps as each other, though batches of one of them lose all their samples."""

import contextlib
import json
from pathlib import Path

from tests.forks import Forks

JOB = Path(__file__).parent / "skipping_job.py"
TIMEOUT = 120  # seconds; a rank without a partner for its step would hang


def test_ranks_under_ddp_take_the_same_number_of_steps(tmp_path):
    with Forks() as forks, contextlib.ExitStack() as stack:
        places = [{"RANK": str(rank), "WORLD_SIZE": "2", "FOLDER": str(tmp_path)} for rank in range(2)]
        ranks = [stack.enter_context(forks.start_file(JOB, **place)) for place in places]
        outputs = [rank.communicate(TIMEOUT) for rank in ranks]
    assert all(printed for printed, _ in outputs), outputs
    first, second = (json.loads(printed) for printed, _ in outputs)
    assert first == {setting: [16, 4] for setting in first}
    assert second == {setting: [16, 0] for setting in second}
    assert len(first) == len(second) == 4
