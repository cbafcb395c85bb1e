"""`state_dict()` and `load_state_dict()` for wrapped modules, by torch's recursion.

A unit's tensors are registered on its modules during the recursion.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.api import FullStateDictConfig, StateDictSettings, StateDictType
from shardckpt.core.fsdp1.state_dict_api import StateStatics
from shardckpt.core.modules.fqn_and_params import WRAPPED, clean
from shardckpt.core.params.full_params import Staging
from shardckpt.core.registration.flat_param import FlatParamRegistration
from shardckpt.core.registration.orig_params import OrigParamsRegistration
from shardckpt.core.runtime.fsdp_unit import FSDPUnit
from shardckpt.state.adapters.engine_flat import EngineFlatAdapter
from shardckpt.state.adapters.model_index import get_bucket_mesh, get_process_groups, has_mixed_wrapper, index_model
from shardckpt.state.keys.kinds import KEY, StateKind
from shardckpt.state.model import module_hooks
from shardckpt.state.model.model_state_dict import local_metadata, unit_metadata
from shardckpt.state.redistribute.rank_grid import Ranks

_COMPILED = "_orig_mod"  # `torch.compile` has the compiled module under it; removed from every returned FQN

KINDS = {
    StateDictType.FULL_STATE_DICT: StateKind.FULL,
    StateDictType.LOCAL_STATE_DICT: StateKind.LOCAL,
    StateDictType.SHARDED_STATE_DICT: StateKind.SHARDED,
}


def build_adapters(unit: FSDPUnit) -> list[EngineFlatAdapter]:
    """Return a wrapped module's adapters, with FQNs relative to the module."""
    adapters: list[EngineFlatAdapter] = []
    ranks = Ranks.from_groups(get_process_groups(unit))
    for registration in unit.registrations:
        assert isinstance(registration, (FlatParamRegistration, OrigParamsRegistration)), (
            "the wrapper has no other registrations"
        )
        names = [[place.fqn for place in member.places] for member in registration.bucket.members]
        flat_name = registration.home.attribute if isinstance(registration, FlatParamRegistration) else None
        adapters.append(EngineFlatAdapter(registration, names, ranks, get_bucket_mesh(registration.bucket), flat_name))
    return adapters


class _ShownTensors:
    """A state's tensors, to register on a unit's modules for torch's recursion."""

    def __init__(self, adapters: Sequence[EngineFlatAdapter], kind: StateKind, *, first_only: bool = False) -> None:
        self._adapters = adapters
        self._is_local = kind is StateKind.LOCAL
        self.values = [self._of(adapter, kind, first_only) for adapter in adapters]

    @staticmethod
    def _of(adapter: EngineFlatAdapter, kind: StateKind, first_only: bool) -> list[torch.Tensor] | None:
        packed = adapter.packed
        if kind is StateKind.SHARDED:
            return adapter.to_sharded(packed, Staging())
        if kind is StateKind.FULL:
            full = adapter.to_full(packed, Staging(), first_only=first_only)
            return None if full is None else list(full)
        return None if adapter.flat_name is None else [packed[: adapter.unpadded_size]]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Register the tensors inside the context."""
        for adapter, values in zip(self._adapters, self.values, strict=True):
            if values is not None:
                adapter.show(values, is_flat=self._is_local)
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.hide()


def require_distinct_names(module: nn.Module) -> None:
    """Require that no two names become equal without wrapper segments."""
    if has_mixed_wrapper(module):
        index_model(module)


def module_state_dict(
    module: StateStatics,
    unit: FSDPUnit,
    *args: Any,
    destination: MutableMapping[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> MutableMapping[str, Any]:
    """Return the state for a wrapped module and its submodules. Collective. `state_dict_type` sets its kind."""
    given: dict[str, Any] = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
    given.update(zip(given, args, strict=False))
    prefix = given["prefix"]
    if given["destination"] is None:
        empty: Any = OrderedDict()
        empty._metadata = OrderedDict()
        given["destination"] = empty
    if module_hooks.is_bare():
        nn.Module.state_dict(module, **given)
        bare: MutableMapping[str, Any] = given["destination"]
        return bare
    require_distinct_names(module)
    settings = module.state_dict_settings
    kind, config = KINDS[settings.state_dict_type], settings.state_dict_config
    first_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    unit.reshard()
    adapters = build_adapters(unit)
    with _ShownTensors(adapters, kind, first_only=first_only).shown():
        nn.Module.state_dict(module, **given)
    target: MutableMapping[str, Any] = given["destination"]
    _cleaned(target, prefix)
    if kind is StateKind.LOCAL:
        _note_units(target, prefix, adapters)
    if first_only and not Ranks.from_groups(get_process_groups(unit)).is_first:
        for name in [name for name in target if name.startswith(prefix)]:
            del target[name]
        return target
    _finish_state(target, prefix, module, unit, settings)
    return target


def _cleaned(destination: MutableMapping[str, Any], prefix: str) -> None:
    """Remove wrapper segments from names with a prefix; keep their order."""

    def cleaned(name: str) -> str:
        return prefix + clean(name[len(prefix) :]) if name.startswith(prefix) else name

    metadata = getattr(destination, "_metadata", {})
    for mapping in (destination, metadata):
        for name in [name for name in mapping if name.startswith(prefix)]:
            value = mapping.pop(name)
            mapping[cleaned(name)] = value
    note = metadata.get(KEY, {})
    if "units" in note:
        note["units"] = [_rename_unit(unit, cleaned) for unit in note["units"]]


def _note_units(destination: MutableMapping[str, Any], prefix: str, adapters: Sequence[EngineFlatAdapter]) -> None:
    """Add a wrapper's layout to `_metadata`; each wrapper does so."""
    metadata = getattr(destination, "_metadata", None)
    if metadata is None:
        return
    note = metadata.setdefault(KEY, {**local_metadata(), "aliases": {}, "units": []})
    for adapter in adapters:
        unit = _rename_unit(unit_metadata(adapter), lambda name: prefix + clean(name))
        note["units"].append(unit)
        note["aliases"] |= {alias: entry["name"] for entry in unit["entries"] for alias in entry["aliases"]}


