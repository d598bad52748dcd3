"""torch.save and torch.load of one file.

torch_file.py save PATH SEED        save and print the hashes
torch_file.py load PATH             load, with and without mmap, and print the hashes of each
torch_file.py die-midway PATH SEED  save, and be killed by SIGKILL when half of the bytes are written
torch_file.py save-on DIRECTORY      save step after step, the last two kept, until SIGTERM; then print the hashes of those
torch_file.py hold-mapped PATH      map the file shared and writable, close it, store; SIGTERM lets go of it
"""

import os
import signal
import sys

import torch

from tensors import fail, say, small_state, wait_to_be_killed


class DiesMidway:
    """A file that kills its process when so many bytes have gone through it."""

    def __init__(self, path, limit_bytes):
        self.file = open(path, "wb", buffering=0)
        self.left = limit_bytes

    def write(self, data):
        data = memoryview(data).cast("B")
        if len(data) >= self.left:
            self.file.write(data[: self.left])
            # What was synced is kept, and is no whole file.
            os.fsync(self.file.fileno())
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= len(data)
        return self.file.write(data)

    def flush(self):
        pass


def save_on(directory):
    """Saves one state of 200 MB again and again, under a new name each time, as a trainer that keeps its last two."""
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    state = {"weight": torch.randn(50, 1024, 1024, generator=torch.Generator().manual_seed(1))}
    step = 0
    while not ended or step < 2:
        step += 1
        state["step"] = torch.tensor(step)
        print(f"SAVING {step}", flush=True)
        torch.save(state, os.path.join(directory, f"step-{step}.pt"))
        print(f"SAVED {step}", flush=True)
        if step > 1:
            # A mapping of what was saved before, read while daemons die.
            mapped = torch.load(os.path.join(directory, f"step-{step - 1}.pt"), mmap=True)
            if not torch.equal(mapped["weight"], state["weight"]):
                fail(f"step {step - 1} reads back as something else")
        if step > 2:
            os.remove(os.path.join(directory, f"step-{step - 2}.pt"))
    for kept in (step - 1, step):
        state["step"] = torch.tensor(kept)
        say(f"step-{kept}.pt", state)


def main():
    command, path = sys.argv[1:3]
    if command == "save":
        state = small_state(int(sys.argv[3]))
        torch.save(state, path)
        say("saved", state)
    elif command == "load":
        say("read", torch.load(path))
        mapped = torch.load(path, mmap=True)
        say("mapped", mapped)
        # A private mapping: what the job stores there must not reach the file.
        mapped["weight"].zero_()
        say("reread", torch.load(path))
    elif command == "die-midway":
        state = small_state(int(sys.argv[3]))
        size_bytes = sum(t.numel() * t.element_size() for t in state.values())
        torch.save(state, DiesMidway(path, size_bytes // 2))
        fail("the file was written to its end: nothing killed this process")
    elif command == "save-on":
        save_on(path)
    elif command == "hold-mapped":
        torch.save(small_state(1), path)
        size_bytes = os.path.getsize(path)
        # torch.from_file closes the descriptor and keeps a shared, writable mapping.
        mapped = torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
        print("MAPPED", flush=True)

        def store():
            # Offset 0 is in the zip signature; storing the same byte keeps the file loadable.
            mapped[0] = mapped[0].item()

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        wait_to_be_killed(store)
    else:
        fail(f"unknown command {command}")


main()
