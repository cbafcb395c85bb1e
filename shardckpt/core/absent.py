"""What stands in a module for a full parameter while its unit is sharded: a shape and a type without values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardckpt.core.gate import WAYS_OUT, NotGatheredError
from shardckpt.core.traverse import Name

_READABLE = frozenset({"__get__", "size", "dim", "numel", "nelement", "stride", "is_floating_point", "element_size"})

_OF_VALUES = (torch.Tensor.data.__get__, torch.Tensor.data.__set__, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""What is read and set as an attribute, and would be lost where it is set on a stand-in."""


class AbsentParameter(nn.Parameter):
    """Stands for a full parameter while its unit is sharded: it has a shape and a dtype, and no values.

    Args:
        like: The full parameter.
        unit: Name of the unit, for the message.
        fqn: Name of the parameter.
    """

    unit: Name
    fqn: str
    true_device: torch.device

    def __new__(cls, like: torch.Tensor, unit: Name, fqn: str) -> AbsentParameter:
        """Make one; no memory is taken."""
        empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        made: AbsentParameter = torch.Tensor._make_subclass(cls, empty, like.requires_grad)
        made.unit = unit
        made.fqn = fqn
        made.true_device = like.device
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentParameter:
        """Return a stand-in for the copied parameter."""
        made = memo[id(self)] = AbsentParameter(self, copy.deepcopy(self.unit, memo), self.fqn)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no values; refuse the rest by name."""
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return args[0].true_device
        refused = any(func == each for each in _OF_VALUES)
        if not refused and (name in _READABLE or (name in ("__repr__", "__set__") and len(types) == 1)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        absent = next((each for each in args if isinstance(each, AbsentParameter)), None)
        raise NotGatheredError(
            f"parameter {absent.fqn if absent is not None else ''} is used outside its unit's forward, while sharded",
            where=absent.unit if absent is not None else "",
            found=f"a call of {name}",
            fix=WAYS_OUT,
        )
