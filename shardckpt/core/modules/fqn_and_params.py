"""Walks through modules, and what is read and registered at their attributes."""

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

WRAPPED = "_fsdp_wrapped_module"
"""Under this name the wrapper holds the module it wraps; the segment appears in no name that leaves the engine."""

_SEGMENTS = (WRAPPED, "_checkpoint_wrapped_module", "_orig_mod")
_INCOMPATIBLE: WeakSet[nn.Module] = WeakSet()

Stop = Callable[[nn.Module], bool]


def clean(name: str) -> str:
    """Return a dotted name without the segments that wrappers add."""
    if not any(segment in name for segment in _SEGMENTS):
        return name
    return ".".join(part for part in name.split(".") if part not in _SEGMENTS)


def mark_incompatible(module: nn.Module) -> None:
    """Exclude a module and all below it from the engine, as DistributedDataParallel is."""
    _INCOMPATIBLE.add(module)


def is_incompatible(module: nn.Module) -> bool:
    """Return True if the engine ignores a module because something else manages its parameters."""
    kind: Any = type(module)  # mypy takes a class for one of its instances here
    return isinstance(module, DistributedDataParallel) or module in _INCOMPATIBLE or _is_of_torch(kind)


@lru_cache(maxsize=1024)
def _is_of_torch(kind: type[nn.Module]) -> bool:
    homes = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed._replicate")
    return any(base.__module__.startswith(homes) for base in kind.__mro__)


class Name:
    """A unit's name in messages: its class at first, its place below the root once there is one.

    Args:
        text: The first name.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def become(self, text: str) -> None:
        """Take another name."""
        self.text = text

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class ParamLocation:
    """A module and the attribute under which it has a parameter (torch: `ParamModuleInfo`).

    Attributes:
        module: The module that has it.
        attribute: Its name there.
        fqn: Clean name from the unit's module.
    """

    module: nn.Module
    attribute: str
    fqn: str

    @cached_property
    def is_plain(self) -> bool:
        """Whether the module registers parameters as `nn.Module` does, without more that it watches."""
        return type(self.module).__setattr__ is nn.Module.__setattr__


class Identity:
    """Marks that two parameters were one object, even after one of them has been sharded."""

    def __init__(self) -> None:
        self._owner: weakref[object] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Identity:
        """Return the identity of a copied parameter, which no unit has sharded yet."""
        made = memo[id(self)] = Identity()
        return made

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave something empty in a file: a parameter that is loaded is none that a unit knows.

        Everyone can read it, also `torch.load` with `weights_only`, and where this package is not installed.
        """
        return OrderedDict, ()

    @property
    def held(self) -> bool:
        """Return True if a unit that still exists has sharded the parameter."""
        return self._owner is not None and self._owner() is not None

    def hold(self, owner: object | None) -> None:
        """Set the unit that has sharded the parameter; None for none."""
        self._owner = weakref(owner) if owner is not None else None


_ORDER = itertools.count()
_IDENTITY = "_shardckpt_identity"


def is_held(parameter: nn.Parameter) -> bool:
    """Return True if a unit has sharded a parameter."""
    found: Any = parameter.__dict__.get(_IDENTITY)
    return isinstance(found, Identity) and found.held


def identity(parameter: nn.Parameter) -> Identity:
    """Return the identity of a parameter; it has one from the first question on."""
    found: Any = parameter.__dict__.get(_IDENTITY)
    if isinstance(found, Identity):
        return found
    made = parameter.__dict__[_IDENTITY] = Identity()
    return made


