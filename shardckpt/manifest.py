"""Frozen descriptions of a checkpoint: arrays, their pieces, small objects.

A reader turns any format into a `Manifest`; all functions on checkpoints work on manifests alone. Paths are tuples,
since `{"a.b": t}` and `{"a": {"b": u}}` differ. The small classes are named tuples, since a checkpoint may have a
million of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import array_nbytes
from shardckpt.errors import FormatError

Path = tuple[str | int, ...]  # a value's keys in the saved state, from the outermost container to the innermost


class Span(NamedTuple):
    """Contiguous bytes with a box's elements in row-major order.

    Attributes:
        offset: The first byte's offset in the file.
        nbytes: Number of bytes.
    """

    offset: int
    nbytes: int


class Strided(NamedTuple):
    """A storage's view: a slice, a transposed or an expanded tensor."""

    offset: int  # where the storage starts in the file, in bytes
    nbytes: int  # the full storage's bytes
    start: int  # elements from the storage's start to the box's first element
    strides: Shape  # elements between neighbors in each dimension; 0 repeats one element


class Encoded(NamedTuple):
    """Bytes that are decoded as a stream from their start."""

    codec: str  # `zstd` or `deflate` (raw)
    offset: int  # the first encoded byte's offset in the file
    nbytes: int
    inner: Span | Strided  # where the elements are in the decoded stream


class Lazy(NamedTuple):
    """A container that `Reader.resolve` opens to locate the elements."""

    offset: int  # the container's first byte in the file
    nbytes: int  # the container's bytes; 0 if not known yet
    detail: object = None  # further data for this format's reader; opaque to all other code


Layout = Span | Strided | Encoded | Lazy


class Piece(NamedTuple):
    """An array's box and the location of its bytes.

    Attributes:
        box: Box in the full array, in elements.
        file: File name relative to the checkpoint's store, with forward slashes.
        layout: Where and how the file stores the box's elements.
    """

    box: Box
    file: str
    layout: Layout


class TensorEntry(NamedTuple):
    """One array in a checkpoint.

    Attributes:
        path: Path in the saved state.
        shape: Global shape, in elements.
        stored: Dtype in the files, in torch's spelling.
        pieces: Disjoint boxes in the array. `plan.coverage` checks whether they cover it.
        delivered: Dtype to deliver, if it differs from `stored`.
        order: Dimensions from the slowest to the fastest in the memory that was saved; empty if row-major or unknown.
            Files are row-major.
    """

    path: Path
    shape: Shape
    stored: str
    pieces: tuple[Piece, ...]
    delivered: str = ""
    order: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        """Dtype to deliver."""
        return self.delivered or self.stored

    @property
    def nbytes(self) -> int:
        """The full array's bytes in the delivered dtype."""
        return array_nbytes(self.dtype, self.shape)


class Unread(Enum):
    """Marks an object whose value is in a file that was not read."""

    UNREAD = "unread"


UNREAD = Unread.UNREAD


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One value that is not an array."""

    path: Path  # in the saved state
    value: object = UNREAD  # `UNREAD` if it is in `file`; then `Reader.load_object` reads it
    file: str = ""  # file name relative to the checkpoint's store; empty if the value is known
    layout: Span | Encoded | None = None  # where its bytes are in `file`; None if the value is known


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's content: locations of all arrays, and all other values.

    Attributes:
        format: Name of the checkpoint's format.
        files: File name to size in bytes, for every file with a piece; -1 for missing files.
        tensors: Arrays by path, in the order in which they were saved; a tied array under all its names.
        objects: Other values by path, including empty containers, so that the state can be rebuilt.
        aliases: A tied array's path to the path of the first array with the same elements, if the format stores this.
        metadata: Text stored with the arrays (safetensors `__metadata__`).
        warnings: Oddities that do not prevent loading, one sentence each.
        missing: Missing files whose tensors are unknown. A checkpoint with such files can be inspected, but does not
            count as complete.
        elsewhere: The name of a file outside the checkpoint's folder to its folder's URL.
        closed: Folders in `elsewhere` that were not opened, to the error that is raised if their data is needed.
        variants: A model's further weights, such as averaged ones, by path, to the model's path; None if it was
            not saved.
        has_shapes: Whether global shapes are stored. If not, a shape is the bounding box of the existing boxes, and
            an array's missing last rows cannot be detected.
        unread: Skipped files and values, one phrase each; `warnings` mention them too.
        keeps_order: Whether `tensors` are in the saved state dict's order. If not, for example because they are
            sorted by name, their order does not determine an optimizer's ids.
        optimizers: Paths to optimizers whose own `state_dict()` has other keys than `state` and `param_groups`.
        pretrained: Path to the module that a stored config describes, the last key as an FQN; empty for the model.
        by_order: Optimizers whose ids the reader replaced with names, by the model's state dict order.
    """

    format: str
    files: Mapping[str, int]
    tensors: Mapping[Path, TensorEntry]
    objects: Mapping[Path, ObjectEntry] = field(default_factory=dict)
    aliases: Mapping[Path, Path] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    has_shapes: bool = True
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    closed: Mapping[str, Exception] = field(default_factory=dict)
    variants: Mapping[str, tuple[Path, Path | None]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    keeps_order: bool = False
    optimizers: tuple[Path, ...] = ()
    pretrained: Path = ()
    by_order: frozenset[Path] = frozenset()


def dotted(path: Path) -> str:
    """Return a path as text: keys joined by dots."""
    return ".".join(map(str, path))


def split_numbers(name: str) -> list[tuple[int, str]]:
    """Return a name's parts, a key that sorts its numbers as numbers."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"([0-9]{1,18})", name)]


def unflatten(values: Mapping[Path, Any], where: str | None = None, *, has_lists: bool = False) -> Any:
    """Build nested dicts from values by path; `has_lists` turns dicts with the keys 0, 1, 2, ... into lists."""
    root: dict[str | int, Any] = {}
    nodes = {id(root)}  # ids of the result's dicts; a value may be a dict too
    for path, value in values.items():
        if not path:
            # A value at the empty path is returned unchanged.
            return value
        node = root
        for key in path[:-1]:
            if key not in node:
                node[key] = {}
                nodes.add(id(node[key]))
            elif id(node[key]) not in nodes:
                break
            node = node[key]
        else:
            is_node = type(value) is dict and not value
            if path[-1] not in node:
                node[path[-1]] = {} if is_node else value
                nodes.update((id(node[path[-1]]),) if is_node else ())
                continue
            if is_node:
                continue
        # Without `where`, a value below another value is dropped.
        if where is not None:
            raise FormatError("a value is inside another value", where=where, found=dotted(path))
    return _restore_lists(root, nodes) if has_lists else root


def _restore_lists(node: Any, nodes: Collection[int]) -> Any:
    if id(node) not in nodes:
        return node
    restored = {key: _restore_lists(value, nodes) for key, value in node.items()}
    if "param_groups" in node and id(node.get("state")) in nodes:
        restored["state"] = {key: _restore_lists(slots, nodes) for key, slots in node["state"].items()}
    is_list = bool(restored) and all(type(key) is int for key in restored) and {*restored} == {*range(len(restored))}
    return [restored[i] for i in range(len(restored))] if is_list else restored
