"""Read an adapter's settings, and refuse kinds that cannot be merged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import sqrt
from typing import Any

from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.plan.adapter.name_ends import NameEnds
from shardckpt.plan.module_patterns import MatchBudget, ModulePattern

__all__ = ["Settings", "read_parameters", "require_lora"]

_LARGEST_ALPHA = 1e30
# Unsupported settings, which change the meaning of the factors, with their names in messages.
_REFUSED = {
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA, which changed the base's weights when training started",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "LoRA over replicated layers",
    "alora_invocation_tokens": "activated LoRA, which depends on the input",
    "arrow_config": "a mixture of adapters",
}
_WITH_PEFT = "Merge it with peft's merge_and_unload(), if its kind can be merged."
# Values of `init_lora_weights` that start so: peft also changes the base's weights.
_CHANGES_BASE = re.compile(r"(?i:pissa|corda|olora|loftq|lora_ga)")


def require_lora(config: Mapping[str, Any], where: str) -> None:
    """Refuse adapters that cannot be merged, by their kind."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError("only LoRA adapters are merged", where=where, found=kind, fix=_WITH_PEFT)
    for key, what in _REFUSED.items():
        if config.get(key):
            found = f"{key} in adapter_config.json"
            raise UnsupportedError(f"this adapter is {what}", where=where, found=found, fix=_WITH_PEFT)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_BASE.match(start):
        raise UnsupportedError(
            "this adapter belongs to a base that peft changed when training started",
            where=where,
            found=f"init_lora_weights {start!r} in adapter_config.json",
            fix="Merge it with peft, or save it with path_initial_model_for_weight_conversion=; for a base that holds"
            " the changed weights, set init_lora_weights to true there.",
        )


def read_parameters(config: Mapping[str, Any], where: str) -> NameEnds:
    """Return the ends of names of parameters that have factors without a layer of their own."""
    names = config.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError("target_parameters must be a list of names", where=where, found=names)
    return NameEnds(names, where)


class Settings:
    """Ranks and scales by module: defaults, and patterns that match the end of a name."""

    def __init__(self, config: Mapping[str, Any], characters: int, where: str) -> None:
        self.has_magnitudes = bool(config.get("use_dora"))
        self._is_stabilised = bool(config.get("use_rslora"))
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

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of a module's product."""
        alpha = self._found(self._alphas, "lora_alpha", module)
        if type(alpha) not in (int, float) or not abs(alpha) <= _LARGEST_ALPHA:
            raise FormatError("lora_alpha must be a finite number", where=self._where, found=alpha)
        return float(alpha) / (sqrt(rank) if self._is_stabilised else rank)

    def tokens(self, module: str) -> list[int]:
        """Return the rows of an embedding that the adapter trains, in the order of its values."""
        indices = self._config.get("trainable_token_indices")
        if isinstance(indices, dict):
            ends = NameEnds(indices, self._where).find(module)
            indices = indices[ends[0]] if len(ends) == 1 else None
        is_list = isinstance(indices, list) and all(type(row) is int and row >= 0 for row in indices)
        if not is_list or not indices or len({*indices}) != len(indices):
            raise FormatError(
                f"trainable_token_indices must list the tokens of {module}, each once", where=self._where, found=indices
            )
        return list(indices)

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
