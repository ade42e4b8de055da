"""Reading the tar format: a strict, incremental parser that knows nothing of where the bytes come from.

Python's `tarfile` blocks, and it takes an archive that was cut at a member's border, cut inside a header, or whose next
header has a flipped bit, for one that ends there. Here an archive ends with its two blocks of zeros or it is an error.

Sources of the format: POSIX.1-2017, *pax* (ustar and extended headers), and the GNU tar manual, *Basic Tar Format*
(long names, sizes in base 256).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from headrace._core.shards.tar.headers import checksum_holds, number, safe_name, sum_with_field
from headrace.errors import ShardError, TruncatedShardError, UnsafeMemberError

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK = 512  # bytes; everything in a tar is a multiple of it
MEMBER_LIMIT = 1 << 30  # bytes; a member is held in memory whole, so what is larger is damage, an attack or a mistake
EXTENSION_LIMIT = 1 << 20  # bytes of a long name or of pax records; paths end at 4,096, records that matter are few

_HEADER = struct.Struct("100s 24x 12s 12x 8s c 100x 6s 82x 155s 12x")  # name, size, checksum, type, magic, prefix
_PLAIN = struct.Struct("100s 24x 11s c 12x 8s c 188x c")  # name, size, its end, checksum, type, the prefix's first byte
_SIZE_ENDS = (b"\0", b" ")
_NOT_FIRST = ("", "/", ".")
_ZEROS = bytes(BLOCK)
_FILE = frozenset((b"0", b"\0", b"7"))
_EXTENSION = frozenset((b"x", b"g", b"L", b"K"))
_REFUSED = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
_PAX_RECORD = re.compile(rb"(\d{1,20}) ([^=]+)=")


class Member(NamedTuple):
    """A file in a tar.

    Attributes:
        name: its path, without a leading ``./``.
        data: its content; None where it was not asked for.
        offset: where its header is, in bytes from the beginning of the archive.
        data_offset: where its content is.
        size: the content's length in bytes.
    """

    name: str
    data: bytes | None
    offset: int
    data_offset: int
    size: int


class _Pending(NamedTuple):
    """What the bytes that come next belong to."""

    name: str
    kind: bytes
    offset: int
    data_offset: int
    size: int
    wanted: bool


class TarParser:
    """Takes the bytes of one archive in any pieces, gives its files.

    Args:
        shard: what errors call the archive.
        wanted: whether the content of a name is needed; of all, if not given.
        member_limit: the largest member in bytes; a larger one is an error.

    Example:
        >>> import io, tarfile
        >>> with tarfile.open(fileobj=(file := io.BytesIO()), mode="w") as archive:
        ...     info = tarfile.TarInfo("a.txt"); info.size = 3
        ...     archive.addfile(info, io.BytesIO(b"abc"))
        >>> parser = TarParser("a.tar")
        >>> list(parser.feed(file.getvalue()))
        [Member(name='a.txt', data=b'abc', offset=0, data_offset=512, size=3)]
        >>> parser.finish()
    """

    def __init__(
        self, shard: str, *, wanted: Callable[[str], bool] | None = None, member_limit: int = MEMBER_LIMIT
    ) -> None:
        self._shard = shard
        self._wanted = wanted
        self._member_limit = member_limit
        self._offset = 0  # of the first byte not yet taken
        self._header = b""  # the part of a header that has come
        self._pending: _Pending | None = None
        self._missing = 0  # bytes of the pending member's content
        self._parts: list[memoryview | bytes] = []
        self._padding = 0
        self._zero_blocks = 0
        self._last: str | None = None
        self._long_name: bytes | None = None
        self._pax: dict[bytes, bytes] = {}

    def feed(self, data: Buffer) -> Iterator[Member]:
        """Take the next bytes; gives each file whose content is complete with them. Must be read to its end.

        Raises:
            ShardError: what comes next is damaged; the files before it have been given.
            UnsafeMemberError: it is a path that leads out of the archive, a link or a device.
        """
        view = memoryview(data).cast("B")
        begin, end = self._offset, len(view)
        while (position := self._offset - begin) < end:
            if self._at_a_border():
                yield from self._plain_members(view, begin)
                if (position := self._offset - begin) >= end:
                    return
            if self._pending is not None:
                complete = self._take_content(view, position)
                if complete is not None:
                    yield complete
            elif self._padding:
                step = min(self._padding, end - position)
                self._padding -= step
                self._offset += step
            elif self._zero_blocks == 2:
                if bytes(view[position:]).strip(b"\0"):
                    self._fail("there is more behind the end of the archive; archives in a row are not read as one")
                self._offset += end - position
            else:
                complete = self._take_header(view, position)
                if complete is not None:
                    yield complete

    def finish(self) -> None:
        """Say that there are no more bytes.

        Raises:
            TruncatedShardError: the archive has not ended.
        """
        if self._pending is not None:
            have = self._pending.size - self._missing
            self._cut(f"it ends {have} bytes into a content of {self._pending.size}", self._pending.name)
        if self._header:
            self._cut(f"it ends {len(self._header)} bytes into a header", self._last)
        if self._zero_blocks < 2:
            what = "it is empty" if not self._offset else "the two zero blocks that end an archive are missing"
            self._cut(what, self._last)

    def _at_a_border(self) -> bool:
        """Whether a header comes next, and nothing that has come before says more about it."""
        under_way = self._pending is not None or self._padding or self._header or self._zero_blocks
        return not (under_way or self._long_name is not None or self._pax)

    def _plain_members(self, view: memoryview, begin: int) -> Iterator[Member]:
        """The next members, as long as they are the usual: files without extended headers, whole in this piece.

        Nearly all members are; this takes half the time of the general way, which judges all others.

        Args:
            view: the piece.
            begin: where it begins in the archive.
        """
        wanted, limit = self._wanted, self._member_limit
        offset, end = self._offset, begin + len(view)
        while (data_offset := offset + BLOCK) <= end:
            position = offset - begin
            raw_name, raw_size, size_end, raw_checksum, kind, prefix = _PLAIN.unpack_from(view, position)
            if kind != b"0" or prefix != b"\0" or not raw_size.isdigit() or size_end not in _SIZE_ENDS:
                return
            if zlib.adler32(view[position : position + BLOCK], 0) & 0xFFFF != sum_with_field(raw_checksum):
                return
            name = raw_name.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            if name[:1] in _NOT_FIRST or ".." in name or ":" in name or "\\" in name or name[-1] == "/":
                return
            try:
                size = int(raw_size, 8)
            except ValueError:
                return
            following = data_offset + size + -size % BLOCK
            if following > end or size > limit:
                return
            data = None
            if wanted is None or wanted(name):
                data = bytes(view[position + BLOCK : position + BLOCK + size])
            self._offset, self._last = following, name
            yield Member(name, data, offset, data_offset, size)
            offset = following

    def _take_header(self, view: memoryview, position: int) -> Member | None:
        part = bytes(view[position : position + BLOCK - len(self._header)])
        self._offset += len(part)
        header = self._header + part if self._header else part
        if len(header) < BLOCK:
            self._header = header
            return None
        self._header = b""
        if header == _ZEROS:
            self._zero_blocks += 1
            return None
        if self._zero_blocks:
            self._fail("a single zero block stands between members", self._offset - BLOCK)
        return self._begin(header)

    def _begin(self, header: bytes) -> Member | None:
        offset = self._offset - BLOCK
        raw_name, raw_size, raw_checksum, kind, magic, prefix = _HEADER.unpack(header)
        if not checksum_holds(header, raw_checksum):
            self._fail("the checksum of a header is wrong", offset)
        size = number(raw_size)
        if size is None or size < 0:
            self._fail("a header has no valid size", offset)
        if kind in _EXTENSION:
            if size > EXTENSION_LIMIT:
                self._fail(f"an extended header of {size} bytes is more than {EXTENSION_LIMIT}", offset)
            return self._expect(_Pending("", kind, offset, self._offset, size, wanted=True))
        name, size = self._extended(self._name(raw_name, magic, prefix), size, offset)
        if kind in _REFUSED:
            self._unsafe(f"{_REFUSED[kind]} is not read", name, offset)
        if kind == b"5" or (kind in (b"0", b"\0") and name.endswith("/")):
            safe_name(name.rstrip("/"), self._shard, offset)
            return self._expect(_Pending(name, b"5", offset, self._offset, size, wanted=False))
        if kind not in _FILE:
            self._fail(f"a member of type {kind!r} is not read", offset, name)
        name = safe_name(name, self._shard, offset)
        if size > self._member_limit:
            self._fail(f"a member of {size} bytes is more than member_limit={self._member_limit}", offset, name)
        wanted = self._wanted is None or self._wanted(name)
        return self._expect(_Pending(name, b"0", offset, self._offset, size, wanted))

    def _expect(self, pending: _Pending) -> Member | None:
        self._padding = -pending.size % BLOCK
        self._parts = []
        if not pending.size:
            return self._complete(pending)
        self._pending, self._missing = pending, pending.size
        return None

    def _take_content(self, view: memoryview, position: int) -> Member | None:
        assert self._pending is not None
        step = min(self._missing, len(view) - position)
        if self._pending.wanted:
            self._parts.append(view[position : position + step])
        self._missing -= step
        self._offset += step
        if self._missing:
            if self._pending.wanted:  # the caller's piece is not kept alive, whatever it was cut from
                self._parts[-1] = bytes(self._parts[-1])
            return None
        pending, self._pending = self._pending, None
        return self._complete(pending)

    def _complete(self, pending: _Pending) -> Member | None:
        data = b"".join(self._parts) if pending.wanted else None
        self._parts = []
        if pending.kind == b"0":
            self._last = pending.name
            return Member(pending.name, data, pending.offset, pending.data_offset, pending.size)
        if data is not None:
            self._extend(pending.kind, data, pending.offset)
        return None

    def _extend(self, kind: bytes, data: bytes, offset: int) -> None:
        """Take in an extended header, which says more about the member behind it."""
        if kind == b"L":
            self._long_name = data.split(b"\0", 1)[0]
        elif kind in (b"x", b"g"):
            records = self._pax_records(data, offset)
            if any(keyword.startswith(b"GNU.sparse") for keyword in records):
                self._fail("sparse files are not read", offset)
            if kind == b"x":
                self._pax = records
            elif records.keys() & {b"path", b"size"}:
                self._fail("a global header renames or resizes every member", offset)

    def _pax_records(self, data: bytes, offset: int) -> dict[bytes, bytes]:
        records: dict[bytes, bytes] = {}
        position = 0
        while position < len(data) and data[position]:
            match = _PAX_RECORD.match(data, position)
            end = position + int(match[1]) if match else 0
            if match is None or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
                self._fail("an extended header is damaged", offset)
            records[match[2]] = data[match.end() : end - 1]
            position = end
        return records

    def _extended(self, name: bytes, size: int, offset: int) -> tuple[str, int]:
        """The name and the size, as the extended headers before this one have them."""
        if self._long_name is not None:
            name, self._long_name = self._long_name, None
        pax, self._pax = self._pax, {}
        name = pax.get(b"path", name)
        if b"size" in pax:
            if not pax[b"size"].isdigit() or len(pax[b"size"]) > 20:
                self._fail("an extended header has no valid size", offset)
            size = int(pax[b"size"])
        return name.decode("utf-8", "surrogateescape"), size

    @staticmethod
    def _name(raw_name: bytes, magic: bytes, prefix: bytes) -> bytes:
        name = raw_name.split(b"\0", 1)[0]
        if magic == b"ustar\0" and prefix[0]:
            return prefix.split(b"\0", 1)[0] + b"/" + name
        return name

    def _fail(self, what: str, offset: int | None = None, member: str | None = None) -> NoReturn:
        where = self._offset if offset is None else offset
        raise ShardError(f"this tar is damaged: {what}", shard=self._shard, member=member or self._last, offset=where)

    def _cut(self, what: str, member: str | None) -> NoReturn:
        raise TruncatedShardError(
            f"this tar is cut short: {what}", shard=self._shard, member=member, offset=self._offset
        )

    def _unsafe(self, what: str, name: str, offset: int) -> NoReturn:
        raise UnsafeMemberError(f"this tar is not safe: {what}", shard=self._shard, member=name, offset=offset)
