"""Detection of a fork of a process that had used an object store.

obstore's I/O runs on threads of a native runtime. A fork has none of them, and even a new store in it waits for them
for ever; so the child raises an error where it would hang.
"""

from __future__ import annotations

import os

from headrace.errors import ForkedError

forked_from: int | None = None
"""The ancestor that used a store before it forked; None if there is none."""

_used_in: int | None = None


def note_store_io() -> None:
    """Record that this process uses an object store; raise `ForkedError` if it cannot."""
    global _used_in
    check_forked()
    _used_in = os.getpid()


def check_forked() -> None:
    """Raise `ForkedError` if an ancestor used a store before it forked this process."""
    if forked_from is not None:
        raise ForkedError("obstore, which reads object stores,", made_in=forked_from, used_in=os.getpid())


def _after_fork_in_child() -> None:
    global forked_from
    if forked_from is None:
        forked_from = _used_in


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
