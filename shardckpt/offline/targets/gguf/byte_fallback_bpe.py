"""Vocabulary of a sentencepiece BPE, from the `tokenizer.json` that the tokenizers library writes.

This file has an ordered list of merges. llama.cpp merges the two neighbors whose joined text has the highest score, so
the merges have to follow from one score per text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardckpt.errors import UnsupportedError
from shardckpt.offline.targets.gguf.vocabulary import BYTE, NORMAL, UNKNOWN, AddedToken, TokenTable, Vocabulary

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "▁"


def is_byte_fallback(content: Mapping[str, Any]) -> bool:
    """Return True if `tokenizer.json` has a character BPE that falls back to bytes."""
    return content["model"].get("type") == "BPE" and bool(content["model"].get("byte_fallback"))


def read_byte_fallback(content: Mapping[str, Any], size: int) -> Vocabulary:
    """Return the vocabulary."""
    model, table = content["model"], TokenTable(size)
    merges = [_split(merge) for merge in model["merges"]]
    added = content.get("added_tokens") or []
    scores = _score_texts(merges, model["vocab"].keys() - {each["content"] for each in added})
    if model.get("ignore_merges"):
        raise UnsupportedError("tokenizer.json takes words that are tokens before merges, and llama.cpp does not")
    for text, number in model["vocab"].items():
        kind = BYTE if _BYTE.fullmatch(text) else UNKNOWN if text == model.get("unk_token") else NORMAL
        table.put(number, text, kind, scores.get(text, float(-len(scores))) if kind == NORMAL else 0.0)
    table.put_added(AddedToken.read(each["id"], each) for each in added)
    adds = {"space_prefix": _has_space_prefix(content)}
    return Vocabulary("llama", "default", table.tokens, table.types, table.scores, adds=adds)


def _split(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _score_texts(merges: list[tuple[str, str]], vocabulary: Iterable[str]) -> dict[str, float]:
    """Return a score for each merged text: 0 for the first, 1 less for each later one."""
    scores: dict[str, float] = {}
    last = ""
    for left, right in merges:
        text = left + right
        if text != last and text in scores:
            raise UnsupportedError("the merges of tokenizer.json do not follow from scores, which llama.cpp merges by")
        scores.setdefault(text, float(-len(scores)))
        last = text
    known = {*merges}
    texts = {*vocabulary}
    for text in texts:
        if not _BYTE.fullmatch(text) and any(pair not in known for pair in _list_pairs(text, texts)):
            raise UnsupportedError("tokenizer.json lacks merges that llama.cpp would make")
    return scores


def _list_pairs(text: str, texts: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs whose known texts make another."""
    for at in range(1, len(text)):
        if text[:at] in texts and text[at:] in texts:
            yield text[:at], text[at:]


def _has_space_prefix(content: Mapping[str, Any]) -> bool:
    """Return whether a space is put in front of a text. Raises UnsupportedError for other changes."""
    first, then = content.get("normalizer"), content.get("pre_tokenizer")
    is_prefixed = False
    for step in first.get("normalizers", [first]) if first else []:
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            is_prefixed = True
        elif step["type"] != "Replace" or step["pattern"] != {"String": " "} or step["content"] != _SPACE:
            raise UnsupportedError("tokenizer.json changes a text in ways that llama.cpp lacks", found=step["type"])
    if then is None:
        return is_prefixed
    if then["type"] != "Metaspace" or then.get("replacement") != _SPACE or then.get("split", True):
        raise UnsupportedError("tokenizer.json splits a text in ways that llama.cpp lacks", found=then["type"])
    return is_prefixed or then.get("prepend_scheme", "always") != "never"
