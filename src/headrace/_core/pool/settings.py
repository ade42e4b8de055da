"""Settings of the training process, applied in workers and in the loader's process as if these were forked."""

from __future__ import annotations

import logging
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from headrace._core.torchcompat.private import set_deterministic_algorithms
from headrace._core.transport.preload import modules_named_in


class Settings(NamedTuple):
    """A process's settings: each by itself, since its value may be an object of a user's class, which needs modules."""

    pickled: Mapping[str, bytes]

    @classmethod
    def here(cls) -> Settings:
        """The current settings of this process; one that cannot be pickled is left out with a warning."""
        pickled = {}
        for name, (read, _) in _SETTINGS.items():
            try:
                pickled[name] = cloudpickle.dumps(read())
            except Exception as error:  # user code: a class of warnings, or a plug-in's function
                warnings.warn(f"workers do not get the {name} of this process: {error}", RuntimeWarning, stacklevel=2)
        return cls(pickled)

    def adopt(self) -> None:
        for name, (read, write) in _SETTINGS.items():
            if name in self.pickled:
                value = cloudpickle.loads(self.pickled[name])
                if read() != value:
                    write(value)

    @property
    def modules(self) -> tuple[str, ...]:
        return modules_named_in(self.pickled.get(_FLAGS_OF_PILLOW, b""))


def _warning_filters() -> list[tuple[str, bytes]]:
    return [(filtered[2].__module__, cloudpickle.dumps(filtered)) for filtered in warnings.filters]


def _set_warning_filters(filters: list[tuple[str, bytes]]) -> None:
    # Filters with warning classes of modules that are not imported here are not carried over.
    known = [cloudpickle.loads(pickled) for module, pickled in filters if module in sys.modules]
    warnings.resetwarnings()
    warnings.filters[:] = known  # type: ignore[index]


def _logging() -> tuple[Any, ...]:
    """The levels, disabled loggers, what `disable` and `captureWarnings` were given, and the names of levels."""
    loggers = {
        name: (logger.level, logger.disabled)
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and (logger.level or logger.disabled)
    }
    captures = logging._warnings_showwarning is not None  # type: ignore[attr-defined]
    return logging.root.level, loggers, logging.root.manager.disable, logging.getLevelNamesMapping(), captures


def _set_logging(value: tuple[Any, ...]) -> None:
    root, loggers, disabled_below, names, captures = value
    logging.root.setLevel(root)
    for name, (level, disabled) in {**dict.fromkeys(_logging()[1], (0, False)), **loggers}.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.disabled = disabled
    logging.disable(disabled_below)
    for name, level in names.items():
        if logging.getLevelName(level) != name:
            logging.addLevelName(level, name)
    logging.captureWarnings(captures)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_FLAGS_OF_PILLOW = "flags of Pillow"
# Flags of modules that may not be imported, with their defaults.
_FLAGS: dict[tuple[str, str], object] = {
    ("PIL.Image", "MAX_IMAGE_PIXELS"): 1024**3 // 4 // 3,
    ("PIL.Image", "WARN_POSSIBLE_FORMATS"): False,
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"): False,
    ("PIL.ImageFile", "MAXBLOCK"): 64 * 1024,
    ("PIL.PngImagePlugin", "MAX_TEXT_CHUNK"): 1024**2,
    ("PIL.PngImagePlugin", "MAX_TEXT_MEMORY"): 64 * 1024**2,
}


def _flags() -> dict[tuple[str, str], object]:
    now = {flag: getattr(sys.modules.get(flag[0]), flag[1], usual) for flag, usual in _FLAGS.items()}
    return {flag: value for flag, value in now.items() if value != _FLAGS[flag]}


def _set_flags(flags: dict[tuple[str, str], object]) -> None:
    for (module, flag), value in flags.items():
        setattr(sys.modules[module], flag, value)


# The settings: a function that reads each, and one that sets it if it differs.
_SETTINGS: dict[str, tuple[Callable[[], object], Callable[[Any], object]]] = {
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "time-out of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "logging configuration": (_logging, _set_logging),
    "warning filters": (_warning_filters, _set_warning_filters),
    "default dtype of torch": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of torch's matrix products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms of torch": (
        _deterministic,
        lambda value: set_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "floating-point errors of NumPy": (np.geterr, lambda value: np.seterr(**value)),
    "print options of NumPy": (np.get_printoptions, lambda value: np.set_printoptions(**value)),
    _FLAGS_OF_PILLOW: (_flags, _set_flags),
}
