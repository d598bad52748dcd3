"""``torch.save`` into a file on a mount.

Owns when torch's own writer is replaced, what is announced to the file system, and what is left behind after an error. Does not own
the pickle, which is torch's own code, nor the archive's shape, which is the native half's.

``torch.save`` asks ``_open_zipfile_writer`` for a writer and gives it the records. That function is replaced, and nothing else of
``torch.save``. Our writer keeps the records until the last one is there, so that it knows the file's size before it writes a byte.
"""

from __future__ import annotations

import fcntl
import functools
import io
import logging
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from . import _device, _mount
from ._native import MAPPED_BYTES, Archive

log = logging.getLogger("tidemark")

# Two bring half of what four do, four two thirds of what eight do (DESIGN.md); a node's ranks save at the same time.
THREADS_MAX = 8
# A smaller archive in a file object of the program goes through that object's buffer, as torch writes it.
STREAMED_BYTES = 256 << 10
# Sets of record names whose hash is kept. DCP writes thousands of archives with the same few names.
NAMES_KEPT = 64

_said: set[str] = set()


def say_once(reason: str) -> None:
    """Logs why something is not accelerated, the first time."""
    if reason not in _said:
        _said.add(reason)
        log.debug("saved by the original function: %s", reason)


def threads() -> int:
    """Returns how many threads copy."""
    return min(THREADS_MAX, len(os.sched_getaffinity(0)))


# ---- what is replaced ----


def patch(module: ModuleType) -> None:
    """Replaces the function of ``torch.serialization`` that makes writers."""
    original = module._open_zipfile_writer
    if isinstance(original, _Opener):
        return
    code = module._save.__code__
    if _WRITER not in code.co_varnames[: code.co_argcount]:
        raise TypeError(f"torch.serialization._save has no argument {_WRITER}")
    from torch.storage import _StorageBase

    # All that is looked for is there: from here on nothing fails.
    _StorageBase.cpu = _Cpu(_StorageBase.cpu, code)
    # What is known of a torch is known for good.
    known = _openers.setdefault(id(module), _Opener(module, original))
    module._open_zipfile_writer = known if known.original is original else _Opener(module, original)  # type: ignore[attr-defined]


def unpatch(module: ModuleType) -> None:
    """Puts torch's own functions back."""
    ours = module._open_zipfile_writer
    if isinstance(ours, _Opener):
        from torch.storage import _StorageBase

        module._open_zipfile_writer = ours.original  # type: ignore[attr-defined]
        _StorageBase.cpu = _StorageBase.cpu.original


_openers: dict[int, _Opener] = {}

# The argument of `torch.serialization._save` that is the writer.
_WRITER = "zip_file"


