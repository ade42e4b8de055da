"""Datasets that are async context managers are entered and exited once, on the loop that they are read on."""

import asyncio
import contextlib
import json
import threading

import pytest
from torch.utils import data

import headrace as hr

PLACEMENTS = pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "placement": "process"}, {"num_workers": 1, "placement": "thread"}],
    ids=["thread", "process", "thread with a worker"],
)  # fmt: skip


class Connection:
    """Works on the loop that it was made on, until it is closed; cannot be pickled."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.lock = threading.Lock()
        self.closed = False

    async def fetch(self, index):
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop
        assert not self.closed
        return index


class Diary:
    """What datasets have gone through, in a file: some do in another process."""

    def __init__(self, path):
        self.path = str(path)

    def note(self, *what):
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\n")

    def read(self):
        with contextlib.suppress(FileNotFoundError), open(self.path) as file:
            return [tuple(json.loads(line)) for line in file]
        return []


class Source:
    def __init__(self, diary, name="source", length=8):
        self.diary = diary
        self.name = name
        self.length = length

    async def __aenter__(self):
        self.task = asyncio.current_task()
        await asyncio.sleep(0)
        self.connection = Connection()
        self.diary.note("enter", self.name)
        return self

    async def __aexit__(self, *error):
        assert error == (None, None, None)
        assert asyncio.current_task() is self.task
        assert asyncio.get_running_loop() is self.connection.loop
        await asyncio.sleep(0)
        self.connection.closed = True
        self.diary.note("exit", self.name)


class Duck(Source):
    def __len__(self):
        return self.length

    async def aget(self, index):
        return await self.connection.fetch(index)


class Rows(Duck, hr.AsyncDataset):
    pass


class Stream(Source, hr.AsyncIterableDataset):
    async def __aiter__(self):
        for index in range(self.length):
            yield await self.connection.fetch(index)


class Holder(hr.AsyncDataset):
    """A user's dataset around another."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    async def aget(self, index):
        return await self.inner.aget(index)


@pytest.fixture
def diary(tmp_path):
    return Diary(tmp_path / "diary")


ONCE = [("enter", "source"), ("exit", "source")]


def samples_of(loader):
    return sorted(x for batch in loader for x in batch.tolist())


@PLACEMENTS
@pytest.mark.parametrize("kind", [Rows, Stream, Duck])
def test_engine_enters_once_for_all_epochs_and_exits_at_close(diary, kind, options):
    with hr.DataLoader(kind(diary), batch_size=4, **options) as loader:
        for _ in range(3):
            assert samples_of(loader) == list(range(8))
        assert diary.read() == ONCE[:1]
    assert diary.read() == ONCE


@PLACEMENTS
def test_error_in_a_sample_does_not_exit_the_dataset_and_close_does(diary, options):
    class Broken(Rows):
        async def aget(self, index):
            if index == 2:
                raise ValueError("broken")
            return await super().aget(index)

    with hr.DataLoader(Broken(diary), batch_size=4, **options) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match="broken"):
            next(batches)
        assert next(batches).tolist() == [4, 5, 6, 7]
    assert diary.read() == ONCE


@PLACEMENTS
def test_indexing_before_between_and_after_loaders(diary, options):
    dataset = Rows(diary)
    assert dataset[0] == 0
    for _ in range(2):
        with hr.DataLoader(dataset, batch_size=4, **options) as loader:
            exits = diary.read().count(ONCE[1])
            assert samples_of(loader) == list(range(8))
            assert dataset[1] == 1
            assert samples_of(loader) == list(range(8))
            assert diary.read().count(ONCE[1]) == exits, "no other process was restarted"
        assert dataset[2] == 2
        assert dataset.__getitems__([3, 4]) == [3, 4]


def test_two_loaders_at_once_share_the_entered_dataset(diary):
    dataset = Rows(diary, length=64)
    with hr.DataLoader(dataset, batch_size=4) as first:
        batches = iter(first)
        next(batches)
        with hr.DataLoader(data.Subset(dataset, range(32)), batch_size=4) as second:
            assert samples_of(second) == list(range(32))
        assert diary.read() == ONCE[:1], "the first still reads"
        assert len(list(batches)) == 15
    assert diary.read() == ONCE


def test_dataset_works_in_torchs_own_loader(diary):
    dataset = Rows(diary)
    loader = data.DataLoader(dataset, batch_size=4)
    assert samples_of(loader) == samples_of(loader) == list(range(8))
    forked = data.DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert samples_of(forked) == list(range(8))


