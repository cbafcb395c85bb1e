"""Apply rules to an open checkpoint's names and shapes, and locate the pieces.

`remap_reader` applies rules to a complete checkpoint; a conversion also selects among the results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardckpt.boxes import Shape
from shardckpt.errors import IncompleteError, UsageError
from shardckpt.manifest import UNREAD, Manifest, ObjectEntry, Path, Piece, TensorEntry, dotted
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming.fqn import NamedModel, name_model
from shardckpt.plan.naming.sections import find_sections, is_beside_state, split_flat_names
from shardckpt.plan.optim.optim_keys import GROUPS, STATE, to_paths
from shardckpt.plan.optim.optimizer_state import BY_ORDER, OptimizerState, key_by_name, read_raw
from shardckpt.plan.rules import rules as planning
from shardckpt.plan.rules.rule_files import parse_rename, parse_rules, rules_text
from shardckpt.plan.rules.rules import Recipe, RemappedTensor, RemapPlan, Rule, SourceTensor, apply_recipe, iter_sources
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import read_blocks
from shardckpt.readers.huggingface.index_files import read_json
from shardckpt.storage.resolve_url import kind, open_store, split
from shardckpt.storage.store import Store, read_bytes

_CONFIG = "config.json"

_Same = Callable[[Sequence[TensorEntry]], bool]  # returns True if small arrays have equal bits

_Rows = Mapping[str, Mapping[str, TensorEntry]]


def read_rules(file: str, renames: Iterable[str] = (), config: Mapping[str, object] | None = None) -> tuple[Rule, ...]:
    """Return the rules in a file, followed by the rules in `--rename`."""
    found = parse_rules(rules_text(file, lambda: read_text(file)), file, config) if file else ()
    return (*found, *map(parse_rename, renames))


@dataclass(frozen=True, slots=True)
class RemappedCheckpoint:
    """A checkpoint's result after rules."""

    plan: RemapPlan  # result for every tensor, including tensors that exist only in the optimizer
    model: Mapping[str, RemappedTensor]  # final names of the model's tensors to their construction, in order
    ties: Mapping[str, str]  # final name of a tensor that is not written, to its equal that is


def plan_rules(
    rules: Sequence[Rule], model: Mapping[str, TensorEntry], state: OptimizerState | None, ties: Mapping[str, str]
) -> RemappedCheckpoint:
    """Plan the rules for model and optimizer."""
    facts = {name: (entry.shape, entry.dtype) for name, entry in model.items()}
    if state is not None:
        facts |= _infer_shapes(state, model)
    plan = planning.plan_remap(rules, facts)
    mine = {n: m for n, m in plan.made.items() if all(leaf.name in model for leaf in planning.iter_sources(m.recipe))}
    return RemappedCheckpoint(plan, mine, _ties(mine, ties))


def _ties(made: Mapping[str, RemappedTensor], ties: Mapping[str, str]) -> dict[str, str]:
    """Return the results that equal operations make from the same tensors."""
    groups: dict[RemappedTensor, list[str]] = {}
    for name, each in made.items():
        groups.setdefault(each._replace(recipe=planning.replace_sources(each.recipe, ties)), []).append(name)
    dropped: dict[str, str] = {}
    for tensor, names in groups.items():
        if all(leaf.name not in ties.values() for leaf in planning.iter_sources(tensor.recipe)):
            continue  # equal construction, but not tied in the checkpoint
        kept = next((name for name in names if made[name] == tensor), names[0])
        dropped |= {name: kept for name in names if name != kept}
    return dropped


def locate_model(
    reader: Reader,
    manifest: Manifest,
    remapped: RemappedCheckpoint,
    names: Sequence[str],
    model: Mapping[str, TensorEntry],
) -> tuple[dict[str, TensorEntry], list[TensorEntry]]:
    """Return the located results by name, and their source tensors."""
    needed = list(
        dict.fromkeys(leaf.name for name in names for leaf in planning.iter_sources(remapped.model[name].recipe))
    )
    found = dict(zip(needed, locate(reader, manifest, [model[name] for name in needed]), strict=True))
    made = {name: planning.apply_recipe(remapped.model[name].recipe, name, found) for name in names}
    return made, [model[name] for name in needed]


def locate_state(reader: Reader, manifest: Manifest, plan: RemapPlan, state: OptimizerState) -> OptimizerState:
    """Return the optimizer state after the rules, located."""
    used = {leaf.name for made in plan.made.values() for leaf in planning.iter_sources(made.recipe)}
    kept = {key: entry for key, entry in state.tensors.items() if key.rpartition("/")[0] in used}
    found = dict(zip(kept, locate(reader, manifest, list(kept.values())), strict=True))

    def same(entries: Sequence[TensorEntry]) -> bool:
        return len({(e.stored, b"".join(bytes(block) for block in read_blocks(reader, e))) for e in entries}) == 1

    return _remap_state(plan, replace(state, tensors=found), same)


