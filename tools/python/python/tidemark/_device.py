"""Storages of devices into an archive.

Owns the pinned buffers and the streams. With CUDA, several buffers are on their way from the device while one is copied into the file:
large storages in pieces, small ones many to a buffer. Everything goes through torch's own calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ._native import Archive

# One is copied into the file while the others are on their way.
BUFFERS = 3
# Larger ones were no faster (DESIGN.md).
BUFFER_BYTES = 32 << 20


class Stored(NamedTuple):
    """A storage of a device, and the index of the record that gets its first ``size`` bytes."""

    record: int
    storage: Any
    size: int


def put(archive: Archive, stored: list[Stored]) -> None:
    """Copies storages into their records, in the order given."""
    import torch

    pieces = []
    for record, storage, size in stored:
        if storage.device.type == "cuda":
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]
            pieces.append((record, source))
        elif size > 0:
            put_cuda(archive, pieces, torch)
            pieces = []
            on_host = storage.cpu()
            archive.put([(record, on_host.data_ptr(), size)])
    put_cuda(archive, pieces, torch)


class _Load:
    """What one buffer carries: pieces of tensors of one device, each with its record."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Any]] = []
        self.size = 0

    def takes(self, piece: Any) -> bool:
        is_same = not self.pieces or self.pieces[0][1].device == piece.device
        return bool(is_same and self.size + piece.numel() <= BUFFER_BYTES)

    def add(self, index: int, piece: Any) -> None:
        self.pieces.append((index, piece))
        self.size += piece.numel()


def _loads(sources: list[tuple[int, Any]]) -> Iterator[_Load]:
    load = _Load()
    for index, source in sources:
        for at in range(0, source.numel(), BUFFER_BYTES):
            piece = source[at : at + BUFFER_BYTES]
            if not load.takes(piece):
                yield load
                load = _Load()
            load.add(index, piece)
    if load.pieces:
        yield load


class _Buffer:
    """A pinned buffer, and the event that says that it is full."""

    def __init__(self, torch: Any, size: int) -> None:
        self._torch = torch
        self._host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        # A stream of each device that the buffer has served.
        self._streams: dict[Any, Any] = {}
        self._event: Any = None
        self._load = _Load()

    def fill(self, load: _Load) -> None:
        cuda, device = self._torch.cuda, load.pieces[0][1].device
        if device not in self._streams:
            stream = self._streams[device] = cuda.Stream(device)
            # What the program has begun to compute must be there first.
            stream.wait_stream(cuda.current_stream(device))
        stream = self._streams[device]
        with cuda.stream(stream):
            at = 0
            for _, piece in load.pieces:
                self._host[at : at + piece.numel()].copy_(piece, non_blocking=True)
                at += piece.numel()
            self._event = cuda.Event()
            self._event.record(stream)
        self._load = load

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def empty_into(self, archive: Archive) -> None:
        self.wait()
        address, pieces = self._host.data_ptr(), []
        for index, piece in self._load.pieces:
            pieces.append((index, address, piece.numel()))
            address += piece.numel()
        archive.put(pieces)


def put_cuda(archive: Archive, sources: list[tuple[int, Any]], torch: Any) -> None:
    """Copies tensors of bytes in device memory into their records."""
    loads = list(_loads(sources))
    largest = max((load.size for load in loads), default=0)
    buffers = [_Buffer(torch, largest) for _ in loads[:BUFFERS]]
    try:
        for buffer, load in zip(buffers, loads):
            buffer.fill(load)
        for number in range(len(loads)):
            buffer = buffers[number % len(buffers)]
            buffer.empty_into(archive)
            if number + len(buffers) < len(loads):
                buffer.fill(loads[number + len(buffers)])
    finally:
        # After an error the program may free what is still being read.
        for buffer in buffers:
            buffer.wait()
