"""Programs that combine the features of the loader: drawn at random, run, compared, made smaller.

A program is text. It runs with headrace's names, and with the names of the reference. Both records
must be equal."""

import dataclasses
import itertools
import json
import math
import os
import tempfile
import time
import warnings

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import headrace as hr
from tests.model import parts, reference

MAPS = (
    "Numbers",
    "BatchedNumbers",
    "RangedNumbers",
    "IndexedNumbers",
    "mapped",
    "fetched",
    "fetched, batches",
    "fetched, ranges",
    "concat",
    "subset",
    *(MIXES := ("mixed", "mixed, all", "mixed, blocks")),
    "TorchNumbers",
    "BatchedTorchNumbers",
)
STREAMS = ("Count", "CountAgain", "TorchCount", "DividedTorchCount")
ASYNC = (*MAPS[: MAPS.index("TorchNumbers")], "Count", "CountAgain")
COMPUTED = (
    "sequential",
    "shuffle",
    "elastic",
    "elastic, in turn",
    "elastic, exact",
    "elastic, cut",
    "blocks",
)
DRAWN = (
    "random",
    "replacement",
    "subset",
    "weighted",
    "distributed",
    "listed",
    "shifted",
    "batches",
    "balanced",
)
DRAWING = (
    "drawing torch",
    "drawing numpy",
    "drawing random",
    "drawn batches",
    "weighted, global",
    "subset, global",
)
OPERATIONS = {
    "": "{}",
    "map": "{}.map(tenfold)",
    "fetch": "{}.map(fetched)",
    "filter": "{}.filter(odd)",
    "take": "{}.take(7)",
    "repeat": "{}.repeat(2)",
    "for ever": "{}.repeat().take(19)",
    "shuffle": "{}.shuffle(4)",
    "shuffle, seed": "{}.shuffle(3, seed=5)",
    "concat": "concat([{}, Count(5, start=100)])",
    "mix": "mix([{}, Count(9, start=100)], [2, 1])",
    "mix all": 'mix([{}, Count(3, start=100)], [1, 1], seed=3, stop="all")',
    "split": "{}.split()",
    "pack": "{}.map(document).pack(6).map(plain)",
    "first fit": '{}.map(document).pack(6, "first_fit", window=2).map(plain)',
    "best fit": '{}.map(document).pack(5, "best_fit", window=3).map(plain)',
    "pack, limits": (
        '{}.map(described).pack(6, carry=("source",), limits={{"images": 3}}).map(plain)'
    ),
    "pack, aligned": (
        '{}.map(described).pack(9, align=2, pad_to=4, carry=("source", "images"), '
        'limits={{"images": 2}}, too_long="drop").map(plain)'
    ),
    "first fit, aligned": (
        '{}.map(document).pack(7, "first_fit", window=2, align=3, pad_to=2).map(plain)'
    ),
    "best fit, limits": (
        '{}.map(described).pack(8, "best_fit", window=3, align=2, carry=("source",), '
        'limits={{"images": 4}}).map(plain)'
    ),
    "best fit, truncated": (
        '{}.map(described).pack(5, "best_fit", window=2, carry=("images", "source"), '
        'too_long="truncate").map(plain)'
    ),
    "first fit, dropped": (
        '{}.map(document).pack(3, "first_fit", window=2, too_long="drop").map(plain)'
    ),
    "tokens": "batch_by_tokens({}, 6, length=tokens)",
    "buckets": "batch_by_tokens({}, 7, length=tokens, boundaries=[1, 2], padded=False)",
}
CHANGING = [(0, [1, 2, 0]), (10, [3, 2, 2]), (40, [0, 2, 1])]  # weights of a mix
LAST = (
    "split",
    *(name for name, text in OPERATIONS.items() if ".pack(" in text),
    "tokens",
    "buckets",
)
# at most one of them in a program
SHUFFLING = ("shuffle", "shuffle, seed", "mix", "mix all", "repeat", "for ever")


