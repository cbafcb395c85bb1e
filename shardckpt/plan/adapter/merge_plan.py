"""Plan the changes that a LoRA adapter makes to its base."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from shardckpt.boxes import Shape
from shardckpt.errors import AmbiguousError, FormatError, UnsupportedError, UsageError
from shardckpt.plan.adapter.name_ends import NameEnds
from shardckpt.plan.adapter.names import Role, SortedNames, sort_names
from shardckpt.plan.adapter.parameters import (
    LowRank,
    count_levels,
    find_stored_name,
    list_names,
    place_factors,
    strip_levels,
)
from shardckpt.plan.adapter.settings import Settings, read_parameters
from shardckpt.plan.naming.fqn import is_embedding, is_head, require_unique
from shardckpt.plan.quantized_weights import TRANSPOSED

__all__ = ["AddedBias", "Merge", "TokenRows", "list_changed", "plan_merge"]

# Last name parts of modules that are `Conv1D` in GPT-2 and models like it, and of modules that never are.
_CONV1D = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
_HEAD = re.compile(r"(.*_)?head|embed_out|score|classifier|qa_outputs")

_SAVED = "modules_to_save"
_WRAPPED = ".base_layer."  # in the names of a layer inside another one
_RESIZE = (
    "Give the base the adapter's vocabulary with resize_token_embeddings({}), or save the adapter with"
    " save_embedding_layers=True."
)


@dataclass(frozen=True, slots=True)
class AddedBias:
    """A bias, and the adapter's bias that a merge adds to it."""

    name: str  # in the base
    source: str  # in the adapter
    scale: float


@dataclass(frozen=True, slots=True)
class TokenRows:
    """An embedding, and single rows that a merge replaces in it."""

    name: str  # in the base
    source: str  # in the adapter
    rows: tuple[int, ...]  # in the source's order


@dataclass(frozen=True, slots=True)
class Merge:
    """Plan to merge an adapter into its base."""

    added: tuple[LowRank, ...]
    # Name in the base to name in the adapter: fully trained tensors, and base tensors that the adapter contains because
    # other values are added to them.
    replaced: Mapping[str, str]
    # Pairs of adapter names for one tensor: their values have to be equal.
    repeated: tuple[tuple[str, str], ...] = ()
    # Shapes of replaced tensors that the base lacks or has with another shape.
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    biases: tuple[AddedBias, ...] = ()
    tokens: tuple[TokenRows, ...] = ()

    @property
    def own(self) -> frozenset[str]:
        """Base names that the adapter trains in full, without shared names."""
        changed = {*(low.weight for low in self.added), *(bias.name for bias in self.biases)}
        changed |= {rows.name for rows in self.tokens}
        return frozenset(self.replaced.keys() - changed)


def plan_merge(
    config: Mapping[str, Any],
    adapter: Mapping[str, Shape],
    base: Mapping[str, Shape],
    where: str,
    *,
    model_type: object = None,
    part_types: Collection[object] = (),
) -> Merge:
    """Plan the changes that an adapter makes to its base, whose config names the types of model and parts."""
    names = _sort_by_stored_names(adapter, base, where)
    replaced = {name: sources[-1] for name, sources in names.replaced.items()}
    repeated = tuple((sources[0], other) for sources in names.replaced.values() for other in sources[1:])
    ordered = sorted(base)
    for name in replaced:
        if not _is_new_head(name, config, ordered):
            _require_in_base(name, base, where)
    shapes = {name: adapter[own] for name, own in replaced.items() if base.get(name) != adapter[own]}
    _check_shapes(shapes, replaced, base, where)
    settings = Settings(config, sum(map(len, adapter)), where)
    planner = _Planner(adapter, {**base, **shapes}, settings, where)
    factors = _group_factors(names, read_parameters(config, where))
    types = {each for each in (model_type, *part_types) if isinstance(each, str)}
    added = [
        planner.plan_layer(
            module,
            parts,
            (True,) if module in names.turned else _choose_turns(module, types, config.get("fan_in_fan_out")),
        )
        for module, parts in factors.layers.items()
    ]
    for module, levels in factors.levels.items():
        added += planner.plan_parameters(module, levels, factors.ends, model_type)
    biases = [planner.plan_bias(module, parts["bias"]) for module, parts in names.parts.items() if "bias" in parts]
    tokens = [
        planner.plan_tokens(module, parts["tokens"]) for module, parts in names.parts.items() if "tokens" in parts
    ]
    return Merge(tuple(added), replaced, repeated, shapes, tuple(biases), tuple(tokens))


def list_changed(
    config: Mapping[str, Any], adapter: Collection[str], base: Mapping[str, Shape], where: str
) -> Set[str]:
    """Return the base names that an adapter changes."""
    names = _sort_by_stored_names(adapter, base, where)
    factors = _group_factors(names, read_parameters(config, where))
    changed = {*names.replaced, *(f"{module}.weight" for module in factors.layers)}
    for module in factors.levels:
        changed.update(list_names(module, factors.ends, base, where))
    for module, parts in names.parts.items():
        changed |= {f"{module}.bias"} if "bias" in parts else set()
        changed |= {f"{module}.weight"} if "tokens" in parts else set()
    return changed


