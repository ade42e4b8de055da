"""State of a loader: contents, checks, differences to another loader."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from headrace._order.exclusion import Exclusion
from headrace._streams.resumable import State
from headrace._version import __version__
from headrace.errors import StateError


def encoded(state: torch.Tensor | None) -> str | None:
    """Return the state of a generator as base64 of compressed bytes."""
    if state is None:
        return None
    return base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()


def decoded(text: str) -> torch.Tensor:
    """Return the generator state of a text of `encoded`."""
    return torch.frombuffer(
        bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8
    )


# Version of the layout of a state. Raise the version with every change of the layout, and keep
# reading the version of the last release: docs/policies.md, tests/unit/test_saved_states.py.
VERSION: Final = 7
LOST_KEPT = 256  # number of lost batches in a state


class Fingerprint(NamedTuple):
    """Properties of a loader that a state must agree with."""

    kind: str  # kind of the dataset
    # Number of samples of a map-style dataset; None if unknown, or of a stream.
    length: int | None
    order: str  # the sampler, with the arguments that decide on the order
    seed: int | None  # seed of the loader
    # Workers that each read a copy of a stream. None if the number does not matter.
    readers: int | None

    def differences(self, saved: Fingerprint) -> list[str]:
        """List each differing property with the saved and the present value."""
        names = "dataset", "len(dataset)", "sampler", "seed", "num_workers"
        compared = zip(names, saved, self, strict=True)
        return [
            f"{name} was {old}, and is {new}" for name, old, new in compared if old != new
        ]


class Run(NamedTuple):
    """Batches since the last change of ranks, batch size or exclusions."""

    epoch: int = 0
    batches: int = 0  # number of the first batch in the epoch
    cursor: int = 0  # cursor of the state before the first batch
    ranks: int = 0  # 0 before the first epoch
    batch_size: int = 0  # 0 if a batch sampler decides
    exclusions: int = 0  # number of the state's exclusions in force


class LastDraw(NamedTuple):
    """Indices of the last batch of an order that is walked through."""

    indices: int  # number of indices
    checksum: int
    rank: int


def drawn_last(indices: Sequence[object], rank: int) -> LastDraw:
    """Return the record of the indices of a batch."""
    return LastDraw(len(indices), zlib.crc32(repr(tuple(indices)).encode()), rank)


class Given(NamedTuple):
    """Samples of a batch given out after missing batches."""

    first: int  # number of the first sample, counted from the position of the state
    samples: int  # number of samples


class LostBatch(NamedTuple):
    """A batch that lost all its samples."""

    epoch: int
    number: int


class SkipCounts(NamedTuple):
    """Numbers of samples of an epoch."""

    delivered: int = 0
    skipped: int = 0
    in_a_row: int = 0  # skipped since the last delivered sample


class Losses(NamedTuple):
    """Samples and batches that an epoch has lost."""

    skipped: SkipCounts
    lost: tuple[LostBatch, ...]


class Past(NamedTuple):
    """Fields of a state that describe earlier batches."""

    run: Run = Run()
    excluded: tuple[Exclusion, ...] = ()
    lost: tuple[LostBatch, ...] = ()


class LoaderState(NamedTuple):
    """Position in an epoch, with all data needed to continue."""

    epoch: int
    fingerprint: Fingerprint  # fingerprint of the loader
    # Number of samples given out in the epoch, over all ranks if the ranks share an order.
    cursor: int = 0
    batches: int = 0  # number of batches given out on this rank
    over: bool = False  # whether the sampler has ended
    rank: int | None = None  # rank of the state; None if all ranks have the same state
    ranks: int = 1  # number of ranks
    # Source of the batches' seeds, if drawn; None with `seed=`.
    base_seed: int | None = None
    # First seed of persistent workers, in a state before an epoch. None without persistent workers.
    kept_seed: int | None = None
    # Epoch of a sampler with `set_epoch` that derives the order from the epoch. None without.
    sampler_epoch: int | None = None
    # State of the sampler's generator at the epoch's start, in base64.
    generator: str | None = None
    sampler: object = None  # state of a user's sampler after the samples given out
    last_draw: LastDraw | None = None
    # Stream state of each worker that reads a stream. The key None is the loader itself.
    streams: Mapping[int | None, Mapping[str, object]] = {}
    next_worker: int = 0  # worker of the next batch
    delivered: tuple[Given, ...] = ()  # batches given out after missing batches
    run: Run = Run()
    excluded: tuple[Exclusion, ...] = ()  # samples to leave out
    lost: tuple[LostBatch, ...] = ()  # the last lost batches
    skipped: SkipCounts = SkipCounts()

    @property
    def is_between_epochs(self) -> bool:
        """Whether the state lies before an epoch, with nothing drawn."""
        return not (self.batches or self.delivered or self.over)

    def noted(self, ranks: int, batch_size: int) -> LoaderState:
        """Return the state with ranks, batch size and exclusions noted.

        A new run begins if a value differs from the last run's value.
        """
        last, excluded = self.run, len(self.excluded)
        run = last._replace(ranks=ranks, batch_size=batch_size, exclusions=excluded)
        if last.ranks and run != last:
            run = run._replace(epoch=self.epoch, batches=self.batches, cursor=self.cursor)
        return self._replace(run=run)

    @property
    def past(self) -> Past:
        return Past(self.run, self.excluded, self.lost)

    @property
    def steps(self) -> int:
        """Number of steps made in the epoch."""
        lost = sum(each.epoch == self.epoch for each in self.lost)
        return self.batches + len(self.delivered) - lost

    def number_of(self, epoch: int, step: int) -> int:
        """Return the number of the batch delivered at a step.

        Raises:
            StateError: the state does not know the number.
        """
        if len(self.lost) == LOST_KEPT and epoch <= self.lost[0].epoch:
            raise StateError(
                f"step {step} of epoch {epoch} is not known: {LOST_KEPT} batches have lost all "
                f"their samples since"
            )
        number = step
        for lost in self.lost:
            number += lost.epoch == epoch and lost.number <= number
        return number

    def _to_values(self) -> State:
        """Return the state as a dict.

        Every state has the same keys. The values are lists and tuples of JSON values, and users'
        own states.
        """
        streams = sorted(
            self.streams.items(), key=lambda item: -1 if item[0] is None else item[0]
        )
        values: State = {
            **self._asdict(),
            "streams": tuple((reader, dict(state)) for reader, state in streams),
        }
        for name in _RECORDS:
            values[name] = values[name] and tuple(values[name])
        for name in _LISTS:
            values[name] = tuple(map(tuple, values[name]))
        return {**values, "checksum": _checksum(values)}

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> LoaderState:
        """Return the saved state of a rank, or of all ranks."""
        states = states_from_dict(state)
        if len(states) > 1:
            raise StateError(
                f"the state has those of {len(states)} ranks, one by one: load it as it is"
            )
        return states[0]

    @classmethod
    def _from_values(cls, saved: object) -> LoaderState:
        values: State = dict(saved) if isinstance(saved, Mapping) else {}
        if values.pop("checksum", None) != _checksum(values):
            raise StateError(
                "the state is damaged, or was edited: its checksum does not match"
            )
        for name, record in _RECORDS.items():
            values[name] = values[name] and record(*values[name])
        for name, record in _LISTS.items():
            values[name] = tuple(itertools.starmap(record, values[name]))
        values["streams"] = dict(values["streams"])
        return cls(**values)


# Fields that are plain tuples in a saved state.
_RECORDS: Mapping[str, Any] = {
    "fingerprint": Fingerprint,
    "last_draw": LastDraw,
    "run": Run,
    "skipped": SkipCounts,
}
_LISTS: Mapping[str, Any] = {"delivered": Given, "excluded": Exclusion, "lost": LostBatch}


def states_to_dict(states: Sequence[LoaderState]) -> State:
    """Return a dict of a shared state or of all ranks' states.

    The states are in a tuple. torch.distributed.checkpoint saves a tuple as a single value. In
    dicts and lists, torch.distributed.checkpoint saves each value separately. Where ranks have
    equal keys, the values may come from different ranks. Loading would also ask for the keys of a
    loader that was never iterated over.
    """
    saved = tuple(state._to_values() for state in states)
    return {"version": VERSION, "headrace": __version__, "state": saved}


def states_from_dict(state: Mapping[str, object]) -> tuple[LoaderState, ...]:
    """Return the checked states of a dict of `states_to_dict`.

    Raises:
        StateError: the state is damaged, is of another version, or is no state of a loader.
    """
    version, release = state.get("version"), state.get("headrace")
    if not isinstance(version, int) or not isinstance(release, str):
        raise StateError(f"this is no state of a headrace.DataLoader: {state!r:.80}")
    if version != VERSION:
        later = " or later" if version > VERSION else ""
        raise StateError(
            f"headrace {release} wrote this state, in format version {version}. "
            f"headrace {__version__} reads version {VERSION}: install headrace {release}{later}"
        )
    saved: Any = state.get("state") or [None]
    return tuple(map(LoaderState._from_values, saved))


def _checksum(state: Mapping[str, object]) -> str:
    """Return a checksum that survives JSON.

    Arrays, tensors and bytes count by value. If another value of a user's state has no form in
    JSON, only the type of the value counts.
    """
    as_saved = json.loads(json.dumps(state, default=_plain, skipkeys=True))
    text = json.dumps(as_saved, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: object) -> object:
    """Return a JSON value for a value unknown to JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return type(value).__name__
