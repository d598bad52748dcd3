#!/usr/bin/env python3
"""How long two ranks wait for a save of PyTorch DCP, without and with the accelerator, in turns.

    dcp.py --mount /ckpt [--gb 0.5] [--rounds 5]       GB of each rank
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

import tidemark


def rank_main(rank: int, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    each = int(options.gb * 1e9 / 4 / 10)
    saved = {f"rank{rank}.layer{n}": torch.rand(each) for n in range(10)}
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * (options.rounds + 1)):
        fast = turn % 2 == 1
        tidemark.accelerate(fast)
        path = f"{options.mount}/bench-dcp/step{turn}"
        time.sleep(options.rest)
        dist.barrier()
        began = time.perf_counter()
        dcp.save(saved, checkpoint_id=path)
        dist.barrier()
        rates[fast].append(2 * options.gb / (time.perf_counter() - began))
        if rank == 0:
            shutil.rmtree(path)
    if rank == 0:
        without, with_it = (statistics.median(rates[fast][1:]) for fast in (False, True))
        print(f"two ranks of {options.gb} GB: {without:.2f} GB/s without, {with_it:.2f} with, ratio {with_it / without:.2f}")
        print("  without", " ".join(f"{rate:.2f}" for rate in rates[False]), " with", " ".join(f"{rate:.2f}" for rate in rates[True]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mount", required=True)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest", type=float, default=1.5)
    parser.add_argument("--port", type=int, default=29511)
    mp.spawn(rank_main, args=(parser.parse_args(),), nprocs=2)


if __name__ == "__main__":
    main()
