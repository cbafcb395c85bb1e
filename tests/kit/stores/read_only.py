"""Methods of a store that nobody may change."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn


class ReadOnlyStore:
    """Base of stores of sources, which readers only read."""

    def create(self, name: str) -> NoReturn:
        raise AssertionError("nothing is written into a source")

    def delete(self, name: str) -> NoReturn:
        raise AssertionError("nothing is deleted in a source")

    def delete_files(self, folder: str, names: Collection[str]) -> NoReturn:
        raise AssertionError("nothing is deleted in a source")

    def delete_folder(self, folder: str) -> NoReturn:
        raise AssertionError("nothing is deleted in a source")

    def rename(self, source: str, target: str) -> NoReturn:
        raise AssertionError("nothing is renamed in a source")
