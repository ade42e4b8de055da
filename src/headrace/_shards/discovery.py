"""Expansion of shard names: braces, globs, directories.

The result has the same order every time.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from glob import glob
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from headrace._base.text import short_repr, warn_user
from headrace._shards.compression import check_content
from headrace._store.head import Head
from headrace._store.listing import AT_ONCE, list_heads, list_level, nothing_listed
from headrace._store.open import check_shared, traits_of
from headrace._store.ranges import map_all
from headrace._store.redaction import check_path
from headrace._store.store import Store, StoreLike, as_store
from headrace._streams.blocking import background_loop
from headrace.errors import (
    HeadraceError,
    ObjectNotFoundError,
    ShardError,
    TruncatedShardError,
)

MOST_NAMES = 1_000_000  # maximum number of names of braces
_GLOB = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\}")  # may contain pairs of braces
_COMMAS = re.compile(r",(?![^{}]*\})")  # commas outside braces


@dataclass(frozen=True, slots=True)
class Shard:
    """Object in a store, or a version of the object.

    Attributes:
        store: the store.
        key: the object's key.
        head: size and version of the object, if known. If known, only this version is read.
    """

    store: Store
    key: str
    head: Head | None = None

    @property
    def name(self) -> str:
        """URL of the object, without secrets."""
        return self.store.name(self.key)

    @property
    def size(self) -> int:
        """Size of the known version, in bytes."""
        assert self.head is not None
        return self.head.size

    def error(self, what: str, offset: int | None = None) -> ShardError:
        """Return the error of a damaged shard, perhaps at an offset in bytes."""
        return ShardError(what, shard=self.name, offset=offset)

    def read(self, start: int, stop: int, *, index: Any = None) -> Awaitable[memoryview]:
        """Read bytes of this version of the object; see `Store.read`."""
        return self.store.read(self.key, start, stop, head=self.head, index=index)

    async def read_version(self, stop: int) -> tuple[Shard, memoryview]:
        """Read bytes up to `stop`, or all if the store ignores ranges.

        Returns:
            The shard in the version that was read, and the bytes.
        """
        if self.head is None:
            data, head = await self.store.read_start(self.key, stop)
        else:
            data, head = await self.read(0, min(stop, self.head.size)), self.head
        check_content(data, self.name)
        return replace(self, head=head), data

    async def read_end(self, length: int) -> tuple[Shard, memoryview]:
        """Read the last bytes, or all if the store ignores ranges.

        Returns:
            The shard in the version that was read, and the bytes.
        """
        data, head = await self.store.read_end(self.key, length, head=self.head)
        if len(data) == head.size:
            check_content(data, self.name)
        return replace(self, head=head), data


@contextlib.contextmanager
def shard_errors(what: str, shard: str, offset: int | None = None) -> Iterator[None]:
    """Raise errors of other libraries, and panics of Rust code, as `ShardError`."""
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as raised:
        error = raised
        while isinstance(error, BaseExceptionGroup):  # zarr 3.4 reads in a group of tasks
            error = error.exceptions[0]
        if isinstance(error, HeadraceError):
            raise error from error.__cause__
        # `except Exception` does not catch a panic of Rust code.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = "it has no" if isinstance(error, KeyError) else f"{type(error).__name__}:"
        message = " ".join(f"{what}: {cause} {error}".split())
        raise ShardError(message, shard=shard, offset=offset) from None


class HeaderReader:
    """Reads headers at offsets of a shard.

    The first bytes of the shard have been read. A request has at least `least` bytes.
    """

    def __init__(self, shard: Shard, first: memoryview, least: int) -> None:
        self._shard, self._least, self._begin, self._data = shard, least, 0, first

    async def take(self, start: int, stop: int) -> memoryview:
        """Return bytes of the shard.

        Raises:
            TruncatedShardError: the shard ends before `stop`.
        """
        shard = self._shard
        if not start <= stop <= shard.size:
            what = (
                f"truncated, or corrupt: it should have bytes from {start} to {stop}, "
                f"and has {shard.size}"
            )
            raise TruncatedShardError(what, shard=shard.name, offset=shard.size)
        if not self._begin <= start <= stop <= self._begin + len(self._data):
            least = min(shard.size, max(stop, start + self._least))
            self._begin, self._data = start, await shard.read(start, least)
        return self._data[start - self._begin : stop - self._begin]


A = TypeVar("A")
T = TypeVar("T")

OnOpeningError = Literal["raise", "skip"]

Shards = str | os.PathLike[str] | Store | Sequence[str | os.PathLike[str] | Shard]


def map_shards(function: Callable[[A], Awaitable[T]], shards: Iterable[A]) -> list[T]:
    """Call an async function with all shards.

    Blocks until all calls are done. The function reads a header, for example. At most 64 calls run
    at the same time.
    """
    # The requests are small, and a store serves many small requests.
    return background_loop().run(map_all(function, shards, 64))


def open_each(
    sources: Sequence[A],
    open_one: Callable[[A], Awaitable[T]],
    *,
    on_error: OnOpeningError,
) -> list[T]:
    """Open the files of a dataset concurrently.

    With ``on_error="skip"``, broken and missing files are left out, and one warning counts the
    left-out files. A failed request is always an error: another rank might read the file, and the
    ranks would then have different datasets. The results are in the order of `sources`.

    Args:
        sources: the files, or the arguments of `open_one` for each file.
        open_one: async function to open a file.
        on_error: ``"raise"`` or ``"skip"``.

    Raises:
        ShardError: with ``"raise"``, a file is broken. With ``"skip"``, every file is broken.
        StoreError: a request failed.
        ValueError: `on_error` is neither ``"raise"`` nor ``"skip"``.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={on_error!r} must be 'raise' or 'skip'")

    async def attempt(source: A) -> T | ShardError | ObjectNotFoundError:
        try:
            return await open_one(source)
        except (ShardError, ObjectNotFoundError) as error:
            if on_error == "raise":
                raise
            return error

    results = map_shards(attempt, sources)
    errors = [each for each in results if isinstance(each, Exception)]
    if errors and len(errors) == len(results):
        raise errors[0]
    if errors:
        many = f"{len(errors):,} of {len(results):,} files"
        warn_user(
            f"{many} cannot be opened and are left out; the first error: {errors[0]}"
        )
    return [each for each in results if not isinstance(each, Exception)]


