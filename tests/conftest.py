"""Fixtures of all tests: event loops of the consumer and of the engine, and a timeout for each test."""

import asyncio
import contextlib
import faulthandler
import os
import shutil
import signal
import tempfile

import anyio
import cloudpickle
import pytest
import trio
import uvloop

from headrace._eventloop.loop_thread import EVENT_LOOP_VARIABLE
from tests.forks import Forks
from tests.hangs import ends_within

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a job in the background of a shell script has it. The programs that tests start would
    # inherit it, and with it be deaf to the Ctrl-C that some tests are about.
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ModuleNotFoundError):  # of the environment of trainers
    import hypothesis

    # A machine that is busy generates slowly, and that is no fault of a test.
    hypothesis.settings.register_profile(
        "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy")

# Seconds. No test takes nearly as long, also on a busy machine. After TIMEOUT a signal handler
# raises in the test. A test in C code, where no handler runs, is ended KILL_DELAY later with its
# process, after a traceback of each thread.
TIMEOUT = float(os.environ.get("HEADRACE_TEST_TIMEOUT", "240"))
KILL_DELAY = 30.0


def pytest_collection_modifyitems(items):
    # Worker processes cannot import test modules: what these define travels by value, as from a
    # notebook.
    for module in {item.module for item in items if hasattr(item, "module")}:
        cloudpickle.register_pickle_by_value(module)


def pytest_configure(config):
    global _stderr
    # Output is not captured now; later, descriptor 2 is a file of pytest's.
    _stderr = os.dup(2)
    tools = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ["HEADRACE_TEST_TOOLS"] = os.path.join(tools, "headrace-tests")
    # Indices of shards are kept there; not in the folder of the user who runs the tests.
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="headrace-tests-")
    config.addinivalue_line(
        "markers",
        "counts: the test counts requests, and so has a server to itself; see servers.py",
    )


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


_seconds = {}  # of each test: its set-up, its call and its teardown


def pytest_runtest_logreport(report):
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish():
    if path := os.environ.get(
        "HEADRACE_DURATIONS"
    ):  # `make test` prints the slowest of all its parts
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(
                f"{seconds:7.2f} s  {name}\n" for name, seconds in _seconds.items()
            )


@pytest.fixture(autouse=True)
def _timeout():
    faulthandler.dump_traceback_later(TIMEOUT + KILL_DELAY, exit=True, file=_stderr)
    with ends_within(TIMEOUT):
        yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def forks():
    """The interpreter from which programs of tests are forked; an optimizer and a checkpoint import for two seconds."""
    with Forks(
        FORK_SERVER_IMPORTS="torch._dynamo torch.distributed.checkpoint"
    ) as parent:
        yield parent


@pytest.fixture(scope="module")
def run():
    """Run a program of a document; it must end well, and print no warning about what it left open."""
    with Forks(
        "-X", "dev", OMP_NUM_THREADS="1", FORK_SERVER_IMPORTS="torch._dynamo"
    ) as forks:

        def run(program, status=0):
            done = forks.run_source(program)
            errors = [
                line
                for line in done.stderr.splitlines()
                if line and not line.startswith("Executing ")  # a busy machine
            ]
            assert (done.returncode, errors) == (status, [])
            return done.stdout.split()

        yield run


@pytest.fixture(params=["asyncio", "uvloop"])
def engine_loop(request, monkeypatch):
    """Each event loop that a loader may run its engine on."""
    monkeypatch.setenv(EVENT_LOOP_VARIABLE, request.param)
    return request.param


def _bounded(function):
    async def run():
        with anyio.fail_after(TIMEOUT / 2):
            return await function()

    return run


def _on_asyncio(function):
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(_bounded(function)())


def _on_uvloop(function):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_bounded(function)())


def _on_trio(function):
    return trio.run(_bounded(function))


@pytest.fixture(
    params=[_on_asyncio, _on_uvloop, _on_trio], ids=["asyncio", "uvloop", "trio"]
)
def consumer_loop(request):
    """Each event loop that a loader's user may run: ``consumer_loop(async_function)`` gives what it returns."""
    return request.param


@pytest.fixture(params=[_on_asyncio, _on_uvloop], ids=["asyncio", "uvloop"])
def on_loop(request):
    """Each event loop that a part of the engine may run on: ``on_loop(async_function)`` gives what it returns."""
    return request.param
