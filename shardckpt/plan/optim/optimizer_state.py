"""Convert stored optimizer state to FQNs: `(fqn, slot)`, groups with names.

State belongs to a parameter by its FQN. Ids become names by a stored list, or by shapes if exactly one assignment
matches. Else they follow the order of the model's state dict, if the files keep it; the result records this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardckpt.boxes import Shape
from shardckpt.errors import AmbiguousError, NameCollisionError, UsageError
from shardckpt.layout import FlatLayout, from_json
from shardckpt.manifest import Manifest, Path, TensorEntry, dotted
from shardckpt.plan.naming.sections import is_beside_state
from shardckpt.plan.optim.optim_keys import (
    GROUPS,
    STATE,
    Key,
    Nested,
    from_paths,
    is_flattened,
    rename_params,
    split_keys,
)
from shardckpt.plan.optim.param_groups import group_by_settings, read_param_names

UNITS = "units"  # key for flat parameters' layouts: `[{"flat": name, "layout": JSON}, ...]`
# Slots in torch's own optimizers that have their parameter's shape.
_ALIKE = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})

# Formats whose paths have text for every dict key, as torch's planner writes them.
_LISTING = frozenset({"dcp", "fabric"})

# Fix for ids without names.
GIVE_NAMES = (
    "Give --param-names FILE: a JSON array of names, such as [n for n, _ in model.named_parameters()] if the"
    " optimizer was built over model.parameters(), or an object from id to name."
)

# Warning for names that follow the model's order.
BY_ORDER = (
    "the optimizer's ids were taken in the order of the model's state dict, since shapes alone do not distinguish them:"
    " where the optimizer was built in another order, give --param-names"
)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One optimizer's state by FQN."""

    tensors: Mapping[str, TensorEntry]  # by `<fqn>/<slot>`
    scalars: Mapping[str, Mapping[str, object]]  # FQN to slot to value, for state that is not a tensor
    groups: Sequence[Mapping[str, object]]  # with `params` as FQNs
    # Layouts of flat parameters, if the checkpoint has them.
    units: Mapping[str, FlatLayout] = field(default_factory=dict)
    has_groups: bool = True  # whether groups are stored; otherwise parameters with equal settings form one
    is_by_order: bool = False  # whether ids got names by the model's order
    nested: Mapping[str, Path] = field(default_factory=dict)  # keys of each nested slot, by its name with dots


@dataclass(frozen=True, slots=True)
class RawOptimizer:
    """One optimizer's state as stored, with its objects loaded."""

    tensors: Mapping[Path, TensorEntry]  # by path below the optimizer's root
    values: Mapping[Path, object]  # by path below the optimizer's root
    has_lists: bool = False  # whether numbers in paths are always list indexes, never dict keys
    keeps_order: bool = False  # whether the model's tensors are in state-dict order


@dataclass(frozen=True, slots=True)
class _ParamNames:
    """Names for ids."""

    names: Mapping[Key, str] = field(default_factory=dict)  # by id
    is_by_order: bool = False  # whether the names follow the model's order


def read_raw(manifest: Manifest, root: Path, values: Mapping[Path, object]) -> RawOptimizer:
    """Extract an optimizer's subtree from a checkpoint."""
    n = len(root)
    has_groups = any(str(key).startswith(GROUPS) for path in (*values, *manifest.tensors) for key in path[n : n + 1])
    return RawOptimizer(
        {
            path[n:]: entry
            for path, entry in manifest.tensors.items()
            if path[:n] == root and not (has_groups and is_beside_state(path, root))
        },
        {path[n:]: value for path, value in values.items() if path[:n] == root},
        has_lists=manifest.format in _LISTING,
        keeps_order=manifest.keeps_order,
    )


def key_by_name(
    raw: RawOptimizer,
    model: Mapping[str, Shape],
    param_names: Mapping[int, str] | None = None,
    clean: Callable[[str], str] = str,
) -> OptimizerState:
    """Convert an optimizer's keys to FQNs."""
    flattened = _is_flattened(raw)
    state = _read_flattened(raw, lambda name: clean(name) in model) if flattened else _read_nested(raw)
    ids = _get_ids(state)
    found = _name_ids(ids, state, model, param_names, keeps_order=raw.keeps_order) if ids else _ParamNames()
    if param_names and model:
        _require_known({i: clean(found.names[i]) for i in ids}, state, model)
    keys = dict.fromkeys([*state[STATE], *_list_params(state)])
    named = rename_params(state, {key: clean(found.names[key] if isinstance(key, int) else key) for key in keys})
    tensors: dict[str, TensorEntry] = {}
    scalars: dict[str, dict[str, object]] = {}
    for name, slots in named[STATE].items():
        for slot, value in slots.items():
            if isinstance(value, TensorEntry):
                key = f"{name}/{slot}"
                if key in tensors:
                    raise NameCollisionError(f"two slots would both be named {key!r}", where=dotted(value.path))
                tensors[key] = value
            else:
                scalars.setdefault(name, {})[slot] = value
    stored_order = {id(entry): at for at, entry in enumerate(raw.tensors.values())}
    tensors = dict(sorted(tensors.items(), key=lambda item: stored_order[id(item[1])]))
    units = _read_units(raw, clean)
    nested = {dotted(path[2:]): path[2:] for path in raw.tensors if path[0] == STATE and len(path) > 3}
    return OptimizerState(tensors, scalars, named[GROUPS], units, not flattened, found.is_by_order, nested)


