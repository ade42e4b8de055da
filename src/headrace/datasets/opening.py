"""Opening of the files of a dataset."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from headrace._base.text import warn_user
from headrace._shards.discovery import map_shards
from headrace.errors import ObjectNotFoundError, ShardError

__all__ = ["OnOpeningError", "opened"]

S = TypeVar("S")
T = TypeVar("T")

OnOpeningError = Literal["raise", "skip"]


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
