"""A stream of shards read by lanes: each sample once, in an order that depends on the number of lanes alone."""

import itertools
import json

import pytest
import torch

import headrace as hr
from headrace import DataLoader
from tests.unit.shards.resuming import in_memory

SIZES = (9, 1, 14, 2, 5, 0, 7)  # samples of the shards
ENDS = list(itertools.accumulate(SIZES))
N = ENDS[-1]
SHARDS = {
    f"{shard}.txt": "".join(f"{number}\n" for number in range(end - size, end)).encode()
    for shard, (size, end) in enumerate(zip(SIZES, ENDS, strict=True))
}
STORE = in_memory(SHARDS)


def lines(shards=7, **options):
    return hr.LinesDataset(list(SHARDS)[:shards], store=STORE, chunk_bytes=8, **options)


def noisy(line):
    return torch.tensor([float(line), torch.rand(()).item()])


@hr.randomized
def drawn(line, rng):
    return torch.tensor([float(line), rng.random()])


def loader_of(stream, batch_size=3, *, transform=noisy, lanes=None, **options):
    """A loader in whose epochs there are `lanes`, as with so many engines, though one reads all of them."""
    loader = DataLoader(stream, batch_size, seed=1, transform=transform, **options)
    loader._control._lanes.wanted = lanes or loader._control._lanes.wanted
    return loader


def samples_of(batches):
    return [int(sample) for batch in batches for sample in batch[:, 0]]


def read(stream, **options):
    with loader_of(stream, **options) as loader:
        return [batch.tolist() for batch in loader]


STREAMS = {
    "lines": lines,
    "shuffled": lambda: lines(shuffle=True, buffer_size=4, seed=2),
    "operations": lambda: lines(shuffle=True).map(str).filter(lambda line: int(line) % 5).shuffle(3),
    "repeated": lambda: hr.concat([lines(4), lines()]).repeat(2),
}


def test_batches_come_from_lanes_in_turn():
    """Lane n of 3 has shards n, n + 3, …: 0, 3 and 6; 1 and 4; 2 and 5."""
    with loader_of(lines(shards_in_parallel=1), lanes=3) as loader:
        batches = [samples_of([batch]) for batch in loader]
    assert batches == [
        [0, 1, 2],
        [9, 26, 27],
        [10, 11, 12],
        [3, 4, 5],
        [28, 29, 30],
        [13, 14, 15],
        [6, 7, 8],
        [16, 17, 18],
        [24, 25, 31],
        [19, 20, 21],
        [32, 33, 34],
        [22, 23],
        [35, 36, 37],
    ]


@pytest.mark.parametrize("name", STREAMS)
def test_each_sample_comes_as_often_as_without_lanes(name):
    whole = sorted(samples_of(map(torch.tensor, read(STREAMS[name]()))))
    for lanes in (2, 3, 4):
        assert sorted(samples_of(map(torch.tensor, read(STREAMS[name](), lanes=lanes)))) == whole


def plain(line):
    return torch.tensor([float(line), 0.0])


def test_look_ahead_and_in_order_do_not_change_the_batches():
    """Of a lane that has ended more or fewer empty batches come, until its end is known here."""
    expected = read(lines(shuffle=True), lanes=4, transform=plain)
    threads = {"placement": "thread", "executor": "thread", "num_workers": 1}
    for options in ({"prefetch_factor": 1}, {"prefetch_factor": 50}, {"in_order": False}):
        assert read(lines(shuffle=True), lanes=4, transform=plain, **threads, **options) == expected


@pytest.mark.parametrize(("name", "transform"), [("lines", noisy), *((name, drawn) for name in STREAMS)])
def test_restored_loader_continues_at_every_batch(name, transform):
    """With the lanes of its state, whatever its own number, also in the random numbers; then with its own."""
    stream = STREAMS[name]
    with loader_of(stream(), lanes=3, transform=transform) as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(batch.tolist())
            states.append(json.loads(json.dumps(loader.state_dict())))
    for given, state in enumerate(states, 1):
        with loader_of(stream(), transform=transform, lanes=1 + given % 4) as loader:
            loader.load_state_dict(state)
            assert [batch.tolist() for batch in loader] == whole[given:]
            if given == 5:
                assert sum(map(len, loader)) == sum(map(len, whole))  # the next epoch


@pytest.mark.parametrize(("lanes", "drop_last"), [(3, False), (4, True)])
def test_length_and_drop_last_are_of_each_lane(lanes, drop_last):
    stream = lines(counts=SIZES)
    with loader_of(stream, lanes=lanes, drop_last=drop_last) as loader:
        batches = list(loader)
        assert len(loader) == len(batches)
    of_lanes = [sum(SIZES[lane::lanes]) for lane in range(lanes)]
    left_out = sum(samples % 3 for samples in of_lanes) if drop_last else 0
    assert len(samples_of(batches)) == N - left_out