@dataclasses.dataclass(frozen=True)
class Life:
    """What happens between two starts of a program."""

    epochs: int = 0  # whole ones
    events: int | None = None  # of one more epoch, which is left then; None for no more
    ranks: int = 1
    workers: int | str = 0
    engines: int = 1
    placement: str = "auto"
    batch_size: int | None = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """The features of a program; the defaults are the simplest."""

    data: str = "Numbers"
    size: int = 5
    failing: tuple[int, ...] = ()
    slowest: float = 0.0
    operations: tuple[str, ...] = ()
    order: str = "sequential"
    order_seed: int = 0
    drop_last: bool = False
    seed: int | None = None
    generator: bool = False
    transform: str = ""
    on_error: str = "raise"
    in_order: bool = True
    prefetch_factor: int | None = None
    concurrency: int | None = None
    persistent_workers: bool = False
    ahead: bool = False
    pause: float = 0.0
    lives: tuple[Life, ...] = (Life(epochs=1),)
    rewinds: tuple[tuple[int, int], ...] = ()
    excluded: bool = False
    set_epoch: int | None = None
    merged: bool = False  # whether the states of ranks are merged
    program_seed: int = 0

    @property
    def is_stream(self):
        return self.data in STREAMS

    @property
    def is_async(self):
        return self.data in ASYNC

    @property
    def has_own_order(self):
        """Whether the dataset has an order of its own, by which the loader divides it among the ranks."""
        has_order = self.data in ("IndexedNumbers", *MIXES)
        return (
            has_order and self.order in ("sequential", "shuffle") and not self.generator
        )

    @property
    def is_dealt(self):
        """Whether all ranks share one order, which any number of ranks continues."""
        by_sampler = self.order.startswith("elastic") or self.order == "blocks"
        return by_sampler or self.has_own_order


# A program's text.


def dataset_of(case):
    arguments = [str(case.size)]
    if case.failing:
        arguments.append(f"failing={case.failing}")
    if case.slowest and case.data not in ("TorchCount", "DividedTorchCount"):
        arguments.append(f"slowest={case.slowest}")
    text = ", ".join(arguments)
    if case.data == "mapped":
        return f"Numbers({text}).map(tenfold)"
    if case.data.startswith("fetched"):
        rows = {"fetched, batches": "BatchedNumbers", "fetched, ranges": "RangedNumbers"}
        return f"{rows.get(case.data, 'Numbers')}({text}).map(tenfold).map(fetched)"
    if case.data == "subset":
        return f"Subset(Numbers({text}), range({case.size - 1}, -1, -1))"
    if case.data == "concat":
        return f"concat([Numbers(3), Numbers({text})])"
    mixes = {
        "mixed": f"mix([Numbers({text}).map(fetched), RangedNumbers(7).map(tenfold)], [2, 1])",
        "mixed, all": f"mix([Numbers({text}), IndexedNumbers(21).map(tenfold), Numbers(4)], {CHANGING}, seed=4, "
        'stop="all")',
        "mixed, blocks": f"mix([IndexedNumbers({text}), IndexedNumbers(200)], [(0, [5, 3]), (100, [1, 4])])",
    }
    if case.data in mixes:
        return mixes[case.data]
    if case.data == "DividedTorchCount":
        return f"TorchCount({text}, divided=True)"
    stream = f"{case.data}({text})"
    for operation in case.operations:
        stream = OPERATIONS[operation].format(stream)
    return stream


def length_of(case):
    return case.size + {
        "concat": 3,
        "mixed": 7,
        "mixed, all": 25,
        "mixed, blocks": 200,
    }.get(case.data, 0)


