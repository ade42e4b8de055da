"""A batch that is made twice, by the consumer and by a worker, before functions move to workers unasked."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from headrace._core.batches import HostBatch
from headrace._core.messages import Twin
from headrace._core.text import shorten
from headrace._core.transport.pickling import PickledPayload


class Comparison:
    """Compares the two versions of the batch that the engine chooses.

    Attributes:
        again: whether both have failed, so that another batch is to be compared.
        difference: what differs, in words, "" for nothing; None while that is unknown.
    """

    def __init__(self, unchanged: Callable[[], bool]) -> None:
        self._unchanged = unchanged  # whether the functions are still those that workers have
        self.again = False
        self.difference: str | None = None
        self._twin = Twin(-1)
        self._host: HostBatch | None = None  # the consumer's version, copied: the program may change its own

    def on_twin(self, twin: Twin) -> None:
        self._twin = twin
        self._compare()

    def on_batch(self, host: HostBatch) -> bool:
        """Take the consumer's version; returns whether a worker is to make another."""
        if host.plan.number != self._twin.number or self.difference is not None:
            return False
        if not self._unchanged():  # before the copy is made, which defines classes of a script again
            self.difference = "the functions change when they are called, and would change in workers"
            return False
        try:
            self._host = host._replace(data=PickledPayload.dumps(host.data, copied=True).loads())
            self._differs(difference(host.data, self._host.data))
        except Exception as error:  # user code: a class in the batch
            self._differs(repr(error))
        return self.difference is None

    def _compare(self) -> None:
        here, there = self._host, self._twin.host
        if here is None or there is None or self.difference:
            return
        self.again = here.empty and there.empty
        if not self.again:
            self.difference = ""
            try:
                if _failures(here) != _failures(there):
                    self._differs(str(there.failures[-1]) if there.failures else "there is no error")
                elif not here.empty:
                    self._differs(difference(here.data, there.data.loads()))
            except Exception as error:  # user code, as above
                self._differs(repr(error))

    def _differs(self, part: str | None) -> None:
        if part is not None:
            self.difference = f"batch {self._twin.number} differs in a worker: {shorten(part)}"


def _failures(host: HostBatch) -> list[tuple[str, ...]]:
    return [(failure.stage, failure.type_name, repr(failure.index)) for failure in host.failures]


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """The place and the kind of the first part in which two batches differ; None if they are the same."""
    same = type(one) is type(other)
    parts: Iterable[Any] = ()
    if same and type(one) is dict:
        same, parts = list(one) == list(other), one
    elif same and isinstance(one, list | tuple):
        same, parts = len(one) == len(other), range(len(one))
    elif same:
        same = one == other if type(one) in (set, frozenset) else _bytes(one) == _bytes(other)
    if not same:
        shaped = isinstance(one, torch.Tensor | np.ndarray)
        kind = f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" if shaped else type(one).__name__
        return f"{where}, {kind}" if where else kind
    found = (difference(one[part], other[part], f"{where}[{part!r}]") for part in parts)
    return next((each for each in found if each is not None), None)


def _bytes(part: Any) -> object:
    """All that is to be equal in a tensor, an array or any other object, so that NaN equals NaN."""
    if type(part) is torch.Tensor and part.layout is torch.strided:
        flat = part.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return part.dtype, part.shape, part.requires_grad, flat.view(torch.uint8).numpy().tobytes(), _pickle(vars(part))
    if type(part) is np.ndarray and not part.dtype.hasobject:
        return part.dtype, part.shape, part.tobytes()
    kind: Any = type(part)
    if kind.__eq__ is object.__eq__ and not isinstance(part, type | types.FunctionType):
        return id(part)  # a program can only compare it by its identity, and may keep it and change it
    return _pickle(part)


def _pickle(part: object) -> object:
    payload = PickledPayload.dumps(part)
    return payload.pickled, *map(bytes, payload.buffers)
