"""What happens to parameters and buffers before they are sharded: given memory and values, moved, made equal."""

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
from shardckpt.core.errors import ArgumentError, StateError
from shardckpt.core.modules.fqn_and_params import Stop, clean
from shardckpt.core.runtime import traversal

BUCKET_BYTES = 250 * 2**20
"""So many bytes are broadcast at once by `sync_module_states`; a larger tensor travels alone."""

_EARLY: WeakSet[nn.Module] = WeakSet()


class MeshDeviceError(ArgumentError):
    """A DTensor has a mesh of another device type than the mesh to shard on."""


@dataclass(frozen=True)
class ModuleScope:
    """The modules that one unit looks after, before it is sharded.

    Attributes:
        modules: Each once, breadth first, with its clean name from the unit's module.
        exempt: Parameters that are not the unit's, though its modules have them.
    """

    modules: Mapping[nn.Module, str]
    exempt: Set[nn.Parameter]

    @classmethod
    def collect(cls, module: nn.Module, stop: Stop, exempt: Set[nn.Parameter]) -> ModuleScope:
        """Collect a module and those below it.

        Args:
            module: Where to begin.
            stop: Names modules that are left out, with everything below them.
            exempt: Parameters that are not the unit's.
        """
        found, waiting = {module: ""}, deque([module])
        while waiting:
            each = waiting.popleft()
            for name, child in each.named_children():
                if child not in found and not stop(child):
                    found[child] = f"{found[each]}.{name}" if found[each] else name
                    waiting.append(child)
        return cls({each: clean(name) for each, name in found.items()}, exempt)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters, each once."""
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
        """Yield both."""
        yield from self.parameters()
        yield from self.buffers()

    def on_meta(self) -> list[str]:
        """Return the names of what has no memory."""
        return [name for name, tensor in self.states() if tensor.is_meta]


# ------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Initializer:
    """How modules without memory get some.

    Attributes:
        function: The user's, called with each module; None for `to_empty` and `reset_parameters`.
        device: Where the memory is.
        values_matter: Whether what is left unset stays: it does unless another rank sends its values.
    """

    function: Callable[[nn.Module], None] | None
    device: torch.device
    values_matter: bool = True

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise ArgumentError(f"Expected {self.function} to be callable but got {type(self.function)}")

    def run(self, scope: ModuleScope) -> None:
        """Give memory and values to modules that lack them; their ties stay.

        Args:
            scope: The modules.

        Raises:
            StateError: Something has no memory after that, or a buffer that no checkpoint holds has no value.
        """
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
        """Do that for modules that share parameters, before units below could part them.

        Args:
            scope: All modules.
        """
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
                "a non-persistent buffer that was on the meta device got no value, and no checkpoint will hold one",
                where=type(module).__name__,
                found=lost,
                fix="Set it in reset_parameters(), or pass a param_init_fn that does.",
            )


def _has_meta(module: nn.Module) -> bool:
    states = (*module._parameters.values(), *module._buffers.values())
    return any(each is not None and each.is_meta for each in states)


def _shared(scope: ModuleScope) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of parameters without memory that have more than one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in scope.modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places.setdefault(parameter, []).append((module, name))
    return [each for each in places.values() if len(each) > 1]


def _deferred(scope: ModuleScope) -> bool:
    """Return True if torchdistX defers the construction of parameters: they have no memory, but are not meta."""
    if "torchdistx" not in sys.modules:  # without it nobody can have made any
        return False
    is_fake = import_module("torchdistx.fake").is_fake
    return not scope.on_meta() and any(is_fake(parameter) for _, parameter in scope.parameters())


def _run_deferred(scope: ModuleScope) -> None:
    root = next(iter(scope.modules))
    import_module("torchdistx.deferred_init").materialize_module(root, check_fn=lambda m: m in scope.modules)


def refuse_meta(scope: ModuleScope, unit: str, below: str = "") -> None:
    """Refuse to compute with what has no memory.

    Args:
        scope: The unit's modules.
        unit: What the message calls the unit.
        below: The unit's name below the root, empty for the root.

    Raises:
        StateError: There is something.
    """
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
    """Return the device that a user named.

    Args:
        device_id: A device, or the index of one of the accelerator, the CPU without an accelerator; None for
            none named.
        rank: This rank, for the message.
    """
    if device_id is None:
        return None
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(device_id)
    if device.type != "cpu" and device.index is None:
        current = torch.device(device.type, torch.get_device_module(device).current_device())
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an explicit index. "
            f"FSDP will use the current device {current}",
            stacklevel=4,
        )
        return current
    return device


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of parameters if the user named none: the accelerator's current device, or the CPU.

    It is the CPU without an accelerator, and if the group has only gloo for it.

    Args:
        group: The ranks.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or set(dist.get_backend_config(group).replace(",", ":").split(":")[1::2]) == {"gloo"}:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.get_device_module(accelerator).current_device())


def move(scope: ModuleScope, device: torch.device | None) -> None:
    """Bring the states of a unit of the wrapper to the device that it is to compute on.

    Args:
        scope: The unit's modules.
        device: The device; None to leave them where they are.

    Raises:
        StateError: The parameters are on several devices.
        ArgumentError: They are on another device than the one that was asked for.
    """
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
    """Bring tensors to a device, each in its own object; what has no memory stays without.

    Args:
        states: Parameters and buffers.
        device: The device.

    Raises:
        MeshDeviceError: A DTensor has a mesh of devices of another type.
    """
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
    """Broadcast the parameters and buffers of a group's rank 0. Collective.

    To be called before the module is sharded; buffers that are not persistent are sent too, tensors on any device. Of a
    DTensor the local part is sent: over the group that was named, or else over the replicated dimensions of its mesh.

    Args:
        module: The module.
        process_group: The ranks; None for all.

    Raises:
        ArgumentError: The group's ranks hold different parts of a parameter.
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
            not isinstance(each.data, DTensor)
            for registration in unit.registrations
            for each in registration.parameters
        ):
            raise ArgumentError(
                "ranks that hold different parts of a flat parameter cannot be made equal",
                where=f"the unit of {unit.name}",
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
                "ranks that hold different parts of a DTensor cannot be made equal",
                where=name,
                found=f"{placement} over ranks {sorted(sharing)}",
                fix="Call sync_module_states before fully_shard, or name a group of replicas.",
            )


def broadcast(states: Iterable[torch.Tensor], group: ShardGroup) -> None:
    """Broadcast values of rank 0: over the replicas, then over the shard group. Collective.

    Args:
        states: Tensors, of which those without memory are passed over; of a wrapper subclass the tensors inside.
        group: The ranks.
    """
    with torch.no_grad():
        for bucket in _buckets(_plain(each.detach()) for each in states if not each.is_meta):
            flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([each.reshape(-1) for each in bucket])
            group.broadcast(flat)
            at = 0
            for each in bucket:
                part = flat[at : at + each.numel()]
                if part.data_ptr() != each.data_ptr():
                    each.copy_(part.view(each.shape))
                at += each.numel()


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    inner: list[Any] = [getattr(tensor, name) for name in names]
    return [plain for each in inner if isinstance(each, torch.Tensor) for plain in _plain(each)]


def _buckets(states: Iterable[list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one type and device, at most so many bytes of them at once, in an order that all ranks share."""
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