def _sort_by_stored_names(adapter: Collection[str], base: Mapping[str, Shape], where: str) -> SortedNames:
    """Sort an adapter's names, with the base's own names for tensors that the adapter contains."""
    names = sort_names(adapter, where)
    stored = {name: find_stored_name(name, base) for name in names.replaced}
    require_unique(stored)
    return replace(names, replaced={stored[name]: sources for name, sources in names.replaced.items()})


@dataclass(frozen=True, slots=True)
class _Factors:
    """Factors of layers' weights, and of modules' other parameters."""

    layers: Mapping[str, Mapping[Role, str]]
    levels: Mapping[str, Sequence[Mapping[Role, str]]]  # from the outermost
    ends: NameEnds  # of these parameters' names


def _group_factors(names: SortedNames, ends: NameEnds) -> _Factors:
    layers = {module: parts for module, parts in names.parts.items() if {"A", "B", "magnitude"} & parts.keys()}
    nested: dict[str, dict[int, Mapping[Role, str]]] = {}
    for module in list(layers) if ends else ():
        inner = strip_levels(module)
        if count_levels(module) or ends.list_keys(inner):
            nested.setdefault(inner, {})[count_levels(module)] = layers.pop(module)
    return _Factors(layers, {module: [found[at] for at in sorted(found)] for module, found in nested.items()}, ends)


def _is_new_head(name: str, config: Mapping[str, Any], base: Sequence[str]) -> bool:
    """Return True if a tensor's module is a head of the model that the adapter trains in full and the base lacks."""
    saved, (head, *inner) = config.get(_SAVED), name.split(".")
    prefix = f"{head}."
    first = bisect_left(base, prefix)  # the base's names are sorted
    is_known = first < len(base) and base[first].startswith(prefix)
    is_saved = isinstance(saved, list) and head in saved
    return bool(inner) and is_saved and not is_embedding(name) and not is_known


def _require_in_base(name: str, base: Mapping[str, Shape], where: str) -> None:
    if name in base:
        return
    raise UsageError(
        f"the base has no {name!r}, which the adapter changes",
        where=where,
        found=f"{len(base)} names such as {', '.join(list(base)[:2])}",
        fix="Name the base that the adapter was trained on; --rename gives it other names. A folder of transformers"
        " may lack tied tensors and have other names than the model in memory: use a native step as BASE, which"
        " shardckpt.save wrote from the base.",
    )


def _check_shapes(
    shapes: Mapping[str, Shape], replaced: Mapping[str, str], base: Mapping[str, Shape], where: str
) -> None:
    """Require equal shapes; only a vocabulary may differ, and then alike in all its tensors."""
    resized: dict[Shape, tuple[str, Shape]] = {}
    for name, shape in shapes.items():
        before = base.get(name, shape)
        if before != shape:
            if not _is_of_vocabulary(name) or before[1:] != shape[1:]:
                raise UsageError(
                    f"{replaced[name]} has another shape than {name}", where=where, found=shape, expected=before
                )
            resized[before] = name, shape
    for other, size in base.items() if resized else ():
        name, shape = resized.get(size, ("", size))
        if name and _is_of_vocabulary(other) and shapes.get(other) != shape:
            raise UsageError(
                f"the adapter's vocabulary has {shape[0]} tokens in {name}, but another number in {other}",
                where=where,
                found=size,
                expected=shape,
                fix=_RESIZE.format(shape[0]),
            )


def _is_of_vocabulary(name: str) -> bool:
    return is_embedding(name) or is_head(name)


def _choose_turns(module: str, types: Set[str], fan_in_fan_out: object) -> tuple[bool, ...]:
    """Return whether a weight may be `in x out`, the likelier answer first, or none if a square one is ambiguous."""
    # peft writes one `fan_in_fan_out`, which is right for the last layer with factors alone.
    last, has_conv1d = module.rpartition(".")[2], fan_in_fan_out is True
    if _HEAD.fullmatch(last):
        is_turned = False
    elif types & TRANSPOSED or (last in _CONV1D and has_conv1d):
        is_turned = last in _CONV1D
    elif has_conv1d or (last in _CONV1D and not types):
        return ()
    else:
        is_turned = False
    return (is_turned, not is_turned)


