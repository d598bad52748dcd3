"""Where the tests save: on a real mount, which ``TIDEMARK_TEST_MOUNT`` names.

Without it those tests are skipped, so that ``pytest`` alone runs what needs no daemon.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidemark

_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--states", type=int, default=300, help="random state dicts to compare (default: 300)")
    parser.addoption("--long", action="store_true", help="also what waits for half a minute")
    parser.addoption("--seed", type=int, default=None, help="seed of the random state dicts (default: a new one)")


@pytest.fixture(scope="session")
def mount() -> Path:
    """The mount's root."""
    found = os.environ.get("TIDEMARK_TEST_MOUNT")
    if not found:
        pytest.skip("TIDEMARK_TEST_MOUNT names no mount")
    return Path(found)


@pytest.fixture
def folder(mount: Path) -> Iterator[Path]:
    """A new directory on the mount, which goes with the test: memory for the next one is made ready again."""
    made = mount / f"wheel{os.getpid()}-{next(_numbers)}"
    made.mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def fast() -> Iterator[None]:
    """The accelerator is on in this test."""
    tidemark.accelerate()
    yield
    tidemark.accelerate(False)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the archives and files that the native half has begun to write. A test that must not fall back looks here."""
    from tidemark import _safetensors, _torch

    seen: list[str] = []
    archive = _torch.Archive

    def noted(fd: int, base: int, name: str, alignment: int, threads: int, mapped: bool) -> object:
        # The comparison with torch before the first archive is not one of the test's.
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
            seen.append(name)
        return archive(fd, base, name, alignment, threads, mapped)

    write = _safetensors._write

    def noted_write(path: str, *rest: object) -> None:
        seen.append(path)
        write(path, *rest)

    monkeypatch.setattr(_torch, "Archive", noted)
    monkeypatch.setattr(_safetensors, "_write", noted_write)
    return seen
