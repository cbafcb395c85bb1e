"""The verb `diff`: two checkpoints, tensor by tensor, across formats and world sizes, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardckpt.convert.arrays import blocks_of, resolve
from shardckpt.convert.carried import find_carried
from shardckpt.convert.casts import cast_into, numpy_dtype
from shardckpt.convert.report import Comparison, TensorDifference
from shardckpt.convert.ruled import decide, located_model, located_state, read_rules
from shardckpt.convert.selection import load_values
from shardckpt.convert.whole_shapes import with_whole_shapes
from shardckpt.dtypes import bits
from shardckpt.format.detect import detect, open_checkpoint, open_source
from shardckpt.format.native import NativeReader
from shardckpt.format.native_bases import named_for
from shardckpt.format.native_references import NamedBases
from shardckpt.format.reader import Reader
from shardckpt.manifest import Manifest, TensorEntry, dotted
from shardckpt.plan import optimizer
from shardckpt.plan.model_names import name_model
from shardckpt.plan.parts import find_parts, split_flat_names
from shardckpt.plan.rules import Rule

_BLOCK_BYTES = 1 << 21


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rules: str = "",
    rename: Sequence[str] = (),
    base: NamedBases = "",
) -> Comparison:
    """Compare two checkpoints by canonical names, bit by bit.

    Model tensors are matched by the names of the unwrapped model, optimizer state by `<fqn>/<slot>`, everything else by
    its path. Two NaNs with the same bits are equal; values are compared where dtype and shape agree. Flat parameters of
    FSDP1 are taken apart by the other's shapes, where their own files tell none.

    Args:
        a: Checkpoint in any readable format.
        b: Another.
        rules: TOML file of rules, or the name of a set that comes with the package, that make the names and shapes of
            `b` of those of `a`.
        rename: `FROM=TO`, applied in order after `rules`.
        base: Where a folder lies that one of them, or each, refers to, as `load` takes it.

    Returns:
        What is only in one, and what differs: dtype, shape, largest absolute and relative difference, NaN counts.

    Raises:
        UsageError: Nothing there, or nothing that a reader recognises.
        CheckpointError: One of them is damaged or incomplete.
        StorageError: Reading failed.
    """
    a, b = os.fspath(a), os.fspath(b)
    for_a, for_b = _named(a, b, base)
    first, second = _open(a, b, for_a, rules, rename), _open(b, a, for_b)
    differences: list[TensorDifference] = []
    both = [name for name in first.tensors if name in second.tensors]
    for name in sorted({*first.tensors, *second.tensors}):
        found = _compare(name, first, second)
        if found is not None:
            differences.append(found)
    unequal = sum(d.name in first.tensors and d.name in second.tensors for d in differences)
    return Comparison(
        a,
        b,
        len(both),
        len(both) - unequal,
        tuple(differences),
        (*first.reader.manifest.warnings, *second.reader.manifest.warnings),
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints, under canonical names."""

    reader: Reader
    tensors: Mapping[str, TensorEntry]


def _open(url: str, other: str, base: NamedBases, rules: str = "", rename: Sequence[str] = ()) -> _Side:
    source = open_source(url, base)
    reader = detect(source).open(source)
    if reader.lacks_shapes:
        reader = with_whole_shapes(reader, other)
    found: Sequence[Rule] = ()
    if rules or rename:
        found = read_rules(rules, rename, find_carried(source).config)
    return _Side(reader, canonical(reader, split_flat_names(reader.manifest), found))


def _named(a: str, b: str, base: NamedBases) -> tuple[NamedBases, NamedBases]:
    """Return what of the bases that the caller names concerns each of the two."""
    if not base:
        return "", ""
    readers = open_checkpoint(a), open_checkpoint(b)
    in_a, in_b = (each.commit.bases if isinstance(each, NativeReader) else () for each in readers)
    return named_for(in_a, in_b, base), named_for(in_b, in_a, base)


def canonical(reader: Reader, manifest: Manifest, rules: Sequence[Rule] = ()) -> dict[str, TensorEntry]:
    """Return every tensor of a checkpoint under one name that does not depend on its format.

    Args:
        reader: The open checkpoint.
        manifest: What it holds.
        rules: Make other names and shapes of the model's, and of its optimizers'.

    Raises:
        CheckpointError: Optimizer values cannot be read.
        UsageError: The optimizer's ids cannot be named.
    """
    found = find_parts(manifest)
    model = name_model(manifest, found)
    tensors = _ruled_model(reader, manifest, model.tensors, rules) if rules else dict(model.tensors)
    known = {entry.path for entry in model.tensors.values()}
    shapes = {name: entry.shape for name, entry in model.tensors.items()}
    for root in found.optimizers:
        raw = optimizer.below(manifest, root, load_values(reader, manifest, root))
        state = optimizer.by_name(raw, shapes, clean=model.clean)
        known |= {entry.path for entry in state.tensors.values()}
        if rules:
            state = located_state(reader, manifest, decide(rules, model.tensors, state, {}).plan, state)
        prefix = "" if len(found.optimizers) == 1 else f"{dotted(root)}:"
        tensors |= {f"{prefix}{key}": entry for key, entry in state.tensors.items()}
    tensors |= {dotted(path): entry for path, entry in manifest.tensors.items() if path not in known}
    return tensors