def find_shards(
    shards: Shards, *, suffixes: tuple[str, ...], store: StoreLike | None = None
) -> tuple[Shard, ...]:
    """Find the shards that a user named.

    Blocks if there is a glob or a directory. Names and errors are as for `TarDataset`. A `Shard` is
    returned unchanged. In a directory, names must end in `suffixes`.
    """
    if isinstance(shards, Store) and store is None:
        shards, store = "", shards  # all objects of the store
    opened = None if store is None else as_store(store)
    store_of = cache(lambda base: opened or Store(base))
    named: list[Shard] = []
    patterns: list[Shard] = []  # shards of `named` that have to be listed
    names = [shards] if isinstance(shards, str | os.PathLike) else shards
    for name in names:  # type: ignore[union-attr]
        if isinstance(name, Shard):
            named.append(name)
            continue
        for url in expand_braces(os.fspath(name)):
            base, key = split_url(url) if opened is None else ("", opened.key_of(url))
            one = Shard(store_of(base), key)
            named.append(one)
            is_pattern = _GLOB.search(key) is not None or not key.lower().endswith(
                suffixes
            )
            root = one.store.local_root
            if is_pattern or (
                root is not None and os.path.isdir(os.path.join(root, key))
            ):
                patterns.append(one)
    listed: dict[Shard, list[Shard]] = {}
    if patterns:
        found_by = map_shards(partial(_list, suffixes=suffixes), patterns)
        listed = dict(zip(patterns, found_by, strict=True))
    found = [*chain.from_iterable(listed.get(one, [one]) for one in named)]
    if not found:
        raise ValueError("no shard was given")
    name, times = Counter(shard.name for shard in found).most_common(1)[0]
    if times > 1:
        raise ValueError(f"shard {name} is given twice, which would repeat its samples")
    return tuple(found)


