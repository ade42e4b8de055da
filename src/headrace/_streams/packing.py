"""Documents of tokens packed into sequences of equal length."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from headrace._base.array_types import AnyArray
from headrace._streams.resumable import NOTHING, MarkingOperation
from headrace.errors import StateError

PackStrategy = Literal["concat", "first_fit", "best_fit"]
PackLabels = Literal["next", "same"]
PackTooLong = Literal["cut", "truncate", "drop"]
# Windows of sequences; an open sequence waits at most so long for documents.
_LONGEST_WAIT = 4
_IGNORED = -100  # label ignored by torch's cross entropy


class _Document(NamedTuple):
    columns: list[AnyArray]  # one for each field
    carried: dict[str, Any]  # by the keys of `carry`
    amounts: list[int]  # one for each key of `limits`


class _Piece(NamedTuple):
    document: _Document
    start: int
    stop: int
    at: int  # position in the sequence


class _Sequence(NamedTuple):
    first: int  # number of the read that gave the first piece
    pieces: list[_Piece] | None  # None if the pieces were read before a restored position


class Pack(MarkingOperation[dict[str, Any]]):
    """Sequences of pieces of documents.

    A mark has the tokens and the limited amounts in the open sequences. With the same numbers,
    later documents are placed as before. After a restore the contents of the sequences are
    unknown, and the sequences are among the samples that are read again and dropped.
    """

    operation = "pack"
    ranks_differ = True
    options = ("seq_len", "strategy", "window", "limits", "align", "too_long")
    fields = ("used", "opened", "filled", "queued", "left_out", "ended")

    def __init__(
        self,
        source: AsyncIterable[Any],
        seq_len: int,
        strategy: PackStrategy,
        window: int,
        names: Sequence[str],
        labels: PackLabels | None,
        carry: Sequence[str],
        limits: dict[str, int],
        align: int,
        pad_to: int,
        too_long: PackTooLong,
    ) -> None:
        super().__init__(source)
        self._seq_len = seq_len
        self._strategy = strategy
        self._window = 1 if strategy == "concat" else window
        self._names = names
        self._labels = labels
        self._carry = carry
        self._limits = limits
        self._most = [seq_len, *limits.values()]  # of an open sequence, as in `_used`
        self._align = align
        self._pad_to = pad_to
        self._too_long = too_long
        self._keys = {*names, *carry, *limits}
        self._left_out = 0  # documents that were truncated or dropped
        self._filled = 0  # filled sequences
        self._queued = 0  # filled sequences in `_ready`
        # The open sequences, the oldest first.
        self._open_ones: list[_Sequence] = []
        # For each open sequence: tokens, with the padding up to the next document, and the amount
        # for each limit.
        self._used: list[list[int]] = []
        self._opened: list[int] = []  # `_filled` when each open sequence was opened

    async def __anext__(self) -> dict[str, Any]:
        sequence: Any = await super().__anext__()
        if sequence.pieces is None:
            raise StateError(
                "a sequence has documents of before the position that was restored: the stream has "
                "other documents now, or the state is damaged"
            )
        return self._tensors(sequence.pieces)

    def _put(self, sample: object) -> Any:
        document, size, used = self._document(sample), self._seq_len, self._used
        concat = self._strategy == "concat"
        start, end = 0, len(document.columns[0])
        if end:
            self._dropped = 0
        else:
            self._drop(1)
        while start < end:
            if (
                concat
                and used
                and self._limits
                and self._place([0, *document.amounts]) is None
            ):
                self._close(0)  # a limit leaves no room for a piece
            count = min(end - start, size - used[0][0] if concat and used else size)
            wanted = [count, *document.amounts]
            place = self._place(wanted)
            if place is None:
                if len(used) >= self._window and count < size:
                    self._close(max(range(len(used)), key=used.__getitem__))
                place = len(used)
                self._open_ones.append(_Sequence(self._read - 1, []))
                used.append([0] * len(wanted))
                self._opened.append(self._filled)
            pieces = self._open_ones[place].pieces
            if pieces is not None:
                pieces.append(_Piece(document, start, start + count, used[place][0]))
            wanted[0] = count + -count % self._align
            used[place] = [*map(operator.add, used[place], wanted)]
            if used[place][0] >= size:
                self._close(place)
            start += count
        while used and self._filled - self._opened[0] >= _LONGEST_WAIT * self._window:
            self._close(0)
        return self._ready.popleft() if self._ready else NOTHING

    def _place(self, wanted: list[int]) -> int | None:
        """Return the first or fullest open sequence with room for `wanted`.

        None if there is no such sequence. The strategy decides between first and fullest.
        """
        free = [*map(operator.sub, self._most, wanted)]
        room = free[0]  # the first comparison, since it decides in most cases
        fitting = (
            place
            for place, used in enumerate(self._used)
            if used[0] <= room and all(map(operator.le, used, free))
        )
        if self._strategy != "best_fit":
            return next(fitting, None)
        return max(fitting, key=self._used.__getitem__, default=None)

    def _close(self, place: int) -> None:
        self._ready.append(self._open_ones.pop(place))
        self._filled += 1
        del self._used[place], self._opened[place]

    async def _rest(self) -> Any:
        if not self._used:
            raise StopAsyncIteration
        self._close(0)
        return self._ready.popleft()

    def _document(self, sample: object) -> _Document:
        names = self._names
        values: Mapping[str, Any] = (
            sample if isinstance(sample, Mapping) else {names[0]: sample}
        )
        columns = [np.asarray(values.get(name)) for name in names]
        tokens = columns[0]
        flat = tokens.ndim == 1 and all(
            each.shape == tokens.shape and each.dtype.kind in "biuf" for each in columns
        )
        whole = tokens.dtype.kind in "iu" or not tokens.size
        if not flat or not whole or values.keys() != self._keys:
            found = [
                f"{name!r}: {column.dtype} {column.shape}"
                for name, column in zip(names, columns, strict=True)
            ]
            raise ValueError(
                f"a document needs {list(names)} of one length, the first of integers, but has "
                f"{', '.join(found)}, and the keys {[*values]} in place of {sorted(self._keys)}: "
                f"tokenise before pack(), add keys with a value for each token to fields=, and "
                f"other keys to carry=, or remove keys by map() before pack()"
            )
        amounts = [operator.index(values[key]) for key in self._limits]
        if any(map(operator.gt, amounts, self._limits.values())):
            raise ValueError(
                f"a document alone has {amounts}, more than limits={self._limits}: leave the "
                f"document out, or divide it"
            )
        if len(tokens) > self._seq_len and self._too_long != "cut":
            self._left_out += 1
            kept = self._seq_len if self._too_long == "truncate" else 0
            columns = [column[:kept] for column in columns]
        return _Document(columns, {key: values[key] for key in self._carry}, amounts)

    def _tensors(self, pieces: Sequence[_Piece]) -> dict[str, Any]:
        names = self._names
        last = pieces[-1]
        size = last.at + last.stop - last.start
        size += -size % self._pad_to
        rows: dict[str, AnyArray] = {}
        for number, name in enumerate(names):
            # Unsigned labels are widened.
            padding, least = (_IGNORED, np.int64) if name == "labels" else (0, np.bool)
            kind: np.dtype[Any] = np.dtype(np.int64)
            if number:
                kinds = {piece.document.columns[number].dtype for piece in pieces}
                kind = np.result_type(least, *kinds)
            rows[name] = np.full(size, padding, kind)
        segments, positions = np.zeros(size, np.int32), np.empty(size, np.int32)
        labels = np.full(size if self._labels else 0, _IGNORED, np.int64)
        end, count = 0, np.arange(size, dtype=np.int32)
        for segment, ((columns, _, _), start, stop, at) in enumerate(pieces, 1):
            positions[end:at] = count[: at - end]
            end = at + stop - start
            positions[at:end] = count[: end - at]
            for name, column in zip(names, columns, strict=True):
                rows[name][at:end] = column[start:stop]
            segments[at:end] = segment
            # Also after the last token of a piece, if the document continues.
            if self._labels == "next":
                following = columns[0][start + 1 : stop + 1]
                labels[at : at + len(following)] = following
            elif self._labels == "same":
                labels[at + 1 : end] = columns[0][start + 1 : stop]
        positions[end:] = count[: size - end]
        rows |= {"segment_ids": segments, "positions": positions}
        if self._labels:
            rows["labels"] = labels
        tensors: dict[str, Any] = {
            name: torch.from_numpy(row) for name, row in rows.items()
        }
        for key in self._carry:
            tensors[key] = [piece.document.carried[key] for piece in pieces]
        if self._too_long != "cut":
            tensors["too_long"] = torch.tensor(self._left_out)
        return tensors

    def _oldest(self) -> int:
        return min(
            (sequence.first for sequence in (*self._ready, *self._open_ones)),
            default=self._read,
        )

    def _exact_state(self) -> dict[str, object]:
        self._queued = len(self._ready)
        return super()._exact_state()

    def _restored(self) -> None:
        unknown = _Sequence(0, None)
        self._open_ones = [unknown] * len(self._used)
        self._ready.extend([unknown] * self._queued)
