"""Plan the load of optimizers: match saved state to parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.load.load_plan import LoadItem, LoadPlanBuilder, Put, Taker
from shardckpt.checkpoint.load.source import torch_dtype
from shardckpt.checkpoint.stateful.flatten import LocalModels, require_model_for
from shardckpt.errors import ShardckptError, UsageError
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.plan.naming.fqn import strip_wrappers
from shardckpt.plan.naming.sections import find_sections
from shardckpt.plan.optim import optimizer_state as optimizers
from shardckpt.plan.optim.param_groups import read_param_names
from shardckpt.plan.subclass_record import SUBCLASS, find_record
from shardckpt.readers.opened.state_tree import iter_refs
from shardckpt.state.adapters import torch_fsdp1
from shardckpt.state.adapters.flat_shard_check import FlatShards
from shardckpt.state.adapters.model_index import ModelIndex
from shardckpt.state.keys.slots import LARGEST_NOTE, find_misfit_of_plain, find_misfit_of_wrapper
from shardckpt.state.local.optim_shards import (
    OptimTargets,
    SavedSlot,
    can_take_ids,
    find_unsaved_values,
    parameter_names,
    plan_optim_targets,
)
from shardckpt.state.local.tensor_shards import get_tensor_shards
from shardckpt.state.local.tensor_subclasses import find_dtype


class OptimizerLoadPlanner:
    """Plans optimizer states, which are matched by their models' FQNs."""

    def __init__(self, builder: LoadPlanBuilder, models: LocalModels, shards: FlatShards) -> None:
        self._builder, self._models, self._shards = builder, models, shards

    def plan(self, optim: torch.optim.Optimizer, path: Path) -> None:
        """Add an optimizer's state."""
        index = self._models.find_index_for(optim)
        root = self._find_root(path)
        if root is None:
            self._builder.add_missing(path)
            return
        if index is None or (can_take_ids(index, optim) and self._is_as_returned(root)):
            self._plan_unnamed(optim, path, root)
            return
        self._builder.plan.taken.add(root)
        if not self._builder.options.may_want_below(path):
            return
        try:
            wrapped = self._find_wrapped(root, index, path)
            state = self._select(self._read_named_state(root, index, optim), path)
            targets = self._plan_optim_targets(optim, index, state, wrapped)
        except ShardckptError as error:
            self._builder.plan.problems.append(f"{dotted(path)}: {error}")
            return
        self._fill_optim_targets(targets, state, path, wrapped)
        self._builder.plan.problems += [f"{dotted(path)}.{text}" for text in targets.problems]
        if self._builder.options.strict:
            self._compare_parameters(optim, index, state, path, {name for name, _ in wrapped})
            for name in find_unsaved_values(optim):
                text = "is neither a slot nor a setting: it is not loaded (strict=False keeps what is there)"
                self._builder.add_problem((*path, name), f"{dotted((*path, name))} {text}")
        self._builder.plan.after.append(lambda: targets.put(optim))

    def _compare_parameters(
        self,
        optim: torch.optim.Optimizer,
        index: ModelIndex,
        state: optimizers.OptimizerState,
        path: Path,
        wrapped: Set[str],
    ) -> None:
        """Report parameters that only the live or only the saved optimizer has. Their param groups may differ."""
        live = dict.fromkeys(name for names in parameter_names(index, optim) for name in names)
        groups: Sequence[Mapping[str, Any]] = state.groups
        saved = dict.fromkeys(_first(str(name), index) for group in groups for name in group.get("params", ()))
        kept = dict.fromkeys([_first(key.rpartition("/")[0], index) for key in state.tensors] + sorted(wrapped))
        for name in {**saved, **kept}:
            if name not in live and self._builder.wants((*path, "state", name)):
                self._builder.plan.taken.add((*path, "state"))
                self._builder.plan.of_others.append((*path, "state", name))
        for name in live if saved else ():
            if name not in saved and name not in kept:
                self._builder.add_problem((*path, "state", name), f"missing: {dotted((*path, 'state', name))}")

    def _find_root(self, path: Path) -> Path | None:
        """Return where an optimizer's saved state is: at its path, or the only saved one."""
        if self._builder.source.find(path)[1]:
            return path
        roots = find_sections(self._builder.source.manifest).optimizers
        return roots[0] if len(roots) == 1 and not self._builder.source.is_native else None

    def _is_as_returned(self, root: Path) -> bool:
        """Return True if a saved state is an optimizer's own `state_dict()`: it has ids, or keys that only it has."""
        found = self._builder.source.find(root)[0]
        if isinstance(found, dict) and not any(str(key).startswith(("state", "param_groups")) for key in found):
            return True
        tree = self._builder.source.read_tree(_without_state(found))
        groups = tree.get("param_groups") if isinstance(tree, dict) else None
        listed = [group for group in groups if isinstance(group, dict)] if isinstance(groups, (list, tuple)) else []
        return any(type(member) is int for group in listed for member in group.get("params", ()))

    def _plan_unnamed(self, optim: torch.optim.Optimizer, path: Path, root: Path) -> None:
        model = self._models.find_foreign_for(optim)
        if model is None:
            require_model_for(optim, path, self._shards)
        self._builder.plan.taken.add(root)
        n = len(root)
        wanted = [self._builder.wants((*path, *at[n:])) for at in self._builder.source.paths if at[:n] == root]
        if not any(wanted):
            return
        if not all(wanted):
            self._builder.plan.problems.append(
                f"{dotted(path)}: it can only be loaded completely, and `include` names a part of it"
            )
        self._builder.plan.problems += self._find_other_kinds(optim, path, root)
        take: Put = optim.load_state_dict
        if model is None:
            self._require_no_dtensors(optim, path, root)
        else:
            take = lambda state: torch_fsdp1.put_optim_state(model, optim, state)  # noqa: E731
        self._builder.plan.values.append(Taker(path, self._builder.source.find(root)[0], take))

    def _find_other_kinds(self, optim: torch.optim.Optimizer, path: Path, root: Path) -> Iterator[str]:
        """Yield slots of a saved `state_dict()` that an optimizer of this class cannot use."""
        live = (parameter for group in optim.param_groups for parameter in group["params"])
        parameters: dict[int | str, torch.Tensor] = dict(enumerate(live))
        wrapped = self._find_trees(root)
        for place, tree in wrapped.items():
            record = find_record(tree)
            misfit = find_misfit_of_wrapper(optim, parameters.get(place[-2]), record.name) if record else None
            if misfit is not None:
                yield f"{dotted((*path, *place[len(root) :]))}: {misfit}"
        found = self._builder.source.find(root)[0]
        groups = found.get("param_groups") if isinstance(found, dict) else None
        listed = [group for group in groups if isinstance(group, dict)] if isinstance(groups, (list, tuple)) else []
        misfit = next(filter(None, (find_misfit_of_plain(optim, group) for group in listed)), None)
        start = (*root, "state")
        for place, entry in self._builder.source.arrays.items() if misfit is not None else ():
            if place[: len(start)] == start and entry.shape and place[:-1] not in wrapped:
                yield f"{dotted((*path, *place[len(root) :]))}: {misfit}"

    def _require_no_dtensors(self, optim: torch.optim.Optimizer, path: Path, root: Path) -> None:
        """Refuse an optimizer with DTensors but no model: it would take full tensors instead of its shards."""
        place = (*root, "state")
        has_slots = any(at[: len(place)] == place and e.shape for at, e in self._builder.source.arrays.items())
        parameters = (parameter for group in optim.param_groups for parameter in group["params"])
        if has_slots and any(isinstance(parameter, DTensor) for parameter in parameters):
            raise UsageError(
                "the optimizer holds sharded parameters, and their model is not in the state",
                where=dotted(path),
                fix='Load both together: {"model": model, "optim": optim}; or use `load_optim_state_dict`.',
            )

    def _read_named_state(
        self, root: Path, index: ModelIndex, optim: torch.optim.Optimizer
    ) -> optimizers.OptimizerState:
        shapes = {name: entry.shape for name, entry in index.entries.items()}
        n = len(root)
        tensors = {path: entry for path, entry in self._builder.source.arrays.items() if path[:n] == root}
        others = _without_state(self._builder.source.find(root)[0])
        inside = {ref.path for ref in iter_refs(others)}  # of groups, and of lists and dicts in slots
        inside |= {ref.path for tree in self._find_trees(root).values() for ref in iter_refs(tree)}
        values = _leaves(self._builder.source.read_tree(others), root)
        raw = optimizers.RawOptimizer(
            {path[n:]: entry for path, entry in tensors.items() if path not in inside},
            {path[n:]: value for path, value in values.items()},
        )
        groups = raw.values.get(("param_groups",))
        numbers = _stored_names(groups, index) or _names_by_number(parameter_names(index, optim), groups)
        return optimizers.key_by_name(raw, shapes, numbers, clean=lambda name: _first(name, index))

    def _find_trees(self, root: Path) -> dict[Path, dict[str, Any]]:
        """Return the slots that were saved as wrapper subclasses, by path."""
        found = self._builder.source.find((*root, "state"))[0]
        rows = found.items() if isinstance(found, dict) else ()
        return {
            (*root, "state", name, slot): tree
            for name, slots in rows
            if isinstance(slots, dict)
            for slot, tree in slots.items()
            if _is_wrapped(tree)
        }

    def _find_wrapped(
        self, root: Path, index: ModelIndex, place: Path
    ) -> dict[tuple[str, str], tuple[Path, SavedSlot]]:
        """Return the included slots that were saved as wrapper subclasses, by name and slot, with their paths."""
        wrapped = {}
        for path, tree in self._find_trees(root).items():
            key = _first(str(path[-2]), index), str(path[-1])
            if not self._builder.wants_tensor((*place, "state", *key), tree):
                continue
            record = find_record(tree)
            assert record is not None
            inner = {}
            for name, ref in tree.items():
                if name != SUBCLASS:
                    entry = self._builder.source.arrays[ref.path]
                    inner[name] = (entry.shape, torch_dtype(entry))
            slot = SavedSlot(record.shape, find_dtype(record.dtype), (), record, inner)
            wrapped[key] = (path, slot)
        return wrapped

    def _select(self, state: optimizers.OptimizerState, path: Path) -> optimizers.OptimizerState:
        """Return what the options include from an optimizer's state."""
        if not self._builder.options.is_selective:
            return state

        def wants(name: str, slot: str) -> bool:
            return self._builder.wants((*path, "state", name, slot))

        tensors = {key: entry for key, entry in state.tensors.items() if wants(*key.rsplit("/", 1))}
        scalars = {
            name: {slot: value for slot, value in slots.items() if wants(name, slot)}
            for name, slots in state.scalars.items()
        }
        groups = state.groups if self._builder.wants((*path, "param_groups")) else ()
        return replace(state, tensors=tensors, scalars=scalars, groups=groups)

    def _plan_optim_targets(
        self,
        optim: torch.optim.Optimizer,
        index: ModelIndex,
        state: optimizers.OptimizerState,
        wrapped: Mapping[tuple[str, str], tuple[Path, SavedSlot]],
    ) -> OptimTargets:
        slots: dict[str, dict[str, SavedSlot]] = {}
        for key, entry in state.tensors.items():
            name, _, slot = key.rpartition("/")
            slots.setdefault(name, {})[slot] = SavedSlot(entry.shape, torch_dtype(entry), entry.order)
        for (name, slot), (_, found) in wrapped.items():
            slots.setdefault(name, {})[slot] = found
        return plan_optim_targets(
            index,
            optim,
            slots,
            state.scalars,
            state.groups,
            keeps_rest=self._builder.options.is_selective,
            unequal_steps=self._builder.options.unequal_steps,
        )

    def _fill_optim_targets(
        self,
        targets: OptimTargets,
        state: optimizers.OptimizerState,
        path: Path,
        wrapped: Mapping[tuple[str, str], tuple[Path, SavedSlot]],
    ) -> None:
        """Plan the reads for the targets; compare numbers that several parameters share."""
        shared: dict[int, list[LoadItem]] = {}
        for name, slot, array in targets.arrays:
            if (name, slot) in wrapped:
                self._builder.add_array((*path, "state", name, slot), wrapped[name, slot][0], array)
                continue
            wanted = LoadItem((*path, "state", name, slot), state.tensors[f"{name}/{slot}"], array)
            if not array.shape and array.shards:
                shared.setdefault(array.shards[0].tensor.data_ptr(), []).append(wanted)
            else:
                self._builder.plan.arrays.append(wanted)
        for rows in shared.values():
            self._builder.plan.arrays += rows if len(rows) == 1 else self._read_shared_number(rows, path)

    def _read_shared_number(self, rows: Sequence[LoadItem], path: Path) -> Sequence[LoadItem]:
        """Return the sources for the one number that an optimizer has for a flat parameter."""
        values = [self._read_number(tensor.entry) for tensor in rows]
        if all(value == values[0] for value in values):
            return rows[:1]
        if self._builder.options.unequal_steps == "error":
            firsts: dict[Any, str] = {}
            for row, value in zip(rows, values, strict=True):
                firsts.setdefault(value, f"{row.path[-2]}/{row.path[-1]}")
            text = ", ".join(f"{value} of {name}" for value, name in list(firsts.items())[:4])
            start = f"{dotted(path)}: differs among parameters of one flat parameter: "
            self._builder.add_problem(path, f"{start}{text}{LARGEST_NOTE}")
        return (rows[values.index(max(values))],)

    def _read_number(self, entry: TensorEntry) -> Any:
        number = torch.empty((), dtype=torch_dtype(entry))
        self._builder.source.fill([(entry, get_tensor_shards(number))])
        return number.item()


