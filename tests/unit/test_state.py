"""States of several ranks, merged and continued by another number of ranks."""

import itertools
import json

import pytest

import headrace as hr
from headrace import DataLoader, StateError, from_async_iterable, get_rank_info, merge_states
from tests.unit.shards.resuming import in_memory
from tests.unit.shards.test_state import tar_bytes

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


class Uncopyable(Remembering):
    def __deepcopy__(self, memo):
        raise TypeError("it holds a connection")


async def numbers():
    for number in range(N):
        yield number


TARS = {f"{shard}.tar": tar_bytes(shard, N // 6) for shard in range(6)}
STORE = in_memory(TARS)


def tars(**options):
    dataset = hr.TarDataset(list(TARS), store=STORE, remainder="keep", chunk_bytes=1000, **options)
    return dataset.map(number_of)


def number_of(sample):
    shard, number = sample["__key__"].split("/")
    return int(shard) * (N // 6) + int(number)


STREAMS = {
    "own": Own,
    "own, with a state": Remembering,
    "own, with a state, mapped": lambda: Remembering().map(lambda n: n),
    "mapped and filtered": lambda: Own().map(lambda n: n + 1).filter(lambda n: n > 0).map(lambda n: n - 1),
    "shuffled": lambda: Own().shuffle(5, seed=1),
    "split in the middle": lambda: from_async_iterable(numbers).split(remainder="keep").shuffle(4),
    "shards": lambda: tars(),
    "shuffled shards": lambda: tars(shuffle=True, buffer_size=3, seed=1),
    "shards, split by samples": lambda: tars(split="samples"),
    "shards, split by samples, shuffled": lambda: tars(split="samples", buffer_size=3),
    "shards, taken": lambda: tars().take(100),
    "concatenated": lambda: hr.concat([Own().filter(lambda n: n % 3), Own().filter(lambda n: n % 3 == 0)]),
}


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return become


def read(loader, batches=None):
    return [int(sample) for batch in itertools.islice(iter(loader), batches) for sample in batch]


@pytest.mark.filterwarnings("ignore:.* has no state_dict", "ignore:each of .* ranks reads all")
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 2), (2, 4), (4, 3)])
def test_the_rest_of_an_epoch_is_divided_among_the_new_ranks(name, before, after, as_rank):
    given, states, make = [], [], STREAMS[name]
    for rank in range(before):
        as_rank(rank, before)
        loader = DataLoader(make(), 2)
        given += read(loader, 2)
        states.append(json.loads(json.dumps(loader.state_dict())))
    state = json.loads(json.dumps(merge_states(reversed(states))))
    lengths = []
    for rank in range(after):
        as_rank(rank, after)
        loader = DataLoader(make(), 2)
        loader.load_state_dict(state)
        rest = read(loader)
        given += rest
        lengths.append(len(rest))
    assert sorted(set(given)) == list(range(N))
    # Of the buffer of each old rank, what was given of a window is given again; not by as many ranks as before.
    buffer = 3 if "shards" in name and "shuffled" in name and before != after else 0
    assert len(given) - N <= before * buffer
    if "shards" not in name:  # of which whole ones are divided
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.filterwarnings("ignore:.* has no state_dict", "ignore:each of .* ranks reads all")
@pytest.mark.parametrize("name", STREAMS)
def test_rank_that_continued_from_a_merged_state_is_restored_alone(name, as_rank):
    states, make = [], STREAMS[name]
    for rank in range(3):
        as_rank(rank, 3)
        loader = DataLoader(make(), 2)
        read(loader, 1)
        states.append(loader.state_dict())
    merged = merge_states(states)
    as_rank(1, 2)
    loader = DataLoader(make(), 2)
    loader.load_state_dict(merged)
    iterator = iter(loader)
    next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [int(sample) for batch in iterator for sample in batch]
    restored = DataLoader(make(), 2)
    restored.load_state_dict(state)
    assert rest == read(restored)


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
def test_states_of_ranks_that_continued_can_be_merged_again(as_rank):
    given = []
    state = None
    for world_size in (4, 6, 3, 1):
        states = []
        for rank in range(world_size):
            as_rank(rank, world_size)
            loader = DataLoader(Own(), 1)
            if state is not None:
                loader.load_state_dict(state)
            given += read(loader, 2 if world_size > 1 else None)
            states.append(loader.state_dict())
        state = merge_states(states)
    assert sorted(given) == list(range(N))


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
def test_samples_keep_their_order_and_positions(as_rank):
    def loader_of(rank, world_size):
        as_rank(rank, world_size)
        return DataLoader(Own(), None)

    states = []
    for rank in range(4):
        loader = loader_of(rank, 4)
        assert read_single(loader, 3) == list(range(rank, 12, 4))
        states.append(loader.state_dict())
    for rank in range(3):
        loader = loader_of(rank, 3)
        loader.load_state_dict(merge_states(states))
        assert read_single(loader, None) == list(range(12 + rank, N, 3))


