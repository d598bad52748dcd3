"""PEFT: a base model that stays as it is, and a LoRA adapter that is trained and saved by `save_pretrained` at every step.

peft_adapters.py RUN STEPS    see steps.py; resumes from the highest `checkpoint-N`, which has the optimizer beside the adapter
"""

import os
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from steps import LAYERS, Net, latest, loss_of, pause, tell
from tensors import say

# The adapter is larger than the base model, so that a save takes long enough to be killed in.
LORA_RANK = 768


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    base = Net()
    step = latest(run, r"checkpoint-(\d+)")
    place = os.path.join(run, f"checkpoint-{step}")
    if step:
        model = PeftModel.from_pretrained(base, place, is_trainable=True)
    else:
        layers = [f"layers.{number}" for number in range(LAYERS)]
        model = get_peft_model(base, LoraConfig(r=LORA_RANK, target_modules=layers, lora_dropout=0.1))
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)

    def hashes():
        say(f"step-{step}", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    if step:
        optimizer.load_state_dict(torch.load(os.path.join(place, "optimizer.pt")))
        torch.set_rng_state(torch.load(os.path.join(place, "random.pt")))
        hashes()
    tell("RESUMED", step)
    model.train()
    while step < steps:
        step += 1
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        hashes()
        pause()
        tell("SAVING", step)
        place = os.path.join(run, f"checkpoint-{step}")
        model.save_pretrained(place)
        torch.save(optimizer.state_dict(), os.path.join(place, "optimizer.pt"))
        torch.save(torch.get_rng_state(), os.path.join(place, "random.pt"))
        tell("SAVED", step)
    print("DONE", flush=True)


main()
