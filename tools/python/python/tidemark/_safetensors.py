"""``safetensors.torch.save_file`` into a file on a mount.

Owns the file's header, and when safetensors' own function is replaced. What may be saved is checked by safetensors itself:
``save_file`` asks ``serialize_file`` last, and only that function is replaced.

As safetensors does, it writes a hidden file beside the target and renames it, so that an error leaves the target as it was.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import _mount
from ._native import MAPPED_BYTES, copy_all
from ._torch import say_once, threads

# Types to learn the order from, in which safetensors writes them, with the bytes of an element. A type that is not here, or that the
# installed version does not know, is saved by safetensors.
_TYPES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip
# The header is padded to this.
_ALIGNMENT = 8


def patch(module: ModuleType) -> None:
    """Replaces the function of ``safetensors.torch`` that writes files."""
    original = module.serialize_file
    if not isinstance(original, _SerializeFile):
        module.serialize_file = _SerializeFile(module, original)  # type: ignore[attr-defined]


def unpatch(module: ModuleType) -> None:
    """Puts safetensors' own function back."""
    ours = module.serialize_file
    if isinstance(ours, _SerializeFile):
        module.serialize_file = ours.original  # type: ignore[attr-defined]


class _SerializeFile:
    """Stands in the place of ``serialize_file``."""

    def __init__(self, module: ModuleType, original: Callable[..., None]) -> None:
        self.module = module
        self.original = original
        self._same: bool | None = None
        # Each type's place in the file.
        self._ranks: dict[str, int] = {}

    def __call__(self, tensors: Any, filename: Any, metadata: Any = None) -> None:
        try:
            path = os.fspath(filename)
            plan = self._plan(tensors, metadata) if self._is_ours(path) else None
        except Exception as error:
            say_once(f"safetensors: {error!r}")
            plan = None
        if plan is None:
            return self.original(tensors, filename, metadata=metadata)
        try:
            _write(path, *plan)
        except OSError as error:
            from safetensors import SafetensorError

            raise SafetensorError(f"Error while serializing: I/O error: {error}") from error

    def _is_ours(self, path: str) -> bool:
        return isinstance(path, str) and _mount.accepts(path) and self._writes_the_same()

    def _plan(self, tensors: Any, metadata: Any) -> tuple[bytes, list[tuple[int, int]]]:
        if type(tensors) is not dict or (metadata is not None and type(metadata) is not dict):
            raise TypeError("arguments that are no dicts")
        # By type, then by name.
        ordered = sorted(tensors.items(), key=lambda item: (self._ranks[item[1].dtype], item[0].encode()))
        header = _header([(name, spec.dtype, list(spec.shape), spec.data_len) for name, spec in ordered], metadata)
        return header, [(spec.data_ptr, spec.data_len) for _, spec in ordered]

    def _writes_the_same(self) -> bool:
        """Whether our headers are those of this safetensors: tried once."""
        if self._same is None:
            try:
                self._same = self._try()
            except Exception as error:
                say_once(f"this safetensors is not known here: {error!r}")
                self._same = False
        return self._same

    def _try(self) -> bool:
        import ctypes

        from safetensors import TensorSpec, serialize

        room = ctypes.create_string_buffer(48)
        at = ctypes.addressof(room)

        def spec(dtype: str, shape: list[int], size: int) -> Any:
            return TensorSpec(dtype=dtype, shape=shape, data_ptr=at, data_len=size)

        one_of_each = {}
        for dtype, size in _TYPES.items():
            try:
                one_of_each[dtype] = spec(dtype, [1], size)
            except Exception as error:
                say_once(f"safetensors: {dtype}: {error!r}")
        written = bytes(serialize(one_of_each))
        order = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])
        self._ranks = {entry["dtype"]: rank for rank, entry in enumerate(order.values())}

        tensors = {
            "b": spec("float32", [2, 3], 24),
            "a": spec("float32", [], 4),
            'é"\n\x01\x7f/\u2028': spec("int8", [3], 3),
            "z": spec("bfloat16", [0, 4], 0),
        }
        # Several keys of metadata have no order there.
        metadata = {"format": "pt\u20ac"}
        header, pieces = self._plan(tensors, metadata)
        ours = header + b"".join(ctypes.string_at(at, size) for at, size in pieces)
        return ours == bytes(serialize(tensors, metadata=metadata))


def _header(tensors: list[tuple[str, str, list[int], int]], metadata: dict[str, str] | None) -> bytes:
    """Returns what stands before the first tensor."""
    header: dict[str, Any] = {}
    if metadata is not None:
        if not metadata or not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise TypeError("metadata that is empty or not text")
        header["__metadata__"] = metadata
    at = 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(path: str, header: bytes, pieces: list[tuple[int, int]]) -> None:
    fd, hidden = tempfile.mkstemp(prefix=".tmp", dir=os.path.dirname(path) or ".")
    try:
        try:
            size = len(header) + sum(size for _, size in pieces)
            os.ftruncate(fd, size)
            _write_all(fd, header)
            copy_all(fd, len(header), pieces, threads(), size >= MAPPED_BYTES and _mount.can_map(fd))
            os.rename(hidden, path)
        finally:
            os.close(fd)
    except BaseException:
        try:
            os.unlink(hidden)
        except FileNotFoundError:
            pass
        raise


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    at = 0
    while at < len(data):
        at += os.pwrite(fd, view[at:], at)
