"""What the mount says of checkpoints, read from its control files and extended attributes.

Owns the shape in which Python sees it. Does not own what the words mean: ``ckptctl`` uses the same ones.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from . import _mount

_CONTROL = ".tidemark"
_CHECKPOINTS = "checkpoints.json"
_ATTRIBUTE = "user.tidemark."

# A save is uploaded in seconds, and a question costs the daemon a request.
_POLL_FIRST_S = 0.02
_POLL_LAST_S = 0.5


class NotAMount(OSError):
    """The path does not lie on a Tidemark mount, or none is mounted."""


@dataclass(frozen=True)
class Copies:
    """How many files of a checkpoint have a copy, by where it is, and their bytes."""

    host_files: int
    host_bytes: int
    peer_files: int
    peer_bytes: int
    object_files: int
    object_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """The newest version of a checkpoint, as ``ckptctl ls`` shows it."""

    #: The mount, and the checkpoint's path below it.
    mount: str
    path: str
    run: str
    step: int | None
    timeline: int
    version: int
    files: int
    bytes: int
    #: The framework that wrote it, as far as it was recognised.
    framework: str
    #: A word of ``ckptctl ls``: ``open``, ``settled``, ``torn``, ``complete``, ``replicated``, ``prepared`` or ``committed``.
    state: str
    #: Why it counts as complete, if it does.
    evidence: str | None
    copies: Copies
    pinned: bool

    @property
    def is_replicated(self) -> bool:
        """Whether it survives the loss of this node: every file has a copy on another node or in Tier-3."""
        return self.state in ("replicated", "committed") or (
            self.state == "prepared" and self.copies.peer_files == self.files > 0
        )

    @property
    def is_committed(self) -> bool:
        """Whether Tier-3 has it whole, and its commit marker."""
        return self.state == "committed"


@dataclass(frozen=True)
class Status:
    """What the mount says of one path."""

    path: str
    mount: str
    #: The checkpoint that the path is, or belongs to; None for what belongs to none, or not yet.
    checkpoint: Checkpoint | None
    #: The checkpoint's state; None without one.
    state: str | None
    #: Of a file: where its bytes are, of ``host``, ``peer`` and ``object``.
    copies: frozenset[str]
    #: Of a file that is sealed: its CRC-64/NVME, 16 hexadecimal digits.
    crc64nvme: str | None


def checkpoints(path: str | os.PathLike[str] | None = None) -> list[Checkpoint]:
    """Returns the checkpoints of the mount that ``path`` lies on, or of all mounts that this process can see.

    Raises ``NotAMount`` if there is none.
    """
    if path is not None:
        return _listed(_mount_of(os.fspath(path)))
    listed: list[Checkpoint] | None = None
    for mount in _mount.mounts():
        if mount.root == "/":
            try:
                listed = (listed or []) + _listed(mount.path)
            except OSError:
                # A mount whose daemon is gone says nothing, or one that this user may not see.
                continue
    if listed is None:
        raise NotAMount(errno.ENOENT, "no Tidemark mount answers this process")
    return listed


def status(path: str | os.PathLike[str]) -> Status:
    """Returns what the mount says of a file, or of the directory of a checkpoint.

    Raises ``FileNotFoundError`` if it is not there and ``NotAMount`` if it does not lie on a mount.
    """
    path = os.fspath(path)
    mount = _mount_of(path)
    name = _attribute(path, "checkpoint")
    state = _attribute(path, "state")
    copies = _attribute(path, "copies") or ""
    found = None
    if name is not None:
        entry = _entry_of(name, _entries(mount), lambda other: os.path.lexists(os.path.join(mount, other)))
        found = None if entry is None else _checkpoint(mount, entry, name)
    return Status(
        path=path,
        mount=mount,
        checkpoint=found,
        state=state,
        copies=frozenset(copies.split(",")) - {""},
        crc64nvme=_attribute(path, "crc64nvme"),
    )


def wait(
    path: str | os.PathLike[str],
    until: Literal["replicated", "committed"] = "committed",
    timeout: float | None = None,
) -> Status:
    """Waits until the checkpoint that ``path`` is, or belongs to, is ``replicated`` or ``committed``. Returns its status then.

    ``replicated`` is reached by what is committed, too. Raises ``TimeoutError`` after ``timeout`` seconds. A file that was closed
    this moment belongs to a checkpoint some seconds later; a checkpoint without marker, index or count is complete only then, too.
    """
    if until not in ("replicated", "committed"):
        raise ValueError(f"until is 'replicated' or 'committed', not {until!r}")
    end = None if timeout is None else time.monotonic() + timeout
    pause = _POLL_FIRST_S
    while True:
        found = status(path)
        checkpoint = found.checkpoint
        if checkpoint is not None and checkpoint.state == found.state:
            if checkpoint.is_committed if until == "committed" else checkpoint.is_replicated:
                return found
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            state = "no checkpoint yet" if found.state is None else found.state
            raise TimeoutError(errno.ETIMEDOUT, f"{found.path} is not {until} after {timeout} s, but {state}")
        time.sleep(pause if left is None else min(pause, left))
        pause = min(2 * pause, _POLL_LAST_S)


def _mount_of(path: str) -> str:
    mount = _mount.mount_of(path)
    if mount is None:
        raise NotAMount(errno.ENODEV, "not on a Tidemark mount", path)
    if mount.root != "/":
        raise NotAMount(errno.ENODEV, f"only {mount.root} of the Tidemark mount is visible here, without its control files", path)
    return mount.path


def _attribute(path: str, name: str) -> str | None:
    try:
        return os.getxattr(path, _ATTRIBUTE + name).decode("utf-8", "surrogateescape")
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise


def _listed(mount: str) -> list[Checkpoint]:
    return [_checkpoint(mount, entry, _path(entry["path"])) for entry in _entries(mount)]


def _entries(mount: str) -> list[dict[str, Any]]:
    with open(os.path.join(mount, _CONTROL, _CHECKPOINTS), "rb") as file:
        content = file.read()
    # A daemon that has just begun has an empty file.
    entries: list[dict[str, Any]] = json.loads(content or b"[]")
    return entries


def _entry_of(name: str, entries: list[dict[str, Any]], is_there: Callable[[str], bool]) -> dict[str, Any] | None:
    """The entry of the checkpoint with the path ``name``.

    An older daemon writes ``%`` in paths as it is. Its text is taken only where no other file has the path that a newer one means by
    it: what is committed of another checkpoint says nothing of this one.
    """
    for entry in entries:
        if _path(entry["path"]) == name:
            return entry
    return next((entry for entry in entries if entry["path"] == name and not is_there(_path(name))), None)


def _path(text: str) -> str:
    """The path that an answer writes with bytes outside UTF-8, control characters and ``%`` as ``%XX``, as ``os`` takes it."""
    return unquote(text, "utf-8", "surrogateescape")


def _checkpoint(mount: str, entry: dict[str, Any], path: str) -> Checkpoint:
    copies = entry["copies"]
    return Checkpoint(
        mount=mount,
        path=path,
        run=entry["run"],
        step=entry["step"],
        timeline=entry["timeline"],
        version=entry["version"],
        files=entry["files"],
        bytes=entry["bytes"],
        framework=entry["framework"],
        state=entry["state"],
        evidence=entry["evidence"],
        copies=Copies(*(copies[place][what] for place in ("host", "peer", "object") for what in ("files", "bytes"))),
        pinned=entry["pinned"],
    )
