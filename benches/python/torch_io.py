"""Times torch.save, torch.load and torch.load(mmap=True) in two places, in turns.

Usage: torch_io.py MOUNT BASELINE SIZE_BYTES ROUNDS

Prints one line of JSON: {operation: {place: [seconds, ...]}}. `sink` is torch.save into an object that drops
its bytes (what torch itself costs), `memcpy` a copy of the same bytes; both under "baseline".
"""

import gc
import json
import os
import sys
import time

import torch

# Sixteen tensors of equal size: a model has more, but the large ones hold nearly all bytes.
TENSORS = 16


class Sink:
    """A file object that drops what is written."""

    def write(self, data):
        return len(data) if isinstance(data, (bytes, bytearray)) else memoryview(data).nbytes

    def flush(self):
        pass


def timed(action):
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def warm(size_bytes):
    """Memory that was free for long is slow in a virtual machine: touch as much, and give it back."""
    torch.ones(size_bytes, dtype=torch.uint8)


def first_tensor(path):
    state = torch.load(path, mmap=True, weights_only=True)
    return state["0"][0].item()


def main():
    mount, baseline, size_bytes, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    elements = max(size_bytes // TENSORS // 4, 1)
    state = {str(i): torch.rand(elements) for i in range(TENSORS)}
    name = "tidemark-bench-torch.pt"
    places = {"mount": os.path.join(mount, name), "baseline": os.path.join(baseline, name)}
    seconds = {operation: {} for operation in ("save", "load", "mmap", "sink", "memcpy")}
    target = {key: tensor.clone() for key, tensor in state.items()}

    def record(operation, place, took, measured):
        if measured:
            seconds[operation].setdefault(place, []).append(took)

    for round_number in range(rounds + 1):
        measured = round_number > 0  # the first round is thrown away
        order = ["mount", "baseline"] if round_number % 2 else ["baseline", "mount"]
        for place in order:
            path = places[place]
            if os.path.exists(path):
                os.unlink(path)
            warm(size_bytes)
            record("save", place, timed(lambda: torch.save(state, path)), measured)
        for place in order:
            gc.collect()
            warm(size_bytes)
            loaded = []
            record("load", place, timed(lambda: loaded.append(torch.load(places[place], weights_only=True))), measured)
            if not torch.equal(loaded[0]["0"], state["0"]):
                sys.exit(f"{places[place]} does not load what was saved")
        for place in order:
            record("mmap", place, timed(lambda: first_tensor(places[place])), measured)
        record("sink", "baseline", timed(lambda: torch.save(state, Sink())), measured)
        record("memcpy", "baseline", timed(lambda: [target[key].copy_(state[key]) for key in state]), measured)
    for path in places.values():
        os.unlink(path)
    print(json.dumps(seconds))


main()
