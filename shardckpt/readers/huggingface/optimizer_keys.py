"""Parse names of optimizer tensors, and parameter keys in `param_groups.json`.

`param_groups.json` stores which kind of keys it uses out of four; the default is names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardckpt.boxes import full_box, strides
from shardckpt.dtypes import bits, nbytes
from shardckpt.encodings.safetensors import MAX_DIMS
from shardckpt.encodings.tagged_json import decode
from shardckpt.errors import FormatError
from shardckpt.layout import FlatLayout, ParamSpec, from_json
from shardckpt.manifest import Path, Piece, Span, Strided, TensorEntry, dotted
from shardckpt.plan.optim.optim_keys import STATE, split_key

EXACT = "exact"  # key of values that plain JSON cannot represent: pairs of a path in the file and a tagged value

_KEYS, _NESTED = "keys", "nested"
_FLAT_PARAMETERS = "flat-parameters"
_WAYS = ("names", "ids", "flat", _FLAT_PARAMETERS)
_MAX_DIGITS = 18


@dataclass(frozen=True)
class OptimizerFile:
    """Content of `param_groups.json`; the fields that name parameters are checked."""

    keys: str  # kind of keys: `names`, `ids`, `flat` or `flat-parameters`
    groups: object  # groups as stored; for flat parameters, with the names of the unsharded model
    values: object  # state without tensors, by parameter
    names: frozenset[str]  # parameter names in the groups; empty with `ids`
    # Flat parameter to the layout of its members, with `flat-parameters`.
    units: Mapping[str, FlatLayout] = field(default_factory=dict)
    # `units` as stored.
    units_json: object = None
    nested: Mapping[str, Path] = field(default_factory=dict)  # nested slot's name with dots to its keys

    @classmethod
    def from_json(cls, raw: Mapping[str, object], where: str) -> OptimizerFile:
        """Parse the file's content."""
        raw = _decode_exact(raw, where)
        keys, groups, values = raw.get(_KEYS, "names"), raw.get("param_groups", []), raw.get("non_tensor_state", {})
        if keys not in _WAYS:
            raise FormatError("an unknown way to name parameters", where=where, found=keys, expected=", ".join(_WAYS))
        nested = _read_nested(raw.get(_NESTED, {}), where)
        if keys == _FLAT_PARAMETERS:
            return replace(_from_flat_params(raw, groups, values, where), nested=nested)
        if keys == "ids" and isinstance(values, dict):
            values = {_number(key): slots for key, slots in values.items()}
        names = {name for group in _list_params(groups) for name in _params(group) if isinstance(name, str)}
        return cls(str(keys), groups, values, frozenset(names), nested=nested)

    def entries(self, key: str, entry: TensorEntry) -> list[tuple[Path, TensorEntry]]:
        """Return the parameters and slots in a tensor, with the tensor's part for each."""
        name, joined = self.split(key)
        slot = self.nested.get(joined, (joined,))
        layout = self.units.get(name) if isinstance(name, str) else None
        if layout is None:
            return [((name, *slot), entry)]
        if not entry.shape:
            return [((spec.name, *slot), entry) for spec in layout.specs]
        is_span = len(entry.pieces) == 1 and isinstance(entry.pieces[0].layout, Span)
        if entry.shape != (layout.numel,) or bits(entry.stored) % 8 or not is_span:
            raise FormatError(
                "a tensor is not as its flat parameter", where=key, found=entry.shape, expected=layout.numel
            )
        return [
            ((spec.name, *slot), _member(entry, spec, at))
            for spec, at in zip(layout.specs, layout.offsets, strict=True)
        ]

    def split(self, key: str) -> tuple[str | int, str]:
        """Return the parameter and the slot in a tensor's name."""
        if self.keys == "flat":
            return split_key(key.removeprefix(f"{STATE}."), self.names.__contains__)
        name, _, slot = key.rpartition("/")
        return (_number(name) if self.keys == "ids" else name), slot


