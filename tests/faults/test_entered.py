"""Entered datasets are exited, and resources of a loop are closed, at every end of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="the oracle reads /proc")

CONNECTED = """
def note(event):
    os.write(1, event.encode() + b"\\n")

class Connected(Slow):
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
"""
WHOLE = ["close", "enter", "exit", "open"]
WAYS = pytest.mark.parametrize("how", ["", "sys.exit(0)", "raise KeyError('a training step that fails')"])


def _events(done: Any) -> list[str]:
    events: list[str] = done.stdout.split()
    assert events.index("open") < events.index("close")
    assert events.index("enter") < events.index("exit")
    return sorted(events)


@WAYS
@pytest.mark.parametrize("workers", [0, 2])
def test_interpreter_exit_in_mid_epoch_exits_the_dataset(script: Callable[..., Any], workers: int, how: str) -> None:
    done = script(
        f"""
        {CONNECTED.replace(chr(10), chr(10) + " " * 8)}
        loader = hr.DataLoader(Connected(), batch_size=4, num_workers={workers})
        iterator = iter(loader)
        next(iterator)
        {how}
        """,
        status=1 if "raise" in how else 0,
        quiet="raise" not in how,
    )
    assert _events(done) == WHOLE


@WAYS
def test_interpreter_exit_exits_a_dataset_that_was_indexed(script: Callable[..., Any], how: str) -> None:
    done = script(
        f"""
        {CONNECTED.replace(chr(10), chr(10) + " " * 8)}
        Connected()[3]
        {how}
        """,
        status=1 if "raise" in how else 0,
        quiet="raise" not in how,
    )
    assert _events(done) == WHOLE


def test_interrupted_loop_exits_the_dataset(script: Callable[..., Any]) -> None:
    done = script(
        f"""
        {CONNECTED.replace(chr(10), chr(10) + " " * 8)}
        loader = hr.DataLoader(Connected(), batch_size=4)
        for _ in loader:
            os.kill(os.getpid(), signal.SIGINT)
        """,
        status=-2,
        quiet=False,
    )
    assert _events(done) == WHOLE


def test_loaders_of_an_entered_dataset_leave_nothing_behind(script: Callable[..., Any]) -> None:
    script(
        f"""
        {CONNECTED.replace(chr(10), chr(10) + " " * 8)}
        def use(number):
            dataset = Connected()
            assert dataset[1] == 1
            for _ in range(2):
                with hr.DataLoader(dataset, batch_size=4, num_workers=number) as loader:
                    assert len(list(loader)) == 16

        for number in (0, 1):
            use(number)
        with watch():
            for number in (0, 1):
                use(number)
        """
    )
