"""A local object store for examples, tests and benchmarks: HTTP, in a process of its own, with faults to order."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import starmap
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self
from urllib.parse import quote

__all__ = ["Fault", "ObjectServer", "Seen"]

LENGTHS = struct.Struct("<QQ")  # of key and body; read by server.py
SERVER = Path(__file__).with_name("server.py")
CLOSE_TIMEOUT = 5.0

FaultKind = Literal[
    "status",
    "cut",
    "reset",
    "overwrite",
    "refuse",
    "silence",
    "trickle",
    "stall",
    "flip",
    "whole",
    "misplaced",
    "shorten",
    "page",
    "redirect",
    "hang up",
    "retag",
    "repeat",
    "throttle",
    "bandwidth",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the requests that meet it.

    ============
    ==============================================================================================
    kind          effect
    ============
    ==============================================================================================
    status        responds with `status`, `headers` and `body` cut           closes the connection
    after `at` bytes of a longer body reset         the same with a TCP reset
    overwrite     the same as cut, and replaces the object by `body`
    refuse        resets the connection before responding
    silence       never responds
    trickle       sends the body in ten pieces, `seconds` apart
    stall         waits `seconds`, then responds correctly
    flip          flips one bit of the body, at byte `at`
    whole         ignores `Range`: responds with 200 and the whole object
    misplaced     responds with a range that starts one byte too late
    shorten       omits the last byte of the body, with the headers of all of it
    page          responds with 200 and the HTML page `body` instead of the object
    redirect      responds with 302 and `body` as `Location`
    hang up       responds correctly, then closes the connection without notice
    retag         responds correctly with another entity tag, and ignores `If-Match`
    repeat        repeats the entries of each page of a listing
    throttle      responds with 503 above `rate` requests a second (a token bucket, `at` tokens
    deep) bandwidth     sends all bodies together at `rate` bytes a second ============
    ==============================================================================================

    Attributes:
        kind: the effect.
        key: pattern of keys, with ``*``; a listing's key is its prefix.
        method: ``"GET"`` or ``"HEAD"`` of an object, or ``"LIST"``.
        times: number of requests that meet it; None for all.
        per_key: whether `times` and `skip` count for each key.
        skip: number of matching requests that are answered correctly first.
        share: share of the matching requests that meet it, drawn at random with a fixed seed.
        unless: a header and its value; requests that have it are answered correctly.
        etag: whether the response has an entity tag.
    """

    kind: FaultKind
    key: str = "*"
    method: Literal["GET", "HEAD", "LIST"] = "GET"
    times: int | None = None
    per_key: bool = False
    skip: int = 0
    share: float = 1.0
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    at: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    etag: bool = True
    unless: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that an `ObjectServer` with faults received.

    Attributes:
        at: seconds of `time.monotonic`, which all processes of a machine share on Linux.
        method: ``"GET"``, ``"HEAD"``, ``"LIST"``, …
        key: key of the object, or prefix of the listing.
        span: its `Range` header, or ``""``.
        fault: kind of the fault it met, or ``""``.
    """

    at: float
    method: str
    key: str
    span: str
    fault: str


class _Process:
    """The process of a server: a fork of one that has imported aiohttp, which takes longer than most tests.

    Attributes:
        stdin: its standard input.
        stdout: its standard output.
        pid: its process id.
    """

    def __init__(self) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self.stdin, self.stdout = open(ours_in, "wb"), open(ours_out, "rb")  # noqa: SIM115  # closed by `close`
        try:
            socket.send_fds(_template(), [b"f"], [theirs_in, theirs_out])
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.pid = int(self.stdout.readline() or 0)
        self._ended = os.pidfd_open(self.pid) if self.pid else -1

    def close(self) -> None:
        """End it, and wait until it has ended."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self.stdin.close()
        self.stdout.close()
        if not self.pid:
            return
        for number in (
            signal.SIGTERM,
            signal.SIGKILL,
        ):  # a fork of this process may hold the pipe open
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, number)
            if select.select([self._ended], [], [], CLOSE_TIMEOUT)[0]:
                break
        os.close(self._ended)


_lock = threading.Lock()
_control: socket.socket | None = None  # of the process from which servers are forked


def _template() -> socket.socket:
    global _control
    with _lock:
        if _control is None:
            _control, theirs = socket.socketpair()
            with theirs:
                # -P keeps the folder of server.py off sys.path, where our module names could shadow
                # others.
                command = [sys.executable, "-P", str(SERVER), str(theirs.fileno())]
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            atexit.register(_end_template, process, os.getpid())
        return _control


