"""Sort an adapter's tensors by their role: factors, biases, magnitudes, tokens, and tensors of the base."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from shardckpt.errors import AmbiguousError, UnsupportedError
from shardckpt.plan.naming.fqn import require_unique

__all__ = ["PREFIX", "Role", "SortedNames", "is_trained", "sort_names"]

PREFIX = "base_model.model."  # of all names in a file of peft

_PART = re.compile(
    r"(?P<module>.+)\.(lora_(?P<kind>embedding_)?(?P<side>[AB])|(?P<magnitude>lora_magnitude_vector)"
    r"|token_adapter\.trainable_tokens_delta)"
    r"(\.(?P<adapter>(?!(weight|bias)$)[^.]+))?(\.(?P<last>weight|bias))?"
)
_MODULES = "modules_to_save"
# Marks the base's own tensor in a state dict that has the trained one too.
_ORIGINAL = ".original_module."
_TRAINED = re.compile(rf"\.(lora_[A-Za-z_]+|{_MODULES}|trainable_tokens_[a-z]+)(\.|$)")

Role = str  # `A` or `B` for a factor, `bias`, `magnitude` or `tokens`


@dataclass(frozen=True, slots=True)
class SortedNames:
    """An adapter's names, sorted by their role in the base."""

    parts: Mapping[str, Mapping[Role, str]]  # by module
    turned: Set[str]  # modules whose weight is `in x out`
    replaced: Mapping[str, list[str]]  # all other tensors: name in the base to names in the adapter


def sort_names(adapter: Collection[str], where: str) -> SortedNames:
    """Sort an adapter's names."""
    matches = {name: match for name in adapter if (match := _PART.fullmatch(name)) and _choose_role(match)}
    found = sorted({match["adapter"] for match in matches.values() if match["adapter"]})
    if len(found) > 1:
        raise AmbiguousError(
            "the file holds several adapters",
            where=where,
            found=", ".join(found),
            fix=f"Write one adapter into a folder: consolidate with --exclude '*.{found[-1]}*', for example.",
        )
    modules = {name: match["module"].removeprefix(PREFIX) for name, match in matches.items()}
    roles = {name: _choose_role(match) for name, match in matches.items()}
    require_unique({name: f"{modules[name]}.lora_{role}" for name, role in roles.items()})
    parts: dict[str, dict[Role, str]] = {}
    for name, role in roles.items():
        parts.setdefault(modules[name], {})[role] = name
    known = "|".join(map(re.escape, {"default", *found}))
    others = re.compile(rf"(\.token_adapter)?\.({_MODULES}|original_module|base_layer)(\.({known}))?(?=\.)")
    replaced: dict[str, list[str]] = {}
    for name in adapter:
        if name not in matches:
            _require_known(name, where)
            replaced.setdefault(others.sub("", name).removeprefix(PREFIX), []).append(name)
    for name, sources in replaced.items():
        replaced[name] = [source for source in sources if _ORIGINAL not in source] or sources
    return SortedNames(parts, {modules[name] for name, match in matches.items() if match["kind"]}, replaced)


def is_trained(name: str) -> bool:
    """Return True for a tensor that belongs to an adapter, in a state dict that has the base too."""
    return bool(_TRAINED.search(name))


def _choose_role(match: re.Match[str]) -> Role:
    """Return a tensor's role; empty if this is another module's bias."""
    if match["side"]:
        if match["last"] == "bias":
            return "bias" if match["side"] == "B" else ""
        return match["side"]
    if match["last"] == "bias":
        return ""
    return "magnitude" if match["magnitude"] else "tokens"


def _require_known(name: str, where: str) -> None:
    if ".lora_" in name or ".trainable_tokens_" in name:
        raise UnsupportedError(
            "the adapter has a tensor whose meaning is unknown",
            where=where,
            found=name,
            fix="Merge it with peft's merge_and_unload().",
        )
