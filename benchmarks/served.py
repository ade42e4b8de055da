"""Objects served over HTTP for a benchmark: by nginx, which costs the machine least, or by headrace's test server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.testing import ObjectServer

__all__ = ["served"]

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
def served(objects: Mapping[str, bytes], directives: str = "") -> Iterator[tuple[str, str]]:
    """Serve `objects` over HTTP.

    Args:
        objects: by their keys.
        directives: what else nginx's configuration says of its server, e.g. ``"limit_rate 100m;"``.

    Yields:
        The URL of the directory with the objects, and what serves it, in words.
    """
    if not shutil.which("nginx"):
        if directives:
            raise RuntimeError(f"nginx is not installed, and this needs its {directives!r}")
        with ObjectServer(objects) as server:
            yield server.http_url, "headrace's test server (nginx is not installed)"
        return
    with tempfile.TemporaryDirectory(prefix="headrace-nginx-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "root").mkdir()
        for key, data in objects.items():
            (folder / "root" / key).write_bytes(data)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (folder / "conf").write_text(NGINX.format(folder=folder, port=port, directives=directives))
        process = subprocess.Popen(["nginx", "-c", folder / "conf", "-e", folder / "error.log"])
        try:
            while True:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    break
            yield f"http://127.0.0.1:{port}", "nginx, one worker process"
        finally:
            process.terminate()
            process.wait()