def _end_template(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner and _control is not None:
        _control.close()
        process.wait()


class ObjectServer:
    """An S3-style object store on the loopback interface that holds `objects` in memory.

    It serves GET (with ranges), HEAD, PUT, DELETE and ListObjectsV2 under ``/bucket/key``,
    unsigned, in its own process, so that it does not run in the interpreter under test. The process
    ends at `close`, or when this process dies. Use it with `with`, or call `start` and `close`.

    Args:
        objects: initial objects, by key.
        bucket: name of the bucket.
        latency: seconds before the first byte of each GET of an object and of each page of a
            listing, at a resolution of a millisecond. May be changed later.

    Raises:
        ImportError: aiohttp is not installed.
        ValueError: `latency` is negative, or `bucket` is not a valid name.

    Example:
        >>> from headrace import ObjectDataset, Store
        >>> with ObjectServer({"train/a.bin": b"abc"}, latency=0.02) as server:
        ...     dataset = ObjectDataset(Store(server.url + "/train", options=server.store_options))
        ...     bytes(dataset[0].data), server.requests()["GET"]
        (b'abc', 1)
    """

    def __init__(
        self,
        objects: Mapping[str, bytes] | None = None,
        *,
        bucket: str = "bucket",
        latency: float = 0.0,
    ) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise ImportError("ObjectServer needs aiohttp: pip install aiohttp")
        if not bucket or bucket != quote(bucket, safe="") or bucket.startswith("_"):
            raise ValueError(
                f"bucket={bucket!r} is not a valid name: use letters, digits, dots and dashes"
            )
        self._objects: Mapping[str, bytes] | None = dict(objects or {})
        self._bucket = bucket
        self._latency = _seconds(latency)
        self._process: _Process | None = None
        self._port: int | None = None

    def start(self) -> Self:
        """Start the process and wait until it listens.

        Raises:
            RuntimeError: it was started before, or the process failed to start.
        """
        if self._objects is None:
            raise RuntimeError("this ObjectServer was started before; make another one")
        objects, self._objects = self._objects, None
        self._process = _Process()
        try:
            self._send(self._process.stdin, objects)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:  # Ctrl-C too: the server's process would stay
            self.close()
            raise
        if not line:
            self.close()
            raise RuntimeError("the object server failed to start; see its stderr")
        self._port = int(line)
        return self

    def close(self) -> None:
        """End the process and reap it. Idempotent."""
        process, self._process, self._port = self._process, None, None
        if process is None:
            return
        process.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "not running" if self._port is None else self.http_url
        return f"{type(self).__name__}({state})"

    @property
    def url(self) -> str:
        """URL of the bucket, e.g. ``s3://bucket``; needs `store_options`."""
        return f"s3://{self._bucket}"

    @property
    def endpoint(self) -> str:
        """URL of the server, e.g. ``http://127.0.0.1:40123``."""
        return f"http://127.0.0.1:{self._running_port()}"

    @property
    def http_url(self) -> str:
        """URL of the bucket over plain HTTP; an object is ``{http_url}/{key}``."""
        return f"{self.endpoint}/{self._bucket}"

    @property
    def store_options(self) -> dict[str, object]:
        """Options with which a `headrace.Store`, or `obstore.store.from_url`, reaches `url` at this server."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "skip_signature": True,
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    @property
    def latency(self) -> float:
        """Seconds before the first byte of a GET or a listing; may be set while the server runs."""
        return self._latency

    @latency.setter
    def latency(self, seconds: float) -> None:
        self._latency = _seconds(seconds)
        if self._port is not None:
            self._call("PUT", "/_latency", str(self._latency).encode())

    @property
    def max_concurrent(self) -> int:
        """Maximum number of GETs and listing pages in their `latency` at the same time."""
        return int(json.loads(self._call("GET", "/_stats"))["max_concurrent"])

    def requests(self) -> dict[str, int]:
        """Numbers of ``GET``, ``HEAD``, ``LIST``, ``PUT`` and ``DELETE`` requests since the start."""
        counts = json.loads(self._call("GET", "/_stats"))["requests"]
        return {
            kind: counts.get(kind, 0) for kind in ("GET", "HEAD", "LIST", "PUT", "DELETE")
        }

    def put(self, key: str, data: bytes) -> None:
        """Store or replace an object."""
        self._call("PUT", f"/{self._bucket}/{quote(key)}", data)

    def delete(self, key: str) -> None:
        """Delete an object; like S3, no error if it does not exist."""
        self._call("DELETE", f"/{self._bucket}/{quote(key)}")

    def misbehave(self, *faults: Fault) -> None:
        """Replace the faults; without arguments, inject none.

        A request meets the first fault that matches it. Requests since this call are recorded for
        `seen`."""
        self._call(
            "PUT", "/_faults", json.dumps([asdict(fault) for fault in faults]).encode()
        )

    def seen(self, method: str = "GET") -> list[Seen]:
        """Requests of one method since the last `misbehave`, oldest first."""
        return [
            seen
            for seen in starmap(Seen, json.loads(self._call("GET", "/_seen")))
            if seen.method == method
        ]

    def restart(self, down: float) -> None:
        """Close all connections, refuse new ones for `down` seconds, then listen on the same port. Does not block."""
        self._call("PUT", "/_restart", str(down).encode())

    def _send(self, sink: IO[bytes], objects: Mapping[str, bytes]) -> None:
        settings = {
            "bucket": self._bucket,
            "latency": self._latency,
            "objects": len(objects),
        }
        sink.write(json.dumps(settings).encode() + b"\n")
        for key, data in objects.items():
            name = key.encode()
            sink.write(LENGTHS.pack(len(name), len(data)))
            sink.write(name)
            sink.write(data)
        sink.flush()

    def _running_port(self) -> int:
        if self._port is None:
            raise RuntimeError(
                "this ObjectServer is not running: use it in a `with` block, or call start()"
            )
        return self._port

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._running_port())
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise RuntimeError(
                f"the object server gave {answer.status} for {method} {path}: {content.decode()}"
            )
        return content


def _seconds(latency: float) -> float:
    if not latency >= 0:
        raise ValueError(f"latency={latency!r} must be zero or more seconds")
    return float(latency)
