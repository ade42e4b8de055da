"""Constructor: what torch refuses is refused in its words; what it accepts can be read back, and used again."""

import copy
import functools
import inspect
import multiprocessing
import pickle

import pytest
import torch
from torch.utils import data

import headrace as hr
from tests.parity.datasets import LENGTH, Count, Map, Numbers, Stream
from tests.parity.harness import epochs, parity, raised_by

REFUSED = (
    {"batch_size": 0},
    {"batch_size": -1},
    {"batch_size": "4"},
    {"batch_size": 2.5},
    {"batch_size": True},
    {"num_workers": -1},
    {"num_workers": "two"},
    {"num_workers": None},
    {"timeout": -1},
    {"timeout": "soon"},
    {"prefetch_factor": 2, "num_workers": 0},
    {"prefetch_factor": -2, "num_workers": 1},
    {"prefetch_factor": "2", "num_workers": 1},
    {"persistent_workers": True, "num_workers": 0},
    {"shuffle": True, "sampler": [1]},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_sampler": [[1]], "batch_size": None},
    {"batch_sampler": [[1]], "shuffle": True},
    {"batch_sampler": [[1]], "sampler": [1]},
    {"batch_sampler": [[1]], "drop_last": True},
    {"batch_size": None, "drop_last": True},
    {"num_workers": 1, "multiprocessing_context": "sideways"},
    {"num_workers": 1, "multiprocessing_context": 3},
    {"num_workers": 0, "multiprocessing_context": "spawn"},
    {"drop_last": "yes"},
)
REFUSED_FOR_A_STREAM = (
    {"shuffle": True},
    {"shuffle": 1},
    {"sampler": [1]},
    {"batch_sampler": [[1]]},
    {"batch_size": 0},
)


def all_refused(same, make, ways):
    same(
        lambda DataLoader: [
            raised_by(functools.partial(DataLoader, make(), **options))
            for options in ways
        ]
    )


@parity("every `ValueError` and `TypeError` of torch, with the message")
def test_invalid_options_are_refused_as_in_torch(same):
    all_refused(same, Map, REFUSED)


@parity("the same for an iterable dataset, where no order can be given")
def test_invalid_options_for_a_stream_are_refused_as_in_torch(same):
    all_refused(same, Stream, REFUSED_FOR_A_STREAM)


@parity("`shuffle` of an empty dataset, with torch's message")
def test_shuffled_empty_dataset_is_refused_as_in_torch(same):
    all_refused(same, lambda: Map(0), [{"shuffle": True}])


@parity("arguments in torch's order, by position and by name, with torch's defaults")
def test_signature_starts_with_torchs(DataLoader):
    parameters = inspect.signature(DataLoader.loader_class.__init__).parameters.values()
    ours = inspect.signature(hr.DataLoader.__init__).parameters.keys()
    torchs = inspect.signature(data.DataLoader.__init__).parameters.keys()
    by_position = DataLoader(Numbers(), 4, False, None, None)
    return (
        [(p.name, p.default, p.kind) for p in parameters if p.name in torchs],
        list(ours - torchs) and list(by_position),
    )


ATTRIBUTES = (
    *(
        "batch_size",
        "num_workers",
        "drop_last",
        "timeout",
        "persistent_workers",
        "pin_memory",
        "pin_memory_device",
    ),
    *("in_order", "generator", "worker_init_fn", "multiprocessing_context"),
)


@pytest.mark.parametrize("make", [Map, Count], ids=["map", "stream"])
@parity(
    "`isinstance(loader, torch.utils.data.DataLoader)`, with torch's public attributes and values"
)
def test_attributes_are_torchs(same, make):
    def program(DataLoader):
        # These are about the object, which is made as if there were no workers in every setting.
        loader = DataLoader(make(), batch_size=3, num_workers=0)
        kinds = [
            type(loader.sampler),
            type(loader.batch_sampler),
            isinstance(loader, data.DataLoader),
        ]
        public = {
            name for name in vars(data.DataLoader(make())) if not name.startswith("_")
        }
        return (
            kinds,
            [getattr(loader, name) for name in ATTRIBUTES],
            public <= vars(loader).keys(),
        )

    assert same(program)[2]


@parity("`prefetch_factor` reads 2 with workers, None without, or the given number")
def test_default_prefetch_factor_is_torchs(same):
    def program(DataLoader):
        loaders = [DataLoader(Map(), num_workers=0), DataLoader(Map(), num_workers=2)]
        loaders += [
            DataLoader(Map(), num_workers=2, prefetch_factor=factor)
            for factor in (1, 2, 5)
        ]
        return [
            loader.prefetch_factor is not None and int(loader.prefetch_factor)
            for loader in loaders
        ]

    assert same(program) == [False, 2, 1, 2, 5]


FROZEN = (
    "batch_size",
    "batch_sampler",
    "sampler",
    "drop_last",
    "dataset",
    "persistent_workers",
)


@parity("six attributes are frozen, with torch's message; the others can be set")
def test_attributes_frozen_in_torch_are_frozen(DataLoader):
    loader = DataLoader(Map(), batch_size=4)
    refused = [
        raised_by(lambda name=name: setattr(loader, name, getattr(loader, name)))
        for name in FROZEN
    ]
    for name in (
        "num_workers",
        "timeout",
        "collate_fn",
        "generator",
        "in_order",
        "pin_memory",
        "prefetch_factor",
    ):
        setattr(loader, name, getattr(loader, name))
    return refused, list(loader)


