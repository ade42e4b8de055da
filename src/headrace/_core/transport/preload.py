"""Modules that pickled functions need: found in the pickle, and imported before it is unpickled."""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import cloudpickle

# A short string and the opcode that remembers it: how a pickle names a module, in STACK_GLOBAL, in
# the arguments of cloudpickle's `subimport`, and in the code of a function that is pickled by value
# and imports a module when called.
_NAME = re.compile(rb"\x8c[\x01-\xff]([A-Za-z_][A-Za-z0-9_.]*)\x94")
# Modules that the zygote has imported already, or whose import is cheap.
_LIGHT = frozenset(
    {"__main__", "__mp_main__", "headrace", "torch", "numpy", "cloudpickle", "obstore"}
)


def modules_named_in(pickled: bytes | memoryview) -> tuple[str, ...]:
    """The modules of this process that a pickle names, in the order of their import; without the standard library's."""
    names = {name.decode() for name in set(_NAME.findall(pickled))} & sys.modules.keys()
    return tuple(name for name in list(sys.modules) if name in names and _is_worthwhile(name))


def _is_worthwhile(name: str) -> bool:
    package = name.partition(".")[0]
    if package in _LIGHT or package in sys.stdlib_module_names:
        return False
    by_value = cloudpickle.list_registry_pickle_by_value()
    return getattr(sys.modules[name], "__spec__", None) is not None and not any(
        f"{name}.".startswith(f"{registered}.") for registered in by_value
    )


def import_modules(names: Iterable[str]) -> None:
    """Import modules; errors are ignored here and raised by the unpickling, which names the user of the module."""
    for name in names:
        with suppress(BaseException):  # user code, SystemExit included
            importlib.import_module(name)


def program_sources() -> frozenset[tuple[str, int, int]]:
    """The source files of the program's own modules, each with its time of modification and size.

    They may be edited and reloaded while the program runs (in a notebook, for example).
    """
    paths = sysconfig.get_paths()
    installed = tuple(
        os.path.join(paths[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(file, str) and os.path.isabs(file) and not file.startswith(installed):
            with suppress(OSError):  # in an archive, for example
                status = os.stat(file)
                found.add((file, status.st_mtime_ns, status.st_size))
    return frozenset(found)


def has_threads() -> bool:
    """Whether this process has threads that a fork of it would miss.

    It is forked to find out: a library that survives forks ends its threads then (OpenBLAS does,
    which starts some as NumPy and SciPy are imported), or restarts them in the child (jemalloc
    does, which comes with Arrow).
    """
    with warnings.catch_warnings():
        # Python 3.12 counts threads before the fork
        warnings.simplefilter("ignore", DeprecationWarning)
        if (pid := os.fork()) == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            names.append(file.read_text().strip())
    return max(threading.active_count(), len(names) - names.count("jemalloc_bg_thd")) > 1
