"""Refusals of sharded modules: in place of a forward, and of a full parameter."""

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


class Gate:
    """Stands in for the forward of a module that has sharded parameters of its own, until they are gathered.

    A forward that a user put in place of the module's own is left alone. One who took this for the module's own gets
    that once the gate is open. In backward, where a checkpoint computes again, the unit is gathered instead.

    Args:
        module: The module.
        unit: Name of the unit that shards its parameters.
        fqn: Name of one of them.
    """

    def __init__(self, module: nn.Module, unit: Name, fqn: str) -> None:
        self._module = weakref(module)
        self._unit = unit
        self._fqn = fqn
        self._open = True
        self._gather: WeakMethod[Callable[[], None]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        """Return the one of the module's copy."""
        module = self._module()
        copied = copy.deepcopy(module, memo)  # which has a gate in it, perhaps this one's copy
        if id(self) not in memo:
            memo[id(self)] = Gate(copied or nn.Module(), copy.deepcopy(self._unit, memo), self._fqn)
            memo[id(self)]._open = self._open
        found: Gate = memo[id(self)]
        return found

    def gather_by(self, gather: Callable[[], None]) -> None:
        """Call a method to gather the unit in backward; the object it is bound to is not kept alive."""
        self._gather = WeakMethod(gather)

    def close(self) -> None:
        """Refuse to compute from now on, except in backward."""
        self._open = False
        self._put()

    def keep(self) -> None:
        """Let the module compute as it is, but in backward with what the unit gathers."""
        self._open = True
        self._put()

    def _put(self) -> None:
        module = self._module()
        if module is not None:
            module.__dict__.setdefault("forward", self)

    def open(self) -> None:
        """Let the module compute."""
        self._open = True
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse; compute where the gate is open, in backward, or where the caller knows of DTensors."""
        gather = self._gather() if self._gather is not None and autograd_hooks.in_backward() else None
        if gather is not None:
            gather()
        if self._open or any(isinstance(each, DTensor) for each in args):
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
