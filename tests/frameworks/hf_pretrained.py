"""Hugging Face's `save_pretrained` into one directory again and again: in shards at odd steps, in one file at even ones.

hf_pretrained.py RUN STEPS    see steps.py; resumes with `from_pretrained`

transformers removes old shards and no old single file, which its loader prefers to newer shards: so the job removes that one.
"""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from steps import pause, tell
from tensors import say

VOCABULARY, LENGTH, WIDTH = 2000, 32, 256


class Trained(GPT2LMHeadModel):
    """Keeps its step among its weights: the configuration is written before them, and says nothing of theirs."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("trained", torch.zeros((), dtype=torch.int64))


def hashes(model):
    say(f"step-{model.trained.item()}", model.state_dict())


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if os.path.exists(os.path.join(run, "config.json")):
        model = Trained.from_pretrained(run)
        tell("RESUMED", model.trained.item())
        hashes(model)
    else:
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=4, n_head=4)
        model = Trained(config)
        tell("RESUMED", 0)
    model.train()
    # Without momentum the weights are all there is.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while model.trained < steps:
        step = model.trained.item() + 1
        torch.manual_seed(step)
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.trained.fill_(step)
        hashes(model)
        pause()
        tell("SAVING", step)
        single = os.path.join(run, "model.safetensors")
        if step % 2 and os.path.exists(single):
            os.remove(single)
        model.save_pretrained(run, max_shard_size="4MB" if step % 2 else "1GB")
        tell("SAVED", step)
    print("DONE", flush=True)


main()