class _Later:
    """A storage of a device, which is copied when its turn comes."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage


def _Cpu(original: Callable[[Any], Any], save: CodeType) -> Any:
    """Returns what stands in the place of a storage's ``cpu``: torch's own, but for a save that is ours.

    Otherwise all that a device holds would lie in host memory before the first byte is written.
    """

    @functools.wraps(original)
    def cpu(self: Any) -> Any:
        if self.device.type != "cpu":
            caller = sys._getframe(1)
            if caller.f_code is save and isinstance(caller.f_locals.get(_WRITER), Writer):
                return _Later(self)
        return original(self)

    cpu.original = original  # type: ignore[attr-defined]
    return cpu


class _Opener:
    """Stands in the place of ``_open_zipfile_writer``."""

    def __init__(self, module: ModuleType, original: Callable[[Any], Any]) -> None:
        self.module = module
        self.original = original
        self._writer: _Torch | None = None
        # A signal handler may save while this thread is inside.
        self._lock = threading.RLock()

    def __call__(self, target: Any) -> Any:
        try:
            found = _target(target)
            if found is None or not self._can_write():
                return self.original(target)
        except Exception as error:
            say_once(f"{error!r}")
            return self.original(target)
        try:
            opened = found()
        except OSError:
            # torch says it in its own words.
            return self.original(target)
        return Writer(self._torch(), opened, lambda: self.original(target))

    def _torch(self) -> _Torch:
        assert self._writer is not None
        return self._writer

    def _can_write(self) -> bool:
        if self.module._serialization_tls.skip_data:
            say_once("skip_data leaves the bytes out")
            return False
        if getattr(_config(), "use_pinned_memory_for_d2h", False) and _has_accelerator():
            say_once("use_pinned_memory_for_d2h")
            return False
        with self._lock:
            if self._writer is None:
                self._writer = _Torch(self.module, self.original)
            return self._writer.writes_the_same()


def _config() -> Any:
    try:
        from torch.utils.serialization import config
    except ImportError:
        return None
    return config.save


def _has_accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


class _Torch:
    """What must be asked of the torch that is installed."""

    def __init__(self, module: ModuleType, original: Callable[[Any], Any]) -> None:
        import torch

        self.module = module
        self._original = original
        self._new_writer = torch._C.PyTorchFileWriter
        self._names: dict[tuple[Any, ...], str] = {}
        self._same: bool | None = None
        self._tail: list[tuple[str, bytes]] = []

    def alignment(self) -> int:
        """Returns what storages are aligned to."""
        ask = getattr(self.module, "_get_storage_alignment", None)
        return int(ask()) if ask else 64

    def tail(self, names: list[str]) -> list[tuple[str, bytes]]:
        """Returns the records that torch adds at the end of an archive, but for its id."""
        return [(name, data) for name, data in self._tail if name not in names]

    def names_hash(self, names: list[str], alignment: int) -> str:
        """Returns the first half of the archive's id, which depends on the names of its records only.

        It is the order of a hash table inside torch, so torch itself is asked, with records that have no bytes.
        """
        key = (alignment, *names)
        known = self._names.get(key)
        if known is None:
            writer = self._empty(names, _Sink(), alignment, False)
            known = writer.serialization_id()[:20]
            if len(self._names) >= NAMES_KEPT:
                self._names.clear()
            if len(names) <= 1000:
                self._names[key] = known
        return known

    def _empty(self, names: list[str], sink: Any, alignment: int, checksums: bool) -> Any:
        writer = self._new_writer(sink, checksums, alignment)
        for name in names:
            writer.write_record(name, b"", 0)
        writer.write_end_of_file()
        return writer

    def writes_the_same(self) -> bool:
        """Whether our archives are those of this torch, byte for byte: tried once."""
        if self._same is None:
            try:
                self._same = self._try()
                if not self._same:
                    say_once("this torch writes other archives than the ones known here")
            except Exception as error:
                self._same = False
                say_once(f"this torch is not known here: {error!r}")
        return self._same

    def _try(self) -> bool:
        import torch

        sink = io.BytesIO()
        self._empty([], sink, 64, True)
        with zipfile.ZipFile(sink) as added:
            records = [(info.filename.partition("/")[2], added.read(info)) for info in added.infolist()]
        self._tail = [(name, data) for name, data in records if name != ".data/serialization_id"]

        # Storages, which no mode or default device of the program changes. The first is copied as a large one.
        obj = {"a": torch.UntypedStorage(300_000), "b": torch.UntypedStorage(0), "c": torch.UntypedStorage(24), "d": "text"}
        theirs = io.BytesIO()
        with self._original(theirs) as writer:
            self.module._save(obj, writer, pickle, 2, False)
        with os.fdopen(os.memfd_create("tidemark"), "w+b") as ours:
            with Writer(self, Opened(ours.fileno(), "archive", None), None) as writer:
                self.module._save(obj, writer, pickle, 2, False)
            os.lseek(ours.fileno(), 0, os.SEEK_SET)
            return ours.read() == theirs.getvalue()


class _Sink:
    """Takes an archive that nobody reads."""

    def write(self, data: Any) -> int:
        return len(data)


# ---- where to ----


class Opened:
    """An open file, and the name of the archive in it."""

    def __init__(self, fd: int, name: str, stream: Any, owned: bool = False) -> None:
        self.fd = fd
        self.name = name
        # The program's own object, whose position moves.
        self.stream = stream
        # The descriptor was opened here.
        self._owned = owned
        # Where in the file the archive begins.
        self.base = 0
        # The file's size before and now.
        self._before = 0
        self._size = 0

    def begin(self) -> None:
        """Finds where the archive begins, once there is something to write."""
        if self.stream is not None:
            self.stream.flush()
            self.base = self.stream.tell()
        self._before = self._size = os.fstat(self.fd).st_size

    def can_map(self) -> bool:
        """Whether the file may be mapped. Those of the program are mostly not open for reading, which a mapping needs."""
        return self._owned and _mount.can_map(self.fd)

    def resize(self, length: int) -> None:
        """Gives the file the size that it has with an archive of ``length`` bytes: the mount makes memory ready for it.

        What a file object of the program has behind the archive stays.
        """
        size = max(self._before, self.base + length)
        if size != self._size:
            os.ftruncate(self.fd, size)
            self._size = size

    def end(self, length: int) -> None:
        """Says that the archive has ``length`` bytes, and no more."""
        self.resize(length)
        if self.stream is not None:
            self.stream.seek(self.base + length)

    def close(self) -> None:
        """Closes what was opened here."""
        if self._owned:
            self._owned = False
            os.close(self.fd)


def _target(target: Any) -> Callable[[], Opened] | None:
    """Returns how to open a target; None for a target that is not on a mount or is unusual."""
    if isinstance(target, str):
        return _path_target(target)
    stream = _stream_of(target)
    return None if stream is None else lambda: Opened(stream.fileno(), "archive", stream)


def _path_target(path: str) -> Callable[[], Opened] | None:
    name = _archive_name(path)
    if name is None or not _mount.accepts(path):
        return None

    def opened() -> Opened:
        # For writing and reading, so that it can be mapped.
        flags = os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            fd = os.open(path, os.O_RDWR | flags, 0o666)
        except PermissionError:
            fd = os.open(path, os.O_WRONLY | flags, 0o666)
        return Opened(fd, name, None, owned=True)

    return opened


def _archive_name(path: str) -> str | None:
    """Returns the name that torch gives to the archive in a file; None where it would not take the path, or reads it otherwise."""
    base = path.rpartition("/")[2]
    if "\\" in base or "\0" in path:
        return None
    if not path.isascii():
        return "archive"
    stem = base.rpartition(".")[0] if "." in base else base
    return stem or None


def _stream_of(target: Any) -> Any:
    """Returns Python's own file object behind a target; None for anything else."""
    # DCP gives each tensor an object that forwards to its file and does not close it.
    if type(target).__name__ == "NoCloseWriter" and type(target).__module__ == "torch.distributed.checkpoint.filesystem":
        target = target.raw
    if type(target) not in (io.BufferedWriter, io.BufferedRandom, io.FileIO):
        return None
    raw = target if type(target) is io.FileIO else target.raw
    if type(raw) is not io.FileIO or target.closed or not target.writable():
        return None
    fd = raw.fileno()
    # With O_APPEND the kernel does not write where it is told to.
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND or not _mount.is_file_on_mount(fd):
        return None
    return target


