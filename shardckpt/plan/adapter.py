"""Plan the merge of a LoRA adapter, from names and settings only."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from shardckpt.boxes import Shape
from shardckpt.errors import AmbiguousError, FormatError, UnsupportedError, UsageError
from shardckpt.plan.module_patterns import MatchBudget, ModulePattern
from shardckpt.plan.naming.fqn import is_embedding, is_head, require_unique
from shardckpt.plan.naming.weights import PEFT_PART, WAY_TO_BASE

_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.(?P<adapter>(?!(weight|bias)$)[^.]+))?(\.weight)?"
)
# Last name parts of modules that are never `Conv1D`.
_HEAD = re.compile(r"(.*_)?head|embed_out|score|classifier|qa_outputs")

_TRAINED = "modules_to_save"
# Marks the base's own tensor in a state dict that has the trained one too.
_ORIGINAL = ".original_module."
_LARGEST_ALPHA = 1e30
_RESIZE = (
    "Give the base the adapter's vocabulary with resize_token_embeddings({}), or save the adapter with"
    " save_embedding_layers=True."
)
# Unsupported settings, which change the meaning of the factors, with their names in messages.
_REFUSED = {
    "use_dora": "DoRA, which scales what it adds by the norm of the result",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "LoRA with its own biases",
    "layer_replication": "LoRA over replicated layers",
    "alora_invocation_tokens": "activated LoRA, which depends on the input",
    "trainable_token_indices": "single trained tokens",
    "target_parameters": "LoRA on bare parameters",
    "arrow_config": "a mixture of adapters",
}
# Values of `init_lora_weights` that start so: peft also changes the base's weights.
_CHANGES_BASE = re.compile(r"(?i:pissa|corda|olora|loftq|lora_ga)")


@dataclass(frozen=True, slots=True)
class LowRank:
    """A weight, and two factors whose product a merge adds to it."""

    weight: str  # name in the base
    a: str  # name in the adapter: first factor, `rank x in`
    b: str  # name in the adapter: second factor, `out x rank`
    scale: float  # multiplies the product
    is_turned: bool  # whether the weight is `in x out`, as in an embedding and a `Conv1D`


@dataclass(frozen=True, slots=True)
class Merge:
    """Plan to merge an adapter into its base."""

    added: tuple[LowRank, ...]
    # Name in the base to name in the adapter: fully trained tensors, and base tensors that the adapter contains because
    # products are added to them.
    replaced: Mapping[str, str]
    # Pairs of adapter names for one tensor: their values have to be equal.
    repeated: tuple[tuple[str, str], ...] = ()
    # Shapes of replaced tensors that the base lacks or has with another shape.
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def own(self) -> frozenset[str]:
        """Base names that the adapter trains in full, without shared names."""
        added = {each.weight for each in self.added}
        return frozenset(name for name in self.replaced if name not in added)


def plan_merge(
    config: Mapping[str, Any],
    adapter: Mapping[str, Shape],
    base: Mapping[str, Shape],
    where: str,
    *,
    is_transposed: bool = False,
) -> Merge:
    """Plan the changes that an adapter makes to its base."""
    _require_lora(config, adapter, where)
    names = _sort_names(adapter, where)
    replaced = {name: sources[-1] for name, sources in names.replaced.items()}
    repeated = tuple((sources[0], other) for sources in names.replaced.values() for other in sources[1:])
    ordered = sorted(base)
    for name in replaced:
        if not _is_new_module(name, config, ordered):
            _require_in_base(name, base, where)
    shapes = {name: adapter[own] for name, own in replaced.items() if base.get(name) != adapter[own]}
    _check_shapes(shapes, replaced, base, where)
    settings = _Settings(config, sum(map(len, adapter)), where)
    known = {**base, **shapes}
    is_turned = is_transposed or config.get("fan_in_fan_out") is True
    added = tuple(
        _low_rank(module, sides, _choose_turns(module, names.turned, is_turned), settings, adapter, known, where)
        for module, sides in names.factors.items()
    )
    return Merge(added, replaced, repeated, shapes)


@dataclass(frozen=True, slots=True)
class _SortedNames:
    """An adapter's names, sorted by their role in the base."""

    factors: Mapping[str, Mapping[str, str]]  # module to side to name
    turned: Set[str]  # modules whose weight is `in x out`
    replaced: Mapping[str, list[str]]  # all other tensors: name in the base to names in the adapter


