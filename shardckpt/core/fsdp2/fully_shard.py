"""The engine's FSDP2 front end: `fully_shard` and `FSDPModule`."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from types import MethodType
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardckpt.core.config import UnitConfig
from shardckpt.core.errors import (
    ArgumentError,
    BackendError,
    MisuseError,
    SettingTypeError,
    StateError,
    UnsupportedArgumentError,
)
from shardckpt.core.fsdp2.fsdp_state import (
    STATE,
    FSDPState,
    FullyShardOptions,
    UnitCollectives,
    fsdp_states_below,
    get_fsdp_state,
    is_wrapper,
)
from shardckpt.core.modules.autograd_hooks import compiler_disabled_shallow
from shardckpt.core.params.mesh_placement import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    ShardPlacementFn,
    default_mesh,
    mesh_info,
)
from shardckpt.core.policies import AllGather, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
from shardckpt.core.runtime.fsdp_unit import FSDPUnit, Phase, UnshardHandle
from shardckpt.core.runtime.root_state import GradientReductionHandle, RootState
from shardckpt.core.runtime.traversal import ShardedModule
from shardckpt.devices import Stream, get_current_stream, use_stream

_AS_STORED = MixedPrecisionPolicy()
_ON_DEVICE = OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_STORED,
    offload_policy: OffloadPolicy = _ON_DEVICE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard a module's parameters across ranks, in place.

    The parameters are unsharded only while the module computes.
    Apply it to nested modules first: an outer call leaves parameters that are sharded already to the nested module.
    Parameters become DTensors; the module's class becomes a subclass of `FSDPModule` and its original class.

    Args:
        module: The module, or several modules that are gathered and freed together.
        mesh: 1-D mesh to shard over, or 2-D mesh (replicate, shard); None for all ranks. With `dp_mesh_dims` the full
            mesh, on which parameters are DTensors.
        reshard_after_forward: True to free the parameters between forward and backward; a number of ranks to
            reshard them to; None to free them unless the module is the root.
        shard_placement_fn: Returns the dimension to shard a parameter along, and the mesh.
        mp_policy: Dtypes for computation and reduction.
        offload_policy: Whether shards are stored on the CPU.
        ignored_params: Parameters that are neither sharded nor moved nor reduced.
        dp_mesh_dims: The mesh's data-parallel dimension names.

    Returns:
        The argument `module`.

    Raises:
        MisuseError: A module has been sharded already.
        ArgumentError: A module does not have a forward, or the mesh or a setting is invalid.
    """
    modules = _outermost(module)
    _check_modules(modules)
    info = mesh_info(mesh if mesh is not None else default_mesh(), dp_mesh_dims)
    config = UnitConfig(
        precision=mp_policy.precision,
        offload=offload_policy.offload,
        keeps_full=info.shard_mesh_dim is None,
        keeps_unsharded_without_sync=False,
    )
    config = _resolve_reshard(config, reshard_after_forward, info)
    FSDPState(modules, FullyShardOptions(info, shard_placement_fn, frozenset(ignored_params or ()), config, mp_policy))
    for sharded in modules:
        sharded.__class__ = _sharded_class(type(sharded))
        register_fully_shard(sharded)
    return module


def _outermost(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not a submodule of another one."""
    if isinstance(module, nn.Module):
        return [module]
    given = list(dict.fromkeys(module))
    if not given:
        raise ArgumentError("fully_shard needs at least one module")
    below = {inner for outer in given for inner in outer.modules() if inner is not outer}
    return [outer for outer in given if outer not in below]


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if get_fsdp_state(module) is not None:
            raise MisuseError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard has already been applied to the following module:\n{module}"
            )
        if is_wrapper(module):
            raise ArgumentError(
                "fully_shard cannot shard a FullyShardedDataParallel", fix="Use one or the other for a module."
            )
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ArgumentError(f"fully_shard does not support containers that do not implement forward: {module}")


def _resolve_reshard(config: UnitConfig, answer: bool | int | None, info: DataParallelMeshInfo) -> UnitConfig:
    """Return a unit's settings after applying the argument `reshard_after_forward`."""
    if answer is None:
        return config
    if not isinstance(answer, int):
        raise ArgumentError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {answer}"
        )
    if info.shard_mesh_dim is None:
        return config
    size = info.mesh.size(info.shard_mesh_dim)
    if not isinstance(answer, bool):
        if info.is_spmd_mesh:
            raise UnsupportedArgumentError(
                "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
            )
        if answer < 1 or answer > size or size % answer:
            raise ArgumentError(
                f"If passing reshard_after_forward as an int, it should be a factor of {size}, not {answer}"
            )
        if answer == 1:
            warnings.warn(
                "reshard_after_forward=1 (int) means resharding parameters to world size 1, "
                "instead of reshard_after_forward=True (bool)",
                stacklevel=3,
            )
        if 1 < answer < size:
            return replace(config, post_forward_ranks=answer, keeps_root_unsharded=False)
        answer = answer == size
    return _reshard_or_keep(config, answer)


