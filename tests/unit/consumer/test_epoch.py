"""Iterating: `for` and `async for` on every loop, errors that name their place, an epoch that is never cut short."""

import asyncio
import gc
import importlib
import json
import os
import signal
import threading
import weakref

import anyio
import pytest

import headrace as hr
from headrace.telemetry.counters import Counters
from tests.unit.consumer.test_skipping import STAGES, Bad, Mine, Numbers, failing, lists
from tests.unit.consumer.test_timeouts import Held
from tests.unit.streams.reading import Count

STOPS = [
    StopIteration,
    StopAsyncIteration,
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
    GeneratorExit,
]


def drain(iterator):
    """Everything an iterator gives until it ends, errors in the place of the batches that have one."""
    came = []
    while len(came) < 100:
        try:
            came.append(next(iterator))
        except StopIteration:
            return came
        except Exception as error:
            came.append(error)
    raise AssertionError(f"it does not end: {came[-1]!r}")


def note_of(error):
    (note,) = (note for note in error.__notes__ if note.startswith("headrace: stage"))
    return note


# Both faces, all loops


@pytest.mark.parametrize(
    ("dataset", "num_workers"), [(Numbers(10), 0), (Count(10), 2), (range(10), 2)]
)
def test_async_for_delivers_the_same_batches_on_every_event_loop(
    dataset, num_workers, consumer_loop, engine_loop
):
    async def scenario():
        async with hr.DataLoader(
            dataset, batch_size=4, num_workers=num_workers
        ) as loader:
            found = [[batch.tolist() async for batch in loader] for _ in range(2)]
            return [*found, lists(loader)]  # `for` works inside a running loop, too

    assert consumer_loop(scenario) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]] * 3


def test_cancelled_anext_loses_no_batch(consumer_loop):
    class WhenTold(Numbers):
        async def aget(self, index):
            await asyncio.to_thread(released.wait)
            return index

    released = threading.Event()

    async def scenario():
        async with hr.DataLoader(WhenTold(4), batch_size=2) as loader:
            running = aiter(loader)
            with anyio.move_on_after(0):
                await anext(running)
            with anyio.move_on_after(0.01):
                await anext(running)
            released.set()
            return [batch.tolist() async for batch in running]

    assert consumer_loop(scenario) == [[0, 1], [2, 3]]


# Look-ahead


class Watched(Numbers):
    """Counts what was asked for, and tells when it comes to a number."""

    def __init__(self, length):
        super().__init__(length)
        self.asked = 0
        self.loop = None
        self.reached = threading.Condition()

    async def aget(self, index):
        self.loop = asyncio.get_running_loop()
        with self.reached:
            self.asked += 1
            self.reached.notify_all()
        return index

    def settled_at(self, count):
        """What was asked for when the engine, having come to `count`, has nothing left to do."""
        with self.reached:
            self.reached.wait_for(lambda: self.asked >= count)
        asyncio.run_coroutine_threadsafe(
            anyio.wait_all_tasks_blocked(), self.loop
        ).result()
        return self.asked


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"concurrency": 8}, 6),
        ({"concurrency": 1, "num_workers": 4}, 8),
        ({"concurrency": 8, "num_workers": 1, "prefetch_factor": 5}, 5),
    ],
    ids=str,
)
def test_consumer_that_stops_reading_stops_the_fetching(options, ahead):
    dataset = Watched(400)
    with hr.DataLoader(dataset, batch_size=4, placement="thread", **options) as loader:
        running = iter(loader)
        assert dataset.settled_at(ahead * 4) == ahead * 4
        for taken in range(1, 4):
            next(running)
            assert dataset.settled_at((ahead + taken) * 4) == (ahead + taken) * 4


# Errors


@STAGES
@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_keeps_its_type_has_its_location_and_iteration_continues(
    stage, num_workers
):
    with failing(stage, 5, num_workers=num_workers) as loader:
        first, second, error, last = drain(iter(loader))
        assert lists([first, second, last]) == [[0, 1], [2, 3], [6, 7]]
        assert (type(error), str(error)) == (Mine, "5 is bad")
        place = f"headrace: stage {stage}, batch 2"
        place += (
            ", indices [4, 5], keys ['key-4', 'key-5']"
            if stage == "collate"
            else ", index 5, key 'key-5'"
        )
        place += ", worker 0" if num_workers and stage != "fetch" else ""
        assert note_of(error) == place
        assert error.__traceback__ is not None


# On this thread KeyboardInterrupt and SystemExit may be a signal handler's, and pass: see the next
# test. Of workers, `tests/faults/test_workers.py` has all of these errors.
@pytest.mark.parametrize(
    ("stage", "stop"),
    [
        *(("fetch", stop) for stop in STOPS),
        *((stage, StopIteration) for stage in ("transform", "collate")),
    ],
)
def test_stop_iteration_of_user_code_does_not_end_an_epoch(stage, stop):
    with failing(stage, 5, error=lambda _: stop()) as loader:
        first, second, error, last = drain(iter(loader))
        assert lists([first, second, last]) == [[0, 1], [2, 3], [6, 7]]
        assert isinstance(error, RuntimeError)
        assert isinstance(error.__cause__, stop)
        assert stop.__name__ in str(error)
        assert f"stage {stage}" in note_of(error)


