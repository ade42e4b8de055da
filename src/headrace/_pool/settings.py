"""Settings of Python and torch, copied from the trainer to workers."""

from __future__ import annotations

import logging
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle
import torch

from headrace._torchcompat.private import set_deterministic_algorithms


class Settings(NamedTuple):
    """Settings of a process, by name."""

    values: Mapping[str, Any]

    @classmethod
    def here(cls) -> Settings:
        return cls({name: setting.read() for name, setting in _SETTINGS.items()})

    def adopt(self) -> None:
        for name, value in self.values.items():
            setting = _SETTINGS[name]
            if setting.read() != value:
                setting.write(value)


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _warning_filters() -> list[tuple[str, bytes]]:
    """Return each filter as a pickle, with the module of the warning class."""
    found = []
    for each in warnings.filters:
        with suppress(Exception):  # user code: a class of warnings that cannot be pickled
            found.append((each[2].__module__, cloudpickle.dumps(each)))
    return found


def _set_warning_filters(filters: list[tuple[str, bytes]]) -> None:
    # Leave out filters with warning classes of modules not imported here.
    known = [
        cloudpickle.loads(pickled) for module, pickled in filters if module in sys.modules
    ]
    warnings.resetwarnings()
    warnings.filters[:] = known  # type: ignore[index]


def _loggers() -> dict[str, tuple[int, bool]]:
    """Return level and disabled flag of each logger, unless both are the default."""
    return {
        name: (logger.level, logger.disabled)
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and (logger.level or logger.disabled)
    }


def _set_loggers(loggers: dict[str, tuple[int, bool]]) -> None:
    for name, (level, disabled) in {
        **dict.fromkeys(_loggers(), (0, False)),
        **loggers,
    }.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.disabled = disabled


def _set_names_of_levels(names: dict[str, int]) -> None:
    for name, level in names.items():
        if logging.getLevelName(level) != name:
            logging.addLevelName(level, name)


_SETTINGS = {
    "recursion limit": _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "time-out of sockets": _Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "level of the root logger": _Setting(
        lambda: logging.root.level, logging.root.setLevel
    ),
    "loggers": _Setting(_loggers, _set_loggers),
    "disabled levels of logging": _Setting(
        lambda: logging.root.manager.disable, logging.disable
    ),
    "names of levels": _Setting(logging.getLevelNamesMapping, _set_names_of_levels),
    "capture of warnings": _Setting(
        lambda: logging._warnings_showwarning is not None,  # type: ignore[attr-defined]
        logging.captureWarnings,
    ),
    "warning filters": _Setting(_warning_filters, _set_warning_filters),
    "default dtype of torch": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "precision of torch's matrix products": _Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "deterministic algorithms of torch": _Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: set_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
}
