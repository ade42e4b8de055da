"""Parser of tar archives, and decoder of WebDataset shards.

The module does no I/O.

Python's `tarfile` blocks. `tarfile` also stops without an error in an archive that was cut between
two members or inside a header, and before a header with a flipped bit. Here an archive ends with
two zero blocks, or there is an error.

Formats: POSIX.1-2017, *pax* (ustar and extended headers), and the GNU tar manual, *Basic Tar
Format* (long names, sizes in base 256).
"""

from __future__ import annotations

import functools
import re
import struct
import tarfile
import zlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace._shards.reading import BadRecord, Decoder, only_sample
from headrace._streams.resumable import State
from headrace.errors import ShardError, TruncatedShardError, UnsafeMemberError

if TYPE_CHECKING:
    from typing_extensions import Buffer

TAR_BLOCK = 512  # bytes; headers, and contents with padding, are multiples of a block
# Bytes; memory holds a whole member, and a larger member may be an attack.
MEMBER_LIMIT = 1 << 30
# Bytes of a long name or of pax records; paths end at 4,096 bytes.
EXTENSION_LIMIT = 1 << 20

_HEADER = struct.Struct("100s 24x 12s 12x 8s c 100x 6s 82x 155s 12x")
"""Name, size, checksum, type, magic, prefix."""
_PLAIN = struct.Struct("100s 24x 11s c 12x 8s c 188x c")
"""Name, size, end of the size, checksum, type, first byte of the prefix."""
_SIZE_ENDS = (b"\0", b" ")
_ZEROS = bytes(TAR_BLOCK)
_BLANKS = 8 * ord(" ")  # the sum of a header is made with blanks in the checksum field
_FILE = frozenset((b"0", b"\0", b"7"))
_NO_FILE = frozenset((b"5", b"D", b"V"))  # directory, incremental dump, label of a volume
_EXTENSION = frozenset((b"x", b"g", b"L", b"K"))
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
}
_NO_TAR = "it begins with no header of a tar"
_PAX_RECORD = re.compile(rb"(\d{1,20}) ([^=]+)=")

# Absolute, of a drive of Windows, with a zero, or with "..". Both separators: the name may be
# unpacked on Windows.
_UNSAFE = re.compile(r"\Z|[/\\]|[A-Za-z]:|.*\0|(?:.*[/\\])?\.\.(?:[/\\]|\Z)", re.DOTALL)
# Keys and fields for the fast path: without "..", and leading to no other place. A field ends
# before the zeros of the header.
_PLAIN_KEY = re.compile(rb"(?!.*\.\.)[^./\\:\0\n][^\\:\0\n]*(?<!/)")
_PLAIN_FIELD = re.compile(rb"(?![^\0]*\.\.)([^./\\:\0][^/\\:\0]*)(?:\0|\Z)")


class Member(NamedTuple):
    """A member of a tar."""

    name: str  # path, without a leading ``./``
    kind: bytes  # type in the header; b"0" for every file
    offset: int  # position of the header in the archive, in bytes
    size: int  # bytes of the content
    wanted: bool  # whether the content is kept
    error: ShardError | None = None  # why this member is not read; later members are read
    data: bytes | None = None  # content; None if not wanted, or not complete