def _sort_names(adapter: Collection[str], where: str) -> _SortedNames:
    factors = {name: match for name in adapter if (match := _FACTOR.fullmatch(name))}
    found = sorted({match["adapter"] for match in factors.values() if match["adapter"]})
    if len(found) > 1:
        raise AmbiguousError(
            "the file holds several adapters",
            where=where,
            found=", ".join(found),
            fix=f"Write one adapter into a folder: consolidate with --exclude '*.{found[-1]}*', for example.",
        )
    modules = {name: match["module"].removeprefix(_PREFIX) for name, match in factors.items()}
    require_unique({name: f"{modules[name]}.lora_{match['side']}" for name, match in factors.items()})
    sides: dict[str, dict[str, str]] = {}
    for name, match in factors.items():
        sides.setdefault(modules[name], {})[match["side"]] = name
    known = "|".join(map(re.escape, {"default", *found}))
    others = re.compile(rf"\.({_TRAINED}|original_module|base_layer)(\.({known}))?(?=\.)")
    replaced: dict[str, list[str]] = {}
    for name in adapter:
        if name not in factors:
            replaced.setdefault(others.sub("", name).removeprefix(_PREFIX), []).append(name)
    for name, sources in replaced.items():
        replaced[name] = [source for source in sources if _ORIGINAL not in source] or sources
    return _SortedNames(sides, {modules[name] for name, match in factors.items() if match["kind"]}, replaced)


def list_changed(adapter: Collection[str], where: str) -> Set[str]:
    """Return the base names that an adapter changes."""
    names = _sort_names(adapter, where)
    return names.replaced.keys() | {f"{module}.weight" for module in names.factors}


