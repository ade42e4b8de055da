"""`headrace.progress`: the bar of tqdm on real iterations."""

import asyncio
import gc
import io
import threading

import pytest

import headrace as hr
from tests.datasets import Numbers
from tests.unit.streams.reading import Count


@pytest.fixture
def file():
    """A file, in which no bar leaves a thread behind."""
    threads = {thread.name for thread in threading.enumerate()}
    yield io.StringIO()
    gc.collect()
    assert not [
        name
        for name in {thread.name for thread in threading.enumerate()} - threads
        if "headrace" not in name
    ]


def last_line(file):
    return file.getvalue().replace("\r", "\n").splitlines()[-1]


def test_bar_has_the_position_the_rate_the_waiting_share_and_the_limit(file):
    with pytest.raises(TypeError, match=r"needs a headrace\.DataLoader"):
        hr.progress([1, 2])
    with hr.DataLoader(Numbers(64), 4) as loader:
        line = hr.progress(loader, name="train", file=file)
        assert len(line) == 16
        for epoch in range(2):
            assert [batch.tolist() for batch in line] == [
                batch.tolist() for batch in hr.DataLoader(range(64), 4)
            ]
            last = last_line(file)
            assert last.startswith(f"train epoch {epoch}: 100%")
            assert " 16/16 " in last
            assert " samples/s, waiting " in last
            assert ", limit: " in last


def test_async_iteration_of_a_stream_without_length_has_the_bar_too(file):
    async def main():
        async with hr.DataLoader(Count(64), 4) as loader:
            with pytest.raises(TypeError):
                len(hr.progress(loader))
            return [batch async for batch in hr.progress(loader, file=file)]

    assert len(asyncio.run(main())) == 16
    assert last_line(file).startswith("epoch 0: 16batch")


def test_resumed_iteration_goes_on_with_the_number_and_the_bar_ends_when_it_is_dropped(file):
    with hr.DataLoader(Numbers(64), 4) as loader:
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        state = loader.state_dict()
    with hr.DataLoader(Numbers(64), 4) as loader:
        loader.load_state_dict(state)
        for _ in hr.progress(loader, file=file):
            break
        assert " 11/16 " in last_line(file)
        assert file.getvalue().endswith("\n")


def test_iteration_goes_on_after_an_error_of_a_batch(file):
    class Failing(Numbers):
        async def aget(self, index):
            if index == 5:
                raise ValueError("no such image")
            return index

    with hr.DataLoader(Failing(64), 4) as loader:
        batches = iter(hr.progress(loader, file=file))
        next(batches)
        with pytest.raises(ValueError, match="no such image"):
            next(batches)
        assert len(list(batches)) == 14
        del batches
        assert " 16/16 " in last_line(file)
        batches = iter(hr.progress(hr.DataLoader(Numbers(64), 4), file=file))
        next(batches)
        file.close()  # which does not end the iteration
        assert len(list(batches)) == 15


def test_other_ranks_show_nothing(file, as_rank):
    with hr.DataLoader(Numbers(64), 4, sampler=range(64)) as loader:
        for rank in (1, 0):
            as_rank(rank, 2)
            assert file.getvalue() == ""
            assert len(list(hr.progress(loader, file=file))) == 16
    assert file.getvalue()


def test_control_characters_of_a_name_do_not_reach_the_terminal(file):
    with hr.DataLoader(Numbers(64), 4) as loader:
        list(hr.progress(loader, name="\x1b]0;title\x07\nséa", file=file))
    assert not {"\x1b", "\x07"} & set(file.getvalue())
    assert last_line(file).startswith(r"\x1b]0;title\x07\nséa epoch 0")