# ---- writing ----


class Writer:
    """Stands in the place of what ``_open_zipfile_writer`` returns, and of the writer in it.

    The records are kept as they come and written in ``__exit__``. Storages of a device stay there until then.
    """

    def __init__(self, torch: _Torch, opened: Opened, original: Callable[[], Any] | None) -> None:
        self._torch = torch
        self._opened = opened
        self._original = original
        self._records: list[tuple[str, Any, int]] = []
        # Something that only torch's own writer knows.
        self._unknown = False

    def __enter__(self) -> Writer:
        return self

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Keeps a record."""
        if isinstance(data, str):
            data = data.encode()
        if not isinstance(data, (bytes, _Later)) and not _is_cpu_storage(data, size):
            self._unknown = True
        self._records.append((name, data, size))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            records = self._records if kind is None else self._pickled()
            small = self._opened.stream is not None and sum(size for _, _, size in records) < STREAMED_BYTES
            archive = None if self._unknown or small else self._archive(records)
            if archive is not None:
                try:
                    self._write(archive, records)
                finally:
                    archive.unmap()
            elif self._original is not None:
                self._opened.close()
                self._replay(self._original())
        finally:
            self._opened.close()

    def _pickled(self) -> list[tuple[str, Any, int]]:
        """Returns the records that torch has written when an exception comes before the first storage is."""
        return [record for record in self._records if isinstance(record[1], bytes)]

    def _replay(self, original: Any) -> None:
        with original as writer:
            for name, data, size in self._records:
                if isinstance(data, _Later):
                    data = data.storage.cpu()
                writer.write_record(name, data, size)

    def _archive(self, records: list[tuple[str, Any, int]]) -> Archive | None:
        """Returns an archive that knows its records; None where torch must write it."""
        try:
            self._opened.begin()
            opened = self._opened
            # For less it is not asked whether the file may be mapped.
            mapped = sum(size for _, _, size in records) >= MAPPED_BYTES and opened.can_map()
            archive = Archive(opened.fd, opened.base, opened.name, self._torch.alignment(), threads(), mapped)
            for name, data, size in records:
                if isinstance(data, bytes):
                    archive.add_bytes(name, data[:size])
                elif isinstance(data, _Later):
                    archive.add_pieces(name, size)
                else:
                    archive.add_memory(name, data.data_ptr() if size else 0, size)
        except Exception as error:
            say_once(f"{error!r}")
            return None
        return archive

    def _write(self, archive: Archive, records: list[tuple[str, Any, int]]) -> None:
        opened, torch = self._opened, self._torch
        alignment = torch.alignment()
        names = [name for name, _, _ in records]
        tail = torch.tail(names)
        try:
            opened.resize(archive.total([(name, len(data)) for name, data in tail]))
            archive.copy()
            later = [
                _device.Stored(index, data.storage, size)
                for index, (_, data, size) in enumerate(records)
                if isinstance(data, _Later)
            ]
            if later:
                _device.put(archive, later)
            opened.end(archive.finish(tail, torch.names_hash(names, alignment)))
        except OSError as error:
            archive.cut(archive.complete())
            self._leave(archive.prefix)
            raise RuntimeError(f"tidemark: writing {self._shown()} failed: {error}") from error
        except BaseException:
            # Whole records and an end, as torch leaves them.
            names = names[: archive.complete()]
            archive.cut(len(names))
            self._leave(lambda: archive.finish(torch.tail(names), torch.names_hash(names, alignment)))
            raise
        try:
            opened.close()
        except OSError as error:
            raise RuntimeError(f"tidemark: closing {self._shown()} failed: {error}") from error

    def _leave(self, write: Callable[[], int]) -> None:
        try:
            self._opened.end(write())
        except OSError as error:
            log.debug("%s stays as it is after an error: %s", self._shown(), error)

    def _shown(self) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{self._opened.fd}")
        except OSError:
            return "the file"


def _is_cpu_storage(data: Any, size: int) -> bool:
    import torch

    return type(data) is torch.UntypedStorage and data.device.type == "cpu" and size <= data.nbytes()
