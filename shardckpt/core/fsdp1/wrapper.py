"""The engine's FSDP1 front end: `FullyShardedDataParallel`."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardckpt.core import comm_hooks, materialize
from shardckpt.core.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from shardckpt.core.comm import process_groups
from shardckpt.core.comm.collectives import CommHook
from shardckpt.core.config import Offload, Precision, TrainingState, UnitConfig
from shardckpt.core.errors import ArgumentError, ArgumentTypeError, BusyError, SettingsDifferError, StateError
from shardckpt.core.fsdp1.state_dict_api import StateStatics, register_with_torch_dcp
from shardckpt.core.modules.autograd_hooks import compiler_disabled, compiler_disabled_shallow
from shardckpt.core.modules.fqn_and_params import (
    WRAPPED,
    Name,
    ParamInfo,
    clean,
    is_incompatible,
    managed_parameters,
    parameters_below,
    ties_below,
)
from shardckpt.core.params import tensor_parallel
from shardckpt.core.params.param_bucket import Bucket, ShardSpec
from shardckpt.core.registration.base import ParamRegistration
from shardckpt.core.registration.flat_param import FlatParamRegistration
from shardckpt.core.registration.orig_params import OrigParamsRegistration
from shardckpt.core.runtime import traversal
from shardckpt.core.runtime.fsdp_unit import FSDPUnit, Phase, UnshardHandle
from shardckpt.core.runtime.mixed_precision import Buffers
from shardckpt.core.runtime.root_state import RootState
from shardckpt.core.runtime.traversal import ShardedModule
from shardckpt.core.tools import clip_grad_norm, summon_full_params
from shardckpt.core.tools import summon_full_params as summon
from shardckpt.core.wrap import Policy, auto_wrap

FLAT_PARAM = "_flat_param"

_ProcessGroup = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


def _precision(settings: MixedPrecision) -> Precision:
    return Precision(
        param_dtype=settings.param_dtype,
        reduce_dtype=settings.reduce_dtype,
        buffer_dtype=settings.buffer_dtype,
        cast_inputs=settings.cast_forward_inputs,
        cast_root_inputs=settings.cast_root_forward_inputs,
        keep_low_precision_grads=settings.keep_low_precision_grads,
    )


class FullyShardedDataParallel(StateStatics):
    """Wrapper that shards a module's parameters across ranks.

    The parameters are unsharded only while the module computes.
    It has the arguments, defaults and members of `torch.distributed.fsdp.FullyShardedDataParallel`.

    Args:
        module: The module to wrap.
        process_group: Ranks to shard over; for hybrid strategies the pair (shard group, replicate group).
        sharding_strategy: State to shard (parameters, gradients, optimizer state); None for FULL_SHARD.
        cpu_offload: Whether shards are stored on the CPU.
        auto_wrap_policy: Selects the submodules to make separate units.
        backward_prefetch: When backward starts the next unit's all-gather; None for no prefetch.
        mixed_precision: Dtypes for computation and reduction.
        ignored_modules: Modules whose parameters are neither sharded nor moved.
        param_init_fn: Function that initializes a module on the meta device.
        device_id: Device to compute on; the module is moved to it.
        sync_module_states: Broadcast rank 0's parameters and buffers to all ranks.
        forward_prefetch: Gather the next unit while this unit computes its forward.
        limit_all_gathers: Delay all-gathers until computation has caught up, to bound memory.
        use_orig_params: Keep the module's own parameters registered, instead of one flat parameter.
        ignored_states: Parameters, or modules, that are neither sharded nor moved.
        device_mesh: Device mesh, instead of `process_group`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: _ProcessGroup = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        register_with_torch_dcp()
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        _warn_about_containers(module)
        ignored = Ignored.from_arguments(module, ignored_modules, ignored_states, FullyShardedDataParallel)
        self._group = process_groups.resolve(strategy, process_group, device_mesh, by_hand=auto_wrap_policy is None)
        self._device_mesh = device_mesh
        self._inter_node_pg = self._group.replicate if strategy.is_hybrid else None
        self.process_group = self._group.shard or self._group.replicate
        assert self.process_group is not None
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.sharding_strategy = strategy
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._use_orig_params = use_orig_params
        self._ignored_params = ignored.parameters - _params_of_instances(module)
        self._root_state: RootState | None = None
        self._hook: CommHook | None = None
        self._syncs_module_states = sync_module_states
        self._device = materialize.resolve_device(device_id, self.rank) or self._default_compute_device()
        settings = {"mixed_precision": mixed_precision, "param_init_fn": param_init_fn, "device_id": device_id}
        self._buffer_types, managed = self._prepare_module(module, ignored, auto_wrap_policy, settings)
        self._unit = self._build_unit(module, managed)
        self._fsdp_wrapped_module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """Return a wrapper for the copied module, over the same ranks, without a root."""
        if self._unit.root is not None:
            self._unit.reshard()
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            shared = isinstance(value, (dist.ProcessGroup, DeviceMesh))
            copied.__dict__[name] = value if shared else copy.deepcopy(value, memo) if name != "_root_state" else None
        return copied

    # ----------------------------------------------------------------------------------------- construction

    def _prepare_module(
        self, module: nn.Module, ignored: Ignored, policy: Policy | None, settings: Mapping[str, Any]
    ) -> tuple[Buffers, list[ParamInfo]]:
        """Wrap submodules, materialize and move states; return the unit's parameters. Collective."""
        initializer = self._initializer(settings["param_init_fn"])
        initializer.run_early(self._build_scope(module, ignored))
        reopened = self._restore_shared_units(module)
        with ties_below(module):
            for instance in reopened:
                instance._rebuild_unit()
            if policy is not None:
                self._wrap_children(module, policy, ignored, settings)
            scope = self._build_scope(module, ignored)
            initializer.run(scope)
            materialize.move(scope, self._device)
            managed = managed_parameters(module, self._excluded_params(module))
        if self._syncs_module_states:
            self._broadcast(module, managed)
        return Buffers(scope.modules), managed

    def _excluded_params(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters below a module that are ignored or belong to nested units."""
        nested = (instance._ignored_params for instance in _instances(module))
        return self._ignored_params.union(_params_of_instances(module), *nested)

    def _build_scope(self, module: nn.Module, ignored: Ignored) -> materialize.ModuleScope:
        """Return the modules whose states this instance initializes and moves."""

        def left_alone(submodule: nn.Module) -> bool:
            # Ignored and already sharded modules are excluded, and so are the modules below them.
            return (
                submodule in ignored.modules
                or isinstance(submodule, FullyShardedDataParallel)
                or is_incompatible(submodule)
            )

        return materialize.ModuleScope.collect(module, left_alone, self._excluded_params(module))

    def _default_compute_device(self) -> torch.device | None:
        """Return the device to compute on with offloaded parameters, if none was given."""
        assert self.process_group is not None
        return materialize.default_device(self.process_group) if self.cpu_offload.offload_params else None

    def _initializer(self, function: Callable[[nn.Module], None] | None) -> materialize.Initializer:
        assert self.process_group is not None
        sends = self._group.rank == 0 and (self._group.replicate is None or self._group.replicate.rank() == 0)
        return materialize.Initializer(
            function,
            self._device or materialize.default_device(self.process_group),
            values_matter=sends or not self._syncs_module_states,
        )

    def _broadcast(self, module: nn.Module, managed: list[ParamInfo]) -> None:
        """Broadcast rank 0's values that a nested instance has not broadcast. Collective."""
        done = {id(b) for instance in _instances(module) if instance._syncs_module_states for b in instance.buffers()}
        buffers = [buffer for buffer in module.buffers() if id(buffer) not in done]
        materialize.broadcast([*(member.parameter for member in managed), *buffers], self._group)

    def _wrap_children(self, module: nn.Module, policy: Policy, ignored: Ignored, inherited: Mapping[str, Any]) -> None:
        """Wrap submodules by a policy, with this instance's groups and settings."""
        pair = (self._group.shard, self._group.replicate)
        settings = {
            "process_group": pair if self.sharding_strategy.is_hybrid else self.process_group,
            "device_mesh": None,
            "sharding_strategy": self.sharding_strategy,
            "cpu_offload": self.cpu_offload,
            "backward_prefetch": self.backward_prefetch,
            "sync_module_states": self._syncs_module_states,
            "forward_prefetch": self.forward_prefetch,
            "limit_all_gathers": self.limit_all_gathers,
            "use_orig_params": self._use_orig_params,
            "ignored_states": ignored.parameters,
            **inherited,
        }
        if self._device_mesh is not None:
            settings |= {"process_group": None, "device_mesh": self._device_mesh}
        auto_wrap(module, policy, type(self), settings, ignored.modules, ignored.parameters)

    @staticmethod
    def _restore_shared_units(module: nn.Module) -> list[FullyShardedDataParallel]:
        """Restore and return nested instances whose parameters other instances share."""
        owners = {instance._unit: instance for instance in _instances(module)}
        return [owners[unit] for unit in traversal.restore_shared_units(module, list(owners))]

    def _rebuild_unit(self) -> None:
        module = self._fsdp_wrapped_module
        self._unit = self._build_unit(module, managed_parameters(module, self._excluded_params(module)))

    def _build_unit(self, module: nn.Module, managed: list[ParamInfo]) -> FSDPUnit:
        strategy = self.sharding_strategy
        config = UnitConfig(
            reshard_after_forward=strategy.reshard_after_forward,
            keeps_full=strategy is ShardingStrategy.NO_SHARD,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
            limit_all_gathers=self.limit_all_gathers,
            precision=_precision(self.mixed_precision),
            offload=Offload(self.cpu_offload.offload_params),
        )
        name = Name(type(module).__name__)
        sets: dict[tuple[torch.dtype, bool], list[ParamInfo]] = {}
        for member in managed:
            sets.setdefault((member.parameter.dtype, member.parameter.requires_grad), []).append(member)
        registrations = [
            self._build_registration(module, name, members, i, config) for i, members in enumerate(sets.values())
        ]
        return FSDPUnit(name, [module], registrations, config, self._buffer_types)

    def _build_registration(
        self, module: nn.Module, name: Name, members: list[ParamInfo], index: int, config: UnitConfig
    ) -> ParamRegistration:
        placements = tensor_parallel.build_tp_params(members)
        spec = ShardSpec(aligned=self._use_orig_params, keeps_full=config.keeps_full, placements=placements, flat=True)
        bucket = Bucket(members, self._group, name, spec, config.precision, config.offload)
        if self._use_orig_params:
            tensor_parallel.register_local_tensors(members)
            return OrigParamsRegistration(bucket, name)
        return FlatParamRegistration(bucket, name, module, f"{FLAT_PARAM}_{index}" if index else FLAT_PARAM)

    # ---------------------------------------------------------------------------------------------- running

    @compiler_disabled
    def _ensure_root_state(self) -> RootState:
        """Return the root's state; become the root if there is none."""
        if self._root_state is None:
            named = [(n, m) for n, m in self.named_modules() if isinstance(m, FullyShardedDataParallel)]
            roots = [clean(name) for name, instance in named if instance.is_sharding_root]
            if roots:
                raise StateError(
                    "a nested unit ran first and became the root",
                    where=roots[0],
                    fix="Run the outermost FullyShardedDataParallel first.",
                )
            _check_same_settings(named)
            self._forget_roots([instance for _, instance in named])
            units = [(clean(name) or type(self.module).__name__, instance._unit) for name, instance in named]
            root_state = RootState(self._unit, units)
            for _, instance in named:
                instance._set_root_state(root_state)
                if instance.mixed_precision.buffer_dtype is not None:
                    instance._buffer_types.cast(instance.mixed_precision.buffer_dtype)
        assert self._root_state is not None
        return self._root_state

    def _forget_roots(self, instances: list[FullyShardedDataParallel]) -> None:
        """Forget earlier roots of instances whose module was wrapped again."""
        if any(instance._root_state is not None for instance in instances):
            for instance in instances:
                if instance._root_state is not None:
                    instance._root_state.recover()
                instance._unit.reshard()
            self._reset_lazy_init()

    def _set_root_state(self, root_state: RootState) -> None:
        self._root_state = root_state

    @compiler_disabled_shallow
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters unsharded."""
        root_state = self._root_state or self._ensure_root_state()
        return root_state.run_forward(self._unit, self._fsdp_wrapped_module, args, kwargs)

    def register_forward_method(self, method_name: str) -> None:
        """Make a wrapped module's method run with its parameters unsharded.

        Args:
            method_name: Method name; call it on the wrapper.
        """

        @functools.wraps(getattr(self._fsdp_wrapped_module, method_name))
        def gathered(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> Any:
            method = getattr(self._fsdp_wrapped_module, method_name)
            return self._ensure_root_state().run_forward(self._unit, method, args, kwargs)

        setattr(self, method_name, MethodType(gathered, self))

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Skip gradient reduction inside the context; gradients accumulate unsharded.

        Raises:
            StateError: This instance is not the root.
            BusyError: The instance is in a forward or a backward.
        """
        root_state = self._ensure_root_state()
        if root_state.root is not self._unit:
            raise StateError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module",
                where=self._unit.name,
            )
        self._assert_state(TrainingState.IDLE)
        before = [unit.config.sync_gradients for unit in root_state.units]
        for unit in root_state.units:
            unit.config = replace(unit.config, sync_gradients=False)
        try:
            yield
        finally:
            for unit, on in zip(root_state.units, before, strict=True):
                unit.config = replace(unit.config, sync_gradients=on)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`. Collective.

        The norm is computed over all ranks and all nested units.
        Ignored parameters' gradients differ between ranks and are neither counted nor scaled.

        Args:
            max_norm: Largest norm after the call.
            norm_type: Order of the norm; infinity for the largest absolute value.
            error_if_nonfinite: Raise an error if the norm is infinite or NaN, instead of scaling by it.

        Returns:
            The norm before scaling, bitwise equal on every rank.

        Raises:
            StateError: This instance is not the root, or `error_if_nonfinite` is set and the norm is not finite.
        """
        root_state = self._ensure_root_state()
        if root_state.root is not self._unit:
            raise StateError(
                "`clip_grad_norm_()` should only be called on the root FSDP instance", where=self._unit.name
            )
        return clip_grad_norm.clip_units(
            root_state.units,
            self._group,
            self.compute_device,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replace gradient reduction by a hook, here and in nested instances.

        Args:
            state: First argument in each call.
            hook: Called as `hook(state, gradient, out)` for sharded parameters and as `hook(state, gradient)` with
                NO_SHARD; see `shardckpt.core.comm_hooks`.

        Raises:
            HookError: This instance is not the root; or a unit is hybrid, has a hook already, or is between forward
                and backward.
            ArgumentError: The hook is not callable.
        """
        root = self.check_is_root()
        instances = _instances(self)
        comm_hooks.check(
            hook, root, [(instance._unit, instance.sharding_strategy, instance._comm_hook) for instance in instances]
        )
        for instance in instances:
            instance._set_comm_hook(state, hook)

    def _set_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self._hook = CommHook(state, hook)
        for bucket in self._unit.buckets:
            bucket.set_collectives(hook=self._hook)

    @property
    def _comm_hook(self) -> Callable[..., Any] | None:
        return self._hook.call if self._hook is not None else None

    @_comm_hook.setter
    def _comm_hook(self, hook: Callable[..., Any]) -> None:
        self._set_comm_hook(self._comm_hook_state, hook)

    @property
    def _comm_hook_state(self) -> object:
        return self._hook.state if self._hook is not None else None

    def _low_precision_hook_enabled(self) -> bool:
        return comm_hooks.is_low_precision(self._comm_hook)

    # --------------------------------------------------------------------------------------------- the module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters; after a failed backward, those from before it."""
        if self._root_state is not None:
            self._root_state.recover()
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self._visible_name(name), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield self._visible_name(name), buffer

    def _visible_name(self, name: str) -> str:
        """Return a name; inside `summon_full_params`, drop the wrapper's segment."""
        return name.replace(f"{WRAPPED}.", "") if self._unit.params.is_checked_out else name

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None, None, None]:
        """Give modules their full parameters inside the context. Collective.

        Parameters have the dtypes in which they are stored. All combinations of arguments are supported. Inside the
        context units compute like plain modules, and `named_parameters` and `named_buffers` yield the unwrapped
        model's names.

        Args:
            module: An instance, or a module that contains instances.
            recurse: Also gather nested instances' parameters; all are in memory at the same time.
            writeback: Keep changes on exit, also if an exception leaves the context. Without it changes are lost,
                unless nothing is sharded (NO_SHARD).
            rank0_only: Only rank 0 gets full parameters; with `writeback` its changes are sent to all ranks.
            offload_to_cpu: Keep the full parameters in CPU memory.
            with_grads: Also give full gradients; with `writeback` changes to gradients are kept.

        Raises:
            BusyError: The instance is in a forward or a backward, or in another `summon_full_params`.
            SummonShapeError: On exit: a parameter was replaced by one with another shape.
        """
        wanted = summon.SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        with summon.summon_full_params(module, wanted, recurse=recurse):
            yield

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation checkpointing wrapper around it."""
        inner = self._fsdp_wrapped_module
        wrapped = inner._modules.get("_checkpoint_wrapped_module")
        return wrapped if wrapped is not None else inner

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.registrations)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        registration = self._unit.registrations[0] if self._unit.registrations else None
        return registration.flat if isinstance(registration, FlatParamRegistration) else None

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters that an optimizer gets from this instance, without nested ones."""
        return [parameter for registration in self._unit.registrations for parameter in registration.parameters]

    @property
    def _is_root(self) -> bool | None:
        return None if self._root_state is None else self.is_sharding_root

    def _mixed_precision_enabled_for_buffers(self) -> bool:
        return self.mixed_precision.buffer_dtype is not None

    @property
    def compute_device(self) -> torch.device:
        """Device that the module computes on."""
        return next((bucket.compute_device for bucket in self._unit.buckets), self._device or torch.device("cpu"))

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this instance's parameters; return a handle, or None if they are ready. Collective."""
        self._ensure_root_state()
        handle = UnshardHandle(self._unit.unshard)
        if async_op:
            self._unit.prefetch_unshard()
            return handle
        handle.wait()
        return None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Do nothing: each stream waits for an all-gather before it uses the result."""

    def __getattr__(self, name: str) -> Any:
        """Return a wrapped module's attribute that the wrapper does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        """Return an item from the wrapped module."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    @property
    def sharding_unit(self) -> FSDPUnit:
        """This instance's unit."""
        return self._unit

    @property
    def is_sharding_root(self) -> bool:
        """Return True if this instance is a root: it ran before any outer instance."""
        return self._root_state is not None and self._root_state.root is self._unit

    def check_is_root(self) -> bool:
        """Return True if this is the outermost instance; the call determines the root."""
        return self._ensure_root_state().root is self._unit

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return a module's instances.

        Args:
            module: An instance, or a module that contains instances.
            root_only: Exclude instances that belong to a root above them.
        """
        instances = _instances(module)
        return [instance for instance in instances if instance.check_is_root()] if root_only else instances

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FullyShardedDataParallel:
        self._unit.reshard()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._unit.params.is_checked_out:
            return self
        for registration in self._unit.registrations:
            registration.pull_user_changes()
            registration.register_sharded()
        return self

    @contextmanager
    def _deregister_orig_params_ctx(self) -> Generator[None, None, None]:
        """Register flat parameters inside the context, in this instance and nested ones."""
        instances = _instances(self)
        for instance in instances:
            if not instance._use_orig_params:
                raise SettingsDifferError(
                    "`_deregister_orig_params_ctx()` should only be called when `_use_orig_params=True`",
                    where=instance._unit.name,
                )
            instance._assert_state(TrainingState.IDLE)
        self._ensure_root_state()
        with summon_full_params.register_flat_params(
            [(instance._fsdp_wrapped_module, instance._unit) for instance in instances], FLAT_PARAM
        ):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply a function to every submodule, with full parameters. Collective.

        Only this unit's parameters are unsharded. Changes to parameters are kept.

        Raises:
            BusyError: The unit is in a forward or a backward, or in `summon_full_params`.
        """
        self._assert_state(TrainingState.IDLE)
        with summon.summon_full_params(self, summon.SummonOptions(), recurse=False):
            super().apply(fn)
        return self

    def _reset_lazy_init(self) -> None:
        """Forget the root; the next call that needs a root determines it again."""
        for instance in _instances(self):
            instance._root_state = None
            instance._unit.attach(None)

    @property
    def training_state(self) -> TrainingState:
        """This instance's current phase: idle, forward, backward or summoned."""
        if self._unit.params.is_checked_out:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.IDLE if self._unit.phase is Phase.IDLE else TrainingState.FORWARD_BACKWARD

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raise BusyError unless the instance is in one of the given states."""
        states = state if isinstance(state, list) else [state]
        if self.training_state not in states:
            raise BusyError(
                f"expected to be in states {states} but current state is {self.training_state}",
                where=self._unit.name,
                fix="Call it outside the unit's forward and backward.",
            )


ShardedModule.register(FullyShardedDataParallel)


def _instances(module: nn.Module) -> list[FullyShardedDataParallel]:
    return [submodule for submodule in module.modules() if isinstance(submodule, FullyShardedDataParallel)]


def _params_of_instances(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a module's instances."""
    return {parameter for instance in _instances(module) for parameter in instance.params}


def _check_same_settings(named: Iterable[tuple[str, FullyShardedDataParallel]]) -> None:
    """Check that instances below one root agree on the settings that must be equal."""
    named = list(named)
    for setting in ("_use_orig_params", "limit_all_gathers"):
        values: dict[object, list[str]] = {}
        for name, instance in named:
            values.setdefault(getattr(instance, setting), []).append(clean(name) or "the root")
        if len(values) > 1:
            raise ArgumentError(
                f"Expects one homogeneous value for {setting} among all units of one tree",
                found="; ".join(f"{value} in {', '.join(names)}" for value, names in values.items()),
                fix="Pass the same value to all of them.",
            )


def _warn_about_containers(module: nn.Module) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"FSDP will not all-gather parameters for containers that do not implement forward: {type(module)}",
            stacklevel=3,
        )


@dataclass(frozen=True)
class Ignored:
    """Modules and parameters that are neither sharded nor moved."""

    modules: set[nn.Module]  # with all their submodules
    parameters: set[nn.Parameter]  # including the modules' parameters

    @classmethod
    def from_arguments(
        cls,
        root: nn.Module,
        ignored_modules: Iterable[nn.Module] | None,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
        sharded: type[nn.Module],
    ) -> Ignored:
        """Check the wrapper's arguments, at most one of which may be given; `sharded` modules cannot be ignored."""
        if ignored_modules is not None and ignored_states is not None:
            raise ArgumentError("Cannot pass both ignored_modules and ignored_states at the same time")
        if ignored_states is None:
            return cls._from_modules(root, ignored_modules, sharded)
        states: list[Any] = list(ignored_states)
        if states and all(isinstance(state, nn.Parameter) for state in states):
            return cls(set(), set(states))
        if not all(isinstance(state, nn.Module) for state in states):
            raise ArgumentError(
                f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {_types(states)}"
            )
        return cls._from_modules(root, states, sharded)

    @classmethod
    def _from_modules(cls, root: nn.Module, given: Iterable[nn.Module] | None, sharded: type[nn.Module]) -> Ignored:
        try:
            modules = list(given or ())
        except TypeError as error:
            raise ArgumentTypeError(
                f"ignored_modules should be an iterable of modules but got {type(given)}"
            ) from error
        if not all(isinstance(module, nn.Module) for module in modules):
            raise ArgumentTypeError(f"ignored_modules expects nn.Module list elements but got types {_types(modules)}")
        for module in modules:
            if isinstance(module, sharded):
                raise ArgumentError("`ignored_modules` should not include FSDP modules")
            if module is root:
                warnings.warn(
                    "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
                    f"parameters being ignored: {type(module).__name__}",
                    stacklevel=4,
                )
        below = {inner for module in modules for inner in module.modules()}
        return cls(below, parameters_below(modules))


def _types(values: Iterable[object]) -> list[type]:
    return sorted({type(value) for value in values}, key=repr)