def read_single(loader, count):
    return list(itertools.islice(iter(loader), count))


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
def test_streams_split_by_samples_need_no_merging(as_rank):
    given = []
    state = None
    for world_size in (3, 2, 4):
        for rank in range(world_size):
            as_rank(rank, world_size)
            loader = DataLoader(from_async_iterable(numbers).split(), 2)
            if state is not None:
                loader.load_state_dict(state)
            given += read(loader, 2 if world_size != 4 else None)
            states = loader.state_dict()
        state = states
    assert sorted(given) == list(range(N))


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
def test_samples_that_cannot_be_divided_equally_are_dropped_as_by_the_stream(as_rank):
    states = []
    for rank in range(2):
        as_rank(rank, 2)
        loader = DataLoader(from_async_iterable(numbers).split(remainder="drop").shuffle(4), 4)
        read(loader, 1)
        states.append(loader.state_dict())
    lengths = []
    for rank in range(3):
        as_rank(rank, 3)
        loader = DataLoader(from_async_iterable(numbers).split(remainder="drop").shuffle(4), 4)
        loader.load_state_dict(merge_states(states))
        lengths.append(len(read(loader)))
    assert lengths == [13, 13, 13]  # of 40


def test_dataset_with_a_state_that_cannot_be_copied_is_an_error_where_ranks_are_fewer(as_rank):
    states = []
    for rank in range(2):
        as_rank(rank, 2)
        loader = DataLoader(Uncopyable(), 2)
        read(loader, 1)
        states.append(loader.state_dict())
    as_rank(0, 1)
    loader = DataLoader(Uncopyable(), 2)
    loader.load_state_dict(merge_states(states))
    with pytest.raises(TypeError, match="it holds a connection"):
        read(loader)


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
def test_states_of_ranks_without_a_batch_since_a_restore(as_rank):
    """All of them are the state that was restored; with others, they cannot be merged."""

    def states_after(*batches, state=None):
        states = []
        for rank, count in enumerate(batches):
            as_rank(rank, len(batches))
            loader = DataLoader(Own(), 2)
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            assert len(list(itertools.islice(iterator, count))) == count
            states.append(loader.state_dict())
            iterator.close()
        return states

    state = merge_states(states_after(2, 2))
    again = merge_states(states_after(0, 0, 0, state=state))
    given = [read_as(rank, 4, again, as_rank) for rank in range(4)]
    assert sorted(itertools.chain(*given)) == list(range(8, N))
    with pytest.raises(StateError, match=r"the ranks \[1\] have not given out a batch since they began"):
        merge_states(states_after(1, 0, 1, state=state))


def read_as(rank, world_size, state, as_rank):
    as_rank(rank, world_size)
    loader = DataLoader(Own(), 2)
    loader.load_state_dict(state)
    return read(loader)


def test_states_of_all_ranks_are_needed(as_rank):
    states = []
    for rank in range(2):
        as_rank(rank, 3)
        loader = DataLoader(Own(), 2)
        next(iter(loader))
        states.append(loader.state_dict())
    with pytest.raises(StateError, match=r"all 3 ranks are needed, but these are of the ranks \[0, 1\]"):
        merge_states(states)
    with pytest.raises(ValueError, match="no state was given"):
        merge_states([])


def test_states_at_different_batches_are_refused():
    loader = DataLoader(list(range(9)), 2, seed=0)
    iterator = iter(loader)
    states = [loader.state_dict()]
    next(iterator)
    states.append(loader.state_dict())
    with pytest.raises(StateError, match=r"not at the same batch: \(cursor, batches\) were \[\(0, 0\), \(2, 1\)\]"):
        merge_states(states)


def test_states_of_different_runs_are_refused():
    states = [DataLoader(list(range(9)), 2, seed=seed).state_dict() for seed in (0, 1)]
    with pytest.raises(StateError, match="different runs cannot be merged: seed was 1, and is 0"):
        merge_states(states)


def test_orders_of_one_rank_cannot_be_merged(as_rank):
    states = []
    for rank in range(2):
        as_rank(rank, 2)
        loader = DataLoader(list(range(9)), 2, shuffle=True)
        next(iter(loader))
        states.append(loader.state_dict())
    with pytest.raises(StateError, match="each rank had an order of its own"):
        merge_states(states)


def test_without_a_process_group_the_gathered_state_is_the_loaders():
    loader = DataLoader(list(range(9)), 2, seed=0)
    assert hr.gather_state(loader) == loader.state_dict()
