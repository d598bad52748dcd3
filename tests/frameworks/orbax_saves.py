"""Orbax's CheckpointManager with JAX in one process: saves every step in the background, keeps two.

orbax_saves.py RUN STEPS    see steps.py; resumes from `latest_step`
"""

import hashlib
import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

WIDTH, LAYERS, BATCH = 640, 6, 4
KEPT = 2


def new_state():
    """Weights and Adam's moments; the key that dropout draws from is part of it."""
    keys = jax.random.split(jax.random.key(1), LAYERS)
    weights = {f"layer{i}": jax.random.normal(key, (WIDTH, WIDTH)) * 0.02 for i, key in enumerate(keys)}
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return {"weights": weights, "mean": zeros, "square": zeros, "random": jax.random.key_data(jax.random.key(2))}


def loss_of(weights, x, key):
    y = x
    for i, (name, key) in enumerate(zip(sorted(weights), jax.random.split(key, LAYERS))):
        kept = jax.random.bernoulli(key, 0.9, y.shape)
        y = y + jax.nn.gelu(y @ weights[name]) * kept
    return jnp.mean((y - x[:, ::-1]) ** 2)


@jax.jit
def train(state, step):
    key, drawn = jax.random.split(jax.random.wrap_key_data(state["random"]))
    x = jax.random.normal(jax.random.key(1000 + step), (BATCH, WIDTH))
    gradients = jax.grad(loss_of)(state["weights"], x, drawn)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, state["square"], gradients)
    weights = jax.tree.map(lambda w, m, s: w - 1e-3 * m / (jnp.sqrt(s) + 1e-8), state["weights"], mean, square)
    return {"weights": weights, "mean": mean, "square": square, "random": jax.random.key_data(key)}


def say(step, state):
    """As tensors.py, which is torch's."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.asarray(leaf)
        whole = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
        whole.update(np.ascontiguousarray(array).tobytes())
        found[jax.tree_util.keystr(path)] = whole.hexdigest()
    print(f"HASHES step-{step} " + json.dumps(found, sort_keys=True), flush=True)


def main():
    run, steps = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True)
    with ocp.CheckpointManager(run, options=options) as manager:
        state, step = new_state(), manager.latest_step() or 0
        if step:
            state = manager.restore(step, args=ocp.args.StandardRestore(state))
            say(step, state)
        print(f"RESUMED {step}", flush=True)
        while step < steps:
            step += 1
            state = train(state, step)
            say(step, state)
            print(f"SAVING {step}", flush=True)
            manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            print(f"SAVED {step}", flush=True)
    print("DONE", flush=True)


main()