AROUND = [
    (Rows, lambda rows: rows.map(abs)),
    (Rows, lambda rows: hr.concat([rows]).take(8)),
    (Rows, lambda rows: data.Subset(data.ConcatDataset([rows.map(abs)]), range(8))),
    (Duck, Holder),
    (Stream, lambda stream: hr.concat([stream.map(abs)])),
    (Stream, lambda stream: stream.shuffle(4).take(8)),
    (Stream, lambda stream: hr.mix([stream], [1.0]).split(rank=0, world_size=1)),
    (Stream, lambda stream: data.ChainDataset([stream])),
]


@pytest.mark.parametrize(("kind", "around"), AROUND)
def test_dataset_inside_others_is_entered(diary, kind, around):
    with hr.DataLoader(around(kind(diary)), batch_size=4) as loader:
        assert samples_of(loader) == list(range(8))
        assert samples_of(loader) == list(range(8))
    assert diary.read() == ONCE


def test_connection_in_an_attribute_is_not_entered_as_a_dataset(diary):
    class Feed(Source):
        async def __aiter__(self):
            yield 1

    class Around(hr.AsyncDataset):
        def __init__(self):
            self.feed = Feed(diary)

        def __len__(self):
            return 1

        async def aget(self, index):
            return index

    with hr.DataLoader(Around()) as loader:
        list(loader)
    assert diary.read() == []


@PLACEMENTS
def test_error_of_aenter_is_raised_once_and_names_the_dataset(diary, options):
    class Refused(Rows):
        async def __aenter__(self):
            raise ConnectionRefusedError("no such server")

    with hr.DataLoader(Refused(diary), batch_size=4, on_error="skip", **options) as loader:
        batches = iter(loader)
        with pytest.raises(ConnectionRefusedError, match="no such server") as caught:
            next(batches)
        assert "__aenter__ of dataset Refused" in "".join(caught.value.__notes__)
        with pytest.raises((StopIteration, hr.errors.LoaderClosedError)):
            next(batches)
    with pytest.raises(ConnectionRefusedError, match="no such server"):
        Refused(diary)[0]


def test_error_of_aexit_is_a_warning(diary):
    class Stuck(Rows):
        async def __aexit__(self, *error):
            raise OSError("broken pipe")

    loader = hr.DataLoader(Stuck(diary), batch_size=4)
    list(loader)
    with pytest.warns(RuntimeWarning, match="closing dataset Stuck failed: OSError: broken pipe"):
        loader.close()


def test_close_during_aenter_cancels_it(diary):
    entering = threading.Event()

    class Slow(Rows):
        async def __aenter__(self):
            entering.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.diary.note("cancelled")

    loader = hr.DataLoader(Slow(diary), batch_size=4)
    batches = iter(loader)
    assert entering.wait(10)
    loader.close()
    assert diary.read() == [("cancelled",)]
    with pytest.raises(hr.errors.LoaderClosedError):
        next(batches)


def test_attributes_set_by_aenter_are_not_pickled(diary):
    class Early(Rows):
        def __init__(self, diary):
            super().__init__(diary)
            self.connection = None

        async def __aenter__(self):
            assert self.connection is None
            return await super().__aenter__()

    dataset = Early(diary)
    assert dataset[0] == 0
    with hr.DataLoader(dataset, batch_size=4, num_workers=1, placement="process") as loader:
        assert samples_of(loader) == list(range(8))
    assert dataset[1] == 1


def test_many_loaders_and_threads_at_once(diary):
    dataset = Rows(diary, length=32)
    dataset[0]
    failed = []

    def read():
        try:
            for _ in range(5):
                with hr.DataLoader(dataset, batch_size=4) as loader:
                    assert samples_of(loader) == list(range(32))
                assert dataset[3] == 3
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    events = [event for event, _ in diary.read()]
    assert events[::2] == ["enter"] * len(events[::2])
    assert events[1::2] == ["exit"] * len(events[1::2])


def test_code_that_ignores_cancellation_warns_and_the_dataset_is_exited(diary):
    fetching, go = threading.Event(), threading.Event()

    class Stubborn(Rows):
        async def aget(self, index):
            fetching.set()
            while not go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.to_thread(go.wait)
            return index

    loader = hr.DataLoader(Stubborn(diary, length=1))
    batches = iter(loader)
    assert fetching.wait(10)
    with pytest.warns(RuntimeWarning, match="cancelled, and still running: 1 epoch"):
        loader.close()
    go.set()
    assert diary.read() == ONCE
    del batches
