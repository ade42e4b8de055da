"""Run one program with torch's loader and with headrace's: results, errors, warnings and random state must be equal."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import multiprocessing
import random
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import headrace as hr
from tests.programs import run_by

SEED = 42
# Warnings that depend on something else than the program: torch's about the size of the machine
# that the tests run on, and since Python 3.12 that of a fork of a process with threads. Ours always
# has one more, the engine's; torch's loader causes it as soon as torch has computed something on
# several threads, which not every program of these tests does. And lance's at each fork, if another
# test has imported it.
OF_THE_MACHINE = re.compile(
    r"This DataLoader will create|This process \(pid=\d+\) is multi-threaded, use of fork\(\)|lance is not fork-safe"
    # Torch 2.6 to 2.8, of a loader made anew.
    "|pin memory device is set|'pin_memory_device' is set"
)


@dataclass(frozen=True)
class Setting:
    """A column of the table: what kind of dataset our loader reads, and where."""

    name: str  # the column's heading, and the end of a test's id
    # whether our loader reads an async twin of the dataset that torch's loader reads
    asynchronous: bool
    place: str  # where our loader says that it reads
    torchs: Mapping[str, Any]  # arguments of torch's loader, unless a test gives its own
    ours: Mapping[str, Any]  # the same for our loader

    def __str__(self) -> str:
        return self.name

    @property
    def workers(self) -> int:
        return self.ours["num_workers"]


# Where an async dataset is read by our engine, its order and its end are one loader's, not those of
# several copies: torch's loader without workers is what it is compared with.
SETTINGS = (
    Setting(
        "torch dataset, 0 workers",
        False,
        "inline",
        {"num_workers": 0},
        {"num_workers": 0},
    ),
    Setting(
        "torch dataset, 2 workers",
        False,
        "thread",
        {"num_workers": 2},
        {"num_workers": 2},
    ),
    Setting(
        "async dataset, thread",
        True,
        "thread",
        {"num_workers": 0},
        {"num_workers": 0, "placement": "thread"},
    ),
    Setting(
        "async dataset, workers",
        True,
        "process",
        {"num_workers": 0},
        {"num_workers": 2, "placement": "process"},
    ),
)
NAMES = tuple(setting.name for setting in SETTINGS)
ASYNC = [name for name in NAMES if name.startswith("async")]
TORCH = [name for name in NAMES if name.startswith("torch")]


def parity(
    behaviour: str, *, not_for: Mapping[str, str] | None = None, **options: Any
) -> Callable[[Any], Any]:
    """Run a test in every setting, as the proof of one line of the parity page.

    A test that takes `DataLoader` is itself the program that `same` runs, with these options of it.

    The table's row is the module's: `test_dataset_kinds.py` holds the row "dataset kinds". Several
    tests may prove one behaviour together, each in other settings or with other parameters.
    `not_for` are settings in which the behaviour has no meaning, each with the reason in words; an
    empty one leaves the setting to another test of the behaviour."""
    reasons = dict(not_for or {})
    assert reasons.keys() <= set(NAMES), f"no such setting: {reasons.keys() - set(NAMES)}"
    covered = [setting for setting in SETTINGS if setting.name not in reasons]
    stated = {name: reason for name, reason in reasons.items() if reason}

    def decorate(function: Any) -> Any:
        if "DataLoader" in inspect.signature(function).parameters:
            function = run_by("same", **options)(function)
        marked = pytest.mark.parity(behaviour=behaviour, not_for=stated)(function)
        return pytest.mark.parametrize("setting", covered, ids=str)(marked)

    return decorate


@dataclass(frozen=True)
class Raised:
    """An error that a program ended with."""

    kind: type[BaseException]
    message: str  # without what torch puts around a worker's error

    @classmethod
    def by(cls, error: BaseException) -> Raised:
        raised = cls(type(error), own_message(error))
        # torch's errors hold the iterator they come from, in a cycle. One that is left to the
        # garbage collector waits five seconds for each of its workers, or is collected in a process
        # that was forked meanwhile, and waits there.
        traceback.clear_frames(error.__traceback__)
        return raised


def own_message(error: BaseException) -> str:
    """The message of an error in its worker, without the sentence and traceback that torch adds."""
    text = str(error)
    wrapped = re.match(r"Caught (\w+) in ", text)
    if not wrapped:
        return text
    printed = [*re.finditer(rf"\n(?:[\w.<>]+\.)?{wrapped[1]}(?:: |\n\Z)", text)]
    return text[printed[-1].end() :].removesuffix("\n")


def raised_by(action: Callable[[], Any]) -> Raised:
    """The error that `action` raises; for what a program does after it."""
    with pytest.raises(BaseException) as caught:
        action()
    return Raised.by(caught.value)


def drained(iterator: Any, most: int = 99) -> list[Any]:
    """Everything an iterator gives, an error as `Raised` in the place of its batch; torch's workers can raise on."""
    came: list[Any] = []
    while len(came) < most:
        try:
            came.append(next(iterator))
        except StopIteration:
            break
        except Exception as error:
            came.append(Raised(type(error), own_message(error)))
    return came


