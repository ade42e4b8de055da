"""Files served over HTTP for a benchmark, by nginx, or by headrace's test server where nginx is not installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from servers import ObjectServer

__all__ = ["free_port", "running", "served"]

NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off; sendfile on; tcp_nodelay on; keepalive_requests 100000000;
    client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
    uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
    server {{ listen 127.0.0.1:{port}; root {folder}/root; {directives} }}
}}
"""


@contextlib.contextmanager
def served(
    objects: Mapping[str, bytes], directives: str = ""
) -> Iterator[tuple[str, str]]:
    """Serve `objects` over HTTP.

    Args:
        objects: by their keys.
        directives: what else nginx's configuration says of its server, e.g. ``"limit_rate 100m;"``.

    Yields:
        The URL of the directory with the objects, and what serves it, in words.
    """
    if not shutil.which("nginx"):
        if directives:
            raise RuntimeError(
                f"nginx is not installed, and this needs its {directives!r}"
            )
        with ObjectServer(objects) as server:
            yield server.http_url, "headrace's test server (nginx is not installed)"
        return
    with tempfile.TemporaryDirectory(prefix="headrace-nginx-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "root").mkdir()
        for key, data in objects.items():
            (folder / "root" / key).write_bytes(data)
        port = free_port()
        with running(
            folder, NGINX.format(folder=folder, port=port, directives=directives), port
        ):
            yield f"http://127.0.0.1:{port}", "nginx, one worker process"


def free_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def running(folder: Path, config: str, port: int) -> Iterator[int]:
    """Run nginx with that configuration, from when it answers.

    Args:
        folder: for what it writes.
        config: in which it stays in the foreground and listens on `port`.
        port: of the loopback interface.

    Yields:
        The id of its main process.
    """
    (folder / "conf").write_text(config)
    process = subprocess.Popen(
        ["nginx", "-c", folder / "conf", "-e", folder / "error.log"]
    )
    try:
        while process.poll() is None:
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(("127.0.0.1", port)),
            ):
                break
            time.sleep(0.01)
        else:
            raise RuntimeError(f"nginx ended with {process.returncode}; see its stderr")
        yield process.pid
    finally:
        process.terminate()
        process.wait()
