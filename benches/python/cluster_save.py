"""A training loop on the CPU that saves every few steps, and how long its steps, its saves and what follows them take.

cluster_save.py DIR KIND MODE --bytes N [--see DIR] [--intervals 1,2,5] [--steps N] [--saves N]

DIR is where this rank saves, on its own node's mount. KIND: `torch_save` (one rank, one file for each save) or `dcp` (each rank
its own half, or third, by torch.distributed.checkpoint). `--see` is the same directory on the mount of the coordinator's node,
where a checkpoint's state can be asked for.

MODE, each of which prints JSON lines from rank 0:
  overhead  {"every", "base_s", "with_s", "save_s"}: the mean step without saving (before and after) and with a save every so many
  latency   {"save_s", "replicated_s", "committed_s"}: each save alone; seconds from its return, where --see is given
  memory    {"saved"}: one line a save, for who watches memory meanwhile
and {"done": true, "saves", "failed", "why"} at the end: a save that fails is counted, and the loop goes on. `--bytes` is the state of one rank: parameters and two moments of Adam.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F

LAYERS, BATCH, COPIES, FLOAT_BYTES = 4, 128, 3, 4
# A state that is not reached in this time is a copy, or a commit, that does not come.
PATIENCE_S = 120
POLL_S = 0.001
WARM_STEPS = 3


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("kind", choices=["torch_save", "dcp"])
    parser.add_argument("mode", choices=["overhead", "latency", "memory"])
    parser.add_argument("--see")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--intervals", default="1")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--saves", type=int, default=5)
    return parser.parse_args()


class Job:
    def __init__(self, args):
        self.args, self.step = args, 0
        self.saves, self.failed, self.why = 0, 0, None
        # The newest save that did not fail.
        self.saved = None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        width = max(int((args.bytes / (LAYERS * COPIES * FLOAT_BYTES)) ** 0.5), 8)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(BATCH, width)

    def tell(self, **words):
        if self.rank == 0:
            print(json.dumps(words), flush=True)

    def train(self):
        self.step += 1
        loss = F.mse_loss(self.model(self.batch), self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        # All ranks go on together, as they would after exchanging gradients.
        dist.all_reduce(loss.detach())

    def name(self):
        return f"step_{self.step}" if self.args.kind == "dcp" else f"step{self.step}.pt"

    def save(self):
        """Seconds of the save, which is of the present step."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        path = os.path.join(self.args.dir, self.name())
        self.saves += 1
        began = time.perf_counter()
        try:
            if self.args.kind == "dcp":
                # What each rank has is its own, as with FSDP.
                dcp.save({f"rank{self.rank}": state}, checkpoint_id=path)
            else:
                torch.save(state, path)
            self.saved = self.name()
        # DCP raises on all ranks alike; torch.save says RuntimeError where its file said OSError.
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            self.failed += 1
            self.why = self.why or f"step {self.step}: {str(error).strip().splitlines()[-1]}"
        return time.perf_counter() - began

    def segment(self, every, steps):
        """The mean seconds of a step, saves included, and those of each save."""
        saves = []
        dist.barrier()
        began = time.perf_counter()
        for number in range(1, steps + 1):
            self.train()
            if every and number % every == 0:
                saves.append(self.save())
        dist.barrier()
        return (time.perf_counter() - began) / steps, saves

    def state(self):
        try:
            return os.getxattr(os.path.join(self.args.see, self.saved), "user.tidemark.state").decode()
        except OSError:
            return ""  # Not known there yet.

    def until(self, states):
        """Seconds from now until the newest save is in one of the states; the other ranks wait."""
        took = None
        if self.args.see and self.rank == 0 and self.saved:
            began = time.perf_counter()
            while (seen := self.state()) not in states:
                if time.perf_counter() - began > PATIENCE_S:
                    raise SystemExit(f"{self.saved} is {seen!r} after {PATIENCE_S} s, and not one of {states}")
                time.sleep(POLL_S)
            took = time.perf_counter() - began
        dist.barrier()
        return took

    def overhead(self):
        for every in map(int, self.args.intervals.split(",")):
            before, _ = self.segment(0, self.args.steps)
            with_saves, saves = self.segment(every, max(self.args.steps // every, 2) * every)
            # What the saves left to be done is over before the loop is timed without them again.
            self.until(["committed"])
            after, _ = self.segment(0, self.args.steps)
            saves.sort()
            median = saves[len(saves) // 2]
            self.tell(every=every, base_s=(before + after) / 2, with_s=with_saves, save_s=median)

    def latency(self):
        for _ in range(self.args.saves):
            self.train()
            dist.barrier()
            save_s = self.save()
            replicated_s = self.until(["replicated", "prepared", "committed"])
            left_s = self.until(["committed"])
            committed_s = None if left_s is None else replicated_s + left_s
            self.tell(save_s=save_s, replicated_s=replicated_s, committed_s=committed_s)

    def memory(self):
        for number in range(self.args.saves):
            self.train()
            self.save()
            self.tell(saved=number + 1)
        self.until(["committed"])


def main():
    args = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 0:
        os.makedirs(args.dir, exist_ok=True)
    dist.barrier()
    job = Job(args)
    for _ in range(WARM_STEPS):
        job.train()
    {"overhead": job.overhead, "latency": job.latency, "memory": job.memory}[args.mode]()
    job.tell(done=True, saves=job.saves, failed=job.failed, why=job.why)
    dist.barrier()
    dist.destroy_process_group()


main()