class TarSamples(Decoder):
    """Decoder of the samples in an archive.

    A sample is a dict with the contents of the members, by field.

    Consecutive members with the same key are a sample. Every sample must have `fields`. Other
    fields are not read. Without `fields`, every sample must have exactly the fields of the first
    sample, unless `uniform` is False. A position is after the last complete sample, and has the
    fields that all samples must have.
    """

    format = "tar"

    def __init__(
        self,
        shard: str,
        *,
        fields: Collection[str] | None = None,
        uniform: bool,
        member_limit: int = MEMBER_LIMIT,
    ) -> None:
        self._shard = shard
        self._member_limit = member_limit
        self._selected = None if fields is None else frozenset(fields)
        self._required = self._selected
        self._exact = fields is None and uniform
        # The archive.
        self._offset = 0  # of the next byte
        # The member whose content is next; None at a header.
        self._pending: Member | None = None
        self._missing = TAR_BLOCK  # bytes of the header, or of the content
        self._parts: list[memoryview | bytes] = []  # of the header, or of the content
        self._zero_blocks = 0
        self._last: str | bytes | None = None  # name of the last complete file
        self._long_name: bytes | None = None
        self._pax: dict[bytes, bytes] = {}
        # The current sample.
        self._key: bytes | None = None  # as in the archive; None before the first member
        # By field; None for a content that is not wanted.
        self._contents: dict[str, Any] = {}
        self._latest: tuple[int, bytes] = 0, b""  # offset and name of the latest member
        self._end = 0  # of the latest member
        self._broken: ShardError | None = None  # why the sample cannot be given
        # All samples.
        self._seen: set[bytes] = set()
        self._others = 0  # members that belong to no sample

    def feed(self, data: Buffer) -> Iterator[Any]:
        for found in self.members(data):
            if type(found) is not Member:
                yield found
            elif (split := split_name(found.name)) is None and found.error is None:
                self._others += 1
            else:
                stem, field = split or (found.name, "")
                name, key = (
                    text.encode("utf-8", "surrogateescape") for text in (found.name, stem)
                )
                begins = key != self._key
                if (
                    begins
                    and (sample := self._begin(key, name, found.offset)) is not None
                ):
                    yield sample
                if field in self._contents:
                    what = f"sample {_text(key)!r} has field {field!r} twice"
                    self._broken = self._error(what, found.offset, name)
                self._contents[field] = found.data
                self._latest = found.offset, name
                self._broken = self._broken or found.error
                self._end = self._offset + -self._offset % TAR_BLOCK

    def position(self) -> State:
        learned = sorted(self._required) if self._exact and self._required else None
        return {"offset": self.complete, "fields": learned}

    def restore(self, position: State) -> None:
        self.complete = self._end = self._offset = position["offset"]
        learned = position.get("fields")
        if self._exact and learned is not None:
            self._required = frozenset(learned)
        if self._offset:
            # The archive has samples; repeated keys are found from here on.
            self._seen.add(b"")

    def finish(self) -> Iterator[Any]:
        self._check_end()
        if self._others and not self._seen:
            what = f"none of its {self._others} files has a name with an extension"
            raise ShardError(f"{what}, so it has no samples", shard=self._shard)
        if self._contents:
            yield self._take()

    def whole_sample(self, data: Buffer, offset: int) -> Any:
        self._seen.clear()
        self._zero_blocks = 0
        self.restore({"offset": offset})
        samples = [*self.feed(data)]
        self._zero_blocks = 2  # the archive does not end here
        return only_sample([*samples, *self.finish()], offset)

    def members(self, data: Buffer) -> Iterator[Any]:
        """Parse the next bytes.

        Yields a `Member` for each complete file, and the samples of the fast path. The iterator
        must be exhausted.
        """
        view = memoryview(data).cast("B")
        begin, end = self._offset, self._offset + len(view)
        while self._offset < end or not self._missing:
            if self._zero_blocks == 2:
                if bytes(view[self._offset - begin :]).strip(b"\0"):
                    what = "corrupt tar: there are bytes after the end of the archive"
                    raise self._error(f"{what}; concatenated archives are not supported")
                self._offset = end
                return
            if self._pending is None and not self._parts:
                # Padding.
                self._offset = min(end, self._offset + -self._offset % TAR_BLOCK)
                if not self._zero_blocks and not self._pax and self._long_name is None:
                    yield from self._plain(view, begin)
                if self._offset == end:
                    return
            part = view[self._offset - begin :][: self._missing]
            self._offset += len(part)
            self._missing -= len(part)
            pending = self._pending
            if pending is None or pending.wanted:
                # A copy of an incomplete part: the caller's buffer is not kept alive.
                self._parts.append(bytes(part) if self._missing else part)
            if self._missing:
                return
            taken, self._parts = b"".join(self._parts), []
            self._pending, self._missing = None, TAR_BLOCK
            if pending is None:
                self._take_header(taken)
            elif (member := self._take_content(pending, taken)) is not None:
                yield member

    def _check_end(self) -> None:
        """Raise `TruncatedShardError` if the archive is incomplete."""
        pending, name = self._pending, None
        if pending is not None:
            if pending.error is not None:
                raise pending.error
            name = pending.name
            came = pending.size - self._missing
            what = f"it ends {came} bytes into a content of {pending.size}"
        elif self._parts:
            what = f"it ends {TAR_BLOCK - self._missing} bytes into a header"
        elif self._zero_blocks < 2:
            what = "the two zero blocks that end an archive are missing"
            what = what if self._offset else "it is empty"
        else:
            return
        raise self._error(f"truncated tar: {what}", None, name, TruncatedShardError)

    def _take_header(self, header: bytes) -> None:
        if header == _ZEROS:
            self._zero_blocks += 1
            return
        offset = self._offset - TAR_BLOCK
        if self._zero_blocks:
            what = "corrupt tar: a single zero block stands between members"
            raise self._error(what, offset)
        self._pending = self._parse_header(header, offset)
        self._missing = self._pending.size

    def _parse_header(self, header: bytes, offset: int) -> Member:
        raw_name, raw_size, raw_checksum, kind, magic, prefix = _HEADER.unpack(header)
        is_right = zlib.adler32(header, 0) & 0xFFFF == adler_of(raw_checksum)
        # Historic implementations add signed characters: the second sum.
        sums: Any = getattr(tarfile, "calc_chksums")  # noqa: B009  # without a type
        if not is_right and parse_number(raw_checksum) not in sums(header):
            what = "the checksum of a header is wrong" if offset else _NO_TAR
            raise self._error(f"corrupt tar: {what}", offset)
        size = parse_number(raw_size)
        if size is None or size < 0:
            raise self._error("corrupt tar: a header has no valid size", offset)
        if kind in _EXTENSION:
            if size > EXTENSION_LIMIT:
                what = (
                    f"an extended header of {size} bytes is more than {EXTENSION_LIMIT}"
                )
                raise self._error(f"corrupt tar: {what}", offset)
            return Member("", kind, offset, size, wanted=True)
        raw_name = raw_name.split(b"\0", 1)[0]
        if magic == b"ustar\0" and prefix[0]:
            raw_name = prefix.split(b"\0", 1)[0] + b"/" + raw_name
        is_sparse = kind == b"S" or any(
            keyword.startswith(b"GNU.sparse") for keyword in self._pax
        )
        name, size = self._apply_extensions(raw_name, size, offset)
        if kind in (b"0", b"\0") and name.endswith("/"):
            kind = b"5"
        try:
            if kind in _REFUSED:
                what = f"unsafe tar: {_REFUSED[kind]} is not read"
                raise self._error(what, offset, name, UnsafeMemberError)
            if is_sparse:
                raise self._error("corrupt tar: sparse files are not read", offset, name)
            if kind in _NO_FILE:
                safe_name(
                    name.rstrip("/") if kind != b"V" else "label", self._shard, offset
                )
                return Member(name, b"5", offset, size, wanted=False)
            if kind not in _FILE:
                raise self._error(f"corrupt tar: type {kind!r} is not read", offset, name)
            safe = safe_name(name, self._shard, offset)
            if size > self._member_limit:
                what = f"a member of {size} bytes is more than member_limit={self._member_limit}"
                raise self._error(f"corrupt tar: {what}", offset, safe)
        except ShardError as error:
            held = 0 if kind in _REFUSED else size
            return Member(name, b"0", offset, held, wanted=False, error=error)
        return Member(safe, b"0", offset, size, self._is_wanted(safe))

    def _take_content(self, pending: Member, data: bytes) -> Member | None:
        """Take the content of a member; return the member if the member is a file."""
        if pending.kind == b"0":
            self._last = pending.name
            return pending._replace(data=data) if pending.wanted else pending
        if pending.kind == b"L":
            self._long_name = data.split(b"\0", 1)[0]
        elif pending.kind in (b"x", b"g"):
            records = self._pax_records(data, pending.offset)
            if pending.kind == b"x":
                self._pax = records
            elif records.keys() & {b"path", b"size"}:
                what = "corrupt tar: a global header renames or resizes every member"
                raise self._error(what, pending.offset)
        return None

    def _pax_records(self, data: bytes, offset: int) -> dict[bytes, bytes]:
        records: dict[bytes, bytes] = {}
        position = 0
        while position < len(data) and data[position]:
            match = _PAX_RECORD.match(data, position)
            end = position + int(match[1]) if match else 0
            if (
                match is None
                or not match.end() < end <= len(data)
                or data[end - 1 : end] != b"\n"
            ):
                raise self._error("corrupt tar: an extended header is invalid", offset)
            records[match[2]] = data[match.end() : end - 1]
            position = end
        return records

    def _apply_extensions(self, name: bytes, size: int, offset: int) -> tuple[str, int]:
        if self._long_name is not None:
            name, self._long_name = self._long_name, None
        pax, self._pax = self._pax, {}
        name = pax.get(b"path", name)
        if b"size" in pax:
            if not pax[b"size"].isdigit() or len(pax[b"size"]) > 20:
                raise self._error(
                    "corrupt tar: an extended header has no valid size", offset
                )
            size = int(pax[b"size"])
        return name.decode("utf-8", "surrogateescape"), size

    def _plain(self, view: memoryview, begin: int) -> Iterator[Any]:
        """Yield samples by the fast path, while members are plain.

        Nearly all members are plain: files within `view`, without extended headers. The general
        path is slower, and judges all other members.

        Args:
            view: the next bytes of the archive.
            begin: position of `view` in the archive.
        """
        limit, selected = self._member_limit, self._selected
        key, contents = self._key, self._contents
        offset, end = self._offset, begin + len(view)
        while (data_offset := offset + TAR_BLOCK) <= end:
            position, start = offset - begin, data_offset - begin
            name, digits, size_end, checksum, kind, prefix = _PLAIN.unpack_from(
                view, position
            )
            if (
                kind != b"0"
                or prefix != b"\0"
                or not digits.isdigit()
                or size_end not in _SIZE_ENDS
            ):
                return
            if zlib.adler32(view[position:start], 0) & 0xFFFF != adler_of(checksum):
                return
            folder, slash, file = name.rpartition(b"/")
            first, _, rest = file.partition(b".")
            field = plain_field(rest)
            if field is None:
                return
            try:
                size = int(digits, 8)
            except ValueError:
                return
            following = data_offset + size + -size % TAR_BLOCK
            if following > end or size > limit:
                return
            if slash:
                first = folder + slash + first
            if first != key:
                if _PLAIN_KEY.fullmatch(first) is None:
                    return
                if (sample := self._begin(first, name, offset)) is not None:
                    yield sample
                key, contents = first, self._contents
            elif field in contents:
                return
            content = None
            if selected is None or field in selected:
                content = bytes(view[start : start + size])
            contents[field] = content
            self._last, self._latest = name, (offset, name)
            self._offset = self._end = following
            offset = following

    def _is_wanted(self, name: str) -> bool:
        split = split_name(name)
        return split is not None and (
            self._selected is None or split[1] in self._selected
        )

    def _begin(self, key: bytes, name: bytes, offset: int) -> Any:
        """Begin a sample with a member; return the sample before."""
        complete = self._take() if self._contents else None
        if key in self._seen:
            what = f"sample {_text(key)!r} appears again; members of one sample must be consecutive"
            raise self._error(what, offset, name)
        self._seen.add(key)
        self._key, self._contents = key, {}
        return complete

    def _take(self) -> Any:
        """End the current sample; return the sample or an error."""
        key, contents, required = _text(self._key), self._contents, self._required
        broken, self._broken = self._broken, None
        self.complete, self._key, self._contents = self._end, None, {}
        if broken is not None:
            return BadRecord(broken)
        if required is None and self._exact:
            required = self._required = frozenset(contents)
        if required is not None and required != contents.keys():
            missing = required - contents.keys()
            extra = contents.keys() - required if self._exact else frozenset[str]()
            if missing or extra:
                listed = ", ".join(sorted(map(repr, missing or extra)))
                what = (
                    f"lacks {listed}"
                    if missing
                    else f"has {listed}, which earlier samples lack"
                )
                if self._exact:
                    what += "; if that is intended, give fields=[...] or uniform=False"
                return BadRecord(self._error(f"sample {key!r} {what}", *self._latest))
            contents = {
                field: content
                for field, content in contents.items()
                if content is not None
            }
        return {"__key__": key, "__url__": self._shard, **contents}

    def _error(
        self,
        what: str,
        offset: int | None = None,
        member: str | bytes | None = None,
        kind: type[ShardError] = ShardError,
    ) -> ShardError:
        """Return an error at a place; by default at the next byte."""
        where = self._offset if offset is None else offset
        return kind(
            what, shard=self._shard, member=_text(member or self._last), offset=where
        )


