"""Ends what hangs, by a signal."""

import contextlib
import signal


class HangError(BaseException):
    """Too much time has passed. Not an Exception: code that catches errors of user code does not catch it."""


@contextlib.contextmanager
def ends_within(seconds):
    """Raise HangError in the block after so many seconds; in the main thread."""

    def interrupt(signum, frame):
        raise HangError(f"it has not ended within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
