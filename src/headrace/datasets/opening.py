"""Opening the files of a dataset, of which some may be broken; and opening without a request."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from headrace._core.eventloop.loop_thread import carried
from headrace._core.ranks.rankinfo import bound
from headrace._core.shards.discovery import map_shards, shard_errors
from headrace._core.shards.index_file import content_digest
from headrace._core.shards.indexing import place_of
from headrace._core.store.answers import Answers
from headrace._core.streams.blocking import background_loop
from headrace._core.text import warn_user
from headrace.errors import ObjectNotFoundError, ShardError

__all__ = ["OnOpeningError", "open_cached", "opened"]

S = TypeVar("S")
T = TypeVar("T")

OnOpeningError = Literal["raise", "skip"]
_DIGEST = 32  # bytes of the hash


def opened(
    sources: Sequence[S], open_one: Callable[[S], Awaitable[T]], *, on_error: OnOpeningError
) -> list[T]:
    """Open the files of a dataset at the same time, and return them in order.

    With ``on_error="skip"``, broken and missing files are left out, and one warning counts them.
    A request that fails is an error always: another rank might read that file, and the ranks would
    then have different datasets.

    Args:
        sources: the files, or what `open_one` needs of each.
        open_one: opens one file; async.
        on_error: ``"raise"`` or ``"skip"``.

    Raises:
        ShardError: a file is broken, with ``"raise"``; with ``"skip"``, every file is.
        StoreError: a request failed.
        ValueError: `on_error` is neither.
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
    """Open a dataset by answers of its stores that are kept in a file.

    To open a dataset, its shards are listed, and their headers and indices are read: some requests
    for each shard, on each rank and at each start. The first call keeps the answers in the file.
    Later calls make no request but for the file.

    Each answer has the version of its object. A shard that was replaced since is an
    `ObjectChangedError` when the shard is read. New shards are not noticed: delete the file, so
    that the next call makes the file again. Requests of other libraries (Lance, the listing of
    `headrace.hub`) are made each time.

    Args:
        path: path or URL of the file. Ranks that start at the same time may all write the file.
        make: opens the dataset, with whatever arguments; called at each start.

    Returns:
        What `make` returns.

    Raises:
        ShardError: the file is damaged, or no such file.
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
    if answers.new:
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
