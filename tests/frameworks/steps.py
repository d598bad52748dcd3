"""A tiny training whose every step can be compared bit for bit, and the words its driver reads.

Each script that uses it takes RUN and STEPS, resumes from RUN by its framework's own code, and saves every step up to
STEPS. `RESUMED k` is where it goes on (0: nothing was found), with the hashes of what was loaded; `SAVING k` and
`SAVED k` stand before and after each save, `HASHES step-k` before it, `DONE` at the end.
"""

import os
import re
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

# 2.6 M parameters: with Adam's moments 32 MB, so that a save takes long enough to be killed in.
WIDTH, LAYERS, BATCH = 640, 6, 4
RANK = int(os.environ.get("RANK", 0))


class Net(nn.Module):
    """Its dropout draws from the global generator: a resumed run differs where that was not restored."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(x)))
        return x


def new_training(part=0):
    """A model and its optimizer. `part` is another one: ranks that each hold a part of a model have different weights."""
    torch.set_num_threads(1)
    torch.manual_seed(1 + part)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def loss_of(model, step):
    """The loss of one step on data that only the step and the rank determine."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return F.mse_loss(model(x), x.flip(1))


def latest(run, pattern):
    """The highest step of the names in RUN that match: 0 where none does."""
    found = [re.fullmatch(pattern, name) for name in os.listdir(run)] if os.path.isdir(run) else []
    return max((int(match[1]) for match in found if match), default=0)


def pause():
    """Between two saves of one file, where its row asks for it: what is written over has to be committed before."""
    time.sleep(float(os.environ.get("BETWEEN_SAVES_S", 0)))


def tell(word, step):
    print(f"{word} {step}", flush=True)
