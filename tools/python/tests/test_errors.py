"""Does a save that fails fail as torch's does, and leave what torch leaves?"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tidemark  # noqa: E402

pytestmark = pytest.mark.usefixtures("fast")


class Stopped(BaseException):
    """What a signal handler raises."""


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def is_whole(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None and any("/data/" in name for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def test_what_cannot_be_pickled(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "a.pt", tmp_path / "a.pt"):
        with pytest.raises(ValueError, match="not this one"):
            torch.save({"a": torch.ones(200_000), "b": Unpicklable()}, path)
    assert (folder / "a.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()


def test_what_cannot_be_pickled_into_a_file_object(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "a.pt", tmp_path / "a.pt"):
        with open(path, "wb") as file:
            with pytest.raises(ValueError, match="not this one"):
                torch.save({"a": torch.ones(200_000), "b": Unpicklable()}, file)
    assert (folder / "a.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()


def test_a_directory_that_is_missing(folder: Path, tmp_path: Path) -> None:
    said = []
    for parent in (folder, tmp_path):
        with pytest.raises(RuntimeError) as failed:
            torch.save({"a": torch.ones(3)}, parent / "none" / "a.pt")
        said.append(str(failed.value).replace(str(parent), ""))
    assert said[0] == said[1] and "does not exist" in said[0]


def test_a_name_that_is_a_directory(folder: Path) -> None:
    with pytest.raises(RuntimeError):
        torch.save({"a": torch.ones(3)}, folder)


@pytest.mark.parametrize("through", ["path", "file"])
def test_a_file_that_may_not_grow(folder: Path, tmp_path: Path, through: str) -> None:
    """torch's error is a RuntimeError with the system's behind it, and what it leaves has no end."""
    obj = {"a": torch.rand(300_000), "b": torch.rand(300_000), "c": torch.ones(3)}
    for path in (folder / "a.pt", tmp_path / "a.pt"):
        with files_of_at_most(1_500_000), pytest.raises(RuntimeError):
            if through == "path":
                torch.save(obj, path)
            else:
                with open(path, "wb") as file:
                    torch.save(obj, file)
        assert path.exists() and not is_whole(path)
        assert path.read_bytes()[:2] == b"PK"
    torch.save(obj, folder / "a.pt")
    assert is_whole(folder / "a.pt")


def test_no_room(folder: Path, request: pytest.FixtureRequest) -> None:
    """What does not fit into Tier-1 is refused before a byte of it is copied."""
    if not request.config.getoption("--long"):
        pytest.skip("a mount without room waits 30 s for some: --long")
    size = 1 << 40
    # Pages that nobody touches.
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    large = torch.frombuffer(room, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="No space left") as failed:
        torch.save({"a": large}, folder / "a.pt")
    assert isinstance(failed.value.__cause__, OSError)
    assert not is_whole(folder / "a.pt") and (folder / "a.pt").stat().st_size < 4096


def test_a_signal_handler_that_raises(folder: Path) -> None:
    """The copy ends within moments, and whole records and an end are left, as torch leaves them."""
    obj = {str(number): torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8) for number in range(20)}
    path = folder / "a.pt"

    def handler(*_: object) -> None:
        raise Stopped

    def send() -> None:
        # The size is announced when the copy begins.
        while not path.exists() or path.stat().st_size < 1 << 30:
            time.sleep(0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(Stopped):
            torch.save(obj, path)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = [name.partition("/")[2] for name in archive.namelist()]
    storages = [name for name in names if name.startswith("data/")]
    assert len(storages) < 20 and storages == [f"data/{number}" for number in range(len(storages))]
    assert names[0] == "data.pkl" and names[-1] == ".data/serialization_id"


def test_a_save_within_a_signal_handler(folder: Path) -> None:
    """A job that is told to end saves, and may be inside a save."""
    obj = {str(number): torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8) for number in range(8)}
    saved = []

    def handler(*_: object) -> None:
        torch.save({"last": torch.ones(500_000)}, folder / "last.pt")
        saved.append(True)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    try:
        torch.save(obj, folder / "a.pt")
        while not saved:
            time.sleep(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert is_whole(folder / "a.pt") and is_whole(folder / "last.pt")


def test_descriptors_do_not_leak(folder: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for bad in (False, True):
        with contextlib.suppress(ValueError):
            torch.save({"a": torch.rand(100_000), "b": Unpicklable() if bad else 1}, folder / "a.pt")
    with files_of_at_most(1000), contextlib.suppress(RuntimeError):
        torch.save({"a": torch.rand(100_000)}, folder / "a.pt")
    assert count() == before


def test_safetensors_leave_what_was_there(folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tidemark.accelerate()
    path = folder / "a.safetensors"
    safetensors.save_file({"a": torch.ones(3)}, path)
    before = path.read_bytes()
    from safetensors import SafetensorError

    with files_of_at_most(1_000_000), pytest.raises(SafetensorError):
        safetensors.save_file({"a": torch.rand(1_000_000)}, path)
    assert path.read_bytes() == before and os.listdir(folder) == ["a.safetensors"]


def test_a_file_that_is_cut_off_in_mid_save(folder: Path, tmp_path: Path) -> None:
    """Ranks that all save to one name cut each other's file off. With write(2) each then fills it again, and so does ours."""
    code = """
import mmap, os, sys, threading, torch, tidemark
tidemark.accelerate()
path = sys.argv[1]
obj = {str(n): torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8) for n in range(12)}
saving = True
cuts = 0
def cut():
    global cuts
    while saving:
        try:
            if os.stat(path).st_size > 600 << 20:
                os.truncate(path, 0)
                cuts += 1
        except FileNotFoundError:
            pass
cutter = threading.Thread(target=cut)
cutter.start()
for _ in range(3):
    torch.save(obj, path)
saving = False
cutter.join()
torch.save(obj, path)
assert len(torch.load(path)) == 12
print("cuts", cuts)
"""
    ran = subprocess.run([sys.executable, "-c", code, str(folder / "a.pt")], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stderr}"
    assert int(ran.stdout.split()[1]) > 0


def test_a_fault_elsewhere_still_ends_the_program(folder: Path) -> None:
    """Our handler takes what is ours, and leaves the rest to the one before."""
    code = """
import faulthandler, mmap, os, sys, torch, tidemark
if sys.argv[2] == "handler":
    faulthandler.enable()
tidemark.accelerate()
torch.save({"a": torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8)}, sys.argv[1])
with open(sys.argv[1] + ".other", "w+b") as file:
    file.truncate(8192)
    mapped = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    mapped[0]
"""
    for handler in ("none", "handler"):
        ran = subprocess.run([sys.executable, "-c", code, str(folder / "a.pt"), handler], capture_output=True, text=True, timeout=120)
        assert ran.returncode == -signal.SIGBUS, f"{ran.returncode}: {ran.stderr}"
        assert ("Bus error" in ran.stderr) == (handler == "handler"), ran.stderr