async def _list(pattern: Shard, suffixes: tuple[str, ...]) -> list[Shard]:
    """Return the shards of a glob or a directory.

    If a directory has no shards, the key may be the key of a shard with another suffix.
    """
    store, key = pattern.store, pattern.key
    folder = key.strip("/")
    if match := _GLOB.search(key):
        folder, problem = (
            key[: match.start()].rpartition("/")[0],
            f"nothing matches {key!r}",
        )
        found = await _matching(pattern, folder, suffixes)
    else:
        problem = f"no such file, and no file in such a directory ends in {' or '.join(suffixes)}"
        found = await list_inside(store, folder, suffixes)
        if not found and folder == key != "":
            found = await _find(store, (), key)
    if not found:
        raise nothing_listed(store, problem, store.name(folder))
    return found


async def list_inside(
    store: Store, folder: str, suffixes: tuple[str, ...]
) -> list[Shard]:
    """Return the visible objects in a directory, at any depth.

    Only objects that end in `suffixes` are returned.
    """
    return [
        Shard(store, head.key, head)
        for head in await list_heads(store, folder)
        if head.key.lower().endswith(suffixes)
        and not _is_hidden(head.key.removeprefix(folder))
    ]


async def _matching(shard: Shard, folder: str, suffixes: tuple[str, ...]) -> list[Shard]:
    """Return the objects that match a glob.

    A matching directory with the name of a shard stands for the objects inside. `folder` contains
    all matches.

    Without ``**``, a directory is listed only if the directory's path matches, and subdirectories
    are not listed.
    """
    store, pattern = shard.store, shard.key
    if "**" in pattern.split("/"):
        heads, expression = await list_heads(store, folder), glob_expression(pattern)
        return [
            Shard(store, head.key, head)
            for head in heads
            if expression.fullmatch(head.key)
        ]
    if (root := store.local_root) is not None:
        # obstore refuses directories with names that cannot be keys. No thread: the thread would
        # outlive the dataset.
        names = sorted(glob(pattern, root_dir=root))
        inside = await map_all(partial(_find, store, suffixes), names, AT_ONCE)
        return [*chain.from_iterable(inside)]
    found, folders = list[Shard](), [""]
    # A step is some directories without wildcards, and a name.
    for step in re.findall(r"(?:[^/*?\[]*/)*[^/]+", pattern):
        path, slash, name = step.rpartition("/")
        one = partial(list_level, store, glob_expression(name))
        levels = await map_all(
            one, [folder + path + slash for folder in folders], AT_ONCE
        )
        heads = [*chain.from_iterable(levels)]
        found = [
            Shard(store, head.key, head) for head in heads if not head.key.endswith("/")
        ]
        folders = [head.key[:-1] for head in heads if head.key.endswith("/")]
    tables = [each for each in folders if each.lower().endswith(suffixes)]
    inside = await map_all(
        partial(list_inside, store, suffixes=suffixes), tables, AT_ONCE
    )
    return sorted(chain(found, *inside), key=attrgetter("key"))


async def _find(store: Store, suffixes: tuple[str, ...], key: str) -> list[Shard]:
    """Return the object of a key, or the objects in a directory.

    The directory must have the name of a shard. The list is empty if there is neither.
    """
    with contextlib.suppress(ObjectNotFoundError):
        return [Shard(store, key, await store.head(key))]
    return (
        await list_inside(store, key, suffixes) if key.lower().endswith(suffixes) else []
    )


def expand_braces(pattern: str) -> list[str]:
    """Expand ``{a,b}`` and ``{0000..0127}``.

    Braces may be nested. At most a million names are made.

    Example:
        >>> expand_braces("{train,val}-{08..10}.tar")[1:4]
        ['train-09.tar', 'train-10.tar', 'val-08.tar']

    Raises:
        ValueError: braces of a range are not balanced, or braces stand for more names.
    """
    if ".." in pattern and pattern.count("{") != pattern.count("}"):
        raise ValueError(f"the braces in {short_repr(pattern)} are not balanced")
    pieces = _BRACES.split(pattern)
    choices = [
        _choices(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)
    ]
    if (count := math.prod(map(len, choices))) > MOST_NAMES:
        raise ValueError(
            f"braces in {short_repr(pattern)} stand for {count:,} names, "
            f"and {MOST_NAMES:,} are the most"
        )
    return ["".join(map(str, each)) for each in product(*choices)]


