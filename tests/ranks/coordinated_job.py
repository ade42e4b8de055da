"""One rank of a job with coordinated loaders; run by `test_coordinated.py`.

It prints a JSON object: for each scenario, the number of steps of each epoch, or the error.
"""

import asyncio
import os
import threading
import warnings

import torch
import torch.distributed as dist

import headrace as hr
from tests.ranks.jobs import answer
from tests.unit.streams.reading import Plain

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
KEPT = (17, 5)  # samples of each rank


class Uneven(hr.AsyncIterableDataset):
    """As many numbers as each rank has; some of them raise errors."""

    splits_by_rank = True

    def __init__(self, counts=KEPT, bad=()):
        self.counts, self.bad = counts, bad

    async def __aiter__(self):
        for number in range(self.counts[hr.get_rank_info().rank]):
            yield (number, (RANK, number) in self.bad)


class TorchStream(torch.utils.data.IterableDataset):
    """The same for torch."""

    splits_by_rank = True

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        every = range(KEPT[hr.get_rank_info().rank])
        return iter(every if info is None else every[info.id :: info.num_workers])


class NoLength(Uneven):
    """A stream whose length is an error."""

    def __len__(self):
        raise RuntimeError("unknown before the first pass")


def check(sample):
    if sample[1]:
        raise ValueError(f"bad sample {sample[0]}")
    return sample[0]


def keeps(number):
    """For ranks after `split`: the first of them get few, the others many."""
    return number % RANKS < RANKS - 1 or number < 3 * RANKS


class Failing:
    """A sampler that fails on rank 1."""

    def __iter__(self):
        for number in range(20):
            if RANK == 1 and number == 7:
                raise OSError("the list of samples is damaged")
            yield number


def loader(dataset, batch_size=1, **options):
    return hr.DataLoader(dataset, batch_size, coordinated=True, **options)


def epochs(coordinated, number=2):
    with coordinated:
        return [sum(1 for _ in coordinated) for _ in range(number)]


def in_turn(coordinated):
    """The results of `next()` until the end, errors among them."""
    results, iterator = [], iter(coordinated)
    while True:
        try:
            results.append(next(iterator).tolist())
        except StopIteration:
            return results
        except ValueError as error:
            results.append(str(error).partition("\n")[0])


def bad_on_rank_0(number):
    """Raises for all samples of the first two batches of rank 0."""
    if number in range(0, 8 * RANKS, RANKS):
        raise ValueError("bad")
    return number


def lost(dataset, **options):
    """The position after the first step, what was lost and discarded until then, and the steps of two epochs."""
    with loader(
        dataset, 4, transform=bad_on_rank_0, on_error="skip", **options
    ) as skipping:
        next(iter(skipping))
        state, stats = skipping.state_dict()["state"][0], skipping.stats()
        position = [
            state["batches"],
            state["lost"],
            stats.lost_batches,
            stats.discarded_batches,
        ]
        return position, epochs(skipping)


def error_of(iterate):
    try:
        return iterate()
    except (hr.errors.HeadraceError, OSError) as error:
        return [
            type(error).__name__,
            list(getattr(error, "ranks", None) or ()),
            str(error),
        ]


def with_async_for():
    async def steps():
        coordinated = loader(Uneven())
        try:
            return [len([batch async for batch in coordinated]) for _ in range(2)]
        finally:
            await coordinated.aclose()

    return asyncio.run(steps())


def loop_runs_meanwhile(store):
    """Rank 0 waits for the others in `anext()`, and they for a task on its event loop."""

    async def first():
        async def other_task():
            for _ in range(5):
                await asyncio.sleep(0)
            store.set("task has run", "")

        coordinated = loader(Uneven())
        async with coordinated:
            iterator = aiter(coordinated)
            task = asyncio.create_task(asyncio.sleep(0.05))  # runs out while rank 0 waits
            task.add_done_callback(lambda _: asyncio.ensure_future(other_task()))
            await anext(iterator)
            return 1 + len([batch async for batch in iterator])

    if RANK == 0:
        return asyncio.run(first())
    with loader(Uneven()) as coordinated:
        iterator = iter(coordinated)
        store.wait(["task has run"])
        return sum(1 for _ in iterator)


def left_in_the_middle():
    with loader(Uneven()) as coordinated:
        for step, _ in enumerate(coordinated):
            if step == 2:
                break
        return [step + 1, sum(1 for _ in coordinated)]


def closed_in_the_middle():
    coordinated = loader(Uneven())
    iterator = iter(coordinated)
    next(iterator)
    coordinated.close()
    return epochs(coordinated, 1)


def resumed():
    with loader(Uneven()) as coordinated:
        iterator = iter(coordinated)
        before = [next(iterator) for _ in range(3)]
        state = coordinated.state_dict()
    again = loader(Uneven())
    again.load_state_dict(state)
    return [len(before), *epochs(again)]


class Ending(Uneven):
    """Sets an event at the end."""

    ended = threading.Event()

    async def __aiter__(self):
        async for sample in super().__aiter__():
            yield sample
        self.ended.set()