def restrict_plan(plan: RemapPlan, names: Iterable[str]) -> RemapPlan:
    """Restrict a plan to some results."""
    wanted = set(names)
    return replace(plan, made={name: made for name, made in plan.made.items() if name in wanted})


class RemappedReader(Reader):
    """A reader with a manifest changed by rules."""

    def __init__(self, inner: Reader, manifest: Manifest) -> None:
        super().__init__(inner.store, manifest)
        self._inner = inner

    @property
    def raw_store(self) -> Store:
        """The files as stored."""
        return self._inner.raw_store

    @property
    def unverified_store(self) -> Store:
        """The files with as few checks as possible."""
        return self._inner.unverified_store

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the located pieces."""
        return self._inner.resolve(pieces)

    def load_object(self, entry: ObjectEntry) -> object:
        """Return an object's value."""
        return self._inner.load_object(entry)


def remap_reader(reader: Reader, place: str) -> RemappedReader:
    """Return a checkpoint with rules applied, also to its optimizers."""
    rules = read_rules(place, config=_config(reader.store))
    manifest = split_flat_names(reader.manifest)
    found = find_sections(manifest)
    model = name_model(manifest, found)
    remapped = plan_rules(rules, model.tensors, None, {})
    if any(each.cast for each in remapped.model.values()):
        raise UsageError(
            "a load takes the types of what it loads into", where=place, fix="Pass cast=True, and no cast."
        )
    made, _ = locate_model(reader, manifest, remapped, list(remapped.model), model.tensors)
    tensors = {(*found.model, name): entry._replace(path=(*found.model, name)) for name, entry in made.items()}
    gone = {entry.path for entry in model.tensors.values()}
    objects: dict[Path, ObjectEntry] = {}
    for root in found.optimizers:
        state = _read_state(reader, manifest, root, model)
        gone |= {p for p in manifest.tensors if p[: len(root)] == root and not is_beside_state(p, root)}
        state = locate_state(reader, manifest, plan_rules(rules, model.tensors, state, {}).plan, state)
        for key, entry in state.tensors.items():
            name, _, slot = key.rpartition("/")
            path = (*root, "state", name, *state.nested.get(slot, (slot,)))
            tensors[path] = entry._replace(path=path)
        objects |= _build_values(root, state)
    roots = found.optimizers
    objects |= {
        path: entry
        for path, entry in manifest.objects.items()
        if not any(path[: len(root)] == root and not is_beside_state(path, root) for root in roots)
    }
    rest = {path: entry for path, entry in manifest.tensors.items() if path not in gone}
    return RemappedReader(reader, replace(manifest, tensors={**tensors, **rest}, objects=objects, aliases={}))


def _read_state(reader: Reader, manifest: Manifest, root: Path, model: NamedModel) -> OptimizerState:
    n = len(root)
    if any(path[: n + 1] == (*root, "param_groups") for path in manifest.tensors):
        raise UsageError("rules cannot load settings that are tensors", where=dotted(root), fix="Convert it first.")
    values = {
        path: reader.load_object(entry) if entry.value is UNREAD else entry.value
        for path, entry in manifest.objects.items()
        if path[:n] == root
    }
    shapes = {name: entry.shape for name, entry in model.tensors.items()}
    state = key_by_name(read_raw(manifest, root, values), shapes, clean=model.clean)
    if state.is_by_order:
        warnings.warn(f"{dotted(root)}: {BY_ORDER} to `shardckpt convert`, and load that", stacklevel=2)
    return state


def _build_values(root: Path, state: OptimizerState) -> dict[Path, ObjectEntry]:
    values = to_paths({STATE: state.scalars, GROUPS: [dict(group) for group in state.groups]})
    if state.tensors:
        values.pop((STATE,), None)
    return {(*root, *path): ObjectEntry((*root, *path), value) for path, value in values.items()}


def _config(store: Store) -> dict[str, object]:
    return read_json(store, _CONFIG) if any(entry.name == _CONFIG for entry in store.list()) else {}


MAX_BYTES = 1 << 22


