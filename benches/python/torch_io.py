"""Times torch.save, torch.load and torch.load(mmap=True) in two places, in turns.

Usage: torch_io.py MOUNT BASELINE SIZE_BYTES ROUNDS

MOUNT is a folder of a Tidemark mount. ROUNDS is even, so that each place is the first of as many rounds as the other.
Prints one line of JSON: {operation: {place: [seconds, ...]}}. `load` and `mmap` are taken when all that was saved is
committed; `…_sealing` right after a save into the mount, which the daemon hashes then; `…_draining` while one is uploaded.
The baseline is read beside the same work. `sink` is torch.save into an object that drops its bytes (what torch itself
costs), `memcpy` a copy of the same bytes; both under "baseline".
"""

import gc
import json
import os
import sys
import time

import torch

# Sixteen tensors of equal size: a model has more, but the large ones hold nearly all bytes.
TENSORS = 16

# Of each place in each round, where nothing drains, or something does for long: one disturbance doubles a sample.
LOAD_SAMPLES = 2
MMAP_SAMPLES = 4

# Touched before each of them: a job that computes has nothing of the file system in its caches, and who came second
# would find it there, 1 to 2 ms of 3.
BEYOND_CACHE_BYTES = 256 << 20

# The settle time is 5 s, and a paced upload takes as long as saves are apart.
STATE_MAX_S = 120


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
    """Memory that was free for long is slow in a virtual machine: touch it, and give it back."""
    torch.ones(size_bytes, dtype=torch.uint8)


def in_turns(order, samples):
    """Each of `order` so many times, every other time the other way round."""
    for sample in range(samples):
        yield from order if sample % 2 else reversed(order)


def wait_until(path, *states):
    """Until the daemon's word for a file on the mount is one of `states`."""
    deadline = time.monotonic() + STATE_MAX_S
    while (state := os.getxattr(path, "user.tidemark.state").decode()) not in states:
        if time.monotonic() > deadline:
            sys.exit(f"{path} is {state}, not {' or '.join(states)}, after {STATE_MAX_S} s")
        time.sleep(0.02)


def first_tensor(path):
    state = torch.load(path, mmap=True, weights_only=True)
    return state["0"][0].item()


def main():
    mount, baseline, size_bytes, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    elements = max(size_bytes // TENSORS // 4, 1)
    state = {str(i): torch.rand(elements) for i in range(TENSORS)}
    name = "tidemark-bench-torch.pt"
    places = {"mount": os.path.join(mount, name), "baseline": os.path.join(baseline, name)}
    seconds = {}
    target = {key: tensor.clone() for key, tensor in state.items()}
    measured = False

    def record(operation, place, took):
        if measured:
            seconds.setdefault(operation, {}).setdefault(place, []).append(took)

    def make_ready():
        """Twice what a sample takes: it is given some of what was not touched besides what was."""
        gc.collect()
        warm(2 * size_bytes)

    def save_new(place):
        """The seconds of a save under a name that is free."""
        if os.path.exists(places[place]):
            os.unlink(places[place])
        make_ready()
        return timed(lambda: torch.save(state, places[place]))

    def load(place, beside=""):
        loaded = []
        took = timed(lambda: loaded.append(torch.load(places[place], weights_only=True)))
        record(f"load{beside}", place, took)
        if not torch.equal(loaded[0]["0"], state["0"]):
            sys.exit(f"{places[place]} does not load what was saved")

    def first_tensors(order, beside=""):
        for place in in_turns(order, MMAP_SAMPLES):
            # Before the time, not by chance in it: 25 ms with all that torch is.
            gc.collect()
            warm(BEYOND_CACHE_BYTES)
            record(f"mmap{beside}", place, timed(lambda: first_tensor(places[place])))

    for round_number in range(rounds + 1):
        measured = round_number > 0  # the first round is thrown away
        order = ["mount", "baseline"] if round_number % 2 else ["baseline", "mount"]
        for place in order:
            record("save", place, save_new(place))
        for place in order:
            save_new("mount")
            load(place, "_sealing")
        for place in order:
            save_new("mount")
            record("mmap_sealing", place, timed(lambda: first_tensor(places[place])))
            make_ready()
            wait_until(places["mount"], "complete", "prepared", "committed")
            load(place, "_draining")
            first_tensors([place], "_draining")
        wait_until(places["mount"], "committed")
        for place in in_turns(order, LOAD_SAMPLES):
            make_ready()
            load(place)
        first_tensors(order)
        record("sink", "baseline", timed(lambda: torch.save(state, Sink())))
        record("memcpy", "baseline", timed(lambda: [target[key].copy_(state[key]) for key in state]))
    for path in places.values():
        os.unlink(path)
    print(json.dumps(seconds))


main()