def order_of(case, life):
    """The arguments for the order."""
    n, seed = length_of(case), case.order_seed
    weights = [1 + index % 2 for index in range(n)]
    generator = "generator=torch.Generator().manual_seed(7)"
    samplers = {
        "random": f"RandomSampler(data, {generator})",
        "replacement": f"RandomSampler(data, replacement=True, num_samples=9, {generator})",
        "subset": f"SubsetRandomSampler(range(0, {n}, 2), {generator})",
        "weighted": f"WeightedRandomSampler({weights}, {n}, {generator})",
        "distributed": f"DistributedSampler(data, num_replicas={life.ranks}, rank=rank, seed={seed})",
        "listed": f"Listed({[index * 3 % n for index in range(n)] if n else []})",
        "shifted": f"Shifted({n})",
        "elastic": f"ElasticSampler(data, seed={seed})",
        "elastic, in turn": "ElasticSampler(data, shuffle=False)",
        "elastic, exact": f"ElasticSampler(data, seed={seed}, exact=True)",
        "elastic, cut": f"ElasticSampler(data, seed={seed}, drop_last=True)",
        "blocks": f"BlockShuffleSampler(data, block_size=2, blocks_at_once=6, seed={seed})",
        "drawing torch": f'Drawing({n}, 23, "torch")',
        "drawing numpy": f'Drawing({n}, 23, "numpy")',
        "drawing random": f'Drawing({n}, 23, "random")',
        "weighted, global": f"WeightedRandomSampler({weights}, 11)",
        "subset, global": f"SubsetRandomSampler(range({n}))",
    }
    if case.order in samplers:
        return f"sampler={samplers[case.order]}"
    images = [index % 3 for index in range(n)]
    options = (
        f", cost=quadratic(1, 0.5), limits={{'images': ({images}, 4)}}"
        if seed == 2
        else ""
    )
    batches = {
        "batches": f"BatchSampler(RandomSampler(data, {generator}), 3, {case.drop_last})",
        "balanced": f"BalancedBatchSampler([index % 4 for index in range({n})], 7, seed={seed}, window=8{options})",
        "drawn batches": f'DrawnBatches({n}, 6, "numpy")',
    }
    if case.order in batches:
        return f"batch_sampler={batches[case.order]}"
    return "shuffle=True" if case.order == "shuffle" else ""


def drawn_ahead(case, life):
    """The number of batches that are drawn before the first is given; then one for each that is given."""
    if case.prefetch_factor or not case.is_async:
        return (case.prefetch_factor or 2) * life.workers
    return max(
        6,
        2 * life.workers,
        math.ceil((case.concurrency or 64) / (life.batch_size or 1)) + 1,
    )


def loader_of(case, life):
    arguments = ["data"]
    by_batches = case.order in ("batches", "balanced", "drawn batches")
    if not by_batches:
        arguments.append(f"batch_size={life.batch_size}")
    if order := order_of(case, life):
        arguments.append(order)
    if life.workers:
        arguments.append(f"num_workers={life.workers!r}")
    if life.engines > 1:
        arguments.append(f"engines={life.engines}")
    arguments.append(f"collate_fn={'list' if life.batch_size or by_batches else 'whole'}")
    if case.drop_last and not by_batches and life.batch_size:
        arguments.append("drop_last=True")
    if case.generator:
        arguments.append("generator=torch.Generator().manual_seed(9)")
    if case.transform:
        transform = (
            f"KillsWorkerOnce({case.size // 2}, marker())"
            if case.transform == "kills"
            else case.transform
        )
        arguments.append(f"transform={transform}")
    names = ("seed", "prefetch_factor", "concurrency", "persistent_workers")
    given = {name: getattr(case, name) for name in names}
    arguments += [
        f"{name}={value!r}"
        for name, value in given.items()
        if value is not None and value is not False
    ]
    if case.on_error != "raise":
        arguments.append(f'on_error="{case.on_error}"')
    if not case.in_order:
        arguments.append("in_order=False")
    if life.placement != "auto":
        arguments.append(f'placement="{life.placement}"')
    return f"DataLoader({', '.join(arguments)})"


