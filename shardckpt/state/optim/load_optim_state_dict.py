"""Load an optimizer's state by FQN: check it on every rank, then load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.dtensors import gather_full_tensor, get_mesh_placements, local, wrap_local
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.core.params.full_params import Staging
from shardckpt.devices import wait_for_deferred_copies
from shardckpt.errors import ShardckptError, StateMismatchError, UsageError
from shardckpt.plan.optim.param_groups import match_settings, read_param_names
from shardckpt.state.adapters import torch_fsdp1
from shardckpt.state.adapters.base import Entry, ShardingAdapter, are_sharded_as, broadcast_from_rank0
from shardckpt.state.adapters.engine_flat import EngineFlatAdapter
from shardckpt.state.adapters.model_index import ModelIndex, index_complete_model, reshard_all, unwrap
from shardckpt.state.adapters.sharded_tensor import optim_state_to_dtensors
from shardckpt.state.keys import validation
from shardckpt.state.keys.kinds import StateKind, detect_kind, get_metadata, outside_inference_mode, tensors
from shardckpt.state.keys.slots import (
    LARGEST_NOTE,
    PLAIN,
    Form,
    OpaqueStateError,
    Slot,
    StateLayout,
    Survey,
    UnequalSteps,
    ask_layout,
    copy_value,
    find_misfit_of_plain,
    find_wrapped_slot,
    group_by_slot,
    has_own_elements,
    pack_survey,
    require_way_with_steps,
    split_lengths,
    unpack_survey,
    with_largest,
)
from shardckpt.state.keys.validation import check_form, digest, validate_input
from shardckpt.state.model.model_state_dict import check_kind, check_rank, check_units
from shardckpt.state.optim.optim_state_dict import AdapterParams, OptimizerLike, OptimizerParams, map_optimizer_params

# For a parameter without saved state: no state ("skip"), zeros, or an error.
Missing = Literal["skip", "zeros", "error"]


@dataclass(frozen=True)
class Fitted:
    """State to set in one optimizer on this rank."""

    state: dict[nn.Parameter, dict[str, Any]]  # by parameter
    settings: list[dict[str, Any]]  # by param group; empty for a group without saved parameters


@outside_inference_mode
def load_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    *,
    kind: StateKind | str | None = None,
    missing: Missing = "skip",
    state_layout: StateLayout | None = None,
    unequal_steps: UnequalSteps = "error",
) -> None:
    """Load a state dict into a model's optimizer by FQN. Collective.

    Sharding and param groups may differ from the save. A group takes the settings with which its parameters were saved.
    The optimizer is changed only if the complete state fits. Its tensors with the right shape and dtype are overwritten
    in place; others are replaced.

    Args:
        model: As for `model_state_dict`.
        optim: Optimizer for some or all of the model's parameters.
        state_dict: State in any kind, with names from the unsharded or a wrapped model. A FULL state may be on rank 0
            alone; the other ranks then pass an empty dict. It is not changed.
        kind: The state's kind; None to detect it.
        missing: For parameters without a saved state: no state (`"skip"`), `"zeros"` or `"error"`.
        state_layout: As for `optim_state_dict`.
        unequal_steps: For numbers, such as steps, that differ among one flat parameter's members, though the optimizer
            has one number for it: `"error"`, or use the `"largest"`. Without flat parameters each parameter keeps its
            number.

    Raises:
        StateMismatchError: The state's names, shapes or ranks do not fit.
        ConflictError: Parameters in one group were saved with different settings.
        RankError: The state does not fit on another rank.
    """
    model = unwrap(model)
    wait_for_deferred_copies()
    if torch_fsdp1.is_foreign(model):
        torch_fsdp1.refuse_local(detect_kind(state_dict) if kind is None else StateKind.parse(kind))
        torch_fsdp1.put_optim_state(model, optim, state_dict)
        return
    fitted = fit(
        model,
        optim,
        state_dict,
        kind=kind,
        missing=missing,
        state_layout=state_layout,
        unequal_steps=unequal_steps,
        in_place=True,
    )
    put_in_optimizer(optim, fitted.state, fitted.settings)
    for live in optim.param_groups:
        if live.get("capturable") or live.get("fused"):
            _bring_scalars(optim, live["params"])


def put_in_optimizer(
    optim: OptimizerLike, states: Mapping[nn.Parameter, dict[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Set an optimizer's state for each parameter, and its groups' settings."""
    for parameter, state in states.items():
        optim.state.pop(parameter, None)
        if state:
            optim.state[parameter] = state
    for live, saved in zip(optim.param_groups, settings, strict=True):
        live.update(saved)


