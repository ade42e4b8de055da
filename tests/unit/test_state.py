"""States of several ranks as one: who can continue from them, and who is refused."""

import itertools
import json

import pytest

import headrace as hr
from headrace import DataLoader, StateError, get_rank_info, merge_states
from tests.unit.shards.resuming import in_memory
from tests.unit.shards.test_state import tar_bytes
from tests.unit.streams.reading import stream

N = 48


class Own(hr.AsyncIterableDataset):
    """Each rank reads every n-th number."""

    splits_by_rank = True

    async def __aiter__(self):
        info = get_rank_info()
        for number in range(info.rank, N, info.world_size):
            yield number


class Remembering(Own):
    """The same, with a state of the dataset itself."""

    position = 0

    async def __aiter__(self):
        info = get_rank_info()
        while (number := info.rank + self.position * info.world_size) < N:
            self.position += 1
            yield number

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


TARS = {f"{shard}.tar": tar_bytes(shard, N // 6) for shard in range(6)}
STORE = in_memory(TARS)


def tars(**options):
    dataset = hr.TarDataset(list(TARS), store=STORE, chunk_bytes=1000, **options)
    return dataset.map(number_of)


def number_of(sample):
    shard, number = sample["__key__"].split("/")
    return int(shard) * (N // 6) + int(number)


STREAMS = {
    "own": Own,
    "own, with a state": Remembering,
    "mapped and filtered": lambda: (
        Own().map(lambda n: n + 1).filter(lambda n: n > 0).map(lambda n: n - 1)
    ),
    "split": lambda: stream(*range(N)).split().shuffle(4),
    "packed": lambda: (
        tars(shuffle=True, seed=1)
        .map(lambda n: [n + 1] * (n % 5))
        .pack(6, "best_fit", window=3)
        .map(lambda packed: int(packed["tokens"].sum()))
    ),
    "shards": lambda: tars(),
    "shuffled shards": lambda: tars(shuffle=True, buffer_size=3, seed=1),
    "concatenated": lambda: hr.concat(
        [Own().filter(lambda n: n % 3), Own().filter(lambda n: n % 3 == 0)]
    ),
}


def read(loader, batches=None):
    return [
        int(sample)
        for batch in itertools.islice(iter(loader), batches)
        for sample in batch
    ]


@pytest.fixture
def run(as_rank):
    """Run an epoch, or some batches of it, on so many ranks: the samples of each, and the states after them."""

    def run(make, ranks, batches=None, *, batch_size=2, state=None):
        given, states = [], []
        for rank in range(ranks):
            as_rank(rank, ranks)
            loader = DataLoader(make(), batch_size)
            if state is not None:
                loader.load_state_dict(state)
            given.append(
                read(loader, batches[rank] if isinstance(batches, tuple) else batches)
            )
            states.append(json.loads(json.dumps(loader.state_dict())))
        return given, states

    return run


@pytest.mark.filterwarnings(
    "ignore:.* has no state_dict", "ignore:each of .* ranks reads all"
)
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 3)])
def test_stream_of_which_each_rank_reads_its_part_is_refused_on_another_number_of_ranks(
    name, before, after, as_rank, run
):
    _, states = run(STREAMS[name], before, 2)
    for state in (merge_states(states), *states):
        for rank in range(after):
            as_rank(rank, after)
            loader = DataLoader(STREAMS[name](), 2)
            loader.load_state_dict(state)
            with pytest.raises(
                StateError,
                match=rf"saved with {before} ranks, and there are {after} now: .*TarDataset\.index",
            ):
                iter(loader)


@pytest.mark.filterwarnings(
    "ignore:.* has no state_dict", "ignore:each of .* ranks reads all"
)
@pytest.mark.parametrize("name", STREAMS)
def test_as_many_ranks_continue_each_its_own_part_also_when_some_have_ended(name, run):
    """5 ranks have 4 batches, or 3, some of them incomplete."""
    make = STREAMS[name]
    whole, _ = run(make, 5, batch_size=3)
    for steps in range(6):
        given, states = run(make, 5, steps, batch_size=3)
        if all(state["state"][0]["epoch"] for state in states):
            break
        state = json.loads(json.dumps(merge_states(reversed(states))))
        rest, _ = run(make, 5, batch_size=3, state=state)
        assert [
            [*first, *second] for first, second in zip(given, rest, strict=True)
        ] == whole


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
@pytest.mark.parametrize("make", [Own, STREAMS["shards"], STREAMS["split"]])
def test_states_of_ranks_without_a_batch_since_a_restore(run, make):
    first, states = run(make, 3, 2)
    state = merge_states(states)
    for batches in (0, (1, 0, 1)):
        given, states = run(make, 3, batches, state=state)
        rest, _ = run(make, 3, state=merge_states(states))
        assert sorted(itertools.chain(*first, *given, *rest)) == list(range(N))


