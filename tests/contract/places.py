"""Stores for tests: servers of other projects, each started and stopped here, and stores without a server."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
import obstore.store
import pytest

from headrace._store.store import Store
from object_server import ObjectServer

AZURITE_FOLDER = Path(os.environ["HEADRACE_TEST_TOOLS"]) / "azurite"
"""The folder into which `make azurite` installs it."""

# Azurite's own well-known account; it guards nothing.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

# One worker process that reads files as they are; PUT, so that an index can be stored beside its
# shard.
NGINX = """
daemon off;
{user}
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    server {{
        listen 127.0.0.1:{port};
        root {folder}/root;
        location / {{ dav_methods PUT; create_full_put_path on; }}
    }}
}}
"""


@dataclass(frozen=True)
class Place:
    """A store, and the options by which a dataset reads it."""

    url: str  # of the store's root, without a slash at its end
    # What a `Store` takes beside the URL.
    options: Mapping[str, Any] = field(default_factory=dict)
    lists: bool = True  # whether it can be asked what it has
    travels: bool = True  # whether another process finds the same objects

    def store(self, folder=""):
        """The store, or a directory of it."""
        return Store(
            f"{self.url}/{folder}"
            if folder and "backend" not in self.options
            else self.url,
            **self.options,
        )


@contextlib.contextmanager
def object_server(objects: Mapping[str, bytes], folder: Path) -> Iterator[Place]:
    """headrace's own server, as S3."""
    with ObjectServer(objects) as server:
        yield Place(server.url, {"options": server.store_options})


@contextlib.contextmanager
def object_server_as_gcs(objects: Mapping[str, bytes], folder: Path) -> Iterator[Place]:
    """headrace's own server, by Google's URLs; the emulators on PyPI and npm cannot answer obstore's listings."""
    with ObjectServer(objects) as server:
        options = {"base_url": server.endpoint, "bearer_token": "testing"}
        yield Place(server.url.replace("s3://", "gs://"), {"options": options})


@contextlib.contextmanager
def moto_bucket(name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An empty bucket of moto's S3: a client of boto3 to fill it, and its store options."""
    import boto3
    from botocore.config import Config
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        access = {
            "aws_access_key_id": "testing",
            "aws_secret_access_key": "testing-secret",
        }
        endpoint = f"http://127.0.0.1:{port}"
        config = Config(max_pool_connections=8)
        with contextlib.closing(
            boto3.client(
                "s3",
                endpoint_url=endpoint,
                region_name="us-east-1",
                config=config,
                **access,
            )
        ) as client:
            client.create_bucket(Bucket=name)
            options = {"endpoint": endpoint, "region": "us-east-1", **access}
            yield client, options
    finally:
        server.stop()


def variables_of(options: Mapping[str, str]) -> dict[str, str]:
    """Options of a bucket of moto's as variables of the environment."""
    names = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}
    return {names.get(name, name.upper()): value for name, value in options.items()}


@contextlib.contextmanager
def moto(objects: Mapping[str, bytes], folder: Path) -> Iterator[Place]:
    """moto's S3, filled by boto3, with signed requests."""
    with moto_bucket("photos") as (client, options):
        for key, data in objects.items():
            client.put_object(Bucket="photos", Key=key, Body=data)
        yield Place("s3://photos", {"options": options})


@contextlib.contextmanager
def azurite(objects: Mapping[str, bytes], folder: Path) -> Iterator[Place]:
    """Microsoft's emulator of Azure's blobs, with signed requests."""
    program = _azurite_program()
    command = [
        program,
        "--blobPort",
        "0",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    command.append("--silent")  # no line for each request
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            listening = next(
                (line for line in process.stdout if "successfully listens on" in line),
                None,
            )
            assert listening is not None, f"azurite ended with status {process.wait()}"
            port = int(listening.rpartition(":")[2])
            _make_container(port, "photos")
            options = {
                "account_name": ACCOUNT,
                "account_key": ACCOUNT_KEY,
                "endpoint": f"http://127.0.0.1:{port}/{ACCOUNT}",
            }
            fill(
                obstore.store.from_url(
                    "az://photos", client_options={"allow_http": True}, **options
                ),
                objects,
            )
            yield Place("az://photos", {"options": options})
        finally:
            process.terminate()


@contextlib.contextmanager
def nginx(objects: Mapping[str, bytes], folder: Path) -> Iterator[Place]:
    """nginx with files: plain HTTP, no listing."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("needs nginx (Debian: apt-get install nginx-light)")
    for key, data in objects.items():
        path = folder / "root" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Started by root, its worker would run as an unprivileged user, who may not read pytest's
    # folders.
    user = "user root;" if os.getuid() == 0 else ""
    (folder / "conf").write_text(NGINX.format(folder=folder, port=port, user=user))
    with subprocess.Popen(
        [program, "-c", folder / "conf", "-e", folder / "error.log"]
    ) as process:
        try:
            while True:
                assert process.poll() is None, (folder / "error.log").read_text()
                with (
                    contextlib.suppress(ConnectionRefusedError),
                    socket.create_connection(("127.0.0.1", port)),
                ):
                    break
            yield Place(f"http://127.0.0.1:{port}", lists=False)
        finally:
            process.terminate()


@contextlib.contextmanager
def files(objects: Mapping[str, bytes], folder: Path) -> Iterator[Place]:
    """A directory."""
    fill(obstore.store.LocalStore(folder), objects)
    yield Place(folder.as_uri())


@contextlib.contextmanager
def memory(objects: Mapping[str, bytes], folder: Path) -> Iterator[Place]:
    """The memory of this process."""
    store = obstore.store.MemoryStore()
    fill(store, objects)
    yield Place("memory://", {"backend": store}, travels=False)


PLACES: tuple[Callable[..., contextlib.AbstractContextManager[Place]], ...] = (
    object_server,
    object_server_as_gcs,
    moto,
    azurite,
    nginx,
    files,
    memory,
)


def fill(store: Any, objects: Mapping[str, bytes]) -> None:
    for key, data in objects.items():
        obstore.put(store, key, data)


def _azurite_program() -> str:
    installed = AZURITE_FOLDER / "node_modules" / ".bin" / "azurite-blob"
    program = shutil.which("azurite-blob") or (
        str(installed) if installed.exists() else None
    )
    if program is None or shutil.which("node") is None:
        pytest.skip("needs azurite (make azurite, where there is npm)")
    return program


def _make_container(port: int, name: str) -> None:
    """PUT a container, which obstore cannot create. Signed by Azure's *Authorize with Shared Key*."""
    path = f"/{ACCOUNT}/{name}"
    headers = {
        "x-ms-date": email.utils.formatdate(usegmt=True),
        "x-ms-version": "2023-11-03",
    }
    signed = (
        "PUT"
        + "\n" * 12
        + "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    )
    signed += f"/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.new(
        base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256
    ).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(
            "PUT", f"{path}?restype=container", headers={**headers, "Content-Length": "0"}
        )
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
    finally:
        connection.close()
