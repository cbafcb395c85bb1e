"""Vocabulary of a byte-level BPE, from the `tokenizer.json` that the tokenizers library writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardckpt.errors import UnsupportedError
from shardckpt.offline.targets.gguf.vocabulary import NORMAL, AddedToken, TokenTable, Vocabulary

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Word split, and whether a word that is a token is taken before merges, to llama.cpp's name for both.
_SPLITS = {
    (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST, False): "smaug-bpe",
    (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST, False): "qwen2",
    (_CASED, True): "tekken",
    ("of GPT-2", False): "gpt-2",
    ("digits, then of GPT-2", False): "smollm",
}


def is_byte_level(content: Mapping[str, Any]) -> bool:
    """Return True if `tokenizer.json` has a byte-level BPE."""
    return content["model"].get("type") == "BPE" and any(each["type"] == "ByteLevel" for each in _list_steps(content))


def read_byte_level(content: Mapping[str, Any], size: int) -> Vocabulary:
    """Return the vocabulary."""
    model, table = content["model"], TokenTable(size)
    for text, number in model["vocab"].items():
        table.put(number, text, NORMAL)
    table.put_added(AddedToken.read(each["id"], each) for each in content.get("added_tokens") or ())
    merges = [_join(merge) for merge in model["merges"]]
    return Vocabulary("gpt2", _name_split(content), table.tokens, table.types, merges=merges)


def _join(merge: str | list[str]) -> str:
    """Return a merge's pair with a space between; a space inside a part is written as its byte."""
    if isinstance(merge, str):
        return merge
    return " ".join(part.replace(" ", chr(ord(" ") + 256)) for part in merge)


def _list_steps(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the steps that split text into words."""
    first = content.get("pre_tokenizer") or {"type": ""}
    return list(first["pretokenizers"]) if first["type"] == "Sequence" else [first]


def _name_split(content: Mapping[str, Any]) -> str:
    steps = _list_steps(content)
    split = _describe_split(steps)
    found = _SPLITS.get((split, bool(content["model"].get("ignore_merges"))))
    if found is None or any(each.get("add_prefix_space") for each in steps):
        raise UnsupportedError("llama.cpp has no known name for its split of text into words", found=split)
    return found


def _describe_split(steps: list[dict[str, Any]]) -> str:
    """Return the regular expression for a split, or the name of a built-in split."""
    kinds = [each["type"] for each in steps]
    uses_regex = bool(steps[-1].get("use_regex", True))
    if kinds == ["ByteLevel"] and uses_regex:
        return "of GPT-2"
    if kinds == ["Digits", "ByteLevel"] and uses_regex and steps[0].get("individual_digits"):
        return "digits, then of GPT-2"
    if kinds == ["Split", "ByteLevel"] and not uses_regex and steps[0].get("behavior") == "Isolated":
        return str(steps[0]["pattern"].get("Regex"))
    return " and ".join(kinds)
