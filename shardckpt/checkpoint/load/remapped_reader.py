"""A checkpoint as rules have it: other names and shapes of its model and optimizers, for a load."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from shardckpt.boxes import full_box
from shardckpt.dtypes import nbytes
from shardckpt.errors import UsageError
from shardckpt.format.chunk_reader import PieceReader, ReadItem
from shardckpt.format.huggingface.index_files import read_json
from shardckpt.format.reader import Reader
from shardckpt.manifest import UNREAD, Manifest, ObjectEntry, Path, Piece, TensorEntry, dotted
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming.fqn import NamedModel, name_model
from shardckpt.plan.naming.sections import find_sections, split_flat_names
from shardckpt.plan.optim import optimizer_state
from shardckpt.plan.optim.match_ids import BY_ORDER
from shardckpt.plan.optim.optim_keys import GROUPS, STATE, to_paths
from shardckpt.plan.rules.optimizer_rules import infer_shapes, remap_state
from shardckpt.plan.rules.rule_files import parse_rules, rules_text
from shardckpt.plan.rules.rules import apply_recipe, iter_sources, plan_remap
from shardckpt.storage.store import Store
from shardckpt.storage.text_files import read_text

_CONFIG = "config.json"


class RemappedReader(Reader):
    """A reader whose manifest is as rules have it.

    Args:
        inner: The reader of the files.
        manifest: What rules made of its manifest; what is new in it is located.
    """

    def __init__(self, inner: Reader, manifest: Manifest) -> None:
        super().__init__(inner.store, manifest)
        self._inner = inner

    @property
    def raw_store(self) -> Store:
        """The files as they are stored."""
        return self._inner.raw_store

    @property
    def unverified_store(self) -> Store:
        """The files for those who want no checks."""
        return self._inner.unverified_store

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces, located."""
        return self._inner.resolve(pieces)

    def load_object(self, entry: ObjectEntry) -> object:
        """Return an object's value."""
        return self._inner.load_object(entry)


def remap_reader(reader: Reader, place: str) -> RemappedReader:
    """Return a checkpoint as the rules of a file have it.

    Args:
        reader: The open checkpoint.
        place: TOML file, or the name of a set that comes with the package.

    Raises:
        UsageError: A rule does not fit; nothing was read but names.
        CheckpointError: Elements are missing or doubled, or a container is damaged.
    """
    rules = parse_rules(rules_text(place, lambda: read_text(place)), place, _config(reader.store))
    manifest = split_flat_names(reader.manifest)
    found = find_sections(manifest)
    model = name_model(manifest, found)
    facts = {name: (entry.shape, entry.dtype) for name, entry in model.tensors.items()}
    made = plan_remap(rules, facts)
    used = dict.fromkeys(leaf.name for each in made.made.values() for leaf in iter_sources(each.recipe))
    if any(each.cast for each in made.made.values()):
        raise UsageError(
            "a load takes the types of what it loads into", where=place, fix="Pass cast=True, and no cast."
        )
    entries = dict(zip(used, locate(reader, manifest, [model.tensors[name] for name in used]), strict=True))
    gone = {entry.path for entry in model.tensors.values()}
    tensors = {
        (*found.model, name): apply_recipe(each.recipe, name, entries)._replace(path=(*found.model, name))
        for name, each in made.made.items()
    }
    objects: dict[Path, ObjectEntry] = {}
    for root in found.optimizers:
        state = _state(reader, manifest, root, model)
        gone |= {path for path in manifest.tensors if path[: len(root)] == root}
        all_made = plan_remap(rules, {**facts, **infer_shapes(state, facts)})
        state = remap_state(all_made, state, lambda entries: _same(reader, entries))
        for key, entry in state.tensors.items():
            name, _, slot = key.rpartition("/")
            path = (*root, "state", name, slot)
            tensors[path] = entry._replace(path=path)
        objects |= _build_values(root, state)
    roots = found.optimizers
    objects |= {path: entry for path, entry in manifest.objects.items() if not any(path[: len(r)] == r for r in roots)}
    rest = {path: entry for path, entry in manifest.tensors.items() if path not in gone}
    return RemappedReader(reader, replace(manifest, tensors={**tensors, **rest}, objects=objects, aliases={}))


def _state(reader: Reader, manifest: Manifest, root: Path, model: NamedModel) -> optimizer_state.OptimizerState:
    """Return an optimizer by names, its tensors located."""
    n = len(root)
    if any(path[: n + 1] == (*root, "param_groups") for path in manifest.tensors):
        raise UsageError("rules cannot load settings that are tensors", where=dotted(root), fix="Convert it first.")
    values = {
        path: reader.load_object(entry) if entry.value is UNREAD else entry.value
        for path, entry in manifest.objects.items()
        if path[:n] == root
    }
    shapes = {name: entry.shape for name, entry in model.tensors.items()}
    state = optimizer_state.key_by_name(optimizer_state.read_raw(manifest, root, values), shapes, clean=model.clean)
    if state.is_by_order:
        warnings.warn(f"{dotted(root)}: {BY_ORDER} to `shardckpt convert`, and load that", stacklevel=2)
    located = locate(reader, manifest, list(state.tensors.values()))
    return replace(state, tensors=dict(zip(state.tensors, located, strict=True)))


def _build_values(root: Path, state: optimizer_state.OptimizerState) -> dict[Path, ObjectEntry]:
    values = to_paths({STATE: state.scalars, GROUPS: [dict(group) for group in state.groups]})
    if state.tensors:
        values.pop((STATE,), None)
    return {(*root, *path): ObjectEntry((*root, *path), value) for path, value in values.items()}


def _same(reader: Reader, entries: Sequence[TensorEntry]) -> bool:
    """Return True if arrays of one element hold the same bits."""
    pieces = PieceReader(reader.store)
    buffers = [bytearray(nbytes(entry.stored, 1)) for entry in entries]
    pieces.fill(
        [
            ReadItem(entry.pieces, full_box(entry.shape), entry.stored, memoryview(buffer))
            for entry, buffer in zip(entries, buffers, strict=True)
        ]
    )
    return len({(entry.stored, bytes(buffer)) for entry, buffer in zip(entries, buffers, strict=True)}) == 1


def _config(store: Store) -> dict[str, object]:
    return read_json(store, _CONFIG) if any(entry.name == _CONFIG for entry in store.list()) else {}
