"""`open`: a checkpoint that is looked into: one tensor, or a slice of it, without reading the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import Any

import torch
from typing_extensions import Self

from shardckpt.boxes import Box
from shardckpt.checkpoint.load.source import CheckpointSource, Verify, allocate, torch_dtype
from shardckpt.checkpoint.stateful.flatten import TensorRef
from shardckpt.errors import AmbiguousError, UnknownNameError, UsageError
from shardckpt.format.reader import NamedBases
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.state.local.local_shards import LocalShard, TensorShards
from shardckpt.storage.resolve_url import as_url

Index = int | slice | EllipsisType
"""What selects elements along dimensions."""


class _Source:
    """A checkpoint that can be closed: what reads from it holds this, so that closing lets go of its files.

    Args:
        saved: The checkpoint.
    """

    def __init__(self, saved: CheckpointSource) -> None:
        self._saved: CheckpointSource | None = saved
        self.url = saved.url

    @property
    def saved(self) -> CheckpointSource:
        """The checkpoint. Raises UsageError where it was closed."""
        if self._saved is None:
            raise UsageError("the checkpoint is closed", where=self.url, fix="Open it again to read from it.")
        return self._saved

    def close(self) -> None:
        """Release the checkpoint and its files."""
        self._saved = None


class SavedTensor:
    """A tensor of an open checkpoint; indexing reads what is asked for, `[...]` all of it.

    Args:
        source: The checkpoint.
        entry: Which.
    """

    def __init__(self, source: _Source, entry: TensorEntry) -> None:
        self._source, self._entry = source, entry

    @property
    def shape(self) -> torch.Size:
        """Its shape, in elements."""
        return torch.Size(self._entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its tensors."""
        return torch_dtype(self._entry)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Return elements as a tensor of their own, on the CPU.

        Args:
            index: Integers, slices and an ellipsis, as for a tensor.

        Raises:
            IndexError: It is out of range.
            CheckpointError: The elements are missing or damaged.
            NoMemoryError: They do not fit into memory.
            StorageError: The store failed.
            UsageError: The checkpoint was closed.
        """
        shape = self._entry.shape
        picks = _picks(index if isinstance(index, tuple) else (index,), len(shape))
        box = Box(*map(tuple, zip(*map(_range, picks, shape), strict=True))) if shape else Box((), ())
        saved = self._source.saved
        (entry,) = saved.locate([self._entry])  # before memory is taken for it
        tensor = allocate(entry, box.size)
        saved.elements.read([(entry, TensorShards(shape, tensor.dtype, (LocalShard(box, tensor),)))])
        for dim in reversed(range(len(shape))):
            tensor = _thinned(tensor, picks[dim], dim, shape[dim])
        return tensor

    def __repr__(self) -> str:
        return f"SavedTensor({dotted(self._entry.path)!r}, shape={list(self._entry.shape)}, dtype={self.dtype})"


def _picks(index: tuple[Index, ...], dims: int) -> list[int | slice]:
    """Return what selects along each dimension."""
    given = [item for item in index if item is not Ellipsis]
    if len(given) > dims or len(index) - len(given) > 1 or not all(isinstance(e, (int, slice)) for e in given):
        raise IndexError(f"{dims} dimensions are selected by as many integers and slices, not by {index!r}")
    at = next((n for n, item in enumerate(index) if item is Ellipsis), len(index))
    fill: list[Any] = [slice(None)] * (dims - len(given))
    return [*given[:at], *fill, *given[at:]]


def _range(pick: int | slice, size: int) -> tuple[int, int]:
    """Return the first element along a dimension, and how many to read."""
    if isinstance(pick, int):
        if not -size <= pick < size:
            raise IndexError(f"index {pick} is out of range for {size} elements")
        return pick % size, 1
    numbers = range(*pick.indices(size))
    if not numbers:
        return 0, 0
    first, last = sorted((numbers[0], numbers[-1]))
    return first, last - first + 1


def _thinned(tensor: torch.Tensor, pick: int | slice, dim: int, size: int) -> torch.Tensor:
    """Return of what was read along a dimension what was asked for."""
    if isinstance(pick, int):
        return tensor.select(dim, 0)
    step = pick.indices(size)[2]
    if step == 1:
        return tensor
    if step < 0:
        raise IndexError("a step must be positive")
    return tensor[(slice(None),) * dim + (slice(None, None, step),)].clone()


class Opened(Mapping[Any, Any]):
    """An open checkpoint: names to tensors that are read when they are indexed, and to plain values.

    A name is the keys joined by dots, or the tuple of them where that could mean two things. `with` closes it at the
    end of the block; without, it is closed when nothing refers to it or to one of its tensors.

    Args:
        saved: The checkpoint.
    """

    def __init__(self, saved: CheckpointSource) -> None:
        self._source = _Source(saved)
        self._paths: dict[str, list[Path]] = {}
        for path in dict.fromkeys(saved.paths):
            self._paths.setdefault(dotted(path), []).append(path)

    def __getitem__(self, name: str | Path) -> Any:
        """Return a tensor, a value, or the subtree below a name.

        Raises:
            UnknownNameError: The name is unknown; also a KeyError.
            AmbiguousError: Several have it; a tuple of keys decides.
            UsageError: The checkpoint was closed.
        """
        saved = self._source.saved
        if isinstance(name, tuple):
            path: Path = name
        else:
            paths = self._paths.get(name, [])
            if len(paths) > 1:
                raise AmbiguousError(
                    "several names are spelt like this", where=name, found=paths, fix="Give the tuple of keys."
                )
            path = paths[0] if paths else tuple(name.split("."))
        if path in saved.arrays:
            return SavedTensor(self._source, saved.arrays[path])
        value, is_there = saved.find(path)
        if not is_there:
            raise UnknownNameError(
                f"the checkpoint holds nothing called {name!r}",
                where=saved.url,
                fix="`list(opened)` gives every name.",
            )
        if isinstance(value, TensorRef):
            return SavedTensor(self._source, saved.arrays[value.path])
        return saved.read_tree(value)

    def close(self) -> None:
        """Close the files that were opened. Its names stay known; reading from it, or from its tensors, is an error."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        return f"Opened({self._source.url!r}, {len(self)} names)"


def open(path: Any, *, verify: Verify = "read", base: NamedBases | None = None) -> Opened:
    """Open a checkpoint of any format to look into it: `open(path)["model.layers.0.weight"][0:128]`.

    `with open(path) as checkpoint:` closes its files at the end of the block.

    Args:
        path: The path or URL of the checkpoint.
        verify: `"read"`: blocks that are touched are checked against their hashes; False: they are not.
        base: As `load` takes it.

    Raises:
        SourceNotFoundError: Nothing is stored there.
        CheckpointError: It cannot be read.
        UsageError: An unknown way to verify.
    """
    if verify == "full":
        raise UsageError("what is opened is verified as it is read", found=verify, expected="False or 'read'")
    return Opened(CheckpointSource(as_url(path), verify, bases=base or ""))
