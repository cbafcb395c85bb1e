"""Run the `state_dict` methods and hooks in a model's modules on states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import nn

from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.state.adapters.model_index import ModelIndex, below

# Methods and hooks from these modules are skipped: states here already have their results.
_OWN_MODULES = ("torch.", "shardckpt.")

_QUANTIZED = "torch.ao."  # classes in these modules have weights that are neither parameters nor buffers

_EXTRA_STATE = "_extra_state"

_BARE: ContextVar[bool] = ContextVar("bare", default=False)


def is_bare() -> bool:
    """Return True while a state's tensors are registered; wrappers then do nothing."""
    return _BARE.get()


def run_save_hooks(index: ModelIndex, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the save methods and hooks in a model's modules on a state."""
    if not any(_has_save_hooks(module) for module in index.root.modules()):
        return values
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    with _register_tensors(index, tensors):
        state = index.root.state_dict()
    return {clean(name).removeprefix(_get_outer_prefix(index.root)): value for name, value in state.items()}


def run_load_hooks(index: ModelIndex, values: Mapping[str, Any]) -> dict[str, Any]:
    """Run the load methods and hooks in a model's modules on a state, without loading."""
    if not values or not any(_has_load_hooks(module) for module in index.root.modules()):
        return dict(values)
    shells = {
        entry.name: nn.Parameter(torch.empty(entry.shape, dtype=entry.dtype, device="meta"), requires_grad=False)
        for entry in index.entries.values()
    }
    full: dict[str, torch.Tensor] = {name: shells[index.aliases.get(name, name)] for name in index.places}
    full |= {buffer.name: torch.empty_like(buffer.value, dtype=buffer.dtype, device="meta") for buffer in index.buffers}
    unexpected: list[str] = []
    with _register_tensors(index, full):
        _load(index.root, {name: value for name, value in values.items() if name not in index.extra}, "", unexpected)
        changed = {name: now for name, now in _iter_registered(index) if now is not full[name]}
    left = [name for name in values if name in full or name in index.extra or name in unexpected]
    return {**{name: values[name] for name in left}, **changed}


def find_unsaved(index: ModelIndex | None) -> list[str]:
    """Return names that modules add to `state_dict()`, and for which a checkpoint has no place."""
    if index is None or index.flats:
        return []  # modules may have views of flat parameters, which are not there now
    found: dict[str, None] = {}
    for name, module in index.root.named_modules():
        found |= dict.fromkeys(clean(f"{name}.{key}" if name else key) for key in _list_added(module))
    return [*found]


def find_quantized(index: ModelIndex | None) -> frozenset[str]:
    """Return parameters that need values for which a checkpoint has no place, such as bitsandbytes' scales."""
    if index is None or index.flats:
        return frozenset()  # as above
    found = set()
    for name, module in index.root.named_modules():
        added = _list_added(module)
        for key, parameter in module._parameters.items() if added else ():
            is_packed = parameter is not None and not (parameter.is_floating_point() or parameter.is_complex())
            if is_packed or any(each.startswith(f"{key}.") for each in added):
                found.add(clean(f"{name}.{key}" if name else key))
    return frozenset(index.aliases.get(name, name) for name in found)


def _list_added(module: nn.Module) -> list[str]:
    """Return the names that a module adds to its parameters, buffers and extra state."""
    adds_own = _overrides(module, "_save_to_state_dict") or type(module).__module__.startswith(_QUANTIZED)
    if not (adds_own or _overrides(module, "state_dict")):
        return []
    made: Mapping[str, Any] = {}
    if next(module.parameters(), None) is None:
        made, known = module.state_dict(), {name for name, _ in module.named_buffers(remove_duplicate=False)}
    else:
        # With parameters, `state_dict()` may gather; only the module's own `_save_to_state_dict` is asked.
        known = {*module._parameters, *module._buffers}
        if adds_own:
            with suppress(Exception):  # it may need parameters that are not sharded
                module._save_to_state_dict(made, "", False)
    return [name for name in made if name not in known and not name.endswith(_EXTRA_STATE)]


def _is_users(function: Any) -> bool:
    return not str(getattr(function, "__module__", "")).startswith(_OWN_MODULES)


def _overrides(module: nn.Module, *names: str) -> bool:
    own = vars(module)
    kind: Any = type(module)  # mypy confuses the class with its instances here
    return _class_overrides(kind, names) or any(name in own and _is_users(own[name]) for name in names)


@cache
def _class_overrides(kind: type[nn.Module], names: tuple[str, ...]) -> bool:
    return any(name in vars(base) and _is_users(vars(base)[name]) for base in kind.__mro__ for name in names)


def _has_hooks(*hooks: Mapping[int, Any]) -> bool:
    return any(_is_users(getattr(hook, "hook", hook)) for of in hooks for hook in of.values())


def _has_save_hooks(module: nn.Module) -> bool:
    hooks = module._state_dict_hooks, module._state_dict_pre_hooks
    return _overrides(module, "state_dict", "_save_to_state_dict") or _has_hooks(*hooks)


def _has_load_hooks(module: nn.Module) -> bool:
    return _overrides(module, "_load_from_state_dict") or _has_hooks(module._load_state_dict_pre_hooks)


def _get_outer_prefix(root: nn.Module) -> str:
    return "module." if isinstance(root, nn.parallel.DistributedDataParallel) else ""


@contextmanager
def _register_tensors(index: ModelIndex, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Register tensors instead of a model's parameters and buffers inside the context."""
    homes = [
        *index.flats,
        *index.places.values(),
        *((saved_buffer.module, saved_buffer.attribute) for saved_buffer in index.buffers),
    ]
    kept = {id(m): (m, dict(m._parameters), dict(m._buffers), dict[str, Any]()) for m, _ in homes}
    for module, attribute in homes:
        if attribute in module.__dict__:
            kept[id(module)][3][attribute] = module.__dict__.pop(attribute)
    for module, attribute in index.flats:
        module._parameters[attribute] = None
    for name, (module, attribute) in index.places.items():
        module._parameters[attribute] = tensors.get(name)  # type: ignore[assignment]
    for buffer in index.buffers:
        buffer.module._buffers[buffer.attribute] = tensors.get(buffer.name, buffer.value)
    token = _BARE.set(True)
    try:
        yield
    finally:
        _BARE.reset(token)
        for module, parameters, buffers, attributes in kept.values():
            for registered, before in ((module._parameters, parameters), (module._buffers, buffers)):
                registered.clear()
                registered.update(before)  # type: ignore[arg-type]
            module.__dict__.update(attributes)


def _iter_registered(index: ModelIndex) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that are currently registered."""
    for name, (module, attribute) in index.places.items():
        value = module._parameters.get(attribute)
        if value is not None:
            yield name, value if value.is_meta else value.detach()
    for buffer in index.buffers:
        yield buffer.name, buffer.value


def _load(module: nn.Module, values: MutableMapping[str, Any], prefix: str, unexpected: list[str]) -> None:
    """Assign values recursively as torch's `load_state_dict` does; skip mismatches."""
    if not below(module):
        arguments: tuple[dict[str, Any], bool] = ({"assign_to_params_buffers": True}, True)
        module._load_from_state_dict(values, prefix, *arguments, [], unexpected, [])
    for name, child in module._modules.items():
        if child is not None:
            inner = prefix if name in below(module) else f"{prefix}{name}."
            _load(child, {key: value for key, value in values.items() if key.startswith(inner)}, inner, unexpected)
