"""The interface to an accelerator: all that the copies need of torch."""

from __future__ import annotations

from typing import Any

import torch

from headrace.errors import CudaGraphError, DeviceUnavailableError

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process
_NOT_COMPILED = (
    "this torch was built without it or has no streams for it, or no such device is visible"
)
_IDLE: dict[torch.device, list[torch.Stream]] = {}


class Streams:
    """One device's streams, and page-locked memory for its copies: any accelerator whose torch module has streams."""

    registers = False  # whether existing memory can be page-locked, by `register` and `unregister`

    def __init__(self, device: torch.device) -> None:
        self.device = device  # with its index
        self._module: Any = torch.get_device_module(device)

    def check(self) -> None:
        """Raise `CudaGraphError` while the current stream is being captured."""

    def side(self) -> Any:
        """A separate stream for copies, one of an earlier epoch if there is one.

        The allocator keeps free memory by stream: memory freed on the stream of an epoch would be
        lost to the next.
        """
        try:
            return _IDLE[self.device].pop()
        except (KeyError, IndexError):
            return self._module.Stream(device=self.device)

    def rest(self, stream: torch.Stream) -> None:
        """Return a stream of `side`, with no work left, for reuse."""
        _IDLE.setdefault(self.device, []).append(stream)

    def current(self) -> Any:
        return self._module.current_stream(self.device)

    def on(self, stream: torch.Stream) -> Any:
        return self._module.stream(stream)

    def place(self, host: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
        """Enqueue a copy of `host` on `stream`; returns the copy."""
        with self.on(stream):
            return host.to(self.device, non_blocking=True)

    def used_on(self, placed: Any, stream: torch.Stream) -> None:
        """Notify the allocator that `stream` uses memory of another stream."""
        placed.record_stream(stream)

    def pinned(self, size: int) -> torch.Tensor:
        """`size` bytes of page-locked memory; raises RuntimeError if there are none."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, address: int, size: int) -> None:
        """Page-lock existing memory; raises RuntimeError if that is refused. Called where `registers`, as the next."""

    def unregister(self, address: int) -> None:
        """End that."""


class CudaStreams(Streams):
    """CUDA, which can page-lock slabs in place."""

    registers = (
        torch.version.hip is None
    )  # the generic way serves ROCm, where this has not been tried

    def check(self) -> None:
        """As above, also on the caller's current device, if that is another."""
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise CudaGraphError

    def register(self, address: int, size: int) -> None:
        # On this device: if a process of a DDP job has not set the current one, that would allocate
        # some hundred megabytes on the first GPU.
        with torch.cuda.device(self.device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            refused = int(runtime.cudaHostRegister(address, size, _PORTABLE))
            if refused:
                self._clear_error()
                raise RuntimeError(
                    f"cudaHostRegister of {size} bytes failed with CUDA error {refused}"
                )

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostUnregister(address)):
                self._clear_error()

    def _clear_error(self) -> None:
        # The runtime keeps the last error until it is read: by the next kernel that torch launches,
        # which would raise it in the user's code.
        try:
            torch.zeros(1, device=self.device).add_(1)
        except RuntimeError:  # the error to be cleared
            return


def resolve(device: torch.device | str | int | None) -> torch.device | None:
    """The accelerator that batches are copied to; None if they stay in host memory."""
    if device is None:
        return None
    if device == "auto":
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        return (
            accelerator
            if accelerator and hasattr(torch.get_device_module(accelerator), "Stream")
            else None
        )
    resolved = torch.device(device)
    if resolved.type == "cpu":
        return None
    module: Any = getattr(torch, resolved.type, None)
    if module is None or not hasattr(module, "Stream") or not module.is_available():
        raise DeviceUnavailableError(device=str(resolved), reason=_NOT_COMPILED)
    count = module.device_count()
    if resolved.index is not None and resolved.index >= count:
        raise DeviceUnavailableError(
            device=str(resolved), reason=f"there are {count}, numbered from 0"
        )
    return resolved


def streams_of(device: torch.device) -> Streams:
    """The streams of `device`; of the current device of its type, if it has no index."""
    index: int | None = device.index  # which torch's stubs leave out
    if index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return CudaStreams(device) if device.type == "cuda" else Streams(device)
