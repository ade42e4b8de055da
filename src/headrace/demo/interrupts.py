"""Starting child processes that Ctrl-C does not reach."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["interrupts_held"]


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C for this thread; processes that are started within never see it.

    A terminal sends Ctrl-C to every process of the command. It is for the first of them to answer; a Python that is
    still importing would end with a traceback across the screen.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker  # not there on Windows

    resource_tracker.ensure_running()  # a child of multiprocessing's own, whose start lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
