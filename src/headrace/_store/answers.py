"""Recorded answers of stores, in place of new requests."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from headrace._eventloop.loop_thread import carried
from headrace._store.head import Head
from headrace.errors import ObjectNotFoundError

T = TypeVar("T")
P = ParamSpec("P")


class Answers:
    """Answers of stores, by the names of the requests.

    Args:
        known: recorded answers as JSON values, from `dump`.
        data: the bytes of the recorded answers.

    Attributes:
        changed: whether requests were answered since the recording.
    """

    def __init__(self, known: dict[str, Any], data: memoryview) -> None:
        self._answers = {name: _decoded(value, data) for name, value in known.items()}
        self.changed = False

    async def get(self, name: str, request: Callable[[], Awaitable[T]]) -> T:
        """Return the recorded answer, or make the request.

        The answer of a new request is recorded. A recorded `ObjectNotFoundError` is raised again.
        """
        if name not in self._answers:
            try:
                self._answers[name] = await request()
            except ObjectNotFoundError as error:
                self._answers[name] = error
            self.changed = True
        answer = self._answers[name]
        if isinstance(answer, ObjectNotFoundError):
            raise copy.copy(answer)
        found: T = answer
        return found

    def dump(self) -> tuple[dict[str, Any], bytes]:
        """Return all answers as JSON values, and all bytes."""
        data = bytearray()
        known = {name: _encoded(answer, data) for name, answer in self._answers.items()}
        return known, bytes(data)


def _decoded(value: Any, data: memoryview) -> Any:
    if isinstance(value, list):
        return [_decoded(each, data) for each in value]
    ((kind, content),) = value.items()
    if kind == "head":
        return Head(*content)
    if kind == "bytes":
        return data[slice(*content)]
    return ObjectNotFoundError(content)


def _encoded(value: Any, data: bytearray) -> Any:
    if isinstance(value, Head):
        return {"head": [value.key, value.size, value.etag, value.modified]}
    if isinstance(value, memoryview):
        start = len(data)
        data += value
        return {"bytes": [start, len(data)]}
    if isinstance(value, ObjectNotFoundError):
        return {"missing": str(value)}
    return [_encoded(each, data) for each in value]


def answerable(request: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let `headrace.open_cached` answer a request of a store.

    Outside `open_cached`, or without a recorded answer, the request is made.

    Args:
        request: a method of a store. Returns a `Head`, bytes, or a sequence of both. A recorded
            sequence is returned as a list.
    """

    @functools.wraps(request)
    async def answered(*arguments: P.args, **options: P.kwargs) -> T:
        answers = carried.get()
        if not isinstance(answers, Answers):
            return await request(*arguments, **options)
        store: Any = arguments[0]
        name = json.dumps(
            [store.url, request.__name__, *map(str, arguments[1:]), *map(str, options.items())]
        )
        return await answers.get(name, lambda: request(*arguments, **options))

    return answered
