"""What `gpu_copy.py` asks of a GPU; and a stand-in in host memory, on which it can be rehearsed where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headrace import loader as loading
from headrace._consumer import control
from headrace._device.streams import Streams

__all__ = ["Gpu", "StandIn"]


class Gpu:
    """One CUDA device."""

    device = "cuda"
    pins = True

    def name(self) -> str:
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device takes for what `work` enqueues."""
        begin, end = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def wait_for(self, stream: Any) -> None:
        """Let the current stream wait for what `stream` has to do so far."""
        torch.cuda.current_stream().wait_stream(stream)

    def used_here(self, tensor: torch.Tensor) -> None:
        """Say that the current stream uses what another one allocated."""
        tensor.record_stream(torch.cuda.current_stream())


class StandIn:
    """The same in host memory: every path is taken, and its times mean nothing."""

    device = "cpu"
    pins = False

    def __init__(self) -> None:
        # Two seams of the loader: any device is host memory, and has one stream.
        loading.resolve = lambda device: None if device is None else torch.device("cpu")
        control.streams_of = _HostStreams

    def name(self) -> str:
        return "no GPU: a rehearsal in host memory, whose times mean nothing"

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def stream(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait_for(self, stream: Any) -> None:
        pass

    def used_here(self, tensor: torch.Tensor) -> None:
        pass


class _InOrder:
    """A stream whose work is done when the call that enqueues it returns, and its events."""

    def record_event(self) -> Any:
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _HostStreams(Streams):
    """Copies from where batches lie, as CUDA does."""

    registers = True

    def side(self) -> Any:
        return _InOrder()

    def rest(self, stream: Any) -> None:
        pass

    def current(self) -> Any:
        return _InOrder()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def place(self, host: torch.Tensor, stream: Any) -> torch.Tensor:
        return host.clone()

    def used_on(self, placed: Any, stream: Any) -> None:
        pass

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def register(self, address: int, size: int) -> None:
        """It need not be page-locked."""

    def unregister(self, address: int) -> None:
        pass
