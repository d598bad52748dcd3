"""Storages of a device, piece by piece, into an archive.

Owns the pinned buffers and the streams. With CUDA several pieces are on their way from the device while one is copied into the file.
Everything goes through torch's own calls.
"""

from __future__ import annotations

from typing import Any

from ._native import Archive

BUFFERS = 4
BUFFER_BYTES = 32 << 20


def put(archive: Archive, index: int, storage: Any, size: int) -> None:
    """Copies ``size`` bytes of a device's storage into record ``index``."""
    import torch

    if size == 0:
        return
    if storage.device.type == "cuda":
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]
        put_cuda(archive, index, source, torch)
    else:
        on_host = storage.cpu()
        archive.put(index, on_host.data_ptr(), size)


class _Buffer:
    """A pinned buffer with its stream, and the event that says that it is full."""

    def __init__(self, torch: Any, device: Any, size: int) -> None:
        self._torch = torch
        self.host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.stream = torch.cuda.Stream(device)
        # What the program has begun to compute must be there first.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._event = torch.cuda.Event()

    def fill(self, source: Any) -> None:
        with self._torch.cuda.stream(self.stream):
            self.host[: source.numel()].copy_(source, non_blocking=True)
            self._event.record(self.stream)

    def wait(self) -> None:
        self._event.synchronize()


def put_cuda(archive: Archive, index: int, source: Any, torch: Any) -> None:
    """Copies a tensor of bytes in device memory into record ``index``."""
    size = source.numel()
    pieces = [source[at : at + BUFFER_BYTES] for at in range(0, size, BUFFER_BYTES)]
    buffers = [_Buffer(torch, source.device, min(size, BUFFER_BYTES)) for _ in pieces[:BUFFERS]]
    for buffer, piece in zip(buffers, pieces):
        buffer.fill(piece)
    for number, piece in enumerate(pieces):
        buffer = buffers[number % len(buffers)]
        buffer.wait()
        archive.put(index, buffer.host.data_ptr(), piece.numel())
        if number + len(buffers) < len(pieces):
            buffer.fill(pieces[number + len(buffers)])
