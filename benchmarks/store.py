"""An object store for benchmarks, with a given latency and low CPU cost.

nginx with its Lua module where they are installed (Debian: `apt-get install nginx
libnginx-mod-http-lua`), one worker process; else the library's own test server. Either speaks as
much S3 as loaders need (GET with ranges, HEAD, ListObjectsV2; signatures are not checked), and
shares the machine's cores with the loader under test.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contents import content_of, contents, key_of
from served import free_port, running
from servers import ObjectServer

__all__ = ["BUCKET", "Store", "nginx_is_installed", "serve", "serve_objects"]

BUCKET = "bucket"
PAGE = 1000  # keys to a page of a listing, as with S3
NGINX = "nginx with Lua, one worker process"

# A normally distributed number, by Box and Muller.
NORMAL = (
    "math.sqrt(-2 * math.log(1 - math.random())) * math.cos(2 * math.pi * math.random())"
)
# Requests take their turn at a rate; the seconds until then.
TURN = """(function()
    queue.free_at = math.max(queue.free_at, ngx.now()) + 1 / {rate}
    return queue.free_at - ngx.now()
end)()"""
MODULES = Path("/usr/lib/nginx/modules")
# No cache of open files: it made no difference to the rate, and with a connection for each of some
# thousand fetches it came to the limit of descriptors, where nginx accepts no more.
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
    init_by_lua_block {{ queue = {{ free_at = 0 }} }}
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
        size: bytes of each object; 0 if they differ.
        pid: nginx's main process, None for the test server.
    """

    endpoint: str
    kind: str
    size: int
    pid: int | None = None

    def gets(self) -> int:
        """Number of GETs of objects that the server has answered."""
        with urllib.request.urlopen(f"{self.endpoint}/_stats") as answer:
            statistics = answer.read().decode()
        if statistics.startswith("{"):
            return int(json.loads(statistics)["requests"].get("GET", 0))
        # nginx's: accepted, handled, requests.
        return int(statistics.splitlines()[2].split()[2])

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
    return (
        shutil.which("nginx") is not None
        and (MODULES / "ngx_http_lua_module.so").exists()
    )


@contextlib.contextmanager
def serve(
    objects: int,
    size: int,
    *,
    latency: float,
    spread: float = 0.0,
    nginx: bool = True,
    rate: float = 0.0,
) -> Iterator[Store]:
    """A store with `objects` as `contents` makes them.

    Args:
        objects: how many.
        size: bytes of each.
        latency: seconds to the first byte; with a spread the median of a log-normal distribution.
        spread: the standard deviation of the logarithm of the latency. It needs nginx.
        nginx: False for the library's own test server in any case.
        rate: requests a second, above which they wait; 0 for no limit. It needs nginx.
    """
    if nginx and nginx_is_installed():
        objects_made = (
            (key_of(number), content_of(number, size)) for number in range(objects)
        )
        seconds = (
            _log_normal(latency, spread) + (rate > 0) * f" + {TURN.format(rate=rate)}"
        )
        with _nginx(objects_made, seconds) as (endpoint, pid):
            yield Store(endpoint, NGINX, size, pid)
    else:
        if spread or rate:
            raise ValueError(
                "the test server has one latency for all requests, and no limit to their rate"
            )
        why = "nginx with its Lua module is not installed" if nginx else "as was asked"
        with ObjectServer(
            contents(objects, size), bucket=BUCKET, latency=latency
        ) as server:
            yield Store(server.endpoint, f"headrace's test server ({why})", size)


@contextlib.contextmanager
def serve_objects(
    objects: Mapping[str, bytes],
    *,
    latency: float,
    spread: float,
    stalled: float,
    stall: float,
) -> Iterator[Store]:
    """A store with these objects and the latencies of a real one.

    Without nginx and its Lua module all requests have the median latency, and none stalls.

    Args:
        objects: by their keys, sorted.
        latency: seconds to the first byte, the median of a log-normal distribution.
        spread: the standard deviation of the logarithm of the latency.
        stalled: share of the requests that take longer.
        stall: seconds that they take longer.
    """
    if not nginx_is_installed():
        with ObjectServer(objects, bucket=BUCKET, latency=latency) as server:
            yield Store(
                server.endpoint,
                "headrace's test server, with one latency for all requests",
                0,
            )
        return
    seconds = (
        f"{_log_normal(latency, spread)} + (math.random() < {stalled} and {stall} or 0)"
    )
    with _nginx(objects.items(), seconds) as (endpoint, pid):
        yield Store(endpoint, NGINX, 0, pid)


def _log_normal(latency: float, spread: float) -> str:
    return str(latency) if not spread else f"{latency} * math.exp({spread} * {NORMAL})"


@contextlib.contextmanager
def _nginx(
    objects: Iterable[tuple[str, bytes]], latency: str
) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="headrace-nginx-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # its worker process may be another user's
        bucket, pages = folder / "root" / BUCKET, folder / "root" / "pages"
        pages.mkdir(parents=True)
        sizes = {}
        for number, (key, data) in enumerate(objects):
            file = bucket / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            # nginx makes the entity tag of the time and the size
            os.utime(file, (number + 1, number + 1))
            sizes[key] = len(data)
        for page in range(-(-len(sizes) // PAGE)):
            (pages / str(page)).write_text(_page(page, sizes))
        port = free_port()
        user = "user root;" if os.geteuid() == 0 else ""
        _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = CONFIG.format(
            descriptors=descriptors,
            modules=MODULES,
            folder=folder,
            port=port,
            latency=latency,
            user=user,
            bucket=BUCKET,
        )
        with running(folder, config, port) as pid:
            yield f"http://127.0.0.1:{port}", pid


def _page(page: int, sizes: Mapping[str, int]) -> str:
    listed = list(enumerate(sizes.items(), 1))[page * PAGE : (page + 1) * PAGE]
    more = (
        f"<NextContinuationToken>{page + 1}</NextContinuationToken>"
        if (page + 1) * PAGE < len(sizes)
        else ""
    )
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{changed:x}-{size:x}&quot;</ETag><Size>{size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for changed, (key, size) in listed
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix></Prefix><KeyCount>{len(listed)}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
        f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{entries}</ListBucketResult>"
    )
