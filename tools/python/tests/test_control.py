"""Does Python see what the mount says?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tidemark
from tidemark import _control, _mount

# Two settle times and an upload of some bytes, on a busy machine.
LIMIT_S = 60


def test_a_save_is_followed_until_it_is_committed(folder: Path) -> None:
    path = folder / "step7.pt"
    path.write_bytes(os.urandom(100_000))
    found = tidemark.wait(path, "committed", timeout=LIMIT_S)
    assert found.state == "committed" and found.copies == {"host", "object"} and len(found.crc64nvme or "") == 16
    checkpoint = found.checkpoint
    assert checkpoint is not None and checkpoint.is_committed and checkpoint.is_replicated
    assert (checkpoint.step, checkpoint.files, checkpoint.bytes) == (7, 1, 100_000)
    assert checkpoint.path == f"{folder.name}/step7.pt" and checkpoint.copies.object_bytes == 100_000
    assert tidemark.wait(path, "replicated", timeout=0).state == "committed"
    assert checkpoint in tidemark.checkpoints(folder) and checkpoint in tidemark.checkpoints()


def test_what_is_open_is_not_committed(folder: Path) -> None:
    with open(folder / "step1.pt", "wb") as file:
        file.write(b"half")
        file.flush()
        found = tidemark.status(folder / "step1.pt")
        assert found.state in (None, "open") and found.crc64nvme is None
        with pytest.raises(TimeoutError, match="is not committed after 0.1 s"):
            tidemark.wait(folder / "step1.pt", timeout=0.1)


def test_a_file_outside_checkpoints_has_no_state(folder: Path) -> None:
    (folder / "log.txt").write_text("line")
    found = tidemark.status(folder / "log.txt")
    assert found.checkpoint is None and "host" in found.copies


def test_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tidemark.status(folder / "none.pt")
    (tmp_path / "a").write_text("")
    with pytest.raises(tidemark.NotAMount):
        tidemark.status(tmp_path / "a")
    with pytest.raises(tidemark.NotAMount):
        tidemark.checkpoints(tmp_path)
    with pytest.raises(ValueError, match="until"):
        tidemark.wait(folder, "uploaded")  # type: ignore[arg-type]


def test_a_path_is_read_as_the_daemon_writes_it() -> None:
    assert _control._path("run/100%25/a%FF.pt") == os.fsdecode(b"run/100%/a\xff.pt")


def test_a_checkpoint_is_found_by_the_texts_of_newer_and_older_daemons() -> None:
    def found(name: str, *texts: str, there: tuple[str, ...] = ()) -> str | None:
        entry = _control._entry_of(name, [{"path": text} for text in texts], there.__contains__)
        return None if entry is None else entry["path"]

    assert found("run/a%41", "run/aA", "run/a%2541") == "run/a%2541"
    assert found("run/a%41", "run/aA", "run/a%41") == "run/a%41"
    assert found("run/100%", "run/100%") == "run/100%"
    assert found("run/a%25", "run/a%25") == "run/a%25"
    # It is another's, which a newer daemon writes so.
    assert found("run/a%25", "run/a%25", there=("run/a%",)) is None


def test_the_mount_table_is_read_with_its_escapes() -> None:
    line = "47 27 0:43 / /a\\040b rw,nosuid - fuse.tidemark tidemark rw,user_id=0"
    assert _mount._parse(line) == (os.makedev(0, 43), "/", "/a b")
    assert _mount._parse(line.replace("fuse.tidemark", "fuse.other")) is None
    assert _mount._parse(line.replace(" - ", " shared:1 master:2 - ")) is not None
    assert _mount._parse("") is None
