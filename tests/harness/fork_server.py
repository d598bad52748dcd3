"""Starts a script again and again without importing its packages again: each start is a fork.

fork_server.py SCRIPT

It imports what SCRIPT imports from outside its own folder, and prints READY; or THREADS where an import started threads, of
which a fork would have none. Each line of its input is a start, as JSON: `arguments`; `env`, all of it; `out` and `err`, the
files that the script prints to; `status`, the file that says how it ended ("exit 0", "signal 9"), there once it has. It
prints the pid of each. The script and what lies beside it run as `python SCRIPT` runs them, in a process of its own.
"""

import ast
import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import sys
import tempfile


def load(script):
    """Imports what the script does at its top level from elsewhere, with the environment that it sets for that."""
    with open(script) as source:
        body = ast.parse(source.read()).body
    folder = os.path.dirname(script)

    def is_own(module):
        return os.path.exists(os.path.join(folder, f"{module.split('.')[0]}.py"))

    def is_wanted(node):
        if isinstance(node, ast.Assign):
            return ast.unparse(node.targets[0]).startswith("os.environ[")
        if isinstance(node, ast.Import):
            return not any(is_own(alias.name) for alias in node.names)
        return isinstance(node, ast.ImportFrom) and not is_own(node.module)

    exec(compile(ast.Module([node for node in body if is_wanted(node)], []), script, "exec"), {})


def become(env):
    """Has this environment, also for who reads /proc/PID/environ: there the kernel shows the memory that exec filled."""
    for name in list(os.environ):
        del os.environ[name]
    os.environ.update(env)
    with open("/proc/self/stat") as stat:
        first, end = map(int, stat.read().rsplit(")", 1)[1].split()[47:49])
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    if len(block) > end - first:
        sys.exit(f"an environment of {len(block)} bytes does not fit into {end - first}")
    ctypes.memmove(first, block.ljust(end - first, b"\0"), end - first)


def run(script, start):
    """What the forked process does: all that `python SCRIPT` would."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    flags = os.O_WRONLY | os.O_APPEND
    for number, path, how in ((0, os.devnull, os.O_RDONLY), (1, start["out"], flags), (2, start["err"], flags)):
        opened = os.open(path, how)
        os.dup2(opened, number)
        os.close(opened)
    become(start["env"])
    tempfile.tempdir = None
    atexit.register(lambda: write(start["status"] + ".modules", "\n".join(sys.modules)))
    sys.argv = [script, *start["arguments"]]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    sys.exit(0)


def write(path, text):
    """Makes a file that is there whole or not at all."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def learn(path):
    """Imports what a script that came to its end had loaded: packages import much of themselves late."""
    with open(path) as file:
        late = [name for name in file.read().split("\n") if name not in sys.modules]
    for name in late:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if threads() > 1:
        sys.exit("what the script imports late starts threads, which a fork would not have")


def threads():
    return len(os.listdir("/proc/self/task"))


def tell_ended(statuses):
    """Says how each child that has ended did, and only then lets its pid go."""
    for pid in list(statuses):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            continue
        kind = "exit" if ended.si_code == os.CLD_EXITED else "signal"
        path = statuses.pop(pid)
        # Whoever asked may be gone, with the folder.
        with contextlib.suppress(FileNotFoundError):
            write(path, f"{kind} {ended.si_status}")
        os.waitpid(pid, 0)
        if not statuses:
            with contextlib.suppress(FileNotFoundError):
                learn(path + ".modules")


def main():
    script = os.path.abspath(sys.argv[1])
    # What is imported may print, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    load(script)
    if threads() > 1:
        print("THREADS", file=answers)
        return
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    print("READY", file=answers)
    statuses = {}
    requests = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        tell_ended(statuses)
        if 0 not in ready:
            continue
        more = os.read(0, 65536)
        if not more:
            return
        *lines, requests = (requests + more).split(b"\n")
        for start in map(json.loads, lines):
            pid = os.fork()
            if pid == 0:
                os.close(woken)
                os.close(wakes)
                answers.close()
                return run(script, start)
            statuses[pid] = start["status"]
            print(pid, file=answers)


main()
