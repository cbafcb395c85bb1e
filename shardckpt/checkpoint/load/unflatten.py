"""Nests as they were saved: put together from paths, looked into by path, filled with the arrays that were read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shardckpt.checkpoint.stateful.flatten import TensorRef
from shardckpt.checkpoint.stateful.stateful import revived
from shardckpt.errors import UnsupportedError
from shardckpt.format.encodings.pickle_stubs import Dtype, InstanceStub
from shardckpt.format.encodings.tagged_json import NamedValue
from shardckpt.manifest import Path, dotted


class ForeignValue:
    """A value of another format, looked at when somebody wants it."""

    def __init__(self, value: object, path: Path) -> None:
        self.value, self.path = value, path

    def plain(self, skipped: list[Path] | None = None) -> Any:
        """Return it as plain values.

        Args:
            skipped: Gets the paths of entries of dicts that only their own library knows, which are left out.

        Raises:
            UnsupportedError: It is, or holds, something that only its own library knows.
        """
        return _plain(self.value, self.path, skipped)


def put(root: dict[Any, Any], path: Path, value: Any) -> None:
    """Put a value where its path says; nothing happens below another value."""
    for key in path[:-1]:
        root = root.setdefault(key, {})
        if not isinstance(root, dict):
            return  # a value lies above another: the one above holds it already
    if path:
        root[path[-1]] = value


def with_lists(nest: Any) -> Any:
    """Turn dicts that were lists into lists again; numbers of an optimizer's parameters stay what they are."""
    if not isinstance(nest, dict):
        return nest
    made = {key: with_lists(value) for key, value in nest.items()}
    if "param_groups" in nest and isinstance(nest.get("state"), dict):
        made["state"] = {key: with_lists(slots) for key, slots in nest["state"].items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[at] for at in range(len(made))]
    return made


def find(nest: Any, path: Path) -> tuple[Any, bool]:
    """Return what lies at a path of a nest, and whether anything does."""
    found = nest
    for key in path:
        if isinstance(found, dict):
            match = next((k for k in _spellings(key, found) if k in found), found)
            if match is found:
                return None, False
            found = found[match]
        elif type(found) in (list, tuple) and isinstance(key, int) and 0 <= key < len(found):
            found = found[key]
        else:
            return None, False
    return found, True


def arrays_in(nest: Any) -> Iterator[TensorRef]:
    """Yield the arrays of a nest."""
    if isinstance(nest, TensorRef):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from arrays_in(value)
    elif type(nest) in (list, tuple):
        for value in nest:
            yield from arrays_in(value)


def filled(nest: Any, made: Mapping[Path, torch.Tensor], skipped: list[Path] | None = None) -> Any:
    """Return a nest with its arrays, and values as plain ones.

    Args:
        nest: The nest.
        made: The arrays.
        skipped: Gets the paths of entries of dicts that only their own library knows, which are left out.

    Raises:
        UnsupportedError: It holds something that only its own library knows, and nothing is to be left out.
    """
    if isinstance(nest, TensorRef):
        return made[nest.path].numpy() if nest.kind == "numpy" else made[nest.path]
    if isinstance(nest, ForeignValue):
        return nest.plain(skipped)
    if isinstance(nest, dict):
        rows = ((key, lambda each=each: filled(each, made, skipped), _path_of(each)) for key, each in nest.items())
        return type(nest)(_readable(rows, skipped))
    if type(nest) in (list, tuple):
        return type(nest)(filled(value, made, skipped) for value in nest)
    return nest


def _path_of(value: Any) -> Path:
    return value.path if isinstance(value, ForeignValue) else ()


def _readable(
    rows: Iterable[tuple[Any, Callable[[], Any], Path]], skipped: list[Path] | None
) -> Iterator[tuple[Any, Any]]:
    """Yield keys with their values; what cannot be read is left out if it is at a path of its own."""
    for key, read, path in rows:
        try:
            value = read()
        except UnsupportedError:
            if skipped is None or not path:
                raise
            skipped.append(path)
        else:
            yield key, value


def _plain(value: Any, path: Path, skipped: list[Path] | None) -> Any:
    if isinstance(value, dict):
        rows = (
            (key, lambda each=each, at=(*path, str(key)): _plain(each, at, skipped), (*path, str(key)))
            for key, each in value.items()
        )
        return dict(_readable(rows, skipped))
    if type(value) in (list, tuple):
        return type(value)(_plain(each, (*path, at), skipped) for at, each in enumerate(value))
    if isinstance(value, Dtype):
        return revived(NamedValue("dtype", value.name))
    if isinstance(value, InstanceStub) or type(value).__module__.startswith("shardckpt."):
        raise UnsupportedError("this value can only be read by what wrote it", where=dotted(path), found=repr(value))
    return value


def _spellings(key: Any, found: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the keys that a part of a path may stand for."""
    yield key
    if isinstance(key, str):
        yield from (each for each in found if type(each) not in (str, int) and str(each) == key)