def source_of(case):
    """The text of the program."""
    lines = [] if case.in_order else ["given = []"]
    options = [
        f"{name}={value}" for name in ("ahead", "pause") if (value := getattr(case, name))
    ]
    if not case.in_order:
        options.append("draws=False")
    read_rest = ", ".join(["loader", *options])
    for number, life in enumerate(case.lives):
        lines.append(f"# Start {number + 1}")
        for rank in range(life.ranks):
            lines += [
                f"rank = {rank}",
                f"as_rank(rank, {life.ranks})",
                f"seed_program({case.program_seed + number})",
                f"data = {dataset_of(case)}",
                f"loader = {loader_of(case, life)}",
            ]
            if case.order in DRAWING:
                lines.append(f"set_drawn_ahead(loader, {drawn_ahead(case, life)})")
            if case.set_epoch is not None and not number:
                lines.append(f"loader.set_epoch({case.set_epoch})")
            if number:
                lines.append(
                    f"loader.load_state_dict(states[{rank if case.order in DRAWN or case.is_stream else 0}])"
                )
            reads = [f"read({read_rest})"] * life.epochs
            if life.events is not None:
                reads.append(f"read({', '.join(['loader', str(life.events), *options])})")
            lines += [
                f"record({each})" if case.in_order else f"given += {each}"
                for each in reads
            ]
            if case.on_error == "skip":
                lines.append("record(loader.stats().skipped_samples)")
            lines += [
                f"record(attempt(loader.batch_at, {epoch}, {step}))"
                for epoch, step in case.rewinds
            ]
            if case.rewinds:
                lines.append("record(attempt(loader.samples_at, 1, [0, 1]))")
            if case.excluded and not number:
                lines.append(
                    "record(attempt(loader.exclude, steps={0: [1], 1: [0]}, keys=[2]))"
                )
            lines += [f"after_{rank} = saved(loader)", "close(loader)"]
        after = ", ".join(f"after_{rank}" for rank in range(life.ranks))
        lines.append(
            f"states = [merge_states([{after}])] * 3"
            if case.merged
            else f"states = ([{after}] * 3)[:3]"
        )
    if not case.in_order:
        lines.append("record(samples_of(given))")
    return "\n".join(lines)


HEADER = """\
import headrace as hr
from headrace import *
from tests.model.programs import *
from tests.model.parts import *

record = print
"""


def paste(case):
    """The program, ready to be pasted into a file in the project's root."""
    return HEADER + source_of(case)


# Running it.


def marker():
    """A path at which there is no file."""
    folder = tempfile.mkdtemp(prefix="headrace-model-")
    return os.path.join(folder, "killed")


def saved(loader):
    """The state of headrace's loader, as a file has it."""
    return json.loads(json.dumps(loader.state_dict()))


def close(loader):
    """End the loader's processes; other loaders have no such method."""
    if isinstance(loader, hr.DataLoader):
        loader.close()


def set_drawn_ahead(loader, batches):
    """Set how many batches the reference draws ahead. In headrace's loader the number follows from its arguments."""
    if isinstance(loader, reference.DataLoader):
        loader.drawn_ahead = batches


_TORCHS = {
    "torch": torch,
    "BatchSampler": BatchSampler,
    "DistributedSampler": DistributedSampler,
    "RandomSampler": RandomSampler,
    "Subset": Subset,
    "SubsetRandomSampler": SubsetRandomSampler,
    "WeightedRandomSampler": WeightedRandomSampler,
    "BalancedBatchSampler": hr.BalancedBatchSampler,
    "quadratic": hr.quadratic,
}
_HERE = {"marker": marker, "set_drawn_ahead": set_drawn_ahead, "close": close}
_LOADERS = {
    name: getattr(hr, name)
    for name in (
        *("DataLoader", "concat", "mix", "batch_by_tokens"),
        *("ElasticSampler", "BlockShuffleSampler", "merge_states"),
    )
}


_OF_REFERENCE = {
    "saved": lambda loader: loader.state_dict(),
    "merge_states": lambda states: states[0],
    "plain": lambda packed: packed,
}


def names_of(module):
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_")
    }


def normal(value):
    """A value with lists in place of tuples, and plain numbers."""
    if isinstance(value, list | tuple):
        return [normal(each) for each in value]
    if isinstance(value, dict):
        return {key: normal(each) for key, each in value.items()}
    return int(value) if isinstance(value, np.integer | torch.Tensor) else value


def run(source, names):
    """What a program records; an error that it ends with is the last entry."""
    recorded, failure = [], None
    namespace = {**names, "record": recorded.append}
    environment = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(source, "<program>", "exec"), namespace)
    except Exception as error:
        recorded.append(["raised", type(error).__name__, str(error)])
        failure = error
    finally:
        if isinstance(loader := namespace.get("loader"), hr.DataLoader):
            loader.close()
        for name, value in environment.items():
            os.environ.pop(name, None) if value is None else os.environ.update(
                {name: value}
            )
    return normal(recorded), failure


def of_headrace(source):
    return run(
        source, {**_TORCHS, **names_of(parts), **_LOADERS, **_HERE, "saved": saved}
    )


