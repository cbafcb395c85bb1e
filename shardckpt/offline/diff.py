"""Implement `diff`: compare two checkpoints across formats and world sizes.

Tensors are compared block by block, in bounded memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import xxhash

from shardckpt.errors import UsageError, escape
from shardckpt.events.progress import Meter, OnProgress
from shardckpt.manifest import ObjectEntry, Path, Span, TensorEntry, split_numbers
from shardckpt.native.base_store import select_bases
from shardckpt.native.reader import NativeReader
from shardckpt.notebook import draw_in_notebooks
from shardckpt.offline.compare.canonical import NO_GROUPS, Canonical, align, read_canonical
from shardckpt.offline.compare.leaves import (
    Leaves,
    Tolerance,
    are_equal,
    describe,
    find_leaves,
    format_leaf,
    have_same_types,
)
from shardckpt.offline.compare.tensor_distance import compare_tensors
from shardckpt.offline.report_html import render_page, require_report_target, write_page
from shardckpt.offline.results.comparison import (
    Comparison,
    LayerDifference,
    NotCompared,
    TensorDifference,
    ValueDifference,
)
from shardckpt.offline.results.computed_parts import ComputedPart, compute_parts
from shardckpt.offline.results.contents import describe_entry
from shardckpt.offline.select.config_files import find_config_files, load_param_shapes
from shardckpt.offline.select.options import Part, parse_globs, parse_part
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming import fqn as names
from shardckpt.plan.rules.rules import Rule
from shardckpt.plan.subclass_record import SUBCLASS
from shardckpt.reader import NamedBases, Reader
from shardckpt.readers.registry import open_checkpoint, open_reader, open_source, resolve_step
from shardckpt.readers.remap import read_rules
from shardckpt.storage.resolve_url import as_url
from shardckpt.storage.store import read_bytes

_BLOCK_BYTES = 1 << 21
_MIN_VALUES = 1 << 16
_UNNAMED = (
    "one checkpoint has its parameters by name, the other by ids whose names are uncertain: convert it with"
    " --param-names, and compare the result"
)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    part: str = "all",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    atol: float = 0.0,
    rtol: float = 0.0,
    rules: str = "",
    rename: Sequence[str] = (),
    base: NamedBases = "",
    html: str | os.PathLike[str] = "",
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Compare all tensors and other values of two checkpoints by canonical names.

    Model tensors are matched by their names in the unwrapped model, optimizer state by `<fqn>/<slot>`, group settings
    by their parameters (`param_groups.0.lr`), and other values by their dotted paths. The config and tokenizer files
    that two native steps store are values too: `model_files/config.json`. If FSDP1's flat parameters are stored without
    shapes, the other checkpoint's shapes split them.

    Tensors are equal if dtype, shape and bits are; other values if types and values are, whatever their containers.
    With `atol` or `rtol`, floating-point numbers are also equal if `|x - y| <= atol + rtol * |y|`. Then -0.0 equals
    0.0, any NaN equals any other, and an infinity equals only itself; complex numbers are compared by parts. Integers
    and booleans are always compared exactly, and another dtype is always a difference.

    Args:
        a: Checkpoint in any readable format.
        b: Checkpoint to compare with.
        part: `model`, `optim` or `all`: the full checkpoint, including values outside model and optimizer.
        include: Globs for names to compare; empty for all.
        exclude: Globs for names to skip.
        atol: Absolute tolerance.
        rtol: Tolerance relative to the value in `b`.
        rules: TOML file, or name of built-in rules, to convert names and shapes in `a` to the ones in `b`.
        rename: `FROM=TO`, applied in order after `rules`.
        base: Folders of moved base checkpoints, as for `load`.
        html: Path or URL for one page that shows the differences, sorted and by layer.
        on_progress: Called after each tensor that both have; an exception from it stops the work.

    Returns:
        Entries that only one has, entries that differ, skipped entries, and entries that could not be compared.

    Raises:
        UsageError: A source does not exist or is not recognized, or a tolerance is negative or NaN. A glob matches
            nothing, or nothing remains. `html` names another file than an earlier report.
        CheckpointError: A checkpoint is damaged or incomplete.
        StorageError: Reading failed.
    """
    a, b, html = resolve_step(a), resolve_step(b), as_url(html)
    if html:
        require_report_target(html)
    chosen = _DiffOptions(
        parse_part(part), parse_globs("include", include), parse_globs("exclude", exclude), _tolerance(atol, rtol)
    )
    result = _diff(a, b, chosen, rules, rename, base, on_progress)
    if html:
        write_page(_render(result), html)
    return result