@parity("changes between epochs hold from the next epoch on", moves=True)
def test_attributes_set_between_epochs_take_effect_as_in_torch(DataLoader):
    loader = DataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    came = [list(loader)]
    loader.collate_fn = len
    came.append(list(loader))
    loader.collate_fn = list
    loader.num_workers, loader.prefetch_factor = (
        (0, None) if loader.num_workers else (1, 3)
    )
    came.append(list(loader))
    return came


@parity(
    "`multiprocessing_context`, a name or an object, reads back as the object; a later value is checked too"
)
def test_multiprocessing_context_is_kept_and_checked_as_in_torch(DataLoader):
    came = []
    for method in ("fork", "spawn", "forkserver"):
        for given in (
            method,
            multiprocessing.get_context(method),
            torch.multiprocessing.get_context(method),
        ):
            context = DataLoader(
                Map(), num_workers=1, multiprocessing_context=given
            ).multiprocessing_context
            came.append((type(context), context.get_start_method()))
    loader = DataLoader(Map(), num_workers=1)
    loader.multiprocessing_context = "spawn"
    came += [
        raised_by(lambda bad=bad: setattr(loader, "multiprocessing_context", bad))
        for bad in ("sideways", 3)
    ]
    alone = DataLoader(Map(), num_workers=0)
    came.append(raised_by(lambda: setattr(alone, "multiprocessing_context", "fork")))
    return came, loader.multiprocessing_context.get_start_method()


def made_anew(loader, **changes):
    """What trainers do: call the class again with the attributes that are named like its arguments."""
    names = list(inspect.signature(type(loader).__init__).parameters)[1:]
    found = {
        name: value for name, value in vars(loader).items() if not name.startswith("_")
    }
    found["multiprocessing_context"] = loader.multiprocessing_context
    arguments = {name: found[name] for name in names if name in found}
    if isinstance(loader.dataset, data.IterableDataset):
        arguments.update(sampler=None, batch_sampler=None)
    elif loader.batch_size is None and loader.batch_sampler is not None:
        arguments.update(batch_size=1, sampler=None, drop_last=False)
    else:
        arguments.update(batch_sampler=None)
    return type(loader)(**{**arguments, **changes})


WAYS_TO_MAKE = (
    {"batch_size": 4, "shuffle": True},
    {"batch_size": 4, "drop_last": True, "in_order": False, "pin_memory_device": "cuda"},
    {"batch_size": None, "collate_fn": str},
    {"batch_sampler": [[1, 2], [3]]},
    {"sampler": [4, 2, 3], "batch_size": 2, "generator": None},
)


@parity(
    "made anew from its public attributes, as by Lightning, a loader gives the same batches"
)
def test_loader_rebuilt_from_its_attributes_is_equal(DataLoader):
    came = []
    for dataset, options in [(Numbers(), options) for options in WAYS_TO_MAKE] + [
        (Stream(), {"batch_size": 4})
    ]:
        loader = DataLoader(dataset, **options)
        other = made_anew(loader)
        DataLoader.made.append(other)
        alike = [getattr(loader, name) == getattr(other, name) for name in ATTRIBUTES]
        came.append((sorted(map(str, other)), alike))
    return came


@parity("the same with another sampler, for one of several ranks")
def test_loader_rebuilt_with_a_distributed_sampler_reads_its_rank(DataLoader):
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    sampler = data.DistributedSampler(
        loader.dataset, num_replicas=2, rank=1, shuffle=True
    )
    other = made_anew(loader, sampler=sampler)
    DataLoader.made.append(other)
    return epochs(other)


@parity("a subclass of the loader, with other arguments", not_for={})
def test_subclass_may_override_as_in_torch(DataLoader):
    class Named(DataLoader.loader_class):
        def __init__(self, *args, name, **options):
            super().__init__(*args, **options)
            self.name = name

        def __iter__(self):
            for batch in super().__iter__():
                yield self.name, batch

    loader = Named(
        DataLoader.twin(Numbers()), batch_size=4, name="train", **DataLoader.options
    )
    DataLoader.made.append(loader)
    return (
        epochs(loader),
        len(loader),
        raised_by(lambda: setattr(loader, "batch_size", 1)),
    )


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
    ids=["copy", "deepcopy", "pickle"],
)
@parity("a loader can be copied and pickled; the copy gives the same batches")
def test_copies_give_the_same_batches(same, copied):
    def program(DataLoader):
        loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
        other = copied(loader)
        DataLoader.made.append(other)
        torch.manual_seed(1)
        first = list(loader)
        torch.manual_seed(1)
        return first, list(other)

    first, second = same(program)
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in second]


@parity("`DataLoader[Sample]` as a type, and `list`, `enumerate`, `zip` over it")
def test_loader_is_generic_and_iterable_as_torchs(DataLoader):
    loader = DataLoader(Numbers(), batch_size=LENGTH)
    return (
        bool(DataLoader.loader_class[int]),
        list(enumerate(loader)),
        list(zip(loader, loader, strict=True)),
    )
