"""Traverse modules, and access the parameters registered on them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any
from weakref import WeakSet
from weakref import ref as weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from shardckpt.errors import UsageError

# The wrapper's attribute for the wrapped module; removed from every FQN that the engine returns.
WRAPPED = "_fsdp_wrapped_module"

_SEGMENTS = (WRAPPED, "_checkpoint_wrapped_module", "_orig_mod")
_INCOMPATIBLE: WeakSet[nn.Module] = WeakSet()

Stop = Callable[[nn.Module], bool]


def clean_tensor_name(name: str) -> str:
    """Return a parameter's or buffer's FQN without the segments that wrappers add.

    These are FSDP, `checkpoint_wrapper` and `torch.compile`.

    Args:
        name: FQN as `named_parameters` gives it.
    """
    if not any(segment in name for segment in _SEGMENTS):
        return name
    return ".".join(part for part in name.split(".") if part not in _SEGMENTS)


clean = clean_tensor_name  # the short name within this package


def mark_incompatible(module: nn.Module) -> None:
    """Exclude a module and its submodules from the engine, like a DDP module."""
    _INCOMPATIBLE.add(module)


def is_incompatible(module: nn.Module) -> bool:
    """Return True if something other than the engine manages a module's parameters."""
    kind: Any = type(module)  # mypy confuses the class with its instances here
    return isinstance(module, DistributedDataParallel) or module in _INCOMPATIBLE or _is_of_torch(kind)


@lru_cache(maxsize=1024)
def _is_of_torch(kind: type[nn.Module]) -> bool:
    homes = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed._replicate")
    return any(base.__module__.startswith(homes) for base in kind.__mro__)


class Name:
    """A unit's name in messages: first its class, later its FQN below the root."""

    def __init__(self, text: str) -> None:
        self.text = text

    def become(self, text: str) -> None:
        """Change the name."""
        self.text = text

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class ParamLocation:
    """Module and attribute where a parameter is registered (torch: `ParamModuleInfo`)."""

    module: nn.Module
    attribute: str
    fqn: str  # from the unit's module

    @cached_property
    def is_plain(self) -> bool:
        """True if the module registers parameters exactly as `nn.Module` does."""
        return type(self.module).__setattr__ is nn.Module.__setattr__


class Identity:
    """Mark that a parameter keeps when sharded, to recognize shared parameters."""

    def __init__(self) -> None:
        self._owner: weakref[object] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Identity:
        """Return a new identity, for a copied parameter that is not sharded yet."""
        copied = memo[id(self)] = Identity()
        return copied

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as an empty value: a loaded parameter is not known to any unit."""
        # `torch.load` reads this with `weights_only`, and also without this package.
        return OrderedDict, ()

    @property
    def held(self) -> bool:
        """Return True if a unit that still exists has sharded the parameter."""
        return self._owner is not None and self._owner() is not None

    def hold(self, owner: object | None) -> None:
        """Set the unit that has sharded the parameter; None if it is not sharded."""
        self._owner = weakref(owner) if owner is not None else None


_ORDER = itertools.count()
_IDENTITY = "_shardckpt_identity"


def is_held(parameter: nn.Parameter) -> bool:
    """Return True if a unit has sharded a parameter."""
    mark: Any = parameter.__dict__.get(_IDENTITY)
    return isinstance(mark, Identity) and mark.held


def identity(parameter: nn.Parameter) -> Identity:
    """Return a parameter's identity; the first call creates it."""
    mark: Any = parameter.__dict__.get(_IDENTITY)
    if isinstance(mark, Identity):
        return mark
    new = parameter.__dict__[_IDENTITY] = Identity()
    return new


