"""The interface to an accelerator, for copies."""

from __future__ import annotations

from typing import Any

import torch

from headrace.errors import CudaGraphError, DeviceUnavailableError

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process
_NOT_COMPILED = (
    "this torch was built without it or without streams for it, or no device is visible"
)
_IDLE: dict[torch.device, list[torch.Stream]] = {}


class Streams:
    """Streams of a device, and page-locked memory for copies.

    Works for any accelerator with streams in its torch module.
    """

    registers = False  # whether `register` and `unregister` can page-lock existing memory

    def __init__(self, device: torch.device) -> None:
        self.device = device  # with an index
        self._module: Any = torch.get_device_module(device)

    def check(self) -> None:
        """Raise `CudaGraphError` while the current stream is captured."""

    def side(self) -> Any:
        """Return a separate stream for copies, of an earlier epoch if possible.

        The allocator keeps free memory by stream. The next epoch could not use memory freed on the
        stream of an earlier epoch.
        """
        try:
            return _IDLE[self.device].pop()
        except (KeyError, IndexError):
            return self._module.Stream(device=self.device)

    def rest(self, stream: torch.Stream) -> None:
        """Return a stream of `side` for reuse. No work may be left."""
        _IDLE.setdefault(self.device, []).append(stream)

    def current(self) -> Any:
        return self._module.current_stream(self.device)

    def on(self, stream: torch.Stream) -> Any:
        return self._module.stream(stream)

    def place(self, host: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
        """Enqueue a copy of `host` on `stream`, and return the copy."""
        with self.on(stream):
            return host.to(self.device, non_blocking=True)

    def used_on(self, placed: Any, stream: torch.Stream) -> None:
        """Notify the allocator that `stream` uses memory of another stream."""
        placed.record_stream(stream)

    def pinned(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of page-locked memory.

        Raises RuntimeError if no page-locked memory is available.
        """
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, address: int, size: int) -> None:
        """Page-lock existing memory.

        Raises RuntimeError if the system refuses. Called only if `registers` is True.
        """

    def unregister(self, address: int) -> None:
        """End the page-locking of existing memory."""


class CudaStreams(Streams):
    """Streams of CUDA, with page-locking of slabs in place."""

    # ROCm uses the methods of `Streams`: page-locking in place is untested there.
    registers = torch.version.hip is None

    def check(self) -> None:
        """Raise `CudaGraphError` while a current stream is captured.

        Checks the caller's current device, and this device.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise CudaGraphError

    def register(self, address: int, size: int) -> None:
        # On this device. A process of a DDP job may not have set the current device: page-locking
        # would then allocate some hundred megabytes on the first GPU.
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
        # The runtime keeps the last error until someone reads the error. The next kernel launched
        # by torch would read the error, and raise it in the user's code.
        try:
            torch.zeros(1, device=self.device).add_(1)
        except RuntimeError:  # the error to be cleared
            return


def resolve(device: torch.device | str | int | None) -> torch.device | None:
    """Return the accelerator for batches; None for host memory."""
    if device is None:
        return None
    if device == "auto":
        accelerator = (
            torch.accelerator.current_accelerator()
            if torch.accelerator.is_available()
            else None
        )
        if accelerator and hasattr(torch.get_device_module(accelerator), "Stream"):
            return accelerator
        return None
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
    """Return the streams of a device.

    Without an index, `device` means the current device of the type.
    """
    index: int | None = device.index  # torch's stubs leave out None
    if index is None:
        device = torch.device(
            device.type, torch.get_device_module(device).current_device()
        )
    return CudaStreams(device) if device.type == "cuda" else Streams(device)