@dataclass(eq=False)
class ParamInfo:
    """A parameter that a unit manages, with all its locations (torch: `ParamInfo`).

    Attributes:
        original: The user's object; None once it is let go.
        places: Where it is; the first gives the name.
        identity: Stays when the object is let go.
        order: Parameters of a unit have growing ones, in the order of `named_parameters`.
    """

    original: nn.Parameter | None
    places: list[ParamLocation] = field(default_factory=list)
    identity: Identity = field(init=False)
    order: int = field(default_factory=lambda: next(_ORDER))

    def __post_init__(self) -> None:
        assert self.original is not None, "a parameter is managed from its original on"
        self.identity = identity(self.original)

    def restore(self, value: torch.Tensor) -> nn.Parameter:
        """Register a full value at every place again, in the user's object where it was kept.

        Args:
            value: The full parameter; it is aliased.
        """
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
        """The user's object, as long as it is kept."""
        assert self.original is not None, "only original parameters are kept"
        return self.original

    def replace(self, parameter: nn.Parameter) -> None:
        """Replace the user's object: a plain tensor instead of a DTensor, or back.

        Args:
            parameter: The other one; it is not registered yet.
        """
        parameter.__dict__[_IDENTITY] = self.identity
        self.original = parameter

    def forget(self) -> None:
        """Drop the user's object, which is not registered anymore, and its memory."""
        self.original = None

    @property
    def fqn(self) -> str:
        """Clean name from the unit's module."""
        return self.places[0].fqn


def walk(module: nn.Module, stop: Stop, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield `(name, module)` depth first, shared modules each time they appear, not what `stop` names or below."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not stop(child):
            yield from walk(child, stop, f"{prefix}.{name}" if prefix else name)


def managed_parameters(module: nn.Module, exempt: set[nn.Parameter]) -> list[ParamInfo]:
    """Return the parameters below a module, each once, in the order of `named_parameters`.

    One that is also an attribute outside, as `ties_below` counts, is left for the unit above.

    Args:
        module: The unit's module.
        exempt: Parameters that nested units have, and ignored ones.
    """
    found: dict[nn.Parameter, ParamInfo] = {}
    for prefix, each in walk(module, is_incompatible):
        for name, parameter in each._parameters.items():
            if parameter is None or parameter in exempt or identity(parameter).held:
                continue  # one that is held by a unit elsewhere is its tie, and waits for the unit above both
            fqn = clean(f"{prefix}.{name}" if prefix else name)
            entry = found.setdefault(parameter, ParamInfo(parameter))
            if not any(p.module is each and p.attribute == name for p in entry.places):
                entry.places.append(ParamLocation(each, name, fqn))
    expected = _TIES.get()
    return [entry for entry in found.values() if len(entry.places) >= expected.get(entry.parameter, 1)]


_TIES: ContextVar[Mapping[nn.Parameter, int]] = ContextVar("ties", default=MappingProxyType({}))


def _places(module: nn.Module) -> dict[nn.Parameter, set[tuple[int, str]]]:
    found: dict[nn.Parameter, set[tuple[int, str]]] = {}
    for _, each in walk(module, is_incompatible):
        for name, parameter in each._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, set()).add((id(each), name))
    return found


@contextmanager
def ties_below(module: nn.Module) -> Iterator[None]:
    """Inside, units below `module` leave parameters to the unit that has all users of them below it."""
    if _TIES.get():
        yield
        return
    token = _TIES.set({parameter: len(places) for parameter, places in _places(module).items() if len(places) > 1})
    try:
        yield
    finally:
        _TIES.reset(token)


def parameters_below(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return all parameters of some modules and of everything below them."""
    return {parameter for module in modules for parameter in module.parameters()}


def put(place: ParamLocation, value: torch.Tensor) -> None:
    """Make `value` an attribute of a module without registering it."""
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
    """Make `value` the registered parameter of a module, in its old position."""
    if place.is_plain:
        place.module._parameters[place.attribute] = value
    else:
        setattr(place.module, place.attribute, value)


def find_user_param(member: ParamInfo, registered: nn.Parameter, leaf: nn.Parameter) -> nn.Parameter | None:
    """Return the parameter that a user registered at a location of a managed one, or None."""
    for place in member.places:
        found = place.module._parameters.get(place.attribute)
        if found is not None and found is not registered and found is not leaf:
            return found
    return None
