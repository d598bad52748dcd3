"""Which paths lie on a Tidemark mount.

Owns the reading of the mount table. Mounts come and go while a program lives, so it is not kept for long.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from typing import NamedTuple

_TYPE = "fuse.tidemark"
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mount, and what of it is mounted there."""

    device: int
    root: str
    path: str


def mounts() -> list[Mount]:
    """Returns the Tidemark mounts that this process can see."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        return [mount for mount in map(_parse, table) if mount is not None]


def _parse(line: str) -> Mount | None:
    before, _, after = line.partition(" - ")
    fields = before.split()
    if after.split(" ", 1)[0] != _TYPE or len(fields) < 5:
        return None
    major, _, minor = fields[2].partition(":")
    return Mount(os.makedev(int(major), int(minor)), _plain(fields[3]), _plain(fields[4]))


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


_served: dict[int, tuple[float, bool]] = {}
# The mount table of a busy host has thousands of lines, and DCP asks once for each tensor.
_SERVED_S = 1.0


def serves(device: int) -> bool:
    """Whether files with this ``st_dev`` lie on a Tidemark mount, or did a moment ago."""
    now = time.monotonic()
    known = _served.get(device)
    if known is None or now - known[0] > _SERVED_S:
        _served.clear()
        known = _served[device] = (now, any(mount.device == device for mount in mounts()))
    return known[1]


def mount_of(path: str) -> Mount | None:
    """Returns the mount that an existing path lies on."""
    device = os.stat(path).st_dev
    path = os.path.realpath(path)
    found = [m for m in mounts() if m.device == device and (path + "/").startswith(m.path.rstrip("/") + "/")]
    return max(found, key=lambda mount: len(mount.path), default=None)


def accepts(path: str) -> bool:
    """Whether a file that is opened for writing by this name is a regular file on a Tidemark mount."""
    from ._native import is_fuse

    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return False
    except FileNotFoundError:
        if os.path.islink(path):
            return False
        path = os.path.dirname(path) or "."
        found = None
    return is_fuse(path) and serves((found or os.stat(path)).st_dev)


def is_file_on_mount(fd: int) -> bool:
    """Whether an open file is a regular file on a Tidemark mount."""
    from ._native import is_fuse

    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and is_fuse(f"/proc/self/fd/{fd}") and serves(found.st_dev)


def can_map(fd: int) -> bool:
    """Whether a mapping of an open file is the memory file itself: the mount is in passthrough, and is seen whole here."""
    device = os.fstat(fd).st_dev
    for mount in mounts():
        if mount.device == device and mount.root == "/":
            try:
                with open(os.path.join(mount.path, ".tidemark", "status.json"), "rb") as status:
                    return bool(json.load(status)["mount"]["mode"] == "passthrough")
            except (OSError, ValueError, KeyError, TypeError):
                return False
    return False
