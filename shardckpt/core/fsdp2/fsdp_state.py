"""One `fully_shard` call's state: its unit, options and root."""

from __future__ import annotations

import copy
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core import materialize
from shardckpt.core.comm.collectives import CustomCollectives, ShardGroup
from shardckpt.core.config import Precision, UnitConfig
from shardckpt.core.errors import ArgumentError, StateError
from shardckpt.core.modules.autograd_hooks import compiler_disabled
from shardckpt.core.modules.fqn_and_params import (
    Identity,
    Name,
    ParamInfo,
    clean,
    identity,
    is_held,
    is_incompatible,
    managed_parameters,
    ties_below,
    walk,
)
from shardckpt.core.params.mesh_placement import (
    DataParallelMeshInfo,
    MeshPlacement,
    ShardPlacementFn,
    accept_torch_results,
    place_param,
)
from shardckpt.core.params.param_bucket import Bucket, ShardSpec
from shardckpt.core.params.tensor_extension import ExtensionBucket, needs_extension
from shardckpt.core.policies import MixedPrecisionPolicy
from shardckpt.core.registration.base import ParamRegistration
from shardckpt.core.registration.dtensor_params import DTensorRegistration, ExtensionRegistration
from shardckpt.core.runtime import mixed_precision, traversal
from shardckpt.core.runtime.fsdp_unit import FSDPUnit
from shardckpt.core.runtime.root_state import RootState

STATE = "_shardckpt_sharded"  # attribute of a module that stores its `FSDPState`


@dataclass(frozen=True)
class FullyShardOptions:
    """One `fully_shard` call's arguments."""

    info: DataParallelMeshInfo
    choose: ShardPlacementFn | None  # returns a parameter's placement; None to shard dimension 0 over the mesh
    ignored: frozenset[nn.Parameter]  # neither sharded nor moved nor reduced
    config: UnitConfig  # the unit's initial settings
    policy: MixedPrecisionPolicy  # may choose dtypes for single parameters


def get_fsdp_state(module: nn.Module) -> FSDPState | None:
    """Return a module's state; None if `fully_shard` was not applied to it."""
    state: FSDPState | None = module.__dict__.get(STATE)
    return state


def is_wrapper(module: nn.Module) -> bool:
    """Return True if the module is a unit of the other front end, which wraps modules."""
    return isinstance(module, traversal.ShardedModule) and get_fsdp_state(module) is None


def find_wrappers(module: nn.Module) -> list[Any]:
    """Return the wrappers in a module."""
    return [each for each in module.modules() if is_wrapper(each)]


def fsdp_states_below(module: nn.Module) -> list[FSDPState]:
    """Return the distinct states below and including a module, outer ones first."""
    states = [get_fsdp_state(child) for child in module.modules()]
    return list(dict.fromkeys(state for state in states if state is not None))


class UnitCollectives:
    """A unit's custom collectives and process groups; kept when the unit is rebuilt."""

    def __init__(self) -> None:
        self.comms = CustomCollectives()
        self._is_separate = False
        self._unit: FSDPUnit | None = None

    def attach(self, unit: FSDPUnit) -> None:
        """Set the unit, and apply the collectives that the user set before."""
        self._unit = unit
        if self.comms != CustomCollectives():
            self.set_comms(self.comms)
        if self._is_separate:
            self.set_separate_reduce_scatter_group(True)

    @property
    def _buckets(self) -> list[Bucket]:
        assert self._unit is not None, "a unit was attached"
        return self._unit.buckets

    @property
    def groups(self) -> list[ShardGroup]:
        """Distinct shard groups in the unit's buckets; replicated parameters have none."""
        return list(dict.fromkeys(bucket.group for bucket in self._buckets if bucket.group.shard is not None))

    @property
    def backends(self) -> list[str]:
        """The groups' backend names, such as "gloo"."""
        return sorted({dist.get_backend(group.shard) for group in self.groups})

    def set_comms(self, comms: CustomCollectives) -> None:
        """Set all custom collectives in the unit."""
        self.comms = comms
        for bucket in self._buckets:
            bucket.set_collectives(comms=comms)

    def set_separate_reduce_scatter_group(self, on: bool) -> None:
        """Set whether gradients have their own process group. Collective at first."""
        self._is_separate = on
        for bucket in self._buckets:
            if bucket.group.shard is not None:
                scatter = _group_for_reduce(bucket.group.shard) if on else None
                bucket.set_collectives(group=replace(bucket.group, scatter=scatter))


