"""torch.distributed.checkpoint without collectives on two ranks: each writes its own part and its own index.

dcp_alone.py RUN STEPS    see steps.py; resumes from the highest `step-N`
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from steps import RANK, latest, loss_of, new_training, tell
from tensors import say


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    model, optimizer = new_training(part=RANK)

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "random": torch.get_rng_state(), "step": torch.tensor(step)}

    step = latest(run, r"step-(\d+)")
    # No rank saves before every one has looked.
    dist.barrier()
    if step:
        loaded = state()
        # Other values, so that what is not loaded is seen.
        loaded["step"].zero_()
        dcp.load(loaded, checkpoint_id=os.path.join(run, f"step-{step}"))
        assert loaded["step"] == step, f"step-{step} is of step {loaded['step']}"
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        torch.set_rng_state(loaded["random"])
        say(f"step-{step}", state())
    tell("RESUMED", step)
    while step < steps:
        step += 1
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = state()
        say(f"step-{step}", whole)
        tell("SAVING", step)
        dcp.save(whole, checkpoint_id=os.path.join(run, f"step-{step}"), use_collectives=False)
        tell("SAVED", step)
    print("DONE", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
