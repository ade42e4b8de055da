"""Opening the files of a dataset, of which some may be broken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from headrace._core.shards.discovery import map_shards
from headrace._core.text import warn_user
from headrace.errors import ObjectNotFoundError, ShardError

__all__ = ["OnOpeningError", "opened"]

S = TypeVar("S")
T = TypeVar("T")

OnOpeningError = Literal["raise", "skip"]


def opened(sources: Sequence[S], open_one: Callable[[S], Awaitable[T]], *, on_error: OnOpeningError) -> list[T]:
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
