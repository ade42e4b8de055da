"""Which shards a dataset has: braces are expanded, globs and directories are listed; the same order every time."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from headrace._core.interface.background_loop import background_loop
from headrace._core.store.client import StoreClient
from headrace._core.store.head import Head, InitialRead
from headrace._core.store.listing import list_heads
from headrace._core.store.open import check_shared
from headrace._core.store.redaction import check_path
from headrace._core.store.schemes import traits_of
from headrace._core.store.store import Store, StoreLike, as_store
from headrace.errors import EmptyListingError

Shards = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_GLOB = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+|[a-zA-Z])\.\.(-?\d+|[a-zA-Z])(?:\.\.(-?\d+))?")


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: an object in a store.

    Attributes:
        store: the store.
        key: the object's, within it.
        head: its size and version, if known.
    """

    store: StoreClient
    key: str
    head: Head | None = None

    @property
    def name(self) -> str:
        """Its URL, without secrets."""
        return self.store.name(self.key)

    def read(self, start: int, stop: int, *, index: Any = None, whole: bool = True) -> Awaitable[memoryview]:
        """Read bytes of this version of it; see `StoreClient.read`."""
        head = self.head
        size, etag = (None, None) if head is None else (head.size, head.etag)
        return self.store.read(self.key, start, stop, size=size, etag=etag, index=index, whole=whole)

    async def read_start(self, stop: int) -> InitialRead:
        """Read up to `stop` bytes from its start, and its metadata."""
        if self.head is None:
            return await self.store.read_start(self.key, stop)
        return InitialRead(await self.read(0, min(stop, self.head.size)), self.head)

    async def read_end(self, length: int) -> InitialRead:
        """Read its last bytes, and its metadata."""
        return await self.store.read_end(self.key, length, head=self.head)


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern stands for, as a shell expands it.

    Args:
        pattern: with ``{0000..0127}`` (a range, padded as its ends are, with ``..step`` if wanted) and ``{a,b}``.

    Example:
        >>> expand_braces("{train,val}-{08..10}.tar")[1:4]
        ['train-09.tar', 'train-10.tar', 'val-08.tar']
    """
    return list(_expanded(pattern))


def _expanded(pattern: str) -> Iterator[str]:
    # The innermost braces come first; what they become may stand in braces further out. A pair with neither a comma
    # nor a range means itself, as in a shell, and is set aside meanwhile.
    for match in _BRACES.finditer(pattern):
        choices = _choices(match[1])
        if choices is None:
            continue
        before, behind = pattern[: match.start()], pattern[match.end() :]
        if "{" in before and _closes(behind):
            # Inside others: replaced by its own choices in their list, so that {a,b{1,2}} is a, b1, b2.
            yield from _expanded(_distributed(before, choices, behind))
            return
        for choice in choices:
            for rest in _expanded(behind):
                yield f"{before}{choice}{rest}"
        return
    yield pattern


def _closes(behind: str) -> bool:
    """Whether an outer brace is closed in `behind`."""
    depth = 0
    for character in behind:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return True
    return False


def _distributed(before: str, choices: list[str], behind: str) -> str:
    """Write out a choice that stands within a choice."""
    start = max(before.rfind("{"), before.rfind(",")) + 1
    stop = min(position for position in (behind.find(","), behind.find("}")) if position >= 0)
    head, tail = before[start:], behind[:stop]
    return before[:start] + ",".join(f"{head}{choice}{tail}" for choice in choices) + behind[stop:]


def _choices(inside: str) -> list[str] | None:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",") if "," in inside else None
    first, last, step = match[1], match[2], abs(int(match[3] or 1)) or 1
    if first.isalpha() != last.isalpha():
        return None
    start, stop = (ord(first), ord(last)) if first.isalpha() else (int(first), int(last))
    numbers = range(start, stop + 1, step) if start <= stop else range(start, stop - 1, -step)
    if first.isalpha():
        return [chr(number) for number in numbers]
    padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-").startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in numbers]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A glob or a directory, which a store has to be asked about.

    Attributes:
        store: the store.
        key: the glob, or the directory's path, within it.
    """

    store: StoreClient
    key: str

    async def listed(self, suffixes: tuple[str, ...]) -> list[Shard]:
        """The shards that match it, sorted.

        Raises:
            EmptyListingError: there is none.
            StoreError: the store refused, or cannot list.
        """
        match = _GLOB.search(self.key)
        fixed = self.key[: match.start()].rpartition("/")[0] if match else self.key.strip("/")
        heads = await list_heads(self.store, fixed)
        if match:
            wanted = _glob(self.key)
            heads = [head for head in heads if wanted.fullmatch(head.key)]
            what = f"nothing matches {self.key!r}"
        else:
            heads = [head for head in heads if head.key.lower().endswith(suffixes)]
            what = f"there is nothing that ends in {' or '.join(suffixes)}"
        if not heads:
            raise EmptyListingError(what, url=self.store.name(fixed))
        return [Shard(self.store, head.key, head) for head in heads]


