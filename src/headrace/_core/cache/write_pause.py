"""The pause of writing after an error of the disk."""

from __future__ import annotations

import contextlib
import errno
import time
import warnings

WRITE_PAUSE = 30.0  # seconds without an attempt to write after the disk was found full or read-only
TRANSIENT_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ESTALE})


class WritePause:
    """Whether a cache writes at the moment."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._until = 0.0
        self._warned = False

    @property
    def active(self) -> bool:
        return bool(self._until) and time.monotonic() < self._until

    def on_error(self, error: OSError) -> None:
        """Pause writing, unless the error is transient, and warn once."""
        if error.errno in TRANSIENT_ERRNOS:
            return
        self._until = time.monotonic() + WRITE_PAUSE
        if not self._warned:
            self._warned = True
            with contextlib.suppress(Warning):  # a warnings filter "error" must not cost the sample
                warnings.warn(
                    f"the disk cache in {self._folder} cannot be written, so samples that it lacks are fetched and not "
                    f"cached: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
