"""Index a model by FQN: adapters for its parameters, buffers, extra state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardckpt.core.modules.dtensors import local
from shardckpt.core.modules.fqn_and_params import clean, is_incompatible, require_initialized
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.registration.base import ParamRegistration
from shardckpt.core.registration.dtensor_params import DTensorRegistration
from shardckpt.core.registration.flat_param import FlatParamRegistration
from shardckpt.core.registration.orig_params import OrigParamsRegistration
from shardckpt.core.runtime.fsdp_unit import FSDPUnit
from shardckpt.core.runtime.traversal import ShardedModule, units
from shardckpt.errors import UsageError
from shardckpt.state.adapters.base import Entry, ReplicatedAdapter, ShardingAdapter
from shardckpt.state.adapters.dtensor import DTensorAdapter
from shardckpt.state.adapters.engine_bucket import EngineDTensorAdapter
from shardckpt.state.adapters.engine_flat import EngineFlatAdapter
from shardckpt.state.adapters.flat_shard_check import FlatShards
from shardckpt.state.adapters.name_collision import build_collision
from shardckpt.state.redistribute.rank_grid import Ranks

EXTRA = "_extra_state"


@dataclass(frozen=True)
class Buffer:
    """A model's buffer."""

    name: str  # FQN without wrapper segments
    module: nn.Module  # module that registers the buffer
    attribute: str  # in the module
    persistent: bool  # whether state dicts contain the buffer
    dtype: torch.dtype  # before the engine cast it

    @property
    def value(self) -> torch.Tensor:
        """The current tensor."""
        tensor = self.module._buffers[self.attribute]
        assert tensor is not None
        return tensor

    @property
    def saved_value(self) -> torch.Tensor:
        """The current tensor, detached, in the dtype that state dicts have; a copy only if the engine cast it."""
        value = self.value.detach()
        return value if value.dtype == self.dtype else value.to(self.dtype)


@dataclass(frozen=True)
class ModelIndex:
    """A model's parameters, buffers and extra state by FQN."""

    names: tuple[str, ...]  # all names in the unsharded model's state dict, in its order
    adapters: tuple[ShardingAdapter, ...]
    buffers: tuple[Buffer, ...]  # all buffers, including non-persistent ones
    extra: dict[str, nn.Module]  # modules with `get_extra_state`, by the state's name
    aliases: dict[str, str]  # a shared parameter's other names, each with the first name
    ranks: Ranks
    root: nn.Module  # the model itself
    places: dict[str, tuple[nn.Module, str]]  # module and attribute by parameter name
    flats: tuple[tuple[nn.Module, str], ...]  # flat parameters' modules and attributes

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Entries for all parameters by their first names."""
        return {entry.name: entry for adapter in self.adapters for entry in adapter.entries}

    def describe_unmanaged(self) -> str:
        """Return a warning about trained parameters that no unit manages; empty without them, or without units."""
        parallel = any(isinstance(module, DistributedDataParallel) for module in self.root.modules())
        if self.ranks.size == 1 or parallel or not units(self.root):
            return ""
        plain = (adapter for adapter in self.adapters if isinstance(adapter, ReplicatedAdapter))
        names = [entry.name for adapter in plain for entry in adapter.entries if entry.trains]
        if not names:
            return ""
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        return (
            f"no unit manages {', '.join(names[:10])}{more}: every rank loads them, and trains them by its own "
            "gradients. Shard a module above them, freeze them, or average their gradients."
        )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model that Lightning's Fabric has wrapped, and registers twice; any other model as it is."""
    fabric = model._modules.get("_orig_mod") or model  # compiled after `Fabric.setup`
    if not {"_forward_module", "_original_module"} <= fabric._modules.keys():
        return model
    forward = fabric._modules["_forward_module"]
    assert forward is not None, "Fabric has set it up"
    return forward


def modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their FQNs in the unsharded model, depth first; shared modules under each name."""
    yield prefix, model
    wrapped = below(model)
    for name, child in model._modules.items():
        if child is not None:
            yield from modules(child, prefix if name in wrapped else f"{prefix}.{name}" if prefix else name)


def below(model: nn.Module) -> set[str]:
    """Return a wrapper's attributes for the wrapped module; empty for other modules."""
    is_parallel = isinstance(model, DistributedDataParallel)
    return {name for name in model._modules if not clean(name) or (is_parallel and name == "module")}


@lru_cache(maxsize=1024)
def is_plain_module(kind: type[nn.Module]) -> bool:
    """Return True if an index needs only a class's parameters, buffers and children."""
    homes = ("torch.distributed", "torch.nn.parallel")
    return (
        kind.get_extra_state is nn.Module.get_extra_state
        and not issubclass(kind, ShardedModule)
        and not hasattr(kind, "reshard")
        and not any(base.__module__.startswith(homes) for base in kind.__mro__)
    )