def safe_name(name: str, shard: str, offset: int) -> str:
    """Return a safe name, without a leading ``./``.

    Raises:
        UnsafeMemberError: the name leads outside the directory where the archive is unpacked.
    """
    while name.startswith("./"):
        name = name[2:]
    if _UNSAFE.match(name):
        what = "unsafe tar: the name leads outside the archive"
        raise UnsafeMemberError(what, shard=shard, member=name, offset=offset)
    return name


def parse_number(field: bytes) -> int | None:
    """Parse octal digits, or base 256 if the first bit is set (GNU).

    None if the number is invalid.
    """
    try:
        number: int = tarfile.nti(field)  # type: ignore[attr-defined]
    except tarfile.HeaderError:
        return None
    return number


@functools.lru_cache(4096)  # headers of text add up to a few thousand different sums
def adler_of(field: bytes) -> int:
    """Return the lower half of Adler-32, from 0, of a header with a right checksum.

    This half is the sum of all bytes modulo 65,521: 0.3 µs, and 3 µs with `sum`. Two sums that
    differ by the modulus need a header without a right byte. The checksum counts blanks in place of
    the field. -1 if the field has no number.
    """
    expected = parse_number(field)
    return -1 if expected is None else (expected + sum(field) - _BLANKS) % 65521


def split_name(name: str) -> tuple[str, str] | None:
    """Split the name of a member into key and field.

    WebDataset's rule: the key is the path up to the first dot of the file name. The rest is the
    field. None if the file name has no dot, or starts with a dot.

    Example:
        >>> split_name("train.v1/0001.seg.PNG")
        ('train.v1/0001', 'seg.png')
        >>> split_name("README")
    """
    folder, slash, file = name.rpartition("/")
    stem, _, field = file.partition(".")
    return (folder + slash + stem, field.lower()) if stem and field else None


@functools.lru_cache(1024)
def plain_field(rest: bytes) -> str | None:
    """Return the field of a name in a header, or None.

    None: the fast path cannot judge the name.

    Args:
        rest: the bytes after the key and a dot.
    """
    match = _PLAIN_FIELD.match(rest)
    return None if match is None else match[1].decode("utf-8", "surrogateescape").lower()


def _text(name: str | bytes | None) -> Any:
    """Return a name as text, without the zeros of a header."""
    if not isinstance(name, bytes):
        return name
    return name.partition(b"\0")[0].decode("utf-8", "surrogateescape")
