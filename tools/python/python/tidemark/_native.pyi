"""The native half: what touches every byte, with the interpreter's lock released."""

from typing import Final, final

MAPPED_BYTES: Final[int]
"""Less is not worth a mapping."""

@final
class Archive:
    """One archive as ``torch.save`` writes it, into an open file.

    ``mapped`` says that the file may be mapped, which is how large records are copied then.
    """

    def __new__(cls, fd: int, base: int, name: str, alignment: int, threads: int, mapped: bool) -> Archive: ...
    def add_bytes(self, name: str, data: bytes) -> int:
        """Adds a record with these bytes. Returns its index."""

    def add_memory(self, name: str, address: int, size: int) -> int:
        """Adds a record with ``size`` bytes at ``address``, which must stay there until ``finish`` has returned."""

    def add_pieces(self, name: str, size: int) -> int:
        """Adds a record with ``size`` bytes, which ``put`` gives."""

    def total(self, tail: list[tuple[str, int]]) -> int:
        """Returns the length of the archive, once it is finished with records of these names and sizes behind the others."""

    def complete(self) -> int:
        """Returns the number of records, from the first on, whose bytes are complete."""

    def cut(self, count: int) -> None:
        """Forgets all records from ``count`` on."""

    def copy(self) -> None:
        """Copies the large records that are in memory. Signal handlers run meanwhile."""

    def put(self, pieces: list[tuple[int, int, int]]) -> None:
        """Copies the next bytes of records that ``add_pieces`` added: pieces of index, address and size. Signal handlers run meanwhile."""

    def unmap(self) -> None:
        """Ends the mapping of an archive that nobody goes on with."""

    def prefix(self) -> int:
        """Writes what is left of the records and no directory. Returns the length."""

    def finish(self, tail: list[tuple[str, bytes]], names: str) -> int:
        """Writes what is left, the records of ``tail``, the id that begins with ``names``, the directory. Returns the length."""

def copy_all(fd: int, offset: int, pieces: list[tuple[int, int]], threads: int, mapped: bool) -> None:
    """Copies ``(address, size)`` pieces to ``offset`` of a file, one after the other."""

def is_fuse(path: str) -> bool:
    """Whether a path lies on any FUSE mount."""
