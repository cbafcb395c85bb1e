"""Parameters and buffers before sharding: materialize, move and broadcast them."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.errors import ArgumentError, MeshDeviceError, StateError
from shardckpt.core.modules.fqn_and_params import Stop, clean
from shardckpt.core.runtime import traversal
from shardckpt.devices import wait_for_deferred_copies
from shardckpt.ranks.torch_group import current_device

BUCKET_BYTES = 250 * 2**20  # per broadcast in `sync_module_states`; a larger tensor has its own broadcast

_EARLY: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class ModuleScope:
    """Modules whose parameters and buffers one unit prepares before sharding."""

    modules: Mapping[nn.Module, str]  # distinct, breadth first, with their FQNs from the unit's module
    exempt: Set[nn.Parameter]  # parameters in these modules that do not belong to the unit

    @classmethod
    def collect(cls, module: nn.Module, stop: Stop, exempt: Set[nn.Parameter]) -> ModuleScope:
        """Collect a module and its submodules, without modules that match `stop` and everything below them."""
        names, waiting = {module: ""}, deque([module])
        while waiting:
            current = waiting.popleft()
            for name, child in current.named_children():
                if child not in names and not stop(child):
                    names[child] = f"{names[current]}.{name}" if names[current] else name
                    waiting.append(child)
        return cls({current: clean(name) for current, name in names.items()}, exempt)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters, each parameter once."""
        seen: set[nn.Parameter] = set(self.exempt)
        for module, prefix in self.modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in seen:
                    seen.add(parameter)
                    yield f"{prefix}.{name}" if prefix else name, parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers."""
        for module, prefix in self.modules.items():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and parameters, then names and buffers."""
        yield from self.parameters()
        yield from self.buffers()

    def on_meta(self) -> list[str]:
        """Return the names of parameters and buffers on the meta device."""
        return [name for name, tensor in self.states() if tensor.is_meta]


# ------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Initializer:
    """Materializes modules on the meta device: allocates and initializes their states."""

    # The user's function, called with each module; None for `to_empty` and `reset_parameters`.
    function: Callable[[nn.Module], None] | None
    device: torch.device  # for the new memory
    values_matter: bool = True  # False if another rank broadcasts its values

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise ArgumentError(f"Expected {self.function} to be callable but got {type(self.function)}")

    def run(self, scope: ModuleScope) -> None:
        """Materialize the modules on the meta device; shared parameters stay shared."""
        if _deferred(scope) and self.function is None:
            _run_deferred(scope)
        elif scope.on_meta() or _deferred(scope):
            self._each({m: name for m, name in scope.modules.items() if m not in _EARLY or _has_meta(m)}, scope)
        left = scope.on_meta()
        if left:
            raise StateError(
                "parameters or buffers are still on the meta device after initialisation",
                found=left,
                fix="Call module.to_empty(device=..., recurse=False) in param_init_fn for every module it is given, "
                "non-persistent buffers included.",
            )

    def run_early(self, scope: ModuleScope) -> None:
        """Materialize modules that share parameters before nested units separate them."""
        shared = {module for places in _shared(scope) for module, _ in places}
        if shared:
            self._each({m: name for m, name in scope.modules.items() if m in shared}, scope)
            _EARLY.update(shared)

    def _each(self, modules: Mapping[nn.Module, str], scope: ModuleScope) -> None:
        ties = _shared(scope)
        with torch.no_grad():
            for module, name in modules.items():
                if self.function is not None:
                    self.function(module)
                elif _has_meta(module):
                    self._reset(module, name)
        for (first, attribute), *others in ties:
            kept = getattr(first, attribute)
            for module, name in others:
                setattr(module, name, kept)

    def _reset(self, module: nn.Module, name: str) -> None:
        was_meta = {key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        module.to_empty(device=self.device, recurse=False)
        before = {key: (module._buffers[key], module._buffers[key]._version) for key in was_meta}  # type: ignore[union-attr]
        try:
            module.reset_parameters()  # type: ignore[operator]
        except BaseException as error:
            warnings.warn(
                f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that "
                f"your module {name or 'at the root'} of type {type(module)} implements a `reset_parameters()` method.",
                stacklevel=6,
            )
            raise
        unset = [key for key, (was, at) in before.items() if module._buffers[key] is was and was._version == at]  # type: ignore[union-attr]
        lost = [f"{name}.{key}" if name else key for key in unset if key in module._non_persistent_buffers_set]
        if lost and self.values_matter:
            raise StateError(
                "a non-persistent buffer on the meta device was not initialized, and no checkpoint contains it",
                where=type(module).__name__,
                found=lost,
                fix="Initialize it in reset_parameters(), or pass a param_init_fn that does.",
            )


def _has_meta(module: nn.Module) -> bool:
    states = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in states)


