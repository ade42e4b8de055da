"""Blocking reads of async datasets, on a background loop of the process; datasets that are async context managers.

Such a dataset is entered and exited on the loop that it is read on. `__aenter__` stores connections in attributes, of
which a dataset has one set. So it is entered once in a process: the engines of all loaders that have it, and blocking
reads, use one loop, the background loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset

from headrace._core.eventloop.loop_thread import LoopThread
from headrace._core.eventloop.per_loop import Owner
from headrace._core.ranks.rankinfo import reader_divides, reading_divided
from headrace._core.streams.composition import Functions, apply_functions
from headrace._core.streams.kinds import capabilities, children, walk_datasets
from headrace._core.streams.resumable import start_stream
from headrace._core.text import add_note
from headrace._core.torchcompat.private import outside_workers

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_END = object()
_MISSING: object = object()
_lock = threading.Lock()  # for `_loop` and `_entries`
_loop: LoopThread | None = None


def background_loop() -> LoopThread:
    """The background loop of this process: started at first use, for the life of the process."""
    global _loop
    with _lock:
        if _loop is None or not _loop.alive:
            _loop = LoopThread("headrace-background-loop")
        return _loop


@atexit.register  # at import: hooks run in reverse order, and engines that use the loop close first
def _close_at_exit() -> None:
    if _loop is not None:
        _loop.close(1.0)


def read_blocking(dataset: Any, read: Callable[[], Awaitable[T]]) -> T:
    """Await ``read()`` on the background loop, where `dataset` is entered first, and stays so until the loop ends."""

    async def reading() -> T:
        if _without_contexts.get(dataset):  # a walk over a thousand concatenated parts takes longer than reading
            return await read()
        datasets = EnteredDatasets()
        try:
            if not await datasets.enter(dataset):
                _without_contexts.set(dataset, True)
            return await read()
        finally:
            datasets.release()

    return background_loop().run(reading())


class SyncStream(Iterator[T_co], Generic[T_co]):
    """An async stream, read from the background loop one sample at a time; functions run on the reading thread.

    If `whole`, it yields all samples in a torch worker too, and not the worker's part.
    """

    def __init__(self, dataset: AsyncIterable[Any], functions: Functions = (), *, whole: bool = False) -> None:
        self._dataset = dataset
        self._functions = functions
        self._place = outside_workers if whole else contextlib.nullcontext
        self._divided = reader_divides()  # a context variable of this thread
        # After `__aenter__`, if there is one: `__aiter__` may use resources that it opens.
        with self._place():
            self._stream = None if context_managers(dataset) else start_stream(dataset)

    def __next__(self) -> T_co:
        with self._place():
            sample = read_blocking(self._dataset, self._read)
        if sample is _END:
            raise StopIteration
        transformed: T_co = apply_functions(self._functions, sample)
        return transformed

    async def _read(self) -> Any:
        with reading_divided(self._divided):
            if self._stream is None:
                self._stream = start_stream(self._dataset)
            return await anext(self._stream, _END)


def context_managers(dataset: object) -> list[object]:
    """The async context managers among a dataset and its parts; parts before the dataset that holds them."""
    nested = list(walk_datasets(dataset))
    managers = [part for part in nested if hasattr(type(part), "__aenter__") and hasattr(type(part), "__aexit__")]
    return [part for part in managers if part is dataset or _is_dataset(part, nested)]


def _is_dataset(part: object, nested: list[object]) -> bool:
    """Whether an object is certainly a dataset: a connection with `__aiter__`, which the user enters, is not."""
    if isinstance(part, Dataset) or capabilities(part).aget:
        return True
    ours = (holder for holder in nested if type(holder).__module__.partition(".")[0] in ("headrace", "torch"))
    return any(part is held for holder in ours for held in children(holder))


class _Entry(Owner[None]):
    """A dataset that is entered, or is being entered or exited."""

    def __init__(self, dataset: object) -> None:
        self.users: set[EnteredDatasets] = set()
        self.exiting = False
        self._key = id(dataset)
        super().__init__(_context_of(dataset), f"dataset {type(dataset).__name__}", self._end)

    def _end(self) -> None:
        if _entries.get(self._key) is self:
            del _entries[self._key]


_entries: dict[int, _Entry] = {}
os.register_at_fork(after_in_child=_entries.clear)  # a child has entered nothing


async def _enter(dataset: object) -> _Entry:
    while True:
        with _lock:  # another loop may enter it at the same time
            entry = _entries.get(id(dataset))
            if entry is None or entry.loop.is_closed():
                entry = _entries[id(dataset)] = _Entry(dataset)
        if entry.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                f"dataset {type(dataset).__name__} was entered on another event loop: close() the loader of that, "
                f"or open connections by headrace.per_loop, which works on several loops"
            )
        if not entry.exiting:
            return entry
        await asyncio.wait([entry.task])


class EnteredDatasets:
    """The datasets that one engine, or one blocking read, has entered on its loop."""

    async def enter(self, dataset: object) -> bool:
        """Enter the context managers among a dataset and its parts; returns whether there are any."""
        managers = context_managers(dataset)
        for manager in managers:
            entry = await _enter(manager)
            entry.users.add(self)
            await asyncio.shield(entry.opened)
        return bool(managers)

    async def exit(self, deadline: float) -> None:
        """Exit the datasets that have no other user, in reverse order, within `deadline` seconds."""
        now = asyncio.get_running_loop().time
        until = now() + deadline
        for entry in self.release():
            if not entry.users:
                entry.exiting = True
                await entry.close(max(0.0, until - now()))

    def release(self) -> list[_Entry]:
        """Release the datasets without exiting them; returns their entries, the last one first."""
        released = [entry for entry in reversed(list(_entries.values())) if self in entry.users]
        for entry in released:
            entry.users.remove(self)
        return released


@contextlib.asynccontextmanager
async def _context_of(dataset: Any) -> AsyncIterator[None]:
    before = dict(getattr(dataset, "__dict__", {}))
    try:
        await dataset.__aenter__()
    except BaseException as error:
        add_note(error, f"headrace: raised by __aenter__ of dataset {type(dataset).__name__}")
        raise
    finally:
        after = dict(getattr(dataset, "__dict__", {}))
        changed = {name: before.get(name, _MISSING) for name in after if after[name] is not before.get(name)}
        _opened.set(dataset, {**changed, **(_opened.get(dataset) or {})})
    yield
    await dataset.__aexit__(None, None, None)


class _WeakIdentityDict:
    """A dictionary with weak keys compared by identity, since not every dataset has a hash."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[object], object]] = {}

    def get(self, obj: object) -> Any:
        found = self._values.get(id(obj))
        return found[1] if found is not None and found[0]() is obj else None

    def set(self, obj: object, value: object) -> None:
        key, values = id(obj), self._values
        with contextlib.suppress(TypeError):  # a class without weak references
            values[key] = (weakref.ref(obj, lambda _: values.pop(key, None)), value)


_opened = _WeakIdentityDict()
"""For each dataset, the attributes that `__aenter__` has set, with their previous values."""

_without_contexts = _WeakIdentityDict()
"""Datasets without a context manager among them and their parts."""


def attributes_before_enter(dataset: object, attributes: Mapping[str, object] | None = None) -> Mapping[str, object]:
    """A dataset's attributes, or a copy of them, with their values before `__aenter__`."""
    attributes = getattr(dataset, "__dict__", {}) if attributes is None else attributes
    if opened := _opened.get(dataset):
        attributes = {name: opened.get(name, value) for name, value in dict(attributes).items()}
    return {name: value for name, value in attributes.items() if value is not _MISSING} if opened else attributes


def reduce_unentered(obj: object, protocol: int) -> object:
    """Reduce a dataset as it was before it was entered; NotImplemented for any other object."""
    if _opened.get(obj):
        reduced: object = obj.__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            return *reduced[:2], attributes_before_enter(obj, reduced[2]), *reduced[3:]
    return NotImplemented
