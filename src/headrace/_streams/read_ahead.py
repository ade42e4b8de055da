"""Operations that read their stream ahead, by a task on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace._base.text import add_note, function_name
from headrace._eventloop.per_loop import end_all
from headrace._records.failure import as_exception, key_in
from headrace._streams.resumable import (
    NOTHING,
    BadRecord,
    Mark,
    ReplayOperation,
    State,
    close_all,
    raised_or,
)

# Most samples in a request to a worker. A request takes some 150 µs besides the functions, and a
# few ms on a busy machine: there, chunks of 64 take a third of the time of chunks of 16.
CHUNK = 64


def raised_by(
    error: BaseException, operation: str, function: Callable[..., Any], sample: Any
) -> BadRecord:
    """Return the error of a function before batching, with a note that names the sample."""
    raised, key = as_exception(error), key_in(sample)
    where = f", key {key!r}" if key else ""
    add_note(
        raised,
        f"headrace: in {operation}({function_name(function)}), before batching{where}",
    )
    return BadRecord(raised)


@dataclass(slots=True)
class Chunk:
    """Samples of a request."""

    first: int  # number of the first sample
    position: State | None  # position before the first sample, if known
    samples: list[Any] = field(default_factory=list)
    error: BadRecord | None = None  # an error of the stream, after the samples
    request: Any = None  # the future of the outcomes

    @property
    def is_full(self) -> bool:
        """Whether the next sample must start a new chunk."""
        return (
            len(self.samples) >= CHUNK or self.position is None or self.error is not None
        )


class ReadAhead(ReplayOperation[Any]):
    """An operation whose task reads ahead, and requests the outcomes of chunks of samples.

    The outcomes are given in the order of the samples. The saved position is the position before a
    chunk, and the number of outcomes given since. With `in_place` (without a loader) there is no
    task, and the operation is applied sample by sample.
    """

    reads_ahead = True
    fields = ("read",)
    # At most so many samples, or a chunk, lie between two saved positions.
    saved_samples = 1

    def __init__(self, source: Any, *, in_place: bool) -> None:
        super().__init__(source)
        self._in_place = in_place
        self._ended = not in_place  # True: the task reads the stream, not `__anext__`
        self._held = 0  # samples read, without a received outcome
        self._unsent: Chunk | None = None
        self._sent: deque[Chunk] = deque()  # in order
        self._outcomes: deque[object] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._read_all = False

    def _most_held(self) -> int:
        """Return how many samples may be held."""
        raise NotImplementedError

    def _request(self, chunk: Chunk) -> asyncio.Future[list[Any]] | None:
        """Request the outcomes of samples. Returns None if the chunk has to wait."""
        raise NotImplementedError

    async def _rest(self) -> object:
        if self._in_place:
            raise StopAsyncIteration
        if self._reader is None:
            self._first = self._read
            self._reader = asyncio.get_running_loop().create_task(self._read_ahead())
        while not self._outcomes:
            if self._closed or (self._read_all and not (self._sent or self._unsent)):
                raise StopAsyncIteration
            if not self._sent:
                await self._change()
                continue
            request = self._sent[0].request
            if request is not None and not request.done():
                await asyncio.wait([request])  # cancelling the wait loses nothing
            if not self._closed:
                self._receive()
        return raised_or(self._outcomes.popleft())

    def _receive(self) -> None:
        """Take the outcomes of the oldest chunk."""
        self._mark = self._latest_mark()
        chunk = self._sent.popleft()
        outcomes: list[object] = [*chunk.request.result()] if chunk.samples else []
        if chunk.error is not None:
            outcomes.append(chunk.error)
        kept = [place for place, outcome in enumerate(outcomes) if outcome is not NOTHING]
        first = chunk.first - self._first
        self._origins.append(
            (self._given, lambda number: self._inner.origin(first + kept[number]))
        )
        self._outcomes.extend(outcomes[place] for place in kept)
        self._held -= len(outcomes)
        self._changed.set()
        if not kept:
            self._drop(len(outcomes))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _read_ahead(self) -> None:
        try:
            while True:
                while self._held >= self._most_held() or (
                    self._unsent and self._unsent.is_full
                ):
                    await self._change()
                position: State | None = None
                error: BadRecord | None = None
                samples: list[Any] = []
                try:
                    if self._unsent is None and self._read % self.saved_samples == 0:
                        position = self._exact_state()
                    samples.append(await anext(self._inner))
                except StopAsyncIteration:
                    break
                except BaseException as raised:  # user code
                    if self._closed:
                        raise
                    error = BadRecord(as_exception(raised))
                self._unsent = self._unsent or Chunk(self._read, position)
                self._unsent.samples += samples
                self._unsent.error = error
                self._held += 1
                self._read += 1
                self._send()
        finally:
            self._read_all = True
            self._changed.set()
            await close_all(self._inner)

    def _send(self, *_done: object) -> None:
        """Send the unsent samples, unless the chunk has to wait."""
        chunk = self._unsent
        if chunk is None or self._closed:
            return
        if chunk.samples:
            chunk.request = self._request(chunk)
            if chunk.request is None:
                return
        self._sent.append(chunk)
        self._unsent = None
        self._changed.set()

    def _latest_mark(self) -> Mark:
        if self._in_place or self._mark is None:
            return self._new_mark()
        if not self._outcomes and self._sent and self._sent[0].position is not None:
            return Mark(self._given, self._errors, self._sent[0].position)
        return self._mark

    async def aclose(self) -> None:
        self._closed = True
        self._changed.set()
        if self._reader is None:
            await super().aclose()
            return
        await end_all(
            [self._reader, *(chunk.request for chunk in self._sent if chunk.samples)]
        )
        if (
            not self._reader.cancelled()
            and (error := self._reader.exception()) is not None
        ):
            raise error
