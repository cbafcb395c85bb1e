"""Rank reports before a save, the manifest that rank 0 builds from them, and values that differ between ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan
from shardckpt.checkpoint.stateful.flatten import FlattenedState, encoded
from shardckpt.encodings import tagged_json
from shardckpt.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.encodings.typed_json import UNSTORED, decode, encode
from shardckpt.errors import UsageError
from shardckpt.manifest import Path, dotted
from shardckpt.native.manifest_json import ManifestContents, Topology
from shardckpt.native.payload import encode_canonical
from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.plan.layout.write_plan import NAME_STAGES, require_one_form
from shardckpt.readers.opened.state_tree import TensorRef

SHOWN = 5  # maximum number of names in an error; others are only counted


class RankSubtree(NamedTuple):
    """Subtree of a state in a rank's report."""

    json: object  # tagged JSON, with arrays as their position in `arrays`
    arrays: Sequence[Path]

    @classmethod
    def encode(cls, tree: Any, path: Path) -> RankSubtree:
        """Encode a state's subtree."""
        arrays: list[Path] = []

        def number(array: TensorRef) -> int:
            arrays.append(array.path)
            return len(arrays) - 1

        return cls(encoded(tree, number, path), arrays)

    def decode(self) -> Any:
        """Return the subtree as the sending rank flattened it."""

        def decode_ref(value: ArrayRef | NamedValue) -> object:
            return TensorRef(self.arrays[value.number], value.kind) if isinstance(value, ArrayRef) else value

        return tagged_json.decode(self.json, decode_ref)


@dataclass(frozen=True)
class RankReport:
    """A rank's first message in a save."""

    cached: str = ""  # id of the save whose cached plan still fits this rank; empty if the local plan is sent
    local_plan: Annotated[bytes, UNSTORED] = b""  # encoded local plan, after the JSON; empty if the cached plan fits
    values: str = ""  # digest of the plain values that are equal on every rank
    optional_values: Mapping[Path, RankSubtree] = field(default_factory=dict)  # values that other ranks may not have
    per_rank_values: Mapping[Path, RankSubtree] = field(default_factory=dict)  # values that each rank saves for itself
    # Trees of which ranks have different parts, as pipeline stages have; empty until rank 0 asks for them.
    parts: Mapping[Path, RankSubtree] = field(default_factory=dict)
    path: str = ""  # target path or URL of the save
    # Whether the state fits the cached save without being flattened; `values` is then the digest of the trace's values.
    is_traced: bool = False
    # Memory orders of the arrays that are not row-major on this rank.
    orders: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    sent: Mapping[Path, str] = field(default_factory=dict)  # tensors of a rank that leaves, from `collect_own_tensors`

    def encode(self) -> bytes:
        """Return the report as bytes."""
        return pack_message(encode(self), self.local_plan)

    @classmethod
    def decode(cls, data: bytes) -> RankReport:
        """Return the report from the bytes of `encode`."""
        fields, local_plan = unpack_message(data)
        return replace(decode(cls, fields, where="a rank's report"), local_plan=local_plan)


def build_report(flattened: FlattenedState) -> RankReport:
    """Return a rank's report, without its plan and value digest."""
    optional_values = {path: RankSubtree.encode(value, path) for path, value in flattened.optional_values.items()}
    per_rank_values = {path: RankSubtree.encode(value, path) for path, value in flattened.per_rank_values.items()}
    orders = {path: order for path, array in flattened.arrays.items() if (order := array.order)}
    return RankReport(optional_values=optional_values, per_rank_values=per_rank_values, orders=orders)


def require_one_path(reports: Sequence[RankReport]) -> None:
    """Check that all ranks save to one path."""
    if len({report.path for report in reports}) > 1:
        paths = ", ".join(f"rank {rank} {report.path}" for rank, report in list(enumerate(reports))[:SHOWN])
        raise UsageError(
            "ranks save to different paths",
            found=paths,
            fix="Choose the name on one rank and broadcast it: a time or a random part differs between ranks.",
        )


