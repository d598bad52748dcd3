"""torch_checkpointing on two ranks, each with its own part of a model: writes to `tmp_step_N`, renamed when all are done.

torch_checkpointing_saves.py RUN STEPS    see steps.py; resumes from the highest `step_N`, as its tutorial does

It writes with O_DIRECT and does not align what it writes: ext4 refuses that, and there it is told not to.
"""

import errno
import os
import re
import sys

import torch
import torch.distributed as dist
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from steps import RANK, loss_of, new_training, tell
from tensors import say


def latest(run):
    """As the tutorial of torch_checkpointing has it."""
    found = [re.fullmatch(r"step_(\d+)", name) for name in os.listdir(run)]
    return max((int(match[1]) for match in found if match), default=0)


def takes_unaligned_direct_writes(directory):
    path = os.path.join(directory, f"probe-{RANK}")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        return os.write(file, b"x") == 1
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(file)
        os.remove(path)


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    model, optimizer = new_training(part=RANK)
    configuration = CheckpointManager.Config.with_sync_save()
    os.makedirs(run, exist_ok=True)
    configuration.storage_config = LocalFileSystemStorageConfig(use_direct_io=takes_unaligned_direct_writes(run))
    manager = CheckpointManager(configuration)

    def state():
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "step": step,
        }

    step = latest(run)
    # No rank saves before every one has looked.
    dist.barrier()
    if step:
        into = {"model": model.state_dict(), "optimizer": None, "random": None, "step": 0}
        loaded = manager.load(os.path.join(run, f"step_{step}"), into=into, strict=True)
        optimizer.load_state_dict(loaded["optimizer"])
        torch.set_rng_state(loaded["random"])
        assert loaded["step"] == step, f"step_{step} is of step {loaded['step']}"
        say(f"step-{step}", state())
    tell("RESUMED", step)
    while step < steps:
        step += 1
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step-{step}", state())
        tell("SAVING", step)
        manager.save(os.path.join(run, f"step_{step}"), state())
        tell("SAVED", step)
    print("DONE", flush=True)
    manager.close()
    dist.barrier()
    dist.destroy_process_group()


main()
