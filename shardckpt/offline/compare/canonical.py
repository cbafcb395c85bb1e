"""Read an open checkpoint under format-independent names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from shardckpt.encodings.pickle_stubs import PerRankValue
from shardckpt.errors import AmbiguousError, CheckpointError, UsageError
from shardckpt.manifest import UNREAD, Manifest, ObjectEntry, Path, Span, TensorEntry, dotted
from shardckpt.offline.select.options import Part
from shardckpt.offline.select.selection import SMALL_ELEMENTS, load_values
from shardckpt.plan.naming.fqn import NamedModel, name_model
from shardckpt.plan.naming.sections import Sections, find_sections, is_beside_state, model_values, split_flat_names
from shardckpt.plan.optim import optimizer_state
from shardckpt.plan.optim.optimizer_state import OptimizerState, RawOptimizer
from shardckpt.plan.packed_weights import find_torchao
from shardckpt.plan.rules.rules import Rule
from shardckpt.reader import Reader
from shardckpt.readers.remap import locate_model, locate_state, plan_rules

STEP_SLOT = "step"  # slot with the step count of torch's optimizers, a float tensor


# How parameters are named: by stored `names`, by names that a reader assigned in model `order`, or by `ids`.
Naming = Literal["names", "order", "ids"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Names for one optimizer's parameters."""

    root: str  # dotted path of the optimizer
    naming: Naming
    tensors: frozenset[str]
    values: frozenset[Path]


@dataclass(slots=True)
class Canonical:
    """Content of a checkpoint's requested part."""

    # Name to array. Model tensors have the names of the unwrapped model, other tensors their dotted paths;
    # `merge_slots` adds the optimizers' state.
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    slots: dict[str, TensorEntry] = field(default_factory=dict)  # `<parameter>/<slot>` to array
    # Path to value, for all values that are not tensors; the first key of an optimizer's value is its prefix.
    values: dict[Path, object] = field(default_factory=dict)
    # By the prefix of an optimizer's names, which is empty for the only optimizer.
    groups: dict[str, Groups] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # name to the reason for not reading its value
    # Dotted path to location, for values from a file.
    sources: dict[str, ObjectEntry] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)  # by the prefix of their names
    left_out: tuple[str, ...] = ()  # dotted paths outside the requested part
    # Names of tensors that are not training values: batch counts in the model, step counts in optimizers, and elsewhere
    # integers and single numbers (random states, data positions, callback scores).
    counters: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)  # one sentence each

    def merge_slots(self, taken: Set[str] = frozenset()) -> None:
        """Add the slots to the tensors; mark the name of a slot that another tensor, here or in `taken`, has."""
        for slot, entry in self.slots.items():
            name = slot
            while name in self.tensors or name in taken:
                name += " (of the optimizer)"
            self.tensors[name] = entry
            if slot.rpartition("/")[2] == STEP_SLOT:
                self.counters.add(name)
        self.slots = {}


def read_canonical(reader: Reader, part: Part, rules: Sequence[Rule] = (), *, by_ids: bool = False) -> Canonical:
    """Return the content of a checkpoint under format-independent names."""
    return _Naming(reader, rules, by_ids=by_ids).run(part)


