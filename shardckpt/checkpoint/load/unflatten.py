"""State trees: build them from paths, look values up by path, fill in the arrays that were read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shardckpt.checkpoint.stateful.flatten import TensorRef
from shardckpt.checkpoint.stateful.stateful import from_named_value
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


def find(tree: Any, path: Path) -> tuple[Any, bool]:
    """Return the value at a path of a tree, and whether there is one."""
    value = tree
    for key in path:
        if isinstance(value, dict):
            match = next((k for k in _spellings(key, value) if k in value), value)
            if match is value:
                return None, False
            value = value[match]
        elif type(value) in (list, tuple) and isinstance(key, int) and 0 <= key < len(value):
            value = value[key]
        else:
            return None, False
    return value, True


def iter_refs(tree: Any) -> Iterator[TensorRef]:
    """Yield the arrays of a tree."""
    if isinstance(tree, TensorRef):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from iter_refs(value)
    elif type(tree) in (list, tuple):
        for value in tree:
            yield from iter_refs(value)


def fill_tree(tree: Any, tensors: Mapping[Path, torch.Tensor], skipped: list[Path] | None = None) -> Any:
    """Return a tree with its arrays, and values as plain ones.

    Args:
        tree: The tree.
        tensors: The arrays.
        skipped: Gets the paths of entries of dicts that only their own library knows, which are left out.

    Raises:
        UnsupportedError: It holds something that only its own library knows, and nothing is to be left out.
    """
    if isinstance(tree, TensorRef):
        return tensors[tree.path].numpy() if tree.kind == "numpy" else tensors[tree.path]
    if isinstance(tree, ForeignValue):
        return tree.plain(skipped)
    if isinstance(tree, dict):
        rows = (
            (key, lambda item=item: fill_tree(item, tensors, skipped), _get_path(item)) for key, item in tree.items()
        )
        return type(tree)(_readable(rows, skipped))
    if type(tree) in (list, tuple):
        return type(tree)(fill_tree(value, tensors, skipped) for value in tree)
    return tree


def _get_path(value: Any) -> Path:
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
            (key, lambda item=item, at=(*path, str(key)): _plain(item, at, skipped), (*path, str(key)))
            for key, item in value.items()
        )
        return dict(_readable(rows, skipped))
    if type(value) in (list, tuple):
        return type(value)(_plain(item, (*path, at), skipped) for at, item in enumerate(value))
    if isinstance(value, Dtype):
        return from_named_value(NamedValue("dtype", value.name))
    if isinstance(value, InstanceStub) or type(value).__module__.startswith("shardckpt."):
        raise UnsupportedError("this value can only be read by what wrote it", where=dotted(path), found=repr(value))
    return value


def _spellings(key: Any, mapping: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the keys that a part of a path may stand for."""
    yield key
    if isinstance(key, str):
        yield from (spelling for spelling in mapping if type(spelling) not in (str, int) and str(spelling) == key)