def _shared(scope: ModuleScope) -> list[list[tuple[nn.Module, str]]]:
    """Return each shared parameter's locations on the meta device."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in scope.modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places.setdefault(parameter, []).append((module, name))
    return [locations for locations in places.values() if len(locations) > 1]


def _deferred(scope: ModuleScope) -> bool:
    """Return True if torchdistX deferred parameters: they have no memory, but their device is not meta."""
    if "torchdistx" not in sys.modules:  # never imported, so it did not defer anything
        return False
    is_fake = import_module("torchdistx.fake").is_fake
    return not scope.on_meta() and any(is_fake(parameter) for _, parameter in scope.parameters())


def _run_deferred(scope: ModuleScope) -> None:
    root = next(iter(scope.modules))
    import_module("torchdistx.deferred_init").materialize_module(root, check_fn=lambda m: m in scope.modules)


def refuse_meta(scope: ModuleScope, unit: str, below: str = "") -> None:
    """Refuse to compute with parameters or buffers on the meta device."""
    parameters, buffers = (
        [f"{below}.{name}" if below else name for name, tensor in states if tensor.is_meta]
        for states in (scope.parameters(), scope.buffers())
    )
    if parameters or buffers:
        raise StateError(
            "FSDP parameters should be materialized from meta device before training, "
            f"but the following were still on meta device: {parameters}"
            + (f" and buffers {buffers}" if buffers else ""),
            where=unit,
            fix="Call module.to_empty(device) and reset_parameters(), or load a checkpoint and set other buffers.",
        )


# ------------------------------------------------------------------------------------------------------- device


def resolve_device(device_id: int | torch.device | None, rank: int) -> torch.device | None:
    """Return the device for the argument `device_id`: a device, or an accelerator index."""
    if device_id is None:
        return None
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(device_id)
    if device.type != "cpu" and device.index is None:
        current = current_device(device.type)
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an explicit index. "
            f"FSDP will use the current device {current}",
            stacklevel=4,
        )
        return current
    return device


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Return the default device for parameters: the current accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # gloo cannot send accelerator tensors
    if accelerator is None or set(dist.get_backend_config(group).replace(",", ":").split(":")[1::2]) == {"gloo"}:
        return torch.device("cpu")
    return current_device(accelerator.type, group)


def move(scope: ModuleScope, device: torch.device | None) -> None:
    """Move a unit's parameters and buffers to its compute device; None leaves them on their devices."""
    where: dict[torch.device, str] = {}
    for name, parameter in scope.parameters():
        where.setdefault(parameter.device, name)
    found = ", ".join(f"{name} on {at}" for at, name in where.items())
    if len(where) == 2 and torch.device("cpu") in where and device is None:
        raise StateError(
            "to support a module with both CPU and GPU params, device_id is needed",
            found=found,
            fix="Please pass in device_id argument.",
        )
    if len([at for at in where if at.type != "cpu"]) > 1:
        raise StateError("FSDP only supports single device modules", found=f"params on several: {found}")
    if device is None:
        if torch.device("cpu") in where and torch.accelerator.is_available():
            warnings.warn(
                "The passed-in `module` is on CPU, where it is sharded and will compute unless it is moved; pass "
                "`device_id` to have it moved before",
                stacklevel=5,
            )
        return
    other = [at for at in where if at.type != "cpu" and at != device]
    if other:
        raise ArgumentError(f"Inconsistent compute device and `device_id`: {other[0]} vs {device}", found=found)
    move_states((tensor for _, tensor in scope.states()), device)