# Streams that were given the rank and the number of ranks, in a process that is rank 0 of 1.
GIVEN = {
    "split, filtered": lambda **of: (
        stream(*range(N)).split(**of).filter(lambda n: n >= 0)
    ),
    "shards": lambda **of: tars(**of),
}


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
@pytest.mark.parametrize("name", GIVEN)
def test_state_is_of_the_rank_that_a_stream_was_given(name):
    make, given, states = GIVEN[name], [], []
    for rank in range(2):
        loader = DataLoader(make(rank=rank, world_size=2), 2)
        given += read(loader, 3)
        states.append(json.loads(json.dumps(loader.state_dict())))
    for rank, ranks in ((1, 2), (0, 4), (0, 1)):
        loader = DataLoader(make(rank=rank, world_size=ranks), 2)
        loader.load_state_dict(states[0])
        with pytest.raises(
            StateError, match="this is rank 1 of 2" if rank else f"there are {ranks} now"
        ):
            iter(loader)
    for rank in range(2):
        loader = DataLoader(make(rank=rank, world_size=2), 2)
        loader.load_state_dict(merge_states(states))
        given += read(loader)
    assert sorted(given) == list(range(N))


def test_states_that_are_not_those_of_all_ranks_at_one_batch_of_one_run_are_refused(run):
    _, states = run(Own, 3, 1)
    with pytest.raises(
        StateError, match=r"all 3 ranks are needed, but these are of the ranks \[0, 1\]"
    ):
        merge_states(states[:2])
    with pytest.raises(ValueError, match="no state was given"):
        merge_states([])
    loader = DataLoader(list(range(9)), 2, seed=0)
    iterator = iter(loader)
    states = [loader.state_dict()]
    next(iterator)
    states.append(loader.state_dict())
    with pytest.raises(
        StateError,
        match=r"not at the same batch: \(cursor, batches\) were \[\(0, 0\), \(2, 1\)\]",
    ):
        merge_states(states)
    states = [DataLoader(list(range(9)), 2, seed=seed).state_dict() for seed in (0, 1)]
    with pytest.raises(
        StateError, match="different runs cannot be merged: seed was 1, and is 0"
    ):
        merge_states(states)


# Orders of which each rank has its own: one that is drawn, and one of batches as they arrive, also
# where no batch is missing.
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"shuffle": True},
        lambda: {"sampler": hr.ElasticSampler(range(9), seed=0), "in_order": False},
    ],
    ids=["drawn", "out of order"],
)
def test_state_of_an_order_of_one_rank_is_continued_by_its_rank_alone(options, as_rank):
    def loader(rank, ranks, state=None):
        as_rank(rank, ranks)
        made = DataLoader(list(range(9)), 2, **options())
        if state is not None:
            made.load_state_dict(state)
        return made

    states, rest = [], []
    for rank in range(2):
        first = loader(rank, 2)
        batches = iter(first)
        next(batches)
        states.append(first.state_dict())
        rest.append([batch.tolist() for batch in batches])
    merged = merge_states(states)
    for rank in range(2):
        assert [batch.tolist() for batch in loader(rank, 2, merged)] == rest[rank]
    with pytest.raises(
        StateError, match=r"saved by rank 1 of 2, and this is rank 0 of 2.*merge_states"
    ):
        iter(loader(0, 2, states[1]))
    with pytest.raises(StateError, match="saved by rank 0 of 2"):
        iter(loader(0, 3, merged))


def test_without_a_process_group_the_gathered_state_is_the_loaders():
    loader = DataLoader(list(range(9)), 2, seed=0)
    assert hr.gather_state(loader) == loader.state_dict()