def discarded():
    data = Ending((7, 5))
    with loader(
        data, placement="thread", num_workers=1, prefetch_factor=16
    ) as coordinated:
        steps = sum(data.ended.wait() for _ in coordinated)
        stats = coordinated.stats()
        return [steps, stats.batches, stats.discarded_batches]


def one_leaves(store):
    """Rank 1 begins another epoch at another step."""
    with loader(Uneven()) as coordinated:
        iterator = iter(coordinated)
        next(iterator)
        if RANK == 1:
            return error_of(lambda: [next(iter(coordinated)), *coordinated])
        return error_of(lambda: list(iterator))


class Announcing(Uneven):
    """The same number on all ranks; sets an event when some batches are ready."""

    read = threading.Event()

    async def __aiter__(self):
        for number in range(40):
            if number == 12:
                self.read.set()
            yield (number, False)


def left_at_different_steps():
    """Rank 0 leaves after 3 steps, the others after 4, while all of them are granted; the next epoch is an error."""

    def steps():
        for step, _ in enumerate(coordinated, 1):
            Announcing.read.wait()
            if step == 3 + (RANK > 0):
                break
        return [sum(1 for _ in coordinated)]

    with loader(
        Announcing(), placement="thread", num_workers=1, prefetch_factor=16
    ) as coordinated:
        return error_of(steps)


def gathered_in_the_tail():
    """The state of step 8, when rank 1 has ended, and one of step 17, when both have; each then runs two epochs."""
    with hr.DataLoader(Uneven()) as alone:
        iterator, states = iter(alone), []
        for _ in range(18):
            next(iterator, None)
            states.append(hr.gather_state(alone))
    found = []
    for state in (states[8], states[17]):
        again = hr.DataLoader(Uneven())
        again.load_state_dict(state)
        found += epochs(again)
    return found


def one_closes():
    coordinated = loader(Uneven())
    iterator = iter(coordinated)
    next(iterator)
    if RANK == 1:
        coordinated.close()
        return error_of(lambda: next(iterator))
    return error_of(lambda: list(iterator))


def one_does_not_answer(store):
    with loader(Uneven(), timeout=0.5) as coordinated:
        iterator = iter(coordinated)
        if RANK == 1:
            store.wait([f"{rank} has timed out" for rank in range(RANKS) if rank != 1])
            return error_of(lambda: next(iterator))
        found = error_of(lambda: next(iterator))
        store.set(f"{RANK} has timed out", "")
        return found


def one_fails():
    with loader([0.0] * 20, sampler=Failing()) as coordinated:
        return [error_of(lambda: list(coordinated)), error_of(lambda: list(coordinated))]


def one_cannot_begin():
    with loader(
        Uneven(), collate_fn=None if RANK else Unpicklable(), num_workers=1
    ) as coordinated:
        return error_of(lambda: list(coordinated))


class Unpicklable:
    def __call__(self, samples):
        return samples

    def __reduce__(self):
        raise TypeError("stays here")


def scenarios(store):
    yield "filter", lambda: epochs(loader(Plain(400).split().filter(keeps), 4))
    yield "none on a rank", lambda: epochs(loader(Uneven((6, 0))))
    yield "thread", lambda: epochs(loader(Uneven()))
    yield (
        "in the order of completion",
        lambda: epochs(loader(Uneven(), in_order=False, num_workers=1)),
    )
    yield "process", lambda: epochs(loader(Uneven(), placement="process", num_workers=1))
    yield "torch, inline", lambda: epochs(loader(TorchStream()))
    yield "torch, workers", lambda: epochs(loader(TorchStream(), num_workers=2))
    yield "no length", lambda: epochs(loader(NoLength()))
    yield "on the device", lambda: epochs(loader(Uneven(), device="cpu"))
    yield "async for", with_async_for
    yield "task runs", lambda: loop_runs_meanwhile(store)
    bad = ((0, 1), (1, 2), (1, 4))
    yield "errors", lambda: in_turn(loader(Uneven(bad=bad), transform=check))
    yield (
        "skipped",
        lambda: epochs(loader(Uneven(bad=bad), transform=check, on_error="skip")),
    )
    yield "break", left_in_the_middle
    yield "close", closed_in_the_middle
    yield "resumed", resumed
    yield "discarded", discarded
    for workers in (0, 1):
        sampler = torch.utils.data.DistributedSampler(range(64), shuffle=False)
        yield (
            f"lost, {workers}",
            lambda: lost([*range(64)], sampler=sampler, num_workers=workers),  # noqa: B023
        )
        stream = Plain(400).take(64).split()
        yield f"lost in a stream, {workers}", lambda: lost(stream, num_workers=workers)  # noqa: B023
    yield "gathered in the tail", gathered_in_the_tail
    yield "left at different steps", left_at_different_steps
    yield "one leaves", lambda: one_leaves(store)
    yield "one closes", one_closes
    yield "one fails", one_fails
    yield "one cannot begin", one_cannot_begin
    yield "one does not answer", lambda: one_does_not_answer(store)


def main():
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    said = {}
    for name, run in scenarios(store):
        said[name] = run()
        dist.barrier()
    answer(said)


if __name__ == "__main__":
    main()
