"""A model of GPT-2's size (124 M parameters, Adam) on two gloo ranks, sharded with FSDP.

gpt2.py train RUN       a few steps; save by DCP to RUN/step-N and by torch.save to RUN/full/step-N.pt; print the
                        hashes and SAVED, then wait to be killed
gpt2.py load RUN        on two ranks: load the DCP checkpoint into other weights, print the hashes of the parts
gpt2.py load-alone RUN  on one process without a process group: the torch.save file, with and without mmap, and the
                        DCP checkpoint as whole tensors; print the hashes of each
"""

import gc
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tensors import fail, say, wait_to_be_killed

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 50257, 1024, 768, 12, 12
STEPS = 2
# Tiny on purpose: what is saved does not depend on it, and the machine may have two cores.
BATCH, SEQUENCE = 1, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        # Input and output embeddings are one matrix, as in GPT-2.
        return F.linear(self.norm(x), self.tokens.weight)


def training_state(seed):
    torch.manual_seed(seed)
    model = Gpt2()
    count = sum(p.numel() for p in model.parameters())
    if not 120_000_000 < count < 130_000_000:
        fail(f"the model has {count} parameters")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def state_of(model, optimizer, **options):
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": weights, "optimizer": moments}


def main():
    command, run = sys.argv[1:3]
    sharded, full = os.path.join(run, f"step-{STEPS}"), os.path.join(run, "full", f"step-{STEPS}.pt")
    if command == "load-alone":
        say("full", torch.load(full))
        say("mapped", torch.load(full, mmap=True))
        like = torch.load(full, mmap=True)
        whole = {part: {} for part in like}
        for part in like:
            whole[part] = empty_like(like[part])
        del like
        gc.collect()
        dcp.load(whole, checkpoint_id=sharded, no_dist=True)
        say("whole", whole)
        return

    dist.init_process_group("gloo")
    if command == "train":
        model, optimizer = training_state(seed=1)
        print(f"LOSS {train(model, optimizer, STEPS):.3f}", flush=True)
        state = state_of(model, optimizer)
        began = time.monotonic()
        dcp.save(state, checkpoint_id=sharded)
        print(f"SECONDS dcp.save {time.monotonic() - began:.3f}", flush=True)
        say("parts", state)
        state = state_of(model, optimizer, full_state_dict=True, cpu_offload=True)
        if dist.get_rank() == 0:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            began = time.monotonic()
            torch.save(state, full)
            print(f"SECONDS torch.save {time.monotonic() - began:.3f}", flush=True)
            say("full", state)
        print("SAVED", flush=True)
        wait_to_be_killed()
    elif command == "load":
        model, optimizer = training_state(seed=2)
        # A step, so that Adam has moments to load into; they are different ones.
        train(model, optimizer, 1)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=sharded)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        say("parts", state_of(model, optimizer))
        dist.barrier()
        dist.destroy_process_group()
    else:
        fail(f"unknown command {command}")


def empty_like(state):
    """The same nesting with other values in every tensor."""
    if isinstance(state, dict):
        return {key: empty_like(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(empty_like(value) for value in state)
    return torch.zeros_like(state) - 1 if isinstance(state, torch.Tensor) else state


main()
