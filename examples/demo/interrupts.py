"""Starting child processes that Ctrl-C does not reach."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["interrupts_held"]


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Block SIGINT in this thread, and with it in processes that are started in the block.

    A terminal sends Ctrl-C to every process of a command. The first process handles it; a child
    that is still importing would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker  # not available on Windows

    # its start, as a child of multiprocessing, would unblock SIGINT
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
