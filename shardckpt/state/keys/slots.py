"""A parameter's optimizer slots: values with its shape, scalars, other tensors; and which classes fit an optimizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardckpt.core.modules.dtensors import local
from shardckpt.errors import ShardckptError, UnsupportedError, UsageError

# Maps (FQN, slot, this rank's tensor) to the dimension along which all ranks' tensors are concatenated;
# "replicated" if every rank has equal values; None if the sharding is unknown.
StateLayout = Callable[[str, str, torch.Tensor], "int | str | None"]


# A slot's dimension that is sharded as the parameter is; equal values on all ranks; values that are not saved; or the
# class of objects that are equal on all ranks.
SlotRule = int | Literal["replicated", "rebuilt"] | type[object]

_RULES: dict[tuple[type, str], SlotRule] = {}


def register_slot(optimizer: type[torch.optim.Optimizer], slot: str, rule: SlotRule) -> None:
    """Register how a slot of an optimizer is sharded, for saves and loads of sharded models.

    Slots with their parameter's shape, numbers and DTensors need no rule. A rule is for other tensors, and for lists
    and dicts, which a save of a sharded model otherwise refuses; and for objects, which every save refuses.

    Args:
        optimizer: Optimizer class; the rule is valid for its subclasses too.
        slot: Key in a parameter's state.
        rule: An integer: each rank has the part for its shard of the parameter, and this is the slot's dimension that
            is split as the parameter is. `"replicated"`: all ranks have equal values, which are saved once.
            `"rebuilt"`: the values are not saved, and a load removes them: the optimizer must make missing ones.
            A class: the slot has objects of it, equal on all ranks. Their attributes are saved, which must be plain
            values and tensors. A load makes a new object for each parameter without calling `__init__`, and sets the
            attributes; DTensors become replicated ones on the parameter's mesh.

    Raises:
        UsageError: An argument is invalid.

    Examples:
        >>> shardckpt.register_slot(MyAdafactor, "row_moments", 0)  # doctest: +SKIP
        >>> shardckpt.register_slot(GaLoreAdamW, "projector", GaLoreProjector)  # doctest: +SKIP
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise UsageError("`optimizer` must be a class of optimizers", found=optimizer)
    if not isinstance(slot, str):
        raise UsageError("`slot` must be a key in a parameter's state", found=slot)
    is_dim = type(rule) is int and rule >= 0
    if not (is_dim or isinstance(rule, type) or rule in ("replicated", "rebuilt")):
        raise UsageError("`rule` must be a dimension, 'replicated', 'rebuilt' or a class", found=rule)
    if isinstance(rule, type) and not _has_attributes_only(rule):
        raise UsageError(
            "a class for `rule` must have no `__slots__`, no `__new__` and no built-in base",
            found=rule,
            fix="Give the optimizer's `state_dict()` plain values in its objects' place.",
        )
    _RULES[optimizer, slot] = rule


def find_slot_rule(optimizer: object, slot: str) -> SlotRule | None:
    """Return the rule for a slot of an optimizer, or None."""
    if not _RULES:
        return None
    return next((rule for base in type(optimizer).__mro__ if (rule := _RULES.get((base, slot))) is not None), None)


_CLASS, _ATTRIBUTES, _DTENSORS = "__class__", "attributes", "dtensors"  # keys of a saved object


def take_attributes(value: object, rule: SlotRule | None, where: str) -> dict[str, Any]:
    """Return an object as a dict of its attributes; refuse one whose class is not registered."""
    kind = type(value)
    if kind is not rule:
        raise UnsupportedError(
            f"a value of type {_name_class(kind)} cannot be saved",
            where=where,
            found=f"the rule {rule}" if rule is not None else None,
            fix="To save its attributes, call `shardckpt.register_slot(optimizer class, slot, its class)` first.",
        )
    held = dict(vars(value))
    parameters = [name for name, item in held.items() if isinstance(item, nn.Parameter)]
    if parameters:
        raise UnsupportedError(
            "an object's attribute must not be a parameter",
            where=f"{where}.{parameters[0]}",
            fix="Keep its data alone.",
        )
    sharded = [name for name, item in held.items() if isinstance(item, DTensor)]
    return {_CLASS: _name_class(kind), _ATTRIBUTES: held, _DTENSORS: sharded}


def find_saved_class(value: object) -> str | None:
    """Return the class name that `take_attributes` wrote; None for other values."""
    if not isinstance(value, dict) or value.keys() != {_CLASS, _ATTRIBUTES, _DTENSORS}:
        return None
    return str(value[_CLASS])