@dataclass(eq=False)
class ParamInfo:
    """Parameter that a unit manages, with all its locations (torch: `ParamInfo`)."""

    original: nn.Parameter | None  # the user's object; None after `forget`
    # The first location's FQN is the parameter's.
    places: list[ParamLocation] = field(default_factory=list)
    identity: Identity = field(init=False)  # also valid after `forget`
    # Increases in the order of `named_parameters` within a unit.
    order: int = field(default_factory=lambda: next(_ORDER))

    def __post_init__(self) -> None:
        assert self.original is not None, "a parameter is managed from its original on"
        self.identity = identity(self.original)

    def restore(self, value: torch.Tensor) -> nn.Parameter:
        """Register a full value at every location again, in the user's object if kept."""
        if self.original is None or type(self.original.data) is not type(value.data):
            self.replace(nn.Parameter(value, requires_grad=value.requires_grad))
        assert self.original is not None
        self.original.grad = None
        self.original.data = value.data
        self.identity.hold(None)
        for place in self.places:
            setattr(place.module, place.attribute, self.original)
        return self.original

    @property
    def parameter(self) -> nn.Parameter:
        """The user's object; an error after `forget`."""
        assert self.original is not None, "only original parameters are kept"
        return self.original

    def replace(self, parameter: nn.Parameter) -> None:
        """Replace the user's object by another one, without registering it."""
        parameter.__dict__[_IDENTITY] = self.identity
        self.original = parameter

    def forget(self) -> None:
        """Drop the user's object and its memory; it is not registered anymore."""
        self.original = None

    @property
    def fqn(self) -> str:
        """FQN from the unit's module."""
        return self.places[0].fqn


def walk(module: nn.Module, stop: Stop, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield `(name, module)` depth first, without modules that match `stop` and their submodules."""
    # Shared modules are yielded under each of their names.
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not stop(child):
            yield from walk(child, stop, f"{prefix}.{name}" if prefix else name)


def managed_parameters(module: nn.Module, exempt: set[nn.Parameter]) -> list[ParamInfo]:
    """Return a module's distinct parameters, in the order of `named_parameters`."""
    managed: dict[nn.Parameter, ParamInfo] = {}
    for prefix, owner in walk(module, is_incompatible):
        for name, parameter in owner._parameters.items():
            if parameter is None or parameter in exempt or identity(parameter).held:
                continue  # shared with a unit that has sharded it: left to the unit above both
            fqn = clean(f"{prefix}.{name}" if prefix else name)
            require_initialized(fqn, parameter)
            entry = managed.setdefault(parameter, ParamInfo(parameter))
            if not any(p.module is owner and p.attribute == name for p in entry.places):
                entry.places.append(ParamLocation(owner, name, fqn))
    # Inside `ties_below`, the unit above manages a parameter that is shared with an outer module.
    expected = _TIES.get()
    return [entry for entry in managed.values() if len(entry.places) >= expected.get(entry.parameter, 1)]


_TIES: ContextVar[Mapping[nn.Parameter, int]] = ContextVar("ties", default=MappingProxyType({}))


def _places(module: nn.Module) -> dict[nn.Parameter, set[tuple[int, str]]]:
    places: dict[nn.Parameter, set[tuple[int, str]]] = {}
    for _, owner in walk(module, is_incompatible):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, set()).add((id(owner), name))
    return places


@contextmanager
def ties_below(module: nn.Module) -> Iterator[None]:
    """Make units below `module` leave shared parameters to the unit above all users."""
    if _TIES.get():
        yield
        return
    token = _TIES.set({parameter: len(places) for parameter, places in _places(module).items() if len(places) > 1})
    try:
        yield
    finally:
        _TIES.reset(token)


def parameters_below(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return all parameters in modules and in their submodules."""
    return {parameter for module in modules for parameter in module.parameters()}


def put(place: ParamLocation, value: torch.Tensor) -> None:
    """Make `value` a module's attribute without registering it."""
    module, name = place.module, place.attribute
    if place.is_plain:
        module.__dict__[name] = value
        return
    module._parameters.pop(name, None)
    setattr(module, name, value)  # recurrent layers keep lists of their weights and watch their attributes
    if name in module._parameters:
        module._parameters.pop(name)
        module.__dict__[name] = value


def register(place: ParamLocation, value: nn.Parameter) -> None:
    """Register `value` as a module's parameter, in the parameter's old position."""
    if place.is_plain:
        place.module._parameters[place.attribute] = value
    else:
        setattr(place.module, place.attribute, value)


def find_user_param(member: ParamInfo, registered: nn.Parameter, leaf: nn.Parameter) -> nn.Parameter | None:
    """Return the parameter that a user registered instead of a managed one, or None."""
    for place in member.places:
        current = place.module._parameters.get(place.attribute)
        if current is not None and current is not registered and current is not leaf:
            return current
    return None


def require_initialized(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError if a tensor belongs to a lazy module without a forward: it has no shape."""
    if is_lazy(tensor):
        what = "this tensor of a lazy module has no shape yet"
        raise UsageError(what, where=name, found=type(tensor).__name__, fix="Run one forward first.")