@lru_cache(maxsize=1024)
def is_fully_sharded(kind: type[nn.Module]) -> bool:
    """Return True if a class is a plain one after `fully_shard`, ours or torch's, and nothing else."""
    front_end, original = kind.__mro__[1:3]
    is_of_torch = front_end.__name__ == "FSDPModule" and front_end.__module__.startswith("torch.distributed.")
    return (is_of_torch or issubclass(front_end, ShardedModule)) and is_plain_module(original)


def locate_in_buckets(module: nn.Module) -> tuple[list[nn.Parameter], list[int]] | None:
    """Return a unit's parameters and their offsets in its buckets; None if they are not DTensors."""
    # Offsets are in bytes, and 0 for a parameter without elements on this rank.
    parameters: list[nn.Parameter] = []
    offsets: list[int] = []
    for registration in module.sharding_unit.registrations if isinstance(module, ShardedModule) else ():
        if type(registration) is not DTensorRegistration:
            return None
        registration.pull_user_changes()
        start = registration.bucket.shard.data_ptr()
        for parameter in registration.parameters:
            own = local(parameter)
            parameters.append(parameter)
            offsets.append(own.data_ptr() - start if own.numel() else 0)
    return parameters, offsets


def has_mixed_wrapper(model: nn.Module) -> bool:
    """Return True if a module has a wrapper's attribute and may have others, so that two names may become equal."""
    # A user's subclass of a wrapper may have parameters that are not registered while they are flat.
    return any(
        len(module._modules) + len(module._parameters) + len(module._buffers) > 1
        or not type(module).__module__.startswith(("torch.", "shardckpt.core."))
        for module in model.modules()
        if below(module)
    )


def index_model(model: nn.Module) -> ModelIndex:
    """Index a model that is sharded by the engine or torch, replicated or plain."""
    return _Walk(model).build()


def index_complete_model(model: nn.Module) -> ModelIndex:
    """Index a model; refuse a module inside a wrapper with flat parameters."""
    index = index_model(model)
    plain = [adapter for adapter in index.adapters if isinstance(adapter, ReplicatedAdapter)]
    FlatShards().require_none((adapter.entries[0].name, adapter.exposed[0]) for adapter in plain)
    return index


def reshard_all(model: nn.Module) -> None:
    """Reshard all units, so that the registered parameters are sharded."""
    for unit in units(model):
        unit.reshard()
    for module in model.modules():
        if not isinstance(module, ShardedModule):
            reshard = getattr(module, "reshard", None)
            if reshard is not None and is_incompatible(module):  # sharded by torch's fully_shard
                reshard()


