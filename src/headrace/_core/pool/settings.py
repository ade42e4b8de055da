"""Settings of Python and torch, copied from the trainer to workers."""

from __future__ import annotations

import logging
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cloudpickle
import torch

from headrace._core.torchcompat.private import set_deterministic_algorithms


class Settings(NamedTuple):
    """Pickled settings of a process, by name.

    Each setting is pickled separately. A value may be an object of a user's class, and unpickling
    then imports the user's modules.
    """

    pickled: Mapping[str, bytes]

    @classmethod
    def here(cls) -> Settings:
        """Return the current settings of this process.

        If a setting cannot be pickled, a warning says so, and the setting is left out.
        """
        pickled = {}
        for name, (read, _) in _SETTINGS.items():
            try:
                pickled[name] = cloudpickle.dumps(read())
            except Exception as error:  # user code: a class of warnings, or a function of a plug-in
                warnings.warn(
                    f"workers do not get the {name} of this process: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return cls(pickled)

    def adopt(self) -> None:
        for name, (read, write) in _SETTINGS.items():
            if name in self.pickled:
                value = cloudpickle.loads(self.pickled[name])
                if read() != value:
                    write(value)


def _warning_filters() -> list[tuple[str, bytes]]:
    return [(filtered[2].__module__, cloudpickle.dumps(filtered)) for filtered in warnings.filters]


def _set_warning_filters(filters: list[tuple[str, bytes]]) -> None:
    # Leave out filters with warning classes of modules not imported here.
    known = [cloudpickle.loads(pickled) for module, pickled in filters if module in sys.modules]
    warnings.resetwarnings()
    warnings.filters[:] = known  # type: ignore[index]


def _logging() -> tuple[Any, ...]:
    """Return the logging configuration.

    The items are: the level of the root logger, levels and disabled flags of other loggers, the
    argument of `logging.disable`, the names of levels, and whether warnings are captured.
    """
    loggers = {
        name: (logger.level, logger.disabled)
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and (logger.level or logger.disabled)
    }
    captures = logging._warnings_showwarning is not None  # type: ignore[attr-defined]
    return (
        logging.root.level,
        loggers,
        logging.root.manager.disable,
        logging.getLevelNamesMapping(),
        captures,
    )


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
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


# For each setting: the reading function and the writing function.
_SETTINGS: dict[str, tuple[Callable[[], object], Callable[[Any], object]]] = {
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "time-out of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "logging configuration": (_logging, _set_logging),
    "warning filters": (_warning_filters, _set_warning_filters),
    "default dtype of torch": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of torch's matrix products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic algorithms of torch": (
        _deterministic,
        lambda value: set_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
}