@pytest.mark.parametrize("stage", ["transform", "collate"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_interrupt_on_this_thread_passes_and_its_batch_is_assembled_again(stage, stop):
    interrupts = iter([stop])
    with failing(
        stage, 5, error=lambda _: next(interrupts, NotImplementedError)()
    ) as loader:
        running = iter(loader)
        assert lists([next(running), next(running)]) == [[0, 1], [2, 3]]
        with pytest.raises(stop):
            next(running)
        error, last = drain(running)
        assert isinstance(error, NotImplementedError)  # not interrupted, but called again
        assert last.tolist() == [6, 7]


class InterruptedDraws:
    """Draws batches of one index each; before the one at `at`, Ctrl-C arrives once."""

    def __init__(self, length, at):
        self.length, self.at = length, at

    def __len__(self):
        return self.length

    def __iter__(self):
        self.indices = iter(range(self.length))
        return self

    def __next__(self):
        if self.indices.__length_hint__() == self.length - self.at:
            self.at = -1
            raise KeyboardInterrupt
        return [next(self.indices)]


@pytest.mark.parametrize(
    ("at", "placement"), [(1, "thread"), (15, "thread"), (36, "thread"), (15, "process")]
)
def test_no_batch_is_lost_to_ctrl_c_while_plans_are_drawn(at, placement):
    dataset = Numbers(40)
    with hr.DataLoader(
        dataset,
        batch_sampler=InterruptedDraws(40, at),
        concurrency=2,
        placement=placement,
    ) as loader:
        taken, interrupted = [], 0
        try:
            running = iter(loader)  # which draws the first plans
        except KeyboardInterrupt:
            interrupted += 1
            running = iter(loader)
        while True:
            try:
                taken.append(next(running).item())
            except KeyboardInterrupt:
                interrupted += 1
            except StopIteration:
                break
        assert (taken, interrupted) == ([*range(40)], 1)


to_come = []  # has an item while Ctrl-C is to arrive once


def interrupt(value, at):
    if value == at and to_come:
        to_come.clear()
        raise KeyboardInterrupt
    return value


class InterruptedReads:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return interrupt(index, 3)


def fail_at_three(index):
    if index == 3:
        raise Mine(index)
    return index


def skip(failure):
    interrupt(failure.index, 3)
    return "skip"


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (InterruptedReads(), {}),
        (Numbers(8), {"transform": fail_at_three, "on_error": skip}),
        (Numbers(8), {}),
    ],
    ids=["reading", "on_error", "subscriber"],
)
def test_no_batch_is_lost_to_ctrl_c_in_next(dataset, options, request):
    """In user code; tests/faults/test_signals.py has all places of headrace's code."""
    if "subscriber" in request.node.name:
        subscriber = lambda counters, record: interrupt(record.number, 1)  # noqa: E731
        Counters.subscribers.add(subscriber)
        request.addfinalizer(lambda: Counters.subscribers.remove(subscriber))
    taken, states = [], []
    with hr.DataLoader(dataset, batch_size=2, collate_fn=list, **options) as loader:
        running = iter(loader)
        to_come.append(True)
        while True:
            try:
                taken.append(next(running))
                states.append(loader.state_dict())
            except KeyboardInterrupt:
                assert taken == [[0, 1]]
            except StopIteration:
                break
        assert taken == [[0, 1], [2] if "on_error" in options else [2, 3], [4, 5], [6, 7]]
        assert not to_come
        for batch, state in zip(taken, states, strict=True):
            assert len(json.dumps(state)) < 1000
            loader.load_state_dict(state)
            assert next(iter(loader), None) == next(
                (each for each in taken if each > batch), None
            )


@pytest.mark.parametrize(
    ("error", "num_workers"), [(Mine, 0), (Mine, 1), *((stop, 0) for stop in STOPS)]
)
def test_stream_that_cannot_start_raises_once(num_workers, error):
    class CannotStart:
        def __aiter__(self):
            raise error

    with hr.DataLoader(CannotStart(), batch_size=4, num_workers=num_workers) as loader:
        (caught,) = drain(iter(loader))
        assert isinstance(caught, Mine if error is Mine else hr.errors.ControlFlowError)
        assert "stage fetch, batch 0" in note_of(caught)


def test_error_of_the_sampler_is_raised_after_the_batches_before_it():
    class Sampler:
        def __iter__(self):
            yield from range(5)
            raise Mine("no")

    with hr.DataLoader(Numbers(10), sampler=Sampler(), batch_size=2) as loader:
        first, second, error = drain(iter(loader))
        assert lists([first, second]) == [[0, 1], [2, 3]]
        assert isinstance(error, Mine)
        assert "stage sampling, batch 2" in note_of(error)


def test_sample_key_that_fails_hides_no_error():
    class Keyless(Numbers):
        def sample_key(self, index):
            raise SystemExit

    with hr.DataLoader(Keyless(2, Bad(0))) as loader:
        error, good = drain(iter(loader))
        assert isinstance(error, Mine)
        assert good.tolist() == [1]


