"""Every door out of an epoch leaves nothing behind: no thread, process, descriptor or task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

LOOPS = pytest.mark.parametrize("engine_loop", ["uvloop", "asyncio"])
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def test_the_oracle_sees_what_is_left_behind(script: Callable[..., Any]) -> None:
    def program() -> None:
        import subprocess
        leaks = {
            "a descriptor": lambda: os.dup(1),
            "a thread": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
            "a process": lambda: kept.append(subprocess.Popen(["sleep", "60"])),
        }
        kept = []
        for name, leak in leaks.items():
            try:
                with watch():
                    leak()
            except AssertionError:
                print("seen:", name)
        kept[0].kill()
        kept[0].wait()

    done = script(program)
    assert done.stdout.splitlines() == ["seen: a descriptor", "seen: a thread", "seen: a process"]


@LOOPS
@WORKERS
def test_break_out_of_a_for_loop(script: Callable[..., Any], workers: int, engine_loop: str) -> None:
    def program() -> None:
        def leave():
            loader = hr.DataLoader(Slow(), batch_size=4, num_workers=workers, transform=negate)
            for batch in loader:
                break
            return batch.tolist()

        leave()  # the zygote and native threads that stay for the life of the process
        with watch():
            assert leave() == [0, -1, -2, -3]

    script(program, engine_loop=engine_loop)


@LOOPS
@WORKERS
def test_break_out_of_an_async_for_loop(script: Callable[..., Any], workers: int, engine_loop: str) -> None:
    def program() -> None:
        async def leave():
            loader = hr.DataLoader(Slow(), batch_size=4, num_workers=workers, transform=negate)
            async for batch in loader:
                break
            del loader
            gc.collect()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not others, others
            return batch.tolist()

        asyncio.run(leave())
        with watch():
            assert asyncio.run(leave()) == [0, -1, -2, -3]

    script(program, engine_loop=engine_loop)


@WORKERS
def test_an_abandoned_iterator(script: Callable[..., Any], workers: int) -> None:
    def program() -> None:
        def abandon():
            iterator = iter(hr.DataLoader(Slow(), batch_size=4, num_workers=workers))
            next(iterator)
            cycle = [iterator]
            cycle.append(cycle)  # only the collector finds it

        abandon()
        gc.collect()
        with watch():
            abandon()

    script(program)


@WORKERS
def test_an_iterator_that_was_never_asked_for_a_batch(script: Callable[..., Any], workers: int) -> None:
    def program() -> None:
        def start():
            iter(hr.DataLoader(Slow(), batch_size=4, num_workers=workers))
            aiter(hr.DataLoader(Slow(), batch_size=4, num_workers=workers))

        start()
        with watch():
            start()

    script(program)


@WORKERS
def test_an_exception_with_the_iterator_held_in_its_traceback(script: Callable[..., Any], workers: int) -> None:
    def program() -> None:
        def fail():
            iterator = iter(hr.DataLoader(Slow(), batch_size=4, num_workers=workers))
            next(iterator)
            raise KeyError("the training step")

        def survive():
            try:
                fail()
            except KeyError as error:
                kept = error
            del kept

        survive()
        with watch():
            survive()

    script(program)


@WORKERS
def test_close_and_aclose_in_mid_epoch(script: Callable[..., Any], workers: int) -> None:
    def program() -> None:
        async def leave():
            async with hr.DataLoader(Slow(), batch_size=4, num_workers=workers) as loader:
                stream, iterator = aiter(loader), iter(loader)
                await anext(stream)
                next(iterator)
            for ask in (lambda: anext(stream), lambda: asyncio.to_thread(next, iterator)):
                try:
                    await ask()
                except hr.LoaderClosedError:
                    continue
                raise AssertionError("a closed iterator gave a batch")

        asyncio.run(leave())
        with watch():
            asyncio.run(leave())

    script(program)


@WORKERS
def test_a_finished_epoch_leaves_only_what_the_loader_owns(script: Callable[..., Any], workers: int) -> None:
    def program() -> None:
        def run():
            with hr.DataLoader(Slow(16), batch_size=4, num_workers=workers, transform=negate) as loader:
                counted = collections.Counter(-x for _ in range(2) for batch in loader for x in batch.tolist())
            assert counted == dict.fromkeys(range(16), 2), counted

        run()
        with watch():
            run()

    script(program)


@pytest.mark.parametrize("how", ["", "sys.exit(0)", "raise KeyError('a training step that fails')"])
@WORKERS
def test_interpreter_exit_in_mid_epoch(script: Callable[..., Any], workers: int, how: str) -> None:
    def program() -> None:
        loader = hr.DataLoader(Slow(), batch_size=4, num_workers=workers)
        iterator = iter(loader)
        stream = aiter(loader)
        next(iterator)
        print(os.getpid(), *workers(), flush=True)
        how

    done = script(program, status=1 if "raise" in how else 0, quiet="raise" not in how)
    assert "Exception ignored" not in done.stderr
    for pid in map(int, done.stdout.split()):
        assert not _is_alive(pid)


def test_a_torch_dataset_with_workers_leaves_as_torch_does(script: Callable[..., Any]) -> None:
    def program() -> None:
        class Table:
            def __len__(self): return 64
            def __getitem__(self, index): return index

        def leave():
            for batch in hr.DataLoader(Table(), batch_size=4, num_workers=2):
                break
            assert batch.tolist() == [0, 1, 2, 3]
            assert len(list(hr.DataLoader(Table(), batch_size=4, num_workers=2))) == 16

        leave()
        with watch():
            leave()

    script(program)


def test_two_hundred_starts_and_breaks_leave_everything_as_it_was(script: Callable[..., Any]) -> None:
    def program() -> None:
        kept = hr.DataLoader(Slow(), batch_size=4)
        working = hr.DataLoader(Slow(), batch_size=4, num_workers=2, transform=negate)

        def start_take_three_and_break(loader):
            for number, batch in enumerate(loader, start=1):
                if number == 3:
                    break
            assert sorted(map(abs, batch.tolist())) == [8, 9, 10, 11]

        def once():
            start_take_three_and_break(kept)
            start_take_three_and_break(working)
            with hr.DataLoader(Slow(), batch_size=4) as fresh:
                start_take_three_and_break(fresh)

        once()
        with watch():
            for _ in range(200):
                once()

    script(program)


def test_a_loader_that_is_used_after_a_fork_says_so_or_starts_anew(script: Callable[..., Any]) -> None:
    def program() -> None:
        loader = hr.DataLoader(Slow(8), batch_size=4)
        iterator = iter(loader)
        next(iterator)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
                loader.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert next(iterator).tolist() == [4, 5, 6, 7]
        loader.close()

    script(program)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("placement", "workers"), [("thread", 0), ("thread", 2), ("process", 2)])
def test_interpreter_exit_while_a_daemon_thread_iterates(
    script: Callable[..., Any], placement: str, workers: int
) -> None:
    def program() -> None:
        os.environ["PYTHONWARNINGS"] = "default"  # for the processes that it starts
        loader = hr.DataLoader(Slow(100_000), 4, num_workers=workers, transform=negate, placement=placement)
        under_way = threading.Event()

        def iterate():
            for batch in loader:
                under_way.set()

        threading.Thread(target=iterate, daemon=True).start()
        under_way.wait()

    done = script(program, quiet=False)
    assert "ResourceWarning" not in done.stderr, done.stderr
    assert "LostBatchError" not in done.stderr, done.stderr
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    assert all(line.startswith("headrace.errors.LoaderClosedError") for line in errors), done.stderr
