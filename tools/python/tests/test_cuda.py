"""States in the memory of a real GPU. Without one these tests are skipped; ``test_accelerate.py`` tests the order of calls."""

from __future__ import annotations

import random
import signal
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tidemark  # noqa: E402
from tidemark import _device  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_device(dice: random.Random) -> torch.Tensor:
    count = dice.choice([0, 1, 7, 1000, 131_072, 700_001, 8_388_608, 8_388_609, 20_000_003])
    return torch.randint(-128, 127, (count,), dtype=torch.int8, device="cuda")


def stock(obj: Any, to: Path) -> None:
    tidemark.accelerate(False)
    torch.save(obj, to)
    tidemark.accelerate()


def test_a_file_is_torchs(folder: Path, tmp_path: Path, copies: list[str]) -> None:
    dice = random.Random(5)
    for number in range(20):
        obj: dict[str, Any] = {str(n): on_device(dice) for n in range(dice.randrange(1, 12))}
        obj["host"], obj["view"] = torch.rand(dice.randrange(60_000)), obj["0"][: len(obj["0"]) // 2]
        ours, theirs = folder / f"step{number}.pt", tmp_path / f"step{number}.pt"
        torch.save(obj, ours)
        stock(obj, theirs)
        assert ours.read_bytes() == theirs.read_bytes(), number
        with zipfile.ZipFile(ours) as archive:
            assert archive.testzip() is None
        loaded = torch.load(ours)
        assert all(torch.equal(loaded[name], kept) and loaded[name].device == kept.device for name, kept in obj.items())
        ours.unlink()
        theirs.unlink()
    assert len(copies) == 20


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_is_still_being_computed_is_waited_for(folder: Path, own_stream: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        counted = torch.zeros(30_000_000, device="cuda")
        slow = torch.rand(6000, 6000, device="cuda")
        for _ in range(30):
            slow = slow @ slow
            counted += 1
        torch.save({"counted": counted, "small": counted[:5].clone()}, folder / "a.pt")
        # The next step of the job must not get into the file.
        counted.zero_()
    loaded = torch.load(folder / "a.pt", map_location="cpu")
    assert loaded["counted"].eq(30).all() and loaded["small"].eq(30).all()


def test_many_small_storages(folder: Path, tmp_path: Path) -> None:
    obj = {str(n): torch.full((n % 300 + 1,), n, dtype=torch.int32, device="cuda") for n in range(5000)}
    torch.save(obj, folder / "a.pt")
    stock(obj, tmp_path / "a.pt")
    assert (folder / "a.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()


def own_bytes() -> int:
    """Memory of the process that is no file's: a mapping of the saved file is not in it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_the_state_is_never_in_host_memory_as_a_whole(folder: Path) -> None:
    obj = {str(n): torch.ones(64 << 20, dtype=torch.uint8, device="cuda") for n in range(16)}
    torch.save({"first": obj["0"]}, folder / "first.pt")
    highest, end = [own_bytes()], threading.Event()

    def watch() -> None:
        while not end.wait(0.002):
            highest.append(own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    torch.save(obj, folder / "a.pt")
    end.set()
    watcher.join()
    assert max(highest) - highest[0] < 2 * _device.BUFFERS * _device.BUFFER_BYTES < 1 << 30
    assert len(highest) > 3


class Stopped(BaseException):
    """What a signal handler raises."""


def test_a_signal_handler_that_raises(folder: Path) -> None:
    """Whole records and an end are left, and the next save is as ever."""
    obj = {str(n): torch.full((64 << 20,), n, dtype=torch.uint8, device="cuda") for n in range(32)}

    def handler(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Stopped):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            torch.save(obj, folder / "a.pt")
            time.sleep(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with zipfile.ZipFile(folder / "a.pt") as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) < 32, "the save was over before the signal came"
    torch.save(obj, folder / "a.pt")
    assert all(torch.equal(kept, torch.load(folder / "a.pt")[name]) for name, kept in list(obj.items())[:3])
