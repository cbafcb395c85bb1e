"""Values that a function uses: if training changes them and a load does not restore them, the state lacks them."""

from __future__ import annotations

import functools
import inspect
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.stateful.walk import WITH_STATE, LeafKind, find_kind
from shardckpt.witness.digests import digest_random_states, digest_tensors

_MAX_VALUES = 10_000  # maximum values that are looked at: a function may reach all of a program

_MAX_DEPTH = 4

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES = (list, tuple, set, frozenset, deque)
_CONTAINERS = (Mapping, *_SEQUENCES)
_CODE = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)

# Maximum values around an object whose attributes are looked at: nodes of a long chain are in each other.
_MAX_NESTED = 8


def digest_reachable(function: Any) -> dict[str, int]:
    """Return digests of random generators and the values that a function uses, by name and type."""
    # Values are looked at in its closure, in the globals that it names, in functions of the same module that it calls,
    # and in attributes of objects, modules and objects in containers too. Iterators have the digest 0, since their
    # position is unknown.
    found = {f"random state of {name}": digest for name, digest in digest_random_states().items()}
    for name, value in _find_values(function):
        kind = type(value).__name__
        found.setdefault(f"{name} ({kind})", _Hasher().digest(value))
    return found


def _find_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function uses, each object once."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = list(_open_callable(function, "", 0))
    while waiting and len(seen) < _MAX_VALUES:
        name, value, depth = waiting.pop(0)
        if isinstance(value, _CODE) and not isinstance(value, types.FunctionType):
            continue
        if not isinstance(value, _PLAIN):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            if depth < _MAX_DEPTH and _get_module_name(value) == _get_module_name(function):
                waiting.extend(_open_callable(value, name, depth + 1))
        elif _is_digested(value) or depth >= _MAX_DEPTH:
            yield name, value
            if isinstance(value, nn.Module):
                waiting.extend(_module_attributes(value, name, depth))
        else:
            waiting.extend((f"{name}.{key}", item, depth + 1) for key, item in _attributes(value).items())


def _open_callable(function: Any, name: str, depth: int) -> Iterator[tuple[str, Any, int]]:
    if isinstance(function, functools.partial):
        yield name, function.func, depth
        for key, value in (*enumerate(function.args), *function.keywords.items()):
            yield f"{name}.{key}" if name else str(key), value, depth
    elif isinstance(function, types.MethodType):
        yield "self" if not name else name.rpartition(".")[0] or "self", function.__self__, depth
        yield name, function.__func__, depth
    elif isinstance(function, types.FunctionType):
        used = inspect.getclosurevars(function)
        for key, value in {**used.globals, **used.nonlocals}.items():
            yield key, value, depth
    elif hasattr(function, "__wrapped__"):
        yield from _open_callable(inspect.unwrap(function), name, depth)
    else:
        yield name or "self", function, depth
        call = type(function).__call__
        if isinstance(call, types.FunctionType):
            yield from _open_callable(call, name, depth)


def _get_module_name(function: Any) -> str:
    function = function.func if isinstance(function, functools.partial) else function
    return str(getattr(function, "__module__", ""))


_DIGESTED = WITH_STATE | {LeafKind.MODULE, LeafKind.TENSOR, LeafKind.ARRAY}
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _is_digested(value: Any) -> bool:
    return (
        find_kind(value) in _DIGESTED
        or isinstance(value, (*_GENERATORS, *_PLAIN, *_CONTAINERS))
        or hasattr(value, "__next__")
        or not _attributes(value)
    )


def _module_attributes(module: nn.Module, name: str, depth: int) -> Iterator[tuple[str, Any, int]]:
    """Yield attributes in a user's modules that are neither parameters nor buffers, such as an EMA."""
    for path, each in module.named_modules():
        classes = {cls.__module__.partition(".")[0] for cls in type(each).__mro__}
        if not classes <= _LIBRARIES:
            for key, value in vars(each).items():
                if not key.startswith("_") and key != "training":
                    yield ".".join(filter(None, (name, path, key))), value, depth + 1


# Packages whose modules keep no values of a user in attributes.
_LIBRARIES = {"torch", "shardckpt", "builtins", "abc", "typing"}


def _attributes(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


def _get_state(value: Any) -> Any:
    """Return an object's state; None if it has none now, such as a loader that was not iterated."""
    try:
        return value.state_dict()
    except Exception:  # noqa: BLE001  (code of others, which the drill only looks at)
        return None


def _has_elements(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's elements can be read: not if it is meta, sparse or freed."""
    is_dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    return is_dense and (not tensor.numel() or tensor.untyped_storage().nbytes() > 0)


class _Hasher:
    """Digest of one value with everything in it."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()
        self._open: set[int] = set()
        self._looked_into = 0

    def digest(self, value: Any) -> int:
        if hasattr(value, "__next__"):
            return 0
        self._add(value)
        return self._hasher.intdigest()

    def _text(self, text: object) -> None:
        self._hasher.update(f"{text};".encode("utf-8", "replace"))

    def _add(self, value: Any) -> None:
        kind = find_kind(value)
        if isinstance(value, _PLAIN):
            self._text(repr(value))
        elif kind is LeafKind.TENSOR:
            own = value.to_local() if isinstance(value, DTensor) else value
            self._text((own.dtype, tuple(own.shape), digest_tensors([own.detach()]) if _has_elements(own) else ""))
        elif kind is LeafKind.ARRAY:
            self._text((value.dtype, value.shape, value.tobytes() if value.dtype != object else repr(value)))
        elif id(value) not in self._open:
            self._open.add(id(value))
            self._add_object(value, kind)
            self._open.discard(id(value))

    def _add_object(self, value: Any, kind: LeafKind) -> None:
        if kind is LeafKind.MODULE:
            self._add({**dict(value.named_parameters()), **dict(value.named_buffers()), "training": value.training})
        elif kind in WITH_STATE:
            self._add(_get_state(value))
        elif isinstance(value, torch.Generator):
            self._add(value.get_state())
        elif isinstance(value, random.Random):
            self._text(value.getstate())
        elif isinstance(value, np.random.Generator):
            self._text(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            self._text(repr(value.get_state(legacy=False)))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._text(key if isinstance(key, _PLAIN) else "")
                self._add(item)
        elif isinstance(value, _SEQUENCES):
            self._text(len(value))
            for item in value:
                self._add(item)
        elif not isinstance(value, _CODE) and not hasattr(value, "__next__") and len(self._open) <= _MAX_NESTED:
            self._looked_into += 1
            if self._looked_into <= _MAX_VALUES:
                self._add(_attributes(value))
