"""What the documentation promises, as a loader that does one thing after the other.

The same program runs with this module's names and with headrace's. Both must give the same batches,
errors and states, and leave the program's own random generators alike. Only public names of
headrace are used:

- `hr.Permutation` is the documented order of `shuffle=True` with a seed, and of
  `hr.ElasticSampler`;
- a sampler of headrace or of torch, read without a loader, is the order that a loader with this
  sampler promises;
- the order of `stream.shuffle` and the choices of `hr.mix` are read from streams of plain numbers;
- random numbers are read from the simplest loader: they depend on seed, epoch and position, and on
  nothing else.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler

import headrace as hr
from headrace.errors import TooManySkippedError
from tests.model import drawn, mixes, parts
from tests.model.drawn import chosen, place_of_program, random_numbers, shuffled, state_of
from tests.model.parts import BadSampleError


class Samples:
    """A map-style dataset: `read(index)` returns a sample, or raises its error."""

    blocks = None

    def __init__(self, size, read):
        self.size, self.read = size, read

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.read(index)

    def map(self, function):
        mapped = Samples(self.size, lambda index: function(self.read(index)))
        mapped.blocks = self.blocks
        return mapped


def numbers(*, of_torch=False, blocks=None):
    """A class of datasets."""

    def make(size, failing=(), slowest=0.0):
        dataset = Samples(size, lambda index: parts.checked(index, failing))
        dataset.of_torch, dataset.blocks = of_torch, blocks
        return dataset

    return make


# batches with an error are read again sample by sample
Numbers = RangedNumbers = BatchedNumbers = numbers()
IndexedNumbers = numbers(blocks={"block_size": 2, "blocks_at_once": 6})
TorchNumbers = BatchedTorchNumbers = numbers(of_torch=True)


def fetched(number):
    return number + 100


class Failed(NamedTuple):
    """A sample of a stream that could not be read."""

    index: int


class Place(NamedTuple):
    """Where a stream is read: it decides on the order."""

    epoch: int
    seed: int
    rank: int = 0
    world_size: int = 1
    repetition: int = 0  # of a `repeat` around the stream


class Stream:
    """A stream: `items(place)` yields samples, and `Failed` where one cannot be read."""

    # whether each worker reads a copy of it, as of torch's streams
    copies = of_torch = False

    def __init__(self, items):
        self.items = items

    def map(self, function):
        def items(place):
            return (
                item if isinstance(item, Failed) else function(item)
                for item in self.items(place)
            )

        return Stream(items)

    def filter(self, function):
        return Stream(
            lambda place: (
                each
                for each in self.items(place)
                if isinstance(each, Failed) or function(each)
            )
        )

    def take(self, count):
        def items(place):
            left = count
            for item in self.items(place) if count else ():
                yield item
                left -= not isinstance(item, Failed)
                if not left:
                    return

        return Stream(items)

    def repeat(self, times=None):
        """Each repetition is another pass. Without a number, a repetition without a sample is the last."""

        def items(place):
            for repetition in itertools.count() if times is None else range(times):
                given = list(self.items(place._replace(repetition=repetition)))
                yield from given
                if times is None and not given:
                    return

        return Stream(items)

    def shuffle(self, buffer_size, seed=None):
        """Each window of `buffer_size` samples is permuted."""

        def items(place):
            samples, own_seed = (
                list(self.items(place)),
                place.seed if seed is None else seed,
            )
            order = shuffled(
                len(samples), buffer_size, own_seed, place.epoch, place.repetition
            )
            return (samples[position] for position in order)

        return Stream(items)

    def split(self):
        """Every n-th sample for each of n ranks, without an incomplete last round."""

        def items(place):
            whole = list(self.items(place._replace(rank=0, world_size=1)))
            rounds = len(whole) // place.world_size * place.world_size
            return iter(whole[place.rank : rounds : place.world_size])

        return Stream(items)

    def pack(self, seq_len, strategy="concat", *, window=32, **options):
        return Stream(
            lambda place: iter(
                packed(self.items(place), seq_len, strategy, window, **options)
            )
        )


def Count(size, failing=(), slowest=0.0, start=0):
    def items(place):
        return (
            Failed(index) if index in failing else index
            for index in range(start, start + size)
        )

    return Stream(items)


CountAgain = Count


class TorchCount(Stream):
    copies = of_torch = True

    def __init__(self, size, failing=(), divided=False):
        super().__init__(Count(size, failing).items)
        self.size, self.divided = size, divided

    def in_worker(self, worker, workers):
        """The samples that one worker reads."""
        return (
            list(range(worker, self.size, workers))
            if self.divided
            else list(self.items(None))
        )


def concat(datasets):
    if isinstance(datasets[0], Stream):
        return Stream(
            lambda place: itertools.chain.from_iterable(
                each.items(place) for each in datasets
            )
        )
    places = [(each, index) for each in datasets for index in range(len(each))]
    return Samples(len(places), lambda index: places[index][0][places[index][1]])


def mix(datasets, weights, *, seed=None, stop="first"):
    """Streams: each rank draws each sample from one of them. Map-style datasets: an order that is computed."""
    if isinstance(datasets[0], Stream):
        return mix_of_streams(datasets, weights, seed, stop)
    mixed = concat(datasets)
    schedule = weights if isinstance(weights[0], tuple) else [(0, weights)]
    mixed.sampler = functools.partial(MixSampler, datasets, schedule, stop, seed)
    return mixed


def mix_of_streams(streams, weights, seed, stop):
    """Draws each sample from one of the streams. Those that have ended start again with ``stop="all"``."""

    def items(place):
        choices = chosen(
            tuple(weights), place.seed if seed is None else seed, place.epoch, place.rank
        )
        passes = [0] * len(streams)
        sources = [iter(each.items(place)) for each in streams]
        for choice in choices:
            for item in sources[choice]:
                yield item
                break
            else:
                passes[choice] += 1
                if stop == "first" or all(passes):
                    return
                sources[choice] = iter(streams[choice].items(place))
                yield next(sources[choice])

    return Stream(items)


def batch_by_tokens(stream, max_tokens, *, length=len, boundaries=(), padded=True):
    """Batches from buckets of similar lengths: a batch is given when the next sample does not fit in."""

    def items(place):
        buckets = [[] for _ in range(len(boundaries) + 1)]
        for sample in stream.items(place):
            bucket = sum(length(sample) > bound for bound in boundaries)
            lengths = [max(1, length(each)) for each in [*buckets[bucket], sample]]
            # an empty sample counts as one token
            size = max(lengths) * len(lengths) if padded else sum(lengths)
            if size > max_tokens and buckets[bucket]:
                yield buckets[bucket]
                buckets[bucket] = []
            buckets[bucket].append(sample)
        yield from filter(None, buckets)

    return Stream(items)


def packed(
    documents, seq_len, strategy, window, *, carry=(), limits=None, align=1, pad_to=None, too_long="cut"
):  # fmt: skip
    """Sequences of documents. The longest wait of an open sequence is 4 × `window` others."""
    window, limits, left_out = 1 if strategy == "concat" else window, limits or {}, 0
    # an open one: its pieces, and how many sequences were closed before it
    open_ones, closed = ([], [])

    def used(one):
        """Tokens with their padding, and the amount for each limit."""
        tokens = sum(-(-len(piece) // align) * align for piece, _ in one[0])
        return [tokens, *(sum(values[key] for _, values in one[0]) for key in limits)]

    def within_limits(one, values):
        amounts = used(one)[1:]
        return all(
            amount + values[key] <= limits[key]
            for amount, key in zip(amounts, limits, strict=True)
        )

    def close(one):
        open_ones.remove(one)
        closed.append(sequence(one[0], align, pad_to or seq_len, carry))
        if too_long != "cut":
            closed[-1]["too_long"] = left_out

    for values in documents:
        values = values if isinstance(values, dict) else {"tokens": values}
        document = values["tokens"]
        if len(document) > seq_len and too_long != "cut":
            left_out += 1
            document = document[:seq_len] if too_long == "truncate" else []
        while document:
            if (
                strategy == "concat"
                and open_ones
                and not within_limits(open_ones[0], values)
            ):
                close(open_ones[0])
            into_open = strategy == "concat" and open_ones
            room = seq_len - used(open_ones[0])[0] if into_open else seq_len
            piece, document = document[:room], document[room:]
            fitting = [
                one
                for one in open_ones
                if used(one)[0] + len(piece) <= seq_len and within_limits(one, values)
            ]
            if fitting:
                place = max(fitting, key=used) if strategy == "best_fit" else fitting[0]
            else:
                if len(open_ones) >= window and len(piece) < seq_len:
                    close(max(open_ones, key=used))
                place = ([], len(closed))
                open_ones.append(place)
            place[0].append((piece, values))
            if used(place)[0] >= seq_len:
                close(place)
        while open_ones and len(closed) - open_ones[0][1] >= 4 * window:
            close(open_ones[0])
    for one in [*open_ones]:
        close(one)
    return closed


def sequence(pieces, align, pad_to, carry):
    tokens, segments, positions = [], [], []

    def pad(multiple):
        padding = range(-len(tokens) % multiple)
        tokens.extend(0 for _ in padding)
        segments.extend(0 for _ in padding)
        positions.extend(padding)

    for number, (piece, _) in enumerate(pieces, 1):
        pad(align)
        tokens += piece
        segments += [number] * len(piece)
        positions += range(len(piece))
    pad(pad_to)
    rows = {"tokens": tokens, "segment_ids": segments, "positions": positions}
    return rows | {key: [values[key] for _, values in pieces] for key in carry}


# Samplers. A computed order is one of all ranks, dealt to them sample by sample.


class ComputedOrder:
    """An order in which each position is known. `whole(epoch)` is that of all ranks."""

    drop_last = exact = False
    dealt = True  # whether the ranks share the order; else each has all of it
    excluded: tuple = ()  # pairs of an epoch, or None for all, and an index

    def of_all_ranks(self, epoch):
        out = {index for number, index in self.excluded if number in (None, epoch)}
        return [index for index in self.whole(epoch) if index not in out]

    def of_rank(self, epoch, cursor, rank, world_size):
        """The indices of a rank from a position on, with their positions."""
        order = self.of_all_ranks(epoch)
        if not self.dealt:
            return [
                (index, position)
                for position, index in enumerate(order)
                if position >= cursor
            ]
        left = max(len(order) - cursor, 0) - rank * self.exact
        rounds = left // world_size if self.drop_last else -(-left // world_size)
        positions = [cursor + rank + number * world_size for number in range(rounds)]
        return [(order[position % len(order)], position) for position in positions]


class ElasticSampler(ComputedOrder):
    def __init__(
        self, dataset, *, shuffle=True, seed=0, drop_last=False, exact=False, dealt=True
    ):
        self.size, self.shuffle, self.seed, self.dealt = (
            len(dataset),
            shuffle,
            seed,
            dealt,
        )
        self.drop_last, self.exact = drop_last, exact

    def whole(self, epoch):
        return (
            list(hr.Permutation(self.size, self.seed, epoch))
            if self.shuffle
            else list(range(self.size))
        )


class BlockShuffleSampler(ComputedOrder):
    drop_last = True

    def __init__(self, dataset, *, shuffle=True, **options):
        self.sampler = hr.BlockShuffleSampler(
            len(dataset), shuffle=shuffle, **options, rank=0, world_size=1
        )
        self.shuffle = shuffle

    def whole(self, epoch):
        self.sampler.set_epoch(epoch)
        by_ranks = not self.shuffle and place_of_program()[1] > 1
        return drawn.side_by_side(self.sampler) if by_ranks else list(self.sampler)


class MixSampler(ComputedOrder):
    drop_last = True

    def __init__(self, datasets, schedule, stop, own_seed, *, shuffle, seed):
        blocks = [part.blocks if shuffle else None for part in datasets]
        mix = mixes.Mix([*map(len, datasets)], blocks, schedule, stop)
        self.shuffle, self.seed = shuffle, seed if own_seed is None else own_seed
        self.whole = functools.cache(
            functools.partial(mix.order, self.seed, shuffle=shuffle)
        )


class Position(NamedTuple):
    """A saved state: where an epoch begins, or is continued."""

    epoch: int
    batches: int = 0  # given out on this rank
    cursor: int = 0  # samples given out; of all ranks, where the ranks share an order
    over: bool = False  # whether the epoch has no more batches
    rest: Iterable = ()  # batches that are left of a drawn order
    sampler: object = None  # state of a sampler of the user's
    generator: object = None  # state of `generator=`
    excluded: tuple = ()
    # Batches that lost all their samples: pairs of epoch and number.
    lost: frozenset = frozenset()
    # whether workers that persist have begun: torch draws their seed once
    has_workers: bool = False


class DataLoader:
    """The loader. The options in `ignored` make no difference to the batches."""

    def __init__(
        self, dataset, batch_size=1, shuffle=None, sampler=None, batch_sampler=None, *, drop_last=False,
        generator=None, seed=None, transform=None, on_error="raise", collate_fn=None, num_workers=0,
        persistent_workers=False, drawn_ahead=1, **ignored,
    ):  # fmt: skip
        self.dataset, self.batch_size, self.drop_last, self.seed = (
            dataset,
            batch_size,
            drop_last,
            seed,
        )
        self.generator, self.transform, self.on_error = generator, transform, on_error
        self.is_stream = isinstance(dataset, Stream)
        self.copies = num_workers if self.is_stream and dataset.copies else 0
        self.drawn_ahead = drawn_ahead  # batches that are drawn before the first is given
        self.keeps_workers = persistent_workers and getattr(dataset, "of_torch", False)
        self.order = self.sampler = self.batches = None
        if batch_sampler is not None:
            self.batches, self.sampler = (
                batch_sampler,
                getattr(batch_sampler, "sampler", None),
            )
        elif not self.is_stream:
            self._choose_order(shuffle, sampler)
        self.epoch, self.skipped_samples, self.lost = 0, 0, frozenset()
        self.restored, self.iteration, self.has_workers = None, None, False

    def _choose_order(self, shuffle, sampler):
        if isinstance(sampler, ComputedOrder):
            self.order = sampler
        elif sampler is None and hasattr(self.dataset, "sampler"):
            self.order = self.dataset.sampler(shuffle=bool(shuffle), seed=self.seed or 0)
        elif (
            sampler is None
            and getattr(self.dataset, "blocks", None)
            and not self.generator
        ):
            options = {**self.dataset.blocks, "seed": self.seed or 0}
            self.order = BlockShuffleSampler(self.dataset, shuffle=shuffle, **options)
        elif sampler is None and not shuffle:
            self.order = ElasticSampler(self.dataset, shuffle=False, dealt=False)
        elif sampler is None and self.seed is not None and self.generator is None:
            self.order = ElasticSampler(self.dataset, seed=self.seed, dealt=False)
        else:
            self.sampler = sampler or RandomSampler(
                self.dataset, generator=self.generator
            )
            unbatched = self.batch_size is None
            self.batches = (
                self.sampler
                if unbatched
                else BatchSampler(self.sampler, self.batch_size, self.drop_last)
            )

    @property
    def order_generator(self):
        """The generator that the order is drawn from, if it is not that of the process."""
        return getattr(self.sampler, "generator", None) or self.generator

    def set_epoch(self, epoch):
        if self.restored is None:
            self.epoch = epoch
            for part in (self.sampler, self.batches):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)

    def __iter__(self):
        self.has_workers |= self.restored is not None and self.restored.has_workers
        draws_seed = self.seed is None and not (self.keeps_workers and self.has_workers)
        self.iteration = Iteration(
            self, self.restored or Position(self.epoch), draws_seed=draws_seed
        )
        self.epoch, self.restored, self.has_workers = self.iteration.epoch + 1, None, True
        return self.iteration

    __aiter__ = __iter__

    @property
    def draws_own_seed(self):
        """Whether the order has a seed that torch's sampler draws from the generator of the process."""
        return isinstance(self.sampler, RandomSampler) and self.order_generator is None

    @property
    def stateful(self):
        """The sampler of the user's that has a state; None if there is none."""
        return next(
            (
                part
                for part in (self.batches, self.sampler)
                if hasattr(part, "state_dict")
            ),
            None,
        )

    def state_dict(self):
        if self.restored is not None:
            return self.restored
        under_way = self.iteration is not None and not self.iteration.ended
        return self.iteration.position() if under_way else self.next_epoch()

    def next_epoch(self):
        excluded = self.order.excluded if self.order else ()
        own = {
            "sampler": state_of(self.stateful),
            "generator": state_of(self.order_generator),
        }
        return Position(
            self.epoch,
            **own,
            excluded=excluded,
            lost=self.lost,
            has_workers=self.has_workers,
        )

    def load_state_dict(self, state):
        self.restored, self.lost = state, state.lost
        if self.order is not None:
            self.order.excluded = state.excluded

    def stats(self):
        return self

    def batch_at(self, epoch, step):
        """What the loop got as a step: lost batches are no steps."""
        self._check_rewind()
        iteration = Iteration(self, Position(epoch))
        plans = [
            plan
            for number, plan in enumerate(iteration.plans)
            if (epoch, number) not in self.lost
        ]
        return iteration.made_of(*plans[step])

    def samples_at(self, epoch, steps):
        self._check_rewind()
        plans = enumerate(Iteration(self, Position(epoch)).plans)
        planned = [
            indices for number, (indices, _) in plans if (epoch, number) not in self.lost
        ]
        return [planned[step] for step in steps]

    def _check_rewind(self):
        if self.seed is None or not self.order:
            raise ValueError("the order or the randomness does not follow from the seed")

    def exclude(self, *, steps=(), keys=()):
        """Leave samples out. The others move up; the position stays behind the samples that were given."""
        order, now = self.order, self.state_dict()
        size = (self.batch_size or 1) * (place_of_program()[1] if order.dealt else 1)
        given = set(order.of_all_ranks(now.epoch)[: now.cursor])
        out = [(None, key) for key in keys]
        for epoch, numbers in dict(steps).items():
            indices = order.of_all_ranks(epoch)
            for step in numbers:
                if step * size >= len(indices):
                    raise IndexError(step)
                out += [
                    (epoch, index) for index in indices[step * size : (step + 1) * size]
                ]
        order.excluded = (*order.excluded, *out)
        cursor = sum(index in given for index in order.of_all_ranks(now.epoch))
        self.restored = now._replace(cursor=cursor, excluded=order.excluded)


