"""Two real processes, by a process group and by variables of a launcher: every sample is read by exactly one rank."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.ranks import reader
from tests.ranks.jobs import outputs_of

# Of other launchers, test_rankinfo.py has the variables.
LAUNCHERS = {
    "gloo": lambda rank: {"GLOO": f"{rank},2"},
    "torchrun": lambda rank: {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
}
PROGRAM = Path(reader.__file__)


@pytest.fixture(scope="module", params=LAUNCHERS)
def read(request, forks, tmp_path_factory):
    """The samples that each of two ranks has read, by scenario."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        folder.joinpath(f"{shard}.txt").write_text(
            "".join(f"{shard * 10 + line}\n" for line in range(10))
        )
    pyarrow.parquet.write_table(
        pyarrow.table({"x": range(40)}), folder / "rows.parquet", row_group_size=10
    )
    environments = [{**LAUNCHERS[request.param](rank), "FOLDER": str(folder)} for rank in range(2)]
    return outputs_of(forks, PROGRAM, environments)


PLACES = [f"{placement}, {workers} workers" for placement, workers in reader.PLACES]
STREAMS = ["lines by samples", "lines by shards", "parquet", "split", "asks itself", "blocks"]
ORDERED = {"asks itself"}  # not shuffled


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", STREAMS)
def test_ranks_share_all_samples_evenly_in_each_epoch(read, stream, place):
    ours, theirs = (rank[f"{stream}, {place}"] for rank in read)
    every = list(range(64 if stream == "blocks" else 40))
    for epoch in range(reader.EPOCHS):
        assert sorted(ours[epoch] + theirs[epoch]) == every
        assert len(ours[epoch]) == len(theirs[epoch])
    if stream not in ORDERED:
        assert ours[0] != ours[1]


@pytest.mark.parametrize("place", PLACES)
def test_rank_is_known_in_all_code_that_a_loader_runs(read, place):
    for rank, scenarios in enumerate(read):
        (infos_seen,) = scenarios[f"infos, {place}"]
        in_init = [rank, 2] if place.endswith("2 workers") else []
        *infos, environment, in_collate, of = infos_seen
        assert infos == [rank, 2, rank, 2, *in_init]  # in aget, transform and worker_init_fn
        assert [in_collate, of] == [rank, 2]
        if place != "thread, 0 workers":  # there it is the consumer's own environment
            assert environment == rank