def _diff(
    a: str,
    b: str,
    asked: _DiffOptions,
    rules: str,
    rename: Sequence[str],
    base: NamedBases,
    on_progress: OnProgress | None,
) -> Comparison:
    for_a, for_b = _split_bases(a, b, base)
    found_rules = (rules, rename) if rules or rename else None
    first, second = _open(a, b, for_a, asked, found_rules), _open(b, a, for_b, asked, None)
    if _list_differently_named(first, second):
        first, second = (_Side(side.reader, side.rules, side.read(asked, by_ids=True)) for side in (first, second))
    for prefix in _list_differently_named(first, second):
        _refuse_optimizer(prefix, first.held, second.held)
    taken = {*first.tensors, *second.tensors}
    for side in (first, second):
        side.held.merge_slots(taken)
    return _compare_sides(a, b, first, second, asked, on_progress)


def _list_differently_named(a: _Side, b: _Side) -> list[str]:
    """Return the prefixes of optimizers whose names are certain in only one checkpoint."""
    in_a, in_b = a.held.optimizers, b.held.optimizers
    return [prefix for prefix in in_a if prefix in in_b and in_a[prefix].naming != in_b[prefix].naming]


def _refuse_optimizer(prefix: str, *sides: Canonical) -> None:
    """Exclude an optimizer from the comparison, with the reason."""
    for held in sides:
        found = held.optimizers[prefix]
        held.slots = {name: entry for name, entry in held.slots.items() if name not in found.tensors}
        held.values = {path: value for path, value in held.values.items() if path not in found.values}
        held.groups.pop(prefix, None)
    names = sorted({held.optimizers[prefix].root or "optimizer" for held in sides})
    sides[0].refused[" / ".join(names)] = _UNNAMED


@dataclass(frozen=True, slots=True)
class _DiffOptions:
    part: Part
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    tolerance: Tolerance


def _tolerance(atol: float, rtol: float) -> Tolerance:
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} must be a finite number of 0 or more", found=value)
    return Tolerance(float(atol), float(rtol))


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints, under canonical names."""

    reader: Reader
    rules: Sequence[Rule]
    held: Canonical

    def read(self, asked: _DiffOptions, *, by_ids: bool) -> Canonical:
        """Read the checkpoint again, with optimizers by ids or by names."""
        return read_canonical(self.reader, asked.part, self.rules, by_ids=by_ids)

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Name to array."""
        return self.held.tensors


def _open(
    url: str, other: str, base: NamedBases, asked: _DiffOptions, rule_options: tuple[str, Sequence[str]] | None
) -> _Side:
    source = open_source(url, base)
    reader = open_reader(source)
    if reader.needs_param_shapes:
        reader = load_param_shapes(reader, other)
    rules: Sequence[Rule] = read_rules(*rule_options, find_config_files(source).config) if rule_options else ()
    return _Side(reader, rules, read_canonical(reader, asked.part, rules))


def _split_bases(a: str, b: str, base: NamedBases) -> tuple[NamedBases, NamedBases]:
    """Assign the named bases to the checkpoints."""
    if not base:
        return "", ""
    readers = open_checkpoint(a), open_checkpoint(b)
    in_a, in_b = (each.commit.bases if isinstance(each, NativeReader) else () for each in readers)
    return select_bases(in_a, in_b, base), select_bases(in_b, in_a, base)


