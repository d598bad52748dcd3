"""Is a file of ours the file that torch writes, byte for byte, and does torch load it?"""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import states  # noqa: E402
import tidemark  # noqa: E402

pytestmark = pytest.mark.usefixtures("fast")


def stock(obj: Any, to: Any, **options: Any) -> None:
    """What torch does by itself."""
    tidemark.accelerate(False)
    torch.save(obj, to, **options)
    tidemark.accelerate()


def compare(obj: Any, ours: Path, theirs: Path, **options: Any) -> None:
    torch.save(obj, ours, **options)
    stock(obj, theirs, **options)
    assert ours.read_bytes() == theirs.read_bytes()
    with zipfile.ZipFile(ours) as archive:
        assert archive.testzip() is None


def model() -> dict[str, Any]:
    torch.manual_seed(7)
    large = torch.rand(3_000_000)
    return {"large": large, "view": large[5:9], "small": torch.arange(5), "none": torch.zeros(0), "step": 3, "odd": torch.rand(1_000_003)}


def test_a_file_is_torchs(folder: Path, tmp_path: Path, copies: list[str]) -> None:
    compare(model(), folder / "step1.pt", tmp_path / "step1.pt")
    assert copies == ["step1"]
    loaded = torch.load(folder / "step1.pt")
    assert loaded["step"] == 3 and torch.equal(loaded["view"], loaded["large"][5:9])
    assert loaded["view"].untyped_storage().data_ptr() == loaded["large"].untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["plain", "a.b.pt", "with space.pt", ".hidden.pt", "-.pt", "é.pt", "dot.", "x" * 200 + ".pt"])
def test_names(folder: Path, tmp_path: Path, copies: list[str], name: str) -> None:
    compare({"a": torch.rand(50_000)}, folder / name, tmp_path / name)
    assert len(copies) == 1


@pytest.mark.parametrize("name", [".pt", "a\\b.pt"])
def test_names_that_torch_reads_otherwise_are_torchs(folder: Path, copies: list[str], name: str) -> None:
    try:
        torch.save({"a": torch.rand(50_000)}, folder / name)
    except RuntimeError as error:
        assert "invalid file name" in str(error)
    assert copies == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(folder: Path, tmp_path: Path, protocol: int) -> None:
    compare(model(), folder / "a.pt", tmp_path / "a.pt", pickle_protocol=protocol)


def test_another_pickle_module_is_used(folder: Path, tmp_path: Path, copies: list[str]) -> None:
    class Other:
        __name__ = "other"
        Pickler = pickle._Pickler

    compare(model(), folder / "a.pt", tmp_path / "a.pt", pickle_module=Other)
    assert copies == ["a"]


def test_without_the_byte_order(folder: Path, tmp_path: Path) -> None:
    compare(model(), folder / "a.pt", tmp_path / "a.pt", _disable_byteorder_record=True)


@pytest.mark.parametrize("alignment", [8, 512, 4096])
def test_alignments(folder: Path, tmp_path: Path, alignment: int) -> None:
    from torch.utils.serialization import config

    with config.patch({"save.storage_alignment": alignment}):
        compare(model(), folder / "a.pt", tmp_path / "a.pt")


def test_checksums_are_true_where_torch_leaves_them_out(folder: Path) -> None:
    from torch.utils.serialization import config

    with config.patch({"save.compute_crc32": False}):
        torch.save(model(), folder / "a.pt")
    with zipfile.ZipFile(folder / "a.pt") as archive:
        assert archive.testzip() is None


def test_a_file_that_was_longer_is_cut(folder: Path, tmp_path: Path) -> None:
    (folder / "a.pt").write_bytes(b"x" * 20_000_000)
    compare(model(), folder / "a.pt", tmp_path / "a.pt")


def test_many_small_tensors(folder: Path, tmp_path: Path) -> None:
    compare({str(n): torch.full((n % 900,), n) for n in range(3000)}, folder / "a.pt", tmp_path / "a.pt")