def move_states(states: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move tensors to a device in place; tensors on the meta device stay there."""
    for tensor in states:
        if tensor.device == device or tensor.is_meta:
            continue
        if isinstance(tensor, DTensor):
            raise MeshDeviceError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh",
                found=tensor.device_mesh.device_type,
                expected=device.type,
            )
        with torch.no_grad():
            if is_traceable_wrapper_subclass(tensor):
                moved = tensor.to(device)
                torch.utils.swap_tensors(tensor, _like(tensor, moved))
                continue
            tensor.data = tensor.to(device)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.to(device)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


# ------------------------------------------------------------------------------------------------------- values


def sync_module_states(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Broadcast parameters and buffers from a group's rank 0. Collective.

    Call it before the module is sharded. Tensors may be on any device; non-persistent buffers are sent too. For a
    DTensor the local tensor is sent: over the given group, or by default over its mesh's replicated dimensions.

    Args:
        module: Module that is not sharded yet.
        process_group: Ranks that receive the values; None for all ranks.

    Raises:
        ArgumentError: The group's ranks hold different shards of a parameter.
    """
    _refuse_flat(module)
    group = process_group if process_group is not None else dist.group.WORLD
    plain: list[torch.Tensor] = []
    for name, tensor in _named_states(module):
        if not isinstance(tensor, DTensor):
            plain.append(tensor)
        elif process_group is None:
            _sync_replicas(tensor)
        else:
            _refuse_parts(clean(name), tensor, process_group)
            plain.append(tensor.to_local())
    broadcast(plain, ShardGroup(group))


def _refuse_flat(module: nn.Module) -> None:
    for unit in traversal.units(module):
        if any(
            not isinstance(parameter.data, DTensor)
            for registration in unit.registrations
            for parameter in registration.parameters
        ):
            raise ArgumentError(
                "ranks with different shards of a flat parameter cannot be synchronized",
                where=f"unit {unit.name}",
                fix="Give sync_module_states=True to FullyShardedDataParallel, or call this before it.",
            )


def _named_states(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _sync_replicas(tensor: DTensor) -> None:
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            broadcast([tensor.to_local()], ShardGroup(tensor.device_mesh.get_group(dim)))


def _refuse_parts(name: str, tensor: DTensor, group: dist.ProcessGroup) -> None:
    ranks = set(dist.get_process_group_ranks(group))
    for dim, placement in enumerate(tensor.placements):
        sharing = set(dist.get_process_group_ranks(tensor.device_mesh.get_group(dim)))
        if isinstance(placement, Shard) and len(ranks & sharing) > 1:
            raise ArgumentError(
                "ranks with different shards of a DTensor cannot be synchronized",
                where=name,
                found=f"{placement} over ranks {sorted(sharing)}",
                fix="Call sync_module_states before fully_shard, or pass a group of replicas.",
            )


def broadcast(states: Iterable[torch.Tensor], group: ShardGroup) -> None:
    """Broadcast rank 0's values to its replicas, then to the shard group; meta tensors are skipped. Collective."""
    wait_for_deferred_copies()
    with torch.no_grad():
        for bucket in _buckets(_plain(tensor.detach()) for tensor in states if not tensor.is_meta):
            flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([tensor.reshape(-1) for tensor in bucket])
            group.broadcast(flat)
            at = 0
            for tensor in bucket:
                part = flat[at : at + tensor.numel()]
                if part.data_ptr() != tensor.data_ptr():
                    tensor.copy_(part.view(tensor.shape))
                at += tensor.numel()


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    inner: list[Any] = [getattr(tensor, name) for name in names]
    return [plain for part in inner if isinstance(part, torch.Tensor) for plain in _plain(part)]


def _buckets(states: Iterable[list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Yield buckets of tensors with one dtype and device, in an order that ranks share."""
    # A bucket fits into one broadcast, or has a single larger tensor.
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in (each for some in states for each in some):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for tensors in kinds.values():
        bucket: list[torch.Tensor] = []
        held = 0
        for tensor in tensors:
            if bucket and held + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
            bucket.append(tensor)
            held += tensor.nbytes
        yield bucket