def _compare_sides(
    a: str, b: str, first: _Side, second: _Side, asked: _DiffOptions, on_progress: OnProgress | None
) -> Comparison:
    in_a, in_b = _leaves(first, second)
    if asked.part != "optim" and all(isinstance(side.reader, NativeReader) for side in (first, second)):
        for side, leaves in ((first, in_a), (second, in_b)):  # conversions rewrite these files, other formats have none
            leaves.values.update(_hash_model_files(side.reader))
    _drop_converted_records(in_a, in_b, second)
    _drop_converted_records(in_b, in_a, first)
    refused = _list_not_compared(first, second, in_a, in_b)
    every = dict.fromkeys(sorted({*first.tensors, *second.tensors, *in_a.values, *in_b.values, *refused}))
    if (asked.include or asked.exclude or asked.part != "all") and not every:
        raise UsageError("neither checkpoint holds this part", found=f"part {asked.part}", where=f"{a}, {b}")
    chosen = dict.fromkeys(names.select_names(every, asked.include, asked.exclude))
    tensors: list[TensorDifference] = []
    values: list[ValueDifference] = []
    shared = [name for name in chosen if name in first.tensors and name in second.tensors]
    meter = Meter(sum(first.tensors[name].nbytes for name in shared), on_progress)

    def compare(name: str) -> tuple[TensorDifference, ...]:
        found = _compare(name, first, second, asked.tolerance)
        meter.add(first.tensors[name].nbytes)
        return (found,) if found else ()

    parts = (ComputedPart(name, 2 * first.tensors[name].nbytes, partial(compare, name), range(2)) for name in shared)
    compared = dict(zip(shared, compute_parts(parts, TensorDifference), strict=True))
    for name in chosen:
        if (name in first.tensors) != (name in second.tensors) and (name in in_a.values) != (name in in_b.values):
            values.append(_tensor_and_value(name, first, second, in_a, in_b))
            continue
        missing = _compare_types(name, first.tensors.get(name), second.tensors.get(name))
        tensors += compared.get(name) or ([missing] if missing and name not in compared else [])
        values += _compare_values(name, in_a.values, in_b.values, asked.tolerance)
    shared_values = [name for name in chosen if name in in_a.values and name in in_b.values]
    unequal, unequal_values = {d.name for d in tensors}, {d.name for d in values}
    return Comparison(
        a=a,
        b=b,
        compared=len(shared),
        equal=sum(name not in unequal for name in shared),
        differences=tuple(tensors),
        warnings=_warnings(first, second),
        compared_values=len(shared_values),
        equal_values=sum(name not in unequal_values for name in shared_values),
        value_differences=tuple(values),
        not_compared=tuple(NotCompared(*each) for each in sorted(refused.items()) if each[0] in chosen),
        left_out=tuple(dict.fromkeys((*first.held.left_out, *second.held.left_out, *_list_excluded(every, chosen)))),
    )


def _drop_converted_records(leaves: Leaves, others: Leaves, other: _Side) -> None:
    """Leave out the class of a weight whose inner tensors another format describes in its own way."""
    weights = {name.rpartition(".")[0] for name in other.tensors}
    for name in [name for name in leaves.values if name.endswith(f".{SUBCLASS}") and name not in others.values]:
        if name.removesuffix(f".{SUBCLASS}") in weights:
            del leaves.values[name]


def _list_not_compared(a: _Side, b: _Side, in_a: Leaves, in_b: Leaves) -> dict[str, str]:
    """Return the values that cannot be compared and whose bytes differ too."""
    refused = {**in_b.refused, **b.held.refused, **in_a.refused, **a.held.refused}
    sources = {name: _source(name, a.held.sources) for name in refused}
    same = {source for source in set(sources.values()) if source and _same_bytes(a, b, source)}
    return {name: why for name, why in refused.items() if sources[name] not in same}


def _source(name: str, sources: Mapping[str, ObjectEntry]) -> str:
    """Return the dotted path of the file's value that contains another; empty if it is not from a file."""
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return name


def _same_bytes(a: _Side, b: _Side, name: str) -> bool:
    """Return True if both checkpoints store a value as the same bytes."""
    in_a, in_b = a.held.sources[name], b.held.sources.get(name)
    if in_b is None or not isinstance(in_a.layout, Span) or not isinstance(in_b.layout, Span):
        return False
    nbytes = in_a.layout.nbytes
    return nbytes == in_b.layout.nbytes and all(
        read_bytes(a.reader.store, in_a.file, in_a.layout.offset + at, min(_BLOCK_BYTES, nbytes - at))
        == read_bytes(b.reader.store, in_b.file, in_b.layout.offset + at, min(_BLOCK_BYTES, nbytes - at))
        for at in range(0, nbytes, _BLOCK_BYTES)
    )


def _warnings(*sides: _Side) -> tuple[str, ...]:
    return tuple(line for side in sides for line in (*side.reader.manifest.warnings, *side.held.warnings))


def _list_excluded(every: Mapping[str, None], chosen: Mapping[str, None]) -> list[str]:
    return [name for name in every if name not in chosen]


def _leaves(a: _Side, b: _Side) -> tuple[Leaves, Leaves]:
    """Return the flattened values of both, with group settings under common names."""
    of_groups: tuple[dict[Path, object], dict[Path, object]] = ({}, {})
    for prefix in {**a.held.groups, **b.held.groups}:
        aligned = align(a.held.groups.get(prefix, NO_GROUPS), b.held.groups.get(prefix, NO_GROUPS))
        for out, settings in zip(of_groups, aligned, strict=True):
            out.update({(f"{prefix}{path[0]}", *path[1:]): value for path, value in settings.items()})
    first, second = (
        find_leaves({**side.held.values, **settings}, _max_values(side.reader))
        for side, settings in zip((a, b), of_groups, strict=True)
    )
    return first, second


