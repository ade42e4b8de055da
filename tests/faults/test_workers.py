"""Whatever user code does to a worker, or a worker to itself: the epoch goes on, or ends in one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="the oracle reads /proc")

PLACEMENTS = pytest.mark.parametrize("placement", ["thread", "process"])

DEATHS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
    "code 0": "os._exit(0)",
}


@PLACEMENTS
def test_an_exception_says_where_it_happened_and_costs_only_its_batch(case: Any, placement: str) -> None:
    case(
        """
        class Fails(Numbers):
            async def aget(self, index):
                if index == 5 and where == "aget":
                    raise LookupError("the seventh seal")
                return index

        def transform(index):
            if index == 5 and where == "transform":
                raise LookupError("the seventh seal")
            return index

        def collate(samples):
            if 5 in samples and where == "collate":
                raise LookupError("the seventh seal")
            return torch.tensor(samples)

        stages = {
            "aget": "stage fetch, batch 1, index 5",
            "transform": "stage transform, batch 1, index 5, worker",
            "collate": "stage collate, batch 1, indices [4, 5, 6, 7], worker",
        }
        for where, told_as in stages.items():
            with hr.DataLoader(
                Fails(), 4, num_workers=2, transform=transform, collate_fn=collate, placement=placement
            ) as loader:
                delivered, (error,) = drain(loader)
            assert type(error) is LookupError, error
            assert "the seventh seal" in told(error), told(error)
            assert told_as in told(error), told(error)
            assert delivered == once_each(range(4), range(8, 32)), (where, delivered)
        """,
        placement=placement,
    )


@PLACEMENTS
def test_an_exception_of_the_sampler_comes_behind_the_batches_before_it(case: Any, placement: str) -> None:
    case(
        """
        class Fails:
            def __iter__(self):
                yield from range(8)
                raise LookupError("no more")

        with hr.DataLoader(Numbers(), 4, sampler=Fails(), num_workers=2, placement=placement) as loader:
            delivered, (error,) = drain(loader)
        assert type(error) is LookupError, error
        assert "stage sampling, batch 2" in told(error), told(error)
        assert delivered == once_each(range(8)), delivered
        """,
        placement=placement,
    )


@PLACEMENTS
def test_an_exception_of_worker_init_fn_is_what_every_batch_says(case: Any, placement: str) -> None:
    case(
        """
        def initialise(worker):
            raise LookupError(f"no licence for worker {worker}")

        with hr.DataLoader(
            Numbers(16), 4, num_workers=2, transform=negate, worker_init_fn=initialise, placement=placement
        ) as loader:
            delivered, errors = drain(loader)
        assert not delivered, delivered
        assert len(errors) == 4, errors
        for error in errors:
            assert type(error) is LookupError, error
            assert "stage worker start" in told(error), told(error)
        """,
        placement=placement,
    )


@PLACEMENTS
def test_an_exception_of_a_stream_ends_the_stream_or_costs_what_its_batch_had_read(case: Any, placement: str) -> None:
    case(
        """
        class NeverBegins:
            def __aiter__(self):
                raise LookupError("no stream")

        class Stumbles:
            def __init__(self):
                self.position = -1

            def __aiter__(self):
                return type(self)()

            async def __anext__(self):
                self.position += 1
                if self.position == 5:
                    raise LookupError("one sample")
                if self.position == 16:
                    raise StopAsyncIteration
                return self.position

        for dataset, kept in (NeverBegins(), ()), (Stumbles(), (range(4), range(6, 16))):
            with hr.DataLoader(dataset, 4, num_workers=2, transform=abs, placement=placement) as loader:
                delivered, (error,) = drain(loader)
            assert type(error) is LookupError, error
            assert "stage fetch" in told(error), told(error)
            assert delivered == once_each(*kept), delivered
        """,
        placement=placement,
    )


@pytest.mark.parametrize("death", DEATHS)
@PLACEMENTS
def test_a_worker_that_dies_once_in_mid_transform_costs_nothing(
    case: Any, placement: str, death: str, tmp_path: Path
) -> None:
    case(
        f"""
        def transform(index):
            if index == 5 and first_time(marker):
                {DEATHS[death]}
            return index

        with hr.DataLoader(Numbers(), 4, num_workers=2, transform=transform, placement=placement) as loader:
            delivered, errors = drain(loader)
        assert os.path.exists(marker)
        assert not errors, errors
        assert delivered == once_each(range(32)), delivered
        """,
        placement=placement,
        marker=str(tmp_path / "died"),
    )


@pytest.mark.parametrize("death", DEATHS)
@PLACEMENTS
def test_a_sample_that_always_kills_is_named_and_costs_only_its_batch(case: Any, placement: str, death: str) -> None:
    case(
        f"""
        def transform(index):
            if index == 5:
                {DEATHS[death]}
            return index

        for on_error in ("raise", "skip"):
            with hr.DataLoader(
                Numbers(), 4, num_workers=2, transform=transform, placement=placement, on_error=on_error
            ) as loader:
                delivered, errors = drain(loader)
                skipped = loader.stats().skipped
            assert bool(errors) == (on_error == "raise"), (errors, skipped)
            if not errors:
                (record,) = skipped
                assert (record.error, record.batch) == ("WorkerDiedError", 1), record
                assert "on batch 1, indices [4, 5, 6, 7], attempt 2" in record.message, record
                continue
            (error,) = errors
            assert type(error) is hr.WorkerDiedError, error
            assert error.batch == 1, error.batch
            assert error.indices == (4, 5, 6, 7), error.indices
            assert error.worker in (0, 1), error.worker
            for words in (death, f"worker {{error.worker}} ", "on batch 1, indices [4, 5, 6, 7], attempt 2"):
                assert words in str(error), error
            assert delivered == once_each(range(4), range(8, 32)), delivered
        """,
        placement=placement,
        death=death,
    )


@PLACEMENTS
def test_samples_that_kill_one_after_the_other_do_not_break_the_pool(case: Any, placement: str) -> None:
    case(
        """
        def transform(index):
            if index < 24:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

        with hr.DataLoader(Numbers(), 4, num_workers=2, transform=transform, placement=placement) as loader:
            delivered, errors = drain(loader)
        assert [(type(error), error.batch) for error in errors] == [(hr.WorkerDiedError, n) for n in range(6)], errors
        assert delivered == once_each(range(24, 32)), delivered
        """,
        placement=placement,
    )


@PLACEMENTS
def test_workers_killed_while_idle_are_replaced(case: Any, placement: str) -> None:
    case(
        """
        with hr.DataLoader(Numbers(), 4, num_workers=2, transform=abs, placement=placement) as loader:
            for _ in range(3):
                delivered, errors = drain(loader)
                assert not errors, errors
                assert delivered == once_each(range(32)), delivered
                until(lambda: len(workers()) == 2 + (placement == "process"))  # the replacements of the last round
                idle = [pid for pid in workers() if placement == "thread" or pid != sidecar(loader)]
                assert len(idle) == 2, idle
                kill(*idle)
        """,
        placement=placement,
    )


@PLACEMENTS
def test_a_worker_that_dies_while_it_writes_a_batch_costs_nothing(case: Any, placement: str, tmp_path: Path) -> None:
    case(
        """
        import socket

        def die():
            os.kill(os.getpid(), signal.SIGKILL)

        class DiesStacked(torch.Tensor):
            # The field before it is already in the slab.
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                if function is torch.stack and first_time(marker):
                    die()
                return super().__torch_function__(function, types, args, kwargs or {})

        class DiesPickled:
            def __reduce__(self):
                if first_time(marker):
                    die()
                return DiesPickled, ()

        def filled(index):
            return torch.full((64, 1024), index)

        def two_fields(index):
            return filled(index), (torch.ones(8).as_subclass(DiesStacked) if index == 5 else torch.ones(8))

        def with_a_friend(samples):
            friend = DiesPickled() if 5 in samples else None
            return torch.stack([filled(index) for index in samples]), friend

        def no_slabs_and_half_a_frame(worker):
            def sendmsg(self, pieces):
                if sum(map(len, pieces)) > 100_000 and first_time(marker):
                    self.send(pieces[0])
                    die()
                return send(self, pieces)

            def no_memory(*_):
                raise OSError(28, "No space left on device")

            send, socket.socket.sendmsg = socket.socket.sendmsg, sendmsg
            os.memfd_create = no_memory

        writes = {
            "a field into its slab": {"transform": two_fields},
            "the pickle of a batch": {"collate_fn": with_a_friend},
            "half of a frame": {"transform": filled, "worker_init_fn": no_slabs_and_half_a_frame},
        }
        for write, arguments in writes.items():
            marker = os.path.join(folder, write)
            with hr.DataLoader(Numbers(), 4, num_workers=2, placement=placement, **arguments) as loader:
                delivered = collections.Counter()
                for batch in loader:
                    tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
                    assert (tensor == tensor[:, :1, :1]).all(), write
                    delivered.update(tensor[:, 0, 0].tolist())
            assert os.path.exists(marker), write
            assert delivered == once_each(range(32)), (write, delivered)
        """,
        placement=placement,
        folder=str(tmp_path),
    )


@pytest.mark.parametrize(
    "stop", ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()", "StopIteration()", "StopAsyncIteration()"]
)
@PLACEMENTS
def test_a_stop_of_user_code_is_an_error_and_stops_nothing(case: Any, placement: str, stop: str) -> None:
    case(
        f"""
        class Stops(Numbers):
            async def aget(self, index):
                if index == 1:
                    raise {stop}
                return index

        def transform(index):
            if index == 5:
                raise {stop}
            return index

        def collate(samples):
            if 9 in samples:
                raise {stop}
            return torch.tensor(samples)

        def initialise(worker):
            if "worker_init_fn" in where:
                raise {stop}

        arguments = {{"num_workers": 2, "transform": transform, "collate_fn": collate, "worker_init_fn": initialise}}
        with hr.DataLoader(Stops(), 4, placement=placement, **arguments) as loader:
            where = ()
            delivered, errors = drain(loader)
            assert delivered == once_each(range(12, 32)), delivered
            before = [workers()]
            delivered, again = drain(loader)
            assert delivered == once_each(range(12, 32)), delivered
            assert [workers()] == before, "a worker was replaced"
        for error, stage in zip(errors + again, ["fetch", "transform", "collate"] * 2, strict=True):
            # Python itself makes a RuntimeError of a coroutine's StopIteration.
            by_python = stage == "fetch" and "coroutine raised StopIteration" in str(error)
            assert by_python or (type(error) is hr.ControlFlowError and {stop!r} in str(error)), error
            assert f"stage {{stage}}" in told(error), told(error)

        where = ("worker_init_fn",)
        with hr.DataLoader(Numbers(8), 4, placement=placement, **arguments) as loader:
            delivered, errors = drain(loader)
        assert not delivered, delivered
        assert [type(error) for error in errors] == [hr.ControlFlowError] * 2, errors
        """,
        placement=placement,
    )


@PLACEMENTS
def test_what_cannot_be_pickled_is_named_and_costs_only_its_batch(case: Any, placement: str) -> None:
    case(
        """
        class Locks(Numbers):
            async def aget(self, index):
                return threading.Lock() if index == 1 else index

        class Refuses:
            def __reduce__(self):
                raise LookupError("not me")

        def transform(sample):
            return threading.Lock() if sample == 5 else Refuses() if sample == 9 else sample

        def collate(samples):
            return torch.tensor(samples) if all(isinstance(sample, int) for sample in samples) else samples

        with hr.DataLoader(
            Locks(), 4, num_workers=2, transform=transform, collate_fn=collate, placement=placement
        ) as loader:
            delivered, errors = drain(loader)
        assert delivered == once_each(range(12, 32)), delivered
        assert [type(error) for error in errors] == [hr.NotPicklableError] * 3, errors
        sample, lock, refusal = errors
        assert "a fetched sample cannot be pickled" in str(sample) and "lock" in str(sample), sample
        assert "what collate_fn returned cannot be pickled" in str(lock) and "lock" in str(lock), lock
        assert "not me" in str(refusal) and "batch 2" in told(refusal), refusal
        """,
        placement=placement,
    )


@PLACEMENTS
def test_of_an_exception_all_arrives_that_can_travel(case: Any, placement: str) -> None:
    case(
        """
        class TwoArguments(Exception):
            def __init__(self, one, two):
                super().__init__(f"one {one}, two {two}")

        class Holds(Exception):
            def __init__(self, held):
                super().__init__("it holds something")
                self.held = held

        class Dies(Exception):
            def __reduce__(self):
                raise SystemExit(3)

        class Speechless(Exception):
            def __init__(self):
                super().__init__()
                self.lock = threading.Lock()

            def __str__(self):
                raise ValueError("nor this")

        def fail(index):
            match index:
                case 1: raise TwoArguments(1, 2)
                case 5: raise Holds(threading.Lock())
                case 9: raise Holds(torch.full((1_000_000,), 7.0))
                case 13: raise Dies("oh")
                case 17: raise Speechless()
            return index

        class Fails(Numbers):
            async def aget(self, index):
                return fail(index)

        for dataset, transform in (Numbers(), fail), (Fails(), abs):
            with hr.DataLoader(dataset, 4, num_workers=2, transform=transform, placement=placement) as loader:
                delivered, errors = drain(loader)
            assert delivered == once_each(range(20, 32)), delivered
            two, lock, tensor, dies, speechless = errors
            if placement == "process" or transform is fail:  # else it has never left the process
                assert type(dies) is hr.RemoteError and "Dies: oh" in str(dies), dies
                assert type(speechless) is Speechless and not hasattr(speechless, "lock"), speechless
                assert "in fail" in told(two), told(two)
                assert not hasattr(lock, "held")
            assert (type(two), str(two)) == (TwoArguments, "one 1, two 2"), two
            assert (type(lock), str(lock)) == (Holds, "it holds something"), lock
            assert tensor.held.shape == (1_000_000,) and (tensor.held == 7).all()
            for number, error in enumerate(errors):
                assert f"batch {number}, index {number * 4 + 1}" in "".join(error.__notes__), error.__notes__
        """,
        placement=placement,
    )


@pytest.mark.parametrize("ignores", [False, True])
@PLACEMENTS
def test_a_worker_stuck_in_a_loop_is_gone_after_close(case: Any, placement: str, ignores: bool, tmp_path: Path) -> None:
    case(
        """
        def transform(index):
            if ignores:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if index >= 4:
                first_time(f"{folder}/{os.getpid()}")
                while True:
                    pass
            return index

        loader = hr.DataLoader(Numbers(), 4, num_workers=2, transform=transform, placement=placement)
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        until(lambda: len(os.listdir(folder)) == 2)
        loader.close()
        assert not workers(), workers()
        """,
        placement=placement,
        ignores=ignores,
        folder=str(tmp_path),
    )


@PLACEMENTS
def test_a_stopped_worker_is_gone_after_close(case: Any, placement: str) -> None:
    case(
        """
        def state(pid):
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]

        loader = hr.DataLoader(Numbers(), 4, num_workers=2, transform=abs, placement=placement)
        assert drain(loader) == (once_each(range(32)), [])
        until(lambda: len(workers()) == 2 + (placement == "process"))
        stopped = [pid for pid in workers() if placement == "thread" or pid != sidecar(loader)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(state(pid) == "T" for pid in stopped))
        iterator = iter(loader)  # they have work now, and do not get to it
        loader.close()
        assert not workers(), workers()
        """,
        placement=placement,
    )


@PLACEMENTS
def test_a_worker_out_of_memory_says_so_and_goes_on(case: Any, placement: str) -> None:
    case(
        """
        import resource

        def limit(worker):
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20, resource.RLIM_INFINITY))

        def transform(index):
            if index == 5:
                bytes(2**30)
            if index == 9:
                torch.zeros(2**28)
            return index

        with hr.DataLoader(
            Numbers(), 4, num_workers=2, transform=transform, worker_init_fn=limit, placement=placement
        ) as loader:
            delivered, (python, torch_) = drain(loader)
        assert type(python) is MemoryError, python
        assert "allocate memory" in str(torch_), torch_
        assert delivered == once_each(range(4), range(12, 32)), delivered
        """,
        placement=placement,
    )


@PLACEMENTS
def test_a_grandchild_that_outlives_its_worker_keeps_nothing_waiting(case: Any, placement: str, tmp_path: Path) -> None:
    case(
        """
        def transform(index):
            if index == 5 and first_time(marker):
                child = os.fork()
                if child == 0:
                    while True:
                        signal.pause()
                os.write(written, f"{child}\\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return index

        def initialise(worker):
            global written
            written = os.open(fifo, os.O_WRONLY)

        os.mkfifo(fifo)
        with open(os.open(fifo, os.O_RDWR)) as pids:
            with hr.DataLoader(
                Numbers(), 4, num_workers=2, transform=transform, worker_init_fn=initialise, placement=placement
            ) as loader:
                assert drain(loader) == (once_each(range(32)), [])
            grandchild = int(pids.readline())
        assert not workers(), workers()
        kill(grandchild)
        """,
        placement=placement,
        marker=str(tmp_path / "forked"),
        fifo=str(tmp_path / "pids"),
    )


@PLACEMENTS
def test_ten_megabytes_on_standard_error_are_passed_on(case: Any, placement: str) -> None:
    said = case(
        """
        def transform(index):
            if index == 5:
                sys.stderr.write("x" * 10_000_000 + "\\n")
            return index

        with hr.DataLoader(Numbers(), 4, num_workers=2, transform=transform, placement=placement) as loader:
            assert drain(loader) == (once_each(range(32)), [])
        """,
        placement=placement,
    )
    assert said.count("x") == 10_000_000


@PLACEMENTS
def test_workers_that_always_die_while_starting_end_in_one_error(case: Any, placement: str, tmp_path: Path) -> None:
    case(
        """
        def initialise(worker):
            first_time(f"{folder}/{os.getpid()}")
            os._exit(3)

        with hr.DataLoader(
            Numbers(), 4, num_workers=2, transform=abs, worker_init_fn=initialise, placement=placement
        ) as loader:
            delivered, errors = drain(loader)
        assert not delivered, delivered
        assert len(os.listdir(folder)) <= 6, "started too often"
        assert len(errors) == 8 and len({str(error) for error in errors}) == 1, errors
        assert type(errors[0]) is hr.WorkerDiedError and errors[0].batch is None, errors
        assert "exited with code 3 while starting, attempt 3" in str(errors[0]), errors
        """,
        placement=placement,
        folder=str(tmp_path),
    )


@PLACEMENTS
def test_an_array_that_is_changed_after_it_was_returned_does_not_change_the_batch(case: Any, placement: str) -> None:
    case(
        """
        array = torch.zeros(4, 32 * 1024, dtype=torch.int64)

        def collate(samples):
            return array.copy_(torch.tensor(samples)[:, None])

        for copies in (collate, lambda samples: collate(samples).numpy()):
            with hr.DataLoader(Numbers(), 4, num_workers=2, collate_fn=copies, placement=placement) as loader:
                for number, batch in enumerate(list(loader)):
                    expected = torch.arange(number * 4, number * 4 + 4)[:, None]
                    assert (torch.as_tensor(batch) == expected).all(), (number, batch)
        """,
        placement=placement,
    )
