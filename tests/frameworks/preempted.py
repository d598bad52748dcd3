"""A job that is asked to end: its handler of SIGTERM raises, in the middle of `torch.save` too, as schedulers' examples do.

preempted.py RUN STEPS    see steps.py; resumes from the highest `step-N.pt`
"""

import os
import signal
import sys

import torch

from steps import latest, loss_of, new_training, tell
from tensors import say


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    asked = []

    def ends(*_):
        asked.append(True)
        sys.exit(143)

    signal.signal(signal.SIGTERM, ends)
    model, optimizer = new_training()

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state(), "step": step}

    step = latest(run, r"step-(\d+)\.pt")
    if step:
        loaded = torch.load(os.path.join(run, f"step-{step}.pt"))
        assert loaded["step"] == step, f"step-{step} is of step {loaded['step']}"
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        torch.set_rng_state(loaded["random"])
        say(f"step-{step}", state())
    tell("RESUMED", step)
    os.makedirs(run, exist_ok=True)
    while step < steps:
        if asked:
            # Some C code asks for an attribute and takes any exception for its absence (PyObject_HasAttr), the handler's too.
            sys.exit(143)
        step += 1
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step-{step}", state())
        tell("SAVING", step)
        torch.save(state(), os.path.join(run, f"step-{step}.pt"))
        tell("SAVED", step)
    print("DONE", flush=True)


main()
