"""User code in the sampled stack of a loop's thread: its line, the call that it makes, and what to use instead."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sysconfig
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_HEADRACE = os.path.join(str(Path(__file__).parents[2]), "")
_LOOP_FRAMES = tuple(  # the functions of ours that run a loop: the bottom of the stacks that are looked at
    os.path.join(_HEADRACE, "_core", *path) for path in (("eventloop", "loop_thread.py"), ("runtime", "sidecar.py"))
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_IN_WORKERS = (
    "do CPU work in transform= (or dataset.map) with num_workers=, or by await anyio.to_thread.run_sync(function) if "
    "it releases the GIL"
)
_IN_A_THREAD = "use an async client, or await anyio.to_thread.run_sync(function)"
_HTTP = "use an async client: httpx.AsyncClient, aiohttp, or obstore for objects of a store"
_BUCKETS = "use headrace.ObjectDataset, obstore (await obstore.get_async(...)) or aiobotocore"
_FILES = "use headrace.FileDataset, await anyio.Path(path).read_bytes(), or await anyio.to_thread.run_sync(function)"
_POSTGRES = "use asyncpg or psycopg.AsyncConnection"
_MYSQL = "use asyncmy or aiomysql"
_THREADS = "use asyncio's Event, Lock and Queue, or await asyncio.wrap_future(future)"
# By the beginning of the module's name; the outermost call of user code that is listed counts.
_INSTEAD = {
    "time.sleep": "use await anyio.sleep(seconds)",
    **dict.fromkeys(("requests", "urllib3", "urllib.request", "http.client", "httpx"), _HTTP),
    **dict.fromkeys(("boto3", "botocore", "s3transfer", "google.cloud", "azure"), _BUCKETS),
    **dict.fromkeys(("subprocess", "posix.system", "os.system", "os.popen"), "use await anyio.run_process(command)"),
    **dict.fromkeys(("sqlite3", "_sqlite3"), "use aiosqlite, or await anyio.to_thread.run_sync(function)"),
    **dict.fromkeys(("psycopg2", "psycopg"), _POSTGRES),
    **dict.fromkeys(("pymysql", "MySQLdb", "mysql"), _MYSQL),
    "redis": "use redis.asyncio",
    "pymongo": "use pymongo.AsyncMongoClient",
    **dict.fromkeys(("_io", "io", "pathlib", "posix.read", "os.read", "mmap"), _FILES),
    **dict.fromkeys(("socket", "_socket", "ssl", "_ssl"), "use await anyio.connect_tcp(host, port)"),
    **dict.fromkeys(("threading", "_thread", "queue", "_queue", "concurrent.futures", "_asyncio"), _THREADS),
}


class Place(NamedTuple):
    """A line of user code. Equal places are one."""

    file: str
    line: int
    function: str
    first_line: int
    """That of the function."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Spot(NamedTuple):
    """User code on a sampled stack.

    Attributes:
        place: the innermost line.
        step: the outermost frame: between two steps of the loop the same frame is the same coroutine or callback.
        frame: the innermost frame.
        position: of the innermost frame's instruction.
        callees: module and name of the functions, of other code, that it has called; the outermost first.
    """

    place: Place
    step: types.FrameType
    frame: types.FrameType
    position: int
    callees: tuple[tuple[str, str], ...]


def find_user_code(top: types.FrameType) -> Spot | None:
    """The user code of a stack; None if there is none, or if no loop of ours runs at its bottom."""
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = top
    while frame is not None and frame.f_code.co_filename not in _LOOP_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    if frame is None:
        return None
    users = [index for index, each in enumerate(frames) if _kind(each.f_code.co_filename) == "user"]
    if not users:  # a dataset of an installed package
        installed = [index for index, each in enumerate(frames) if _kind(each.f_code.co_filename) == "installed"]
        users = installed[-1:]
    if not users:
        return None
    inner, step = frames[users[0]], frames[users[-1]]
    code, position = inner.f_code, inner.f_lasti
    place = Place(code.co_filename, inner.f_lineno or code.co_firstlineno, code.co_qualname, code.co_firstlineno)
    callees = tuple((str(each.f_globals.get("__name__")), each.f_code.co_qualname) for each in frames[: users[0]])
    return Spot(place, step, inner, position, callees[::-1])


@functools.cache
def _standard_library() -> frozenset[str]:
    return frozenset(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> str:
    if any(part in file for part in _INSTALLED) and not file.startswith(_HEADRACE):
        return "loop" if "/anyio/" in file or "/uvloop/" in file else "installed"
    if file.startswith((_HEADRACE, "<frozen ", *_standard_library())):
        return "ours"
    return "user"


def describe_call(spot: Spot) -> tuple[str | None, str | None]:
    """The name of the call that the line makes, and the advice for it; None where they are unknown."""
    if spot.callees:
        names: Sequence[str] = [f"{module}.{name}" for module, name in spot.callees]
    else:
        name = _native_call(spot)
        names = [] if name is None else [name]
    advice = next((text for name in names if (text := _advice(name)) is not None), None)
    return (names[0].removeprefix("builtins.") if names else None), advice


def advice_for(advice: str | None, *, computes: bool) -> str:
    """What to do: `advice` if there is some, else by whether the thread computed or waited."""
    if advice is not None:
        return advice
    return _IN_WORKERS if computes else _IN_A_THREAD


def _advice(name: str) -> str | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((_INSTEAD[prefix] for prefix in prefixes if prefix in _INSTEAD), None)


def _native_call(spot: Spot) -> str | None:
    """The function of C code that the frame calls: it has no frame of its own, so its name is in the source."""
    code = spot.frame.f_code
    position = next((each for index, each in enumerate(code.co_positions()) if 2 * index == spot.position), None)
    if position is None:
        return None
    line, end_line, begin, end = position
    if line is None or line != end_line:
        return None
    try:
        source = linecache.getline(code.co_filename, line).encode()[begin:end].decode()
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since, or this is a part of an expression
        return None
    if not isinstance(tree, ast.Call):
        return None
    names = list(_dotted(tree.func))[::-1]
    if not names or not isinstance(tree.func, ast.Name | ast.Attribute):
        return None
    return _qualified(spot.frame, names)


def _dotted(node: ast.expr) -> Iterator[str]:
    """The names of an attribute access, the last first; empty strings for what is not a name."""
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    yield node.id if isinstance(node, ast.Name) else ""


_MISSING = object()


def _qualified(frame: types.FrameType, names: Sequence[str]) -> str:
    """The full name of the function that `names` mean in a frame, looked up without running code."""
    written = ".".join(names).lstrip(".")
    found: object = _MISSING
    for scope in (frame.f_locals, frame.f_globals, frame.f_builtins):
        if names[0] in scope:
            found = scope[names[0]]
            break
    for number, name in enumerate(names[1:], 2):
        if found is _MISSING:
            return written
        last = number == len(names)
        if last and not isinstance(found, types.ModuleType | type):
            return f"{type(found).__module__}.{type(found).__qualname__}.{name}"
        found = inspect.getattr_static(found, name, _MISSING)
    module, qualified = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    return f"{module}.{qualified}" if isinstance(module, str) and isinstance(qualified, str) else written