def _rename_unit(unit: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a unit's metadata with renamed parameters."""
    entries = [
        {**entry, "name": rename(entry["name"]), "aliases": [rename(alias) for alias in entry["aliases"]]}
        for entry in unit["entries"]
    ]
    flat = unit.get("flat")
    return {**unit, "entries": entries, "flat": flat and rename(flat)}


def _finish_state(
    destination: MutableMapping[str, Any],
    prefix: str,
    module: nn.Module,
    unit: FSDPUnit,
    settings: StateDictSettings,
) -> None:
    """Restore buffers' dtypes, and move tensors to the requested device."""
    for name, owner, attribute in _buffers(module):
        dtype = unit.buffers.get_original_dtype(owner, attribute)
        if dtype is not None and prefix + name in destination:
            destination[prefix + name] = destination[prefix + name].to(dtype)
    if settings.state_dict_config.offload_to_cpu:
        for name, value in destination.items():
            if name.startswith(prefix) and isinstance(value, torch.Tensor):
                destination[name] = value.to("cpu") if isinstance(value, DTensor) else value.cpu()


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, owner in module.named_modules():
        for attribute in owner._buffers:
            yield clean(f"{prefix}.{attribute}" if prefix else attribute), owner, attribute


# ----------------------------------------------------------------------------------------------------- loading


class Loading:
    """A wrapped module's `load_state_dict`, with the unit's tensors registered."""

    def __init__(self, module: StateStatics, unit: FSDPUnit) -> None:
        unit.reshard()
        kind = KINDS[module.state_dict_settings.state_dict_type]
        self._kind = kind
        self._adapters = build_adapters(unit)
        self._shown = _ShownTensors(self._adapters, kind)
        for adapter, values in zip(self._adapters, self._shown.values, strict=True):
            if values is not None:
                parameters = [nn.Parameter(value, requires_grad=False) for value in values]
                adapter.show(parameters, is_flat=kind is StateKind.LOCAL)

    def finish(self) -> None:
        """Store the loaded tensors in the unit. Collective for sharded states."""
        for adapter, values in zip(self._adapters, self._shown.values, strict=True):
            if values is None:
                continue
            loaded = [value.detach() for value in adapter.registered(is_flat=self._kind is StateKind.LOCAL)]
            adapter.hide()  # first, or shown tensors seem to be a user's
            packed = adapter.packed
            with torch.no_grad():
                if self._kind is StateKind.FULL:
                    adapter.from_full(loaded, adapter.part_views(packed))
                elif self._kind is StateKind.SHARDED:
                    adapter.from_sharded(loaded, adapter.part_views(packed), Staging())
                else:
                    packed[: adapter.unpadded_size] = loaded[0]
            adapter.mark_written()

    def abandon(self) -> None:
        """Restore the unit's registered parameters after an exception in the recursion."""
        for adapter in self._adapters:
            adapter.hide()


def _is_any(value: Any, addresses: Sequence[int]) -> bool:
    return isinstance(value, nn.Parameter) and value.numel() > 0 and value.data_ptr() in addresses


def prepare_state(state: MutableMapping[str, Any], prefix: str, unit: FSDPUnit) -> None:
    """Rename a state's keys in place, as torch's recursion needs them: below the wrapper's attribute."""
    flats = [
        registration.flat.data_ptr()
        for registration in unit.registrations
        if isinstance(registration, FlatParamRegistration)
    ]
    for name in [name for name, value in state.items() if name.startswith(prefix) and _is_any(value, flats)]:
        del state[name]
    compiled = list(_find_compiled(unit.modules[0]))
    chosen: dict[str, tuple[str, Any]] = {}
    for name in [name for name in state if name.startswith(prefix)]:
        value, rest = state.pop(name), clean(name[len(prefix) :])
        for place in compiled:
            if rest.startswith(place):
                rest = f"{place}{_COMPILED}.{rest[len(place) :]}"
        if rest not in chosen or len(name) < len(chosen[rest][0]):  # first, or it looks like a user's change
            chosen[rest] = (name, value)
    state.update({f"{prefix}{WRAPPED}.{rest}": value for rest, (_, value) in chosen.items()})


def _find_compiled(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield name prefixes below compiled modules, outside nested wrappers."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if name == _COMPILED:
            yield prefix
            yield from _find_compiled(child, f"{prefix}{_COMPILED}.")
        else:
            yield from _find_compiled(child, f"{prefix}{name}." if clean(name) else prefix)
