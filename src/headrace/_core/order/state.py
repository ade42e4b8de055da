"""The state of a loader: what is saved, how it is checked, and how it differs from the loader that restores it."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from headrace._core.streams.resumable import State
from headrace.errors import StateError


def checksum(indices: Sequence[object]) -> tuple[int, int]:
    return len(indices), zlib.crc32(repr(tuple(indices)).encode())


def encoded(state: torch.Tensor | None) -> str | None:
    return None if state is None else base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()


def decoded(text: str) -> torch.Tensor:
    try:
        return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    except (ValueError, zlib.error) as error:
        raise StateError(f"the state is damaged: the generator's state cannot be read ({error})") from error


VERSION: Final = 2

# Fields of a state before an epoch; the others have their defaults.
_BETWEEN = (
    "rank",
    "ranks",
    "base_seed",
    "kept_seed",
    "sampler_epoch",
    "generator",
    "sampler",
    "streams",
    "history",
    "found",
)


class Fingerprint(NamedTuple):
    """The properties of a loader that a state must agree with."""

    kind: str  # of the dataset
    length: int | None  # number of samples of a map-style dataset; None if unknown, or of a stream
    order: str  # the sampler, with the arguments that decide on the order
    seed: int | None  # the loader's
    readers: int | None  # workers that each read a copy of a stream; None where the number does not matter

    def differences(self, saved: Fingerprint) -> list[str]:
        """For each property that differs, its name, the saved value and the value now."""
        pairs = (
            ("dataset", saved.kind, self.kind),
            ("len(dataset)", saved.length, self.length),
            ("sampler", saved.order, self.order),
            ("seed", saved.seed, self.seed),
            ("num_workers", saved.readers, self.readers),
        )
        return [f"{name} was {old}, and is {new}" for name, old, new in pairs if old != new]


class Run(NamedTuple):
    """The steps from one on, up to the next entry of a history: they were read by as many ranks, in such batches."""

    epoch: int
    batches: int  # number of the first step in the epoch
    cursor: int  # that of the state before it
    ranks: int
    batch_size: int  # 0 if a batch sampler decides
    exclusions: int = 0  # how many of the state's are in force


class Past(NamedTuple):
    """What a state knows of the steps before it."""

    history: tuple[tuple[int, ...], ...] = ()  # see `Run`
    excluded: tuple[tuple[int, ...], ...] = ()  # see `Exclusion`


class LoaderState(NamedTuple):
    """The position in an epoch, and all that is needed to continue after it."""

    epoch: int
    fingerprint: Fingerprint  # of the loader
    cursor: int = 0  # number of samples given out in the epoch, over all ranks if they share one order
    samples: int = 0  # those among them of this rank
    batches: int = 0  # number of batches given out on this rank
    over: bool = False  # whether the sampler has nothing more
    rank: int | None = None  # the rank that the state is of; None if it is the same on all
    ranks: int = 1  # the number of ranks
    base_seed: int | None = None  # of the batches' seeds, if it was drawn; None with `seed=`
    order_seed: int | None = None  # that torch's RandomSampler drew; None of any other order
    kept_seed: int | None = None  # that persistent workers began with, of a state before an epoch; None without
    sampler_epoch: int | None = None  # of a sampler with `set_epoch`, which derives its order from it; None without
    generator: str | None = None  # state of the sampler's generator at the epoch's start, in base64
    sampler: object = None  # state of a user's sampler after the samples given out
    # Number and checksum of the last batch's indices, and their rank, of an order that is walked through.
    last_indices: tuple[int, int, int] | None = None
    # Of each worker or lane that reads a stream (None: the loader itself).
    streams: Mapping[int | None, Mapping[str, object]] = {}
    # Number of the epoch's lanes, 1 for a stream that is not divided; None of another dataset, and before an epoch.
    lanes: int | None = None
    # For each rank, its state of the stream, where states of several ranks were merged.
    merged: tuple[Mapping[str, object], ...] = ()
    next_worker: int = 0  # the worker or lane whose batch is next
    # Batches given out after others that were not: number, first sample and number of samples of each, and of a stream
    # the first and last position.
    delivered: tuple[tuple[int, ...], ...] = ()
    # Where the number of ranks or the size of a batch changed, from the run's first epoch on; see `Run`.
    history: tuple[tuple[int, ...], ...] = ()
    excluded: tuple[tuple[int, ...], ...] = ()  # samples that are left out; see `Exclusion`
    found: Mapping[str, int] = {}  # arguments with "auto", and the values in force; no batch depends on them
    # Counts of `on_error`: delivered and skipped samples, those in a row, lost batches to be replaced, and replacements
    # among `batches`. With a user's sampler that has a state also the indices of a batch to be repeated.
    skipped: tuple[Any, ...] = (0, 0, 0, 0, 0)

    @property
    def is_between_epochs(self) -> bool:
        """Whether it is one before an epoch, for which nothing has been drawn."""
        fields = self._asdict() | {name: self._field_defaults[name] for name in _BETWEEN}
        return fields == LoaderState(self.epoch, self.fingerprint)._asdict()

    def noted(self, past: Past, ranks: int, batch_size: int) -> LoaderState:
        """With the past, and in its history this beginning, if ranks, batches or exclusions are others than before."""
        history, read_by = past.history, (ranks, batch_size, len(past.excluded))
        if not history or history[-1][3:] != read_by:
            history = (*history, Run(self.epoch, self.batches, self.cursor, *read_by))
        return self._replace(history=history, excluded=past.excluded)

    @property
    def past(self) -> Past:
        return Past(self.history, self.excluded)

    def to_dict(self) -> State:
        return states_to_dict((self,))

    def _to_values(self) -> State:
        """Always the same keys; lists and tuples of JSON values, and users' own states."""
        streams = sorted(self.streams.items(), key=lambda item: -1 if item[0] is None else item[0])
        values: State = {
            **self._asdict(),
            "fingerprint": tuple(self.fingerprint),
            "streams": tuple((reader, dict(state)) for reader, state in streams),
            "merged": tuple(map(dict, self.merged)),
            "history": tuple(map(tuple, self.history)),
            "excluded": tuple(map(tuple, self.excluded)),
            "found": dict(self.found),
        }
        return {**values, "checksum": _checksum(values)}

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> LoaderState:
        """The state that was saved, of one rank or of all."""
        states = states_from_dict(state)
        if len(states) > 1:
            raise StateError(f"the state has those of {len(states)} ranks, one by one: load it as it is")
        return states[0]

    @classmethod
    def _from_values(cls, saved: Mapping[str, Any]) -> LoaderState:
        values = dict(saved)
        if values.pop("checksum", None) != _checksum(values):
            raise StateError("the state is damaged, or was edited: its checksum does not match")
        # With its checksum it is what was saved, as JSON has it: tuples may be lists.
        last = values["last_indices"]
        return cls(**values)._replace(
            fingerprint=Fingerprint(*values["fingerprint"]),
            last_indices=None if last is None else (last[0], last[1], last[2]),
            streams=dict(values["streams"]),
            merged=tuple(values["merged"]),
            delivered=tuple(map(tuple, values["delivered"])),
            history=tuple(map(tuple, values.get("history", ()))),
            excluded=tuple(map(tuple, values.get("excluded", ()))),
            found=dict(values.get("found", {})),
            skipped=tuple(values["skipped"]),
        )


