"""Accelerate on two ranks, automatic naming, with a total limit: `save_state` removes old checkpoints before it writes.

accelerate_saves.py RUN STEPS LIMIT         see steps.py; `DELETED k` when step k's save has removed an old checkpoint
accelerate_saves.py RUN STEPS LIMIT WORD K  stop in the save of step K and wait to be killed: `made` when its directory is;
                                            `deleted` when the old one is gone and nothing is written, some seconds
                                            after the save before;
                                            `random` when all but the last file is (rank 0; the other rank waits for it)
"""

import os
import shutil
import sys
import time

import accelerate.accelerator
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

from steps import loss_of, new_training, tell
from tensors import say, wait_to_be_killed

# As far apart as saves are, for what looks after the saved files.
BETWEEN_SAVES_S = 8


class Progress:
    """Registered, as users do with what Accelerate does not know: the last file of a checkpoint."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def watch(progress, stop, stop_step):
    """Says when an old checkpoint was removed, and stops where it was asked to."""
    remove, save_custom = shutil.rmtree, accelerate.accelerator.save_custom_state

    def removed(path, *args, **kwargs):
        remove(path, *args, **kwargs)
        tell("DELETED", progress.step)
        if (stop, stop_step) == ("deleted", progress.step):
            wait_to_be_killed()

    def custom(*args, **kwargs):
        if (stop, stop_step) == ("random", progress.step):
            tell("STOPPED", progress.step)
            wait_to_be_killed()
        save_custom(*args, **kwargs)

    def made(path, *args, **kwargs):
        make(path, *args, **kwargs)
        if (stop, stop_step) == ("made", progress.step) and "checkpoint_" in os.path.basename(path):
            wait_to_be_killed()

    make, os.makedirs = os.makedirs, made
    shutil.rmtree = removed
    accelerate.accelerator.save_custom_state = custom


def main():
    run, steps, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    stop, stop_step = (sys.argv[4], int(sys.argv[5])) if len(sys.argv) > 4 else (None, 0)
    configuration = ProjectConfiguration(project_dir=run, automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model, optimizer = new_training()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    set_seed(1, device_specific=True)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    watch(progress, stop, stop_step)

    def hashes():
        whole = {
            "model": accelerator.unwrap_model(model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
        say(f"step-{progress.step}", whole)

    saved = os.path.join(run, "checkpoints")
    if os.path.isdir(saved) and os.listdir(saved):
        accelerator.load_state()
        # Accelerate does not restore the number that it names checkpoints by.
        configuration.iteration = progress.step
        tell("RESUMED", progress.step)
        hashes()
    else:
        tell("RESUMED", 0)

    while progress.step < steps:
        progress.step += 1
        accelerator.backward(loss_of(model, progress.step))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        hashes()
        if (stop, stop_step) == ("deleted", progress.step):
            time.sleep(BETWEEN_SAVES_S)
        tell("SAVING", progress.step)
        accelerator.save_state()
        tell("SAVED", progress.step)
    accelerator.wait_for_everyone()
    print("DONE", flush=True)
    accelerator.end_training()


main()
