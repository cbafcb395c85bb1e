"""State trees: build them, look up values by path, and insert arrays; NumPy's arrays and numbers in pickles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.encodings.pickle_stubs import Dtype, InstanceStub, PerRankValue
from shardckpt.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import UNREAD, ObjectEntry, Path, dotted, unflatten
from shardckpt.native.reader import NativeReader
from shardckpt.plan.subclass_record import SUBCLASS
from shardckpt.reader import Reader

if TYPE_CHECKING:
    import numpy as np

# Returns a value of torch or NumPy, such as a dtype, from its kind and text.
DecodeNamed = Callable[[NamedValue], object]

_PLAIN = re.compile(r"b1|[iuf][1248]|c8|c16")  # types of elements that have no fields, no objects and no text

_ORDERS = {"C": False, "F": True}


class TensorRef(NamedTuple):
    """An array's placeholder in a state tree."""

    path: Path
    kind: str = "tensor"  # kind of array: `tensor` or `numpy`


class ForeignValue:
    """Another format's value, which is converted on demand."""

    def __init__(self, value: object, path: Path, decode: DecodeNamed) -> None:
        self.value, self.path, self._decode = value, path, decode

    def plain(self, skipped: list[Path] | None = None) -> Any:
        """Return the value as plain Python values."""
        return _plain(self.value, self.path, skipped, self._decode)


def build_tree(
    reader: Reader,
    arrays: Iterable[Path],
    objects: Mapping[Path, ObjectEntry],
    decode: DecodeNamed,
    rename: Callable[[Path], Path] = lambda path: path,
) -> Any:
    """Return the saved state with `TensorRef` for arrays and `ForeignValue` for other formats' values."""
    if isinstance(reader, NativeReader):
        records = reader.contents.arrays

        def decode_ref(value: ArrayRef | NamedValue) -> object:
            if isinstance(value, NamedValue):
                return decode(value)
            return TensorRef(rename(records[value.number].path), value.kind)

        return reader.decode_state(decode_ref)
    values: dict[Path, Any] = {path: TensorRef(path) for path in arrays}
    for path, entry in objects.items():
        value = reader.load_object(entry) if entry.value is UNREAD else entry.value
        values[rename(path)] = ForeignValue(value, path, decode)
    return unflatten(values, has_lists=True)


def find(tree: Any, path: Path) -> tuple[Any, bool]:
    """Return the value at a path in a tree, and whether it exists."""
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
    """Yield the array placeholders in a tree."""
    if isinstance(tree, TensorRef):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from iter_refs(value)
    elif type(tree) in (list, tuple):
        for value in tree:
            yield from iter_refs(value)


def fill_tree(
    tree: Any,
    get_array: Callable[[TensorRef], object],
    skipped: list[Path] | None = None,
    build: Callable[[dict[Any, Any], Path], object] = lambda inner, _: inner,
) -> Any:
    """Return a tree with arrays instead of their placeholders, and plain values.

    `build` returns a wrapper subclass, from a dict with its record and inner tensors, and its path.
    """
    if isinstance(tree, TensorRef):
        return get_array(tree)
    if isinstance(tree, ForeignValue):
        return tree.plain(skipped)
    if isinstance(tree, dict):
        rows = (
            (key, lambda part=part: fill_tree(part, get_array, skipped, build), _get_path(part))
            for key, part in tree.items()
        )
        filled = type(tree)(dict(_readable(rows, skipped)))
        return build(filled, next((ref.path[:-1] for ref in iter_refs(tree)), ())) if SUBCLASS in filled else filled
    if type(tree) in (list, tuple):
        return type(tree)(fill_tree(value, get_array, skipped, build) for value in tree)
    return tree


def _get_path(value: Any) -> Path:
    return value.path if isinstance(value, ForeignValue | TensorRef) else ()


def _readable(
    rows: Iterable[tuple[Any, Callable[[], Any], Path]], skipped: list[Path] | None
) -> Iterator[tuple[Any, Any]]:
    """Yield keys with values; skip unreadable values that have their own path."""
    for key, read, path in rows:
        try:
            value = read()
        except UnsupportedError:
            if skipped is None or not path:
                raise
            skipped.append(path)
        else:
            yield key, value


