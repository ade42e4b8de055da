"""Two real processes, by a process group or by variables of a launcher, know their ranks.

Which samples ranks read is tested in `test_data_parallel.py` and `tests/faults/test_resume.py`.
"""

from pathlib import Path

import pytest

from tests.ranks import reader
from tests.ranks.jobs import outputs_of

# Of other launchers, test_rankinfo.py has the variables.
LAUNCHERS = {
    "gloo": lambda rank, folder: {"GLOO": f"{rank},2,{folder}/store"},
    "torchrun": lambda rank, _: {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_is_known_in_all_code_that_a_loader_runs(launcher, forks, tmp_path):
    environments = [LAUNCHERS[launcher](rank, tmp_path) for rank in range(2)]
    for rank, answers in enumerate(
        outputs_of(forks, Path(reader.__file__), environments)
    ):
        for placement, workers in reader.PLACES:
            (infos_seen,) = answers[f"{placement}, {workers} workers"]
            in_init = [rank, 2] if workers else []
            *infos, environment, in_collate, of = infos_seen
            # In aget, transform and worker_init_fn.
            assert infos == [rank, 2, rank, 2, *in_init]
            assert [in_collate, of] == [rank, 2]
            # in a thread without workers, the environment is the consumer's own
            assert environment == rank or (placement, workers) == ("thread", 0)
