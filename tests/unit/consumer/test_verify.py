"""hr.verify computes from states what loaders, one for each rank, have delivered."""

import functools
import json
import random
from collections import Counter, defaultdict

import pytest
from torch.utils.data import BatchSampler

import headrace as hr
from tests.datasets import Numbers
from tests.unit.consumer.test_timeouts import Held
from tests.unit.streams.reading import stream

N = 40
elastic = functools.partial(hr.ElasticSampler, N, seed=1)
SAMPLERS = {
    "wraps": elastic,
    "drops": functools.partial(elastic, drop_last=True),
    "in_order": functools.partial(elastic, shuffle=False),
    "blocks": functools.partial(
        hr.BlockShuffleSampler, N, block_size=3, blocks_at_once=6
    ),
}


class Keyed(list):
    def sample_key(self, index):
        return f"key-{index}"


class Run:
    """A training that is stopped and continued, with what each epoch got."""

    def __init__(self, sampler, **options):
        self.sampler, self.options = sampler, options
        self.given = defaultdict(Counter)
        self.parts = []

    def loader(self, rank=0, ranks=1, batch_size=2):
        sampler = self.sampler(rank=rank, world_size=ranks)
        return hr.DataLoader(
            Keyed(range(N)), batch_size, sampler=sampler, seed=0, **self.options
        )

    def part(self, state, ranks, steps, batch_size=2, **excluded):
        loaders = [self.loader(rank, ranks, batch_size) for rank in range(ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            if excluded:
                loader.exclude(**excluded)
        running = [self.steps_of(loader) for loader in loaders]
        for _ in range(steps):
            for each in running:
                next(each)
        last = json.loads(json.dumps(loaders[-1].state_dict()))  # the same on all ranks
        self.parts.append((state, last))
        return last

    def steps_of(self, loader):
        while True:
            (epoch,) = {state["epoch"] for state in loader.state_dict()["state"]}
            for batch in loader:
                self.given[epoch].update(batch.tolist())
                yield
            yield  # the end of the epoch, after which the state is of the next epoch

    def check(self):
        reports = hr.verify(self.parts, self.loader())
        assert {report.epoch for report in reports} >= self.given.keys()
        for report in reports:
            epoch, _, once, others, _ = report
            times = [self.given[epoch][index] for index in range(N)]
            assert once == times.count(1)
            repeated = [index for index in range(N) if times[index] > 1]
            assert others["repeated"].tolist() == repeated
            assert f"{once} once, {len(repeated)} repeated" in str(report)
            assert all(f"{index} key-{index}" in str(report) for index in repeated[:5])
            missing = {*others["never"].tolist(), *others["excluded"].tolist()}
            assert missing == {index for index in range(N) if not times[index]}
        return reports


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_report_is_what_a_random_run_has_delivered(sampler, drop_last):
    rng = random.Random(f"{sampler}, {drop_last}")
    for _ in range(3):
        run, saved = Run(SAMPLERS[sampler], drop_last=drop_last), [None]
        for _ in range(4):
            state = rng.choice([saved[-1], *saved[-2:]])  # at times an old one
            excluded = {"keys": rng.sample(range(N), 2)} if rng.random() < 0.3 else {}
            sizes = {"ranks": rng.randint(1, 3), "batch_size": rng.randint(1, 5)}
            saved.append(run.part(state, steps=rng.randint(0, 15), **sizes, **excluded))
        run.check()


def test_ranks_may_have_nothing_but_padding_left():
    run = Run(SAMPLERS["in_order"])
    run.part(None, ranks=3, steps=1, batch_size=13)
    run.check()


def test_samples_of_a_lost_part_were_never_delivered():
    run = Run(elastic)
    state = run.part(None, ranks=1, steps=5)
    state = run.part(state, ranks=1, steps=3 * 21)
    run.part(state, ranks=2, steps=25)
    del run.parts[1]
    reports = hr.verify(run.parts, run.loader())
    assert [report.once for report in reports] == [10, 0, 0, N - 10, N, 20]
    lost = [*hr.Permutation(N, seed=1, epoch=3)[:10]]
    assert reports[3].others["never"].tolist() == sorted(lost)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3, "drop_last": True},
        {"batch_size": 3, "drop_last": True, "shuffle": True, "seed": 0},
        {"batch_sampler": BatchSampler(elastic(), 3, drop_last=True)},
    ],
    ids=["in_order", "shuffled", "batch_sampler"],
)
def test_last_samples_that_an_epoch_drops_were_never_delivered(options):
    loader = hr.DataLoader(range(N), **options)
    left = {*range(N)}.difference(*(batch.tolist() for batch in loader))
    first, second = hr.verify([(None, loader.state_dict())], loader)
    assert {*first.others["never"].tolist()} == left
    assert (first.once, first.ended, second.once) == (39, True, 0)


