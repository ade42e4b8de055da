"""torch.distributed.checkpoint saves loaders on 4 gloo ranks, and loads them on 2, 4 and 5."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.ranks import checkpoint_job as job
from tests.ranks.jobs import outputs

PROGRAM = Path(job.__file__)
WHOLE = list(range(job.LENGTH))
RANKS = (2, 4, 5)
ON_RANKS = pytest.mark.parametrize("ranks", RANKS)


def run(forks, step, ranks, folder):
    """What each rank prints."""
    return outputs(
        forks, PROGRAM, ranks, STEP=step, FOLDER=str(folder), LINES=str(folder / "*.txt")
    )


@pytest.fixture(scope="module")
def runs(forks, tmp_path_factory):
    """Batches of each loader and rank: before saving on 4 ranks, and after loading on others."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for shard in range(8):
        lines = WHOLE[shard * 13 : (shard + 1) * 13]
        (folder / f"{shard}.txt").write_text("".join(f"{line}\n" for line in lines))
    saved = run(forks, "save", 4, folder)
    return saved, {ranks: run(forks, "load", ranks, folder) for ranks in RANKS}


def samples(ranks, name):
    return list(
        itertools.chain.from_iterable(
            itertools.chain.from_iterable(rank[name]) for rank in ranks
        )
    )


@ON_RANKS
def test_ranks_together_are_given_exactly_the_rest(runs, ranks):
    saved, loaded = runs
    times = Counter(
        samples(saved, "ElasticSampler") + samples(loaded[ranks], "ElasticSampler")
    )
    assert sorted(times) == WHOLE
    assert times.total() - job.LENGTH < ranks  # those that fill up the last ranks


def test_state_of_a_stream_continues_on_as_many_ranks_and_is_refused_on_others(runs):
    saved, loaded = runs
    name = "lines by shards, gathered"
    assert sorted(samples(saved, name) + samples(loaded[4], name)) == WHOLE
    for ranks in (2, 5):
        for rank in loaded[ranks]:
            assert f"saved with 4 ranks, and there are {ranks} now" in rank[name]


@ON_RANKS
def test_order_that_is_not_divided_continues_on_each_rank(runs, ranks):
    saved, loaded = runs
    name = "shuffled by seed"
    for rank in loaded[ranks]:
        assert sorted(samples(saved[:1], name) + samples([rank], name)) == WHOLE


@pytest.mark.parametrize("name", ["sampler with a state", "DistributedSampler"])
def test_other_sampler_continues_on_the_same_number_of_ranks_and_is_refused_on_others(
    runs, name
):
    saved, loaded = runs
    for before, after in zip(saved, loaded[4], strict=True):
        both = samples([before], name) + samples([after], name)
        assert (
            len(both)
            == len(set(both))
            == (job.LENGTH if name == "sampler with a state" else 26)
        )
    for ranks in (2, 5):
        for rank in loaded[ranks]:
            assert "ElasticSampler" in rank[name] or "num_replicas" in rank[name]


@ON_RANKS
def test_state_of_one_rank_is_refused_on_the_others(runs, ranks):
    saved, loaded = runs
    name = "lines by shards"
    refused = [rank[name] for rank in loaded[ranks] if isinstance(rank[name], str)]
    says = "headrace.gather_state(loader)" if ranks == 4 else "saved with 4 ranks"
    assert all(says in message for message in refused)
    if ranks != 4:
        assert len(refused) == ranks
        return
    assert len(refused) == 3
    (own,) = (rank for rank in range(4) if not isinstance(loaded[4][rank][name], str))
    assert not set(samples([saved[own]], name)) & set(samples([loaded[4][own]], name))
