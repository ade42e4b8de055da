"""A resource for each loop: opened once, closed once, in reverse order, however the loop ends; and in loaders."""

import asyncio
import contextlib
import gc
import pickle

import anyio
import pytest

import headrace as hr
from headrace._eventloop.loop_thread import end_tasks
from headrace._eventloop.per_loop import per_loop


class Log:
    """What was opened and closed, in order."""

    def __init__(self):
        self.order = []

    def resource(self, name):
        @contextlib.asynccontextmanager
        async def opened():
            self.order.append(("open", name))
            yield name
            self.order.append(("close", name))

        return per_loop(opened)


@pytest.fixture
def log():
    return Log()


def test_resources_close_in_reverse_order_of_opening_when_asyncio_run_ends(log):
    inner = log.resource("inner")

    async def make():
        return f"on {await inner()}"

    outer = per_loop(make, close=lambda name: log.order.append(("close", name)))

    async def use():
        await outer()

    asyncio.run(use())
    assert log.order == [("open", "inner"), ("close", "on inner"), ("close", "inner")]


async def test_resource_opened_while_another_failed_is_closed(log):
    failed = asyncio.Event()

    def make_no_connection():
        raise OSError

    @contextlib.asynccontextmanager
    async def slow():
        await failed.wait()
        yield
        log.order.append(("close", "slow"))

    resource = per_loop(slow)
    opening = asyncio.ensure_future(resource())
    await asyncio.sleep(0)
    with pytest.raises(OSError):
        await per_loop(make_no_connection)()
    failed.set()
    await opening
    await end_tasks(1.0)
    assert log.order == [("close", "slow")]


async def test_resource_that_is_collected_is_closed(log):
    resource = log.resource("a")
    await resource()
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}
    del resource
    gc.collect()
    await task
    assert log.order == [("open", "a"), ("close", "a")]


async def test_concurrent_calls_open_one_resource_and_a_cancelled_one_does_not_stop_that():
    go, opened = asyncio.Event(), []

    async def make():
        opened.append(None)
        await go.wait()
        return object()

    resource = per_loop(make)
    calls = [asyncio.ensure_future(resource()) for _ in range(50)]
    await asyncio.sleep(0)
    calls[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await calls[0]
    go.set()
    made = await asyncio.gather(*calls[1:])
    assert len(set(made)) == len(opened) == 1
    copied = pickle.loads(pickle.dumps(per_loop(object)))
    assert await copied() is await copied()


async def test_error_of_make_is_raised_and_the_next_call_tries_again():
    answers = [OSError("refused"), StopAsyncIteration(), SystemExit(), "a connection"]

    async def make():
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    resource = per_loop(make)
    with pytest.raises(OSError, match="refused"):
        await resource()
    for _ in range(2):
        with pytest.raises(hr.errors.ControlFlowError):
            await resource()
    assert await resource() == "a connection"
    for arguments in ((None,), (object, 3)):
        with pytest.raises(TypeError, match="must be a function"):
            per_loop(*arguments)


@pytest.mark.parametrize(
    "make",
    [
        asyncio.Lock,
        lambda: asyncio.Semaphore(1),
        asyncio.Condition,
        lambda: anyio.CapacityLimiter(1),
    ],
)
async def test_lock_is_the_resource_and_is_not_entered(make):
    lock = await per_loop(make)()
    assert type(lock) is type(make())
    with anyio.fail_after(5):
        async with lock:
            pass


class Pool(contextlib.AsyncExitStack):
    """A pool of connections, which can be closed, as asyncpg's."""

    def acquire(self): ...


async def test_pool_is_entered(log):
    pool = Pool()
    pool.callback(log.order.append, ("close", "pool"))
    assert await per_loop(lambda: pool)() is pool
    await end_tasks(1.0)
    assert log.order == [("close", "pool")]


async def test_one_task_opens_and_closes(log):
    tasks = []

    @contextlib.asynccontextmanager
    async def group():
        tasks.append(asyncio.current_task())
        async with anyio.create_task_group() as group:
            yield group
            tasks.append(asyncio.current_task())
            group.cancel_scope.cancel()

    resource = per_loop(group)
    await asyncio.create_task(_awaited(resource))
    await end_tasks(1.0)
    assert len(set(tasks)) == 1
    assert len(tasks) == 2


async def _awaited(resource):
    return await resource()


async def test_close_that_fails_is_a_warning():
    def close(_):
        raise OSError("broken pipe")

    await per_loop(object, close=close)()
    with pytest.warns(
        RuntimeWarning, match=r"closing per_loop\(object\) failed: OSError: broken pipe"
    ):
        assert await end_tasks(1.0) == ""


async def test_close_that_hangs_is_named():
    resource = per_loop(
        object, close=lambda _: asyncio.get_running_loop().create_future()
    )
    await resource()
    late = await end_tasks(0.01)
    assert "name='per_loop(object)' coro=<Owner._own() running at" in late


# In loaders


class Clients:
    """A client that works on its own loop until it is closed; notes in a file when it is opened and closed."""

    def __init__(self, path):
        self.path = path
        self.client = per_loop(self.connect)

    @contextlib.asynccontextmanager
    async def connect(self):
        self.note("open")
        self.is_open = True
        yield asyncio.get_running_loop()
        self.is_open = False
        self.note("close")

    def note(self, event):
        with open(self.path, "a") as file:
            file.write(f"{event}\n")

    async def fetch(self, index):
        assert await self.client() is asyncio.get_running_loop()
        assert self.is_open
        if index == 2:
            raise ValueError("broken")
        return index


class Rows(Clients, hr.AsyncDataset):
    def __len__(self):
        return 8

    async def aget(self, index):
        return await self.fetch(index)


class Stream(Clients, hr.AsyncIterableDataset):
    async def __aiter__(self):
        for index in (0, 1, 3, 4):
            yield await self.fetch(index)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "placement": "process"}, {"num_workers": 1}]
)
@pytest.mark.parametrize("kind", [Rows, Stream])
def test_loader_opens_once_for_all_epochs_and_closes_with_the_loader(
    kind, options, tmp_path
):
    log = tmp_path / "log"
    with hr.DataLoader(kind(log), batch_size=2, on_error="skip", **options) as loader:
        for _ in range(3):
            assert sum(map(len, loader)) >= 4
        next(iter(loader))
        assert log.read_text().split() == ["open"]
    assert log.read_text().split() == ["open", "close"]


def test_indexing_and_each_loader_have_their_own(tmp_path):
    rows = Rows(log := tmp_path / "log")
    assert rows[0] == 0
    for loaders in (1, 2):
        with hr.DataLoader(rows, sampler=[0, 1]) as loader:
            assert len(list(loader)) == 2
            assert rows[1] == 1
        assert log.read_text().split() == ["open", *["open", "close"] * loaders]
