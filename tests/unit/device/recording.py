"""A device in host memory, behind the interface of `headrace._device.streams`: work is done when a test says so.

A copy reads its source when its stream comes to it, and not when it is enqueued: memory that is
written to too early gives a wrong byte here as it does on a device.
"""

import weakref
from collections import deque
from contextlib import contextmanager

import torch

from headrace import loader as loading
from headrace._consumer import control
from headrace._device import copy
from headrace._device.copy import Registry
from headrace.errors import CudaGraphError
from tests.datasets import Numbers

ELEMENTS = 20_000  # 160 KB a sample: batches go in slabs


class Rows(Numbers):
    async def aget(self, index):
        return torch.full((ELEMENTS,), index)


def use(monkeypatch, streams):
    """Loaders with `device=` get `streams`, and a registry of their own."""
    registry = Registry()
    monkeypatch.setattr(loading, "resolve", lambda device: device)
    monkeypatch.setattr(control, "streams_of", lambda device: streams)
    monkeypatch.setattr(control, "Copier", lambda streams: copy.Copier(streams, registry))


class Stream:
    def __init__(self, name, log):
        self.name = name
        self.log = log
        self.work = deque()
        self.dead = False

    def fail_if_dead(self):
        if self.dead:
            raise RuntimeError("the device has failed")

    def record_event(self):
        self.log.append(("event", self.name))
        return Event(self)

    def wait_event(self, event):
        self.log.append(("wait", self.name))
        self.work.append(lambda: None if event.passed else False)

    def run(self, steps=None):
        """Do the work that was enqueued, or so many steps of it; stops at an event that has not passed."""
        while self.work and steps != 0:
            if self.work[0]() is False:
                return
            self.work.popleft()
            steps = None if steps is None else steps - 1


class Event:
    def __init__(self, stream):
        self.stream = stream
        self.passed = False
        stream.work.append(self._pass)

    def _pass(self):
        self.passed = True

    def query(self):
        self.stream.fail_if_dead()
        return self.passed

    def synchronize(self):
        self.stream.fail_if_dead()
        self.stream.run()
        assert self.passed


class RecordingStreams:
    device, registers = torch.device("cpu"), True

    def __init__(self, *, locked=None):
        self.locked = locked  # bytes that may be page-locked; None for no limit
        self.log = []
        self.consumer = self._current = Stream("consumer", self.log)
        self.sides = []
        self.resting = []
        self.copied = []  # the size of each copy, in bytes
        self.registered = {}
        self.pinned_count = 0
        self.held = []  # references to pinned memory
        self.capturing = False
        self.broken_at = None
        self.users = []

    def check(self):
        if self.capturing:
            raise CudaGraphError

    def side(self):
        if self.resting:
            return self.resting.pop()
        self.sides.append(Stream("side", self.log))
        return self.sides[-1]

    def rest(self, stream):
        assert not stream.work
        self.resting.append(stream)

    def current(self):
        return self._current

    @contextmanager
    def on(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def place(self, host, stream):
        if self.broken_at == len(self.copied):
            self.copied.append(0)
            raise RuntimeError("out of memory on the device")
        there = torch.full_like(host, 0xEE)
        self.copied.append(host.nbytes)
        self.log.append(("copy", stream.name))
        source = next((held for held in self.held if held() is host), lambda: host)
        # which fails if pinned memory was dropped before
        stream.work.append(lambda: (there.copy_(source()), None)[1])
        return there

    def used_on(self, placed, stream):
        self.log.append(("used on", stream.name))
        self.users.append((placed, stream))

    def pinned(self, size):
        if self.locked is not None and size > self.locked:
            raise RuntimeError("no more memory can be locked")
        self.pinned_count += 1
        memory = torch.empty(size, dtype=torch.uint8)
        self.held.append(weakref.ref(memory))
        return memory

    def register(self, address, size):
        if self.locked is not None and size > self.locked:
            raise RuntimeError("no more memory can be locked")
        assert address not in self.registered
        self.registered[address] = size

    def unregister(self, address):
        del self.registered[address]
