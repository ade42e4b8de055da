"""Opening of the files of a dataset."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from headrace._base.text import warn_user
from headrace._eventloop.loop_thread import carried
from headrace._ranks.rankinfo import bound
from headrace._shards.discovery import map_shards, shard_errors
from headrace._shards.index_file import content_digest
from headrace._shards.indexing import place_of
from headrace._store.answers import Answers
from headrace._streams.blocking import background_loop
from headrace.errors import ObjectNotFoundError, ShardError

__all__ = ["OnOpeningError", "open_cached", "opened"]

S = TypeVar("S")
T = TypeVar("T")

OnOpeningError = Literal["raise", "skip"]
_DIGEST = 32  # bytes of the hash


def opened(
    sources: Sequence[S], open_one: Callable[[S], Awaitable[T]], *, on_error: OnOpeningError
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

    async def attempt(source: S) -> T | ShardError | ObjectNotFoundError:
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
        warn_user(f"{many} cannot be opened and are left out; the first error: {errors[0]}")
    return [each for each in results if not isinstance(each, Exception)]


def open_cached(path: str | os.PathLike[str], make: Callable[[], T]) -> T:
    """Open a dataset with responses kept in a file.

    To open a dataset, the shards are listed, and their headers and indices are read. This takes
    some requests for each shard, on each rank and at each start. The first call keeps the responses
    in the file. Later calls request only the file.

    Each response has the version of the object. Reading a shard that was replaced since then raises
    `ObjectChangedError`. New shards are not noticed: delete the file, and the next call makes a new
    file. The requests of `headrace.hub` are made each time.

    Args:
        path: path or URL of the file. Ranks starting at the same time may all write the file.
        make: function to open the dataset, with any arguments. Called at each start.

    Returns:
        The result of `make`.

    Raises:
        ShardError: the file is damaged, or is not a file of `open_cached`.
        StoreError: a request failed.

    Example:
        >>> table = "s3://bucket/table"
        >>> rows = open_cached("table.opened", lambda: ParquetDataset(table))  # doctest: +SKIP
    """
    place, loop = place_of(path, None), background_loop()
    try:
        data = loop.run(place.store.read_all(place.key))
    except ObjectNotFoundError:
        answers = Answers({}, memoryview(b""))
    else:
        with shard_errors(
            "no file of headrace.open_cached, or a damaged one; delete it", place.name
        ):
            answers = _parsed(data)
    with bound(carried, answers):
        made = make()
    if answers.changed:
        known, content = answers.dump()
        header = json.dumps(known, separators=(",", ":")).encode()
        whole = b"".join([len(header).to_bytes(8, "little"), header, content])
        loop.run(place.store.put(place.key, content_digest(whole) + whole))
    return made


def _parsed(data: memoryview) -> Answers:
    if content_digest(data[_DIGEST:]) != data[:_DIGEST]:
        raise ValueError("its hash is not that of its content")
    begin = _DIGEST + 8
    end = begin + int.from_bytes(data[_DIGEST:begin], "little")
    return Answers(json.loads(bytes(data[begin:end])), data[end:])
