"""What an optimizer keeps of one parameter: which values are shaped like it, which are scalars, which are neither."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.errors import ShardckptError, UsageError

StateLayout = Callable[[str, str, torch.Tensor], "int | str | None"]
"""Given (FQN, slot, tensor of this rank), the dimension along which ranks' tensors are joined, "replicated" where every
rank has the same, None where it is not known."""


class OpaqueStateError(ShardckptError, RuntimeError):
    """A value of an optimizer's state of which nobody knows how it is sharded."""


PLAIN = (bool, int, float, str, type(None))
"""Types of values that are sent to ranks without them."""


class Form(Enum):
    """How a value of an optimizer's state relates to its parameter."""

    SHAPED = "shaped"
    SCALAR = "scalar"
    OPAQUE = "opaque"


@dataclass(frozen=True)
class Slot:
    """One value that an optimizer keeps of a parameter, without the value.

    Attributes:
        form: What it is.
        dtype: The tensor's type, as torch spells it; empty for other values.
        value: A scalar's value; of a tensor that is neither, its shape where that is known.
    """

    form: Form
    dtype: str = ""
    value: Any = None

    @property
    def kind(self) -> tuple[Form, str]:
        """What values of several parameters have in common when they are moved together."""
        return self.form, self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The tensor's type."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def scalar(self) -> Any:
        """Return the scalar, a tensor of its own where it is one; on the CPU."""
        return torch.tensor(self.value, dtype=self.torch_dtype) if self.dtype else self.value


def ask_layout(layout: StateLayout | None, name: str, slot: str, value: torch.Tensor) -> int | str | None:
    """Return how ranks' tensors of a shape of their own are joined: a dimension, "replicated", None if unknown.

    Args:
        layout: Whom to ask; None for nobody.
        name: FQN of the parameter.
        slot: What is kept.
        value: The tensor of this rank, or the joined one.

    Raises:
        OpaqueStateError: The answer is something else.
    """
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
    """Return how a joined tensor is split among ranks: as its parameter, or equally; None if unknown.

    Args:
        total: Its length along the dimension.
        extents: How long each rank's part of the parameter is; None where that is not known.
    """
    if extents is None:
        return None
    if total == sum(extents):
        return tuple(extents)
    if len(set(extents)) == 1 and total % len(extents) == 0:
        return (total // len(extents),) * len(extents)
    return None


def copy_value(value: Any) -> Any:
    """Return a value in memory of its own: a tensor without its history, anything else with all that is in it."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def is_placed_as(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Return True if a value is placed as its parameter: both are plain, or DTensors of the same placements."""
    if isinstance(parameter, DTensor) and isinstance(value, DTensor):
        return value.placements == parameter.placements
    return not isinstance(parameter, DTensor) and not isinstance(value, DTensor)


def to_slot(parameter: nn.Parameter, value: Any) -> Slot:
    """Describe one value."""
    if not isinstance(value, torch.Tensor):
        return Slot(Form.SCALAR, "", value) if isinstance(value, PLAIN) else Slot(Form.OPAQUE)
    dtype = str(value.dtype).removeprefix("torch.")
    if (
        value.shape == parameter.shape
        and is_placed_as(parameter, value)
        and (isinstance(value, DTensor) or value.dim())
    ):
        return Slot(Form.SHAPED, dtype)
    if value.dim() == 0 and not value.is_complex():
        return Slot(Form.SCALAR, dtype, (value.to_local() if isinstance(value, DTensor) else value).item())
    return Slot(Form.OPAQUE, dtype)


Survey = list[dict[str, Slot]]
"""For each parameter, in a fixed order, what the optimizers of all ranks keep of it."""


def build_survey(kept: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> Survey:
    """Describe what this rank's optimizer keeps.

    Args:
        kept: Parameters with their states, in an order that is the same on all ranks.
    """
    return [{name: to_slot(parameter, value) for name, value in state.items()} for parameter, state in kept]


def pack_survey(survey: Survey) -> bytes:
    """Return a survey as bytes; equal descriptions are written once."""
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
    """Return the survey that `pack_survey` wrote."""
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
    """Join what ranks keep: of a parameter of which a rank has no part, it keeps nothing."""
    merged: Survey = [{} for _ in surveys[0]]
    for survey in surveys:
        for mine, theirs in zip(merged, survey, strict=True):
            for name, slot in theirs.items():
                mine.setdefault(name, slot)
    return merged


def group_by_slot(rows: Sequence[Mapping[str, Slot]]) -> list[tuple[str, Slot, set[int]]]:
    """Return what is moved together: a slot's name, what it is, and which rows have it so."""
    groups: dict[tuple[str, Form, str], tuple[Slot, set[int]]] = {}
    for index, row in enumerate(rows):
        for name, slot in row.items():
            groups.setdefault((name, *slot.kind), (slot, set()))[1].add(index)
    return [(name, slot, having) for (name, *_), (slot, having) in groups.items()]


UnequalSteps = Literal["error", "largest"]
"""What becomes of numbers that differ among parameters of which an optimizer keeps one number."""

LARGEST_NOTE = " (unequal_steps='largest' takes the largest, as if all had been trained from the first step on)"
"""Added to messages about such numbers."""


def require_way_with_steps(unequal_steps: Any) -> None:
    """Check what `unequal_steps` is.

    Raises:
        UsageError: It means nothing.
    """
    if unequal_steps not in ("error", "largest"):
        raise UsageError("`unequal_steps` must be 'error' or 'largest'", found=repr(unequal_steps))


def largest(values: Sequence[Any]) -> Any:
    """Return the largest of some numbers; None where they are none, or are equal."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return max(values) if numbers and any(value != values[0] for value in values) else None


def with_largest(rows: Survey) -> Survey:
    """Return what is given of the members of one flat parameter, with the largest number where these differ."""
    chosen: dict[str, Any] = {}
    for slot in dict.fromkeys(name for row in rows for name, kept in row.items() if kept.form is Form.SCALAR):
        value = largest([row[slot].value for row in rows if slot in row])
        if value is not None:
            chosen[slot] = value
    return [
        {name: replace(kept, value=chosen[name]) if name in chosen else kept for name, kept in row.items()}
        for row in rows
    ]