def _plain(value: Any, path: Path, skipped: list[Path] | None, decode: DecodeNamed) -> Any:
    if isinstance(value, dict):
        plain_keys = {key if type(key) is str else _plain(key, path, None, decode): part for key, part in value.items()}
        rows = (
            (key, lambda part=part, at=(*path, str(key)): _plain(part, at, skipped, decode), (*path, str(key)))
            for key, part in plain_keys.items()
        )
        return dict(_readable(rows, skipped))
    if type(value) in (list, tuple):
        return type(value)(_plain(part, (*path, at), skipped, decode) for at, part in enumerate(value))
    if isinstance(value, Dtype):
        return decode(NamedValue("dtype", value.name))
    if isinstance(value, PerRankValue):
        raise value.error(dotted(path))
    if (numpy := read_numpy(value)) is not None:
        return numpy
    if isinstance(value, InstanceStub) or type(value).__module__.startswith("shardckpt."):
        raise UnsupportedError("this value can only be read by what wrote it", where=dotted(path), found=repr(value))
    return value


def _spellings(key: Any, mapping: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the keys that a path part may represent."""
    yield key
    if isinstance(key, str):
        yield from (spelling for spelling in mapping if type(spelling) not in (str, int) and str(spelling) == key)


def read_numpy(value: object) -> np.ndarray[Any, Any] | np.generic | None:
    """Return a stub's array or number, with its own memory; None for any other value."""
    # Other values are also subclasses, elements other than plain numbers, and forms that no NumPy writes.
    if not isinstance(value, InstanceStub):
        return None
    module, _, name = value.name.rpartition(".")
    if module not in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"):
        return None
    if name == "scalar" and len(value.args) == 2 and value.state is None:
        kind, data = value.args
        found = _read(data, kind, (), is_by_columns=False)
        return None if found is None else found[()]
    if name == "_frombuffer" and len(value.args) == 4 and value.state is None:
        data, kind, shape, order = value.args
        return _read(data, kind, shape, is_by_columns=_ORDERS.get(order) if isinstance(order, str) else None)
    if (
        name == "_reconstruct"
        and _is_of_arrays(value.args)
        and isinstance(value.state, tuple)
        and len(value.state) == 5
    ):
        _, shape, kind, is_by_columns, data = value.state
        return _read(data, kind, shape, is_by_columns=is_by_columns)
    return None


def _is_of_arrays(args: tuple[object, ...]) -> bool:
    return bool(args) and getattr(args[0], "name", "") == "numpy.ndarray"


def _read(data: object, kind: object, shape: object, *, is_by_columns: object) -> np.ndarray[Any, Any] | None:
    import numpy as np  # noqa: PLC0415  (0.07 s; most files have no arrays)

    dtype = _read_dtype(kind)
    if dtype is None or not isinstance(data, bytes) or not isinstance(shape, tuple) or type(is_by_columns) is not bool:
        return None
    if not all(type(n) is int and n >= 0 for n in shape) or prod(shape) * dtype.itemsize != len(data):
        return None
    try:
        view: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(shape, order="F" if is_by_columns else "C")
    except ValueError:  # more dimensions than NumPy has
        return None
    owned: np.ndarray[Any, Any] = view.copy(order="K")
    return owned


def _read_dtype(kind: object) -> np.dtype[Any] | None:
    import numpy as np  # noqa: PLC0415  (as in `_read`)

    if not isinstance(kind, InstanceStub) or kind.name != "numpy.dtype" or not isinstance(kind.state, tuple):
        return None
    code, order = kind.args[:1], kind.state[1:2]
    if (
        not code
        or not isinstance(code[0], str)
        or not _PLAIN.fullmatch(code[0])
        or order not in (("<",), (">",), ("|",))
    ):
        return None
    return np.dtype(f"{order[0]}{code[0]}")
