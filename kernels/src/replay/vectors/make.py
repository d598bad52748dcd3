"""Makes torch.txt: what torch's own for-loop does to a few parameters, as bits.

It owns the cases that the replay is held to. Made with torch 2.15.0 by
    python kernels/src/replay/vectors/make.py > kernels/src/replay/vectors/torch.txt
"""

import struct

import torch

ELEMENTS, STEPS = 40, 8


def show(name, values):
    print(name, *(f"{struct.unpack('<I', struct.pack('<f', value))[0]:08x}" for value in values.tolist()))


def case(name, optimizer, seed, scale=1.0, schedule=lambda lr, step: lr, spread=1.0, **settings):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.nn.Parameter(torch.randn(ELEMENTS, generator=generator) * 0.05)
    optimizer = optimizer([weights], foreach=False, fused=False, **settings)
    group = optimizer.param_groups[0]
    first_lr = group["lr"]
    print("case", name)
    show("weights", weights.detach())
    for step in range(STEPS):
        group["lr"] = schedule(first_lr, step)
        gradient = torch.randn(ELEMENTS, generator=generator) * spread
        print("step", group["lr"], *group["betas"], group["eps"], group["weight_decay"],
              int(group.get("decoupled_weight_decay", False)), int(group["maximize"]), scale)
        show("gradient", gradient)
        weights.grad = gradient * scale
        optimizer.step()
    state = optimizer.state[weights]
    show("weights", weights.detach())
    show("exp_avg", state["exp_avg"])
    show("exp_avg_sq", state["exp_avg_sq"])


case("adam", torch.optim.Adam, 1)
case("adam_decay", torch.optim.Adam, 2, weight_decay=0.1, lr=0.01)
case("adamw", torch.optim.AdamW, 3, lr=3e-4, betas=(0.9, 0.95))
case("adamw_schedule", torch.optim.AdamW, 4, lr=6e-4, weight_decay=0.1, schedule=lambda lr, step: lr * (step + 1) / 8)
case("maximize", torch.optim.AdamW, 5, maximize=True)
case("scaled", torch.optim.AdamW, 6, scale=0.37 / 65536, spread=65536.0)
case("low_beta", torch.optim.Adam, 7, betas=(0.3, 0.5), eps=1e-3)
case("no_beta", torch.optim.Adam, 8, betas=(0.0, 0.0), eps=1e-6)
case("small", torch.optim.AdamW, 9, spread=1e-15)