def _stored_names(groups: Any, index: ModelIndex) -> dict[int, str] | None:
    """Return FQNs by parameter id, as an optimizer with named parameters stores them; None unless the model has all."""
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Mapping) for group in groups):
        return None
    names = {number: _first(strip_wrappers(name), index) for number, name in read_param_names(groups).items()}
    numbers = {number for group in groups for number in group.get("params", ())}
    return names if numbers == names.keys() and index.entries.keys() >= set(names.values()) else None


def _names_by_number(live: Sequence[Sequence[str]], groups: Any) -> dict[int, str] | None:
    """Return FQNs by parameter id, matched by position in groups with the same sizes, as in torch."""
    if not isinstance(groups, (list, tuple)) or len(groups) != len(live):
        return None
    numbers = [list(group.get("params", ())) for group in groups if isinstance(group, dict)]
    if [len(ids) for ids in numbers] != [len(names) for names in live]:
        return None
    pairs = [pair for ids, names in zip(numbers, live, strict=True) for pair in zip(ids, names, strict=True)]
    return {number: name for number, name in pairs if type(number) is int} or None


def _without_state(tree: Any) -> Any:
    """Return an optimizer's tree without its state's tensors, which are read into the optimizer's memory."""
    if not isinstance(tree, dict):
        return tree
    if "state" not in tree:  # flattened: `state.{name}.{slot}`
        return {key: value for key, value in tree.items() if not (_is_array(value) and _is_flat_slot(key))}
    state = tree["state"]
    kept = {name: _plain_slots(slots) for name, slots in state.items()} if isinstance(state, dict) else state
    return {**tree, "state": kept}


