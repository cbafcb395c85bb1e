"""Optimizer state by name: nested, flattened or id-keyed in, `(fqn, slot)` and groups with names out.

State belongs to a parameter by its FQN. Ids become names by a list that says so, by shapes where only one assignment
fits, or, where the files keep the order of the model's state dict, by that order: then the result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardckpt.boxes import Shape
from shardckpt.errors import AmbiguousError, FormatError, NameCollisionError, UsageError
from shardckpt.layout import FlatLayout, from_json
from shardckpt.manifest import Manifest, Path, TensorEntry, dotted, unflatten
from shardckpt.parameter_names import GIVE_NAMES, has_match, match_by_kind, match_in_order

_STATE, _GROUPS = "state", "param_groups"
_UNITS = "units"
"""Where a reader leaves what lies in flat parameters, below an optimizer: `[{"flat": name, "layout": JSON}, ...]`."""
_ALIKE = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""Slots of torch's own optimizers that are shaped like their parameter."""

_LISTING = frozenset({"dcp", "fabric"})
"""Formats whose paths have text for every key of a dict, as torch's planner writes them."""

Key = str | int


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of one optimizer by FQN.

    Attributes:
        tensors: `<fqn>/<slot>` to the array.
        scalars: FQN to slot to value, for state that is no array.
        groups: Parameter groups as the optimizer held them, `params` as FQNs.
        units: Flat parameters in which they lay, where the checkpoint tells.
        has_groups: Whether the groups are stored as groups; otherwise parameters with equal settings make one.
        is_by_order: Whether ids got their names by the order of the model's state dict.
    """

    tensors: Mapping[str, TensorEntry]
    scalars: Mapping[str, Mapping[str, object]]
    groups: Sequence[Mapping[str, object]]
    units: Mapping[str, FlatLayout] = field(default_factory=dict)
    has_groups: bool = True
    is_by_order: bool = False


@dataclass(frozen=True, slots=True)
class RawOptimizer:
    """The state of one optimizer as stored, with its objects read.

    Attributes:
        tensors: Path below the optimizer's root to the array.
        values: Path below the optimizer's root to the value.
        has_lists: Whether numbers in paths count the items of lists, and are never keys of dicts.
        keeps_order: Whether the model's tensors are in the order of its state dict.
    """

    tensors: Mapping[Path, TensorEntry]
    values: Mapping[Path, object]
    has_lists: bool = False
    keeps_order: bool = False


@dataclass(frozen=True, slots=True)
class _ParamNames:
    """What ids are called.

    Attributes:
        of_ids: Id to name.
        is_by_order: Whether the order of the model's state dict decided.
    """

    of_ids: Mapping[Key, str] = field(default_factory=dict)
    is_by_order: bool = False


@dataclass(frozen=True, slots=True)
class _Keyed:
    tensors: dict[tuple[Key, str], TensorEntry]
    scalars: dict[tuple[Key, str], object]
    groups: list[dict[str, object]]


def read_raw(manifest: Manifest, root: Path, values: Mapping[Path, object]) -> RawOptimizer:
    """Take an optimizer's subtree out of a checkpoint.

    Args:
        manifest: The checkpoint.
        root: Where the optimizer is.
        values: Path (from the top) to value, of the objects below `root`.
    """
    n = len(root)
    return RawOptimizer(
        {path[n:]: entry for path, entry in manifest.tensors.items() if path[:n] == root},
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
    """Convert an optimizer's keys to FQNs.

    Args:
        raw: As stored.
        model: Names of the model's tensors, cleaned, to their shapes, in order.
        param_names: Id to name, where the caller knows it.
        clean: Removes wrapper segments from a name.

    Raises:
        UsageError: Ids, and nothing that says which name each one is.
        AmbiguousError: Shapes match the names in no way, or in more than one.
        FormatError: The subtree is no optimizer state.
        NameCollisionError: Two keys become one name.
    """
    is_flattened = _is_flattened(raw)
    keyed = _read_flattened(raw, model, clean) if is_flattened else _read_nested(raw)
    _require_keys({key for key, _ in (*keyed.tensors, *keyed.scalars)}, "state")
    ids = _ids(keyed)
    found = _name_ids(ids, keyed, model, param_names, keeps_order=raw.keeps_order) if ids else _ParamNames()
    names = found.of_ids
    if param_names and model:
        _require_known({i: clean(names[i]) for i in ids}, keyed, model)

    def name(key: Key) -> str:
        return clean(names[key] if isinstance(key, int) else key)

    tensors: dict[str, TensorEntry] = {}
    for (key, slot), entry in keyed.tensors.items():
        full = f"{name(key)}/{slot}"
        if full in tensors:
            raise NameCollisionError(f"two optimizer entries would both be named {full!r}", where=dotted(entry.path))
        tensors[full] = entry
    scalars: dict[str, dict[str, object]] = {}
    for (key, slot), value in keyed.scalars.items():
        scalars.setdefault(name(key), {})[slot] = value
    groups = [_named_group(group, name) for group in keyed.groups]
    units = _units(raw, clean)
    return OptimizerState(tensors, scalars, groups, units, has_groups=not is_flattened, is_by_order=found.is_by_order)


def key_by_id(raw: RawOptimizer) -> OptimizerState:
    """Key an optimizer by its ids, as text, if their names are unknown.

    Raises:
        FormatError: The subtree is no optimizer state.
        NameCollisionError: Two keys become one name.
    """
    keyed = _Keyed({}, {}, []) if _is_flattened(raw) else _read_nested(raw)
    return key_by_name(raw, {}, {number: str(number) for number in _ids(keyed)})


def has_ids(raw: RawOptimizer) -> bool:
    """Return True if an optimizer holds any of its parameters under an id."""
    return not _is_flattened(raw) and bool(_ids(_read_nested(raw)))


def _ids(keyed: _Keyed) -> list[int]:
    return sorted(
        {k for k, _ in (*keyed.tensors, *keyed.scalars) if isinstance(k, int)} | set(_group_ids(keyed.groups))
    )


def _units(raw: RawOptimizer, clean: Callable[[str], str]) -> dict[str, FlatLayout]:
    """Return the layouts that a reader left beside the state."""
    told = raw.values.get((_UNITS,))
    made: dict[str, FlatLayout] = {}
    for unit in told if isinstance(told, list) else ():
        layout = from_json(unit["layout"])
        assert isinstance(layout, FlatLayout), "readers leave layouts of flat parameters alone"
        specs = tuple(replace(spec, name=clean(spec.name)) for spec in layout.specs)
        made[clean(unit["flat"])] = replace(layout, specs=specs)
    return made


def _require_keys(keys: Iterable[object], place: str) -> None:
    for key in keys:
        if type(key) not in (int, str):
            raise FormatError(f"a key of `{place}` is neither a name nor an id", found=key)


def _named_group(group: Mapping[str, object], name: Callable[[Key], str]) -> dict[str, object]:
    params = group.get("params", [])
    if not isinstance(params, (list, tuple)) or not all(type(p) in (int, str) for p in params):
        raise FormatError("a param group's `params` is no list of names or ids", found=params)
    rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return {**rest, "params": [name(p) for p in params]}


def _is_flattened(raw: RawOptimizer) -> bool:
    paths = [*raw.tensors, *raw.values]
    return bool(paths) and all(
        len(path) == 1 and str(path[0]).startswith((f"{_STATE}.", f"{_GROUPS}.")) for path in paths
    )


def _read_nested(raw: RawOptimizer) -> _Keyed:
    keyed = _Keyed({}, {}, [])
    for path, entry in raw.tensors.items():
        if path[:1] == (_STATE,) and len(path) >= 3:
            keyed.tensors[path[1], dotted(path[2:])] = entry
        elif path[:1] != (_GROUPS,):
            raise FormatError(
                "not a place for optimizer state", where=dotted(entry.path), expected="state.<name>.<slot>"
            )
    state = unflatten({path[1:]: v for path, v in raw.values.items() if path[:1] == (_STATE,)})
    for key, slots in state.items() if isinstance(state, dict) else ():
        for slot, value in slots.items() if isinstance(slots, dict) else ():
            keyed.scalars[key, str(slot)] = value
    rest = {path[1:]: v for path, v in raw.values.items() if path[:1] == (_GROUPS,)}
    groups = unflatten(rest, has_lists=raw.has_lists) if rest else None
    if isinstance(groups, dict):
        _require_keys(groups, _GROUPS)
        groups = [groups[key] for key in sorted(groups, key=lambda k: (isinstance(k, str), k))]
    if groups is not None and not (isinstance(groups, (list, tuple)) and all(isinstance(g, dict) for g in groups)):
        raise FormatError("`param_groups` is no list of dicts", found=type(groups).__name__)
    keyed.groups.extend(dict(g) for g in groups or ())
    return _parse_numbers(keyed)


def _parse_numbers(keyed: _Keyed) -> _Keyed:
    """Read keys of `state` that are digits as numbers, where the groups hold numbers: torch's planner writes text."""
    keys = {key for key, _ in (*keyed.tensors, *keyed.scalars)}
    if not _group_ids(keyed.groups) or not all(type(key) is str and key.isascii() and key.isdigit() for key in keys):
        return keyed
    tensors: dict[tuple[Key, str], TensorEntry] = {(int(k), slot): v for (k, slot), v in keyed.tensors.items()}
    scalars: dict[tuple[Key, str], object] = {(int(k), slot): v for (k, slot), v in keyed.scalars.items()}
    return _Keyed(tensors, scalars, keyed.groups)


