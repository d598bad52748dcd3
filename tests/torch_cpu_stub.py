#!/usr/bin/env python3
"""Makes torch's Linux x86_64 wheel importable without the CUDA libraries that it is linked with.

Run by the interpreter of an environment that has torch; needs gcc and binutils (nm, readelf). For every shared
library that torch's own libraries need and that cannot be found, a stub is written into torch/lib, which is on
their search path: all the symbols that torch imports from it, with the right version tags, each one returning 100
(cudaErrorNoDevice). Then torch.cuda.is_available() is False, and everything on the CPU works: torch.save and
torch.load, distributed checkpoints, gloo. The lists come from the wheel itself, so another version of torch needs
no change here unless it adds a library with unversioned symbols (see PREFIXES).
"""

import ctypes
import os
import re
import subprocess
import sysconfig
import tempfile

LIBRARIES = os.path.join(sysconfig.get_paths()["platlib"], "torch", "lib")
NO_DEVICE = 100

# Libraries whose symbols carry no version tag are told apart by how their symbols begin.
PREFIXES = {
    "libcufile": ("cuFile",),
    "libcusparseLt": ("cusparseLt",),
    "libnccl": ("nccl", "pnccl"),
    "libnvshmem": ("nvshmem",),
}
# The version tag is the library's name, except here.
TAGS = {"libnvshmem_host.so.3": "NVSHMEM"}
# Functions that are called while torch is imported, or whose answer is not an error number.
SPECIAL = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int*c){if(c)*c=0;return 100;}",
    "cudaGetLastError": "int cudaGetLastError(void){return 0;}",
    "cudaPeekAtLastError": "int cudaPeekAtLastError(void){return 0;}",
    "cudaGetErrorString": 'const char*cudaGetErrorString(int e){return "no CUDA (stub)";}',
    "cudaGetErrorName": 'const char*cudaGetErrorName(int e){return "cudaErrorNoDevice";}',
    "__cudaRegisterFatBinary": "static void*h[8];void**__cudaRegisterFatBinary(void*x){return h;}",
    "ncclGetErrorString": 'const char*ncclGetErrorString(int e){return "stub";}',
    "cudnnGetErrorString": 'const char*cudnnGetErrorString(int e){return "stub";}',
}


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def imports_of(libraries):
    """The libraries that are needed, and every undefined symbol with its version tag or None."""
    needed, undefined = set(), {}
    for library in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.+?)\]", output_of("readelf", "-d", library)))
        for line in output_of("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            undefined[name] = version.lstrip("@") or None
    return needed, undefined


def is_present(soname):
    if os.path.exists(os.path.join(LIBRARIES, soname)):
        return True
    try:
        ctypes.CDLL(soname)
        return True
    except OSError:
        return False


def write_stub(soname, undefined):
    base, tag = soname.split(".so")[0], TAGS.get(soname, soname)
    prefixes = next((words for name, words in PREFIXES.items() if base.startswith(name)), None)
    symbols = sorted(
        name
        for name, version in undefined.items()
        if version == tag or (version is None and prefixes and name.startswith(prefixes))
    )
    versioned = [name for name in symbols if undefined[name]]
    with tempfile.TemporaryDirectory() as folder:
        source, script = os.path.join(folder, "stub.c"), os.path.join(folder, "stub.map")
        with open(source, "w") as file:
            for name in symbols:
                file.write(SPECIAL.get(name, f"int {name}(void){{return {NO_DEVICE};}}") + "\n")
            file.write("int _stub_;\n")
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}"]
        command += ["-o", os.path.join(LIBRARIES, soname), source]
        if versioned:
            with open(script, "w") as file:
                file.write(f"{tag} {{ global: " + " ".join(f"{name};" for name in versioned) + " };\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.check_call(command)
    print(f"{soname}: {len(symbols)} symbols")


def main():
    ours = [os.path.join(LIBRARIES, name) for name in os.listdir(LIBRARIES) if re.match(r"lib(torch|c10).*\.so$", name)]
    needed, undefined = imports_of(ours)
    missing = sorted(soname for soname in needed if not is_present(soname))
    for soname in missing:
        write_stub(soname, undefined)
    if not missing:
        print("every library that torch needs is here")


main()
