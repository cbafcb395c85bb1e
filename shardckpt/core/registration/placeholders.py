"""Guards and placeholders of sharded modules: for a forward, and for a full parameter."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakMethod
from weakref import ref as weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules import autograd_hooks
from shardckpt.core.modules.fqn_and_params import Name
from shardckpt.errors import ShardckptError


class NotGatheredError(ShardckptError, RuntimeError):
    """A full parameter was used while its unit is sharded."""


WAYS_OUT = "Call the unit itself, or gather it: register_fsdp_forward_method, summon_full_params or unshard."


class ForwardGuard:
    """A replacement for the forward of a module whose own parameters are sharded.

    A forward that a user put in place of the module's own is left alone. One who took this for the module's own gets
    that once the guard allows it. In backward, where a checkpoint computes again, the unit is unsharded instead.

    Args:
        module: The module.
        unit: Name of the unit that shards its parameters.
        fqn: Name of one of them.
    """

    def __init__(self, module: nn.Module, unit: Name, fqn: str) -> None:
        self._module = weakref(module)
        self._unit = unit
        self._fqn = fqn
        self._is_allowed = True
        self._unshard: WeakMethod[Callable[[], None]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardGuard:
        """Return the guard of the module's copy."""
        module = self._module()
        copied = copy.deepcopy(module, memo)  # which has a guard, perhaps this one's copy
        if id(self) not in memo:
            memo[id(self)] = ForwardGuard(copied or nn.Module(), copy.deepcopy(self._unit, memo), self._fqn)
            memo[id(self)]._is_allowed = self._is_allowed
        found: ForwardGuard = memo[id(self)]
        return found

    def set_backward_unshard(self, unshard: Callable[[], None]) -> None:
        """Set the method that unshards the unit in backward; the object it is bound to is not kept alive."""
        self._unshard = WeakMethod(unshard)

    def refuse(self) -> None:
        """Refuse to compute from now on, except in backward."""
        self._is_allowed = False
        self._put()

    def allow_kept(self) -> None:
        """Allow the module to compute with its registered parameters; in backward unshard the unit first."""
        self._is_allowed = True
        self._put()

    def _put(self) -> None:
        module = self._module()
        if module is not None:
            module.__dict__.setdefault("forward", self)

    def allow(self) -> None:
        """Allow the module to compute: remove the guard."""
        self._is_allowed = True
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse; compute if the guard allows it, in backward, or if the caller uses DTensors."""
        unshard = self._unshard() if self._unshard is not None and autograd_hooks.in_backward() else None
        if unshard is not None:
            unshard()
        if self._is_allowed or any(isinstance(each, DTensor) for each in args):
            return self.__func__(self._module(), *args, **kwargs)
        raise NotGatheredError(
            f"the module of parameter {self._fqn} is called outside its unit's forward, while sharded",
            where=self._unit,
            found=f"a call of {type(self._module()).__name__}",
            fix=WAYS_OUT,
        )

    @property
    def __func__(self) -> Any:
        """The function behind, as bound methods have it."""
        return type(self._module()).forward  # type: ignore[union-attr]

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own forward, for those who look at it."""
        return inspect.signature(MethodType(self.__func__, self._module()))


_READABLE = frozenset({"__get__", "size", "dim", "numel", "nelement", "stride", "is_floating_point", "element_size"})

_OF_VALUES = (torch.Tensor.data.__get__, torch.Tensor.data.__set__, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""Read and set as attributes; setting one on a placeholder would be lost."""


class ShardedPlaceholder(nn.Parameter):
    """A placeholder for a full parameter while its unit is sharded: with shape and dtype, without values.

    Args:
        like: The full parameter.
        unit: Name of the unit, for the message.
        fqn: Name of the parameter.
    """

    unit: Name
    fqn: str
    true_device: torch.device

    def __new__(cls, like: torch.Tensor, unit: Name, fqn: str) -> ShardedPlaceholder:
        """Make a placeholder; no memory is allocated."""
        empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        made: ShardedPlaceholder = torch.Tensor._make_subclass(cls, empty, like.requires_grad)
        made.unit = unit
        made.fqn = fqn
        made.true_device = like.device
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedPlaceholder:
        """Return a placeholder for the copied parameter."""
        made = memo[id(self)] = ShardedPlaceholder(self, copy.deepcopy(self.unit, memo), self.fqn)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what needs no values; refuse the rest by name."""
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return args[0].true_device
        refused = any(func == each for each in _OF_VALUES)
        if not refused and (name in _READABLE or (name in ("__repr__", "__set__") and len(types) == 1)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        used = next((each for each in args if isinstance(each, ShardedPlaceholder)), None)
        raise NotGatheredError(
            f"parameter {used.fqn if used is not None else ''} is used outside its unit's forward, while sharded",
            where=used.unit if used is not None else "",
            found=f"a call of {name}",
            fix=WAYS_OUT,
        )