def _read_flattened(raw: RawOptimizer, model: Mapping[str, Shape], clean: Callable[[str], str]) -> _Keyed:
    """Split `state.{fqn}.{slot}` and `param_groups.{fqn}.{hyper}`; FQNs and slots both contain dots."""
    keyed = _Keyed({}, {}, [])
    hypers: dict[str, dict[str, object]] = {}
    for path, entry in raw.tensors.items():
        kind, key = str(path[0]).split(".", 1)
        if kind == _STATE:
            fqn, slot = _split_fqn(key, model, clean)
            keyed.tensors[fqn, slot] = entry
    for path, value in raw.values.items():
        kind, key = str(path[0]).split(".", 1)
        fqn, slot = _split_fqn(key, model, clean)
        if kind == _STATE:
            keyed.scalars[fqn, slot] = value
        else:
            hypers.setdefault(fqn, {})[slot] = value
    keyed.groups.extend(_group_by_hypers(hypers))
    return keyed


def _split_fqn(key: str, model: Mapping[str, Shape], clean: Callable[[str], str]) -> tuple[str, str]:
    """Split at the longest start that names a parameter; where none does, at the last dot."""
    at = len(key)
    while (at := key.rfind(".", 0, at)) > 0:
        if clean(key[:at]) in model:
            return key[:at], key[at + 1 :]
    fqn, _, slot = key.rpartition(".")
    return fqn, slot