class Iteration:
    """One epoch, or the rest of an epoch."""

    def __init__(self, loader, start, *, draws_seed=False):
        self.loader, self.epoch = loader, start.epoch
        self.batches, self.cursor, self.ended = start.batches, start.cursor, False
        self.begun_over = start.over  # the epoch of the state was over already
        self.rank, self.world_size = place_of_program()
        # batches without a sample, and samples skipped before
        self.lost, self.skipped = (0, loader.skipped_samples)
        if start.generator is not None:
            loader.order_generator.set_state(start.generator)
        if start.sampler is not None:
            loader.stateful.load_state_dict(start.sampler)
        if getattr(loader.batches, "wants_epoch", False):
            loader.batches.set_epoch(self.epoch)
        if draws_seed and not start.batches:
            torch.empty((), dtype=torch.int64).random_(
                generator=loader.generator
            )  # torch's seed of the workers
        self.generator = state_of(loader.order_generator)
        self.plans = iter(() if start.over else self._plans(start))

    def _plans(self, start):
        """Pairs: the indices or items of a batch, and their positions in the order."""
        loader = self.loader
        if loader.is_stream:
            return self._stream_plans(start)
        if loader.order is not None:
            return self._computed(start.cursor)
        if loader.stateful is not None:
            # With a last batch that is not full, the sampler has ended: its state is of the next
            # epoch.
            over = loader.sampler is not None and start.cursor % (loader.batch_size or 1)
            return () if over else drawn_ahead(loader.batches, 0, start.cursor)
        if start.batches and loader.draws_own_seed:
            return start.rest
        # again, where the epoch is continued
        drawn = drawn_ahead(loader.batches, loader.drawn_ahead, 0)
        return itertools.islice(drawn, start.batches, None)

    def _computed(self, cursor):
        dealt = self.loader.order.of_rank(self.epoch, cursor, self.rank, self.world_size)
        return drawn.batched(dealt, self.loader.batch_size, self.loader.drop_last)

    def _stream_plans(self, start):
        loader, stream = self.loader, self.loader.dataset
        place = Place(self.epoch, loader.seed or 0, self.rank, self.world_size)
        if loader.copies:
            workers = [
                stream.in_worker(worker, loader.copies) for worker in range(loader.copies)
            ]
            batches = [
                self._batches(zip(items, itertools.count(), strict=False))
                for items in workers
            ]
            return self._after(start.batches, drawn.in_turn(batches))
        items = zip(stream.items(place), itertools.count(), strict=False)
        return self._after(start.batches, self._batches(items))

    def _after(self, number, batches):
        """The batches after the first ones, which are read again. Their lost samples have been counted."""
        skipped = self.loader.skipped_samples
        for _ in itertools.islice(batches, number):
            pass
        self.loader.skipped_samples = skipped
        return batches

    def _batches(self, pairs):
        """As torch: an error costs the samples of its batch before it, and the next batch begins behind it."""
        size, batch = self.loader.batch_size or 1, []
        for item, position in pairs:
            if isinstance(item, Failed) and self.loader.on_error == "skip":
                self.loader.skipped_samples += 1
                continue
            batch.append((item, position))
            if isinstance(item, Failed) or len(batch) == size:
                yield tuple(zip(*batch, strict=True))
                batch = []
        if batch and not self.loader.drop_last:
            yield tuple(zip(*batch, strict=True))

    def position(self):
        rest = ()
        if self.loader.draws_own_seed:
            self.plans, rest = itertools.tee(self.plans)
        over = False
        if self.loader.order is not None:
            # An epoch of which nothing was given is at its beginning, whether it has a batch on
            # this rank or not.
            over = self.batches > 0 and next(self._computed(self.cursor), None) is None
        given = {
            "epoch": self.epoch,
            "batches": self.batches,
            "cursor": self.cursor,
            "generator": self.generator,
        }
        return self.loader.next_epoch()._replace(
            **given, over=over or self.begun_over, rest=rest
        )

    def __iter__(self):
        return self

    def __next__(self):
        """The next batch, or the error of its first bad sample; batches without samples are skipped."""
        while True:
            try:
                indices, positions = next(self.plans)
            except StopIteration:
                ended, self.ended = self.ended, True
                if (
                    self.loader.skipped_samples > self.skipped
                    and self.batches == self.lost
                    and not ended
                ):
                    raise TooManySkippedError(
                        "no batch of the epoch has a sample"
                    ) from None
                raise
            self.batches += 1
            shared = self.loader.is_stream or (
                self.loader.order is not None and self.loader.order.dealt
            )
            self.cursor += len(indices) * (self.world_size if shared else 1)
            batch = self.made_of(indices, positions)
            if batch is not None:
                return batch
            self.lost += 1
            self.loader.lost |= {(self.epoch, self.batches - 1)}

    async def __anext__(self):
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def made_of(self, indices, positions):
        """The batch; None if all its samples were left out."""
        batch = self._transformed(*self._read(indices, positions))
        if not batch:
            return None
        return batch if self.loader.batch_size else batch[0]

    def _read(self, indices, positions):
        samples, kept = [], []
        for index, position in zip(indices, positions, strict=True):
            try:
                samples.append(
                    item_of(index)
                    if self.loader.is_stream
                    else self.loader.dataset[index]
                )
                kept.append(position)
            except BadSampleError:
                if self.loader.on_error == "raise":
                    raise
        self.loader.skipped_samples += len(indices) - len(kept)
        return samples, kept, positions[0]

    def _transformed(self, samples, positions, first):
        transform = self.loader.transform
        if transform is None:
            return samples
        if transform not in (parts.jittered, parts.noisy):
            return [parts.negated(sample) for sample in samples]
        numbers = random_numbers(transform, self.loader.seed, self.epoch)
        drawn = numbers[first]
        if transform is parts.jittered:
            drawn = [numbers[position][0] for position in positions]
        return [[sample, *each] for sample, each in zip(samples, drawn, strict=False)]


def item_of(item):
    if isinstance(item, Failed):
        raise BadSampleError(item.index)
    return item


def drawn_ahead(batches, ahead, first):
    """Batches of a sampler, drawn on the program's thread: `ahead` at first, and then one for each that is given."""
    drawn = iter(batches)
    waiting = list(itertools.islice(drawn, ahead))
    while True:
        waiting += itertools.islice(drawn, 1)
        if not waiting:
            return
        indices = waiting.pop(0)
        indices = indices if isinstance(indices, list) else [indices]
        yield indices, range(first, first + len(indices))
        first += len(indices)
