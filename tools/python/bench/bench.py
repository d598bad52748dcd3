#!/usr/bin/env python3
"""How long a job waits for a save, of one state, with several savers, in one run.

    bench.py --mount /ckpt [--gb 2] [--device cuda] [--rounds 7] [--dlrover DIRECTORY] [--json FILE]

The savers take turns, so that what else happens on the machine meets them all. Each writes to two names in turn; the first round is
reported apart. DIRECTORY is where DLRover was put, which runs in a process of its own: `pip install --no-deps --target DIRECTORY dlrover
deprecated wrapt pynvml nvidia-ml-py requests urllib3 idna certifi charset-normalizer grpcio protobuf`. The mount uploads what is saved: its
Tier-3 needs room for all rounds, and Tier-1 for six states.

`memcpy` is one thread's copy within the process, the measure of what a machine can. `pause` is the longest time that another Python
thread was kept from running in a save, `ticks` how often it ran, in per cent of how often it runs beside nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tidemark


class Ticker:
    """A thread that runs Python all the time."""

    def __init__(self) -> None:
        self.pause = 0.0
        self.ticks = 0
        self._end = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._end:
            now = time.perf_counter()
            self.pause = max(self.pause, now - last)
            self.ticks += 1
            last = now

    def stop(self) -> None:
        self._end = True
        self._thread.join()


def state(size: float, tensors: int, device: str) -> dict[str, Any]:
    """A model and its optimizer as they lie in memory: some large tensors, many small ones."""
    each = int(size * 1e9 / 4 / tensors)
    made = {f"layers.{n}.weight": torch.rand(each, device=device) for n in range(tensors)}
    made.update({f"layers.{n}.bias": torch.rand(1024, device=device) for n in range(tensors)})
    return made


def tune(on: bool) -> None:
    """Sets what torch itself offers: no checksums, and storages of a device through pinned memory."""
    from torch.utils.serialization import config

    config.save.compute_crc32 = not on
    config.save.use_pinned_memory_for_d2h = on and torch.cuda.is_available()


class Savers:
    def __init__(self, mount: Path, saved: dict[str, Any]) -> None:
        self.saved = saved
        self.folders = {"mount": mount / "bench", "shm": Path("/dev/shm/tidemark-bench")}
        for folder in self.folders.values():
            folder.mkdir(exist_ok=True)

    def path(self, place: str, name: str, turn: int) -> str:
        return str(self.folders[place] / f"{name}-step{turn % 2}")

    def stock(self, place: str, turn: int) -> None:
        torch.save(self.saved, self.path(place, "stock", turn) + ".pt")

    def tuned(self, place: str, turn: int) -> None:
        tune(True)
        torch.save(self.saved, self.path(place, "tuned", turn) + ".pt")
        tune(False)

    def safetensors(self, place: str, turn: int) -> None:
        from safetensors.torch import save_file

        save_file(self.saved, self.path(place, "safe", turn) + ".safetensors")

    def ours(self, place: str, turn: int) -> None:
        tidemark.accelerate()
        torch.save(self.saved, self.path(place, "ours", turn) + ".pt")
        tidemark.accelerate(False)

    def ours_safetensors(self, place: str, turn: int) -> None:
        from safetensors.torch import save_file

        tidemark.accelerate()
        save_file(self.saved, self.path(place, "safe", turn) + ".safetensors")
        tidemark.accelerate(False)

    def clean(self) -> None:
        for folder in self.folders.values():
            shutil.rmtree(folder)


class DlRover:
    """A process that saves when it is told to."""

    def __init__(self, directory: str, gb: float, tensors: int, device: str) -> None:
        code = "import sys; sys.argv[0] = 'bench'; import runpy; runpy.run_path(%r, run_name='__dlrover__')" % __file__
        path = os.pathsep.join([directory, os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(gb), str(tensors), device],
            env={**os.environ, "PYTHONPATH": path, "DLROVER_LOG_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            # It has processes of its own, which do not end with it.
            start_new_session=True,
        )

    def save(self, turn: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{turn}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("SAVED "):
                return float(line.split()[1])
        raise RuntimeError("DLRover's process has ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def dlrover_main(gb: float, tensors: int, device: str) -> None:
    import tempfile

    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    saved = state(gb, tensors, device)
    with tempfile.TemporaryDirectory() as directory:
        checkpointer = DdpCheckpointer(directory)
        for line in sys.stdin:
            turn = int(line) + 1
            began = time.perf_counter()
            done = checkpointer.save_checkpoint(turn, dict(saved), directory + f"/{turn}.pt", storage_type=StorageType.MEMORY)
            took = time.perf_counter() - began
            assert done is not False, "DLRover skipped the save"
            print(f"SAVED {took}", flush=True)
    os._exit(0)


def memory_kb(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    return 0


def memcpy(gb: float) -> float:
    """One thread's copy, GB/s."""
    torch.set_num_threads(1)
    source = torch.rand(int(min(gb, 0.5) * 1e9 / 4))
    into = torch.empty_like(source)
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        into.copy_(source)
        rates.append(source.nbytes / 1e9 / (time.perf_counter() - began))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return max(rates)