def _plain_slots(slots: Any) -> Any:
    if not isinstance(slots, dict):
        return slots
    return {slot: value for slot, value in slots.items() if not _is_array(value) and not _is_wrapped(value)}


def _is_wrapped(value: Any) -> bool:
    """Return True for a saved wrapper subclass whose inner tensors are plain."""
    if not isinstance(value, dict) or SUBCLASS not in value:
        return False
    return find_record(value) is not None and all(_is_array(part) for key, part in value.items() if key != SUBCLASS)


def _is_flat_slot(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("state.")


def _is_array(value: Any) -> bool:
    return hasattr(value, "path") and hasattr(value, "kind")


def _leaves(tree: Any, root: Path) -> dict[Path, Any]:
    """Return the values in an optimizer's tree by path; each param group is one value."""
    leaves: dict[Path, Any] = {}
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "state" and isinstance(value, dict):
                for name, slots in value.items():
                    if isinstance(slots, dict):
                        leaves.update({_below(root, key, name, slot): leaf for slot, leaf in slots.items()})
            else:
                leaves[_below(root, key)] = value
    return leaves


def _first(name: str, index: ModelIndex) -> str:
    return index.aliases.get(name, name)


def _below(root: Path, *keys: Any) -> Path:
    return (*root, *keys)
