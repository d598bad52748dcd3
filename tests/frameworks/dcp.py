"""torch.distributed.checkpoint on two gloo ranks.

dcp.py save DIR SEED          save, print the hashes of this rank's parts
dcp.py async-save DIR SEED    the same through async_save
dcp.py load DIR               load into other values, print the hashes
dcp.py stall DIR SEED         save, but never publish .metadata: print STALLED and wait for ever
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tensors import fail, say, small_state, wait_to_be_killed


class NeverPublishes(dcp.FileSystemWriter):
    """Writes every shard and stops where the coordinator would write .metadata."""

    def finish(self, metadata, results):
        print("STALLED", flush=True)
        wait_to_be_killed()


def distributed(seed):
    """The small state with its large tensors in parts, one replicated, and one plain value per rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for name, tensor in small_state(seed).items():
        if tensor.dim() and tensor.shape[0] >= 1024:
            state[name] = distribute_tensor(tensor, mesh, [Shard(0)])
        elif tensor.dim() and tensor.numel():
            state[name] = distribute_tensor(tensor, mesh, [Replicate()])
        else:
            state[name] = tensor
    state[f"only_on_rank_{dist.get_rank()}"] = torch.full((300_000,), seed + dist.get_rank())
    return state


def main():
    command, path = sys.argv[1:3]
    dist.init_process_group("gloo")
    if command == "save":
        state = distributed(int(sys.argv[3]))
        dcp.save(state, checkpoint_id=path)
        say("saved", state)
    elif command == "async-save":
        state = distributed(int(sys.argv[3]))
        say("saved", state)
        pending = dcp.async_save(state, checkpoint_id=path)
        # async_save has its own copy: what training changes now is not in the checkpoint.
        for value in state.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
        pending.result()
    elif command == "load":
        state = distributed(seed=987)
        dcp.load(state, checkpoint_id=path)
        say("loaded", state)
    elif command == "stall":
        state = distributed(int(sys.argv[3]))
        dcp.save(state, storage_writer=NeverPublishes(path), no_dist=False)
        fail("the save came back although .metadata was never published")
    else:
        fail(f"unknown command {command}")
    dist.barrier()
    dist.destroy_process_group()


main()