def states_to_dict(states: Sequence[LoaderState]) -> State:
    """One state for all ranks, or those of all ranks, in their order, to be saved as one.

    They are in a tuple, which torch.distributed.checkpoint saves as one value. Of dicts and lists it saves each value
    by itself, and each from another rank, where the ranks have equal keys; and it asks a loader that was never iterated
    over for the keys.
    """
    return {"version": VERSION, "state": tuple(state._to_values() for state in states)}


def states_from_dict(state: Mapping[str, object]) -> tuple[LoaderState, ...]:
    """What was saved by `states_to_dict`, checked."""
    if not isinstance(state, Mapping) or "version" not in state:
        keys = list(state) if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise StateError(f"this is no state of a headrace.DataLoader: {keys}")
    if state["version"] != VERSION:
        raise StateError(
            f"the state has format version {state['version']!r}, but this release of headrace reads {VERSION}"
        )
    saved = state.get("state")
    if not (isinstance(saved, list | tuple) and saved and all(isinstance(values, Mapping) for values in saved)):
        raise StateError(f"the state is damaged: {saved!r:.80} is not a list of states")
    return tuple(LoaderState._from_values(values) for values in saved)


def _checksum(state: Mapping[str, object]) -> str:
    """A checksum that survives JSON; of users' values that JSON does not have, the type counts."""
    try:
        text = json.dumps(state, sort_keys=True, default=lambda value: type(value).__name__)
    except (TypeError, ValueError):  # a user's dict with keys of several types
        text = json.dumps({**state, "sampler": None, "streams": None, "merged": None}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