class FSDPState:
    """The common unit and root for the modules in one `fully_shard` call."""

    def __init__(self, modules: Sequence[nn.Module], options: FullyShardOptions) -> None:
        self.unit: FSDPUnit
        self.modules = tuple(modules)
        self._options = options
        self.collectives = UnitCollectives()
        self.root_state: RootState | None = None
        self._is_last_backward = True
        self._is_finalized_manually = False
        self._keeps_unsharded_storage = False
        self._param_dtypes: dict[Identity, torch.dtype | None] = {}
        module = self._one_module
        owners: dict[FSDPUnit, FSDPState] = {nested.unit: nested for nested in fsdp_states_below(module)}
        reopened = [owners[unit] for unit in traversal.restore_shared_units(module, list(owners))]
        with ties_below(module):
            for state in reopened:
                state._set_unit(state._build_unit(state.unit.config))
            self._set_unit(self._build_unit(options.config))
        for module in self.modules:
            module.__dict__[STATE] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPState:
        """Return a copy, which does not have a root yet."""
        copied = object.__new__(FSDPState)
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = None if name == "root_state" else copy.deepcopy(value, memo)
        return copied

    # ------------------------------------------------------------------------------------------------- the unit

    @property
    def _one_module(self) -> nn.Module:
        """The only module, or a `ModuleList` with several modules."""
        return self.modules[0] if len(self.modules) == 1 else nn.ModuleList(self.modules)

    @property
    def _excluded_params(self) -> set[nn.Parameter]:
        exempt = set(self._options.ignored)
        for state in fsdp_states_below(self._one_module):
            if state is not self:
                exempt |= {
                    p for registration in state.unit.registrations for p in registration.parameters
                } | state._options.ignored
        for wrapper in find_wrappers(self._one_module):
            exempt.update(wrapper.parameters())
        return exempt

    def _set_unit(self, unit: FSDPUnit) -> None:
        self.unit = unit
        self.collectives.attach(unit)
        self.set_keep_unsharded_storage(self._keeps_unsharded_storage)

    def set_keep_unsharded_storage(self, keep: bool) -> None:
        """Set whether a reshard keeps the full parameters' memory; kept when the unit is rebuilt."""
        self._keeps_unsharded_storage = keep
        for bucket in self.unit.buckets:
            bucket.unsharded.keeps_storage = keep

    def _build_unit(self, config: UnitConfig) -> FSDPUnit:
        managed = managed_parameters(self._one_module, self._excluded_params)
        name = Name(", ".join(type(module).__name__ for module in self.modules))
        choose = accept_torch_results(self._options.choose)
        sets: dict[tuple[Any, ...], list[tuple[ParamInfo, MeshPlacement]]] = {}
        for member in managed:
            placement = place_param(member.fqn, member.parameter, self._options.info, choose)
            alone = id(member) if needs_extension(placement.local(member.parameter)) else None
            key = (
                member.parameter.dtype,
                member.parameter.requires_grad,
                id(placement.info),
                placement.dim is None,
                self._get_precision(member, config),
                alone,
            )
            sets.setdefault(key, []).append((member, placement))
        _check_meshes([placement for members in sets.values() for _, placement in members])
        self._move(managed)
        registrations = [self._build_registration(name, members, config) for members in sets.values()]
        buffers = mixed_precision.Buffers(self._own_modules())
        return FSDPUnit(name, self.modules, registrations, config, buffers, self.device)

    def _get_precision(self, member: ParamInfo, config: UnitConfig) -> Precision:
        """Return a parameter's dtypes; the policy chooses once, also if the unit is rebuilt."""
        if member.identity not in self._param_dtypes:
            self._param_dtypes[member.identity] = self._options.policy.resolve_param_dtype(member.fqn, member.parameter)
        return replace(config.precision, param_dtype=self._param_dtypes[member.identity])

    def _own_modules(self) -> list[nn.Module]:
        """Return the distinct submodules that do not belong to a nested unit."""
        nested = {
            module for state in fsdp_states_below(self._one_module) if state is not self for module in state.modules
        }
        below = walk(self._one_module, lambda module: module in nested or is_incompatible(module))
        return list(dict.fromkeys(module for _, module in below))

    def restore_stored_dtypes(self, state: MutableMapping[str, Any], module: nn.Module, prefix: str) -> None:
        """Restore the dtypes that a state dict's buffers had before they were cast."""
        for name, owner in module.named_modules():
            for attribute in owner._buffers:
                key = prefix + (f"{name}.{attribute}" if name else attribute)
                dtype = self.unit.buffers.get_original_dtype(owner, attribute)
                if dtype is not None and key in state:
                    state[key] = state[key].to(dtype)

    def _move(self, managed: Sequence[ParamInfo]) -> None:
        device = self._options.info.device
        buffers = [
            buffer for module in self._own_modules() for buffer in module._buffers.values() if buffer is not None
        ]
        materialize.move_states([member.parameter for member in managed], device)
        materialize.move_states(buffers, device)

    def _build_registration(
        self, name: Name, members: Sequence[tuple[ParamInfo, MeshPlacement]], config: UnitConfig
    ) -> DTensorRegistration:
        placements = tuple(placement for _, placement in members)
        info = placements[0].info
        group = info.group
        if placements[0].dim is None:
            group = ShardGroup(None, _group_of_all_ranks(info))
        count = config.post_forward_ranks
        neighbours = _group_for_slices(group, count) if count and group.shard else None
        spec = ShardSpec(keeps_full=placements[0].dim is None, placements=placements, post_forward_group=neighbours)
        precision = self._get_precision(members[0][0], config)
        kind = ExtensionBucket if needs_extension(placements[0].local(members[0][0].parameter)) else Bucket
        bucket = kind([member for member, _ in members], group, name, spec, precision, config.offload)
        registered = ExtensionRegistration if isinstance(bucket, ExtensionBucket) else DTensorRegistration
        return registered(bucket, name, placements)

    @property
    def device(self) -> torch.device:
        """Device that the unit computes on."""
        return self._options.info.device

    # ------------------------------------------------------------------------------------------------- running

    @compiler_disabled
    def become_root(self) -> RootState:
        """Make this module a root and return the root's state."""
        if len(self.modules) > 1:
            raise StateError(
                f"FSDP requires a single root module but got {[type(module).__name__ for module in self.modules]}",
                fix="Apply fully_shard to a module above them as well, and run that.",
            )
        names: dict[FSDPState, list[str]] = {}
        for name, module in self.modules[0].named_modules():
            state = get_fsdp_state(module)
            if state is not None:
                names.setdefault(state, []).append(clean(name))
        ran = [", ".join(name) for state, name in names.items() if state.root_state is not None]
        if ran:
            raise StateError(
                f"FSDP state has already been lazily initialized for {ran[0]}; "
                "FSDP requires running forward through the root module first",
                where=ran[0],
                fix="Run the outermost module that fully_shard was applied to before those below it.",
            )
        self._refuse_foreign_params(names)
        units = [
            (", ".join(filter(None, name)) or type(state.modules[0]).__name__, state) for state, name in names.items()
        ]
        for name, state in units:
            state.check_materialized(name, names[state][0])
        _refuse_nested_finalization(
            [name for name, state in units if state is not self and state._is_finalized_manually]
        )
        root_state = RootState(self.unit, [(name, state.unit) for name, state in units])
        root_state.reductions.set_is_last_backward(self._is_last_backward)
        root_state.reductions.set_manual(self._is_finalized_manually)
        for state in names:
            state.root_state = root_state
        return root_state

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether a backward waits for its reductions; the root's setting counts."""
        self._is_last_backward = is_last_backward
        if self.root_state is not None:
            self.root_state.reductions.set_is_last_backward(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether `finalize_backward` ends iterations; a root's setting only."""
        if self.root_state is not None:
            self.root_state.reductions.set_manual(enabled)
        self._is_finalized_manually = enabled

    def set_post_optim_event(self, event: Any) -> None:
        """Set the event that the next all-gathers wait for; ignored without a root."""
        if self.root_state is not None:
            self.root_state.shard_writes.set_post_optim_event(event)

    def _refuse_foreign_params(self, known: Iterable[FSDPState]) -> None:
        """Refuse a parameter that another root's unit owns: both would train it."""
        units = [state.unit for state in known]
        units += [wrapper.sharding_unit for wrapper in find_wrappers(self.modules[0])]
        ours = {member.identity for unit in units for member in unit.params.members}  # gathered parameters too
        held = [(name, identity(p)) for name, p in self.modules[0].named_parameters() if is_held(p)]
        strange = [name for name, mark in held if mark not in ours]
        if strange:
            raise StateError(
                "parameters are shared with a module elsewhere, whose unit has sharded them",
                where=type(self.modules[0]).__name__,
                found=[clean(name) for name in strange],
                fix="Apply fully_shard to a module above all that use them, and run that.",
            )

    def check_materialized(self, name: str, below: str = "") -> None:
        """Raise StateError for meta parameters, or for offloaded parameters that are not on the CPU."""
        for registration in self.unit.registrations:
            if registration.bucket.compute_device.type == "meta":
                _set_compute_device(registration)
        self.unit.bind_extensions()
        exposed = [
            (member.fqn, parameter)
            for registration in self.unit.registrations
            for member, parameter in zip(registration.bucket.members, registration.parameters, strict=True)
        ]
        scope = materialize.ModuleScope.collect(self._one_module, self._is_elsewhere, self._options.ignored)
        materialize.refuse_meta(scope, name, below)
        away = [(fqn, parameter.device) for fqn, parameter in exposed if parameter.device.type != "cpu"]
        if away and self.unit.config.offload.enabled:
            raise StateError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading",
                where=name,
                found=[(fqn, str(device)) for fqn, device in away],
                fix='Load a CPU state dict, or call module.to_empty(device="cpu").',
            )

    def _is_elsewhere(self, module: nn.Module) -> bool:
        return is_incompatible(module) or get_fsdp_state(module) not in (None, self)

    def prefetch_unshard(self) -> None:
        """Start the unit's all-gathers; works without a root. Collective."""
        self._attach()
        self.unit.prefetch_unshard()

    def unshard(self) -> None:
        """Unshard the unit; works without a root. Collective."""
        self._attach()
        self.unit.unshard()

    def reshard(self) -> None:
        """Reshard the unit."""
        if self.unit.root is not None:
            self.unit.reshard()

    def _attach(self) -> None:
        if self.unit.root is None:
            RootState(self.unit, [(self.unit.name, self.unit)])