def of_reference(source):
    return run(
        source,
        {**_TORCHS, **names_of(parts), **names_of(reference), **_HERE, **_OF_REFERENCE},
    )


def of_torch(source):
    names = {
        **_TORCHS,
        **names_of(parts),
        **_HERE,
        "DataLoader": torch.utils.data.DataLoader,
    }
    return run(source, {**names, "saved": lambda loader: None})


def difference(case):
    """None if headrace does what the reference does; else both records."""
    source = source_of(case)
    expected, _ = of_reference(source)
    given, _ = of_headrace(source)
    return None if given == expected else (given, expected)


def explain(case):
    """The difference of a program, for people."""
    given, expected = difference(case) or ([], [])
    lines = [paste(case), "", "# headrace recorded, and the reference:"]
    for ours, theirs in itertools.zip_longest(given, expected):
        mark = "same   " if ours == theirs else "DIFFERS"
        lines.append(f"# {mark} {ours}")
        if ours != theirs:
            lines.append(f"#         {theirs}")
    return "\n".join(lines)


# Programs at random.


def draw(choice, *, processes):
    """A random program."""
    case = Case(
        data=choice.choice(MAPS + STREAMS),
        size=choice.choice([0, 1, 2, 5, 8, 13, 17]),
        slowest=choice.choice([0.0, 0.0, 0.002]),
        order=choice.choice(COMPUTED + COMPUTED + DRAWN + DRAWING),
        order_seed=choice.randrange(3),
        drop_last=choice.random() < 0.3,
        seed=choice.choice([None, 0, 1]),
        generator=choice.random() < 0.2,
        transform=choice.choice(["", "negated", "jittered", "noisy", "kills"]),
        on_error=choice.choice(["raise", "skip"]),
        in_order=choice.random() < 0.9,
        prefetch_factor=choice.choice([None, None, 1, 3]),
        concurrency=choice.choice([None, None, 1, 5]),
        persistent_workers=choice.random() < 0.3,
        ahead=choice.random() < 0.3,
        pause=choice.choice([0.0, 0.0, 0.0, 0.001]),
        operations=tuple(
            choice.choice(list(OPERATIONS)) for _ in range(choice.randrange(4))
        ),
        program_seed=choice.randrange(100),
        rewinds=tuple(
            (choice.randrange(3), choice.randrange(4))
            for _ in range(choice.choice([0, 0, 2]))
        ),
        excluded=choice.random() < 0.2,
        set_epoch=choice.choice([None, None, None, 0, 3]),
        merged=choice.random() < 0.2,
    )
    if choice.random() < 0.4:
        case = dataclasses.replace(
            case, failing=tuple(sorted(choice.sample(range(17), choice.randrange(1, 7))))
        )
    lives = []
    for _ in range(choice.choice([1, 2] if processes else [1, 2, 2, 3])):
        life = Life(
            epochs=choice.choice([0, 1, 2]),
            events=choice.choice([None, 0, 1, 2, 3, 5]),
            ranks=choice.choice([1, 1, 1, 2] if processes else [1, 1, 1, 2, 3]),
            workers=choice.choice([1, 3, "auto"]) if processes else 0,
            engines=choice.choice([1, 2, 3]) if processes else 1,
            placement=choice.choice(["auto", "thread", "process"])
            if processes
            else choice.choice(["auto", "thread"]),
            batch_size=choice.choice([None, 1, 2, 2, 3, 4]),
        )
        lives.append(life)
    lives[-1] = dataclasses.replace(lives[-1], epochs=max(1, lives[-1].epochs))
    return possible(dataclasses.replace(case, lives=tuple(lives)))


def possible(case):
    """The program without combinations for which nothing is promised."""
    for rule in (
        _data,
        _operations,
        _order,
        _ranks,
        _restarts,
        _transform,
        _errors,
        _looking_back,
        _processes,
    ):
        case = dataclasses.replace(case, **rule(case))
    return case


def _every_life(case, **changes):
    return tuple(dataclasses.replace(life, **changes) for life in case.lives)


