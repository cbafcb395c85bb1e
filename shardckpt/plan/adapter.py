"""Plan the merge of a LoRA adapter, from names and settings only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from shardckpt.boxes import Shape
from shardckpt.errors import FormatError, UnsupportedError, UsageError
from shardckpt.plan.module_patterns import MatchBudget, ModulePattern

_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.(?P<adapter>(?!weight$)[^.]+))?(\.weight)?"
)
_OTHERS = re.compile(r"\.(modules_to_save|original_module|base_layer)(\.default)?(?=\.)")
_LARGEST_ALPHA = 1e30
_REFUSED = {
    "use_dora": "DoRA, which scales what it adds by the norm of the result",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "LoRA with biases of its own",
    "layer_replication": "LoRA over replicated layers",
    "alora_invocation_tokens": "activated LoRA, which depends on the input",
    "trainable_token_indices": "single trained tokens",
    "target_parameters": "LoRA on bare parameters",
    "arrow_config": "a mixture of adapters",
}
"""Unsupported settings, which change the meaning of the factors, with their names in messages."""
_CHANGES_BASE = re.compile(r"(?i:pissa|corda|olora|loftq|lora_ga)")
"""Starts of the values of `init_lora_weights` with which peft also changes the weights of the base."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A weight to which the product of two factors is added.

    Attributes:
        weight: Name of the weight in the base.
        a: Name of the first factor in the adapter, `rank x in`.
        b: Name of the second factor in the adapter, `out x rank`.
        scale: Factor of the product.
        is_turned: Whether the weight is `in x out`, as in an embedding and a `Conv1D`.
    """

    weight: str
    a: str
    b: str
    scale: float
    is_turned: bool


@dataclass(frozen=True, slots=True)
class Merge:
    """The plan of a merge.

    Attributes:
        added: Weights with their low-rank products.
        replaced: Name in the base to name in the adapter, of fully trained tensors, and of tensors of the base that the
            adapter contains because products are added to them.
    """

    added: tuple[LowRank, ...]
    replaced: Mapping[str, str]

    @property
    def own(self) -> frozenset[str]:
        """Names of fully trained tensors in the base, without their shared names."""
        added = {each.weight for each in self.added}
        return frozenset(name for name in self.replaced if name not in added)


def plan_merge(config: Mapping[str, Any], adapter: Mapping[str, Shape], base: Mapping[str, Shape], where: str) -> Merge:
    """Plan the changes that an adapter makes to its base.

    Args:
        config: Content of `adapter_config.json`.
        adapter: Names and shapes of the adapter's tensors.
        base: Names and shapes of the base's tensors.
        where: Name of the adapter, for messages.

    Raises:
        UnsupportedError: The kind of adapter cannot be merged; the message names it.
        FormatError: Settings or factors contradict each other.
        UsageError: The adapter belongs to another base: a weight is missing, or has another shape.
    """
    _require_lora(config, adapter, where)
    factors: dict[str, dict[str, str]] = {}
    turned: set[str] = set()
    replaced: dict[str, str] = {}
    for name in adapter:
        match = _FACTOR.fullmatch(name)
        if match is None:
            replaced[_in_base(_OTHERS.sub("", name), base, where)] = name
            continue
        module = match["module"]
        factors.setdefault(module, {})[match["side"]] = name
        if match["kind"] or config.get("fan_in_fan_out") is True:
            turned.add(module)
    settings = _Settings(config, sum(map(len, adapter)), where)
    added = tuple(
        _low_rank(module, sides, module in turned, settings, adapter, base, where) for module, sides in factors.items()
    )
    for name, own in replaced.items():
        if adapter[own] != base[name]:
            raise UsageError(
                f"{own} has another shape than {name}", where=where, found=adapter[own], expected=base[name]
            )
    return Merge(added, replaced)


def list_changed(adapter: Iterable[str]) -> set[str]:
    """Return the names in the base of the tensors that an adapter changes.

    Args:
        adapter: Names of the adapter's tensors.
    """
    matches = ((name, _FACTOR.fullmatch(name)) for name in adapter)
    names = (_OTHERS.sub("", name) if match is None else f"{match['module']}.weight" for name, match in matches)
    return {name.removeprefix(_PREFIX) for name in names}


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
            "this adapter belongs to a base that peft changed when training began",
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


def _in_base(name: str, base: Mapping[str, Shape], where: str) -> str:
    """Return the name in the base for a name in the adapter."""
    found = name.removeprefix(_PREFIX)
    if found not in base:
        raise UsageError(
            f"the base has no {found!r}, which the adapter changes",
            where=where,
            found=f"{len(base)} names such as {', '.join(list(base)[:2])}",
            fix="Name the base that the adapter was trained on; --rename gives it other names.",
        )
    return found


def _low_rank(
    module: str,
    sides: Mapping[str, str],
    is_turned: bool,
    settings: _Settings,
    adapter: Mapping[str, Shape],
    base: Mapping[str, Shape],
    where: str,
) -> LowRank:
    if set(sides) != {"A", "B"}:
        raise FormatError(f"{module} has one factor of two", where=where, found=", ".join(sides.values()))
    weight = _in_base(f"{module}.weight", base, where)
    a, b = adapter[sides["A"]], adapter[sides["B"]]
    rank = a[0] if a else 0
    known = settings.rank(module)
    if rank < 1 or known != rank or len(b) < 2 or b[1] != rank:
        raise FormatError(
            f"the factors of {module} do not fit its rank", where=where, found=f"{a}, {b}", expected=known
        )
    shape = base[weight]
    wanted = (b[0], *a[1:]) if not is_turned else (*a[1:], b[0])
    if shape != wanted or any(n != 1 for n in b[2:]):
        raise UsageError(f"the factors of {module} do not fit its weight", where=where, found=wanted, expected=shape)
    scale = settings.alpha(module) / (sqrt(rank) if settings.is_stabilised else rank)
    return LowRank(weight, sides["A"], sides["B"], scale, is_turned)


class _Settings:
    """Ranks and scales of modules: defaults, and patterns of module names.

    Patterns match the end of a name.

    Args:
        config: Content of `adapter_config.json`.
        characters: Characters in all names of the adapter, to which the matching budget is proportional.
        where: Name of the adapter, for messages.

    Raises:
        FormatError: A setting is malformed.
        UnsupportedError: A pattern has a form that cannot be matched in linear time.
        UnsafeError: Matching costs more than for any real adapter of this size.
    """

    def __init__(self, config: Mapping[str, Any], characters: int, where: str) -> None:
        self.is_stabilised = bool(config.get("use_rslora"))
        self._where, self._config = where, config
        ranks, alphas = self._numbers_by_pattern("rank_pattern"), self._numbers_by_pattern("alpha_pattern")
        characters += sum(len(pattern) for pattern in (*ranks, *alphas) if isinstance(pattern, str))
        steps = MatchBudget(characters, where)
        self._ranks = self._patterns("rank_pattern", ranks, steps)
        self._alphas = self._patterns("alpha_pattern", alphas, steps)

    def rank(self, module: str) -> int:
        """Return the rank of a module's factors."""
        rank = self._found(self._ranks, "r", module)
        if type(rank) is not int:
            raise FormatError("the rank of an adapter must be an integer", where=self._where, found=rank)
        return rank

    def alpha(self, module: str) -> float:
        """Return the scale of a module's product, before the division by the rank."""
        alpha = self._found(self._alphas, "lora_alpha", module)
        if type(alpha) not in (int, float) or not abs(alpha) <= _LARGEST_ALPHA:
            raise FormatError("lora_alpha is not a finite number", where=self._where, found=alpha)
        return float(alpha)

    def _numbers_by_pattern(self, key: str) -> Mapping[object, object]:
        """Return the numbers of the patterns below a key of the adapter's config."""
        numbers = self._config.get(key) or {}
        if not isinstance(numbers, dict):
            raise FormatError(f"{key} does not map patterns to numbers", where=self._where, found=numbers)
        return numbers

    def _patterns(
        self, key: str, numbers: Mapping[object, object], steps: MatchBudget
    ) -> list[tuple[ModulePattern, object]]:
        where = f"{self._where}: {key}"
        return [(ModulePattern(pattern, where, steps), value) for pattern, value in numbers.items()]

    def _found(self, patterns: list[tuple[ModulePattern, object]], default: str, module: str) -> Any:
        """Return a module's setting by the first matching pattern, or the default."""
        name = module.removeprefix(_PREFIX)
        for pattern, value in patterns:
            if pattern.fits(name):
                return value
        return self._config.get(default)
