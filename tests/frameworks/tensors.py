"""Hashes of tensors, printed as one line that the suite compares word for word.

A hash covers dtype, shape and bytes, so that equal hashes mean equal bit for bit.
"""

import hashlib
import json
import os
import sys
import time

import torch


def digest(tensor):
    """The hash of one tensor; of this rank's part of it when it is distributed."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach().contiguous()
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    whole = hashlib.sha256(head)
    if tensor.numel():
        whole.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return whole.hexdigest()


def flatten(state, prefix=""):
    """Every tensor of a nested state with the path to it; other leaves as their text."""
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from flatten(state[key], f"{prefix}{key}/")
    elif isinstance(state, (list, tuple)):
        for index, item in enumerate(state):
            yield from flatten(item, f"{prefix}{index}/")
    elif isinstance(state, torch.Tensor):
        yield prefix.rstrip("/"), digest(state)
    else:
        yield prefix.rstrip("/"), repr(state)


def say(label, state):
    print(f"HASHES {label} " + json.dumps(dict(flatten(state)), sort_keys=True), flush=True)


def small_state(seed):
    """A few tensors of every kind that a checkpoint holds; about 25 MB."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(2048, 1024, generator=generator),
        "half": torch.randn(1024, 1024, generator=generator).to(torch.bfloat16),
        "moment": torch.randn(3, 1024, 1024, generator=generator),
        "mask": torch.rand(1000, generator=generator) > 0.5,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "step": torch.tensor(seed, dtype=torch.int64),
    }


def wait_to_be_killed(meanwhile=lambda: None):
    """Stays until the test kills this process; ends by itself when the test is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        meanwhile()
        time.sleep(0.1)


def fail(message):
    print(message, file=sys.stderr, flush=True)
    sys.exit(1)
