"""Placeholders for the full parameters in sharded modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardckpt.core.errors import NotGatheredError
from shardckpt.core.modules.fqn_and_params import Name

WAYS_OUT = "Call the unit itself, or gather it: register_fsdp_forward_method, summon_full_params or unshard."


_READABLE = frozenset({"__get__", "size", "dim", "numel", "nelement", "stride", "is_floating_point", "element_size"})

# Parameter attributes that cannot be set on a placeholder: the value would be lost.
_OF_VALUES = (torch.Tensor.data.__get__, torch.Tensor.data.__set__, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class ShardedPlaceholder(nn.Parameter):
    """Placeholder for a full parameter in a sharded unit: shape and dtype, no values."""

    unit: Name
    fqn: str
    true_device: torch.device

    def __new__(cls, like: torch.Tensor, unit: Name, fqn: str) -> ShardedPlaceholder:
        """Create a placeholder without allocating memory."""
        empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        placeholder: ShardedPlaceholder = torch.Tensor._make_subclass(cls, empty, like.requires_grad)
        placeholder.unit = unit
        placeholder.fqn = fqn
        placeholder.true_device = like.device
        return placeholder

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedPlaceholder:
        """Return a placeholder for the copied parameter."""
        copied = memo[id(self)] = ShardedPlaceholder(self, copy.deepcopy(self.unit, memo), self.fqn)
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run functions that do not read values; refuse all others."""
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return args[0].true_device
        refused = any(func == attribute for attribute in _OF_VALUES)
        if not refused and (name in _READABLE or (name in ("__repr__", "__set__") and len(types) == 1)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        used = next((value for value in args if isinstance(value, ShardedPlaceholder)), None)
        raise NotGatheredError(
            f"parameter {used.fqn if used is not None else ''} is used outside its unit's forward, while sharded",
            where=used.unit if used is not None else "",
            found=f"a call of {name}",
            fix=WAYS_OUT,
        )
