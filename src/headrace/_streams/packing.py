"""Documents of tokens packed into sequences of equal length."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from headrace._base.array_types import AnyArray
from headrace._streams.resumable import NOTHING, MarkingOperation
from headrace.errors import StateError

PackStrategy = Literal["concat", "first_fit", "best_fit"]
PackLabels = Literal["next", "same"]
_LONGEST_WAIT = 4  # windows of sequences; an open sequence waits at most so long for documents
_IGNORED = -100  # label ignored by torch's cross entropy


# The columns of a document, one for each field; start, stop.
_Piece = tuple[Sequence[AnyArray], int, int]


class _Sequence(NamedTuple):
    first: int  # number of the read that gave the first piece
    pieces: list[_Piece] | None  # None if the pieces were read before a restored position


class Pack(MarkingOperation[dict[str, torch.Tensor]]):
    """Sequences of pieces of documents.

    A mark has the numbers of tokens in the open sequences. With the same numbers, later documents
    are placed as before. After a restore the contents of the sequences are unknown, and the
    sequences are among the samples that are read again and dropped.
    """

    operation = "pack"
    ranks_differ = True
    options = ("seq_len", "strategy", "window")
    fields = ("used", "opened", "filled", "queued", "ended")

    def __init__(
        self,
        source: AsyncIterable[Any],
        seq_len: int,
        strategy: PackStrategy,
        window: int,
        names: Sequence[str],
        labels: PackLabels | None,
    ) -> None:
        super().__init__(source)
        self._seq_len = seq_len
        self._strategy = strategy
        self._window = 1 if strategy == "concat" else window
        self._names = names
        self._labels = labels
        self._filled = 0  # filled sequences
        self._queued = 0  # filled sequences in `_ready`
        # The open sequences, the oldest first.
        self._open_ones: list[_Sequence] = []
        self._used: list[int] = []  # tokens in each open sequence
        self._opened: list[int] = []  # `_filled` when each open sequence was opened

    async def __anext__(self) -> dict[str, torch.Tensor]:
        sequence: Any = await super().__anext__()
        if sequence.pieces is None:
            raise StateError(
                "a sequence has documents of before the position that was restored: the stream has "
                "other documents now, or the state is damaged"
            )
        return self._tensors(sequence.pieces)

    def _put(self, sample: object) -> Any:
        columns, size, used = self._columns(sample), self._seq_len, self._used
        start, end = 0, len(columns[0])
        if end:
            self._dropped = 0
        else:
            self._drop(1)
        while start < end:
            count = min(
                end - start, size - used[0] if self._strategy == "concat" and used else size
            )
            place = self._place(size - count)
            if place is None:
                if len(used) >= self._window and count < size:
                    self._close(max(range(len(used)), key=used.__getitem__))
                place = len(used)
                self._open_ones.append(_Sequence(self._read - 1, []))
                used.append(0)
                self._opened.append(self._filled)
            pieces = self._open_ones[place].pieces
            if pieces is not None:
                pieces.append((columns, start, start + count))
            used[place] += count
            if used[place] == size:
                self._close(place)
            start += count
        while used and self._filled - self._opened[0] >= _LONGEST_WAIT * self._window:
            self._close(0)
        return self._ready.popleft() if self._ready else NOTHING

    def _place(self, most: int) -> int | None:
        """Return the first or fullest open sequence of at most `most` tokens.

        None if all open sequences have more tokens. The strategy decides between first and fullest.
        """
        used = self._used
        if self._strategy != "best_fit":
            return next((place for place, tokens in enumerate(used) if tokens <= most), None)
        best = max((tokens for tokens in used if tokens <= most), default=None)
        return None if best is None else used.index(best)

    def _close(self, place: int) -> None:
        self._ready.append(self._open_ones.pop(place))
        self._filled += 1
        del self._used[place], self._opened[place]

    async def _rest(self) -> Any:
        if not self._used:
            raise StopAsyncIteration
        self._close(0)
        return self._ready.popleft()

    def _columns(self, sample: object) -> list[AnyArray]:
        names = self._names
        parts = [sample.get(name) for name in names] if isinstance(sample, Mapping) else [sample]
        columns = [np.asarray(part) for part in parts]
        tokens = columns[0]
        flat = tokens.ndim == 1 and all(
            each.shape == tokens.shape and each.dtype.kind in "biuf" for each in columns
        )
        if not flat or len(columns) < len(names) or (tokens.dtype.kind not in "iu" and len(tokens)):
            found = [
                f"{name!r}: {column.dtype} {column.shape}"
                for name, column in zip(names, columns, strict=False)
            ]
            raise ValueError(
                f"a document needs {list(names)} of one length, the first of integers, but has "
                f"{', '.join(found)}: tokenise before pack(), and set its fields="
            )
        if isinstance(sample, Mapping) and len(sample) > len(names):
            raise ValueError(
                f"pack() would leave out {[name for name in sample if name not in names]} of a "
                f"document: add keys with a value for each token to fields=, "
                f"and remove other keys by map() before pack()"
            )
        return columns

    def _tensors(self, pieces: Sequence[_Piece]) -> dict[str, torch.Tensor]:
        size, names = self._seq_len, self._names
        rows = {}
        for number, name in enumerate(names):
            # Unsigned labels are widened.
            padding, least = (_IGNORED, np.int64) if name == "labels" else (0, np.bool)
            kind = (
                np.result_type(least, *{columns[number].dtype for columns, _, _ in pieces})
                if number
                else np.int64
            )
            rows[name] = np.full(size, padding, kind)
        segments, positions = np.zeros(size, np.int32), np.empty(size, np.int32)
        labels = np.full(size if self._labels else 0, _IGNORED, np.int64)
        at, count = 0, np.arange(size, dtype=np.int32)
        for segment, (columns, start, stop) in enumerate(pieces, 1):
            end = at + stop - start
            for name, column in zip(names, columns, strict=True):
                rows[name][at:end] = column[start:stop]
            segments[at:end] = segment
            positions[at:end] = count[: end - at]
            # Also after the last token of a piece, if the document continues.
            if self._labels == "next":
                following = columns[0][start + 1 : stop + 1]
                labels[at : at + len(following)] = following
            elif self._labels == "same":
                labels[at + 1 : end] = columns[0][start + 1 : stop]
            at = end
        positions[at:] = count[: size - at]
        rows |= {"segment_ids": segments, "positions": positions}
        if self._labels:
            rows["labels"] = labels
        return {name: torch.from_numpy(row) for name, row in rows.items()}

    def _oldest(self) -> int:
        return min(
            (sequence.first for sequence in (*self._ready, *self._open_ones)), default=self._read
        )

    def _exact_state(self) -> dict[str, object]:
        self._queued = len(self._ready)
        return super()._exact_state()

    def _restored(self) -> None:
        unknown = _Sequence(0, None)
        self._open_ones = [unknown] * len(self._used)
        self._ready.extend([unknown] * self._queued)
