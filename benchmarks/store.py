"""An object store for benchmarks, with a given latency and low CPU cost.

nginx with its Lua module where they are installed (Debian: `apt-get install nginx libnginx-mod-http-lua`), one worker
process; else the library's own test server. Either speaks as much S3 as loaders need (GET with ranges, HEAD,
ListObjectsV2; signatures are not checked), and shares the machine's cores with the loader under test.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contents import content_of, contents, key_of
from served import free_port, running
from servers import ObjectServer

__all__ = ["BUCKET", "Store", "nginx_is_installed", "serve"]

BUCKET = "bucket"
PAGE = 1000  # keys to a page of a listing, as with S3

# A normally distributed number, by Box and Muller.
NORMAL = "math.sqrt(-2 * math.log(1 - math.random())) * math.cos(2 * math.pi * math.random())"
MODULES = Path("/usr/lib/nginx/modules")
# No cache of open files: it made no difference to the rate, and with a connection for each of some thousand fetches it
# came to the limit of descriptors, where nginx accepts no more.
CONFIG = """
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
daemon off; worker_processes 1; worker_rlimit_nofile {descriptors}; {user}
pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 16384; }}
http {{
    access_log off; sendfile on; tcp_nodelay on; keepalive_requests 100000000; keepalive_timeout 600s;
    client_body_temp_path {folder}/t; proxy_temp_path {folder}/t; fastcgi_temp_path {folder}/t;
    uwsgi_temp_path {folder}/t; scgi_temp_path {folder}/t;
    default_type application/octet-stream;
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        root {folder}/root;
        access_by_lua_block {{ ngx.sleep({latency}) }}
        location ~ ^/{bucket}/?$ {{
            access_by_lua_block {{ return }}
            content_by_lua_block {{
                ngx.exec("/pages/" .. (tonumber(ngx.req.get_uri_args()["continuation-token"]) or 0))
            }}
        }}
        location = /_stats {{ access_by_lua_block {{ return }} stub_status; }}
        location /pages/ {{ internal; access_by_lua_block {{ return }} default_type application/xml; }}
    }}
}}
"""


@dataclass(frozen=True)
class Store:
    """A store that runs.

    Attributes:
        endpoint: e.g. ``http://127.0.0.1:8000``; the objects lie under ``/bucket/``.
        kind: which server it is, in words.
        size: bytes of each object.
    """

    endpoint: str
    kind: str
    size: int

    def gets(self) -> int:
        """Number of GETs of objects that the server has answered."""
        with urllib.request.urlopen(f"{self.endpoint}/_stats") as answer:
            statistics = answer.read().decode()
        if statistics.startswith("{"):
            return int(json.loads(statistics)["requests"].get("GET", 0))
        return int(statistics.splitlines()[2].split()[2])  # nginx's: accepted, handled, requests

    @property
    def url(self) -> str:
        """The bucket as S3; needs `options` beside it."""
        return f"s3://{BUCKET}"

    @property
    def http_url(self) -> str:
        """The bucket as plain HTTP."""
        return f"{self.endpoint}/{BUCKET}"

    @property
    def options(self) -> dict[str, Any]:
        """What leads `obstore.store.from_url` to this server."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "skip_signature": True,
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }


def nginx_is_installed() -> bool:
    """Whether there is nginx with its Lua module."""
    return shutil.which("nginx") is not None and (MODULES / "ngx_http_lua_module.so").exists()


@contextlib.contextmanager
def serve(objects: int, size: int, *, latency: float, spread: float = 0.0, nginx: bool = True) -> Iterator[Store]:
    """A store with `objects` as `contents` makes them.

    Args:
        objects: how many.
        size: bytes of each.
        latency: seconds to the first byte; with a spread the median of a log-normal distribution.
        spread: the standard deviation of the logarithm of the latency. It needs nginx.
        nginx: False for the library's own test server in any case.
    """
    if nginx and nginx_is_installed():
        with _nginx(objects, size, latency, spread) as endpoint:
            yield Store(endpoint, "nginx with Lua, one worker process", size)
    else:
        if spread:
            raise ValueError("the test server has one latency for all requests")
        why = "nginx with its Lua module is not installed" if nginx else "as was asked"
        with ObjectServer(contents(objects, size), bucket=BUCKET, latency=latency) as server:
            yield Store(server.endpoint, f"headrace's test server ({why})", size)


@contextlib.contextmanager
def _nginx(objects: int, size: int, latency: float, spread: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="headrace-nginx-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # its worker process may be another user's
        bucket, pages = folder / "root" / BUCKET, folder / "root" / "pages"
        bucket.mkdir(parents=True)
        pages.mkdir()
        for number in range(objects):
            file = bucket / key_of(number)
            file.write_bytes(content_of(number, size))
            os.utime(file, (number + 1, number + 1))  # nginx makes the entity tag of the time and the size
        for page in range(-(-objects // PAGE)):
            (pages / str(page)).write_text(_page(page, objects, size))
        port = free_port()
        user = "user root;" if os.geteuid() == 0 else ""
        _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = CONFIG.format(
            descriptors=descriptors,
            modules=MODULES,
            folder=folder,
            port=port,
            latency=latency if not spread else f"{latency} * math.exp({spread} * {NORMAL})",
            user=user,
            bucket=BUCKET,
        )
        with running(folder, config, port):
            yield f"http://127.0.0.1:{port}"


def _page(page: int, objects: int, size: int) -> str:
    last = min((page + 1) * PAGE, objects)
    more = f"<NextContinuationToken>{page + 1}</NextContinuationToken>" if last < objects else ""
    entries = "".join(
        f"<Contents><Key>{key_of(number)}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{number + 1:x}-{size:x}&quot;</ETag><Size>{size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for number in range(page * PAGE, last)
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix></Prefix><KeyCount>{last - page * PAGE}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
        f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{entries}</ListBucketResult>"
    )
