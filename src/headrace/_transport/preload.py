"""Modules of pickled functions, imported before unpickling.

The names of the modules are found in the pickle.
"""

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

# A short string, followed by the opcode MEMOIZE. Pickles name modules in this form: before the
# opcode STACK_GLOBAL, in the arguments of cloudpickle's `subimport`, and in the code of a function
# with an import inside, if the function is pickled by value.
_NAME = re.compile(rb"\x8c[\x01-\xff]([A-Za-z_][A-Za-z0-9_.]*)\x94")
# Modules imported by the zygote already, or with a cheap import.
_LIGHT = frozenset(
    {"__main__", "__mp_main__", "headrace", "torch", "numpy", "cloudpickle", "obstore"}
)


def modules_named_in(pickled: bytes | memoryview) -> tuple[str, ...]:
    """Return the modules of this process that a pickle names.

    The modules are in the order of import, without the standard library.
    """
    names = {name.decode() for name in set(_NAME.findall(pickled))} & sys.modules.keys()
    return tuple(
        name for name in list(sys.modules) if name in names and _is_worthwhile(name)
    )


def _is_worthwhile(name: str) -> bool:
    package = name.partition(".")[0]
    if package in _LIGHT or package in sys.stdlib_module_names:
        return False
    by_value = cloudpickle.list_registry_pickle_by_value()
    return getattr(sys.modules[name], "__spec__", None) is not None and not any(
        f"{name}.".startswith(f"{registered}.") for registered in by_value
    )


def import_modules(names: Iterable[str]) -> None:
    """Import modules, and ignore errors.

    Unpickling raises the same errors again, and names the user of the module.
    """
    for name in names:
        with suppress(BaseException):  # user code, SystemExit included
            importlib.import_module(name)


def program_sources() -> frozenset[tuple[str, int, int]]:
    """Return the source files of the program's own modules.

    Each file has the modification time in nanoseconds and the size in bytes. The files may be
    edited and reloaded while the program runs (in a notebook, for example).
    """
    paths = sysconfig.get_paths()
    installed = tuple(
        os.path.join(paths[name], "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if (
            isinstance(file, str)
            and os.path.isabs(file)
            and not file.startswith(installed)
        ):
            with suppress(OSError):  # a file in an archive, for example
                status = os.stat(file)
                found.add((file, status.st_mtime_ns, status.st_size))
    return frozenset(found)


def has_threads() -> bool:
    """Whether a fork of this process would miss threads.

    The function forks this process to find out. A library with support for forks then ends threads
    (OpenBLAS, with threads since the import of NumPy and SciPy), or restarts threads in the child
    (jemalloc, a part of Arrow). With threads of Python there is no fork: the child would destroy
    the thread-local objects of the threads, and a destructor may wait for ever.
    """
    if threading.active_count() > 1:
        return True
    with warnings.catch_warnings():
        # Python 3.12 counts threads before the fork, and warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        if (pid := os.fork()) == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            names.append(file.read_text().strip())
    return len(names) - names.count("jemalloc_bg_thd") > 1
