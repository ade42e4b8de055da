"""Helpers for tests of sessions that begin within an epoch: streams, and epochs in each placement."""

import itertools
import json
from contextlib import contextmanager

import torch

import headrace as hr
from headrace._core.batches import SessionStart, load_state
from headrace._core.consumer.planning import Planner, PlanStart
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.config import EngineConfig
from headrace._core.error_policy import Tolerance
from headrace._core.links.inline import InlineLink
from headrace._core.links.select import PlacementSelector
from headrace._core.links.session import Session
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.streams.kinds import kind_of
from headrace.options import checked_options, engine_options

BEGINNING = SessionStart()
RANK = RankInfo(0, 1, "test")


class Broken(ValueError):
    """The error of a sample."""


def sample(number, failing):
    if number in failing:
        raise Broken(number)
    return number


class AsyncCount(hr.AsyncIterableDataset):
    """An async stream without a state."""

    def __init__(self, length, failing=()):
        self.length, self.failing = length, failing

    def __aiter__(self):
        return AsyncCounter(self)


class AsyncCounter:
    def __init__(self, owner):
        self.owner, self.next = owner, 0

    async def __anext__(self):
        if self.next >= self.owner.length:
            raise StopAsyncIteration
        self.next += 1
        return sample(self.next - 1, self.owner.failing)


class StatefulAsyncCount(AsyncCount):
    def __aiter__(self):
        return StatefulAsyncCounter(self)


class StatefulAsyncCounter(AsyncCounter):
    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class TorchCount(torch.utils.data.IterableDataset):
    """A torch stream without a state; each worker reads its part."""

    def __init__(self, length, failing=()):
        self.length, self.failing = length, failing

    def part(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return range(first, self.length, step)

    def __iter__(self):
        return Counter(self)


class Counter:
    def __init__(self, owner):
        self.owner, self.part, self.next = owner, owner.part(), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= len(self.part):
            raise StopIteration
        self.next += 1
        return sample(self.part[self.next - 1], self.owner.failing)


class StatefulTorchIterators(TorchCount):
    def __iter__(self):
        return StatefulCounter(self)


class StatefulCounter(Counter):
    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def configured(dataset, *, size=2, skips=False, **options):
    defaults = {"num_workers": 0, "drop_last": False, "in_order": True, "deferred": False, "pipe_seed": None}
    collate = list if size is not None else _unchanged
    return EngineConfig(
        dataset=dataset,
        kind=kind_of(dataset),
        assembler=Assembler((), collate, size is not None, Tolerance(skips)),
        options=engine_options(checked_options({})),
        look_ahead=6,
        batched=size is not None,
        base_seed=7,
        common_seed=0,
        worker_init_fn=None,
        context=None,
        rank=RANK,
        **{**defaults, **options},
    )


def _unchanged(one):
    return one


class Opener:
    """Opens sessions of one configuration in one placement, with workers that persist."""

    def __init__(self, config, placement, *, persistent=True):
        self.config = config
        self._inline = placement == "inline"
        self._persistent = persistent
        self._selector = PlacementSelector("thread" if self._inline else placement)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._selector.close()

    def open(self, epoch, start):
        config = self.config
        if self._inline:
            link = InlineLink(
                config.dataset,
                iterable=config.kind.is_iterable,
                assembler=config.assembler,
                drop_last=config.drop_last,
                epoch=epoch,
                rank=RANK,
                start=start,
            )
            return Session(lambda _: link)
        return self._selector.open(config, epoch, set_epoch=True, persistent=self._persistent, start=start)

    def batches(self, start=BEGINNING, *, size=2, epoch=0, ahead=4, draws=None, repeats=False):
        """The batches of an epoch, read with a look-ahead; those without samples and failures are included.

        Args:
            start: where it begins.
            size: samples in a batch of a stream.
            epoch: its number.
            ahead: batches that are planned ahead.
            draws: the indices of each batch, from the epoch's beginning; None for a stream.
            repeats: whether the plans repeat, in place of batches that were lost.
        """
        session = self.open(epoch, start)
        planner = Planner(
            itertools.repeat([None] * (size or 1)) if draws is None else draws[start.batch :],
            batched=True,
            stream=draws is None,
            base_seed=7,
            epoch=epoch,
            start=PlanStart(batches=start.batch),
        )
        plans = iter(lambda: planner.repeat(None), None) if repeats else planner
        outstanding, ended = 0, False
        try:
            while outstanding or not ended:
                if not ended:
                    new = [*itertools.islice(plans, ahead - outstanding)]
                    ended = len(new) < ahead - outstanding
                    session.send(new)
                    outstanding += len(new)
                if not outstanding:
                    break
                while (host := session.take()) is None:
                    if session.ended:
                        raise session.error
                    assert session.wait(30)
                outstanding -= 1
                ended = ended or host.end
                yield host
        finally:
            session.close()


def given(hosts):
    """What a consumer gets of batches: the data, and the errors."""
    found = []
    for host in hosts:
        data = host.data.loads() if hasattr(host.data, "loads") else host.data
        found += [repr(failure.error) for failure in host.failures]
        found += [] if host.empty else [data]
    return found


def start_after(hosts, workers=1):
    """The start of a session that continues after these batches, as its JSON says."""
    streams = {host.worker: load_state(host.stream_state) for host in hosts if host.stream_state is not None}
    streams = {worker: json.loads(json.dumps(state)) for worker, state in streams.items()}
    ended = frozenset(worker for worker, state in streams.items() if "ended" in state and worker is not None)
    last = hosts[-1].worker if hosts else None
    return SessionStart(
        batch=len(hosts), streams=streams, ended=ended, next_worker=0 if last is None else (last + 1) % workers
    )


@contextmanager
def opened(dataset, placement, *, persistent=True, **options):
    with Opener(configured(dataset, **options), placement, persistent=persistent) as opener:
        yield opener