def key_by_id(raw: RawOptimizer) -> OptimizerState:
    """Convert an optimizer's keys to its ids, as text, if their names are unknown."""
    ids = [] if _is_flattened(raw) else _get_ids(_read_nested(raw))
    return key_by_name(raw, {}, {number: str(number) for number in ids})


def has_ids(raw: RawOptimizer) -> bool:
    """Return True if any parameter has an id."""
    return not _is_flattened(raw) and bool(_get_ids(_read_nested(raw)))


def _list_params(state: Nested) -> list[Key]:
    return [key for group in state[GROUPS] for key in group.get("params", ())]


def _get_ids(state: Nested) -> list[int]:
    return sorted({key for key in (*state[STATE], *_list_params(state)) if isinstance(key, int)})


def _read_units(raw: RawOptimizer, clean: Callable[[str], str]) -> dict[str, FlatLayout]:
    """Return flat parameters' layouts, which a reader stores in the state."""
    stored = raw.values.get((UNITS,))
    units: dict[str, FlatLayout] = {}
    for unit in stored if isinstance(stored, list) else ():
        layout = from_json(unit["layout"])
        assert isinstance(layout, FlatLayout), "readers keep layouts of flat parameters alone"
        specs = tuple(replace(spec, name=clean(spec.name)) for spec in layout.specs)
        units[clean(unit["flat"])] = replace(layout, specs=specs)
    return units


def _is_flattened(raw: RawOptimizer) -> bool:
    paths = [*raw.tensors, *raw.values]
    return all(len(path) == 1 for path in paths) and is_flattened(path[0] for path in paths)


def _read_flattened(raw: RawOptimizer, is_param: Callable[[str], bool]) -> Nested:
    values: dict[str, object] = {str(path[0]): value for path, value in raw.values.items()}
    tensors = {str(path[0]): entry for path, entry in raw.tensors.items() if str(path[0]).startswith(f"{STATE}.")}
    slots, hypers = split_keys({**values, **tensors}, is_param)
    return {STATE: slots, GROUPS: group_by_settings(hypers)}


def _read_nested(raw: RawOptimizer) -> Nested:
    return from_paths(raw.tensors, raw.values, has_lists=raw.has_lists)


def _name_ids(
    ids: Sequence[int],
    state: Nested,
    model: Mapping[str, Shape],
    given: Mapping[int, str] | None,
    *,
    keeps_order: bool,
) -> _ParamNames:
    names = given if given is not None else read_param_names(state[GROUPS])
    found = _ParamNames(dict(names.items())) if names else _match_names(state, model, keeps_order=keeps_order)
    unnamed = [i for i in ids if i not in found.names]
    if unnamed:
        raise UsageError(
            f"optimizer ids {unnamed[:6]} have no name",
            found=f"{len(found.names)} names for {len(ids)} ids",
            fix=GIVE_NAMES,
        )
    return found


def _require_known(names: Mapping[Key, str], state: Nested, model: Mapping[str, Shape]) -> None:
    """Reject a caller's names that the model lacks, or whose moments have other shapes."""
    for key, name in names.items():
        if name not in model:
            raise UsageError(
                f"--param-names calls id {key} {name!r}, which the model lacks",
                found=f"{len(model)} names such as {', '.join(list(model)[:2])}",
                fix="Give the names that `shardckpt inspect` shows for the model.",
            )
    for key, slot, entry in _iter_tensors(state):
        if slot in _ALIKE and key in names and entry.shape != model[names[key]]:
            raise UsageError(
                f"--param-names calls id {key} {names[key]!r}, which has another shape",
                where=dotted(entry.path),
                found=entry.shape,
                expected=model[names[key]],
                fix="Check the order of the names.",
            )