def build_object(value: Any, rule: SlotRule | None, parameter: torch.Tensor) -> object | None:
    """Return an object with saved attributes; None if the rule is not its class, or they are damaged."""
    if not isinstance(rule, type) or find_saved_class(value) != _name_class(rule):
        return None
    held, sharded = value[_ATTRIBUTES], value[_DTENSORS]
    if not isinstance(held, dict) or not isinstance(sharded, list) or not all(isinstance(name, str) for name in held):
        return None
    made = object.__new__(rule)
    made.__dict__.update(held)
    for name in sharded:
        item = held.get(name)
        if isinstance(parameter, DTensor) and isinstance(item, torch.Tensor):
            mesh = parameter.device_mesh
            made.__dict__[name] = DTensor.from_local(item, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made


def _name_class(kind: type[object]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _has_attributes_only(kind: type[object]) -> bool:
    """Return True for a class whose objects are their `__dict__`."""
    slots = {name for base in kind.__mro__ for name in _list_slots(base)} - {"__dict__", "__weakref__"}
    return kind.__new__ is object.__new__ and not slots and hasattr(kind, "__dict__")


def _list_slots(kind: type[object]) -> Sequence[str]:
    found = kind.__dict__.get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def has_own_elements(tensor: torch.Tensor) -> bool:
    """Return False if a tensor's elements are not in its own memory: its class makes them from other tensors."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Return True for a tensor whose class makes its elements from inner tensors that it can list."""
    if has_own_elements(tensor) or isinstance(tensor, DTensor) or tensor.is_nested:
        return False
    return hasattr(type(tensor), "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def find_wrapped_slot(state: Mapping[Any, Mapping[str, Any]]) -> tuple[Any, str, str] | None:
    """Return key, slot and class of the first wrapper subclass in an optimizer's state; None without one."""
    for key, slots in state.items():
        for slot, value in slots.items() if isinstance(slots, Mapping) else ():
            if isinstance(value, torch.Tensor) and is_wrapper_subclass(local(value)):
                return key, slot, type(local(value)).__name__
    return None


_FIX = "build the optimizer's class that was saved, or leave the optimizer out of the load"


def find_misfit_of_wrapper(optim: object, parameter: torch.Tensor | None, name: str) -> str | None:
    """Return why an optimizer cannot step with a slot of a wrapper subclass, given as module and name; or None."""
    # torch's own steps only take slots of their parameter's class. What another class can use is unknown.
    kind = type(getattr(optim, "optimizer", optim))  # also inside a framework's wrapper
    own = next((base.__module__ for base in kind.__mro__ if "step" in vars(base)), "")
    is_alike = parameter is not None and type(local(parameter.detach())).__name__ == name.rpartition(".")[2]
    if is_alike or not own.startswith("torch.optim."):
        return None
    return f"it was saved as {name}, which {kind.__name__} cannot use ({_FIX})"


def find_misfit_of_plain(optim: object, settings: Mapping[str, Any]) -> str | None:
    """Return why an optimizer cannot step with slots that were saved as plain tensors with a group's settings."""
    # torchao's optimizers keep the rate as a tensor, and refuse a step with a number. So another class saved it.
    kind = type(getattr(optim, "optimizer", optim))
    is_low_bit = any(base.__module__.startswith("torchao.optim") for base in kind.__mro__)
    if not is_low_bit or not isinstance(settings.get("lr"), (int, float)):
        return None
    return f"it was saved by an optimizer with plain moments, and this is {kind.__name__} ({_FIX})"


class OpaqueStateError(ShardckptError, RuntimeError):
    """A value in an optimizer's state has an unknown sharding."""


PLAIN = (bool, int, float, str, type(None))  # values with these types can be sent to ranks that do not have them


class Form(Enum):
    """A slot's relation to its parameter: same shape, a scalar, or opaque."""

    SHAPED = "shaped"
    SCALAR = "scalar"
    OPAQUE = "opaque"


@dataclass(frozen=True)
class Slot:
    """Describes one value in an optimizer's state, without tensor elements."""

    form: Form
    dtype: str = ""  # a tensor's dtype, as torch spells it; empty for other values
    value: Any = None  # a scalar's value; an opaque tensor's shape, or None if unknown

    @property
    def kind(self) -> tuple[Form, str]:
        """Key that slots share if one collective can move them."""
        return self.form, self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def scalar(self) -> Any:
        """Return the scalar; if it is a tensor, as a new tensor on the CPU."""
        return torch.tensor(self.value, dtype=self.torch_dtype) if self.dtype else self.value


def ask_layout(layout: StateLayout | None, name: str, slot: str, value: torch.Tensor) -> int | str | None:
    """Ask how the ranks' opaque tensors are concatenated: a dimension, "replicated", or None if unknown."""
    answer = layout(name, slot, value) if layout is not None else None
    if answer is None or answer == "replicated" or (isinstance(answer, int) and not isinstance(answer, bool)):
        return answer
    raise OpaqueStateError(
        "the answer must describe a sharding",
        where=f"{name}/{slot}",
        found=answer,
        expected="a dimension, 'replicated' or None",
    )


def split_lengths(total: int, extents: Sequence[int] | None) -> tuple[int, ...] | None:
    """Split a concatenated tensor's length like its parameter's, or equally; None if unknown."""
    if extents is None:
        return None
    if total == sum(extents):
        return tuple(extents)
    if len(set(extents)) == 1 and total % len(extents) == 0:
        return (total // len(extents),) * len(extents)
    return None


def copy_value(value: Any) -> Any:
    """Copy a value deeply; detach tensors."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def is_placed_as(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Return True if a value and its parameter are plain, or have equal placements."""
    if isinstance(parameter, DTensor) and isinstance(value, DTensor):
        return value.placements == parameter.placements
    return not isinstance(parameter, DTensor) and not isinstance(value, DTensor)


def to_slot(parameter: nn.Parameter, value: Any) -> Slot:
    """Describe one value in an optimizer's state."""
    if not isinstance(value, torch.Tensor):
        return Slot(Form.SCALAR, "", value) if isinstance(value, PLAIN) else Slot(Form.OPAQUE)
    dtype = str(value.dtype).removeprefix("torch.")
    if (
        value.shape == parameter.shape
        and is_placed_as(parameter, value)
        and (isinstance(value, DTensor) or value.dim())
    ):
        return Slot(Form.SHAPED, dtype)
    is_partial = isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements)
    if value.dim() == 0 and not value.is_complex() and not is_partial:
        return Slot(Form.SCALAR, dtype, (value.to_local() if isinstance(value, DTensor) else value).item())
    return Slot(Form.OPAQUE, dtype)


Survey = list[dict[str, Slot]]  # slots by name, for each parameter in an order that all ranks share


def build_survey(kept: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> Survey:
    """Describe this rank's optimizer state."""
    return [{name: to_slot(parameter, value) for name, value in state.items()} for parameter, state in kept]


def pack_survey(survey: Survey) -> bytes:
    """Return a survey as bytes; equal slots are written once."""
    forms: dict[tuple[str, str, str], int] = {}
    rows = []
    for state in survey:
        row = []
        for name, slot in state.items():
            at = forms.setdefault((name, slot.form.value, slot.dtype), len(forms))
            row.append(at if slot.form is Form.SHAPED else [at, slot.value])
        rows.append(row)
    return json.dumps([list(forms), rows], separators=(",", ":")).encode()


def unpack_survey(data: bytes) -> Survey:
    """Invert `pack_survey`."""
    forms, rows = json.loads(data)
    survey = []
    for row in rows:
        state = {}
        for item in row:
            at, value = item if isinstance(item, list) else (item, None)
            name, form, dtype = forms[at]
            state[name] = Slot(Form(form), dtype, value)
        survey.append(state)
    return survey


def merge_surveys(surveys: Sequence[Survey]) -> Survey:
    """Merge all ranks' surveys; a rank may lack some parameters' slots."""
    merged: Survey = [{} for _ in surveys[0]]
    for survey in surveys:
        for mine, theirs in zip(merged, survey, strict=True):
            for name, slot in theirs.items():
                mine.setdefault(name, slot)
    return merged


def group_by_slot(rows: Sequence[Mapping[str, Slot]]) -> list[tuple[str, Slot, set[int]]]:
    """Group slots that can be moved together: name, slot, and row indices."""
    groups: dict[tuple[str, Form, str], tuple[Slot, set[int]]] = {}
    for index, row in enumerate(rows):
        for name, slot in row.items():
            groups.setdefault((name, *slot.kind), (slot, set()))[1].add(index)
    return [(name, slot, having) for (name, *_), (slot, having) in groups.items()]


# What to do with numbers, such as steps, that differ among one flat parameter's members.
UnequalSteps = Literal["error", "largest"]

# Suffix for messages about such numbers.
LARGEST_NOTE = " (unequal_steps='largest' takes the largest, as if all had been trained from the first step on)"


def require_way_with_steps(unequal_steps: Any) -> None:
    """Check the argument `unequal_steps`."""
    if unequal_steps not in ("error", "largest"):
        raise UsageError("`unequal_steps` must be 'error' or 'largest'", found=repr(unequal_steps))


def largest(values: Sequence[Any]) -> Any:
    """Return the largest number; None if all are equal, or not all are numbers."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return max(values) if numbers and any(value != values[0] for value in values) else None


def with_largest(rows: Survey) -> Survey:
    """Give all members of a flat parameter the largest of their different numbers."""
    chosen: dict[str, Any] = {}
    for slot in dict.fromkeys(name for row in rows for name, kept in row.items() if kept.form is Form.SCALAR):
        value = largest([row[slot].value for row in rows if slot in row])
        if value is not None:
            chosen[slot] = value
    return [
        {name: replace(kept, value=chosen[name]) if name in chosen else kept for name, kept in row.items()}
        for row in rows
    ]
