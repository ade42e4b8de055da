"""Slabs between an allocator and a mapper: allocated, announced once, freed with the last view."""

import socket

import pytest
import torch

from headrace._transport.channel import BlockingChannel, Connection
from headrace._transport.pickling import dump_message
from headrace._transport.slabs import SLABS, Allocator, Mapper

pytestmark = pytest.mark.skipif(
    "not hasattr(os, 'memfd_create')", reason="slabs are memfds"
)

MEGABYTE = 2**20


@pytest.fixture
def allocator(pair):
    return Allocator(pair[0])


@pytest.fixture
def mapper(pair):
    return Mapper(pair[1])


def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "headrace-slab" in line}


def returned(allocator, mapper):
    allocator.free(mapper.returned())


def test_slabs_of_different_sizes_are_no_more_than_are_in_use_at_a_time(
    allocator, mapper
):
    others = mapped()  # of loaders whose errors other tests have kept
    for size in (1, 4, 2, 8, 1, 16):
        views = [
            mapper.view(allocator.allocate(size * MEGABYTE).number, 1) for _ in range(3)
        ]
        del views
        returned(allocator, mapper)
    assert len(mapped() - others) == 3
    assert len(mapper._slabs) == 3


def test_replaced_slab_is_replaced_for_the_receiver_of_a_forwarded_one(monkeypatch):
    monkeypatch.setattr("headrace._transport.slabs._forwards", True)

    def send_through(size):
        source.send(torch.full((size,), 7, dtype=torch.uint8))
        between = middle_in.receive()
        packed = dump_message(between)
        number, offsets, size = relay.forward(packed.buffers)
        view = mapper.view(number, size)
        assert view[offsets[0]] == 7
        relay_numbers.append(number)
        del view, between
        relay.free(mapper.returned())

    relay_numbers = []
    first, second = Connection.pair()
    source, middle_in = BlockingChannel(first), BlockingChannel(second)
    sockets = socket.socketpair()
    relay, mapper = Allocator(sockets[0]), Mapper(sockets[1])
    for step in range(SLABS + 16):
        send_through(int(40_000 * 1.13**step))  # each too large for every slab before it
        middle_in.send(None)
        source.receive()
    assert len(set(relay_numbers)) == SLABS + 16
    assert len(mapper._slabs) <= SLABS + 1
    for end in (source, middle_in, *sockets):
        end.close()
