"""Windows of the samples of WAV files, map-style, read by ranged requests."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from headrace._core.shards.discovery import HeaderReader, Shard, Shards, find_shards, map_shards
from headrace._core.store.ranges import Ranges
from headrace._core.store.store import StoreLike
from headrace.datasets.cached import RangedShards
from headrace.errors import ShardError, TruncatedShardError

__all__ = ["WavDataset"]

_EXTENSIBLE = 0xFFFE, b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
_KINDS = {(1, 16), (1, 24), (1, 32), (3, 32)}  # integers or floats, bits
_WavFile = tuple[Shard, int, int, tuple[int, ...]]  # begin of the samples, their number; rate, channels, kind, bytes


class WavDataset(RangedShards[torch.Tensor]):
    """Windows of uncompressed WAV files, map-style: float32 [channels, samples] from -1 to 1, read by ranged requests.

    Windows do not cross files; samples at the end of a file that do not fill a window are dropped. Samples are 16, 24
    or 32-bit integers, or 32-bit floats; RF64 is read too. All files have one rate, type and number of channels.

    Args:
        objects: URLs or paths, as the shards of `TarDataset`; in a directory, those ending in ``.wav``.
        samples: length of a window, in samples of each channel.
        stride: samples from the start of a window to that of the next; by default `samples`.
        store: store of all files, a `headrace.Store` or its URL, as for `TokenDataset`.

    Attributes:
        sample_rate: of all files, in Hz.

    Raises:
        ShardError: a file is no such WAV file, is truncated, or differs from the first.
        StoreError: a listing or a request failed, or found nothing.
        ValueError: an invalid argument, or no file is long enough for a window.

    Example:
        >>> import pathlib, tempfile, wave
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.wav")
        >>> with wave.open(str(path), "wb") as file:
        ...     file.setparams((1, 2, 8000, 0, "NONE", None))
        ...     file.writeframes(np.array([0, 16384, -32768, 0, 5], "<i2"))
        >>> WavDataset(path, samples=2)[1]
        tensor([[-1.,  0.]])
    """

    def __init__(
        self, objects: Shards, *, samples: int, stride: int | None = None, store: StoreLike | None = None
    ) -> None:
        self._samples, self._stride = samples, samples if stride is None else stride
        if samples < 1 or self._stride < 1:
            raise ValueError(f"samples={samples} and stride={stride} must be at least 1")
        files = map_shards(_open, find_shards(objects, suffixes=(".wav",), store=store))
        shards, begins, counts, layouts = zip(*files, strict=True)
        for shard, _, _, layout in files:
            if layout != layouts[0]:
                what = f"rate, channels, kind and bytes are {layout}, but those of {shards[0].name} {layouts[0]}"
                raise ShardError(what, shard=shard.name)
        self.sample_rate, self._channels, self._kind, self._width = layouts[0]
        self._begins = np.array(begins)
        super().__init__(shards, [max(0, (count - samples) // self._stride + 1) for count in counts])
        if not len(self):
            raise ValueError(f"none of {len(files)} files has the {samples} samples of a window")

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """The bytes of the windows at `indices`; raises `IndexError` if there is no such window."""
        (files, rows), step = self._rows(indices), self._channels * self._width
        starts = self._begins[files] + rows * self._stride * step
        return Ranges(files, starts, starts + self._samples * step)

    def sample_of(self, index: int, data: memoryview) -> torch.Tensor:
        """The window at `index`, of its bytes."""
        raw = np.frombuffer(data, np.uint8).reshape(-1, self._width)
        words = np.pad(raw, ((0, 0), (4 - self._width, 0))).view("<f4" if self._kind == 3 else "<i4")
        values = words.astype(np.float32) * np.float32(1 if self._kind == 3 else 2**-31)
        return torch.from_numpy(values.reshape(-1, self._channels).T.copy())


async def _open(shard: Shard) -> _WavFile:
    reader = HeaderReader(shard, first := await shard.read_start(4096), 4096)
    shard, size, at, kind, fmt, long, length = reader.shard, reader.size, 12, b"", b"", 0, 0
    begins = bytes(first.data[:12])
    is_wave = begins[:4] in (b"RIFF", b"RF64") and begins[8:] == b"WAVE"
    for _ in range(1000 if is_wave else 0):
        if kind == b"data" or at + 8 > size:
            break
        kind, length = struct.unpack("<4sI", await reader.take(at, at + 8))
        body = bytes(await reader.take(at + 8, min(at + 8 + min(length, 40), size)))
        fmt = body if kind == b"fmt " else fmt
        long = int.from_bytes(body[8:16], "little") if kind == b"ds64" else long
        at += 8 if kind == b"data" else 8 + length + length % 2
    length = long if length == 0xFFFFFFFF and long else length
    if kind != b"data" or len(fmt) < 16 or (not length and at < size):
        raise ShardError("not a WAV file whose header states its samples", shard=shard.name, offset=at)
    tag, channels, rate, _, step, bits = struct.unpack_from("<HHIIHH", fmt)
    tag = int.from_bytes(fmt[24:26], "little") if (tag, fmt[26:]) == _EXTENSIBLE else tag
    if (tag, bits) not in _KINDS or not channels or step != channels * bits // 8 or not rate:
        raise ShardError(f"format {tag} of {bits} bits, {channels} channels, {rate} Hz", shard=shard.name, offset=at)
    if at + length > size:
        raise TruncatedShardError(f"{size} bytes, but its samples end at {at + length}", shard=shard.name, offset=size)
    if length % step:
        raise ShardError(f"{length} bytes are not whole samples", shard=shard.name, offset=at)
    return shard, at, length // step, (rate, channels, tag, bits // 8)