def _match_names(state: Nested, model: Mapping[str, Shape], *, keeps_order: bool) -> _ParamNames:
    """Name ids by shapes if one assignment matches, else by the model's order."""
    shapes = _infer_shapes(state)
    lists = [list(group.get("params", ())) for group in state[GROUPS]]
    ids = [key for keys in lists for key in keys]
    wanted = [[shapes.get(key) for key in keys] for keys in lists]
    every = [shape for known in wanted for shape in known]
    offered = list(model.items())
    match = match_by_kind(every, offered)
    if match is not None:
        return _ParamNames(dict(zip(ids, match, strict=True)))
    in_order = match_in_order(wanted, offered) if keeps_order else None
    if in_order is None:
        raise _no_match(every, offered, keeps_order=keeps_order)
    names = dict(zip(ids, (name for chosen in in_order for name in chosen), strict=True))
    return _ParamNames(names, is_by_order=True)


def _iter_tensors(state: Nested) -> Iterator[tuple[Key, str, TensorEntry]]:
    for key, slots in state[STATE].items():
        yield from ((key, slot, value) for slot, value in slots.items() if isinstance(value, TensorEntry))


def _infer_shapes(state: Nested) -> dict[Key, Shape]:
    """Return each id's shape: from a known slot, or the only shape among its slots."""
    alike: dict[Key, Shape] = {}
    others: dict[Key, set[Shape]] = {}
    for key, slot, entry in _iter_tensors(state):
        if slot in _ALIKE:
            alike.setdefault(key, entry.shape)
        elif entry.shape:
            others.setdefault(key, set()).add(entry.shape)
    return {key: next(iter(found)) for key, found in others.items() if len(found) == 1} | alike


def _no_match(wanted: Sequence[object], offered: Sequence[tuple[str, object]], *, keeps_order: bool) -> AmbiguousError:
    if not offered:
        problem = f"the optimizer has {len(wanted)} ids, and the checkpoint holds no model that names them"
    elif not has_match(wanted, offered):
        problem = f"the optimizer's {len(wanted)} ids do not match the model's {len(offered)} names by shape"
    else:
        order = "not even in the order of the model's state dict" if keeps_order else "and the files keep no order"
        problem = (
            f"the optimizer's {len(wanted)} ids match the model's {len(offered)} names by shape in several ways"
            f", {order}"
        )
    return AmbiguousError(problem, fix=GIVE_NAMES)


def match_by_kind(wanted: Sequence[object], offered: Sequence[tuple[str, object]]) -> list[str] | None:
    """Match names to properties in any order, if unambiguous; None matches anything."""
    asked = Counter(kind for kind in wanted if kind is not None)
    held = Counter(kind for _, kind in offered)
    unknown, unclaimed = len(wanted) - asked.total(), len(offered) - asked.total()
    if any(count > 1 or held[kind] != 1 for kind, count in asked.items()) or unknown > 1:
        return None
    if unknown == 1 and unclaimed != 1:
        return None
    names = {kind: name for name, kind in offered if kind in asked}
    left = next((name for name, kind in offered if kind not in asked), "")
    return [left if kind is None else names[kind] for kind in wanted]


def match_in_order(groups: Sequence[Sequence[object]], offered: Sequence[tuple[str, object]]) -> list[list[str]] | None:
    """Match names to each group's properties in order, if unambiguous; None matches anything."""
    # Each group takes its names before the next group. A match is unique if the leftmost and the rightmost one are
    # equal, so two passes over a group are enough.
    free: dict[object, list[int]] = {None: list(range(len(offered)))}
    for position, (_, kind) in enumerate(offered):
        free.setdefault(kind, []).append(position)
    match: list[list[str]] = []
    for wanted in groups:
        chosen = _leftmost(wanted, free)
        if chosen is None or chosen != _rightmost(wanted, free, len(offered)):
            return None
        for position in chosen:
            for kind in (None, offered[position][1]):
                positions = free[kind]
                del positions[bisect_left(positions, position)]
        match.append([offered[position][0] for position in chosen])
    return match


def has_match(wanted: Sequence[object], offered: Sequence[tuple[str, object]]) -> bool:
    """Return True if names match the properties in any order; None matches anything."""
    held = Counter(kind for _, kind in offered)
    asked = Counter(kind for kind in wanted if kind is not None)
    return len(wanted) <= len(offered) and all(count <= held[kind] for kind, count in asked.items())


def _leftmost(wanted: Sequence[object], free: Mapping[object, Sequence[int]]) -> list[int] | None:
    chosen: list[int] = []
    last = -1
    for kind in wanted:
        positions = free.get(kind, ())
        at = bisect_left(positions, last + 1)
        if at == len(positions):
            return None
        last = positions[at]
        chosen.append(last)
    return chosen


def _rightmost(wanted: Sequence[object], free: Mapping[object, Sequence[int]], following: int) -> list[int] | None:
    chosen: list[int] = []
    for kind in reversed(wanted):
        positions = free.get(kind, ())
        at = bisect_left(positions, following)
        if at == 0:
            return None
        following = positions[at - 1]
        chosen.append(following)
    return chosen[::-1]
