"""Random state dicts: dtypes, views, shared storages, zero sizes, nesting, subclasses, plain objects."""

from __future__ import annotations

import collections
import random
from typing import Any

import torch

DTYPES = [
    getattr(torch, name)
    for name in (
        "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128 "
        "float8_e4m3fn float8_e5m2 uint16 uint32 uint64"
    ).split()
    if hasattr(torch, name)
]


class Tagged(torch.Tensor):
    """A subclass that a program could have."""


class Module(torch.nn.Module):
    """A module with parameters, a buffer and tied weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 3)
        self.second = torch.nn.Linear(width, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))


def content(dice: random.Random, size: int) -> bytearray:
    """Returns random bytes. Some begin as a zip archive's data descriptor does, which torch's writer takes for one."""
    raw = bytearray(dice.randbytes(size))
    if size >= 4 and dice.random() < 0.05:
        raw[:4] = b"PK\x07\x08"
    return raw


def storage(dice: random.Random, size: int) -> torch.UntypedStorage:
    """Returns a storage whose bytes the dice decide, so that a seed is the same state each time."""
    return torch.UntypedStorage(list(content(dice, size)))


def tensor(dice: random.Random) -> torch.Tensor:
    """Returns a tensor that owns its storage. Some are larger than what the copier gathers, some than a block."""
    count = dice.choice([0, 1, 1, 3, 17, 100, 1000, 40_000, 140_000] + [700_000] * (dice.random() < 0.1))
    dtype = dice.choice(DTYPES)
    raw = torch.frombuffer(content(dice, max(count, 1) * dtype.itemsize), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw & 1
    made = raw.view(dtype)[:count]
    if count % 4 == 0 and dice.random() < 0.3:
        made = made.reshape(4, -1)
    return made.clone() if count == 0 else made


def view(dice: random.Random, of: torch.Tensor) -> torch.Tensor:
    """Returns another look at the same storage."""
    flat = of.reshape(-1)
    kind = dice.randrange(4)
    if kind == 0 and flat.numel() > 2:
        return flat[1 : flat.numel() // 2 + 1]
    if kind == 1 and flat.numel() > 2:
        return flat[:: dice.randint(2, 5)]
    if kind == 2 and of.dim() == 2:
        return of.t()
    return of


def value(dice: random.Random, known: list[torch.Tensor], depth: int) -> Any:
    """Returns something that a program could save."""
    kind = dice.randrange(12 if depth < 3 else 8)
    if kind < 3 or (kind == 3 and not known):
        known.append(tensor(dice))
        return known[-1]
    if kind == 3:
        return view(dice, dice.choice(known))
    if kind == 4:
        floats = torch.rand(dice.randint(1, 20_000))
        return torch.nn.Parameter(floats) if dice.random() < 0.6 else floats.as_subclass(Tagged)
    if kind == 5:
        return dice.choice([None, True, 7, -(1 << 70), 0.5, "text é", b"bytes", (1, 2), range(3), torch.Size([2, 3])])
    if kind == 6:
        return dice.choice([torch.float32, torch.device("cpu"), storage(dice, dice.choice([0, 5, 200_000]))])
    if kind == 7:
        return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,)) if dice.random() < 0.3 else Module(4)
    make = dice.choice([dict, collections.OrderedDict, list, tuple])
    inside = [value(dice, known, depth + 1) for _ in range(dice.randint(0, 6))]
    if make in (list, tuple):
        return make(inside)
    return make((f"k{number}.weight", entry) for number, entry in enumerate(inside))


def state(seed: int) -> Any:
    """Returns the state dict of a seed."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    known: list[torch.Tensor] = []
    return {f"layer{number}": value(dice, known, 0) for number in range(dice.randint(0, 12))}
