"""Is a file of ours the file that safetensors writes?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

import states  # noqa: E402
import tidemark  # noqa: E402

pytestmark = pytest.mark.usefixtures("fast")


def compare(tensors: dict[str, Any], folder: Path, tmp_path: Path, **options: Any) -> None:
    ours, theirs = folder / "a.safetensors", tmp_path / "a.safetensors"
    safetensors.save_file(tensors, ours, **options)
    # Not on the mount, so by safetensors itself.
    safetensors.save_file(tensors, theirs, **options)
    assert ours.read_bytes() == theirs.read_bytes()
    assert ours.stat().st_mode == theirs.stat().st_mode


def test_a_file_is_theirs(folder: Path, tmp_path: Path, copies: list[str]) -> None:
    tensors = {"b.weight": torch.rand(2_000_003), "a": torch.ones((2, 3), dtype=torch.bfloat16), "é\n\"": torch.zeros(0, 3)}
    compare(tensors, folder, tmp_path)
    compare(tensors, folder, tmp_path, metadata={"format": "pt"})
    assert copies == [str(folder / "a.safetensors")] * 2
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.save_file({"a": torch.ones(4, 4).t()}, folder / "a.safetensors")


def test_several_keys_of_metadata(folder: Path) -> None:
    """They have no order in safetensors."""
    metadata = {f"key{number}": str(number) for number in range(9)}
    safetensors.save_file({"a": torch.ones(3)}, folder / "a.safetensors", metadata=metadata)
    with safetensors.safe_open(folder / "a.safetensors", "pt") as file:
        assert file.metadata() == metadata and torch.equal(file.get_tensor("a"), torch.ones(3))


@pytest.mark.parametrize("options", [{"metadata": {}}, {"metadata": {"a": 1}}])
def test_what_is_unusual_is_theirs(folder: Path, copies: list[str], options: dict[str, Any]) -> None:
    try:
        safetensors.save_file({"a": torch.ones(3)}, folder / "a.safetensors", **options)
    except TypeError:
        assert options == {"metadata": {"a": 1}}
    assert copies == []


def test_random_tensors(folder: Path, tmp_path: Path, request: pytest.FixtureRequest, copies: list[str]) -> None:
    first = request.config.getoption("--seed") or random.SystemRandom().randrange(1 << 32)
    dtypes = [dtype for dtype in states.DTYPES if dtype != torch.complex128]
    for seed in range(first, first + max(1, request.config.getoption("--states") // 4)):
        dice = random.Random(seed)
        tensors = {}
        while len(tensors) < dice.randint(0, 9):
            made = states.tensor(dice)
            if made.dtype in dtypes:
                tensors[dice.choice(["w", "b.c", "layer", "Ω"]) + str(len(tensors))] = made
        compare(tensors, folder, tmp_path)
    assert copies
    tidemark.accelerate(False)
    assert type(safetensors.serialize_file).__name__ != "_SerializeFile"
