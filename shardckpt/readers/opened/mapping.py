"""An open checkpoint as a mapping from names to tensors and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import EllipsisType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from typing_extensions import Self

from shardckpt.boxes import Box, Shape
from shardckpt.errors import AmbiguousError, UnknownNameError, UsageError
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.readers.opened.state_tree import TensorRef, iter_refs

ArrayT = TypeVar("ArrayT")
SourceT = TypeVar("SourceT", bound="StateSource")


class StateSource(Protocol):
    """An open checkpoint, with its state tree."""

    url: str

    @property
    def arrays(self) -> Mapping[Path, TensorEntry]:
        """Arrays by path."""

    @property
    def paths(self) -> Sequence[Path]:
        """Paths to arrays and other values."""

    def find(self, path: Path) -> tuple[Any, bool]:
        """Return the value at a path, and whether it exists."""

    def read_tree(self, tree: Any) -> Any:
        """Return a part of the tree with its arrays loaded."""


class ClosableSource(Generic[SourceT]):
    """A checkpoint that can be closed. Its readers share this object, so that closing releases the files."""

    def __init__(self, saved: SourceT) -> None:
        self._saved: SourceT | None = saved
        self.url = saved.url

    @property
    def saved(self) -> SourceT:
        """The checkpoint. Raises UsageError if it was closed."""
        if self._saved is None:
            raise UsageError("the checkpoint is closed", where=self.url, fix="Open it again to read from it.")
        return self._saved

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles, since the files that are open cannot go along."""
        raise UsageError(
            "an open checkpoint cannot be copied or pickled",
            where=self.url,
            fix="Open it where it is read: in each process, and for each copy.",
        )

    def close(self) -> None:
        """Release the checkpoint and its files."""
        self._saved = None


class StoredTensor(ABC, Generic[SourceT, ArrayT]):
    """A tensor in an open checkpoint; indexing reads elements, `[...]` reads all."""

    def __init__(self, source: ClosableSource[SourceT], entry: TensorEntry) -> None:
        self._source, self._entry = source, entry

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape in elements."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """The elements' dtype."""

    @abstractmethod
    def _read(self, saved: SourceT, box: Box) -> ArrayT:
        """Return the elements in a box."""

    @abstractmethod
    def _pick(self, read: ArrayT, index: tuple[int | slice, ...]) -> ArrayT:
        """Return a copy of some elements that were read."""

    def __getitem__(self, index: Index | tuple[Index, ...]) -> ArrayT:
        """Return a copy of some elements, on the CPU."""
        box, inner = index_to_box(index, self._entry.shape)
        return self._pick(self._read(self._source.saved, box), inner)

    def _require_copy(self, copy: bool | None) -> None:
        """Raise ValueError, as NumPy demands, if `copy` forbids to read the elements into new memory."""
        if copy is False:
            raise ValueError(f"{self} is not in memory, so that an array of it is a copy")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({dotted(self._entry.path)!r}, shape={list(self._entry.shape)}, dtype={self.dtype})"
        )


