"""`data_parallel=` on 2 x 2 real ranks: those of one data-parallel rank get the same batches, others different ones."""

import itertools
from pathlib import Path

import pytest

import headrace as hr
from tests.ranks import jobs

JOB = Path(__file__).parent / "mesh_job.py"
LENGTH = 24
ASYNC = (
    "ElasticSampler",
    "BlockShuffleSampler",
    "sampler that asks at each index",
    "stream that asks",
    "shards",
    "split",
)
LOADERS = [f"{name}, {place}" for name in ASYNC for place in ("thread", "process")]
LOADERS += [
    f"torch, {name}, {number} workers"
    for name in ("ElasticSampler", "stream")
    for number in (0, 2)
]


@pytest.fixture(scope="module")
def ranks(forks, tmp_path_factory):
    """What the ranks print, data parallel by tensor parallel."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        (folder / f"{shard}.txt").write_text(
            "".join(f"{shard * 6 + line}\n" for line in range(6))
        )
    first, second, third, fourth = jobs.outputs(
        forks, JOB, 4, LINES=str(folder / "*.txt")
    )
    return [[first, second], [third, fourth]]


def numbers(epoch):
    return [sample[0] for sample in itertools.chain.from_iterable(epoch)]


@pytest.mark.parametrize("name", [*LOADERS, "group"])
def test_tensor_parallel_ranks_get_the_same_batches_and_data_parallel_ranks_share_all_samples(
    ranks, name
):
    for first, second in ranks:
        assert first[name] == second[name]
    for epoch in range(2):
        assert sorted(
            numbers(ranks[0][0][name][epoch]) + numbers(ranks[1][0][name][epoch])
        ) == list(range(LENGTH))


@pytest.mark.parametrize("name", LOADERS)
def test_rank_is_that_in_data_parallel_in_all_code_that_a_loader_runs(ranks, name):
    for number, row in enumerate(ranks):
        for sample in itertools.chain.from_iterable(
            itertools.chain.from_iterable(row[0][name])
        ):
            # In the dataset and in the transform.
            assert sample[1:-1] == [number, 2, number, 2]
    drawn = [
        {sample[-1] for batch in row[0][name][0] for sample in batch} for row in ranks
    ]
    assert not drawn[0] & drawn[1]  # random numbers


def test_length_and_coordination_are_those_of_data_parallel_and_the_rank_outside_that_of_the_job(
    ranks,
):
    every = [rank for row in ranks for rank in row]
    assert [rank["length"] for rank in every] == [4] * 4
    assert [rank["outside"] for rank in every] == [[number, 4] for number in range(4)]
    assert [[len(epoch) for epoch in rank["coordinated"]] for rank in every] == [
        [3, 3]
    ] * 4
    assert all(
        "ranks reads all of list" in "".join(rank["warned"]) for rank in every
    )  # a torch dataset
    assert all(
        rank["rebuilt"] for rank in every
    )  # the option is an attribute, for code that rebuilds a loader


def test_gathered_state_is_that_of_the_data_parallel_ranks(ranks):
    for first, second in ranks:
        assert first["gathered"] == second["gathered"]
    (before, after), (others_before, others_after) = (row[0]["gathered"] for row in ranks)
    assert sorted(before + after + others_before + others_after) == list(range(LENGTH))


@pytest.mark.parametrize("place", ["thread", "torch, inline", "torch, fork"])
def test_torch_distributed_is_that_of_the_job_where_a_dataset_is_read_in_its_process_or_in_forks(
    ranks, place
):
    for number, rank in enumerate(rank for row in ranks for rank in row):
        ((answers,),) = rank["torch.distributed"][place]
        for initialized, of_torch, *of_headrace, environment in (
            answers if place == "thread" else [answers]
        ):
            assert (initialized, of_torch, of_headrace) == (
                True,
                number,
                [number // 2, 2],
            )
            assert environment == (number // 2 if place == "torch, fork" else number)


def test_torch_distributed_is_an_error_in_other_processes_of_a_loader(ranks):
    for number, rank in enumerate(rank for row in ranks for rank in row):
        ((answers,),) = rank["torch.distributed"]["process"]
        for (
            initialized,
            of_torch,
            *of_headrace,
            environment,
        ) in answers:  # in `aget`, and in a worker
            assert not initialized
            assert "not been initialized" in of_torch
            assert [*of_headrace, environment] == [number // 2, 2, number // 2]


def test_process_outside_of_the_group_is_an_error(ranks):
    assert [rank["member"] for rank in ranks[0]] == [None, None]
    assert all("no member of data_parallel=" in rank["member"] for rank in ranks[1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two dimensions", 'as in mesh["dp"]'),
        ("DistributedSampler", "DistributedSampler was made for rank"),
        ("rank of a stream", "a stream or sampler was made for rank"),
        ("no seed", "give the loader seed="),
        ("order of completion", "in_order=False"),
    ],
)
def test_options_that_would_give_tensor_parallel_ranks_other_batches_are_an_error(
    ranks, name, message
):
    for row in ranks:
        for rank in row:
            assert message in (rank[name] or "")


def test_wrong_type_and_a_function_that_returns_none_are_errors():
    with pytest.raises(TypeError, match=r"ProcessGroup.*but got 3"):
        hr.DataLoader([1, 2], data_parallel=3)
    with pytest.raises(TypeError, match="returned None"):
        iter(hr.DataLoader([1, 2], data_parallel=lambda: None))