def _reshard_or_keep(config: UnitConfig, reshards: bool) -> UnitConfig:
    """Return settings for a unit that reshards after forward or not, also as the root."""
    return replace(
        config,
        reshard_after_forward=reshards,
        keeps_unsharded_without_grad=not reshards,
        keeps_root_unsharded=False,
        post_forward_ranks=0,
    )


def _state(module: nn.Module) -> FSDPState | None:
    return get_fsdp_state(module)


fully_shard.state = _state  # type: ignore[attr-defined]


_CLASSES: dict[type, type] = {}


def _sharded_class(original: type) -> type:
    """Return the subclass of `FSDPModule` and an original class, for sharded modules."""
    if original not in _CLASSES:
        body = {"__module__": original.__module__}
        _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), body)
    return _CLASSES[original]


class FSDPModule:
    """Methods that a sharded module gets from the first base of its class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a module with the original class: container slices are not sharded."""
        original: Any = cls.__mro__[2]
        module = original.__new__(original)
        module.__init__(*args, **kwargs)  # not an instance of cls, so Python does not call it
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an independent sharded copy, over the same ranks."""
        self.reshard()
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copy.deepcopy(self._fsdp_state, memo)
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    @compiler_disabled_shallow
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with the parameters unsharded."""
        state: FSDPState = self.__dict__.get(STATE) or self._fsdp_state
        root_state = state.root_state or state.become_root()
        return root_state.run_forward(state.unit, super().__call__, args, kwargs)  # type: ignore[misc]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters; after a failed backward, those from before it."""
        root_state = self._fsdp_state.root_state
        if root_state is not None:
            root_state.recover()
        yield from super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    # -------------------------------------------------------------------------------------------------- inside

    @property
    def _as_module(self) -> nn.Module:
        assert isinstance(self, nn.Module), "the generated class has the original one behind this"
        return self

    @property
    def _fsdp_state(self) -> FSDPState:
        state = get_fsdp_state(self._as_module)
        if state is None:
            raise MisuseError(f"No FSDP state found on {type(self).__name__}")
        return state

    def _get_fsdp_state(self) -> FSDPState:
        return self._fsdp_state

    @property
    def sharding_unit(self) -> FSDPUnit:
        """This module's unit, shared by all modules in one `fully_shard` call."""
        return self._fsdp_state.unit

    @property
    def is_sharding_root(self) -> bool:
        """Return True if this module is a root: it ran before any outer module."""
        state = self._fsdp_state
        return state.root_state is not None and state.root_state.root is state.unit

    def _get_own_root_state(self, called: str) -> RootState | None:
        """Return this root's state; None before its first forward."""
        root_state, unit = self._fsdp_state.root_state, self._fsdp_state.unit
        if root_state is not None and root_state.root is not unit:
            raise StateError(f"{called} must be called on the root FSDP module", where=unit.name)
        return root_state

    def _states(self, recurse: bool) -> list[FSDPState]:
        return fsdp_states_below(self._as_module) if recurse else [self._fsdp_state]

    def _configure(self, change: Callable[[UnitConfig], UnitConfig], *, recurse: bool = False) -> None:
        """Change this module's unit settings; with `recurse`, nested units too."""
        for state in self._states(recurse):
            state.unit.config = change(state.unit.config)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.reshard()
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        unit = self._fsdp_state.unit
        if not unit.params.is_checked_out:
            unit.pull_user_changes()
            for registration in unit.registrations:
                registration.register_sharded()
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict with sharded DTensors as parameters."""
        self.reshard()
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        self._fsdp_state.restore_stored_dtypes(state, self._as_module, prefix)
        return state

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.reshard()
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    # ---------------------------------------------------------------------------------------- full parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters. Collective.

        Nested sharded modules' parameters stay sharded.

        Args:
            async_op: Return before the all-gathers complete; the module's forward waits for them.

        Returns:
            A handle that waits for the all-gathers; None if the parameters are ready.
        """
        state = self._fsdp_state
        handle = UnshardHandle(state.unshard)
        if async_op:
            state.prefetch_unshard()
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Reshard this module's parameters; nested sharded modules stay unchanged."""
        self._fsdp_state.reshard()

    def reset_iter_state(self) -> None:
        """Return to the state before an iteration that raised an exception.

        That iteration's gradients are dropped. The call is optional: the next iteration does the same.
        A `GradientReductionHandle` that was not waited for becomes invalid.

        Raises:
            StateError: This module is not the root.
        """
        root_state = self._get_own_root_state("reset_iter_state")
        if root_state is not None:
            root_state.reset_after_error()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the module reshards its parameters after forward, also as the root.

        Args:
            reshard_after_forward: Whether to reshard the parameters after forward.
            recurse: Also set it for nested sharded modules.

        Raises:
            ArgumentError: `reshard_after_forward` is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ArgumentError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        self._configure(lambda config: _reshard_or_keep(config, reshard_after_forward), recurse=recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether the module reshards its parameters after backward.

        Args:
            reshard_after_backward: Whether to reshard; if not, parameters stay unsharded for the next forward.
            recurse: Also set it for nested sharded modules.
        """
        self._configure(lambda config: replace(config, reshard_after_backward=reshard_after_backward), recurse=recurse)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether a reshard keeps the full parameters' memory, for CUDA graphs.

        A graph needs their addresses to stay. Memory that was kept is freed by the first reshard after `keep=False`.

        Args:
            keep: Whether to keep the memory: as many bytes as the full parameters have.
            recurse: Also set it for nested sharded modules.
        """
        for state in self._states(recurse):
            state.set_keep_unsharded_storage(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this module's full parameters.

        An embedding's backward does not.

        Args:
            unshard_in_backward: Whether to unshard the parameters in backward.
        """
        self._configure(lambda config: replace(config, unshard_in_backward=unshard_in_backward))

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules whose all-gathers start while this module computes its forward.

        Args:
            modules: Sharded modules, in all-gather order.

        Raises:
            ArgumentError: A module is not sharded.
        """
        self._fsdp_state.unit.units_to_prefetch[Phase.FORWARD] = [state.unit for state in _fsdp_states(modules)]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules whose all-gathers start while this module computes its backward.

        The default is the module that ran before it in forward.

        Args:
            modules: Sharded modules, in all-gather order.

        Raises:
            ArgumentError: A module is not sharded.
        """
        self._fsdp_state.unit.units_to_prefetch[Phase.PRE_BACKWARD] = [state.unit for state in _fsdp_states(modules)]

    # ---------------------------------------------------------------------------------------------- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the module reduces gradients in backward (gradient accumulation).

        Args:
            requires_gradient_sync: Whether to reduce; if not, gradients are kept for a later backward.
            recurse: Also set it for nested sharded modules.
        """
        on = requires_gradient_sync
        self._configure(lambda config: replace(config, sync_gradients=on, all_reduce=on), recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the module all-reduces gradients over its replicas (HSDP).

        Args:
            requires_all_reduce: Whether to all-reduce; if not, the reduce-scattered gradients are kept for later.
            recurse: Also set it for nested sharded modules.
        """
        self._configure(lambda config: replace(config, all_reduce=requires_all_reduce), recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the optimizer's step.

        Only the last backward waits for its reductions.

        Args:
            is_last_backward: Whether the next backward is the last.
        """
        self._fsdp_state.set_is_last_backward(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether `finalize_backward` ends an iteration, instead of the last backward.

        It then replaces `set_is_last_backward`. Without that call, gradients may stay unreduced.

        Args:
            enabled: Whether `finalize_backward` ends an iteration.

        Raises:
            StateError: This module is not the root, or the iteration's backward has started in the other mode.
        """
        self._get_own_root_state("set_manual_backward_finalization")
        self._fsdp_state.set_manual_backward_finalization(enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that wait, reshard, and end the iteration. Collective.

        Call it after an iteration's backwards if `set_manual_backward_finalization` is on. Gradients wait for it
        if synchronization was off in their backward and is on now, or if no module input requires gradients.
        Before the first forward it does nothing.

        Args:
            async_op: Return without waiting for the reductions. The gradients may be used, and a forward may run, only
                after the handle's `wait()`.

        Returns:
            A handle that waits for the reductions; None if the gradients are ready.

        Raises:
            StateError: This module is not the root, manual finalization is off, or a backward is running or failed.
                Also if another handle was not waited for, or the all-reduce over replicas is off.
        """
        root_state = self._get_own_root_state("finalize_backward")
        handle = root_state.finalize_backward() if root_state is not None else GradientReductionHandle()
        if async_op:
            return handle
        handle.wait()
        return None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor for summed gradients, which replaces the number of ranks.

        Args:
            factor: Divides the sum.
        """
        self._configure(lambda config: replace(config, gradient_divide_factor=factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`; use that method instead."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only sum, and the engine divides separately.

        Args:
            enable: Whether collectives only sum.
        """
        self._configure(lambda config: replace(config, force_sum_reduction=enable))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether a parameter that no rank used gets zeros as gradient, not None.

        A parameter that some ranks used always gets the mean; the other ranks contribute zeros.

        Args:
            reduce_scatter_unused_params: Whether such a parameter gets zeros.
            recurse: Also set it for nested sharded modules.
        """
        on = reduce_scatter_unused_params
        self._configure(lambda config: replace(config, reduce_scatter_unused_params=on), recurse=recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set the maximum number of concurrent reduce-scatters; each holds a buffer.

        Args:
            max_input_buffers: Maximum number of input buffers, at least 1.
            recurse: Also set it for nested sharded modules.

        Raises:
            SettingTypeError: `max_input_buffers` is not an int.
            ArgumentError: `max_input_buffers` is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise SettingTypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ArgumentError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._configure(
            lambda config: replace(config, reduce_scatter_max_input_buffers=max_input_buffers), recurse=recurse
        )

    # -------------------------------------------------------------------------------------------- collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Replace this module's all-gather by a custom collective.

        A device with streams calls it with `async_op=False` on the engine's stream, as torch does; a CPU with
        `async_op=True`. Buckets with several dtypes are one `uint8` message.

        Args:
            comm: The custom all-gather.

        Raises:
            ArgumentError: The module's parameters are on several meshes.
        """
        collectives = self._one_group("set_custom_all_gather")
        collectives.set_comms(replace(collectives.comms, all_gather=comm))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Replace this module's reduce-scatter by a custom collective.

        `async_op` and errors are as for `set_custom_all_gather`.

        Args:
            comm: The custom reduce-scatter.
        """
        collectives = self._one_group("set_custom_reduce_scatter")
        collectives.set_comms(replace(collectives.comms, reduce_scatter=comm))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Stream | None = None) -> None:
        """Set a hook that changes reduced gradients before the optimizer uses them.

        Args:
            hook: Changes its argument in place: this rank's shard of the gradients, a 1-D tensor.
            stream: Stream that the hook runs on; None for the reduction's stream.

        Raises:
            ArgumentError: The parameters are on several meshes, or a stream is given for a module with replicas.
        """
        collectives = self._one_group("set_all_reduce_hook")
        if stream is not None and any(group.replicas > 1 for group in collectives.groups):
            raise ArgumentError("stream cannot be set when using native HSDP")
        hook = hook if stream is None else _run_on_stream(stream, hook)
        collectives.set_comms(replace(collectives.comms, all_reduce_hook=hook))

    def _one_group(self, called: str) -> UnitCollectives:
        """Return the unit's collectives; refuse a unit with parameters on several meshes."""
        state = self._fsdp_state
        if len(state.collectives.groups) > 1:
            raise ArgumentError(
                f"{called} is not supported with multiple param groups (from per-param mesh via shard_placement_fn): "
                "it would be ambiguous across groups with different meshes",
                where=state.unit.name,
            )
        return state.collectives

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether reduce-scatters have their own process group. Collective at first.

        The first call that enables it creates the group. Reduce-scatters can then run at the same time as all-gathers.

        Args:
            enable: Whether reduce-scatters use their own process group.
            recurse: Also set it for nested sharded modules.
        """
        for state in self._states(recurse):
            state.collectives.set_separate_reduce_scatter_group(enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether the process group (NCCL only) allocates collective buffers.

        Where NCCL cannot allocate on the device, a warning says so and the setting has no effect.

        Args:
            enable: Whether the process group allocates them.

        Raises:
            MisuseError: Custom collectives are set; they allocate their buffers themselves.
            BackendError: The backend is not NCCL.
        """
        self._refuse_custom_comms("set_allocate_memory_from_process_group()")
        state = self._fsdp_state
        collectives = state.collectives
        if not enable:
            collectives.set_comms(replace(collectives.comms, all_gather=None, reduce_scatter=None))
            return
        groups = [group.shard for group in collectives.groups if group.shard is not None]
        if len(groups) != 1 or not any("nccl" in name for name in collectives.backends):
            self._refuse_backend("a process group allocator")
        if allocator(groups[0], state.device) is None:
            warnings.warn("NCCL cannot allocate buffers on this device: torch allocates them", stacklevel=2)
            return
        gather, scatter = PooledAllGather(groups[0]), PooledReduceScatter(groups[0])
        collectives.set_comms(replace(collectives.comms, all_gather=gather, reduce_scatter=scatter))

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Use symmetric memory for all-gathers (NCCL only).

        Args:
            backend: Backend for the symmetric memory.

        Raises:
            MisuseError: Custom collectives are set; they allocate their buffers themselves.
            BackendError: The process group's backend does not support symmetric memory.
        """
        self._refuse_custom_comms("set_symm_mem()")
        self._refuse_backend(f"symmetric memory ({backend}), which this version does not support,")

    def _refuse_custom_comms(self, called: str) -> None:
        comms = self._fsdp_state.collectives.comms
        for kind, custom in (("all gather", comms.all_gather), ("reduce scatter", comms.reduce_scatter)):
            if custom is not None and not isinstance(custom, (PooledAllGather, PooledReduceScatter)):
                raise MisuseError(f"cannot call {called} when {kind} comm is custom: {type(custom).__name__}")

    def _refuse_backend(self, wanted: str) -> None:
        raise BackendError(
            f"{wanted} is not available",
            where=self._fsdp_state.unit.name,
            found=self._fsdp_state.collectives.backends,
            expected="nccl",
            fix="Remove this setting; it only changes speed.",
        )

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the root's next all-gathers wait for an event only, not for queued work.

        Args:
            event: Event recorded after the optimizer's step; used once.
        """
        self._fsdp_state.set_post_optim_event(event)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: all-gathers are always asynchronous. Kept for torch's API."""


ShardedModule.register(FSDPModule)


def _run_on_stream(stream: Stream, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a hook that runs on a stream."""

    def run(gradient: torch.Tensor) -> None:
        here = get_current_stream(gradient.device)
        stream.wait_stream(here)
        with use_stream(stream, gradient.device):
            hook(gradient)
        here.wait_stream(stream)

    return run


def _fsdp_states(modules: Iterable[Any]) -> list[FSDPState]:
    states = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ArgumentError(f"Expects FSDPModule but got {type(module)}: {module}")
        states.append(module._fsdp_state)
    return states


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method unshard the module as its forward does, for both front ends.

    Args:
        module: Sharded module; any other module stays unchanged.
        method_name: Method name.

    Raises:
        ArgumentError: The module does not have this method.
    """
    if not isinstance(module, ShardedModule):
        return
    if not hasattr(module, method_name):
        raise ArgumentError(f"{type(module)} does not have a method {method_name}")
    if is_wrapper(module):
        wrapper: Any = module
        wrapper.register_forward_method(method_name)
        return
    bound = getattr(module, method_name)
    method = getattr(bound, "__func__", None)

    @functools.wraps(bound)
    def gathered(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        function = bound if method is None else functools.partial(method, self)  # bind to the copy, not to the original
        state = self._fsdp_state
        return (state.root_state or state.become_root()).run_forward(state.unit, function, args, kwargs)

    setattr(module, method_name, MethodType(gathered, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Share the collectives' streams among roots. Roots on one device always do.

    Args:
        modules: Sharded modules.

    Raises:
        ArgumentError: A module is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ArgumentError(f"Expects list of FSDPModules but got {module}")


_CONTRACT = "torch.distributed._composable.contract"


def register_fully_shard(module: nn.Module) -> None:
    """Record in torch's registry that `fully_shard` sharded a module."""
    # The registry is private to torch and is not imported here. Nothing is recorded if no composable torch API was
    # imported, or if this version of torch does not have a registry.
    contract = sys.modules.get(_CONTRACT)
    key, item = getattr(contract, "REGISTRY_KEY", None), getattr(contract, "RegistryItem", None)
    if isinstance(key, str) and item is not None:
        module.__dict__.setdefault(key, OrderedDict())["fully_shard"] = item()


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def allocator(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a group's backend that can allocate on a device; None without one."""
    try:
        backend = group._get_backend(device)
        return backend if backend.supports_tensor_alloc(device) else None
    except (RuntimeError, AttributeError):  # no backend for the device, or one without an allocator
        return None


class _Allocating:
    """Collective whose buffers the process group's backend allocates."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer that the backend sends without a copy."""
        backend = allocator(self._group, device)
        if backend is None:
            return torch.empty(*size, dtype=dtype, device=device)
        buffer: torch.Tensor = backend.allocate_tensor(prod(size), dtype=dtype, device=device)
        return buffer.view(*size)


class PooledAllGather(_Allocating, AllGather):
    """All-gather with buffers from the backend."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill the output with all ranks' inputs."""
        work: dist.Work | None = _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class PooledReduceScatter(_Allocating, ReduceScatter):
    """Reduce-scatter with buffers from the backend."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill the output with this rank's shard of the sum."""
        work: dist.Work | None = _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work
