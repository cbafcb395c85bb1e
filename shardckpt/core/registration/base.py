"""Base classes that register a bucket's parameters, and `FlatParameter`."""

from __future__ import annotations

import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any
from weakref import WeakMethod
from weakref import ref as weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.errors import ChangedError, NotGatheredError, StateError
from shardckpt.core.modules import autograd_hooks
from shardckpt.core.modules.fqn_and_params import Name, ParamLocation, register
from shardckpt.core.params.gradient_reduction import ReducedGrad
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.params.unsharded_params import BucketPhase, KeptVersions
from shardckpt.devices import wait_for_deferred_copies


class ParamRegistration(ABC):
    """Registration of one bucket's parameters on its modules.

    Args:
        bucket: Parameters to register.
        unit: Unit name for messages.
    """

    guards: Sequence[ForwardGuard] = ()  # of the modules with the parameters

    def __init__(self, bucket: Bucket, unit: Name) -> None:
        self.bucket = bucket
        self.unit = unit
        for member in bucket.members:
            member.identity.hold(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamRegistration:
        """Return the registration for a copied bucket and model, without gradients."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        for original, duplicate in zip(self.parameters, copied.parameters, strict=True):
            duplicate.__dict__.update(copy.deepcopy(original.__dict__, memo))
        for member in copied.bucket.members:
            member.identity.hold(copied)
        copied.alias_shard()
        return copied

    def copy_parameters(self, memo: dict[int, Any]) -> None:
        """Copy the parameters that `deepcopy` cannot copy, before all others."""
        del memo

    @abstractmethod
    def alias_shard(self) -> None:
        """Make the registered parameters views of the shard."""

    @property
    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that an optimizer updates."""

    def find_replaced(self) -> list[tuple[ParamLocation, nn.Parameter]]:
        """Return the places where a user registered other parameters, with these."""
        return []

    def restore(self) -> None:
        """Undo the sharding: register full parameters again. Collective."""
        self.pull_user_changes()
        self.bucket.unsharded.reshard()
        self.bucket.mark_shard_written()
        self.bucket.unsharded.start_all_gather(full_precision=True)
        self.bucket.unsharded.wait_all_gather()
        for member, leaf in zip(self.bucket.members, self.bucket.unsharded.params, strict=True):
            member.restore(leaf.detach().clone().requires_grad_(leaf.requires_grad))
        self.bucket.unsharded.reshard()

    @abstractmethod
    def register_unsharded(self) -> None:
        """Register the unsharded parameters on the modules."""

    def register_kept(self, *, is_after_backward: bool) -> None:
        """Register the parameters to use while full ones are kept.

        Args:
            is_after_backward: Whether they stay until the next forward, and not between forward and backward.
        """
        del is_after_backward
        self.bucket.unsharded.keep(self.bucket.unsharded.params, self.parameters)

    def reshard(self, *, keep_partial_shard: bool) -> None:
        """Register the sharded parameters and free the full ones."""
        unsharded = self.bucket.unsharded
        replaced = self.find_replaced() if unsharded.phase is BucketPhase.KEPT else ()
        if unsharded.kept is not None and unsharded.kept.has_new_versions:
            if unsharded.is_full_precision:
                self.bucket.write_back()
            else:  # copying the rounded values would also round parameters that did not change
                warnings.warn(f"{self.unit}: changes to parameters in their compute dtype are lost", stacklevel=2)
        self.register_sharded()
        unsharded.reshard(keep_partial_shard=keep_partial_shard)
        for place, parameter in replaced:  # the next all-gather uses the replacement
            register(place, parameter)

    @abstractmethod
    def register_sharded(self) -> None:
        """Register the sharded parameters on the modules."""

    def has_user_changes(self) -> bool:
        """Return False if it is known that `pull_user_changes` can be skipped."""
        return self.bucket.unsharded.is_aliased or self.bucket.unsharded.phase is BucketPhase.SHARDED

    @abstractmethod
    def pull_user_changes(self) -> None:
        """Copy a user's changes to registered parameters into the bucket.

        A user can change the object, its storage, dtype, device and `requires_grad`.
        """

    @property
    def has_unbound_extensions(self) -> bool:
        """Return True if the bucket does not use a local tensor's all-gather extensions."""
        return False

    def bind_extensions(self) -> tuple[ParamRegistration, ...]:
        """Return registrations for the same parameters, with buckets for these extensions."""
        return (self,)

    @abstractmethod
    def add_gradient(self, reduced: ReducedGrad) -> None:
        """Add a reduced gradient to the gradients of parameters known to be used."""

    def add_late_gradient(self, reduced: ReducedGrad, used: Sequence[bool]) -> None:
        """Add the parts of a reduced gradient that `add_gradient` skipped.

        Args:
            reduced: As in `add_gradient`.
            used: For each parameter, whether any rank had a gradient for it.
        """
        late = tuple(now and not before for now, before in zip(used, reduced.used, strict=True))
        if any(late):
            self.add_gradient(replace(reduced, used=late))

    @property
    def has_unsharded_grads(self) -> bool:
        """Return True if registered parameters have unreduced gradients (no_sync)."""
        return False

    @abstractmethod
    def gradients(self) -> list[torch.Tensor | None]:
        """Return the shards of the parameters' gradients; full ones if not yet reduced."""

    @abstractmethod
    def set_gradients(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Replace the gradients.

        Args:
            parts: This rank's shard of each parameter's gradient; None for a parameter without a gradient.
        """

    @abstractmethod
    def register_summoned(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
    ) -> list[nn.Parameter]:
        """Register full parameters outside the bucket's memory.

        Args:
            values: Full values; the registered parameters alias them.
            gradients: Full gradients; None to leave gradients unchanged.

        Returns:
            The registered parameters.
        """

    def unregister_summoned(self) -> None:
        """Register the sharded parameters again, with their earlier gradients."""
        self.register_sharded()

    def stash_unsharded_grads(self) -> None:
        """Keep a backward's unsharded gradients without reduction (no_sync)."""
        self.bucket.reducer.stash_grads()

    @abstractmethod
    def restore_unsharded_grads(self) -> None:
        """Restore the kept unsharded gradients before the next backward."""

    def reset_after_error(self) -> None:
        """Drop the iteration's gradients after an error."""
        self.bucket.reset_after_error()


def is_outdated(registration: ParamRegistration) -> bool:
    """Return True if parameters were changed or replaced since full ones were kept."""
    unsharded = registration.bucket.unsharded
    if unsharded.kept is not None and unsharded.kept.is_outdated:
        return True
    return unsharded.phase is BucketPhase.KEPT and bool(registration.find_replaced())


def check_kept(registration: ParamRegistration, kept: KeptVersions) -> None:
    """Raise ChangedError if a user changed or replaced parameters after forward."""
    if kept.is_modified or registration.find_replaced():
        # Gradients would mix the old and the new values.
        raise ChangedError(
            "one of the variables needed for gradient computation has been modified by an inplace operation, or "
            "replaced: FSDP does not support changing the parameters between forward and backward",
            where=registration.unit,
            fix="Change parameters after backward, or after a forward under no_grad.",
        )


class ForwardGuard:
    """Replaces a module's forward, and refuses to compute while sharded."""

    # A forward that a user set on the module is not replaced. A user who saved a reference to this guard can call it;
    # it computes while the parameters are unsharded. In backward, where activation checkpointing recomputes, the guard
    # unshards the unit instead.

    def __init__(self, module: nn.Module, unit: Name, fqn: str) -> None:
        self._module = weakref(module)
        self._unit = unit
        self._fqn = fqn
        self._is_allowed = True
        self._unshard: WeakMethod[Callable[[], None]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardGuard:
        """Return the guard for the copied module."""
        module = self._module()
        copied = copy.deepcopy(module, memo)  # may copy this guard too
        if id(self) not in memo:
            memo[id(self)] = ForwardGuard(copied or nn.Module(), copy.deepcopy(self._unit, memo), self._fqn)
            memo[id(self)]._is_allowed = self._is_allowed
        guard: ForwardGuard = memo[id(self)]
        return guard

    def set_backward_unshard(self, unshard: Callable[[], None]) -> None:
        """Set the method that unshards the unit in backward; keeps a weak reference."""
        self._unshard = WeakMethod(unshard)

    def install(self, *, is_allowed: bool = False) -> None:
        """Install the guard: backward unshards the unit, other calls are refused."""
        self._is_allowed = is_allowed
        module = self._module()
        if module is not None:
            module.__dict__.setdefault("forward", self)

    def remove(self) -> None:
        """Remove the guard, so that the module can compute."""
        self._is_allowed = True
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute if allowed, in backward or with DTensor arguments; otherwise refuse."""
        unshard = self._unshard() if self._unshard is not None and autograd_hooks.in_backward() else None
        if unshard is not None:
            unshard()
        if self._is_allowed or any(isinstance(argument, DTensor) for argument in args):
            return self.__func__(self._module(), *args, **kwargs)
        raise NotGatheredError(
            f"the module of parameter {self._fqn} is called outside its unit's forward, while sharded",
            where=self._unit,
            found=f"a call of {type(self._module()).__name__}",
            fix=WAYS_OUT,
        )

    @property
    def __func__(self) -> Any:
        """The module's own forward function, as for bound methods."""
        return type(self._module()).forward  # type: ignore[union-attr]

    @property
    def __signature__(self) -> inspect.Signature:
        """The module's own forward signature, for `inspect`."""
        return inspect.signature(MethodType(self.__func__, self._module()))


class PerParamRegistration(ParamRegistration):
    """Registers this rank's shard of each parameter."""

    def __init__(
        # `computes_sharded`: the modules can compute with the registered parameters while sharded.
        self,
        bucket: Bucket,
        unit: Name,
        parameters: Sequence[nn.Parameter],
        *,
        computes_sharded: bool = False,
    ) -> None:
        super().__init__(bucket, unit)
        self._computes_sharded = computes_sharded
        self._parameters = list(parameters)
        self._views = bucket.local_shards
        homes = {place.module: member.fqn for member in reversed(bucket.members) for place in member.places}
        self.guards = [ForwardGuard(module, unit, fqn) for module, fqn in homes.items()]

    def restore(self) -> None:
        """Undo the sharding: register full parameters again. Collective."""
        super().restore()
        self._allow_forward()

    def _allow_forward(self) -> None:
        """Allow modules to compute with the registered parameters."""
        for guard in self.guards:
            guard.remove()

    def alias_shard(self) -> None:
        """Make the registered parameters alias the shard."""
        self._views = self.bucket.local_shards
        self._reset_data()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that an optimizer updates."""
        return self._parameters

    def find_replaced(self) -> list[tuple[ParamLocation, nn.Parameter]]:
        """Return the places where a user registered other parameters, with these."""
        found = []
        rows = zip(self.bucket.members, self._parameters, self.bucket.unsharded.params, strict=True)
        for member, parameter, leaf in rows:
            for place in member.places:
                registered = place.module._parameters.get(place.attribute)
                if registered is not None and registered is not parameter and registered is not leaf:
                    found.append((place, registered))
        return found

    def register_unsharded(self) -> None:
        """Register the unsharded leaves."""
        self._register(self.bucket.unsharded.params)

    def register_sharded(self) -> None:
        """Register the sharded parameters."""
        self._register(self._parameters, are_shards=True)

    def _register(self, parameters: Sequence[nn.Parameter], *, are_shards: bool = False) -> None:
        """Register parameters; modules do not compute with shards."""
        for member, parameter in zip(self.bucket.members, parameters, strict=True):
            for place in member.places:
                if place.is_plain:
                    place.module._parameters[place.attribute] = parameter
                else:
                    register(place, parameter)
        for guard in self.guards:
            if not are_shards:
                guard.remove()
            elif not self._computes_sharded:
                guard.install()

    def has_user_changes(self) -> bool:
        """Return True if a registered parameter may have changed; cheap to check."""
        bucket = self.bucket
        if bucket.unsharded.phase is not BucketPhase.SHARDED and not bucket.unsharded.is_aliased:
            return False
        rows = zip(bucket.members, self._parameters, bucket.unsharded.params, self._views, strict=True)
        for member, parameter, leaf, view in rows:
            data = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
            if type(data) is not torch.Tensor or data.__dict__:  # it may have all-gather extensions
                return True
            if parameter.requires_grad != leaf.requires_grad or _has_moved(data, view):
                return True
            for place in member.places:
                registered = place.module._parameters.get(place.attribute)
                if registered is not parameter and registered is not leaf and registered is not None:
                    return True
        return False

    @abstractmethod
    def _get_local_data(self) -> list[torch.Tensor]:
        """Return the registered parameters' data as plain tensors."""

    @abstractmethod
    def _reset_data(self) -> None:
        """Set the registered parameters' data to the views of the shard."""

    def pull_user_changes(self) -> None:
        """Copy data that a user set on the parameters into the shard; alias it again."""
        current = self._get_local_data()
        pairs = list(zip(current, self._views, strict=True))
        moved = [index for index, (data, view) in enumerate(pairs) if self._is_moved(data, view)]
        for member, (data, view) in zip(self.bucket.members, pairs, strict=True):
            if data.shape != view.shape:
                raise StateError(
                    f"Cannot writeback when the parameter shape changes: {member.fqn} was replaced",
                    where=self.unit,
                    found=tuple(data.shape),
                    expected=tuple(view.shape),
                    fix="While sharded, a parameter has the shape of this rank's shard; set full values inside "
                    "summon_full_params.",
                )
        if moved:
            self._copy_moved(current, moved)
        both = zip(self.parameters, self.bucket.unsharded.params, strict=True)
        for index, (parameter, leaf) in enumerate(both):
            if parameter.requires_grad != leaf.requires_grad:
                self.bucket.unsharded.set_requires_grad(index, parameter.requires_grad)

    def _is_moved(self, data: torch.Tensor, view: torch.Tensor) -> bool:
        """Return True if a user replaced a view's memory."""
        return _has_moved(data, view)

    def _copy_moved(self, current: list[torch.Tensor], moved: list[int]) -> None:
        bucket, like = self.bucket, current[moved[0]]
        shard = bucket.shard
        if like.dtype != bucket.stored.dtypes.stored or like.device != shard.device:
            bucket.replace_shard(like.new_zeros(shard.shape, dtype=like.dtype, device=like.device))
            moved = list(range(len(current)))
        elif not bucket.unsharded.is_aliased:  # a user who keeps the earlier data, to restore it, has the old memory
            bucket.replace_shard(shard.data.clone())
        self._views = bucket.local_shards
        wait_for_deferred_copies()
        for index in moved:
            self._views[index].copy_(current[index])
        bucket.mark_shard_written()
        self._reset_data()


def _has_moved(data: torch.Tensor, view: torch.Tensor) -> bool:
    if data.dtype != view.dtype or data.device != view.device or data.shape != view.shape:
        return True
    return data.numel() > 0 and data.data_ptr() != view.data_ptr()


_ParameterMeta: Any = type(nn.Parameter)  # torch does not export this class


class _MarkedMeta(_ParameterMeta):  # type: ignore[misc]
    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, nn.Parameter) and getattr(instance, "_is_flat_param", False) is True


class FlatParameter(nn.Parameter, metaclass=_MarkedMeta):
    """A flat bucket's 1-D parameter; users do not create it.

    It is a plain `torch.nn.Parameter` with a mark: a real subclass would slow down every operation on it.
    """


def mark_flat(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as an instance of `FlatParameter` and return it."""
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]  # torch's mark, which Lightning looks for
    return parameter


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
