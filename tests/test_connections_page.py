"""The programs of docs/connections.md run as they stand there, against real servers, but for the address."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import asyncpg
import pytest
import redis
from aiohttp import web

from headrace._core.eventloop.loop_thread import LoopThread
from tests.busy_api import BusyApi
from tests.documents import python_blocks
from tests.forks import Forks

PHOTOS, READINGS, IMAGES, PAGES = python_blocks("docs/connections.md")
NEVER_SAID = ("Traceback", "Unclosed", "unclosed", "never", "Warning")  # of a client that was not closed


@pytest.fixture(scope="module")
def run():
    with Forks("-X", "dev", OMP_NUM_THREADS="1") as forks:

        def run(program):
            done = forks.run(program, timeout=80)
            assert done.returncode == 0, done.stderr
            assert not [said for said in NEVER_SAID if said in done.stderr], done.stderr
            return done.stdout.split()

        yield run


def located(program, written, real):
    """The program with a real address in the place of the one that it has on the page."""
    assert written in program
    return program.replace(written, real)


def test_photos_by_aiohttp(run):
    async def photo(request):
        return web.Response(body=bytes(int(request.match_info["index"])))

    async def start():
        app = web.Application()
        app.router.add_get("/{index}", photo)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]

    loop = LoopThread("photos")
    runner, port = loop.run(start())
    try:
        printed = run(located(PHOTOS, "http://localhost:8080", f"http://127.0.0.1:{port}"))
    finally:
        loop.run(runner.cleanup())
        loop.close(1.0)
    assert printed == ["0", str(sum(range(200))), str(sum(range(200)))]


def found(name, *folders):
    """Where a server's program is; Debian keeps PostgreSQL's out of PATH."""
    return shutil.which(name) or next((str(path) for folder in folders for path in Path("/usr/lib").glob(folder)), None)


@pytest.fixture
def postgres():
    initdb, server = (found(name, f"postgresql/*/bin/{name}") for name in ("initdb", "postgres"))
    if initdb is None or server is None:
        pytest.skip("needs Debian's postgresql")
    user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg-")))
        if user:
            shutil.chown(folder, user)
        common = {"user": user, "cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        data = str(folder / "data")
        subprocess.run([initdb, "-D", data, "-U", "reader", "--auth=trust", "--no-sync"], check=True, **common)
        control = [str(Path(initdb).with_name("pg_ctl")), "-D", data, "-w"]
        options = f"-k {folder} -c listen_addresses= -c fsync=off"
        subprocess.run([*control, "-l", str(folder / "log"), "-o", options, "start"], check=True, **common)
        stack.callback(subprocess.run, [*control, "-m", "immediate", "stop"], check=True, **common)
        yield f"postgresql://reader@/postgres?host={folder}"


def test_readings_by_asyncpg(run, postgres):
    async def fill():
        connection = await asyncpg.connect(postgres)
        await connection.execute("CREATE TABLE readings (id int PRIMARY KEY, value float8)")
        await connection.copy_records_to_table("readings", records=[(number, number / 2) for number in range(1000)])
        await connection.close()

    asyncio.run(fill())
    printed = run(located(READINGS, "postgresql://reader@localhost/postgres", postgres))
    assert printed == ["1.5", "249750.0", "249750.0"]


def test_images_by_redis(run, tmp_path):
    server = found("redis-server")
    if server is None:
        pytest.skip("needs Debian's redis-server")
    path = tmp_path / "socket"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--daemonize", "no", "--dir", str(tmp_path)]
    with subprocess.Popen([server, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if "Ready to accept connections" in line or "ready to accept connections at" in line:
                    break
            with redis.Redis(unix_socket_path=str(path)) as client:
                client.mset({f"image:{index}": bytes(index) for index in range(500)})
                client.rpush("queue", *range(25))
                printed = run(located(IMAGES, 'host="localhost", port=6379', f"unix_socket_path={str(path)!r}"))
        finally:
            process.terminate()
    assert printed == [str(sum(range(500))), "25"]


def test_pages_of_a_busy_api(run):
    with BusyApi(300, burst=60) as api:
        assert run(located(PAGES, "http://localhost:8080", api.url)) == [str(sum(range(500))), "500"]
