"""Channels: objects arrive complete and in order; the end of a channel is reported."""

import asyncio

import pytest
import torch

from headrace._transport.channel import (
    BlockingChannel,
    Connection,
    Disconnected,
    EngineChannel,
)
from headrace.testing import same


@pytest.mark.parametrize("sent", [0, 1000])
def test_nothing_follows_a_message_whose_sending_was_interrupted(monkeypatch, sent):
    ours, theirs = Connection.pair()
    sender, receiver = BlockingChannel(ours), BlockingChannel(theirs)

    def interrupted(pieces):
        ours.frames.send(b"".join(pieces)[:sent])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sender, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.send([*range(10_000)])
    with pytest.raises(BrokenPipeError):
        sender.send("the next message")
    with pytest.raises(Disconnected):
        receiver.receive()
    receiver.send("an answer")
    assert sender.receive() == "an answer"
    sender.close()
    receiver.close()


class CannotArrive:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ValueError("not here")


def test_object_that_cannot_be_unpickled_arrives_as_its_error(on_loop):
    async def scenario():
        ours, theirs = Connection.pair()
        received = asyncio.Queue()
        channel = EngineChannel(ours, received.put_nowait, asyncio.Event().set)
        worker = BlockingChannel(theirs)
        worker.send(CannotArrive())
        worker.send([torch.ones(2)])
        assert isinstance(await received.get(), ValueError)
        assert same(await received.get(), [torch.ones(2)])
        channel.close()
        worker.close()

    on_loop(scenario)


def test_objects_received_before_the_end_are_delivered_before_it():
    ours, theirs = Connection.pair()
    sender, receiver = BlockingChannel(ours), BlockingChannel(theirs)
    sender.send(b"x" * 60_000)
    around = len(theirs.frames.recv(100_000)) - 60_000
    # a frame that fills what is read in one call, so that another read follows
    filling = b"x" * (64 * 1024 - around)
    sender.send(filling)
    sender.close()
    arrived = receiver.receive_ready()
    assert next(arrived) == filling
    with pytest.raises(EOFError):
        next(arrived)
    receiver.close()