def test_exclusions_last_where_a_trainer_skips_an_epoch_that_is_over():
    loaders = [hr.DataLoader(range(N), 8, shuffle=True, seed=0) for _ in range(2)]
    loaders[0].exclude(keys=[7])
    (*_, state) = [loaders[0].state_dict() for _ in loaders[0]]
    loaders[1].load_state_dict(state)
    loaders[1]._control.position.skip_rest()
    batches = [batch.tolist() for batch in loaders[1]]
    assert {*range(N)}.difference(*batches) == {7}
    second = hr.verify([(state, loaders[1].state_dict())], loaders[1])[1]
    assert (second.once, second.others["excluded"].tolist()) == (N - 1, [7])


def test_ranks_of_an_exact_sampler_drop_batches_of_their_own():
    run = Run(functools.partial(elastic, exact=True), drop_last=True)
    ranks = [run.loader(rank, ranks=3, batch_size=7) for rank in range(3)]
    batches = [batch for loader in ranks for batch in loader]
    report, _ = hr.verify([(None, ranks[0].state_dict())], ranks[2])
    assert report.once == 7 * len(batches) == 28


@pytest.mark.parametrize("stop", ["first", "all"])
def test_samples_that_a_mix_repeats_or_leaves_out_are_reported(stop):
    mix = hr.mix([Numbers(30), Numbers(8).map(lambda n: n + 30)], [1, 1], stop=stop)
    loader = hr.DataLoader(mix, 4, shuffle=True, seed=0)
    loader.exclude(keys=[31])
    given = Counter(index for batch in loader for index in batch.tolist())
    report, _ = hr.verify([(None, loader.state_dict())], loader)
    assert report.once == [*given.values()].count(1)
    others = {kind: {*indices.tolist()} for kind, indices in report.others.items()}
    repeated = {index for index in given if given[index] > 1}
    never = {*range(38)} - given.keys() - {31}
    assert others == {"repeated": repeated, "never": never, "excluded": {31}}
    assert (bool(repeated), bool(never)) == (stop == "all", stop == "first")


def test_batches_out_of_order_are_refused():
    with hr.DataLoader(
        Held(0, length=N), 2, sampler=elastic(shuffle=False), in_order=False
    ) as loader:
        next(iter(loader))
        with pytest.raises(hr.StateError, match="out of order"):
            hr.verify([(None, loader.state_dict())], loader)


def test_states_that_do_not_belong_together_are_refused(as_rank):
    run = Run(elastic)
    first = run.part(None, ranks=2, steps=3)
    second = run.part(first, ranks=2, steps=3, batch_size=3)
    as_rank(0, 2)
    other_seed = Run(functools.partial(elastic, seed=2)).loader()
    undivided = hr.DataLoader(range(N), shuffle=True, seed=0)
    next(iter(undivided))
    for parts, loader, message in (
        ([(None, first), (second, first)], run.loader(), r"part 1 .* wrong order"),
        ([(None, second)], run.loader(), r"batch_size= .* changed .* give two parts"),
        ([(None, second)], other_seed, r"ElasticSampler\(.*seed=1.* is .*seed=2"),
        ([(None, undivided.state_dict())], undivided, "of 2 ranks.* with its sampler"),
        (
            [],
            hr.DataLoader(range(N), shuffle=True),
            "RandomSampler.* use shuffle=True with seed=",
        ),
        ([], hr.DataLoader(stream(1, 2)), "a state of stream"),
    ):
        with pytest.raises(hr.StateError, match=message):
            hr.verify(parts, loader)