def _group_by_hypers(hypers: Mapping[str, dict[str, object]]) -> list[dict[str, object]]:
    """Join parameters with equal hyper-parameters into groups, in order of their first member."""
    groups: dict[str, dict[str, object]] = {}
    for fqn, values in hypers.items():
        group = groups.setdefault(repr(sorted(values.items())), {**values, "params": []})
        members = group["params"]
        assert isinstance(members, list)
        members.append(fqn)
    return list(groups.values())


def _group_ids(groups: Sequence[Mapping[str, object]]) -> list[int]:
    lists = [group.get("params") for group in groups]
    return [p for params in lists if isinstance(params, (list, tuple)) for p in params if type(p) is int]


def _name_ids(
    ids: Sequence[int],
    keyed: _Keyed,
    model: Mapping[str, Shape],
    given: Mapping[int, str] | None,
    *,
    keeps_order: bool,
) -> _ParamNames:
    names: dict[Key, str] = {}
    names.update((given if given is not None else _names_in_groups(keyed.groups)).items())
    found = _ParamNames(names) if names else _match_names(keyed, model, keeps_order=keeps_order)
    names = dict(found.of_ids)
    unnamed = [i for i in ids if i not in names]
    if unnamed:
        raise UsageError(
            f"optimizer ids {unnamed[:6]} have no name",
            found=f"{len(names)} names for {len(ids)} ids",
            fix=GIVE_NAMES,
        )
    return found