def find_shards(
    shards: Shards | Sequence[Shard],
    *,
    suffixes: tuple[str, ...],
    store: StoreLike | None,
) -> tuple[Shard, ...]:
    """Find the shards that were asked for; blocks where a store has to be asked.

    Args:
        shards: a URL or a path, or several; each may have braces, a glob, or be a directory. Shards that were found
            already are taken as they are.
        suffixes: how the names of shards end, in a directory.
        store: the store of all of them; None to open each URL's own with default options.

    Raises:
        EmptyListingError: a glob or a directory has no shard.
        StoreError: a listing failed.
        ValueError: nothing was given, a shard twice, or a URL that is not under the URL of `store`.
    """
    given_store = None if store is None else as_store(store)
    clients: dict[str, StoreClient] = {}
    named = [
        named
        for given in ([shards] if isinstance(shards, str | os.PathLike) else shards)
        for named in _named(given, clients, suffixes, given_store)
    ]
    patterns = [one for one in named if isinstance(one, Pattern)]
    listed = (
        dict(zip(patterns, background_loop().run(_all_listed(patterns, suffixes)), strict=True)) if patterns else {}
    )
    found = [shard for one in named for shard in (listed[one] if isinstance(one, Pattern) else [one])]
    if not found:
        raise ValueError("no shard was given")
    names: set[str] = set()
    for shard in found:
        if shard.name in names:
            raise ValueError(f"shard {shard.name} is there twice; its samples would be too")
        names.add(shard.name)
    return tuple(found)


async def _all_listed(patterns: list[Pattern], suffixes: tuple[str, ...]) -> list[list[Shard]]:
    return await asyncio.gather(*(pattern.listed(suffixes) for pattern in patterns))


def _named(
    given: str | os.PathLike[str] | Shard,
    clients: dict[str, StoreClient],
    suffixes: tuple[str, ...],
    store: Store | None,
) -> Iterator[Shard | Pattern]:
    if isinstance(given, Shard):
        yield given
        return
    for name in expand_braces(os.fspath(given)):
        base, key = split_url(name) if store is None else ("", store.key_of(name))
        if base not in clients:
            clients[base] = (store or Store(base))._client
        if _GLOB.search(key) or not key.lower().endswith(suffixes):
            yield Pattern(clients[base], key)
        else:
            yield Shard(clients[base], key)


def split_url(name: str) -> tuple[str, str]:
    """A URL or a path as its store's URL and a key, which may be a pattern.

    Args:
        name: the URL or path.

    Raises:
        ValueError: it is a signed URL, or names no store, or is empty.

    Example:
        >>> split_url("s3://bucket/train/0000.tar")
        ('s3://bucket', 'train/0000.tar')
    """
    if "://" not in name:
        check_path(name)
        name = "file://" + str(Path(name).absolute()) + ("/" if name.endswith("/") else "")
        quoted = False
    else:
        quoted = traits_of(name).quoted
    check_shared(name)
    scheme, _, rest = name.partition("://")
    if scheme in ("http", "https") and "?" in rest:
        raise ValueError("signed URLs cannot be shards: give store= with credentials instead")
    if traits_of(name).bucket:
        bucket, _, key = rest.partition("/")
        return f"{scheme}://{bucket}", key
    fixed = rest[: match.start()] if (match := _GLOB.search(rest)) else rest
    directory, _, _ = fixed.rpartition("/")
    key = rest[len(directory) + 1 :]
    if scheme == "file" and not quoted:
        directory = Path(directory).as_uri()[len("file://") :] if directory else ""
    return f"{scheme}://{directory}", unquote(key) if quoted else key


def _glob(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression: ``*`` and ``?`` stay within a directory, ``**`` does not."""
    parts = re.split(r"(\*\*/?|\*|\?|\[!?\]?[^\]]*\])", pattern)
    return re.compile("".join(_glob_part(part) for part in parts))


def _glob_part(part: str) -> str:
    if part == "**/":
        return "(?:.*/)?"
    if part == "**":
        return ".*"
    if part == "*":
        return "[^/]*"
    if part == "?":
        return "[^/]"
    if part.startswith("[") and part.endswith("]"):
        inside = part[1:-1].replace("\\", r"\\")
        return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
    return re.escape(part)
