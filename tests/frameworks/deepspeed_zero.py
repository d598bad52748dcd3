"""DeepSpeed with ZeRO on two gloo ranks: saves every step, resumes from what `latest` names.

deepspeed_zero.py RUN STEPS STAGE            see steps.py; ZeRO stage 1, 2 or 3
deepspeed_zero.py RUN STEPS STAGE SLOW_STEP  rank 1 comes three seconds late with its own file of that step
"""

import os
import sys
import time

# Without a word it looks for accelerators, and the CUDA libraries here are stubs.
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

from steps import BATCH, loss_of, new_training, tell
from tensors import say

SLOW_S = 3.0


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        # DeepSpeed's own Adam is compiled for the machine; torch's is the same everywhere.
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_min_lr": 1e-4}},
        # A threshold of zero, so that stage 3 shards every parameter.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1_000_000,
    }


def state_of(engine, stage):
    """What this rank holds: its parts where ZeRO shards, everything where it does not."""
    sharded = engine.optimizer
    return {
        "model": {name: p.ds_tensor if stage == 3 else p for name, p in engine.module.named_parameters()},
        "masters": list(sharded.fp32_partitioned_groups_flat if stage == 3 else sharded.single_partition_of_fp32_groups),
        "moments": list(sharded.optimizer.state.values()),
        "scheduler": engine.lr_scheduler.state_dict(),
        "steps": engine.global_steps,
    }


def make_late(engine, step):
    """Rank 1 is slow with its own part of one step, as a node is whose network or disk is busy."""
    writer = engine.checkpoint_engine
    write = writer.save

    def late(state, path, *rest, **more):
        if f"global_step{step}/" in str(path) and "optim_states" in str(path):
            tell("LATE", step)
            time.sleep(SLOW_S)
        return write(state, path, *rest, **more)

    if dist.get_rank() == 1:
        writer.save = late


def main():
    run, steps, stage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # An operator for inference, which DeepSpeed would compile first: for a minute and a half, once on each machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model, _ = new_training()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage))
    path, client = engine.load_checkpoint(run)
    step = client["step"] if path else 0
    tell("RESUMED", step)
    if path:
        say(f"step-{step}", state_of(engine, stage))
    if len(sys.argv) > 4:
        make_late(engine, int(sys.argv[4]))
    while step < steps:
        step += 1
        # DeepSpeed keeps no random states.
        torch.manual_seed(step)
        engine.backward(loss_of(engine, step))
        engine.step()
        say(f"step-{step}", state_of(engine, stage))
        tell("SAVING", step)
        engine.save_checkpoint(run, client_state={"step": step})
        tell("SAVED", step)
    print("DONE", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