def _require_known(names: Mapping[Key, str], keyed: _Keyed, model: Mapping[str, Shape]) -> None:
    """Refuse names given by the caller that the model lacks, or whose moments have another shape than the parameter."""
    for key, name in names.items():
        if name not in model:
            raise UsageError(
                f"--param-names calls id {key} {name!r}, which the model lacks",
                found=f"{len(model)} names such as {', '.join(list(model)[:2])}",
                fix="Give the names that `shardckpt inspect` shows for the model.",
            )
    for (key, slot), entry in keyed.tensors.items():
        if slot in _ALIKE and key in names and entry.shape != model[names[key]]:
            raise UsageError(
                f"--param-names calls id {key} {names[key]!r}, whose shape is another",
                where=dotted(entry.path),
                found=entry.shape,
                expected=model[names[key]],
                fix="Check the order of the names.",
            )


def _names_in_groups(groups: Sequence[Mapping[str, object]]) -> dict[int, str]:
    names: dict[int, str] = {}
    for group in groups:
        params, stored = group.get("params"), group.get("param_names")
        if isinstance(params, (list, tuple)) and isinstance(stored, (list, tuple)) and len(params) == len(stored):
            names |= {p: n for p, n in zip(params, stored, strict=True) if type(p) is int and isinstance(n, str)}
    return names


def _match_names(keyed: _Keyed, model: Mapping[str, Shape], *, keeps_order: bool) -> _ParamNames:
    """Name ids by the only way in which their shapes match the model's, in any order, else in the model's order.

    Raises:
        AmbiguousError: There is no such way, or more than one.
    """
    shapes = _parameter_shapes(keyed.tensors)
    lists = [_members(group) for group in keyed.groups]
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


def _parameter_shapes(tensors: Mapping[tuple[Key, str], TensorEntry]) -> dict[Key, Shape]:
    """Return the shape of each id's parameter, where its slots tell: one of torch's own, or all of one shape."""
    alike: dict[Key, Shape] = {}
    others: dict[Key, set[Shape]] = {}
    for (key, slot), entry in tensors.items():
        if slot in _ALIKE:
            alike.setdefault(key, entry.shape)
        elif entry.shape:
            others.setdefault(key, set()).add(entry.shape)
    return {key: next(iter(found)) for key, found in others.items() if len(found) == 1} | alike


def _members(group: Mapping[str, object]) -> list[Key]:
    params = group.get("params")
    members = list(params) if isinstance(params, (list, tuple)) else []
    if not all(type(p) in (int, str) for p in members):
        raise FormatError("a param group's `params` is no list of names or ids", found=params)
    return members


def _no_match(wanted: Sequence[object], offered: Sequence[tuple[str, object]], *, keeps_order: bool) -> AmbiguousError:
    if not offered:
        problem = f"the optimizer has {len(wanted)} ids, and the checkpoint holds no model that names them"
    elif not has_match(wanted, offered):
        problem = f"the shapes of the optimizer's {len(wanted)} ids match the model's {len(offered)} names in no way"
    else:
        order = "not even in the order of the model's state dict" if keeps_order else "and the files keep no order"
        problem = (
            f"the shapes of the optimizer's {len(wanted)} ids match the model's {len(offered)} names in several ways"
            f", {order}"
        )
    return AmbiguousError(problem, fix=GIVE_NAMES)
