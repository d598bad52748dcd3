"""Files as their packages write them, for the readers of content.

content_files.py DIRECTORY [long]

whole/       written to their end, in formats that can tell
undecided/   written to their end, in formats or ways that cannot tell
broken/      broken off by an exception or by a signal's handler; the writer closed the file
fewer/       the same, and what is there is a valid file with fewer members
"""

import io
import os
import pickle
import signal
import sys
import tarfile
import zipfile

os.environ["KERAS_BACKEND"] = "torch"

import h5py
import keras
import ml_dtypes
import numpy
import safetensors.numpy
import safetensors.torch
import torch

ROOT = sys.argv[1]
LONG = sys.argv[2:] == ["long"]


def place(kind, name):
    os.makedirs(os.path.join(ROOT, kind), exist_ok=True)
    return os.path.join(ROOT, kind, name)


class BrokenOff(Exception):
    pass


def breaks_off(save):
    """Calls what must end with an exception."""
    try:
        save()
    except (BrokenOff, SystemExit):
        return
    sys.exit(f"{save} was not broken off")


class Raises:
    """Something in the state that cannot be pickled."""

    def __reduce__(self):
        raise BrokenOff


class RaisesAt:
    """In the place of a method of a class: as it, but the call of this number raises, or sends a signal whose handler does."""

    def __init__(self, owner, name, number, act):
        self.owner, self.name, self.left, self.act = owner, name, number, act

    def __enter__(self):
        usual = getattr(self.owner, self.name)

        def counted(*arguments, **named):
            self.left -= 1
            if self.left == 0:
                self.act()
            return usual(*arguments, **named)

        self.usual = usual
        setattr(self.owner, self.name, counted)

    def __exit__(self, *_):
        setattr(self.owner, self.name, self.usual)


def throw():
    raise BrokenOff


def terminate():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)
    # The handler runs between two bytecodes.
    for _ in range(1000):
        pass