def _ruled_model(
    reader: Reader, manifest: Manifest, model: Mapping[str, TensorEntry], rules: Sequence[Rule]
) -> dict[str, TensorEntry]:
    ruled = decide(rules, model, None, {})
    return located_model(reader, manifest, ruled, list(ruled.model), model)[0]


def _compare(name: str, a: _Side, b: _Side) -> TensorDifference | None:
    left, right = a.tensors.get(name), b.tensors.get(name)
    if left is None or right is None:
        kind = "only in a" if right is None else "only in b"
        return TensorDifference(name, kind, _words(left), _words(right))
    if left.shape != right.shape:
        return TensorDifference(name, "shape", _words(left), _words(right))
    [left] = resolve(a.reader, a.reader.manifest, [left])
    [right] = resolve(b.reader, b.reader.manifest, [right])
    return _values(name, a.reader, left, b.reader, right)


def _words(entry: TensorEntry | None) -> str:
    return "" if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _values(name: str, in_a: Reader, a: TensorEntry, in_b: Reader, b: TensorEntry) -> TensorDifference | None:
    """Compare block by block; both sides are cut at the same elements."""
    same_type = a.dtype == b.dtype
    have_numbers = same_type or (bits(a.dtype) % 8 == bits(b.dtype) % 8 == 0)
    found = _Distance()
    equal = same_type
    elements = max(_BLOCK_BYTES * 8 // max(bits(a.stored), bits(b.stored)), 1)
    from_a = blocks_of(in_a, a, elements * bits(a.stored) // 8)
    from_b = blocks_of(in_b, b, elements * bits(b.stored) // 8)
    for raw_a, raw_b in zip(from_a, from_b, strict=True):
        x, y = _delivered(raw_a, a), _delivered(raw_b, b)
        if same_type and x == y:
            continue
        equal = False
        if have_numbers:
            found = found.with_block(_numbers(x, a.dtype), _numbers(y, b.dtype))
    if equal:
        return None
    kind = "values" if same_type else "dtype"
    if not have_numbers:
        return TensorDifference(name, kind, _words(a), _words(b))
    return TensorDifference(
        name, kind, _words(a), _words(b), found.max_abs, found.max_rel, (found.nans_a, found.nans_b)
    )


def _delivered(data: bytearray, entry: TensorEntry) -> bytearray:
    """Return elements in the type that they are handed out in."""
    if entry.dtype == entry.stored:
        return data
    out = bytearray(len(data) * bits(entry.dtype) // bits(entry.stored))
    name = dotted(entry.path)
    cast_into(memoryview(data), entry.stored, memoryview(out), entry.dtype, name=name, allow_overflow=True)
    return out


@dataclass(frozen=True, slots=True)
class _Distance:
    """How far two arrays are apart, over the blocks seen so far that differ."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    nans_a: int = 0
    nans_b: int = 0

    def with_block(self, x: NDArray[Any], y: NDArray[Any]) -> _Distance:
        nans_x, nans_y = np.isnan(x), np.isnan(y)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            gap = np.where((x == y) | (nans_x & nans_y), 0.0, np.abs(x - y))
            scale = np.maximum(np.abs(x), np.abs(y))
            relative = np.where(gap == 0, 0.0, gap / scale)
        gap, relative = (np.where(np.isnan(v), np.inf, v) for v in (gap, relative))
        return _Distance(
            max(self.max_abs, float(gap.max(initial=0.0))),
            max(self.max_rel, float(relative.max(initial=0.0))),
            self.nans_a + int(nans_x.sum()),
            self.nans_b + int(nans_y.sum()),
        )


def _numbers(data: bytearray, dtype: str) -> NDArray[Any]:
    """Return elements as float64 or complex128; bytes where numpy does not know the type."""
    if dtype == "complex32":
        return np.frombuffer(data, np.float16).astype(np.float64).view(np.complex128)
    try:
        kind = numpy_dtype(dtype)
    except TypeError:
        return np.frombuffer(data, np.uint8).astype(np.float64)
    values = np.frombuffer(data, kind)
    return values.astype(np.complex128 if kind.kind == "c" else np.float64)
