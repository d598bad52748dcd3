"""torch.distributed.checkpoint with its index by jobs of another number of ranks each time, as elastic jobs are restarted.

dcp_elastic.py RUN STEPS    see steps.py; resumes from the highest `step-N`

Every rank computes the same and holds its part of it, so that the whole is the same bit for bit with any number of ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import steps as training
from tensors import say


def each(state, change):
    """A nested state with another tensor in the place of each that has dimensions."""
    if isinstance(state, dict):
        return {key: each(value, change) for key, value in state.items()}
    return change(state) if isinstance(state, torch.Tensor) and state.dim() else state


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # The same data on every rank.
    training.RANK = 0
    model, optimizer = training.new_training()

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "random": torch.get_rng_state(), "step": torch.tensor(step)}

    def parts():
        return each(state(), lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))

    step = training.latest(run, r"step-(\d+)")
    # No rank saves before every one has looked.
    dist.barrier()
    if step:
        loaded = parts()
        # Other values, so that what is not loaded is seen.
        loaded["step"].zero_()
        dcp.load(loaded, checkpoint_id=os.path.join(run, f"step-{step}"))
        assert loaded["step"] == step, f"step-{step} is of step {loaded['step']}"
        loaded = each(loaded, lambda part: part.full_tensor() if isinstance(part, DTensor) else part)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        torch.set_rng_state(loaded["random"])
        say(f"step-{step}", state())
    training.tell("RESUMED", step)
    while step < steps:
        step += 1
        training.loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step-{step}", state())
        whole = parts()
        training.tell("SAVING", step)
        dcp.save(whole, checkpoint_id=os.path.join(run, f"step-{step}"))
        training.tell("SAVED", step)
    print("DONE", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