def trained():
    """A model with tied weights after a step, its optimizer, and what trainers add."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 50))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "numpy": numpy.random.RandomState(1).get_state(),
        "step": 7,
        "args": {"lr": 1e-3, "name": "run", "sizes": list(range(3000)), "big": 1 << 80, "none": None},
    }


def odd():
    """Tensors of all kinds."""
    base = torch.arange(4000, dtype=torch.float32)
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    kinds += [torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32]
    return {
        "kinds": [torch.zeros(5, 3).to(kind) for kind in kinds],
        "view": base[100:200],
        "same storage": [base[:10], base.view(40, 100).t()],
        "empty": [torch.empty(0), torch.empty(3, 0, dtype=torch.int64)],
        "scalar": torch.tensor(3.5),
        "sparse": [torch.eye(9).to_sparse(), torch.eye(9).to_sparse_csr()],
        "quantized": torch.quantize_per_tensor(torch.ones(6, 6), 0.1, 3, torch.quint8),
        "quantized per channel": torch.quantize_per_channel(torch.ones(2, 6), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "quantized to half bytes": torch.quantize_per_channel(torch.ones(2, 6), torch.ones(2), torch.zeros(2), 0, torch.quint4x2),
        "meta": torch.empty(1000, device="meta"),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "storage": torch.ones(7).untyped_storage(),
        "words": ["storage", "torch", "FloatStorage", "0", b"bytes", torch.float32, torch.Size([2]), torch.device("cpu")],
    }


def torch_files():
    state = trained()
    # Ten bytes are two items and a half. The legacy format writes ten and reads eight, and does not find the next storage.
    part = torch.zeros(10, dtype=torch.uint8)[:8].view(torch.float32)
    torch.save(state, place("whole", "state.pt"))
    torch.save([part, torch.ones(3)], place("whole", "part-of-an-item.pt"))
    torch.save(odd(), place("whole", "odd.pt"))
    torch.save({}, place("whole", "empty.pt"))
    torch.save(torch.nn.Linear(9, 9), place("whole", "module.pt"))
    torch.save([torch.full((i % 7,), i) for i in range(3000)], place("whole", "many.pt"))
    for protocol in (3, 4, 5):
        torch.save(state, place("whole", f"protocol-{protocol}.pt"), pickle_protocol=protocol)
    held = io.BytesIO()
    torch.save(state, held)
    with open(place("whole", "buffer.pt"), "wb") as file:
        file.write(held.getvalue())
    with open(place("undecided", "two-archives.pt"), "wb") as file:
        file.write(held.getvalue() * 2)
    legacy = {"_use_new_zipfile_serialization": False}
    torch.save(state, place("whole", "legacy.pt"), **legacy)
    torch.save(state, place("whole", "legacy-4.pt"), pickle_protocol=4, **legacy)
    torch.save(torch.nn.Linear(9, 9), place("whole", "legacy-module.pt"), **legacy)
    torch.save(torch.arange(9), place("whole", "legacy-one.pt"), **legacy)
    torch.save(odd(), place("whole", "legacy-odd.pt"), **legacy)
    torch.save([part, torch.ones(3)], place("undecided", "legacy-part-of-an-item.pt"), **legacy)
    with open(place("undecided", "legacy-two.pt"), "wb") as file:
        torch.save(state, file, **legacy)
        torch.save(state, file, **legacy)
    torch.jit.script(torch.nn.Linear(9, 9)).save(place("undecided", "script.pt"))
    with torch.package.PackageExporter(place("undecided", "package.pt")) as package:
        package.save_pickle("model", "model.pkl", {"weight": torch.ones(9)})
    if not LONG:
        return
    # Loading the compiler takes longer than all that is above.
    exported = torch.export.export(torch.nn.Linear(9, 9), (torch.ones(2, 9),))
    torch.export.save(exported, place("undecided", "exported.pt2"))


def torch_broken_off():
    state = trained()
    for protocol in ({}, {"_use_new_zipfile_serialization": False}):
        kind = "legacy" if protocol else "zip"
        for act in (throw, terminate):
            # Counting and writing ask each storage for its bytes; of the legacy format only the counting does.
            for number in (1, 5) if protocol else (1, 9, 20, 25, 30):
                def save(name=place("broken", f"{kind}-{act.__name__}-{number}.pt")):
                    torch.save(state, name, **protocol)
                where = ("_write_file", number) if protocol else ("nbytes", number)
                with RaisesAt(torch.UntypedStorage, *where, act):
                    breaks_off(save)
    large = {"weight": torch.ones(300_000), "text": "x" * 300_000, "last": Raises()}
    breaks_off(lambda: torch.save(large, place("broken", "unpicklable.pt")))
    breaks_off(lambda: torch.save(large, place("broken", "legacy-unpicklable.pt"), _use_new_zipfile_serialization=False))


def safetensors_files():
    tensors = {f"layer.{i}.weight": torch.ones(i, 7, dtype=torch.bfloat16) for i in range(40)}
    tensors["scalar"], tensors["eight"] = torch.tensor(2.0), torch.ones(9).to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, place("whole", "model.safetensors"), metadata={"format": "pt", "note": 'a "{'})
    safetensors.torch.save_file({}, place("whole", "none.safetensors"), metadata={"format": "pt"})
    arrays = {"ä/ö": numpy.ones((3, 4)), "b": numpy.arange(5, dtype=numpy.uint8)}
    safetensors.numpy.save_file(arrays, place("whole", "numpy.safetensors"))


def pickles():
    state = {"w": numpy.ones((300, 300)), "b": [numpy.float32(1), {"x": (1, 2, 3)}], "s": "ä" * 100_000, "r": numpy.random.default_rng(1)}
    for protocol in range(2, 6):
        with open(place("whole", f"state-{protocol}.pkl"), "wb") as file:
            pickle.dump(state, file, protocol=protocol)
    for protocol in (0, 1):
        with open(place("undecided", f"state-{protocol}.pkl"), "wb") as file:
            pickle.dump(state, file, protocol=protocol)
    with open(place("undecided", "header-and-array.pkl"), "wb") as file:
        pickle.dump({"shape": (300, 300)}, file)
        state["w"].tofile(file)
    for protocol in (2, 4):
        def save(name=place("broken", f"unpicklable-{protocol}.pkl")):
            with open(name, "wb") as file:
                pickle.dump([state, "y" * 100_000, Raises()], file, protocol=protocol)
        breaks_off(save)


def arrays():
    large = numpy.ones(3_000_000)
    plain = {"a": numpy.ones((3, 4), dtype=numpy.float16), "b": numpy.array(7), "c": numpy.array(["ab", "c"]), "d": numpy.zeros((0, 5))}
    plain |= {"e": numpy.array(["2026-01-01"], dtype="M8[ns]"), "f": numpy.ones(4, dtype=ml_dtypes.bfloat16), "g": numpy.asfortranarray(numpy.ones((3, 5)))}
    numpy.savez(place("whole", "plain.npz"), **plain)
    numpy.save(place("whole", "array.npy"), plain["c"])
    numpy.savez_compressed(place("undecided", "compressed.npz"), **plain)
    numpy.savez(place("undecided", "objects.npz"), o=numpy.array([{}, None], dtype=object), **plain)
    numpy.savez(place("undecided", "fields.npz"), o=numpy.zeros(3, dtype=[("x", "f4"), ("y", "i8")]))

    # The header of the array is one write, and its items follow in several.
    with RaisesAt(zipfile._ZipWriteFile, "write", 3, throw):
        breaks_off(lambda: numpy.savez(place("broken", "array.npz"), a=large, b=large))
    with RaisesAt(zipfile._ZipWriteFile, "write", 2, terminate):
        breaks_off(lambda: numpy.savez(place("broken", "header.npz"), a=large, b=large))
    with RaisesAt(numpy.lib.format, "write_array", 2, throw):
        breaks_off(lambda: numpy.savez(place("broken", "before-header.npz"), a=large, b=large))
    with RaisesAt(zipfile.ZipFile, "open", 2, throw):
        breaks_off(lambda: numpy.savez(place("fewer", "members.npz"), a=large, b=large))


class StopsHalfway(io.BytesIO):
    """A file to be added to an archive, which raises at its second read."""

    def read(self, size=-1):
        if self.tell() > 0:
            throw()
        return super().read(size)


def archives():
    for name, form in (("ustar", tarfile.USTAR_FORMAT), ("gnu", tarfile.GNU_FORMAT), ("pax", tarfile.PAX_FORMAT)):
        with tarfile.open(place("whole", f"{name}.tar"), "w", format=form) as archive:
            long = "d/" * 40 + ("ä" if form == tarfile.PAX_FORMAT else "a") * 90
            for member in ("config.json", "weights/w", long):
                info = tarfile.TarInfo(member)
                info.size = 777
                archive.addfile(info, io.BytesIO(b"x" * 777))
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, "config.json"
            archive.addfile(link)
    def save(name=place("broken", "member.tar")):
        with tarfile.open(name, "w") as archive:
            info = tarfile.TarInfo("w")
            info.size = 1 << 20
            archive.addfile(info, StopsHalfway(b"x" * (1 << 20)))
    breaks_off(save)
    with zipfile.ZipFile(place("undecided", "other.zip"), "w") as archive:
        archive.writestr("policy.pth", b"x" * 1000)


def hdf5():
    for version in ("earliest", "latest"):
        with h5py.File(place("whole", f"{version}.weights.h5"), "w", libver=version) as file:
            for i in range(40):
                file.create_dataset(f"layer/{i}/kernel", data=numpy.ones((i + 1, 9)))
                file.create_dataset(f"layer/{i}/chunked", data=numpy.ones((50, 9)), chunks=(7, 9), compression="gzip")
        def save(name=place("fewer", f"{version}.h5")):
            with h5py.File(name, "w", libver=version) as file:
                file.create_dataset("kernel", data=numpy.ones((300, 9)))
                throw()
        breaks_off(save)
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
    model.build((None, 3))
    model.compile(optimizer="adam", loss="mse")
    model.save(place("whole", "model.keras"))
    model.save_weights(place("whole", "model.weights.h5"))
    class Refuses(keras.layers.Dense):
        def save_own_variables(self, store):
            throw()
    refusing = keras.Sequential([keras.layers.Dense(4), Refuses(2)])
    refusing.build((None, 3))
    breaks_off(lambda: refusing.save(place("broken", "model.keras")))


for write in (torch_files, torch_broken_off, safetensors_files, pickles, arrays, archives, hdf5):
    write()
print("WRITTEN")
