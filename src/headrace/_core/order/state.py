"""State of a loader: contents, checks, differences to another loader."""

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
    """Return the number of indices and a checksum of the indices."""
    return len(indices), zlib.crc32(repr(tuple(indices)).encode())


def encoded(state: torch.Tensor | None) -> str | None:
    """Return the state of a generator as base64 of compressed bytes."""
    return (
        None if state is None else base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()
    )


def decoded(text: str) -> torch.Tensor:
    """Return the generator state of a text of `encoded`."""
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)


VERSION: Final = 5
LOST_KEPT = 256  # number of lost batches in a state

# Fields with default values in a state before an epoch.
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
    """Properties of a loader that a state must agree with."""

    kind: str  # kind of the dataset
    length: int | None  # number of samples of a map-style dataset; None if unknown, or of a stream
    order: str  # the sampler, with the arguments that decide on the order
    seed: int | None  # seed of the loader
    # Workers that each read a copy of a stream. None if the number does not matter.
    readers: int | None

    def differences(self, saved: Fingerprint) -> list[str]:
        """List each differing property with the saved and the present value."""
        names = "dataset", "len(dataset)", "sampler", "seed", "num_workers"
        compared = zip(names, saved, self, strict=True)
        return [f"{name} was {old}, and is {new}" for name, old, new in compared if old != new]


class Run(NamedTuple):
    """Batches since the last change of ranks, batch size or exclusions."""

    epoch: int
    batches: int  # number of the first batch in the epoch
    cursor: int  # cursor of the state before the first batch
    ranks: int
    batch_size: int  # 0 if a batch sampler decides
    exclusions: int = 0  # number of the state's exclusions in force


RunValues: TypeAlias = tuple[()] | tuple[int, int, int, int, int, int]
"""Values of a `Run`; empty before the first epoch."""

Triple: TypeAlias = tuple[int, int, int]
Triples: TypeAlias = tuple[Triple, ...]
Pairs: TypeAlias = tuple[tuple[int, int], ...]


class Past(NamedTuple):
    """Fields of a state that describe earlier batches."""

    run: RunValues = ()
    excluded: Triples = ()  # see `Exclusion`
    lost: Pairs = ()  # see `LoaderState`


class LoaderState(NamedTuple):
    """Position in an epoch, with all data needed to continue."""

    epoch: int
    fingerprint: Fingerprint  # fingerprint of the loader
    # Number of samples given out in the epoch, over all ranks if the ranks share an order.
    cursor: int = 0
    samples: int = 0  # number of samples given out on this rank
    batches: int = 0  # number of batches given out on this rank
    over: bool = False  # whether the sampler has ended
    rank: int | None = None  # rank of the state; None if all ranks have the same state
    ranks: int = 1  # number of ranks
    base_seed: int | None = None  # source of the batches' seeds, if drawn; None with `seed=`
    # First seed of persistent workers, in a state before an epoch. None without persistent workers.
    kept_seed: int | None = None
    # Epoch of a sampler with `set_epoch` that derives the order from the epoch. None without.
    sampler_epoch: int | None = None
    generator: str | None = None  # state of the sampler's generator at the epoch's start, in base64
    sampler: object = None  # state of a user's sampler after the samples given out
    # Number of indices of the last batch, checksum of the indices, rank. Only of an order that is
    # walked through.
    last_indices: Triple | None = None
    # Stream state of each worker that reads a stream. The key None is the loader itself.
    streams: Mapping[int | None, Mapping[str, object]] = {}
    next_worker: int = 0  # worker of the next batch
    # Batches given out after missing batches: first sample and number of samples of each batch.
    delivered: Pairs = ()
    run: RunValues = ()
    excluded: Triples = ()  # samples to leave out; see `Exclusion`
    lost: Pairs = ()  # the last batches that lost all their samples: epoch, and number of the batch
    skipped: Triple = (0, 0, 0)  # samples of the epoch delivered, skipped, and skipped in a row

    @property
    def is_between_epochs(self) -> bool:
        """Whether the state lies before an epoch, with nothing drawn."""
        return all(getattr(self, name) == self._field_defaults[name] for name in _WITHIN)

    def noted(self, ranks: int, batch_size: int) -> LoaderState:
        """Return the state with ranks, batch size and exclusions noted.

        A new run begins if a value differs from the last run's value.
        """
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
        """Number of steps made in the epoch."""
        lost = sum(epoch == self.epoch for epoch, _ in self.lost)
        return self.batches + len(self.delivered) - lost

    def number_of(self, epoch: int, step: int) -> int:
        """Return the number of the batch delivered at a step.

        Raises:
            StateError: the state does not know the number.
        """
        if len(self.lost) == LOST_KEPT and epoch <= self.lost[0][0]:
            raise StateError(
                f"step {step} of epoch {epoch} is not known: {LOST_KEPT} batches have lost all "
                f"their samples since"
            )
        number = step
        for of, lost in self.lost:
            number += of == epoch and lost <= number
        return number

    def _to_values(self) -> State:
        """Return the state as a dict.

        Every state has the same keys. The values are lists and tuples of JSON values, and users'
        own states.
        """
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
        """Return the saved state of a rank, or of all ranks."""
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
                f"the state is of another release of headrace, whose fields differ in "
                f"{sorted(other)}"
            )
        for name in _TUPLES:
            values[name] = _as_tuple(values[name])
        values["fingerprint"] = Fingerprint(*values["fingerprint"])
        values["streams"] = dict(values["streams"])
        return cls(**values)


_TUPLES = ("last_indices", "delivered", "run", "excluded", "lost", "skipped")


def _as_tuple(value: Any) -> Any:
    """Return the value with tuples in place of JSON's lists."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def states_to_dict(states: Sequence[LoaderState]) -> State:
    """Return a dict of a shared state or of all ranks' states.

    The states are in a tuple. torch.distributed.checkpoint saves a tuple as a single value. In
    dicts and lists, torch.distributed.checkpoint saves each value separately. Where ranks have
    equal keys, the values may come from different ranks. Loading would also ask for the keys of a
    loader that was never iterated over.
    """
    return {"version": VERSION, "state": tuple(state._to_values() for state in states)}


def states_from_dict(state: Mapping[str, object]) -> tuple[LoaderState, ...]:
    """Return the checked states of a dict of `states_to_dict`."""
    if not isinstance(state, Mapping) or "version" not in state:
        keys = list(state) if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise StateError(f"this is no state of a headrace.DataLoader: {keys}")
    if state["version"] != VERSION:
        raise StateError(
            f"the state has format version {state['version']!r}, but this release of headrace "
            f"reads {VERSION}"
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
