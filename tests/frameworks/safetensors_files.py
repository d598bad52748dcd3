"""safetensors, one file and several with an index.

safetensors_files.py save DIR SEED   DIR/single.safetensors, and DIR/sharded/ with model.safetensors.index.json
safetensors_files.py load DIR        load both, print the hashes of each
"""

import json
import os
import sys

from safetensors.torch import load_file, save_file

from tensors import fail, say, small_state

SHARDS = 3


def shard_name(number):
    return f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"


def save(directory, state):
    save_file(state, os.path.join(directory, "single.safetensors"))
    sharded = os.path.join(directory, "sharded")
    os.makedirs(sharded)
    names = sorted(state)
    weight_map = {name: shard_name(index % SHARDS) for index, name in enumerate(names)}
    for number in range(SHARDS):
        part = {name: state[name] for name in names if weight_map[name] == shard_name(number)}
        save_file(part, os.path.join(sharded, shard_name(number)), metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in state.values())
    with open(os.path.join(sharded, "model.safetensors.index.json"), "w") as index:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, index)


def load_sharded(directory):
    with open(os.path.join(directory, "model.safetensors.index.json")) as index:
        weight_map = json.load(index)["weight_map"]
    state = {}
    for name in sorted(set(weight_map.values())):
        state.update(load_file(os.path.join(directory, name)))
    return state


def main():
    command, directory = sys.argv[1:3]
    if command == "save":
        os.makedirs(directory, exist_ok=True)
        state = small_state(int(sys.argv[3]))
        save(directory, state)
        say("saved", state)
    elif command == "load":
        say("single", load_file(os.path.join(directory, "single.safetensors")))
        say("sharded", load_sharded(os.path.join(directory, "sharded")))
    else:
        fail(f"unknown command {command}")


main()