def test_next_from_inside_aget_is_refused():
    class Reentrant(Numbers):
        async def aget(self, index):
            return next(iter(loader))

    loader = hr.DataLoader(Reentrant(2))
    with loader:
        error = drain(iter(loader))[0]
        assert isinstance(error, hr.errors.DeadlockError)
        assert "await dataset.aget" in str(error)


# Skipping: more of it in test_skipping.py


def test_workers_that_always_die_are_not_skipped_in_silence():
    def die(sample):
        os.kill(os.getpid(), signal.SIGKILL)

    loader = hr.DataLoader(
        Numbers(20), batch_size=2, num_workers=1, transform=die, on_error="skip"
    )
    with loader, pytest.raises(hr.errors.WorkerDiedError):
        list(loader)


# What is computed


def test_agets_is_not_called_without_batches():
    class AtOnce(Numbers):
        async def agets(self, indices):
            return [-index for index in indices]

    with hr.DataLoader(AtOnce(5), batch_size=None) as loader:
        assert list(loader) == [0, 1, 2, 3, 4], "there is nothing to fetch at once"


# Leaving early


class Aget(hr.AsyncDataset):
    def __init__(self, function):
        self.aget = function

    def __len__(self):
        return 8


@pytest.mark.parametrize("make", [Aget, Numbers(8).map, Count(8).map])
def test_leaving_early_lets_fetches_clean_up(make):
    async def connect(index):
        try:
            started.release()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as the closing of a connection does
            cleaned.append(index)

    started, cleaned = threading.Semaphore(0), []
    with hr.DataLoader(make(connect), 8, memory_budget=None) as loader:
        running = iter(loader)
        for _ in range(8):
            started.acquire()
    assert sorted(cleaned) == [*range(8)]
    del running


def test_closing_while_another_task_waits_ends_its_wait(consumer_loop):
    async def scenario():
        loader = hr.DataLoader(Held(0))

        async def consume():
            with pytest.raises(hr.errors.LoaderClosedError):
                await anext(aiter(loader))

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                await anyio.wait_all_tasks_blocked()
                await loader.aclose()

    consumer_loop(scenario)


class Volumes(hr.AsyncDataset):
    """Samples of a megabyte; makes a file for each from 20 on that is fetched beside another."""

    def __init__(self, folder):
        self.folder = folder
        self.in_flight = 0

    def __len__(self):
        return 40

    async def aget(self, index):
        self.in_flight += 1
        if index >= 20 and self.in_flight > 1:
            (self.folder / f"{index}").touch()
        await asyncio.sleep(0.002)  # latency, in which another fetch would be seen
        self.in_flight -= 1
        return bytes(1 << 20)


@pytest.mark.parametrize(
    "options", [{}, {"placement": "process"}, {"engines": 2}], ids=str
)
def test_memory_of_taken_batches_is_used_again_in_an_epoch_shorter_than_the_look_ahead(
    tmp_path, options
):
    with hr.DataLoader(
        Volumes(tmp_path),
        1,
        concurrency=64,
        collate_fn=len,
        memory_budget=8 << 20,
        **options,
    ) as loader:
        assert list(loader) == [1] * 40
    assert list(tmp_path.iterdir()), (
        "one fetch at a time, since no plan shows that batches were taken"
    )


class ManyNumbers(Numbers):
    async def agets(self, indices):
        return indices


def test_plans_larger_than_the_buffer_of_a_socket_arrive_from_any_loop(consumer_loop):
    dataset = ManyNumbers(10**6)

    async def sizes():
        async with hr.DataLoader(
            dataset, 50_000, shuffle=True, collate_fn=len, placement="process"
        ) as loader:
            return [size async for size in loader]

    assert consumer_loop(sizes) == [50_000] * 20


async def failing_stream():
    for index in range(4):
        yield Bad(3)(index)


@pytest.mark.parametrize(
    "dataset",
    [Numbers(8, Bad(3)), hr.from_async_iterable(failing_stream)],
    ids=["map", "stream"],
)
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"placement": "process"}], ids=str
)
def test_an_iterator_whose_sample_failed_ends_when_it_is_dropped(dataset, options):
    gc.disable()
    try:
        with hr.DataLoader(dataset, batch_size=2, seed=0, **options) as loader:
            batches = iter(loader)
            next(batches)
            with pytest.raises(ValueError, match="3"):
                next(batches)
            dropped = weakref.ref(batches)
            del batches
        assert dropped() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.asyncio"])
def test_a_progress_bar_of_tqdm_begins_one_epoch(module):
    bar = importlib.import_module(module).tqdm
    with hr.DataLoader(Numbers(8), 4, shuffle=True, seed=0) as plain:
        expected = [[batch.tolist() for batch in plain] for _ in range(3)]
    with hr.DataLoader(Numbers(8), 4, shuffle=True, seed=0) as loader:
        epochs = [
            [batch.tolist() for batch in bar(loader, disable=True)] for _ in range(3)
        ]
    assert epochs == expected