def read_text(url: str) -> str | None:
    """Return a file's text; None if it does not exist."""
    if kind(url) != "file":
        return None
    parent, name = split(url)
    store = open_store(parent)
    size = store.size(name)
    if size > MAX_BYTES:
        raise UsageError("too large for such a file", where=url, found=f"{size} bytes", expected=f"at most {MAX_BYTES}")
    try:
        return read_bytes(store, name, 0, size).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("no UTF-8", where=url) from error


def _infer_shapes(state: OptimizerState, known: Mapping[str, object]) -> dict[str, tuple[Shape, str]]:
    """Infer shapes for parameters that the model lacks from their largest slots."""
    found: dict[str, tuple[Shape, str]] = {}
    for key, entry in state.tensors.items():
        name = key.rpartition("/")[0]
        if name not in known and (name not in found or prod(found[name][0]) < prod(entry.shape)):
            found[name] = (entry.shape, entry.dtype)
    return found


def _remap_state(plan: RemapPlan, state: OptimizerState, same: _Same) -> OptimizerState:
    """Apply the parameters' rules to an optimizer's slots."""
    # A slot with another shape than its parameter is kept if the parameter is only renamed; a scalar slot (`step`) is
    # kept if it is equal for all sources.
    rows: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in state.tensors.items():
        name, _, slot = key.rpartition("/")
        rows.setdefault(name, {})[slot] = entry
    tensors: dict[str, TensorEntry] = {}
    scalars: dict[str, Mapping[str, object]] = {}
    for name, made in plan.made.items():
        parts = list(dict.fromkeys(leaf.name for leaf in iter_sources(made.recipe)))
        for slot in _slots(name, parts, rows):
            tensors[f"{name}/{slot}"] = _make_entry(made.recipe, f"{name}/{slot}", slot, rows, same)
        values = [state.scalars.get(part, {}) for part in parts]
        if any(each != values[0] for each in values):
            raise UsageError("a tensor's parts have different scalars", where=name, found=values[:2])
        if values[0]:
            scalars[name] = values[0]
    groups = _groups(plan, state.groups)
    return OptimizerState(tensors, scalars, groups, has_groups=state.has_groups, is_by_order=state.is_by_order)


def _slots(name: str, parts: Sequence[str], rows: _Rows) -> list[str]:
    slots = list(rows.get(parts[0], {}))
    for part in parts[1:]:
        other = rows.get(part, {})
        odd = set(slots) ^ set(other)
        if odd:
            lacking = parts[0] if odd & set(other) else part
            raise IncompleteError(
                f"{name} is made from several tensors, and {lacking} has no {min(odd)}",
                fix="Leave the optimizer out with --part model, or drop such tensors with a rule.",
            )
    return slots


def _make_entry(recipe: Recipe, key: str, slot: str, rows: _Rows, same: _Same) -> TensorEntry:
    found = {leaf.name: rows[leaf.name][slot] for leaf in iter_sources(recipe)}
    first = next(iter(found.values()))
    if isinstance(recipe, SourceTensor):
        return first._replace(path=(key,))
    if all(found[leaf.name].shape == leaf.shape for leaf in iter_sources(recipe)):
        return apply_recipe(recipe, key, found)
    if any(prod(entry.shape) != 1 for entry in found.values()):
        odd = next(entry for entry in found.values() if prod(entry.shape) != 1)
        raise UsageError(
            f"{slot} is not shaped like its parameter, so that no rule fits it",
            where=key,
            found=odd.shape,
            fix="Leave the optimizer out with --part model.",
        )
    if len(found) > 1 and not same(list(found.values())):
        raise UsageError(f"the parts of {key} differ, and it has only one", where=key, found=f"{len(found)} parts")
    return first._replace(path=(key,))


def _groups(plan: RemapPlan, groups: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return groups by the new names."""
    home: dict[str, int] = {}
    for number, group in enumerate(groups):
        params = group["params"]
        assert isinstance(params, list), "groups by name list their parameters"
        home |= dict.fromkeys(params, number)
    made_of: dict[str, list[str]] = {}
    for name, made in plan.made.items():
        parts = list(dict.fromkeys(leaf.name for leaf in iter_sources(made.recipe)))
        homes = {home.get(part) for part in parts}
        if len(homes) > 1:
            raise UsageError(
                "parts of one tensor are in several groups, or in none",
                where=name,
                found=", ".join(f"{part}: {home.get(part, 'none')}" for part in parts[:4]),
            )
        for part in parts:
            made_of.setdefault(part, []).append(name)
    found = []
    for group in groups:
        params = group["params"]
        assert isinstance(params, list), "as above"
        # A tensor made from several is in the place of the first.
        names = dict.fromkeys(name for part in params for name in made_of.get(part, ()))
        found.append({**group, "params": list(names)})
    return found
