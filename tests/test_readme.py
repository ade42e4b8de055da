"""The README: its programs run, and its links lead somewhere, in a clone and on PyPI."""

import re
import tomllib

import pytest
from aiohttp import web
from PIL import Image

from headrace._core.eventloop.loop_thread import LoopThread
from tests.documents import ROOT, python_blocks
from tests.forks import Forks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
FIRST, OBJECTS, FEED = python_blocks("README.md")


@pytest.fixture(scope="module")
def run():
    with Forks(OMP_NUM_THREADS="1") as forks:

        def run(program):
            done = forks.run(program, timeout=80)
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout.splitlines()

        yield run


def test_first_program_runs_as_it_stands(run):
    batch = "torch.Size([256, 3, 32, 32]) torch.Size([256])"
    assert run(FIRST) == [batch] * 16


def test_program_that_reads_objects_runs(run, tmp_path):
    for number in range(130):
        Image.new("RGB", (12, 10)).save(tmp_path / f"{number % 10}-{number}.jpg")
    printed = run(OBJECTS.replace("s3://bucket/train", tmp_path.as_uri()))
    assert [line.split(" tensor")[0] for line in printed if line.startswith("torch.Size")] == [
        f"torch.Size([{size}, 224, 224, 3])" for size in (64, 64, 2)
    ]


def test_program_that_reads_a_feed_runs(run):
    async def clicks(request):
        feed = web.WebSocketResponse()
        await feed.prepare(request)
        for number in range(40):
            await feed.send_json({"x": number})
        await feed.close()
        return feed

    async def start():
        app = web.Application()
        app.router.add_get("/clicks", clicks)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]

    loop = LoopThread("feed")
    runner, port = loop.run(start())
    try:
        printed = run(FEED.replace("wss://example.org", f"ws://127.0.0.1:{port}"))
    finally:
        loop.run(runner.cleanup())
        loop.close(1.0)
    numbers = [int(number) for number in re.findall(r"\d+", "".join(printed).replace("x", ""))]
    assert numbers == list(range(40))


def links_of(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_links_point_to_existing_files():
    relative = [link.partition("#")[0] for link in links_of(README) if "://" not in link]
    assert relative
    assert [link for link in relative if not (ROOT / link).exists()] == []


def test_links_on_pypi_are_absolute():
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = README
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    assert [link for link in links_of(text) if not link.startswith("https://")] == []
    address = PROJECT["project"]["urls"]["Repository"]
    assert f"]({address}/blob/main/docs/datasets.md)" in text
    assert all(url.startswith(address) for url in PROJECT["project"]["urls"].values())
