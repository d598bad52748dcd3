"""Is anything touched where nobody asked for it, and is everything where somebody did?"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tidemark  # noqa: E402
from tidemark import _device, _torch  # noqa: E402


STORAGE = """
class _StorageBase:
    def cpu(self): return self
"""
SERIALIZATION = """
def _open_zipfile_writer(name): return name
def _save(obj, zip_file): pass
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A package that is called torch and has what the hook looks for: torch itself takes seconds to import."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch import serialization\n")
    (package / "storage.py").write_text(STORAGE)
    (package / "serialization.py").write_text(SERIALIZATION)
    return tmp_path


def python(code: str, path: Path, variable: str | None = None) -> str:
    known = {name: value for name, value in os.environ.items() if name != "TIDEMARK_ACCELERATE"}
    known["PYTHONPATH"] = str(path)
    if variable is not None:
        known["TIDEMARK_ACCELERATE"] = variable
    ran = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stderr == "", ran.stderr
    return ran.stdout.strip()


LOADED = "import sys; print('tidemark' in sys.modules, 'torch' in sys.modules)"
PATCHED = """
import torch.storage
print(type(torch.serialization._open_zipfile_writer).__name__, hasattr(torch.storage._StorageBase.cpu, "original"))
"""


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_imported_where_it_is_not_asked_for(stand_in: Path, value: str | None) -> None:
    assert python(LOADED, stand_in, value) == "False False"
    assert python("import torch" + PATCHED, stand_in, value) == "function False"


def test_the_variable_alone_is_enough(stand_in: Path) -> None:
    assert python(LOADED, stand_in, "1") == "True False"
    for first in ("import torch", "import torch.serialization", "from torch.serialization import _save; import torch"):
        assert python(first + PATCHED, stand_in, "1") == "_Opener True"
    source = "import inspect, torch; print('def _save(' in inspect.getsource(torch.serialization))"
    assert python(source, stand_in, "1") == "True"


def test_the_call_is_enough_before_and_after_torch(stand_in: Path) -> None:
    before, after = "import tidemark; tidemark.accelerate(); import torch", "import torch, tidemark; tidemark.accelerate()"
    assert python(before + PATCHED, stand_in) == "_Opener True"
    assert python(after + "; tidemark.accelerate()" + PATCHED, stand_in) == "_Opener True"
    assert python(after + "; tidemark.accelerate(False)" + PATCHED, stand_in) == "function False"
    assert python(before + "; tidemark.accelerate(False)" + PATCHED, stand_in) == "function False"


@pytest.mark.parametrize("gone", ["def _open_zipfile_writer", "zip_file", "def _save", "class _StorageBase"])
def test_a_torch_of_another_shape_is_left_alone(stand_in: Path, gone: str) -> None:
    for name in ("storage.py", "serialization.py"):
        path = stand_in / "torch" / name
        path.write_text(path.read_text().replace(gone, gone + "_renamed"))
    code = "import torch; print(any('tidemark' in str(type(value)) for value in vars(torch.serialization).values()))"
    assert python(code, stand_in, "1") == "False"


def test_a_program_without_torch_is_not_changed(stand_in: Path) -> None:
    assert python("import json; print(json.dumps(1))", stand_in, "1") == "1"


def test_a_torch_that_writes_other_archives_is_left_alone(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = torch.serialization._open_zipfile_writer
    fresh = _torch._Torch(opener.module, opener.original)
    monkeypatch.setattr(_torch._Torch, "tail", lambda self, names: [("version", b"4\n")])
    assert not fresh.writes_the_same()


def test_a_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="tidemark"):
        _torch.say_once("a reason of this test")
        _torch.say_once("a reason of this test")
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_device_storages_come_last_and_whole(folder: Path, fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages that are not in host memory are fetched after the size is announced. The device here is one without memory."""
    # Of several pieces, several to a buffer, none, and one that fills a buffer.
    sizes = [5_000_000, 7, 100_000, 0, 600_000, 1]
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    announced = []

    def put(archive: Any, stored: list[_device.Stored]) -> None:
        assert [(one.storage.device.type, one.size) for one in stored] == [("meta", len(part)) for part in parts]
        announced.append((folder / "a.pt").stat().st_size)
        _device.put_cuda(archive, [(one.record, part) for one, part in zip(stored, parts)], StubTorch())

    monkeypatch.setattr(_device, "put", put)
    monkeypatch.setattr(_device, "BUFFER_BYTES", 600_000)
    stored = [torch.UntypedStorage(size, device="meta") for size in sizes]
    torch.save({"a": stored, "b": torch.ones(300_000)}, folder / "a.pt")
    assert announced and announced[0] > sum(sizes)
    import zipfile

    with zipfile.ZipFile(folder / "a.pt") as archive:
        assert archive.testzip() is None
        for number, part in enumerate(parts):
            assert archive.read(f"a/data/{number}") == part.numpy().tobytes(), number


class StubTorch:
    """The part of torch that fetches from CUDA, on the CPU: a buffer is filled when its event is waited for."""

    def __init__(self) -> None:
        stub = self

        class Stream:
            def __init__(self, device: Any) -> None: ...
            def wait_stream(self, other: Any) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *error: object) -> None: ...

        class Event:
            def record(self, stream: Any) -> None:
                self.todo = stub.copies
                stub.copies = []

            def synchronize(self) -> None:
                for into, source in self.todo:
                    into.copy_(source)
                self.todo = []

        class Cuda:
            pass

        self.copies: list[Any] = []
        self.uint8 = torch.uint8
        self.cuda: Any = Cuda()
        self.cuda.Stream, self.cuda.Event = Stream, Event
        self.cuda.current_stream = lambda device: None
        self.cuda.stream = lambda stream: stream

    def empty(self, size: int, dtype: Any, device: str, pin_memory: bool) -> Any:
        assert pin_memory
        return _Buffer(torch.empty(size, dtype=dtype, device=device), self)


class _Buffer:
    def __init__(self, tensor: Any, stub: StubTorch) -> None:
        self.tensor = tensor
        self.stub = stub

    def __getitem__(self, where: slice) -> _Buffer:
        return _Buffer(self.tensor[where], self.stub)

    def copy_(self, source: Any, non_blocking: bool) -> None:
        assert non_blocking
        self.stub.copies.append((self.tensor, source))

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()