def from_device(saved: dict[str, Any]) -> float:
    """A copy of one tensor from the device into pinned memory, GB/s."""
    source = next(iter(saved.values()))
    into = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        into.copy_(source)
        rates.append(source.nbytes / 1e9 / (time.perf_counter() - began))
    return max(rates)


def loads(path: str, rounds: int) -> float:
    """The median rate of ``torch.load``, all of it touched, GB/s."""
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        loaded = torch.load(path, map_location="cpu")
        rates.append(sum(tensor.nbytes for tensor in loaded.values()) / 1e9 / (time.perf_counter() - began))
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mount", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--tensors", type=int, default=40)
    parser.add_argument("--device", default="cpu", help="where the state lies, cpu or cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rest", type=float, default=2.0, help="seconds between saves, in which the mount makes memory ready")
    parser.add_argument("--dlrover")
    parser.add_argument("--savers", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    saved = state(options.gb, options.tensors, options.device)
    size = sum(tensor.nbytes for tensor in saved.values()) / 1e9
    savers = Savers(options.mount, saved)
    runs: dict[str, Callable[[int], Any]] = {
        "ours, mount": lambda turn: savers.ours("mount", turn),
        "stock, mount": lambda turn: savers.stock("mount", turn),
        "tuned, mount": lambda turn: savers.tuned("mount", turn),
        "stock, shm": lambda turn: savers.stock("shm", turn),
        "tuned, shm": lambda turn: savers.tuned("shm", turn),
        "safetensors, shm": lambda turn: savers.safetensors("shm", turn),
        "safetensors, mount": lambda turn: savers.safetensors("mount", turn),
        "ours safetensors, mount": lambda turn: savers.ours_safetensors("mount", turn),
    }
    if options.savers:
        runs = {name: run for name, run in runs.items() if any(wanted in name for wanted in options.savers.split(";"))}
    dlrover = DlRover(options.dlrover, options.gb, options.tensors, options.device) if options.dlrover else None
    if dlrover:
        runs["dlrover"] = dlrover.save
    rates: dict[str, list[float]] = {name: [] for name in runs}
    pauses: dict[str, list[float]] = {name: [] for name in runs}
    ticks: dict[str, list[float]] = {name: [] for name in runs}
    print(f"{size:.2f} GB in {len(saved)} tensors, {len(os.sched_getaffinity(0))} processors, torch {torch.__version__}")
    print(f"memcpy of one thread: {memcpy(options.gb):.1f} GB/s")
    if options.device != "cpu":
        print(f"{torch.cuda.get_device_name()}; from it into pinned memory: {from_device(saved):.1f} GB/s")
    before_kb = memory_kb("VmRSS")
    for turn in range(options.rounds):
        for name, run in runs.items():
            # One name of each saver at a time lies in memory.
            time.sleep(options.rest)
            began = time.perf_counter()
            took = run(turn) or time.perf_counter() - began
            rates[name].append(size / took)
            print(f"round {turn + 1}: {name} {size / took:.2f} GB/s", file=sys.stderr, flush=True)
            if name != "dlrover":
                for folder in savers.folders.values():
                    for path in folder.iterdir():
                        if turn == 0 or f"-step{turn % 2}" not in path.name:
                            path.unlink()
    after_kb = memory_kb("VmRSS")
    if dlrover:
        dlrover.close()
    idle = Ticker()
    time.sleep(0.5)
    idle.stop()
    for name, run in runs.items():
        if name == "dlrover":
            continue
        time.sleep(options.rest)
        ticker = Ticker()
        began = time.perf_counter()
        run(0)
        took = time.perf_counter() - began
        ticker.stop()
        pauses[name].append(ticker.pause)
        ticks[name].append(100 * ticker.ticks / took / (idle.ticks / 0.5))
    for place, name in (("mount", "ours"), ("mount", "stock"), ("shm", "stock")):
        path = savers.path(place, name, 0) + ".pt"
        if os.path.exists(path):
            print(f"torch.load of {name}, {place}: {loads(path, 3):.2f} GB/s")
    savers.clean()

    base = statistics.median(rates["stock, mount"][1:]) if "stock, mount" in rates else None
    print(f"memory of the process: {before_kb // 1024} MiB before, {after_kb // 1024} MiB after")
    print(f"{'':26} {'first':>7} {'median':>7} {'worst':>7} {'best':>7}  {'/stock':>6} {'pause ms':>9} {'ticks %':>8}")
    for name, found in rates.items():
        later = found[1:] or found
        median = statistics.median(later)
        ratio = f"{median / base:6.2f}" if base else ""
        held = f"{1e3 * pauses[name][0]:9.1f} {ticks[name][0]:8.0f}" if pauses[name] else ""
        print(f"{name:26} {found[0]:7.2f} {median:7.2f} {min(later):7.2f} {max(later):7.2f}  {ratio:>6} {held}")
    if options.json:
        options.json.write_text(json.dumps({"gb": size, "rates": rates, "pauses": pauses, "ticks": ticks}))


if __name__ == "__main__":
    main()
elif __name__ == "__dlrover__":
    dlrover_main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
