"""Tied tensors: which names share one array, and which of them is written.

Ties are known from shared storages, from alias records, and from `tie_word_embeddings` in a model's config; never from
equal values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from shardckpt.manifest import Path, TensorEntry

_HEADS = ("lm_head.weight", "*.lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight")
_EMBEDDINGS = (
    "shared.weight",
    "*embed_tokens.weight",
    "*wte.weight",
    "*word_embeddings.weight",
    "*tok_embeddings.weight",
    "*embed_in.weight",
)


def read_config_ties(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return output embedding to input embedding, where a model's config says that they are one."""
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    if tied is not True:
        return {}
    embedding = next((n for glob in _EMBEDDINGS for n in names if fnmatchcase(n, glob)), None)
    if embedding is None:
        return {}
    same = (names[embedding].shape, names[embedding].dtype)
    return {
        name: embedding
        for name, entry in names.items()
        if any(fnmatchcase(name, glob) for glob in _HEADS) and (entry.shape, entry.dtype) == same
    }


def map_kept_names(
    names: Sequence[str], paths: Mapping[str, Path], aliases: Mapping[Path, Path], prefer: Iterable[str] = ()
) -> dict[str, str]:
    """Map each name that is not written to the name that is written for it.

    Args:
        names: Final names, in state-dict order.
        paths: Final name to path in the checkpoint.
        aliases: Path to the path of the first array with the same elements, of the checkpoint.
        prefer: Names that are kept over earlier ones: the input embedding where a config says that it is tied.
    """
    preferred = set(prefer)
    groups: dict[Path, list[str]] = {}
    for name in names:
        groups.setdefault(aliases.get(paths[name], paths[name]), []).append(name)
    dropped: dict[str, str] = {}
    for members in groups.values():
        kept = next((name for name in members if name in preferred), members[0])
        dropped |= {name: kept for name in members if name != kept}
    return dropped
