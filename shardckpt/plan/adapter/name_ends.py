"""Match names by their ends, in time that is linear in the names."""

from __future__ import annotations

from collections.abc import Iterable

from shardckpt.errors import UnsafeError

__all__ = ["NameEnds"]

_MOST = 32  # different depths, and different last parts


class NameEnds:
    """Ends of names, each a full name or the parts after a dot."""

    def __init__(self, ends: Iterable[str], where: str) -> None:
        self._ends = frozenset(ends)
        self._counts = sorted({end.count(".") + 1 for end in self._ends})
        self.lasts = sorted({end.rpartition(".")[2] for end in self._ends})
        if max(len(self._counts), len(self.lasts)) > _MOST:
            raise UnsafeError(
                "the adapter's config names too many different parameters",
                where=where,
                found=len(self._ends),
                expected=f"at most {_MOST} last parts, and as many depths",
                fix="Merge it with peft's merge_and_unload() if you trust its source.",
            )

    def __str__(self) -> str:
        return ", ".join(sorted(self._ends))

    def __bool__(self) -> bool:
        return bool(self._ends)

    def find(self, name: str) -> list[str]:
        """Return the ends that a name has."""
        tails = (".".join(name.rsplit(".", count)[-count:]) for count in self._counts)
        return [tail for tail in dict.fromkeys(tails) if tail in self._ends]

    def list_keys(self, module: str) -> list[str]:
        """Return the names in a module that end so."""
        keys = (f"{module}.{last}" for last in self.lasts)
        return [key for key in keys if self.find(key)]
