"""A server over HTTP whose answers a test makes, one function for all requests."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Request(BaseHTTPRequestHandler):
    """A request, and what it can be answered with."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.answer(self)  # type: ignore[attr-defined]

    do_HEAD = do_PROPFIND = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def send(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with a body and its length; to a HEAD without the body."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_object(self, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Answer as a server that does ranges, with the range of `data` that is asked for."""
        span = self.headers.get("Range")
        if span is None:
            self.send(200, data, headers)
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        if first:
            start, stop = int(first), min(int(last) + 1, len(data))
        else:
            start, stop = max(0, len(data) - int(last)), len(data)
        sent = {
            "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}",
            **(headers or {}),
        }
        self.send(206, data[start:stop], sent)


@contextlib.contextmanager
def answering(
    answer: Callable[[Request], object],
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
) -> Iterator[str]:
    """The URL of a server that answers each request by `answer`, in a thread for each connection."""
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    kind = type("Server", (ThreadingHTTPServer,), {"address_family": family})
    with kind((host.strip("[]"), 0), Request) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.daemon_threads = True
        server.answer = answer  # type: ignore[attr-defined]
        server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # a client that has gone
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