@pytest.mark.parametrize("mode", ["wb", "w+b", "xb"])
@pytest.mark.parametrize("buffering", [0, -1])
def test_a_file_object(folder: Path, tmp_path: Path, copies: list[str], mode: str, buffering: int) -> None:
    for path in (folder / "a.pt", tmp_path / "a.pt"):
        with open(path, mode, buffering) as file:
            file.write(b"before")
            torch.save(model(), file)
            assert file.tell() == file.seek(0, 2)
            file.write(b"between")
            torch.save({"small": torch.ones(3)}, file)
            file.write(b"after")
    assert (folder / "a.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()
    assert copies == ["archive"]


def test_a_file_object_in_the_middle_of_a_file(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "a.pt", tmp_path / "a.pt"):
        path.write_bytes(bytes(30_000_000))
        with open(path, "r+b") as file:
            file.seek(1000)
            torch.save(model(), file)
            file.write(b"after")
    assert (folder / "a.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()


def test_what_is_appended_to_falls_back(folder: Path, tmp_path: Path, copies: list[str]) -> None:
    for path in (folder / "a.pt", tmp_path / "a.pt"):
        path.write_bytes(b"before")
        with open(path, "ab") as file:
            torch.save(model(), file)
    assert (folder / "a.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()
    assert copies == []


def test_objects_that_are_no_files_fall_back(folder: Path, copies: list[str]) -> None:
    class Own(io.FileIO):
        pass

    with Own(folder / "a.pt", "wb") as file:
        torch.save(model(), file)
    assert torch.load(folder / "a.pt")["step"] == 3
    torch.save(model(), io.BytesIO())
    torch.save(model(), folder / "b.pt", _use_new_zipfile_serialization=False)
    assert torch.load(folder / "b.pt")["step"] == 3
    assert copies == []


def test_elsewhere_it_is_torchs(tmp_path: Path, copies: list[str]) -> None:
    torch.save(model(), tmp_path / "a.pt")
    torch.save(model(), "/dev/null")
    assert copies == []


def test_through_a_symlink(folder: Path, tmp_path: Path, copies: list[str]) -> None:
    (tmp_path / "link.pt").symlink_to(folder / "a.pt")
    torch.save(model(), tmp_path / "link.pt")
    # What does not exist yet is torch's to make.
    assert copies == []
    torch.save(model(), tmp_path / "link.pt")
    assert copies == ["link"] and torch.load(folder / "a.pt")["step"] == 3


@pytest.mark.parametrize("size", [7, 8, 9, 4_000, 300_000])
def test_bytes_that_begin_as_a_data_descriptor(folder: Path, tmp_path: Path, copies: list[str], size: int) -> None:
    """torch takes them for one, and their next four for a checksum."""
    raw = bytearray((b"PK\x07\x08\xde\xad\xbe\xef" + bytes(size))[:size])
    obj = {"a": torch.frombuffer(raw, dtype=torch.uint8), "b": torch.ones(3)}
    stock(obj, tmp_path / "a.pt")
    torch.save(obj, folder / "a.pt")
    assert (folder / "a.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()
    assert len(copies) == 1


def test_random_state_dicts(folder: Path, tmp_path: Path, request: pytest.FixtureRequest, copies: list[str]) -> None:
    """Each is torch's file to the byte, so what stock torch loads from it is what was saved."""
    first = request.config.getoption("--seed") or random.SystemRandom().randrange(1 << 32)
    count = request.config.getoption("--states")
    for seed in range(first, first + count):
        obj = states.state(seed)
        try:
            stock(obj, tmp_path / "a.pt")
        except RuntimeError as error:
            # The same bytes under two types: refused there, and so here.
            with pytest.raises(RuntimeError, match=str(error)):
                torch.save(obj, folder / "a.pt")
            copies.append("refused")
            continue
        torch.save(obj, folder / "a.pt")
        ours = (folder / "a.pt").read_bytes()
        assert ours == (tmp_path / "a.pt").read_bytes(), f"--seed {seed} --states 1"
        with zipfile.ZipFile(io.BytesIO(ours)) as archive:
            assert archive.testzip() is None, f"--seed {seed} --states 1"
    assert len(copies) >= count


def test_dcp(folder: Path, tmp_path: Path, copies: list[str]) -> None:
    import torch.distributed.checkpoint as dcp

    obj = {"model": model(), "more": torch.rand(400_000)}
    dcp.save(obj, checkpoint_id=folder / "step1", no_dist=True)
    stock_dcp(obj, tmp_path / "step1")
    name = "__0_0.distcp"
    assert (folder / "step1" / name).read_bytes() == (tmp_path / "step1" / name).read_bytes()
    assert copies == ["archive"] * 3
    back = {"model": {**model(), "step": 0}, "more": torch.zeros(400_000)}
    dcp.load(back, checkpoint_id=folder / "step1", no_dist=True)
    assert torch.equal(back["more"], obj["more"]) and torch.equal(back["model"]["large"], obj["model"]["large"])


def stock_dcp(obj: Any, to: Path) -> None:
    import torch.distributed.checkpoint as dcp

    tidemark.accelerate(False)
    dcp.save(obj, checkpoint_id=to, no_dist=True)
    tidemark.accelerate()


def test_archives_beyond_4_gib() -> None:
    """The numbers that no longer fit into 32 bits, with large records that have no bytes in the file."""
    from tidemark import _native

    class Small(io.FileIO):
        """Remembers what is written, and where."""

        def write(self, data: Any) -> int:
            written.append((self.tell(), bytes(data)))
            return super().write(data)

    written: list[tuple[int, bytes]] = []
    sizes = {"data/0": (1 << 32) - 2, "data/1": (1 << 32) - 1, "data/2": 5 << 30, "data/3": 7}
    with Small(os.memfd_create("theirs"), "r+b") as theirs, Small(os.memfd_create("ours"), "r+b") as ours:
        writer = torch._C.PyTorchFileWriter(theirs, True, 64)
        archive = _native.Archive(ours.fileno(), 0, "archive", 64, 1, False)
        writer.write_record("data.pkl", b"pickle", 6)
        archive.add_bytes("data.pkl", b"pickle")
        for name, size in sizes.items():
            writer.write_record_metadata(name, size)
            archive.add_pieces(name, size)
        writer.write_end_of_file()
        tail = [("version", b"3\n"), ("byteorder", b"little")]
        announced = archive.total([(name, len(data)) for name, data in tail])
        length = archive.finish(tail, writer.serialization_id()[:20])
        assert announced == length == os.fstat(theirs.fileno()).st_size == os.fstat(ours.fileno()).st_size
        for at, data in written:
            assert os.pread(ours.fileno(), len(data), at) == data, hex(at)
        assert zipfile.ZipFile(ours).getinfo("archive/data/2").file_size == 5 << 30