class _Walk:
    """Traverses a model to collect names for its index."""

    def __init__(self, model: nn.Module) -> None:
        self._root = model
        self._units = units(model)
        self._of_place: dict[tuple[int, str], tuple[ParamRegistration, int]] = {}
        self._attributes: dict[int, list[str]] = {}
        self._exposed: set[int] = set()
        for unit in self._units:
            unit.bind_extensions()
            for registration in unit.registrations:
                self._note(registration)
        self._flats: dict[int, str] = {}
        self._homes: list[tuple[nn.Module, str]] = []
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._names: list[str] = []
        self._owners: dict[str, tuple[Any, nn.Module, str]] = {}
        self._known: dict[Any, list[str]] = {}
        self._plain: dict[int, nn.Parameter] = {}
        self._buffers: dict[str, Buffer] = {}
        self._extra: dict[str, nn.Module] = {}
        self._groups = [group for unit in self._units for group in get_process_groups(unit)]
        for prefix, module in modules(model):
            self._visit(f"{prefix}." if prefix else "", module)

    def _note(self, registration: ParamRegistration) -> None:
        self._exposed |= {
            id(parameter) for parameter in (*registration.parameters, *registration.bucket.unsharded.params)
        }
        for index, member in enumerate(registration.bucket.members):
            for place in member.places:
                self._of_place[id(place.module), place.attribute] = (registration, index)
                self._attributes.setdefault(id(place.module), []).append(place.attribute)

    def _visit(self, prefix: str, module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            self._groups.append(module.process_group)
        held = self._attributes.get(id(module), [])
        own = {name: None for name, p in module._parameters.items() if p is not None}
        for attribute in dict.fromkeys([*own, *held]):
            parameter = module._parameters.get(attribute)
            key: Any = self._of_place.get((id(module), attribute))
            if key is None:
                if parameter is None:
                    continue
                if id(parameter) in self._exposed:  # a flat parameter; its members have the names
                    self._flats[id(parameter)] = prefix + attribute
                    self._homes.append((module, attribute))
                    continue
                require_initialized(prefix + attribute, parameter)
                self._plain[id(parameter)] = parameter
                self._groups += _mesh_groups(parameter)
                key = id(parameter)
            self._claim(prefix + attribute, key, module, attribute)
            self._known.setdefault(key, []).append(prefix + attribute)
            self._places[prefix + attribute] = (module, attribute)
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                self._buffer(prefix + attribute, module, attribute, buffer)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._claim(prefix + EXTRA, id(module), module, EXTRA)
            self._extra[prefix + EXTRA] = module

    def _claim(self, name: str, key: Any, module: nn.Module, attribute: str) -> None:
        """Add a state dict's name; the key is equal for the same tensor."""
        self._names.append(name)
        owner = self._owners.setdefault(name, (key, module, attribute))
        if owner[0] != key:
            raise build_collision(self._root, name, owner[1:], (module, attribute))

    def _buffer(self, name: str, module: nn.Module, attribute: str, buffer: torch.Tensor) -> None:
        persistent = attribute not in module._non_persistent_buffers_set
        if persistent:
            require_initialized(name, buffer)
            self._claim(name, id(buffer), module, attribute)
        elif name in self._owners:
            return
        dtypes = (unit.buffers.get_original_dtype(module, attribute) for unit in self._units)
        dtype = next((dtype for dtype in dtypes if dtype is not None), buffer.dtype)
        self._buffers[name] = Buffer(name, module, attribute, persistent, dtype)

    def build(self) -> ModelIndex:
        ranks = Ranks.from_groups(self._groups)
        adapters: list[ShardingAdapter] = [
            self._build_adapter(registration, ranks) for unit in self._units for registration in unit.registrations
        ]
        for key, parameter in self._plain.items():
            first, *others = self._known[key]
            entry = Entry(first, tuple(others), tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            adapter = DTensorAdapter if isinstance(parameter, DTensor) else ReplicatedAdapter
            adapters.append(adapter(entry, parameter, ranks))
        aliases = {name: names[0] for names in self._known.values() for name in names[1:]}
        names, buffers = tuple(dict.fromkeys(self._names)), tuple(self._buffers.values())
        return ModelIndex(
            names,
            tuple(adapters),
            buffers,
            self._extra,
            aliases,
            ranks,
            root=self._root,
            places=self._places,
            flats=tuple(self._homes),
        )

    def _build_adapter(self, registration: ParamRegistration, ranks: Ranks) -> ShardingAdapter:
        members = registration.bucket.members
        gone = [member.fqn for index, member in enumerate(members) if (registration, index) not in self._known]
        if gone:
            raise UsageError(
                "the model lacks parameters that its unit has sharded",
                where=type(self._root).__name__,
                found=gone,
                fix="Replace modules before sharding, or shard a model that is built again.",
            )
        names = [self._known[registration, index] for index in range(len(members))]
        if isinstance(registration, DTensorRegistration):
            return EngineDTensorAdapter(registration, names, ranks)
        assert isinstance(registration, (FlatParamRegistration, OrigParamsRegistration)), (
            "all kinds of registration are known"
        )
        flat_name = self._flats[id(registration.flat)] if isinstance(registration, FlatParamRegistration) else None
        return EngineFlatAdapter(registration, names, ranks, get_bucket_mesh(registration.bucket), flat_name)


def get_process_groups(unit: FSDPUnit) -> list[dist.ProcessGroup | None]:
    """Return the process groups for a unit's shards and replicas."""
    groups: list[dist.ProcessGroup | None] = []
    for registration in unit.registrations:
        groups += [registration.bucket.group.shard, registration.bucket.group.replicate]
        groups += [group for leaf in registration.bucket.unsharded.params for group in _mesh_groups(leaf)]
    return groups


def _mesh_groups(tensor: torch.Tensor) -> list[dist.ProcessGroup]:
    return tensor.device_mesh.get_all_groups() if isinstance(tensor, DTensor) else []


_MESHES: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def get_bucket_mesh(bucket: Bucket) -> DeviceMesh | None:
    """Return a bucket's mesh, sharded along its last dim; None if not sharded."""
    group = bucket.group
    return group.mesh if group.mesh is not None else get_mesh(group.shard, bucket.compute_device)


def get_mesh(group: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh | None:
    """Return a 1-D mesh for a process group; None without a group."""
    if group is None:
        return None
    if group not in _MESHES:
        _MESHES[group] = DeviceMesh.from_group(group, device.type)
    return _MESHES[group]