def _decode_exact(raw: Mapping[str, object], where: str) -> Mapping[str, object]:
    """Insert the values that plain JSON cannot represent at their paths."""
    for pair in _list_params(raw.get(EXACT)):
        path, value = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        inner: object = raw
        for key in path[:-1] if isinstance(path, list) and len(path) == 3 else ():
            inner = _inside(inner, key)
        last = path[-1] if isinstance(path, list) and path else None
        if not isinstance(inner, dict) or inner is raw or not isinstance(last, str) or last not in inner:
            raise FormatError("an exact value belongs nowhere", where=where, found=str(path)[:80])
        inner[last] = decode(value, where=where)
    return raw


def _inside(value: object, key: object) -> object:
    if isinstance(value, list) and type(key) is int and 0 <= key < len(value):
        return value[key]
    return value.get(key) if isinstance(value, dict) and isinstance(key, str) else None


def _from_flat_params(raw: Mapping[str, object], groups: object, values: object, where: str) -> OptimizerFile:
    """Return the file with the unsharded model's names in place of flat parameters."""
    units: dict[str, FlatLayout] = {}
    for unit in _list_params(raw.get("units")):
        fields = unit if isinstance(unit, dict) else {}
        layout, flat = from_json(fields.get("layout")), fields.get("flat")
        if not isinstance(layout, FlatLayout) or not isinstance(flat, str):
            raise FormatError("a flat parameter has no name or no flat layout", where=where, found=str(unit)[:80])
        units[flat] = layout
    names = [spec.name for layout in units.values() for spec in layout.specs]
    if len(set(names)) < len(names) or any(len(s.shape) > MAX_DIMS for u in units.values() for s in u.specs):
        raise FormatError("flat parameters have a member twice, or one with too many dimensions", where=where)
    listed, originals = _list_params(groups), _list_params(raw.get("originals"))
    if len(listed) != len(originals) or not all(isinstance(group, dict) for group in listed):
        raise FormatError("the groups with flat parameters do not list their members", where=where)
    named = [
        {**group, "params": params} for group, params in zip(listed, originals, strict=True) if isinstance(group, dict)
    ]
    spread = {
        name: slots
        for key, slots in (values.items() if isinstance(values, dict) else ())
        for name in ([spec.name for spec in units[key].specs] if key in units else [key])
    }
    return OptimizerFile(_FLAT_PARAMETERS, named, spread, frozenset(names), units, raw.get("units"))


def _member(entry: TensorEntry, spec: ParamSpec, at: int) -> TensorEntry:
    """Return a flat tensor's member."""
    piece = entry.pieces[0]
    assert isinstance(piece.layout, Span), "safetensors are spans"
    span = Span(piece.layout.offset + nbytes(entry.stored, at), nbytes(entry.stored, spec.numel))
    layout: Span | Strided = span
    if spec.order:
        steps = dict(zip(spec.order, strides(spec.memory_shape), strict=True))
        layout = Strided(span.offset, span.nbytes, 0, tuple(steps[dim] for dim in range(len(spec.shape))))
    return TensorEntry(entry.path, spec.shape, entry.stored, (Piece(full_box(spec.shape), piece.file, layout),))


def _read_nested(value: object, where: str) -> dict[str, Path]:
    """Return each nested slot's keys; its name is these keys, joined by dots."""
    found: dict[str, Path] = {}
    for slot, keys in value.items() if isinstance(value, dict) else ():
        path = tuple(keys) if isinstance(keys, list) and all(type(key) in (int, str) for key in keys) else ()
        if not path or dotted(path) != slot:
            raise FormatError("a nested slot's keys differ from its name", where=where, found=str(slot)[:80])
        found[slot] = path
    return found


def _list_params(groups: object) -> Sequence[object]:
    return groups if isinstance(groups, list) else ()


def _params(group: object) -> Sequence[object]:
    found = group.get("params") if isinstance(group, dict) else None
    return found if isinstance(found, list) else ()


def _number(key: str) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > _MAX_DIGITS:
        raise FormatError("an optimizer parameter has no number", found=key, expected="<number>/<slot>")
    return int(key)