@dataclass
class Side:
    """Stands for the class `DataLoader` in a program: one of the two, with the options of a setting."""

    loader_class: Any
    options: Mapping[str, Any]  # arguments that the program does not give
    # What the program's dataset becomes before the loader gets it.
    twin: Callable[[Any], Any]
    made: list[Any] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        return self.loader_class is hr.DataLoader

    def __call__(self, dataset: Any, *args: Any, **options: Any) -> Any:
        """A loader; `dataset` may be composed of what `twin` gives, or is given to `twin` here."""
        loader = self.loader_class(
            self.twin(dataset), *args, **{**self.options, **options}
        )
        self.made.append(loader)
        return loader

    def close(self) -> None:
        for loader in self.made:
            if isinstance(loader, hr.DataLoader):
                loader.close()

    def places(self) -> set[str]:
        """Where our loaders ran, as far as they were iterated."""
        said = {loader.stats().placement for loader in self.made if self.is_ours}
        return said - {"not started"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program: its result or error, the warnings, and the state of the global generators."""

    result: Any
    warned: list[tuple[type[Warning], str]]
    generators: tuple[Any, ...]


class Same:
    """Runs a program with both loaders in one setting, and compares."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def torchs(self, program: Callable[[Side], Any]) -> Outcome:
        came = outcome(
            program, Side(data.DataLoader, self.setting.torchs, lambda dataset: dataset)
        )
        end_torchs_workers()
        return came

    def ours(self, program: Callable[[Side], Any], *, moves: bool = False) -> Outcome:
        twin = async_twin if self.setting.asynchronous else lambda dataset: dataset
        side = Side(hr.DataLoader, self.setting.ours, twin)
        came = outcome(program, side)
        assert moves or side.places() <= {self.setting.place}, (
            "the dataset was not read where the table says"
        )
        return came

    def __call__(
        self,
        program: Callable[[Side], Any],
        *,
        warns: bool = False,
        fails: bool = False,
        moves: bool = False,
    ) -> Any:
        """Compare the results, the errors, the warnings and the global generators; returns torch's result.

        The program takes what stands for `DataLoader`, and makes its own datasets and samplers;
        `moves` says that it changes itself where the dataset is read.
        """
        torchs, ours = self.torchs(program), self.ours(program, moves=moves)
        if not fails and isinstance(torchs.result, Raised):
            raise AssertionError(f"torch's loader failed: {torchs.result}")
        assert isinstance(torchs.result, Raised) is fails
        assert bool(torchs.warned) is warns
        assert_same(ours.result, torchs.result)
        assert ours.warned == torchs.warned
        assert_same(ours.generators, torchs.generators)
        return torchs.result


def end_torchs_workers() -> None:
    """End the workers of iterators of torch's that are in a cycle, as an error or a failed constructor leaves them.

    The garbage collector would close an iterator's queues before the iterator has used them to end
    its workers. It then waits 5 s for each worker, on whatever thread it runs, the engine's for
    example."""
    if not multiprocessing.active_children():
        return
    iterators = [
        found
        for found in gc.get_objects()
        if type(found) is _MultiProcessingDataLoaderIter
    ]
    while iterators:
        if hasattr(
            iterator := iterators.pop(), "_shutdown"
        ):  # otherwise its constructor failed before it had workers
            iterator._shutdown_workers()
    gc.collect()


def outcome(program: Callable[[Side], Any], side: Side) -> Outcome:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    with warnings.catch_warnings(record=True) as caught, contextlib.closing(side):
        warnings.simplefilter("always")
        try:
            result = program(side)
        except Exception as error:
            result = Raised.by(error)
    warned = [
        (w.category, without_address(w.message))
        for w in caught
        if not OF_THE_MACHINE.match(str(w.message))
    ]
    keys, position = np.random.get_state()[1:3]
    return Outcome(
        result, warned, (torch.get_rng_state(), random.getstate(), keys, position)
    )


def without_address(value: object) -> str:
    """`str` without addresses, equal in every process; for messages and names of tests."""
    return re.sub(r" at 0x\w+", "", str(value))


class Twin:
    """The same samples as a dataset's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return repr(self.dataset)


class AsyncMapTwin(Twin, hr.AsyncDataset[Any]):
    """The same samples by `aget`."""

    async def aget(self, index: Any) -> Any:
        return self.dataset[index]

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class AsyncManyTwin(AsyncMapTwin):
    """The same samples by `agets`, for a dataset that answers a whole batch at once."""

    async def agets(self, indices: Any) -> Any:
        return self.dataset.__getitems__(list(indices))


class AsyncStreamTwin(Twin, hr.AsyncIterableDataset[Any]):
    """The same stream by `async for`."""

    def __aiter__(self) -> Any:
        return AsyncReader(iter(self.dataset))


class AsyncReader:
    """The same iterator by `async for`; goes on after an error as the iterator does."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __aiter__(self) -> AsyncReader:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:
            raise StopAsyncIteration from None


def async_twin(dataset: Any) -> Any:
    """An async dataset of the same samples; what is async already, or composed of what is, stays as it is."""
    if _holds_async(dataset):
        return dataset
    if isinstance(dataset, data.IterableDataset):
        return AsyncStreamTwin(dataset)
    return (
        AsyncManyTwin(dataset)
        if hasattr(dataset, "__getitems__")
        else AsyncMapTwin(dataset)
    )


def _holds_async(dataset: Any) -> bool:
    if isinstance(dataset, data.Subset):
        return _holds_async(dataset.dataset)
    if isinstance(dataset, data.ConcatDataset | data.ChainDataset):
        return any(map(_holds_async, dataset.datasets))
    if isinstance(dataset, data.StackDataset):
        parts = dataset.datasets
        return any(
            map(_holds_async, parts.values() if isinstance(parts, dict) else parts)
        )
    return hasattr(dataset, "aget") or hasattr(dataset, "__aiter__")


def assert_same(ours: Any, torchs: Any) -> None:
    """The same types, dtypes and values, all the way down."""
    assert type(ours) is type(torchs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.layout) == (
            torchs.dtype,
            torchs.shape,
            torchs.layout,
        )
        assert (ours.requires_grad, ours.is_pinned()) == (
            torchs.requires_grad,
            torchs.is_pinned(),
        )
        assert torch.equal(ours, torchs)
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == torchs.dtype
        np.testing.assert_array_equal(ours, torchs)
    elif isinstance(ours, Mapping):
        assert list(ours) == list(torchs)
        for key in ours:
            assert_same(ours[key], torchs[key])
    elif isinstance(ours, PackedSequence | Sequence) and not isinstance(
        ours, str | bytes | range
    ):
        assert len(ours) == len(torchs)
        for left, right in zip(ours, torchs, strict=True):
            assert_same(left, right)
    elif dataclasses.is_dataclass(ours) and not isinstance(ours, type):
        assert_same(vars(ours), vars(torchs))
    else:
        assert ours == torchs or (ours != ours and torchs != torchs)


def epochs(loader: Any, count: int = 2) -> list[list[Any]]:
    """Every batch of some epochs."""
    return [list(loader) for _ in range(count)]