def digest_values(flattened: FlattenedState) -> str:
    """Return a digest of the plain values on every rank."""
    return digest_tree(encoded(flattened.tree, lambda _: 0))


def digest_tree(content: object) -> str:
    """Return a digest of tagged JSON, independent of dict and set order."""
    return hashlib.blake2b(encode_canonical(_sort_keys(content)), digest_size=16).hexdigest()


def _sort_keys(content: Any) -> Any:
    """Return tagged JSON with sorted dicts and sets; their order may differ by rank."""
    if type(content) is list:
        return [_sort_keys(item) for item in content]
    if type(content) is not dict:
        return content
    if len(content) == 1:
        ((key, value),) = content.items()
        if key in ("$dict", "$ordered"):
            return {
                key: sorted(
                    ([item, _sort_keys(its)] for item, its in value), key=lambda pair: encode_canonical(pair[0])
                )
            }
        if key in ("$set", "$frozenset"):
            return {key: sorted(map(_sort_keys, value), key=encode_canonical)}
    return {key: _sort_keys(content[key]) for key in sorted(content)}


ABOUT = {"writer": "shardckpt"}


def build_contents(
    save: str,
    flattened: FlattenedState,
    plan: GlobalSavePlan,
    reports: Sequence[RankReport],
    custom_metadata: Mapping[str, str],
) -> ManifestContents:
    """Return a save's manifest, without files and pieces."""
    tree = flattened.tree
    states = {root: _at(tree, root) for root in flattened.slots}
    for root, names in flattened.slots.items():
        states[root].update({name: {} for name in names})
    for path in (*plan.order, *plan.ties) if states else ():
        if path[:-2] in states:
            states[path[:-2]][path[-2]][path[-1]] = TensorRef(path)
    for path, value in _merge_optional_values(reports).items():
        slots = states[path[:-2]][path[-2]]
        if path[-1] in slots:
            ranks = range(len(plan.local_plans))
            require_one_form({each.path: rank for rank in reversed(ranks) for each in plan.local_plans[rank].arrays})
            raise UsageError(f"`{dotted(path)}` is a tensor on one rank, and another value on another rank")
        slots[path[-1]] = value
    for state in states.values():
        for name in [name for name, slots in state.items() if not slots]:
            del state[name]
    for rank, report in enumerate(reports):
        for path, item in report.per_rank_values.items():
            _at(tree, path)[rank] = item.decode()
    merged = {path: first for path, first in flattened.ties.items() if path not in plan.numbers}
    ties = {**plan.ties, **merged}  # merged stages have further ones
    numbers = {**plan.numbers, **{path: plan.numbers[first] for path, first in ties.items()}}
    orders = {numbers[path]: order for report in reversed(reports) for path, order in report.orders.items()}
    topology = Topology(memory_orders=dict(sorted(orders.items())), optimizers=tuple(flattened.optimizers))
    return ManifestContents(
        save,
        (),
        plan.records,
        about={**ABOUT, **custom_metadata},
        topology={"world_size": len(reports), **encode(topology)},
        ties={path: numbers[path] for path in ties},
        variants=dict(flattened.variants),
        tree=encoded(tree, lambda item: numbers[item.path]),
    )


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _merge_optional_values(reports: Iterable[RankReport]) -> dict[Path, Any]:
    """Merge values that only some ranks have; all ranks with a value must agree."""
    merged: dict[Path, Any] = {}
    seen: dict[Path, tuple[int, bytes]] = {}
    for rank, report in enumerate(reports):
        for path, value in report.optional_values.items():
            data = encode_canonical([_sort_keys(value.json), [list(p) for p in value.arrays]])
            first, known = seen.setdefault(path, (rank, data))
            if known != data:
                raise UsageError(
                    f"`{dotted(path)}` differs between rank {first} and rank {rank}, which have it for one parameter",
                    fix="Step the optimizers of all ranks alike, or load the same checkpoint on all.",
                )
            if path not in merged:
                merged[path] = value.decode()
    return merged


def value_digests(flattened: FlattenedState) -> bytes:
    """Return each plain value's and container's digest, to find differences."""
    values: dict[str, _ValueSummary] = {}
    containers: dict[str, _ValueSummary] = {}
    _collect(flattened.tree, (), values, containers)
    return json.dumps([values, containers]).encode()