def _require_lora(config: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError("only LoRA adapters are merged", where=where, found=kind)
    for key, what in _REFUSED.items():
        if config.get(key):
            raise UnsupportedError(f"this adapter is {what}", where=where, found=f"{key} in adapter_config.json")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_BASE.match(start):
        raise UnsupportedError(
            "this adapter belongs to a base that peft changed when training started",
            where=where,
            found=f"init_lora_weights {start!r} in adapter_config.json",
            fix="Merge it with peft, or save it with path_initial_model_for_weight_conversion=; for a base that holds"
            " the changed weights, set init_lora_weights to true there.",
        )
    for name in names:
        if "lora_magnitude_vector" in name:
            raise UnsupportedError(f"this adapter is {_REFUSED['use_dora']}", where=where, found=name)
        if name.endswith(("lora_A.bias", "lora_B.bias")):
            raise UnsupportedError(f"this adapter is {_REFUSED['lora_bias']}", where=where, found=name)


def _is_new_module(name: str, config: Mapping[str, Any], base: Sequence[str]) -> bool:
    """Return True if the adapter trains a tensor's module in full and the base lacks it, as with a head."""
    saved, parts = config.get(_TRAINED), name.split(".")
    at = next((i for i, part in enumerate(parts[:-1], 1) if isinstance(saved, list) and part in saved), 0)
    prefix = ".".join((*parts[:at], ""))
    first = bisect_left(base, prefix)  # the base's names are sorted
    return at > 0 and not is_embedding(name) and not (first < len(base) and base[first].startswith(prefix))


def _require_in_base(name: str, base: Mapping[str, Shape], where: str) -> None:
    if name in base:
        return
    fix = "Name the base that the adapter was trained on; --rename gives it other names."
    raise UsageError(
        f"the base has no {name!r}, which the adapter changes",
        where=where,
        found=f"{len(base)} names such as {', '.join(list(base)[:2])}",
        fix=WAY_TO_BASE if any(map(PEFT_PART.search, base)) else fix,
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


def _choose_turns(module: str, embeddings: Set[str], is_turned: bool) -> tuple[bool, ...]:
    """Return whether a weight may be `in x out`, the likelier answer first; shapes decide unless it is square."""
    if module in embeddings:
        return (True,)
    return (True, False) if is_turned and not _HEAD.fullmatch(module.rpartition(".")[2]) else (False, True)


def _low_rank(
    module: str,
    sides: Mapping[str, str],
    turns: tuple[bool, ...],
    settings: _Settings,
    adapter: Mapping[str, Shape],
    base: Mapping[str, Shape],
    where: str,
) -> LowRank:
    if set(sides) != {"A", "B"}:
        raise FormatError(f"{module} has only one factor", where=where, found=", ".join(sides.values()))
    weight = f"{module}.weight"
    _require_in_base(weight, base, where)
    a, b = adapter[sides["A"]], adapter[sides["B"]]
    rank = a[0] if a else 0
    known = settings.rank(module)
    if rank < 1 or known != rank or len(b) < 2 or b[1] != rank:
        raise FormatError(
            f"the factors of {module} do not fit its rank", where=where, found=f"{a}, {b}", expected=known
        )
    shape = base[weight]
    fits = {turn: (*a[1:], b[0]) if turn else (b[0], *a[1:]) for turn in turns}
    is_turned = next((turn for turn, size in fits.items() if size == shape), turns[0])
    wanted = fits[is_turned]
    if shape != wanted or any(n != 1 for n in b[2:]):
        grown = sum(n != known for n, known in zip(wanted, shape, strict=False)) == 1 and _is_of_vocabulary(weight)
        raise UsageError(
            f"the factors of {module} do not fit its weight",
            where=where,
            found=wanted,
            expected=shape,
            fix=_RESIZE.format(wanted[0]) if grown else "",
        )
    scale = settings.alpha(module) / (sqrt(rank) if settings.is_stabilised else rank)
    return LowRank(weight, sides["A"], sides["B"], scale, is_turned)


class _Settings:
    """Ranks and scales by module: defaults, and patterns that match the end of a name."""

    def __init__(self, config: Mapping[str, Any], characters: int, where: str) -> None:
        self.is_stabilised = bool(config.get("use_rslora"))
        self._where, self._config = where, config
        ranks, alphas = self._numbers_by_pattern("rank_pattern"), self._numbers_by_pattern("alpha_pattern")
        characters += sum(len(pattern) for pattern in (*ranks, *alphas) if isinstance(pattern, str))
        steps = MatchBudget(characters, where)
        self._ranks = self._patterns("rank_pattern", ranks, steps)
        self._alphas = self._patterns("alpha_pattern", alphas, steps)

    def rank(self, module: str) -> int:
        """Return a module's rank."""
        rank = self._found(self._ranks, "r", module)
        if type(rank) is not int:
            raise FormatError("an adapter's rank must be an integer", where=self._where, found=rank)
        return rank

    def alpha(self, module: str) -> float:
        """Return the scale of a module's product before the division by the rank."""
        alpha = self._found(self._alphas, "lora_alpha", module)
        if type(alpha) not in (int, float) or not abs(alpha) <= _LARGEST_ALPHA:
            raise FormatError("lora_alpha must be a finite number", where=self._where, found=alpha)
        return float(alpha)

    def _numbers_by_pattern(self, key: str) -> Mapping[object, object]:
        """Return the patterns and numbers that a config key holds."""
        numbers = self._config.get(key) or {}
        if not isinstance(numbers, dict):
            raise FormatError(f"{key} must map patterns to numbers", where=self._where, found=numbers)
        return numbers

    def _patterns(
        self, key: str, numbers: Mapping[object, object], steps: MatchBudget
    ) -> list[tuple[ModulePattern, object]]:
        where = f"{self._where}: {key}"
        return [(ModulePattern(pattern, where, steps), value) for pattern, value in numbers.items()]

    def _found(self, patterns: list[tuple[ModulePattern, object]], default: str, module: str) -> Any:
        """Return a module's setting by the first matching pattern, or the default."""
        for pattern, value in patterns:
            if pattern.fits(module):
                return value
        return self._config.get(default)
