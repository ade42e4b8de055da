"""`headrace top`: the reports of running jobs, once or again and again, until Ctrl-C or the end of the jobs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from headrace._core.terminal import columns, is_colored
from headrace.cli.processes import command_of, environment_of, has_ended, jobs_of, jobs_of_user, why_silent
from headrace.cli.top_view import Line, overview, view
from headrace.telemetry.live_socket import (
    PROTOCOL,
    is_supported,
    listen,
    peer_of,
    remove_stale,
    runtime_folder,
)

__all__ = ["PATIENCE", "Feed", "watch_jobs"]

PATIENCE = 5.0  # seconds for a job's first answer; it looks once a second
LONGEST_LINE = 16 << 20  # bytes
ANSI = {"bold": "\033[1m", "yellow": "\033[33m", "": ""}


def watch_jobs(pids: Sequence[int], *, interval: float, once: bool, as_json: bool, stream: TextIO | None = None) -> int:
    """Print what jobs send.

    Args:
        pids: processes, or launchers of some; none for an overview of this user's jobs.
        interval: seconds from one output to the next.
        once: whether to end after the first.
        as_json: for programs: a line with a JSON object for each job, as the job sent it.
        stream: where to; by default standard output.

    Returns:
        The number of processes that did not answer.

    Raises:
        ValueError: a process runs no loader.
        OSError: there is no such process, or it is another user's; or a socket cannot be made.
    """
    stream = stream or sys.stdout
    if not is_supported():
        raise ValueError(
            "`headrace top` needs Unix sockets, which this system lacks: print(loader.report()) in the job"
        )
    jobs = [job for pid in pids for job in jobs_of(pid)] if pids else jobs_of_user()
    if not jobs:
        raise ValueError("no process of this user runs a loader")
    with contextlib.ExitStack() as stack:
        feeds = [stack.enter_context(contextlib.closing(Feed(pid))) for pid in dict.fromkeys(jobs)]
        show = _json_output(stream) if as_json else _output(stream, summary=not pids, stack=stack, live=not once)
        remarks: list[str] = []
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
            remarks = _run(feeds, show, interval=interval, once=once)
    for remark in remarks:  # on the terminal as it was before
        print(f"headrace: {remark}", file=sys.stderr)
    return sum(not feed.answered for feed in feeds)


class Feed:
    """What one job sends; owns its sockets.

    Raises:
        OSError: none of the folders that the job may look in can hold a socket.

    Attributes:
        pid: the job's process.
        command: its command line.
        snapshot: what it sent last; None before the first answer, and after its last loader was closed.
        answered: whether it has ever answered.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.command = command_of(pid)
        self.snapshot: dict[str, Any] | None = None
        self.answered = False
        self._connection: socket.socket | None = None
        self._received = b""
        self._listening: dict[socket.socket, str] = {}
        self.listen()

    def listen(self) -> None:
        """Wait for the job to connect, in each folder that it may look in."""
        own = dict(os.environ)
        environments: tuple[dict[str, str], ...] = (own, environment_of(self.pid) or own, {})
        errors = []
        for folder in dict.fromkeys(map(runtime_folder, environments)):
            try:
                remove_stale(folder)
                listening, path = listen(folder, self.pid)
                self._listening[listening] = path
            except OSError as error:
                errors.append(error)
        if not self._listening:
            raise errors[0]

    def sockets(self) -> list[socket.socket]:
        """Those to wait for."""
        return [*self._listening] if self._connection is None else [self._connection]

    def on_readable(self, ready: socket.socket) -> None:
        """Accept the job's connection, or read what it sent."""
        if ready in self._listening:
            self._accept(ready)
        elif ready is self._connection:
            self._read(ready)

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        user, pid = peer_of(connection)
        if user not in (None, os.geteuid()) or pid not in (None, self.pid):  # the same id in another container
            connection.close()
            return
        self._connection = connection
        self._stop_listening()

    def _read(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(1 << 18)
        except OSError:  # the job was killed
            received = b""
        if not received or len(self._received) > LONGEST_LINE:
            self._close_connection()
            return
        *lines, self._received = (self._received + received).split(b"\n")
        if lines:
            snapshot = json.loads(lines[-1])
            if snapshot.get("protocol") != PROTOCOL:
                raise ValueError(
                    f"the headrace of process {self.pid} speaks protocol {snapshot.get('protocol')} of `headrace top`, "
                    f"and this one {PROTOCOL}: run the `headrace` of the job's environment"
                )
            self.snapshot, self.answered = snapshot, True

    def _close_connection(self) -> None:
        """The job has closed its last loader, or has ended."""
        assert self._connection is not None
        self._connection.close()
        self._connection, self.snapshot, self._received = None, None, b""
        if not self.ended:
            self.listen()

    @property
    def ended(self) -> bool:
        """Whether the job's process has ended."""
        return self._connection is None and has_ended(self.pid)

    def _stop_listening(self) -> None:
        for listening, path in self._listening.items():
            listening.close()
            with contextlib.suppress(OSError):  # the job has removed it
                os.unlink(path)
        self._listening = {}

    def close(self) -> None:
        """Close its sockets, and remove their names."""
        self._stop_listening()
        if self._connection is not None:
            self._connection.close()


Show = Callable[[Sequence[Feed]], None]


def _run(feeds: Sequence[Feed], show: Show, *, interval: float, once: bool) -> list[str]:
    """Show until Ctrl-C, or until all jobs have ended; returns what is to be said at the end."""
    began = time.monotonic()
    while not all(feed.answered or feed.ended for feed in feeds) and (left := began + PATIENCE - time.monotonic()) > 0:
        _receive(feeds, left)
    silent = [why_silent(feed.pid) for feed in feeds if not feed.answered]
    if len(silent) == len(feeds):
        raise ValueError("; ".join(silent))
    while True:
        show(feeds)
        until = time.monotonic() + interval
        while not once and (left := until - time.monotonic()) > 0:
            _receive(feeds, left)
            if all(feed.ended for feed in feeds):
                return [f"process {feed.pid} has ended" for feed in feeds]
        if once:
            return silent


def _receive(feeds: Sequence[Feed], timeout: float) -> None:
    """Handle what arrives; returns after something has, or after a second, since the end of a job sends nothing."""
    with selectors.DefaultSelector() as selector:
        for feed in feeds:
            for each in feed.sockets():
                selector.register(each, selectors.EVENT_READ, feed)
        for key, _ in selector.select(min(timeout, 1.0)):
            assert isinstance(key.fileobj, socket.socket)
            key.data.on_readable(key.fileobj)


def _json_output(stream: TextIO) -> Show:
    def show(feeds: Sequence[Feed]) -> None:
        for feed in feeds:
            if feed.snapshot is not None:
                stream.write(json.dumps({**feed.snapshot, "command": feed.command}, ensure_ascii=False) + "\n")
        stream.flush()

    return show


def _output(stream: TextIO, *, summary: bool, stack: contextlib.ExitStack, live: bool) -> Show:
    """Text: in a terminal with Rich in place of what was there, else one block after the other."""
    terminal = stream.isatty()
    colored = is_colored(stream)

    def lines(feeds: Sequence[Feed]) -> list[Line]:
        width = columns(stream) if terminal else None
        if summary:
            return overview([(feed.pid, feed.command, feed.snapshot) for feed in feeds], width)
        return [line for feed in feeds for line in _lines_of(feed, width)]

    if terminal and live:
        with contextlib.suppress(ImportError):  # Rich is optional: lines without it
            return _rich_output(stream, lines, stack)
    blocks = 0

    def show(feeds: Sequence[Feed]) -> None:
        nonlocal blocks
        head = f"{chr(10) * bool(blocks)}{time.strftime('%H:%M:%S')}\n" if live else ""
        blocks += 1
        text = "".join(_colored(line) if colored else line.text + "\n" for line in lines(feeds))
        stream.write(head + text)
        stream.flush()

    return show


def _lines_of(feed: Feed, width: int | None) -> Iterator[Line]:
    if feed.snapshot is not None:
        yield from view(feed.snapshot, feed.command, width)
    else:
        yield Line(f"process {feed.pid} runs no loader now" if feed.answered else why_silent(feed.pid), "bold")


def _colored(line: Line) -> str:
    return f"{ANSI[line.style]}{line.text}{chr(27) + '[0m' if line.style else ''}\n"


def _rich_output(stream: TextIO, lines: Callable[[Sequence[Feed]], list[Line]], stack: contextlib.ExitStack) -> Show:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    # In the alternate screen, as `top`: a display that is higher than the terminal could not be replaced otherwise.
    display = stack.enter_context(Live(console=console, auto_refresh=False, screen=True))

    def show(feeds: Sequence[Feed]) -> None:
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"headrace top  {time.strftime('%H:%M:%S')}  (Ctrl-C ends it, not the job)\n\n", "dim")
        for line in lines(feeds):
            text.append(line.text + "\n", line.style or None)
        display.update(text, refresh=True)

    return show