_ValueSummary = tuple[str, str, str]  # digest, type, and start of a value's text

# Number of characters of a value's text to send; a later difference is reported without its position.
_TEXT_CHARACTERS = 1 << 16


def _collect(tree: Any, path: Path, values: dict[str, _ValueSummary], containers: dict[str, _ValueSummary]) -> None:
    if isinstance(tree, dict) and tree:
        keys = ", ".join(sorted(map(repr, tree)))
        containers[dotted(path)] = (
            digest_tree([type(tree).__name__, keys]),
            type(tree).__name__,
            keys[:_KEYS_CHARACTERS],
        )
        for key, value in tree.items():
            _collect(value, (*path, tagged_json.path_key(key)), values, containers)
    elif type(tree) in (list, tuple) and tree:
        containers[dotted(path)] = digest_tree([type(tree).__name__]), type(tree).__name__, ""
        for at, value in enumerate(tree):
            _collect(value, (*path, at), values, containers)
    else:
        digest = digest_tree(encoded(tree, lambda _: 0, path))
        kind = "tensor" if isinstance(tree, TensorRef) else type(tree).__name__
        text = tree if isinstance(tree, str) else repr(tree) if isinstance(tree, _SHOWN_TYPES) else ""
        values[dotted(path)] = digest, kind, text[:_TEXT_CHARACTERS]


_KEYS_CHARACTERS = 200
_SHOWN_TYPES = (bool, int, float)


def build_mismatch_error(
    values: Sequence[Mapping[str, Sequence[str]]], containers: Sequence[Mapping[str, Sequence[str]]] = ()
) -> UsageError:
    """Return the error for values that differ between ranks but must be equal."""
    wrong = _differences(values) or _differences(containers) or ["the states of the ranks have different structures"]
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    tensors = [{name for name, summary in each.items() if summary[1] == "tensor"} for each in values]
    return UsageError(
        "; ".join(wrong[:SHOWN]) + more, fix=_KEEP if all(map(tensors[0].__eq__, tensors)) else _USE_MODULES
    )


_KEEP = f"To keep rank 0's, broadcast it; to keep each rank's own, use shardckpt.PerRank. {NAME_STAGES}"
_USE_MODULES = (
    "If each rank has another part of a model (a pipeline stage), save the modules and optimizers themselves, or the"
    " state dicts with `shardckpt.integrations.dcp.save`; otherwise give every rank the same values, or keep each"
    " rank's own with shardckpt.PerRank."
)


def _differences(summaries: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    names = dict.fromkeys(name for summary in summaries for name in summary)
    return [text for name in names if (text := _difference(name, [summary.get(name) for summary in summaries]))]


def _difference(name: str, summaries: Sequence[Sequence[str] | None]) -> str:
    """Return how a value differs between rank 0 and others; empty if equal."""
    odd = next(
        (rank for rank, summary in enumerate(summaries) if (summary or [""])[0] != (summaries[0] or [""])[0]), None
    )
    if odd is None:
        return ""
    one, other = summaries[0], summaries[odd]
    name = name or "the state"
    if one is None or other is None:
        has, lacks = (odd, 0) if one is None else (0, odd)
        return f"`{name}` is in the state of rank {has}, but not of rank {lacks}"
    if one[1] != other[1]:
        return f"`{name}` is {one[1]} on rank 0 and {other[1]} on rank {odd}"
    start = f"`{name}` ({one[1]}) differs between rank 0"
    if one[1] != "str":
        values = [f" ({text})" if text else "" for text in (one[2], other[2])]
        return f"{start}{values[0]} and rank {odd}{values[1]}"
    place = next((at for at, (a, b) in enumerate(zip(one[2], other[2], strict=False)) if a != b), None)
    if place is None:
        shorter = min(len(one[2]), len(other[2]))
        place = shorter if shorter < _TEXT_CHARACTERS else None
    return f"{start} and rank {odd}" + ("" if place is None else f" at character {place + 1}")
