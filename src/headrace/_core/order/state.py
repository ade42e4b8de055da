"""The state of a loader: what is saved, how it is checked, and how it differs from the loader that restores it."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from headrace._core.streams.resumable import State
from headrace.errors import StateError


def checksum(indices: Sequence[object]) -> tuple[int, int]:
    return len(indices), zlib.crc32(repr(tuple(indices)).encode())


def encoded(state: torch.Tensor | None) -> str | None:
    return (
        None if state is None else base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()
    )


def decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)


VERSION: Final = 5
LOST_KEPT = 256  # lost batches that a state knows

# Fields that have their defaults in a state before an epoch.
_WITHIN = (
    "cursor",
    "samples",
    "batches",
    "over",
    "last_indices",
    "next_worker",
    "delivered",
    "skipped",
)


class Fingerprint(NamedTuple):
    """The properties of a loader that a state must agree with."""

    kind: str  # of the dataset
    length: int | None  # number of samples of a map-style dataset; None if unknown, or of a stream
    order: str  # the sampler, with the arguments that decide on the order
    seed: int | None  # the loader's
    readers: (
        int | None
    )  # workers that each read a copy of a stream; None where the number does not matter

    def differences(self, saved: Fingerprint) -> list[str]:
        """For each property that differs, its name, the saved value and the value now."""
        names = "dataset", "len(dataset)", "sampler", "seed", "num_workers"
        compared = zip(names, saved, self, strict=True)
        return [f"{name} was {old}, and is {new}" for name, old, new in compared if old != new]


class Run(NamedTuple):
    """The batches since the number of ranks, the batch size or the exclusions changed last."""

    epoch: int
    batches: int  # number of the first batch in the epoch
    cursor: int  # of the state before that batch
    ranks: int
    batch_size: int  # 0 if a batch sampler decides
    exclusions: int = 0  # how many of the state's are in force


RunValues: TypeAlias = tuple[()] | tuple[int, int, int, int, int, int]
"""The values of a `Run`; empty before the first epoch."""

Triple: TypeAlias = tuple[int, int, int]
Triples: TypeAlias = tuple[Triple, ...]
Pairs: TypeAlias = tuple[tuple[int, int], ...]


class Past(NamedTuple):
    """The fields of a state that describe the batches before it."""

    run: RunValues = ()
    excluded: Triples = ()  # see `Exclusion`
    lost: Pairs = ()  # see `LoaderState`


class LoaderState(NamedTuple):
    """The position in an epoch, and all that is needed to continue after it."""

    epoch: int
    fingerprint: Fingerprint  # of the loader
    cursor: int = (
        0  # number of samples given out in the epoch, over all ranks if they share one order
    )
    samples: int = 0  # those among them of this rank
    batches: int = 0  # number of batches given out on this rank
    over: bool = False  # whether the sampler has nothing more
    rank: int | None = None  # the rank that the state is of; None if it is the same on all
    ranks: int = 1  # the number of ranks
    base_seed: int | None = None  # of the batches' seeds, if it was drawn; None with `seed=`
    kept_seed: int | None = (
        None  # that persistent workers began with, of a state before an epoch; None without
    )
    sampler_epoch: int | None = (
        None  # of a sampler with `set_epoch`, which derives its order from it; None without
    )
    generator: str | None = None  # state of the sampler's generator at the epoch's start, in base64
    sampler: object = None  # state of a user's sampler after the samples given out
    # Number and checksum of the last batch's indices, and their rank, of an order that is walked
    # through.
    last_indices: Triple | None = None
    # Of each worker that reads a stream (None: the loader itself).
    streams: Mapping[int | None, Mapping[str, object]] = {}
    next_worker: int = 0  # the worker whose batch is next
    # batches given out after others that were not: first sample and number of samples of each
    delivered: Pairs = ()
    run: RunValues = ()
    excluded: Triples = ()  # samples that are left out; see `Exclusion`
    lost: Pairs = ()  # the last batches that lost all their samples: epoch, and number of the batch
    skipped: Triple = (0, 0, 0)  # samples of the epoch delivered, skipped, and skipped in a row

    @property
    def is_between_epochs(self) -> bool:
        """Whether it is one before an epoch, for which nothing has been drawn."""
        return all(getattr(self, name) == self._field_defaults[name] for name in _WITHIN)

    def noted(self, ranks: int, batch_size: int) -> LoaderState:
        """The state, at which a run begins if ranks, batch size or exclusions are others than before."""
        read_by = ranks, batch_size, len(self.excluded)
        if self.run[3:] == read_by:
            return self
        begun = (self.epoch, self.batches, self.cursor) if self.run else (0, 0, 0)
        return self._replace(run=Run(*begun, *read_by))

    @property
    def past(self) -> Past:
        return Past(self.run, self.excluded, self.lost)

    @property
    def steps(self) -> int:
        """The number of steps that were made in the epoch."""
        lost = sum(epoch == self.epoch for epoch, _ in self.lost)
        return self.batches + len(self.delivered) - lost

    def number_of(self, epoch: int, step: int) -> int:
        """The number of the batch that was delivered at a step; `StateError` if the state does not know."""
        if len(self.lost) == LOST_KEPT and epoch <= self.lost[0][0]:
            raise StateError(
                f"step {step} of epoch {epoch} is not known: {LOST_KEPT} batches have lost all their samples since"
            )
        number = step
        for of, lost in self.lost:
            number += of == epoch and lost <= number
        return number

    def _to_values(self) -> State:
        """Always the same keys; lists and tuples of JSON values, and users' own states."""
        streams = sorted(self.streams.items(), key=lambda item: -1 if item[0] is None else item[0])
        values: State = {
            **self._asdict(),
            "fingerprint": tuple(self.fingerprint),
            "streams": tuple((reader, dict(state)) for reader, state in streams),
            "run": tuple(self.run),
            "excluded": tuple(map(tuple, self.excluded)),
        }
        return {**values, "checksum": _checksum(values)}

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> LoaderState:
        """The state that was saved, of one rank or of all."""
        states = states_from_dict(state)
        if len(states) > 1:
            raise StateError(
                f"the state has those of {len(states)} ranks, one by one: load it as it is"
            )
        return states[0]

    @classmethod
    def _from_values(cls, saved: Mapping[str, Any]) -> LoaderState:
        values = dict(saved)
        if values.pop("checksum", None) != _checksum(values):
            raise StateError("the state is damaged, or was edited: its checksum does not match")
        if other := values.keys() ^ set(cls._fields):
            raise StateError(
                f"the state is of another release of headrace, whose fields differ in {sorted(other)}"
            )
        for name in _TUPLES:
            values[name] = _as_tuple(values[name])
        values["fingerprint"] = Fingerprint(*values["fingerprint"])
        values["streams"] = dict(values["streams"])
        return cls(**values)


_TUPLES = ("last_indices", "delivered", "run", "excluded", "lost", "skipped")


def _as_tuple(value: Any) -> Any:
    """The value with tuples in place of the lists that JSON makes of them."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def states_to_dict(states: Sequence[LoaderState]) -> State:
    """One state for all ranks, or those of all ranks, in their order, to be saved as one.

    They are in a tuple, which torch.distributed.checkpoint saves as one value. Of dicts and lists
    it saves each value by itself, and each from another rank, where the ranks have equal keys; and
    it asks a loader that was never iterated over for the keys.
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
    if not (
        isinstance(saved, list | tuple)
        and saved
        and all(isinstance(values, Mapping) for values in saved)
    ):
        raise StateError(f"the state is damaged: {saved!r:.80} is not a list of states")
    return tuple(LoaderState._from_values(values) for values in saved)


def _checksum(state: Mapping[str, object]) -> str:
    """A checksum that survives JSON; of users' values that JSON does not have, the type counts."""
    as_saved = json.loads(json.dumps(state, default=_plain, skipkeys=True))
    text = json.dumps(as_saved, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: object) -> object:
    """A value for JSON, in place of a value that JSON does not have."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return type(value).__name__
