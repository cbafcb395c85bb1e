"""Frozen descriptions of a checkpoint: named arrays, the pieces that hold them, and small objects. No data.

A reader turns any format into a `Manifest`; every verb works on manifests alone. Paths are tuples, since
`{"a.b": t}` and `{"a": {"b": u}}` are two different things. The small ones are named tuples:
a checkpoint may hold a million of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import array_nbytes
from shardckpt.errors import FormatError

Path = tuple[str | int, ...]
"""The keys of a value in the state that was saved."""


class Span(NamedTuple):
    """Row-major elements of the box, back to back.

    Attributes:
        offset: First byte in the file.
        nbytes: Bytes.
    """

    offset: int
    nbytes: int


class Strided(NamedTuple):
    """A view of a storage: a slice, a transposed or an expanded tensor.

    Attributes:
        offset: Byte in the file where the storage starts.
        nbytes: Bytes of all of the storage.
        start: Elements from the start of the storage to the box's first element.
        strides: Elements between neighbours in each dimension; 0 repeats one element.
    """

    offset: int
    nbytes: int
    start: int
    strides: Shape


class Encoded(NamedTuple):
    """Bytes that are decoded as a stream, from their start.

    Attributes:
        codec: `zstd` or `deflate` (raw).
        offset: First encoded byte in the file.
        nbytes: Encoded bytes.
        inner: Where the elements are in the decoded stream.
    """

    codec: str
    offset: int
    nbytes: int
    inner: Span | Strided


class Lazy(NamedTuple):
    """A container that must be opened to learn where the elements are; `Reader.resolve` does it.

    Attributes:
        offset: First byte of the container in the file.
        nbytes: Bytes of the container; 0 where they are not known yet.
        detail: What its reader needs besides; opaque to everybody else.
    """

    offset: int
    nbytes: int
    detail: object = None


Layout = Span | Strided | Encoded | Lazy


class Piece(NamedTuple):
    """A box of an array and where its bytes are.

    Attributes:
        box: In elements of the full array.
        file: Name relative to the checkpoint's store, with forward slashes.
        layout: How the box's elements are stored in that file.
    """

    box: Box
    file: str
    layout: Layout


class TensorEntry(NamedTuple):
    """One array of a checkpoint.

    Attributes:
        path: Its path in the saved state.
        shape: Global shape, in elements.
        stored: Type of its elements in the files, by torch's name.
        pieces: Disjoint boxes which together hold it; whether they cover it is `plan.coverage`'s to say.
        delivered: Type to deliver it as, if that differs from `stored`.
    """

    path: Path
    shape: Shape
    stored: str
    pieces: tuple[Piece, ...]
    delivered: str = ""

    @property
    def dtype(self) -> str:
        """Type that it is delivered as."""
        return self.delivered or self.stored

    @property
    def nbytes(self) -> int:
        """Bytes of the full array as delivered."""
        return array_nbytes(self.dtype, self.shape)


class Unread(Enum):
    """Marks an object whose value is in a file and was not read."""

    UNREAD = "unread"


UNREAD = Unread.UNREAD


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One value that is not an array.

    Attributes:
        path: Its path in the saved state.
        value: The value, or `UNREAD` if it is in `file` and `Reader.load_object` reads it.
        file: Name relative to the checkpoint's store; empty for a value known already.
        layout: Its bytes in `file`; None for a value known already.
    """

    path: Path
    value: object = UNREAD
    file: str = ""
    layout: Span | Encoded | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds and where.

    Attributes:
        format: Name of the format it was read as.
        files: Name to size in bytes of every file with a piece, and of those that are missing: size -1.
        tensors: Arrays by path, in the order they were saved; both names of a tied array.
        objects: Other values by path; empty containers too, so that the state can be rebuilt.
        aliases: Path of a tied array to the path of the first array with the same elements, where the format knows it.
        metadata: Free text that travels with the arrays (safetensors `__metadata__`).
        warnings: What is odd but no reason to stop, one sentence each.
        missing: Files that names promise and that are not there, if it is unknown which tensors they held: such a
            checkpoint can be inspected, but does not count as complete.
        elsewhere: Name of a file in another folder than the checkpoint, to that folder.
        closed: Folders of these that were not opened, with the error that whoever wants something in them gets.
        variants: Name of further weights of a model to where they are, and where the model is; None where nowhere.
        has_shapes: Whether global shapes are stored. Where not, they are the hulls of the boxes that are there, and
            nothing shows that the last rows of an array are gone.
        unread: Files and values beside that the reader skips, a phrase each; `warnings` name them too.
        keeps_order: Whether `tensors` are in the order of the state dict that was saved. Where not, such as sorted by
            name, their order says nothing about an optimizer's ids.
        by_order: Optimizers whose ids the reader itself named by the order of the model's state dict.
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
    by_order: frozenset[Path] = frozenset()


def dotted(path: Path) -> str:
    """Return a path as people write it: keys joined by dots."""
    return ".".join(map(str, path))


def unflatten(values: Mapping[Path, Any], where: str | None = None, *, has_lists: bool = False) -> Any:
    """Build nested dicts from values by path; a value at the empty path is returned as it is.

    Args:
        values: By path. An empty dict counts as a dict of the result.
        where: The checkpoint, for the message. None: a value below another value is dropped.
        has_lists: Turn dicts with the keys 0, 1, 2, ... into lists, except the `state` of an optimizer, whose keys are
            numbers of parameters.

    Raises:
        FormatError: A value is below another value that is not a dict, and `where` is given.
    """
    root: dict[str | int, Any] = {}
    nodes = {id(root)}  # the dicts of the result; a value may be a dict too
    for path, value in values.items():
        if not path:
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
