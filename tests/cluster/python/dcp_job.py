"""A training job over several hosts that saves by torch.distributed.checkpoint, and whose every step can be compared.

dcp_job.py DIR --until N --every K [--width W] [--pause-s S] [--tracker]

With --tracker it saves as Megatron-LM does: to DIR/iter_<step>, after which rank 0 writes the step to
DIR/latest_checkpointed_iteration.txt, and every rank begins at the step that it reads there.

Trains up to step N and saves every K steps to DIR/step_<step>: parameters and Adam's moments in parts over all ranks
(FSDP2), the generator of each rank as its own. It begins where the newest DIR/step_<step> with a .metadata ends. DIR may
be another path on each host; every rank looks for itself, and the job ends when they find different things.

It prints JSON lines: `found` (what this rank saw), `resumed`, `step`, `saving`, `saved`, `done`. A `hash` covers what this
rank holds of the state, bit for bit; `whole` covers the parameters as they are without ranks, and is the same whatever the
number of ranks.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BATCH, LAYERS = 4, 4


class Net(nn.Module):
    """Its dropout draws from the global generator: a resumed job differs where that was not restored."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(x)))
        return x


def tell(event, **words):
    print(json.dumps({"event": event, "rank": dist.get_rank(), **words}), flush=True)


def flatten(state, prefix=""):
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from flatten(state[key], f"{prefix}{key}/")
    else:
        yield prefix, state


def digest(state, whole=False):
    """The hash of what this rank holds of a nested state; of all of it with `whole`, which every rank must ask for."""
    hashed = hashlib.sha256()
    for path, value in flatten(state):
        if isinstance(value, DTensor):
            value = value.full_tensor() if whole else value.to_local()
        hashed.update(path.encode())
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous()
            hashed.update(f"{value.dtype} {tuple(value.shape)}".encode())
            if value.numel():
                hashed.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()


def tracker(folder):
    return os.path.join(folder, "latest_checkpointed_iteration.txt")


def newest(folder, by_tracker):
    """The newest step that was saved to its end; 0 when there is none."""
    if by_tracker:
        if not os.path.exists(tracker(folder)):
            return 0
        with open(tracker(folder)) as file:
            return int(file.read())
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(match[1]) for match in (re.fullmatch(r"step_(\d+)", name) for name in names) if match]
    whole = [step for step in steps if os.path.exists(os.path.join(folder, f"step_{step}", ".metadata"))]
    return max(whole, default=0)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--width", type=int, default=256, help="3 MB of state at 256, four times that at 512")
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each step, so that a test can act in between")
    parser.add_argument("--tracker", action="store_true", help="names and a tracker as Megatron-LM has them")
    return parser.parse_args()


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (world,))
    model = Net(args.width)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # From here on the ranks draw different numbers.
    torch.manual_seed(1000 + rank)

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {
            "model": weights,
            "optimizer": moments,
            f"random_{rank}": torch.get_rng_state(),
            "step": torch.tensor(step),
        }

    def place(step):
        return os.path.join(args.dir, f"iter_{step:07d}" if args.tracker else f"step_{step}")

    step = newest(args.dir, args.tracker)
    tell("found", step=step)
    found = [None] * world
    dist.all_gather_object(found, step)
    if len(set(found)) != 1:
        print(f"the ranks found different steps: {found}", file=sys.stderr, flush=True)
        sys.exit(3)
    if step:
        began = time.monotonic()
        loaded = state()
        # Another value, so that what is not loaded is seen.
        loaded["step"].zero_()
        own = f"random_{rank}"
        # A rank that was not there before has no generator to restore.
        if own not in dcp.FileSystemReader(place(step)).read_metadata().state_dict_metadata:
            del loaded[own]
        dcp.load(loaded, checkpoint_id=place(step))
        assert loaded["step"] == step, f"{place(step)} is of step {loaded['step']}"
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        if own in loaded:
            torch.set_rng_state(loaded[own])
        seconds = time.monotonic() - began
        now = state()
        tell("resumed", step=step, hash=digest(now), whole=digest(now["model"], whole=True), seconds=seconds)
    while step < args.until:
        step += 1
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(BATCH, args.width, generator=generator)
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = state()
        tell("step", step=step, hash=digest(now), whole=digest(now["model"], whole=True))
        if step % args.every == 0:
            tell("saving", step=step)
            began = time.monotonic()
            dcp.save(now, checkpoint_id=place(step))
            if args.tracker and rank == 0:
                with open(tracker(args.dir), "w") as file:
                    file.write(str(step))
            tell("saved", step=step, seconds=time.monotonic() - began)
        time.sleep(args.pause_s)
    tell("done", step=step)
    dist.barrier()
    dist.destroy_process_group()


main()
