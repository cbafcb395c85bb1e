"""NumPy's arrays and numbers in pickles: from their stubs, without calling a function that the pickle names."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from shardckpt.encodings.pickle_stubs import InstanceStub

if TYPE_CHECKING:
    from typing import Any

    import numpy as np

_PLAIN = re.compile(r"b1|[iuf][1248]|c8|c16")  # types of elements that have no fields, no objects and no text

_ORDERS = {"C": False, "F": True}


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