@pytest.mark.parametrize("lanes", [2, 3])
def test_ranks_have_as_many_batches(as_rank, lanes):
    counts = []
    for rank in range(2):
        as_rank(rank, 2)
        with loader_of(lines(counts=SIZES), lanes=lanes) as loader:
            sizes = [len(batch) for batch in loader]
            assert len(loader) == len(sizes)
        counts.append(sizes)
    assert counts[0] == counts[1]


def test_lanes_of_a_rank_have_the_shards_of_the_rank(as_rank):
    for rank in range(2):
        as_rank(rank, 2)
        whole, divided = (samples_of(map(torch.tensor, read(lines(remainder="keep"), lanes=lanes))) for lanes in (1, 3))
        assert sorted(whole) == sorted(divided)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("lines", (1, 3), (2, 1)),
        ("lines", (2, 1), (1, 4)),
        ("shuffled", (2, 3), (3, 2)),
        ("operations", (2, 3), (3, 2)),
    ],
)
def test_merged_states_continue_with_other_ranks_and_lanes(as_rank, before, after, name):
    def new(lanes):
        stream = lines(shuffle=True, seed=0, buffer_size=4 if name == "shuffled" else 0, remainder="keep")
        if name == "operations":
            stream = stream.filter(lambda line: True).shuffle(3, seed=0)
        return loader_of(stream, 2, lanes=lanes)

    given, states = [], []
    for rank in range(before[0]):
        as_rank(rank, before[0])
        with new(before[1]) as loader:
            given += samples_of(itertools.islice(loader, 3))
            states.append(json.loads(json.dumps(loader.state_dict())))
    state = json.loads(json.dumps(hr.merge_states(reversed(states))))
    for rank in range(after[0]):
        as_rank(rank, after[0])
        with new(after[1]) as loader:
            loader.load_state_dict(state)
            rest = [samples_of([batch]) for batch in loader]
        for begun in (1, 2):  # saved when some of the new lanes have given a batch, and others have not
            with new(after[1]) as loader:
                loader.load_state_dict(state)
                iterator = iter(loader)
                for _ in range(begun):
                    next(iterator, None)
                again = loader.state_dict()
            with new(after[1]) as loader:
                loader.load_state_dict(again)
                assert [samples_of([batch]) for batch in loader] == rest[begun:]
        given += itertools.chain.from_iterable(rest)
    assert sorted(set(given)) == list(range(N))
    again = len(given) - N
    assert again <= (before[0] * before[1] * 4 if name == "shuffled" else 0), "of the windows of shuffle buffers"


def failing(line):
    if int(line) in (0, 1, 2, 10, 11, 12):
        raise ValueError(line)
    return noisy(line)


@pytest.mark.filterwarnings("ignore:batch . lost all its samples")
def test_lanes_continue_around_lost_batches():
    def new():
        return loader_of(lines(shards_in_parallel=1), lanes=3, on_error="skip", transform=failing)

    whole, states = [], []
    with new() as loader:
        for batch in loader:
            whole.append(samples_of([batch]))
            states.append(loader.state_dict())
        assert loader.stats().lost_batches == 2
    for given, state in enumerate(states, 1):
        with new() as loader:
            loader.load_state_dict(state)
            assert [samples_of([batch]) for batch in loader] == whole[given:]


def test_fewer_shards_than_lanes_are_read_in_fewer_lanes():
    with loader_of(lines(2), lanes=4) as loader:
        with pytest.warns(UserWarning, match=r"the stream has only 2 shards .* read in 2 lanes"):
            samples = samples_of(loader)
        assert "2 lanes" in loader.stats().placement
        assert samples_of(loader) == samples == [0, 1, 2, 9, 3, 4, 5, 6, 7, 8]


class Own(hr.LinesDataset):
    async def __aiter__(self):
        async for line in super().__aiter__():
            yield line


async def numbers():
    for number in range(6):
        yield number


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: hr.from_async_iterable(numbers), "from_async_iterable(numbers) is not a stream of shards"),
        (lambda: lines().take(6), "take(6) is not a stream of shards"),
        (lambda: Own(list(SHARDS), store=STORE), "Own has an __aiter__ of its own"),
        (lambda: hr.mix([lines(), lines()], [1, 1]), "is not a stream of shards"),
    ],
)
def test_any_other_stream_is_read_as_a_whole(make, why):
    with loader_of(make(), transform=None, lanes=2) as loader:
        batches = list(loader)
        assert "as a whole" in loader.stats().placement
        assert why in loader.stats().placement
    with DataLoader(make(), 3, seed=1) as loader:
        assert [list(batch) for batch in batches] == [list(batch) for batch in loader]


def test_engines_that_divide_a_stream_divide_the_workers():
    with pytest.raises(ValueError, match="num_workers must be 0 or at least 3, but got 2"):
        DataLoader(lines(), engines=3, num_workers=2)
