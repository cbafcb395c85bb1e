"""Apply rules to an optimizer: slots like parameters, groups by new names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from shardckpt.boxes import Shape
from shardckpt.errors import IncompleteError, UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.plan.optim.optimizer_state import OptimizerState
from shardckpt.plan.rules.rules import Recipe, RemapPlan, SourceTensor, apply_recipe, iter_sources

Same = Callable[[Sequence[TensorEntry]], bool]  # returns True if small arrays have equal bits

_Rows = Mapping[str, Mapping[str, TensorEntry]]


def infer_shapes(state: OptimizerState, known: Mapping[str, object]) -> dict[str, tuple[Shape, str]]:
    """Infer shapes for parameters that the model lacks from their largest slots."""
    found: dict[str, tuple[Shape, str]] = {}
    for key, entry in state.tensors.items():
        name = key.rpartition("/")[0]
        if name not in known and (name not in found or prod(found[name][0]) < prod(entry.shape)):
            found[name] = (entry.shape, entry.dtype)
    return found


def remap_state(plan: RemapPlan, state: OptimizerState, same: Same) -> OptimizerState:
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


def _make_entry(recipe: Recipe, key: str, slot: str, rows: _Rows, same: Same) -> TensorEntry:
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