def _hash_model_files(reader: Reader) -> dict[str, object]:
    """Return the size and hash of the config and tokenizer files that a step stores, by name."""
    found, store = dict[str, object](), reader.model_store
    for name, size in reader.model_files.items():
        digest = xxhash.xxh3_64()
        for at in range(0, size, _BLOCK_BYTES):
            digest.update(read_bytes(store, name, at, min(_BLOCK_BYTES, size - at)))
        found[f"model_files/{name}"] = f"{size} bytes, xxh3 {digest.hexdigest()}"
    return found


def _max_values(reader: Reader) -> int:
    """Return how many values a checkpoint's files can contain at most, at a byte each."""
    return _MIN_VALUES + sum(size for size in reader.manifest.files.values() if size > 0)


def _tensor_and_value(name: str, a: _Side, b: _Side, in_a: Leaves, in_b: Leaves) -> ValueDifference:
    words = [
        str(describe_entry(name, side.tensors[name])) if name in side.tensors else format_leaf(leaves.values[name])
        for side, leaves in ((a, in_a), (b, in_b))
    ]
    return ValueDifference(name, "type", words[0], words[1])


def _compare_values(
    name: str, a: Mapping[str, object], b: Mapping[str, object], tolerance: Tolerance
) -> list[ValueDifference]:
    if name not in a and name not in b:
        return []
    if name not in b:
        return [ValueDifference(name, "only_in_a", format_leaf(a[name]), "")]
    if name not in a:
        return [ValueDifference(name, "only_in_b", "", format_leaf(b[name]))]
    if are_equal(a[name], b[name], tolerance):
        return []
    kind: Literal["value", "type"] = "value" if have_same_types(a[name], b[name]) else "type"
    return [ValueDifference(name, kind, *describe(a[name], b[name], tolerance))]


def _compare(name: str, a: _Side, b: _Side, tolerance: Tolerance) -> TensorDifference | None:
    left, right = a.tensors.get(name), b.tensors.get(name)
    if left is None or right is None or left.shape != right.shape:
        return _compare_types(name, left, right)
    [left] = locate(a.reader, a.reader.manifest, [left])
    [right] = locate(b.reader, b.reader.manifest, [right])
    found = compare_tensors(name, (a.reader, left), (b.reader, right), tolerance)
    is_counter = name in a.held.counters and name in b.held.counters
    return replace(found, l2=None, norm=None) if found and is_counter else found


def _compare_types(name: str, left: TensorEntry | None, right: TensorEntry | None) -> TensorDifference | None:
    """Return the difference if shapes differ or a tensor is missing."""
    if left is None:
        return right and TensorDifference(name, "only_in_b", None, describe_entry(name, right))
    if right is None:
        return TensorDifference(name, "only_in_a", describe_entry(name, left), None)
    return TensorDifference(name, "shape", describe_entry(name, left), describe_entry(name, right))


def _render(found: Comparison) -> str:
    return render_page(f"{escape(found.a)} and {escape(found.b)}", describe_comparison(found))


draw_in_notebooks(Comparison, _render)


def describe_comparison(found: Comparison) -> dict[str, Any]:
    """Return the data for a comparison's page: JSON values only."""
    differences = sorted(found.differences, key=lambda each: split_numbers(each.name))  # layers.2 before layers.10
    return {
        "schema_version": 1,
        "kind": "diff",
        "a": escape(found.a),
        "b": escape(found.b),
        "same": found.same,
        "compared": found.compared,
        "equal": found.equal,
        "compared_values": found.compared_values,
        "equal_values": found.equal_values,
        "tensors": [_describe_tensor(each) for each in differences],
        "counters": [at for at, each in enumerate(differences) if each.is_counter],
        "layers": [_describe_layer(each) for each in found.layers],
        "values": [
            [escape(each.name), _say(each.kind), escape(each.a), escape(each.b)] for each in found.value_differences
        ],
        "not_compared": [[escape(name), escape(why)] for name, why in found.not_compared],
        "left_out": [*map(escape, found.left_out)],
        "warnings": [*map(escape, found.warnings)],
    }


def _describe_tensor(found: TensorDifference) -> list[Any]:
    numbers = map(_to_json, (found.l2, found.relative_l2, found.max_abs, found.max_rel))
    both = (f"{tensor or ''}" for tensor in (found.a, found.b))
    return [escape(found.name), _say(found.kind), *both, *numbers, *found.nans]


def _say(kind: str) -> str:
    """Return a kind in words."""
    return kind.replace("_", " ")


def _describe_layer(found: LayerDifference) -> list[Any]:
    numbers = map(_to_json, (found.l2, found.relative_l2, found.max_abs))
    return [escape(found.name), found.tensor_count, *numbers]


def _to_json(number: float | None) -> float | str | None:
    """Return a number as JSON has it: `inf` and `nan` as text."""
    return number if number is None or math.isfinite(number) else str(number)
