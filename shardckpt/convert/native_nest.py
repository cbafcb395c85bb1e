"""What a native step made of an open checkpoint holds: its arrays by path, and everything else as tagged JSON."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardckpt.convert.arrays import resolve
from shardckpt.convert.selection import Selection
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.format.inert import Dtype, Ordered
from shardckpt.format.native import NativeReader
from shardckpt.format.reader import Reader
from shardckpt.format.tagged import ArrayRef, Named, encode
from shardckpt.manifest import UNREAD, Path, dotted
from shardckpt.plan.outputs import OutTensor


@dataclass(frozen=True, slots=True)
class Nest:
    """What is to be saved.

    Attributes:
        arrays: By path, each once, in the order that `json` counts them in; their pieces are located.
        json: The nest, as tagged JSON.
        ties: Further path of an array to its index.
        topology: Free JSON.
        warnings: What is odd or was left out, one sentence each.
    """

    arrays: Mapping[Path, OutTensor]
    json: object
    ties: Mapping[Path, int] = field(default_factory=dict)
    topology: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def whole_nest(reader: Reader) -> Nest:
    """Return all that a checkpoint holds, proven complete; of a native step in its own containers.

    Raises:
        CheckpointError: Elements are missing or doubled, or a container is damaged.
        StorageError: The store failed.
    """
    manifest = reader.manifest
    paths = [path for path in manifest.tensors if path not in manifest.aliases]
    entries = resolve(reader, manifest, [manifest.tensors[path] for path in paths])
    arrays = {path: OutTensor(dotted(path), e, e.dtype) for path, e in zip(paths, entries, strict=True)}
    if isinstance(reader, NativeReader):
        contents = reader.contents
        return Nest(arrays, contents.nest, contents.ties, contents.topology, manifest.warnings)
    numbers = {path: number for number, path in enumerate(paths)}
    ties = {path: numbers[kept] for path, kept in manifest.aliases.items()}
    refs = {path: ArrayRef(numbers[manifest.aliases.get(path, path)]) for path in manifest.tensors}
    values, notes = _values(reader)
    nest = encode(nested({**refs, **values}, reader.store.url))
    return Nest(arrays, nest, ties, {"source": manifest.format}, (*manifest.warnings, *notes))


def selected_nest(selection: Selection) -> Nest:
    """Return what a conversion selected: `{"model": {name: ...}, "optim": {"state": {name: {slot: ...}}, ...}}`."""
    arrays: dict[Path, OutTensor] = {("model", tensor.name): tensor for tensor in selection.model}
    values: dict[Path, object] = {}
    for tensor in selection.optim:
        name, _, slot = tensor.name.rpartition("/")
        arrays["optim", "state", name, slot] = tensor
    if selection.groups is not None:
        values["optim", "param_groups"] = selection.groups["param_groups"]
        rest: Any = selection.groups["non_tensor_state"]
        values |= {
            ("optim", "state", name, slot): value for name, slots in rest.items() for slot, value in slots.items()
        }
        values.setdefault(("optim", "state"), {})
    numbers = {path: number for number, path in enumerate(arrays)}
    ties: dict[Path, int] = {
        ("model", name): numbers["model", kept] for name, kept in selection.ties.items() if ("model", kept) in arrays
    }
    refs = {path: ArrayRef(number) for path, number in (*numbers.items(), *ties.items())}
    nest = encode(nested({**refs, **values}, "the selection"))
    return Nest(arrays, nest, ties)


def _values(reader: Reader) -> tuple[dict[Path, object], list[str]]:
    """Return the values that are no arrays, and what the format cannot hold of them."""
    found: dict[Path, object] = {}
    notes = []
    for path, entry in reader.manifest.objects.items():
        value = _plain(reader.load_object(entry) if entry.value is UNREAD else entry.value)
        try:
            encode(value, path)
        except UnsupportedError as error:
            notes.append(f"left out: {error}")
            continue
        found[path] = value
    return found, notes


def _plain(value: Any) -> Any:
    """Return what a pickle held with the containers that it meant."""
    if isinstance(value, Ordered):
        return OrderedDict((key, _plain(each)) for key, each in value.items())
    if isinstance(value, Dtype):
        return Named("dtype", value.name)
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def nested(values: Mapping[Path, object], where: str) -> object:
    """Return values by path as dicts in one another.

    Raises:
        FormatError: One lies inside another one that is no dict.
    """
    root: dict[str | int, Any] = {}
    for path, value in values.items():
        if not path:
            return value
        inner: Any = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if type(inner) is not dict:
                raise FormatError("a value lies inside another one", where=where, found=dotted(path))
        if path[-1] in inner and value != {}:
            raise FormatError("two values have one place", where=where, found=dotted(path))
        inner.setdefault(path[-1], value)
    return root
