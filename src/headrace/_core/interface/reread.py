"""Samples that are read again after a restore, and dropped; the warning before it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from headrace._core.call_site import users_stacklevel
from headrace.errors import StateError


class Reread:
    """The samples and errors that are read again after a restore, and dropped.

    Args:
        count: their number.
        errors: how many of them were errors; others would be new ones.

    Attributes:
        left: how many are not read yet.
    """

    def __init__(self, count: int = 0, errors: int = 0) -> None:
        self.left = count
        self._count = count
        self._errors = errors
        self._failed: StateError | None = None

    async def drop(self, read: Callable[[], Awaitable[object]], stream: str) -> None:
        """Read all of them.

        Args:
            read: reads one.
            stream: the name of the stream, for errors.

        Raises:
            StateError: the stream is shorter now, or a sample cannot be read again; also by each later call.
        """
        while self.left:
            await self.drop_one(read, stream)

    async def drop_one(self, read: Callable[[], Awaitable[object]], stream: str) -> None:
        """Read one of them; as `drop`."""
        if self._failed is not None:
            raise self._failed
        try:
            await read()
        except StopAsyncIteration:
            self.fail(self._count - self.left, stream)
        except StateError:
            raise
        except Exception as error:  # it was raised before the state was saved
            self.error(error)
        else:
            self.sample()

    def sample(self) -> None:
        """Count a sample that was read again."""
        self.left = max(0, self.left - 1)

    def error(self, error: Exception) -> None:
        """Count an error.

        Raises:
            StateError: there was a sample in its place.
        """
        if not self._errors:
            self._failed = StateError(
                f"a sample that was read before the state was saved cannot be read again, so the samples after it are "
                f"unknown: {type(error).__name__}: {error}. Restore the state once more"
            )
            raise self._failed from error
        self._errors -= 1
        self.left -= 1

    def fail(self, read: int, stream: str) -> None:
        """Raise `StateError` for a stream that ended too early."""
        self._failed = StateError(
            f"{stream} ended after {read} samples, but {self._count} had been read when the state was saved: it is not "
            f"the same stream, or not in the same order"
        )
        raise self._failed


def warn_of_rereading(state: object) -> None:
    """Warn of each stream without a state of its own that will be read again from its start.

    Called in the consumer's process, since warnings of other processes do not get there.

    Args:
        state: a state, or several in dicts and lists, that streams will be restored from.
    """
    samples: Counter[str] = Counter()
    _count_read_again(state, samples)
    for name, read in samples.items():
        warnings.warn(
            f"{name} has no state_dict: to continue after {read} samples, it is read again from its start, and "
            f"those samples are dropped; they must be the same, in the same order. Give {name}, or the iterator that "
            f"it returns, state_dict() and load_state_dict(state).",
            UserWarning,
            stacklevel=users_stacklevel(),
        )


def _count_read_again(state: object, samples: Counter[str]) -> None:
    if isinstance(state, Mapping):
        name, read = state.get("read_again"), state.get("given", state.get("read"))
        if isinstance(name, str) and isinstance(read, int):
            samples[name] += read
        elif not ("dataset" in state or "iterator" in state or state.get("ended") is True):
            _count_read_again([*state.values()], samples)
    elif isinstance(state, list):
        for part in state:
            _count_read_again(part, samples)
