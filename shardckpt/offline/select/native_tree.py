"""What a native step made of an open checkpoint holds: its arrays by path, and everything else as tagged JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardckpt.errors import UnsupportedError
from shardckpt.format.encodings.tagged_json import ArrayRef, encode
from shardckpt.format.native.manifest_json import KEEPS_ORDER
from shardckpt.format.native.reader import NativeReader
from shardckpt.format.reader import Reader
from shardckpt.manifest import UNREAD, Path, dotted, unflatten
from shardckpt.offline.select.group_settings import plain_value
from shardckpt.offline.select.lossiness import require_allowed
from shardckpt.offline.select.selection import Selection
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.optim.output_keys import to_state_paths


@dataclass(frozen=True, slots=True)
class NativeTree:
    """A state to save: arrays and tagged JSON.

    Attributes:
        arrays: By path, each once, in the order that `json` counts them in; their pieces are located.
        json: The nest, as tagged JSON.
        ties: Further path of an array to its index.
        topology: Free JSON.
        warnings: What is odd or was left out, one sentence each.
        variants: Where further weights of a model are, with where that is.
    """

    arrays: Mapping[Path, OutputTensor]
    json: object
    ties: Mapping[Path, int] = field(default_factory=dict)
    topology: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    variants: Mapping[Path, Path | None] = field(default_factory=dict)


def build_full_tree(reader: Reader, *, allow_loss: bool) -> NativeTree:
    """Build the state of a full checkpoint, proven complete.

    Args:
        reader: The open checkpoint.
        allow_loss: Leave out values that a step cannot hold.

    Raises:
        UsageError: There are such, and they may not be left out.
        CheckpointError: Elements are missing or doubled, or a container is damaged.
        StorageError: The store failed.
    """
    manifest = reader.manifest
    paths = [path for path in manifest.tensors if path not in manifest.aliases]
    entries = locate(reader, manifest, [manifest.tensors[path] for path in paths])
    arrays = {path: OutputTensor(dotted(path), e, e.dtype) for path, e in zip(paths, entries, strict=True)}
    if isinstance(reader, NativeReader):
        contents = reader.contents
        return NativeTree(arrays, contents.nest, contents.ties, contents.topology, manifest.warnings, contents.variants)
    numbers = {path: number for number, path in enumerate(paths)}
    ties = {path: numbers[kept] for path, kept in manifest.aliases.items()}
    refs = {path: ArrayRef(numbers[manifest.aliases.get(path, path)]) for path in manifest.tensors}
    values, lost = _values(reader)
    require_allowed(lost, "native", allow_loss=allow_loss)
    notes = [f"left out: {what}" for what in lost]
    nest = encode(unflatten({**refs, **values}, reader.store.url))
    topology: dict[str, object] = {"source": manifest.format}
    if not manifest.keeps_order:
        topology[KEEPS_ORDER] = False
    return NativeTree(arrays, nest, ties, topology, (*manifest.warnings, *notes))


def build_selected_tree(selection: Selection) -> NativeTree:
    """Return what a conversion selected: `{"model": {name: ...}, "optim": {"state": {name: {slot: ...}}, ...}}`."""
    arrays: dict[Path, OutputTensor] = {("model", tensor.name): tensor for tensor in selection.model}
    values: dict[Path, object] = {}
    if selection.groups is not None:
        state, rest = to_state_paths(selection.optim, selection.groups)
        arrays |= {("optim", *path): tensor for path, tensor in state.items()}
        values = {("optim", *path): plain_value(value) for path, value in rest.items()}
    numbers = {path: number for number, path in enumerate(arrays)}
    ties: dict[Path, int] = {
        ("model", name): numbers["model", kept] for name, kept in selection.ties.items() if ("model", kept) in arrays
    }
    refs = {path: ArrayRef(number) for path, number in (*numbers.items(), *ties.items())}
    nest = encode(unflatten({**refs, **values}, "the selection"))
    return NativeTree(arrays, nest, ties)


def _values(reader: Reader) -> tuple[dict[Path, object], list[str]]:
    """Return the values that are no arrays, and what the format cannot hold of them."""
    found: dict[Path, object] = {}
    lost = []
    for path, entry in reader.manifest.objects.items():
        value = plain_value(reader.load_object(entry) if entry.value is UNREAD else entry.value)
        try:
            encode(value, path)
        except UnsupportedError as error:
            lost.append(str(error))
            continue
        found[path] = value
    return found, lost