class _Naming:
    def __init__(self, reader: Reader, rules: Sequence[Rule], *, by_ids: bool) -> None:
        self._reader, self._rules, self._by_ids = reader, rules, by_ids
        self._manifest: Manifest = split_flat_names(reader.manifest)
        self._found: Sections = find_sections(self._manifest)
        self._model: NamedModel = name_model(self._manifest, self._found)
        self._made = Canonical()

    def run(self, part: Part) -> Canonical:
        if part != "optim":
            self._add_model()
        if part != "model":
            for root in self._found.optimizers:
                self._add_optimizer(root)
        if part == "all":
            self._add_others()
        self._made.left_out = tuple(self._list_unasked(part))
        return self._made

    def _list_unasked(self, part: Part) -> list[str]:
        found = self._found
        roots = [root for root in found.optimizers if part == "model"]
        if part == "optim" and self._model.tensors:
            roots.append(found.model)
        names = [dotted(root) or "the model" for root in roots]
        return names if part == "all" else [*names, *map(dotted, found.others), *self._manifest.unread]

    def _add_model(self) -> None:
        tensors = self._model.tensors
        if self._rules:
            remapped = plan_rules(self._rules, tensors, None, {})
            tensors, _ = locate_model(self._reader, self._manifest, remapped, list(remapped.model), tensors)
        tensors = self._name_parts(tensors)
        self._made.tensors.update(tensors)
        self._made.counters.update(
            name for name, entry in tensors.items() if _is_count(entry) or self._is_of_list(entry)
        )
        depth = len(self._found.model)
        for path in model_values(self._manifest, self._found):
            self._add_object(path, (self._model.clean(dotted(path[depth:])),))

    def _name_parts(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return a model with the parts of quantized weights under the names that native steps have."""
        packed = find_torchao(self._manifest.metadata, tensors)
        parts = {part: f"{name}.{inner}" for name, weight in packed.items() for inner, part in weight.parts.items()}
        return {name if parts.get(name, name) in tensors else parts[name]: entry for name, entry in tensors.items()}

    def _is_of_list(self, entry: TensorEntry) -> bool:
        """Return whether top-level integers form a list, such as one value per rank, instead of a model."""
        return not self._found.model and _is_integer(entry) and any(isinstance(key, int) for key in entry.path)

    def _add_optimizer(self, root: Path) -> None:
        raw = optimizer_state.read_raw(self._manifest, root, load_values(self._reader, self._manifest, root))
        prefix = "" if len(self._found.optimizers) == 1 else f"{dotted(root)}:"
        state, naming = self._name_params(raw, root)
        tensors = {f"{prefix}{key}": entry for key, entry in state.tensors.items()}
        tensors.update({dotted(path): e for path, e in self._manifest.tensors.items() if is_beside_state(path, root)})
        values: dict[Path, object] = {}
        for name, slots in state.scalars.items():
            values.update({(f"{prefix}{name}/{slot}",): value for slot, value in slots.items()})
        values.update({(*root, *path): v for path, v in raw.values.items() if is_beside_state(path, ())})
        made = self._made
        made.slots.update(tensors)
        made.values.update(values)
        if state.groups:
            made.groups[prefix] = index_groups(state.groups, are_stored=state.has_groups)
        made.optimizers[prefix] = Optimizer(dotted(root), naming, frozenset(tensors), frozenset(values))

    def _name_params(self, raw: RawOptimizer, root: Path) -> tuple[OptimizerState, Naming]:
        """Return an optimizer by parameter names, or by ids if names are uncertain."""
        if self._by_ids and optimizer_state.has_ids(raw):
            return optimizer_state.key_by_id(raw), "ids"
        tensors = self._model.tensors
        shapes = {name: entry.shape for name, entry in tensors.items()}
        try:
            state: OptimizerState | None = optimizer_state.key_by_name(raw, shapes, clean=self._model.clean)
        except (AmbiguousError, UsageError):
            state = None
        if state is None or state.is_by_order:
            words = f"{dotted(root) or 'the optimizer'} is compared by its own ids, which have no certain names"
            self._made.warnings.append(f"{self._reader.store.url}: {words}")
            return optimizer_state.key_by_id(raw), "ids"
        if self._rules:
            plan = plan_rules(self._rules, tensors, state, {}).plan
            state = locate_state(self._reader, self._manifest, plan, state)
        return state, "order" if root in self._manifest.by_order else "names"

    def _add_others(self) -> None:
        known = {entry.path for entry in self._model.tensors.values()}
        for path, entry in self._manifest.tensors.items():
            root = next((root for root in self._found.optimizers if path[: len(root)] == root), None)
            if path in known or (root is not None and self._is_read(root, path)):
                continue
            name = dotted(path)
            while name in self._made.tensors:
                name += " (beside the model)"
            self._made.tensors[name] = entry
            if _is_integer(entry) or entry.shape == ():
                self._made.counters.add(name)
        of_model = set(model_values(self._manifest, self._found))
        for path in self._manifest.objects:
            if not self._is_of_optimizer(path) and path not in of_model:
                self._add_object(path, path)
        self._add_unread()

    def _add_unread(self) -> None:
        """Add the values that the reader skips."""
        unread = self._manifest.unread
        if not unread:
            return
        self._made.refused.update(dict.fromkeys(unread, "this is not read"))
        sizes = {entry.name: entry.size for entry in self._reader.store.list() if not entry.is_folder}
        for name in unread:
            if name in sizes:  # a file, which is compared as bytes
                self._made.sources[name] = ObjectEntry((name,), UNREAD, name, Span(0, sizes[name]))

    def _is_read(self, root: Path, path: Path) -> bool:
        """Return True if an optimizer's array has been read, with its state or as a number in its groups."""
        kind, dot, _ = str(path[len(root)]).partition(".")
        return kind != "param_groups" or (not dot and prod(self._manifest.tensors[path].shape) <= SMALL_ELEMENTS)

    def _is_of_optimizer(self, path: Path) -> bool:
        return any(path[: len(root)] == root for root in self._found.optimizers)

    def _add_object(self, path: Path, under: Path) -> None:
        entry = self._manifest.objects[path]
        if entry.file and isinstance(entry.layout, Span):
            self._made.sources[dotted(under)] = entry
        try:
            value = self._reader.load_object(entry) if entry.value is UNREAD else entry.value
            if isinstance(value, PerRankValue):
                raise value.error(dotted(under))
        except CheckpointError as error:
            self._made.refused[dotted(under)] = str(error)
        else:
            self._made.values[under] = value


def _is_integer(entry: TensorEntry) -> bool:
    return "int" in entry.dtype


def _is_count(entry: TensorEntry) -> bool:
    """Return whether a model's tensor is one integer, such as the batch count in a batch norm."""
    return _is_integer(entry) and entry.shape == ()


_GROUPS, _PARAMS = "param_groups", "params"


@dataclass(frozen=True, slots=True)
class Groups:
    """One optimizer's param groups."""

    settings: Sequence[Mapping[str, object]]  # without `params`
    members: Sequence[Sequence[str]]  # parameter names
    are_stored: bool = True  # False: parameters with equal settings form a group


def index_groups(groups: Sequence[Mapping[str, object]], *, are_stored: bool) -> Groups:
    """Separate names and settings in an optimizer's groups."""
    settings = [{key: value for key, value in group.items() if key != _PARAMS} for group in groups]
    members = [group.get(_PARAMS, ()) for group in groups]
    return Groups(settings, [m if isinstance(m, (list, tuple)) else () for m in members], are_stored)


NO_GROUPS = Groups((), (), are_stored=False)


def align(a: Groups, b: Groups) -> tuple[dict[Path, object], dict[Path, object]]:
    """Return the settings of both under common paths for the same parameters."""
    # A cell is a set of parameters that share a group in both; the order in a group does not count.
    in_a, in_b = _home(a), _home(b)
    cells: dict[tuple[int | None, int | None], str] = {}
    for name in (*in_a, *in_b):
        cells.setdefault((in_a.get(name), in_b.get(name)), name)
    empty = [[i for i, members in enumerate(side.members) if not members] for side in (a, b)]
    for place in range(max(map(len, empty))):
        pair = tuple(row[place] if place < len(row) else None for row in empty)
        cells[pair[0], pair[1]] = ""
    # With equal groups the key is the number in `a`, else the first parameter in the cell.
    are_alike = all(_are_different([cell[side] for cell in cells]) for side in (0, 1))
    made: tuple[dict[Path, object], dict[Path, object]] = ({}, {})
    for (i, j), first in cells.items():
        key = (i if i is not None else j) if are_alike or not first else first
        assert key is not None, "a cell belongs to at least one group"
        for number, side, out in ((i, a, made[0]), (j, b, made[1])):
            if number is not None:
                out.update({(_GROUPS, key, name): value for name, value in side.settings[number].items()})
    if not are_alike and a.are_stored and b.are_stored:
        for side, out in zip((a, b), made, strict=True):
            out[_GROUPS, "members"] = sorted(", ".join(sorted(members)) for members in side.members)
    return made


def _home(groups: Groups) -> dict[str, int]:
    return {name: number for number, members in enumerate(groups.members) for name in members}


def _are_different(numbers: Sequence[int | None]) -> bool:
    known = [number for number in numbers if number is not None]
    return len(set(known)) == len(known)