def _refuse_nested_finalization(names: Sequence[str]) -> None:
    if names:
        raise StateError("set_manual_backward_finalization must be called on the root FSDP module", found=names)


def _check_meshes(placements: Sequence[MeshPlacement]) -> None:
    """Refuse two meshes with the same ranks: they would make two buckets by mistake."""
    seen: dict[ShardGroup, DataParallelMeshInfo] = {}
    for placement in placements:
        first = seen.setdefault(placement.info.group, placement.info)
        if first is not placement.info:
            raise ArgumentError(
                "Params sharing the same process group must use the same FSDPMeshInfo object, "
                f"but got different objects: {first} vs {placement.info}"
            )


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def _group(purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group for a purpose and ranks. Collective on the first call."""
    world = dist.group.WORLD
    assert world is not None, "a mesh has been made, so there is a world"
    groups = _GROUPS.setdefault(world, {})
    if (purpose, ranks) not in groups:
        groups[purpose, ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[purpose, ranks]


def _group_for_slices(group: ShardGroup, count: int) -> dist.ProcessGroup | None:
    """Return the group for all-gathers in backward; None for the full shard group."""
    if group.shard is None or count in (0, group.size):
        return None
    ranks = dist.get_process_group_ranks(group.shard)
    first = group.rank // count * count
    return _group("slices", tuple(ranks[first : first + count]))


def _group_for_reduce(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return _group("reduce", tuple(dist.get_process_group_ranks(group)))


def _group_of_all_ranks(info: DataParallelMeshInfo) -> dist.ProcessGroup | None:
    """Return the process group that averages gradients of replicated parameters."""
    group = info.group
    if group.shard is None or group.replicate is None:
        return group.shard or group.replicate
    return _group("everyone", tuple(info.mesh.mesh.flatten().tolist()))


def _set_compute_device(registration: ParamRegistration) -> None:
    """Set the compute device after a load with `assign=True` replaced meta tensors."""
    registration.pull_user_changes()  # register the tensors that the load assigned
    bucket = registration.bucket
    if not bucket.shard.is_meta:
        ranks = bucket.group.shard or bucket.group.replicate
        bucket.set_compute_device(materialize.default_device(ranks) if ranks is not None else bucket.shard.device)
