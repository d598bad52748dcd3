#!/usr/bin/env python3
"""Saves states step by step, or loads files, and prints the hashes of the tensors. Knows nothing of Tidemark.

    saves.py save DIRECTORY COUNT    DIRECTORY/step-N.pt for N from 0 on, each of 40 MB, with the line `SAVED N`
    saves.py load FILE...
"""

import hashlib
import json
import os
import sys
import zipfile

import torch


def state(step):
    torch.manual_seed(step)
    large = {f"layer.{number}.weight": torch.rand(2_500_000 + number) for number in range(4)}
    return {"model": large, "step": step, "small": [torch.full((3,), step), large["layer.0.weight"][1:5]]}


def hashes(found):
    tensors = {**found["model"], "small": found["small"][0], "view": found["small"][1]}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def main(command, *arguments):
    known = {}
    if command == "save":
        directory, count = arguments
        for step in range(int(count)):
            saved = state(step)
            torch.save(saved, os.path.join(directory, f"step-{step}.pt"))
            print(f"SAVED {step}", flush=True)
            known.update({f"step-{step}.pt {name}": value for name, value in hashes(saved).items()})
    else:
        for path in arguments:
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None, path
            found = hashes(torch.load(path))
            known.update({f"{os.path.basename(path)} {name}": value for name, value in found.items()})
    print("MODULE", torch.serialization._open_zipfile_writer.__module__)
    print(f"HASHES {command} {json.dumps(known)}")


main(*sys.argv[1:])