def _bring_scalars(optim: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Move scalar slots to their parameters' devices, as fused optimizers require."""
    for parameter in parameters:
        kept = optim.state.get(parameter, {})
        kept.update({k: v.to(parameter.device) for k, v in kept.items() if isinstance(v, torch.Tensor) and not v.dim()})


def fit(
    model: nn.Module,
    optim: OptimizerLike,
    state_dict: Mapping[str, Any],
    *,
    kind: StateKind | str | None = None,
    missing: Missing = "skip",
    state_layout: StateLayout | None = None,
    unequal_steps: UnequalSteps = "error",
    in_place: bool = False,
) -> Fitted:
    """Convert a state dict to this rank's optimizer state; only `in_place` writes into tensors. Collective."""
    if missing not in ("skip", "zeros", "error"):
        raise UsageError("unknown value for `missing`", found=missing, expected="skip, zeros or error")
    require_way_with_steps(unequal_steps)
    reshard_all(model)
    index = index_complete_model(model)
    group = index.ranks.group
    broadcast = b""
    with validate_input(index.ranks, "fit a state to the optimizer", given=_is_given(state_dict)) as agreed:
        of = map_optimizer_params(index, optim)
        given = _IncomingOptimState.from_state_dict(
            state_dict, kind, index, layout=state_layout, unequal_steps=unequal_steps
        )
        rows: Survey = [{} for params in of.by_adapter for _ in params.adapter.entries]
        changes: list[dict[str, Any]] = []
        if agreed.has_to_check:
            rows = given.check(of, missing)
            changes = match_settings(of.groups, given.groups)
            given.require_class(of, optim, changes)
            survey = pack_survey(rows).decode()
            agreed.digest = digest([given.kind.name, missing, survey, given.are_dtensors, changes])
            agreed.broadcast_error, broadcast = _pack_for_broadcast(given, rows, survey, changes)
    if agreed.from_rank0:
        broadcast = group.broadcast(broadcast if group.rank == 0 else None)
        rows, changes = (rows, changes) if group.rank == 0 else _unpack(broadcast)
    state = {}
    loader = _StateLoader(given, agreed.from_rank0, optim.state, in_place=in_place)
    at = iter(rows)
    with torch.no_grad():
        for params in of.by_adapter:
            state.update(loader.load_state(params, [next(at) for _ in params.adapter.entries]))
    return Fitted(state, changes)


def _is_given(state: Any) -> bool:
    return not isinstance(state, Mapping) or bool(state.get("state")) or bool(state.get("param_groups"))


def _pack_for_broadcast(
    given: _IncomingOptimState, rows: Survey, survey: str, changes: Sequence[Mapping[str, Any]]
) -> tuple[ShardckptError | None, bytes]:
    """Return why the state cannot be broadcast from rank 0, or bytes for other ranks."""
    if given.kind is not StateKind.FULL:
        return StateMismatchError("rank 0 alone has a state", found=given.kind.name, expected="FULL"), b""
    objects = [name for row in rows for name, slot in row.items() if slot.form is Form.OPAQUE and not slot.dtype]
    if objects:
        return StateMismatchError(
            "the optimizer's values cannot be sent to the other ranks",
            where=", ".join(dict.fromkeys(objects)),
            expected="tensors, numbers and strings",
            fix="Give the state to every rank.",
        ), b""
    try:
        return None, _pack(survey, changes)
    except UsageError as error:
        return error, b""


def _pack(survey: str, changes: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rank 0's survey and settings as bytes for the other ranks."""
    try:
        return validation.encode([survey, [dict(change) for change in changes]])
    except TypeError as error:
        raise UsageError(
            f"a group's settings cannot be sent to the other ranks: {error}",
            expected="numbers, strings, tensors, and lists, tuples and dicts with them",
            fix="Give the state to every rank.",
        ) from error


def _unpack(data: bytes) -> tuple[Survey, list[dict[str, Any]]]:
    survey, changes = validation.decode(data)
    return unpack_survey(survey.encode()), changes


@dataclass(frozen=True)
class _IncomingOptimState:
    """An optimizer's state to load, by FQN in the unsharded model."""

    kind: StateKind
    note: Mapping[str, Any]
    state: dict[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    index: ModelIndex
    layout: StateLayout | None
    unequal_steps: UnequalSteps = "error"

    @cached_property
    def scalars(self) -> frozenset[str]:
        """Slots that are scalars, also for 0-dim parameters."""
        entries = self.index.entries
        shaped: dict[str, bool] = {"step": False}
        for name, slots in self.state.items():
            if name in entries and entries[name].shape:
                shaped.update(
                    {slot: value.dim() > 0 for slot, value in slots.items() if isinstance(value, torch.Tensor)}
                )
        return frozenset(slot for slot, has_shape in shaped.items() if not has_shape)

    @cached_property
    def _usually_shaped(self) -> frozenset[str]:
        """Slots that have their parameter's shape for most parameters; another shape is an error."""
        known = self.index.entries
        counts: dict[str, int] = {}
        for name in self.state.keys() & known.keys():
            for slot, value in self.state[name].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    counts[slot] = counts.get(slot, 0) + (1 if tuple(value.shape) == known[name].shape else -1)
        return frozenset(slot for slot, count in counts.items() if count > 0)

    @cached_property
    def are_dtensors(self) -> list[bool]:
        """For each tensor, whether it is a DTensor, whose load is collective."""
        return [isinstance(value, DTensor) for value in tensors(self.state)] if self.kind is StateKind.SHARDED else []

    @classmethod
    def from_state_dict(
        cls,
        given: Mapping[str, Any],
        kind: StateKind | str | None,
        index: ModelIndex,
        *,
        layout: StateLayout | None,
        unequal_steps: UnequalSteps,
    ) -> _IncomingOptimState:
        check_form(given)
        state, groups = dict(given.get("state", {})), [dict(group) for group in given.get("param_groups", [])]
        names = read_param_names(groups)
        state_kind = detect_kind(given) if kind is None else StateKind.parse(kind)
        return cls(
            state_kind,
            get_metadata(given),
            optim_state_to_dtensors(_by_first_name({names.get(key, key): state[key] for key in state}, index), index),
            [
                {**group, "params": _members([names.get(key, key) for key in group["params"]], index)}
                for group in groups
            ],
            index,
            layout,
            unequal_steps,
        )

    def check(self, of: OptimizerParams, missing: Missing) -> Survey:
        """Return a survey of the values for the optimizer's entries; refuse a state that does not fit."""
        problems = check_kind(self.note, self.kind)
        problems += [
            f"{name!r} is a parameter's number, not its name" for name in self._keys() if not isinstance(name, str)
        ]
        known = set(self.index.entries) | {h.flat_name for h in self.index.adapters if isinstance(h, EngineFlatAdapter)}
        problems += [f"Unexpected key: {name}" for name in self._keys() if isinstance(name, str) and name not in known]
        if self.kind is StateKind.LOCAL:
            problems += check_rank(self.note) or check_units(self.note, self.index)
        checks = [self._check_adapter(params, missing) for params in of.by_adapter]
        problems += [problem for _, misfits in checks for problem in misfits]
        if problems:
            raise StateMismatchError(
                f"the state does not fit the optimizer in {len(problems)} places: {'; '.join(problems[:50])}",
                fix="Nothing was changed. A state with numbers needs `param_names` in its groups: see rekey.",
            )
        return [row for rows, _ in checks for row in rows]

    def require_class(self, of: OptimizerParams, optim: OptimizerLike, changes: Sequence[Mapping[str, Any]]) -> None:
        """Refuse moments that the optimizer's class cannot use, or that are not in one tensor each."""
        if (found := find_wrapped_slot(self.state)) is not None:
            raise StateMismatchError(
                "a state dict cannot contain this moment",
                where=f"{found[0]}/{found[1]}",
                found=f"a tensor of the class {found[2]}",
                fix='Save the optimizer itself, and load it: `shardckpt.load({"model": model, "optim": optim}, path)`.',
            )
        for names, change in zip(of.groups, changes, strict=True):
            misfit = find_misfit_of_plain(optim, change)
            shaped = (f"{name}/{slot}" for name in names for slot in self.state.get(name, {}) if slot != "step")
            if misfit is not None and (where := next(shaped, None)) is not None:
                raise StateMismatchError(f"the state does not fit the optimizer: {misfit}", where=where)

    def _keys(self) -> list[Any]:
        return list(dict.fromkeys([*self.state, *(name for group in self.groups for name in group["params"])]))

    def _check_adapter(self, params: AdapterParams, missing: Missing) -> tuple[Survey, list[str]]:
        """Return a survey for an adapter's entries, also missing ones, and problems."""
        entries = params.adapter.entries
        if self.kind is StateKind.LOCAL:
            return [{} for _ in entries], self._find_local_misfits(params)
        is_held = [params.is_flat or index in params.positions for index in range(len(entries))]
        rows = [self._describe(entry) if held else {} for entry, held in zip(entries, is_held, strict=True)]
        problems = self._find_misfits(params, rows)
        lacking = [index for index, row in enumerate(rows) if is_held[index] and not row]
        if missing == "error":
            problems += [f"Missing state of {entries[index].name}" for index in lacking]
        if params.is_flat:
            rows = with_largest(rows) if self.unequal_steps == "largest" else rows
            problems += _find_unequal(entries, rows)
        if missing == "zeros":
            slots = {name: slot for row in rows for name, slot in row.items()}
            zeros = {n: Slot(s.form, s.dtype, 0 if s.form is Form.SCALAR else None) for n, s in slots.items()}
            rows = [zeros if index in lacking else row for index, row in enumerate(rows)]
        return rows, problems

    def get_local_slots(self, params: AdapterParams, position: int) -> Mapping[str, Any]:
        """Return one exposed parameter's slots in a LOCAL state."""
        flat = params.adapter.flat_name if isinstance(params.adapter, EngineFlatAdapter) else None
        return self.state.get(flat or params.names(position)[0], {})

    def _find_local_misfits(self, params: AdapterParams) -> list[str]:
        """Return a flat parameter's values whose length does not fit, with or without padding."""
        if not params.is_flat or self.note:
            return []  # the metadata shows whether units are the same
        assert isinstance(params.adapter, EngineFlatAdapter)
        fitting = ((params.adapter.unpadded_size,), tuple(params.adapter.exposed[0].shape))
        return [
            f"size mismatch for {params.adapter.flat_name}/{slot}: found {tuple(value.shape)}, expected {fitting[0]}"
            for slot, value in self.get_local_slots(params, 0).items()
            if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) not in fitting
        ]

    def _find_misfits(self, params: AdapterParams, rows: Survey) -> list[str]:
        """Return values with other shapes than their parameters, and unknown sharding."""
        misfits = []
        for index, (entry, row) in enumerate(zip(params.adapter.entries, rows, strict=True)):
            for slot, slot_value in row.items():
                value = self.state[entry.name][slot]
                if slot_value.form is not Form.OPAQUE or isinstance(value, DTensor):
                    continue
                if not params.adapter.is_sharded and slot not in self._usually_shaped:
                    continue
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                if isinstance(value, torch.Tensor) and self.parts(params, index, slot, value) is not None:
                    continue
                misfits.append(
                    f"size mismatch for {entry.name}/{slot}: found {shape}, expected {entry.shape}; "
                    "`state_layout` may return its sharding"
                )
        return misfits

    def parts(self, params: AdapterParams, index: int, slot: str, value: torch.Tensor) -> list[torch.Tensor] | None:
        """Split a value with another shape than its parameter by rank; one part if replicated, None if unknown."""
        adapter, name = params.adapter, params.adapter.entries[index].name
        answer = ask_layout(self.layout, name, slot, value)
        if answer == "replicated":
            return [value]
        if not isinstance(answer, int) or not -value.dim() <= answer < value.dim():
            return None
        if adapter.shard_group is None or (params.is_flat and len(adapter.entries) > 1):
            return None
        lengths = split_lengths(value.shape[answer], adapter.shard_lengths(index))
        return None if lengths is None else list(torch.split(value, list(lengths), dim=answer))

    def _describe(self, entry: Entry) -> dict[str, Slot]:
        return {slot: self._slot(entry, slot, value) for slot, value in self.state.get(entry.name, {}).items()}

    def _slot(self, entry: Entry, slot: str, value: Any) -> Slot:
        if not isinstance(value, torch.Tensor):
            return Slot(Form.SCALAR, "", value) if isinstance(value, PLAIN) else Slot(Form.OPAQUE)
        dtype = str(value.dtype)[6:]
        if tuple(value.shape) == entry.shape and (entry.shape or slot not in self.scalars):
            return Slot(Form.SHAPED, dtype)
        if value.dim() == 0 and not value.is_complex():
            return Slot(Form.SCALAR, dtype, local(value).item())
        return Slot(Form.OPAQUE, dtype, list(value.shape))


def _members(names: Sequence[Any], index: ModelIndex) -> list[Any]:
    """Replace flat parameters in a group's names by their members."""
    flats = {
        h.flat_name: [entry.name for entry in h.entries] for h in index.adapters if isinstance(h, EngineFlatAdapter)
    }
    return [member for name in names for member in flats.get(_first(name, index), [_first(name, index)])]


def _first(name: Any, index: ModelIndex) -> Any:
    """Return a parameter's first FQN, without wrapper segments."""
    if not isinstance(name, str):
        return name
    plain = clean(name)
    return index.aliases.get(plain, plain)


def _by_first_name(state: Mapping[Any, Any], index: ModelIndex) -> dict[Any, Any]:
    """Return the state by each parameter's first FQN."""
    named: dict[Any, Any] = {}
    for name, slots in state.items():
        if named.setdefault(_first(name, index), slots) is not slots:
            same = " and ".join(str(each) for each in state if _first(each, index) == _first(name, index))
            raise StateMismatchError(
                f"the state does not fit the optimizer: {same} are one parameter in this model, and each has a state",
                fix="Nothing was changed. Leave one out.",
            )
    return named


def _find_unequal(entries: Sequence[Entry], rows: Survey) -> list[str]:
    """Return scalars and dtypes that differ among one flat parameter's members."""
    unequal = []
    for slot in dict.fromkeys(name for row in rows for name in row):
        values: dict[str, str] = {}
        for entry, row in zip(entries, rows, strict=True):
            if slot in row:
                slot_value = row[slot]
                values.setdefault(
                    str(slot_value.value) if slot_value.form is Form.SCALAR else slot_value.dtype, entry.name
                )
        if len(values) > 1:
            different = ", ".join(f"{value} of {name}" for value, name in values.items())
            unequal.append(f"{slot} differs among one flat parameter's members: {different}{LARGEST_NOTE}")
    return unequal


class _StateLoader:
    """Loads an optimizer's state, one adapter at a time."""

    def __init__(
        self,
        given: _IncomingOptimState,
        from_rank0: bool,
        made: Mapping[nn.Parameter, Mapping[str, Any]],
        *,
        in_place: bool,
    ) -> None:
        self._given = given
        self._from_rank0 = from_rank0
        self._made = made
        self._own = own = made if in_place else {}
        self._taken = {_address(value) for value in tensors(given.state)} - {_NOWHERE} if own else set()
        self._staging = Staging()

    def load_state(self, params: AdapterParams, rows: Survey) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the new optimizer state for an adapter's parameters. Collective."""
        if self._given.kind is StateKind.LOCAL:
            return self._get_local(params)
        loaded: dict[int, dict[str, Any]] = {position: {} for position in params.positions}
        for name, slot, having in group_by_slot(rows):
            if slot.form is Form.SHAPED:
                self._shaped(params, name, slot, having, loaded)
            elif slot.form is Form.SCALAR:
                for position in params.positions:
                    source = min(having) if params.is_flat else position
                    if source in having:
                        loaded[position][name] = self._scalar(params, source, name, rows[source][name])
            else:
                self._opaque(params, name, rows, having, loaded)
        return {params.adapter.exposed[at]: self._select(params, at, state) for at, state in loaded.items()}

    def _select(self, params: AdapterParams, position: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return the slots that this rank's optimizer has or will have."""
        # Without elements on this rank, a parameter has only slots that the optimizer made before its first step.
        made = self._made.get(params.adapter.exposed[position], {})
        return state if params.has_part(position) else {slot: value for slot, value in state.items() if slot in made}

    def _scalar(self, params: AdapterParams, index: int, name: str, slot: Slot) -> Any:
        entry = params.adapter.entries[index]
        value = self._given.state.get(entry.name, {}).get(name)
        if not isinstance(value, torch.Tensor):
            return slot.scalar()
        scalar = local(value.detach()).clone()
        return scalar.fill_(slot.value) if params.is_flat and self._given.unequal_steps == "largest" else scalar

    def _shaped(
        self, params: AdapterParams, name: str, slot: Slot, having: set[int], state: dict[int, dict[str, Any]]
    ) -> None:
        adapter, dtype = params.adapter, slot.torch_dtype
        places: list[torch.Tensor | None] = [None] * len(adapter.entries)
        for position in params.positions if params.is_flat else sorted(having):
            state[position][name] = target = self._get_target(adapter, position, name, dtype)
            if not params.is_flat:
                places[position] = local(target.detach())
                continue
            if len(having) < len(adapter.entries):
                target.zero_()
            own = enumerate(adapter.part_views(target.detach()))
            places = [place if index in having else None for index, place in own]
        if self._from_rank0 and not self._given.groups:
            adapter.from_rank0(None, places, dtype, self._staging)
            return
        values = [self._value(entry, name, dtype) if at in having else None for at, entry in enumerate(adapter.entries)]
        if self._from_rank0:
            adapter.from_rank0(values, places, dtype, self._staging)
        elif self._given.kind is StateKind.SHARDED and are_sharded_as(adapter, values):
            adapter.from_sharded(values, places, self._staging)
        else:
            adapter.from_full([gather_full_tensor(v) if isinstance(v, DTensor) else v for v in values], places)

    def _value(self, entry: Entry, slot: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the given value, or expanded zeros (without memory) if it is missing."""
        value = self._given.state.get(entry.name, {}).get(slot)
        return torch.zeros((), dtype=dtype).expand(entry.shape) if value is None else value.detach()

    def _get_target(self, adapter: ShardingAdapter, position: int, slot: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the optimizer's own tensor if it fits and shares no memory with other values, else new memory."""
        parameter = adapter.exposed[position]
        own = self._own.get(parameter, {}).get(slot)
        if _fits(own, parameter, dtype):
            address = _address(own)
            if address not in self._taken:
                self._taken |= {address} - {_NOWHERE}
                return own
        return adapter.empty_like(position, dtype)

    def _opaque(
        self, params: AdapterParams, name: str, rows: Survey, having: set[int], state: dict[int, dict[str, Any]]
    ) -> None:
        for position in params.positions:
            value = self._given.state.get(params.adapter.entries[position].name, {}).get(name)
            if position not in having:
                continue
            if self._from_rank0:
                slot, ranks = rows[position][name], params.adapter.ranks
                value = broadcast_from_rank0(ranks, slot.value, slot.torch_dtype, params.adapter.device, value)
            state[position][name] = self._placed(params, position, name, value)

    def _placed(self, params: AdapterParams, position: int, name: str, value: Any) -> Any:
        """Return this rank's part of a value with another shape than its parameter."""
        if not isinstance(value, torch.Tensor):
            return copy_value(value)
        mine = value.detach()
        if params.adapter.is_sharded and not isinstance(value, DTensor):
            parts = self._given.parts(params, position, name, mine)
            if parts is None:
                raise OpaqueStateError("the sharding of this value is unknown", where=name, found=tuple(value.shape))
            mine = parts[0] if len(parts) == 1 else parts[dist.get_rank(params.adapter.shard_group)]
        copied = mine.clone()
        return copied if isinstance(copied, DTensor) else copied.to(params.adapter.exposed[position].device)

    def _get_local(self, params: AdapterParams) -> dict[nn.Parameter, dict[str, Any]]:
        parts = {}
        for position in params.positions:
            parameter = params.adapter.exposed[position]
            kept = self._given.get_local_slots(params, position)
            scalars = self._given.scalars
            adapter = params.adapter
            owned = adapter.unpadded_size if isinstance(adapter, EngineFlatAdapter) and params.is_flat else -1
            parts[parameter] = {s: _to_local(value, parameter, s in scalars, owned) for s, value in kept.items()}
        return parts


_NOWHERE = 0  # tensors without elements have this data pointer


def _address(tensor: torch.Tensor) -> int:
    return local(tensor.detach()).untyped_storage().data_ptr()


def _fits(own: Any, parameter: nn.Parameter, dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    """Return True if a value is a tensor with its parameter's shape and placements."""
    return (
        isinstance(own, torch.Tensor)
        and type(own) in (torch.Tensor, DTensor)
        and has_own_elements(local(own))
        and own.dtype == dtype
        and own.device == parameter.device
        and own.shape == parameter.shape
        and get_mesh_placements(own) == get_mesh_placements(parameter)
    )


def _to_local(value: Any, parameter: nn.Parameter, is_scalar: bool, owned: int) -> Any:
    """Convert a LOCAL state's value for the optimizer: add a flat parameter's padding, or make a DTensor."""
    if not isinstance(value, torch.Tensor) or is_scalar:
        return copy_value(value)
    if isinstance(parameter, DTensor):
        if tuple(value.shape) != tuple(local(parameter).shape):
            return value.detach().clone()
        part = value.detach().clone()
        return wrap_local(part, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
    if tuple(value.shape) == (owned,):
        part = value.new_zeros(parameter.shape)
        part[: value.numel()] = value
        return part
    return value.detach().clone()