class OpenedSubtree(Mapping[Any, Any]):
    """A part of an open checkpoint by its keys; its tensors are read when indexed, `[...]` reads all."""

    def __init__(
        self, tree: Mapping[Any, Any], open_value: Callable[[Any], Any], read_tree: Callable[[Any], Any]
    ) -> None:
        self._tree, self._open, self._read_tree = tree, open_value, read_tree

    def __getitem__(self, key: Any) -> Any:
        """Return a tensor, a value, or the part below a key; with `...` all, loaded."""
        return self._read_tree(self._tree) if key is ... else self._open(self._tree[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        more = ", ..." if len(self) > _SHOWN else ""
        return f"{type(self).__name__}({len(self)} keys: {', '.join(map(repr, islice(self, _SHOWN)))}{more})"


_SHOWN = 3


class Opened(Mapping[Any, Any], Generic[SourceT]):
    """An open checkpoint: names to tensors, read when indexed, and to plain values."""

    # A name is the keys joined by dots, or the tuple of keys if the joined name is ambiguous. A `with` block closes the
    # checkpoint at its end; otherwise it is closed when neither it nor one of its tensors is referenced.

    def __init__(
        self, saved: SourceT, make_tensor: Callable[[ClosableSource[SourceT], TensorEntry], StoredTensor[SourceT, Any]]
    ) -> None:
        self._source = ClosableSource(saved)
        self._make_tensor = make_tensor
        self._paths: dict[str, list[Path]] = {}
        for path in dict.fromkeys(saved.paths):
            self._paths.setdefault(dotted(path), []).append(path)

    def __getitem__(self, name: str | Path) -> Any:
        """Return a tensor, a value, or the subtree below a name, a mapping whose tensors are unread too."""
        saved = self._source.saved
        if not isinstance(name, str):
            path: Path = name if isinstance(name, tuple) else (name,)
        else:
            paths = self._paths.get(name, [])
            if len(paths) > 1:
                raise AmbiguousError(
                    "several names are spelt like this", where=name, found=paths, fix="Give the tuple of keys."
                )
            path = paths[0] if paths else tuple(name.split("."))
        if path in saved.arrays:
            return self._make_tensor(self._source, saved.arrays[path])
        value, is_there = saved.find(path)
        if not is_there:
            raise UnknownNameError(
                f"the checkpoint holds nothing called {name!r}",
                where=saved.url,
                fix="`list(opened)` gives every name.",
            )
        return self._open(value)

    def _open(self, value: Any) -> Any:
        """Return a value in the tree, with its tensors unread."""
        saved = self._source.saved
        if isinstance(value, TensorRef):
            return self._make_tensor(self._source, saved.arrays[value.path])
        if next(iter_refs(value), None) is None:
            return saved.read_tree(value)
        if isinstance(value, dict):
            return OpenedSubtree(value, self._open, self._read_tree)
        return type(value)(map(self._open, value))

    def _read_tree(self, tree: Any) -> Any:
        return self._source.saved.read_tree(tree)

    def close(self) -> None:
        """Close the files."""
        # Names remain available; reading from the checkpoint or its tensors raises an error.
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


Index = int | slice | EllipsisType  # selects elements along one dimension, or all with an ellipsis


def index_to_box(index: Index | tuple[Index, ...], shape: Shape) -> tuple[Box, tuple[int | slice, ...]]:
    """Return the box that contains an index, and the index in this box."""
    picks = _picks(index if isinstance(index, tuple) else (index,), len(shape))
    ranges = [_range(pick, size) for pick, size in zip(picks, shape, strict=True)]
    inner = tuple(0 if isinstance(pick, int) else slice(None, None, pick.step or 1) for pick in picks)
    return Box(tuple(first for first, _ in ranges), tuple(number for _, number in ranges)), inner


def _picks(index: tuple[Index, ...], dims: int) -> list[int | slice]:
    """Return the integer or slice for each dimension."""
    given = [item for item in index if item is not Ellipsis]
    if len(given) > dims or len(index) - len(given) > 1 or not all(map(_is_pick, given)):
        raise IndexError(f"{dims} dimensions are selected by as many integers and slices, not by {index!r}")
    at = next((n for n, item in enumerate(index) if item is Ellipsis), len(index))
    fill: list[Any] = [slice(None)] * (dims - len(given))
    return [*given[:at], *fill, *given[at:]]


def _is_pick(item: object) -> bool:
    """Return True if an item selects elements along one dimension; True and False add one in torch and NumPy."""
    return isinstance(item, (int, slice)) and not isinstance(item, bool)


def _range(pick: int | slice, size: int) -> tuple[int, int]:
    """Return the first element along a dimension, and how many to read."""
    if isinstance(pick, int):
        if not -size <= pick < size:
            raise IndexError(f"index {pick} is out of range for {size} elements")
        return pick % size, 1
    numbers = range(*pick.indices(size))
    if numbers.step < 0:
        raise IndexError("a step must be positive")
    if not numbers:
        return 0, 0
    return numbers[0], numbers[-1] - numbers[0] + 1