def _choices(inside: str) -> Sequence[object]:
    """Return the texts that a pair of braces stands for."""
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", inside):
        first, last = map(int, numbers.groups())
        step = 1 if first <= last else -1
        span = range(first, last + step, step)
        if not re.search(r"\b0\d", inside) or len(span) > MOST_NAMES:
            return span
        width = max(map(len, numbers.groups()))
        return [f"{number:0{width}}" for number in span]
    parts = _COMMAS.split(inside)
    found = [each for part in parts for each in expand_braces(part)]
    return found if len(parts) > 1 else [f"{{{each}}}" for each in found]


def split_url(name: str) -> tuple[str, str]:
    """Split a URL or a path into a store's URL and a key.

    The key may be a glob.

    Example:
        >>> split_url("s3://bucket/train/0000.tar")
        ('s3://bucket', 'train/0000.tar')
    """
    scheme, is_url, rest = name.partition("://")
    if not is_url:
        check_path(name)
        scheme, rest = "file", str(Path(name).absolute()) + "/" * name.endswith("/")
    check_shared(f"{scheme}://{rest}")
    if scheme in ("http", "https") and "?" in rest:
        raise ValueError(
            "signed URLs cannot be shards: give store= with credentials instead"
        )
    traits = traits_of(f"{scheme}://{rest}")
    if traits.bucket:
        bucket, _, key = rest.partition("/")
        return f"{scheme}://{bucket}", key
    path = rest.find("/") + 1  # the brackets of an IPv6 host are no glob
    fixed = rest[: match.start()] if (match := _GLOB.search(rest, path)) else rest
    directory, _, _ = fixed.rpartition("/")
    key = rest[len(directory) + 1 :]
    if not is_url:
        return Path(directory or "/").as_uri(), key
    return f"{scheme}://{directory}", unquote(key) if traits.quoted else key


def _is_hidden(key: str) -> bool:
    """Whether a shard in a directory is a leftover.

    Editors, notebooks and failed jobs leave these files. Names of leftovers begin with a dot.
    Directories of leftovers begin with a dot or an underscore, as Spark's `_temporary`.
    """
    *directories, name = key.strip("/").split("/")
    return name.startswith(".") or any(
        part.startswith((".", "_")) for part in directories
    )


def glob_expression(pattern: str, *, hidden: bool = False) -> re.Pattern[str]:
    """Return a glob as a regular expression.

    ``*`` and ``?`` stay within a directory. ``**`` is any number of directories. Wildcards match a
    dot at the beginning of a name only if `hidden`, as in shells and Python's `glob`.
    """
    visible = "" if hidden else r"(?!\.)"
    sections = re.split(r"(?:^|(?<=/))\*\*(?:/|$)", pattern)
    if len(sections) > 1 and pattern.endswith("**"):
        sections[-1] = "*"
    first, *others = [
        "/".join(_name_expression(name, visible) for name in section.split("/"))
        for section in sections
    ]
    gap = f"(?:{visible}[^/]*/)*"
    # Between two gaps, a section matches at the first possible place. Other places are not tried.
    middle = "".join(f"(?>{gap}?{section})" for section in others[:-1])
    return re.compile(first + middle + "".join(gap + section for section in others[-1:]))


def _name_expression(name: str, visible: str) -> str:
    """Return a glob of a single name as a regular expression.

    In contrast to `fnmatch`, wildcards do not match slashes.
    """

    def within_name(part: re.Match[str]) -> str:
        text = part[0]
        return "[^/]" if text == "." else f"(?!/){text}" if text[0] == "[" else text

    expression = re.sub(
        r"\\.|\[\^?\]?[^\]]*\]|\.", within_name, fnmatch.translate(name)[4:-3]
    )
    return visible * name.startswith(("*", "?", "[")) + expression