def _data(case):
    if case.is_stream:
        return {"order": "sequential", "excluded": False, "size": min(case.size, 13)}
    if case.data in MIXES:
        size = 200 + case.size if case.data == "mixed, blocks" else max(5, case.size)
        return {"operations": (), "size": size, "generator": False}
    return {
        "operations": (),
        "size": max(1, case.size) if case.order != "sequential" else case.size,
    }


def _operations(case):
    """One operation that shuffles, and those that make batches or packs last."""
    if not case.is_async:
        return {"operations": ()}
    kept, shuffles = [], False
    for operation in case.operations:
        if operation in SHUFFLING and shuffles:
            continue
        if operation == "mix all" and (
            case.size < 2 or "filter" in kept or "take" in kept
        ):
            continue
        shuffles = shuffles or operation in SHUFFLING
        kept.append(operation)
        if operation in LAST:
            break
    changes = {"operations": tuple(each for each in kept if each)}
    if {"tokens", "buckets"} & {*kept}:
        changes["lives"] = _every_life(case, batch_size=None)
    return changes


def _order(case):
    changes = {}
    if case.order not in ("sequential", "shuffle"):
        changes["generator"] = False
    if case.order in DRAWING:
        changes.update(lives=case.lives[-1:], in_order=True)
    return changes


def _ranks(case):
    first = case.lives[0].ranks
    if (
        case.data == "IndexedNumbers"
        and case.has_own_order
        and case.order == "sequential"
        and any(life.ranks == 1 for life in case.lives)
    ):
        # One rank has another order than several.
        return {"lives": _every_life(case, ranks=first)}
    if case.is_dealt:
        return {"lives": case.lives}
    if case.order in ("distributed", "balanced") or (case.is_stream and case.is_async):
        return {"lives": _every_life(case, ranks=first)}
    return {"lives": _every_life(case, ranks=1)}


def _restarts(case):
    lives, changes = case.lives, {}
    if not case.in_order:  # each epoch is read to its end, by the next start
        lives = (
            *lives[:-1],
            dataclasses.replace(lives[-1], events=None, epochs=max(1, lives[-1].epochs)),
        )
        lives = tuple(
            dataclasses.replace(life, ranks=1, batch_size=lives[0].batch_size)
            for life in lives
        )
        changes.update(
            failing=(),
            transform="negated" if case.transform == "noisy" else case.transform,
            merged=False,
        )
    if case.seed is None or case.order in DRAWN:
        lives = tuple(
            dataclasses.replace(life, events=life.events or None) for life in lives
        )
    unseeded = (
        case.order == "shuffle"
        and (case.seed is None or case.generator)
        and not case.has_own_order
    )
    drawn = case.order in DRAWN or unseeded
    if drawn or case.is_stream or case.drop_last:  # positions are batches
        lives = tuple(
            dataclasses.replace(life, batch_size=lives[0].batch_size) for life in lives
        )
    if len(lives) > 1 and case.order == "distributed":
        changes["set_epoch"] = None
    same_on_all = case.is_dealt or "split" in case.operations
    # Ranks may have unequal numbers of steps.
    if not same_on_all or case.order == "elastic, exact":
        changes["merged"] = False
    return {"lives": lives, **changes}


def _transform(case):
    draws = case.transform in ("jittered", "noisy")
    if not draws:
        return {}
    several = any(life.ranks > 1 for life in case.lives) and (
        case.order in DRAWN or case.is_stream
    )
    numbered = not {*case.operations} - {"map", "fetch", "take"}
    copies = (
        not case.is_async and case.is_stream and any(life.workers for life in case.lives)
    )
    several = several or (case.is_stream and bool(case.failing))
    if (
        case.seed is None
        or several
        or not numbered
        or copies
        or case.excluded
        or case.order == "balanced"
    ):
        return {"transform": "negated"}
    return {}


def _errors(case):
    if (
        {*case.operations} - {"map", "fetch", "filter"}
        or case.data == "DividedTorchCount"
        or case.order == "balanced"
    ):
        return {"failing": ()}
    if case.on_error == "skip" and any(life.ranks > 1 for life in case.lives):
        return {"failing": ()}
    return {}


