"""A store in memory: thousands of damaged checkpoints need no disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardckpt.errors import MissingFileError, TruncatedError
from shardckpt.storage.store import Capabilities, Listed, Read, check_name
from tests.kit.stores.read_only import ReadOnlyStore


class MemoryStore(ReadOnlyStore):
    """Files in a dict, which nobody changes.

    Args:
        files: Name to content.
        url: Where they are said to lie.
    """

    capabilities = Capabilities(renames=True, is_local=True)

    def __init__(self, files: Mapping[str, bytes], url: str = "memory") -> None:
        self._files, self.url = files, url

    def list(self, folder: str = "") -> list[Listed]:
        prefix = f"{folder}/" if folder else ""
        below = [name for name in self._files if name.startswith(prefix)]
        files = [Listed(n, len(self._files[n]), False) for n in below if "/" not in n[len(prefix) :]]
        folders = {prefix + n[len(prefix) :].split("/")[0] for n in below if "/" in n[len(prefix) :]}
        return sorted([*files, *(Listed(n, 0, True) for n in folders)])

    def size(self, name: str) -> int:
        check_name(name, self.url)
        if name not in self._files:
            raise MissingFileError("no such file", where=name)
        return len(self._files[name])

    def read(self, reads: Sequence[Read]) -> None:
        for name, offset, buffer in reads:
            size = self.size(name)
            assert offset >= 0, "a reader asks for nothing before a file"
            if offset + len(buffer) > size:
                raise TruncatedError("the file ends early", where=name)
            buffer[:] = self._files[name][offset : offset + len(buffer)]

    def changed_at(self, folder: str) -> float | None:
        return None
