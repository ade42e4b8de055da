"""Every end of a program exits entered datasets, and closes resources of a loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from tests.faults.watching import Slow, workers

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


class Connected(Slow):
    """Prints when it is entered and exited, and when a resource of a loop is opened and closed."""

    def __init__(self):
        super().__init__()
        self.pool = hr.per_loop(lambda: note("open"), close=lambda _: note("close"))

    async def __aenter__(self):
        note("enter")

    async def __aexit__(self, *error):
        note("exit")

    async def aget(self, index):
        await self.pool()
        return await super().aget(index)


def note(event):
    os.write(1, event.encode() + b"\n")


ALL_EVENTS = ["close", "enter", "exit", "open"]


def _events(done: Any) -> list[str]:
    events: list[str] = [word for word in done.stdout.split() if not word.isdigit()]
    assert events.index("open") < events.index("close")
    assert events.index("enter") < events.index("exit")
    return sorted(events)


@pytest.mark.parametrize(("num_workers", "end"), [(0, "return"), (2, "error")])
def test_interpreter_exit_in_mid_epoch_exits_the_dataset_and_ends_all_processes(
    script: Callable[..., Any], num_workers: int, end: str
) -> None:
    def program() -> None:
        import __main__

        __main__.loader = hr.DataLoader(Connected(), batch_size=4, num_workers=num_workers)
        __main__.iterator = iter(__main__.loader)
        __main__.stream = aiter(__main__.loader)
        next(__main__.iterator)
        print(os.getpid(), *workers(), flush=True)
        assert end == "return"

    done = script(program, status=1 if end == "error" else 0, quiet=end != "error")
    assert _events(done) == ALL_EVENTS
    assert "Exception ignored" not in done.stderr
    assert not [pid for pid in filter(str.isdigit, done.stdout.split()) if _is_alive(int(pid))]


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_interpreter_exit_exits_an_indexed_dataset(script: Callable[..., Any]) -> None:
    assert _events(script(lambda: Connected()[3])) == ALL_EVENTS


def test_keyboard_interrupt_exits_the_dataset(script: Callable[..., Any]) -> None:
    def program() -> None:
        loader = hr.DataLoader(Connected(), batch_size=4)
        for _ in loader:
            os.kill(os.getpid(), signal.SIGINT)

    done = script(program, status=-2, quiet=False)
    assert _events(done) == ALL_EVENTS


def test_loaders_of_an_entered_dataset_leave_nothing(case: Callable[..., Any]) -> None:
    def program() -> None:
        for number in (0, 1):
            dataset = Connected()
            assert dataset[1] == 1
            for _ in range(2):
                with hr.DataLoader(dataset, batch_size=4, num_workers=number) as loader:
                    assert len(list(loader)) == 16

    case(program)