def _looking_back(case):
    changes = {}
    same = len({(life.ranks, life.batch_size) for life in case.lives}) == 1
    if (
        not (same and case.in_order and case.order in COMPUTED and not case.is_stream)
        or case.excluded
    ):
        changes["rewinds"] = ()
    elif case.failing and case.on_error == "skip":
        # lost batches are known of epochs that were read
        first = case.set_epoch or 0
        read = range(first, first + case.lives[0].epochs)
        changes["rewinds"] = tuple(
            (epoch, step) for epoch, step in case.rewinds if epoch in read
        )
    elastic = case.order == "shuffle" and case.seed is not None and not case.generator
    elastic = elastic or case.order.startswith("elastic") or case.order == "blocks"
    # Positions are left out, and not indices.
    elastic = elastic and case.data != "mixed, all"
    if not (elastic and case.in_order and case.size >= 8 and not case.failing):
        changes["excluded"] = False
    return changes


def _processes(case):
    lives = []
    for life in case.lives:
        workers, placement = life.workers, life.placement
        if workers == "auto" and (
            case.order in DRAWING
            or case.is_stream
            or not case.is_async
            or case.transform == "kills"
        ):
            workers = 1
        if not case.is_async:
            placement = "auto"
        if case.data in ("TorchCount", "DividedTorchCount"):
            workers = case.lives[0].workers if case.lives[0].workers != "auto" else 1
        several = case.is_async and case.order not in DRAWING and placement != "thread"
        engines = life.engines if several and workers != "auto" else 1
        if engines > 1 and engines > workers:
            workers = 0
        changes = {"workers": workers, "engines": engines, "placement": placement}
        lives.append(dataclasses.replace(life, **changes))
    changes = {"lives": tuple(lives)}
    by_workers = all(life.workers for life in lives)
    if case.transform == "kills" and not (
        by_workers and (case.is_async or not case.is_stream)
    ):
        changes["transform"] = "negated"
    if not by_workers:
        changes.update(prefetch_factor=None, persistent_workers=False)
    return changes


def smaller(case):
    """Programs with one feature less."""
    simplest = Case()
    for field in dataclasses.fields(case):
        if (value := getattr(simplest, field.name)) != getattr(case, field.name):
            yield dataclasses.replace(case, **{field.name: value})
    for name in ("failing", "operations", "lives", "rewinds"):
        values = getattr(case, name)
        for position in range(len(values)):
            yield dataclasses.replace(
                case, **{name: values[:position] + values[position + 1 :]}
            )
    for position, life in enumerate(case.lives):
        for field in dataclasses.fields(life):
            value = getattr(life, field.name)
            for less in [
                Life.__dataclass_fields__[field.name].default,
                *([value - 1] if isinstance(value, int) and value else []),
            ]:
                if less != value and not (field.name == "batch_size" and less == 0):
                    one = dataclasses.replace(life, **{field.name: less})
                    yield dataclasses.replace(
                        case,
                        lives=(*case.lives[:position], one, *case.lives[position + 1 :]),
                    )
    if case.size > 0:
        yield dataclasses.replace(case, size=case.size - 1)


def smallest(case, until):
    """A program that differs as `case` does, from which no feature can be taken away; or the one found in time."""
    while time.monotonic() < until:
        for candidate in smaller(case):
            if (
                candidate.lives
                and possible(candidate) == candidate
                and difference(candidate) is not None
            ):
                case = candidate
                break
        else:
            break
    return case


def of_torch_alone(case):
    """The program without features of headrace."""
    lives = tuple(
        dataclasses.replace(life, ranks=1, placement="auto") for life in case.lives[:1]
    )
    data = {"Numbers": "TorchNumbers", "BatchedNumbers": "BatchedTorchNumbers"}.get(
        case.data, case.data
    )
    if data in ASYNC:
        data = "TorchCount" if case.is_stream else "TorchNumbers"
    order = (
        case.order if case.order in (*DRAWN[:-1], *DRAWING, "shuffle") else "sequential"
    )
    alone = {
        "seed": None,
        "transform": "",
        "on_error": "raise",
        "rewinds": (),
        "excluded": False,
        "set_epoch": None,
    }
    case = dataclasses.replace(
        case,
        data=data,
        order=order,
        lives=lives,
        operations=(),
        ahead=False,
        concurrency=None,
        **alone,
    )
    return possible(case)