class _Planner:
    """Plans what an adapter adds, by layer."""

    def __init__(self, adapter: Mapping[str, Shape], base: Mapping[str, Shape], settings: Settings, where: str) -> None:
        self._adapter, self._base, self._settings, self._where = adapter, base, settings, where

    def plan_layer(self, module: str, parts: Mapping[Role, str], turns: tuple[bool, ...]) -> LowRank:
        """Plan the product for a layer's weight."""
        self._require_factors(module, parts)
        weight = f"{module}.weight"
        if f"{module}.in_proj_weight" in self._base or _WRAPPED in module:
            raise UnsupportedError(
                f"{module} is a MultiheadAttention, of which versions of peft add a product once or twice",
                where=self._where,
                found=parts["A"],
                fix="Merge it with the peft that trained it: merge_and_unload().",
            )
        _require_in_base(weight, self._base, self._where)
        a, b = self._adapter[parts["A"]], self._adapter[parts["B"]]
        rank = a[0] if a else 0
        known = self._settings.rank(module)
        if len(b) > 2 and known == rank != b[1]:
            raise UnsupportedError(
                f"{module} is a convolution in groups, and its factors use all channels",
                where=self._where,
                found=f"{a}, {b}",
                fix="No convolution in groups can hold the sum; peft cannot merge it either.",
            )
        if rank < 1 or known != rank or len(b) < 2 or b[1] != rank:
            raise FormatError(
                f"the factors of {module} do not fit its rank", where=self._where, found=f"{a}, {b}", expected=known
            )
        shape = self._base[weight]
        fits = {turn: (*a[1:], b[0]) if turn else (b[0], *a[1:]) for turn in turns or (False, True)}
        fitting = [turn for turn, size in fits.items() if size == shape]
        if len(fitting) > 1 and not turns:
            raise AmbiguousError(
                f"{weight} is square, and may be a Linear's or, transposed, a Conv1D's",
                where=self._where,
                found="fan_in_fan_out, which peft writes once for all layers",
                fix="Give the model's config.json with --config-from, or merge with peft's merge_and_unload().",
            )
        is_turned = next(iter((*fitting, *fits)))
        wanted = fits[is_turned]
        if shape != wanted or any(n != 1 for n in b[2:]):
            grown = sum(n != known for n, known in zip(wanted, shape, strict=False)) == 1 and _is_of_vocabulary(weight)
            raise UsageError(
                f"the factors of {module} do not fit its weight",
                where=self._where,
                found=wanted,
                expected=shape,
                fix=_RESIZE.format(wanted[0]) if grown else "",
            )
        magnitude = self._find_magnitude(module, parts, shape[-1] if is_turned else shape[0])
        return LowRank(weight, parts["A"], parts["B"], self._settings.scale(module, rank), is_turned, magnitude)

    def plan_parameters(
        self, module: str, levels: Sequence[Mapping[Role, str]], ends: NameEnds, model_type: object
    ) -> list[LowRank]:
        """Plan the products for a module's parameters."""
        for parts in levels:
            self._require_factors(module, parts)
            if parts.keys() != {"A", "B"}:
                raise FormatError(
                    f"{module} has more than factors for a parameter",
                    where=self._where,
                    found=", ".join(parts.values()),
                )
        return place_factors(module, levels, ends, self._settings, self._adapter, self._base, model_type, self._where)

    def plan_bias(self, module: str, source: str) -> AddedBias:
        """Plan the sum for a layer's bias."""
        name, shape = f"{module}.bias", self._adapter[source]
        if self._base.get(name) != shape:
            raise UsageError(
                f"the adapter adds a bias to {module}, and the base must have one of its shape",
                where=self._where,
                found=self._base.get(name, "none"),
                expected=shape,
                fix="No model of the base's class can hold it; peft cannot merge it either."
                if name not in self._base
                else "",
            )
        return AddedBias(name, source, self._settings.scale(module, self._settings.rank(module)))

    def plan_tokens(self, module: str, source: str) -> TokenRows:
        """Plan the rows that replace an embedding's."""
        name, shape = f"{module}.weight", self._adapter[source]
        _require_in_base(name, self._base, self._where)
        rows = self._settings.tokens(module)
        if shape != (len(rows), *self._base[name][1:]):
            raise FormatError(
                f"the trained tokens do not fit {name}",
                where=self._where,
                found=shape,
                expected=(len(rows), *self._base[name][1:]),
            )
        if max(rows) >= self._base[name][0]:
            raise UsageError(
                f"the adapter trains tokens that {name} lacks",
                where=self._where,
                found=f"token {max(rows)}",
                expected=f"less than {self._base[name][0]}",
                fix=_RESIZE.format(max(rows) + 1),
            )
        return TokenRows(name, source, tuple(rows))

    def _require_factors(self, module: str, parts: Mapping[Role, str]) -> None:
        if not {"A", "B"} <= parts.keys():
            raise FormatError(f"{module} has only one factor", where=self._where, found=", ".join(parts.values()))

    def _find_magnitude(self, module: str, parts: Mapping[Role, str], size: int) -> str:
        """Return the name of a layer's magnitudes; empty without DoRA."""
        name = parts.get("magnitude", "")
        if bool(name) != self._settings.has_magnitudes:
            raise FormatError(
                f"{module} must have magnitudes (lora_magnitude_vector) if and only if use_dora is set",
                where=self._where,
                found=name or "none",
                expected=f"use_dora {self._settings.has_magnitudes}",
            )
        if name and prod(self._adapter[name]) != size:
            raise FormatError(
                f"the magnitudes of {module} do not fit its weight",
                where=self._where,
                found=self._adapter[name],
                expected=f"{size} elements",
            )
        return name
