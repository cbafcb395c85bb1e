"""A tokenizer's vocabulary for GGUF, from any kind of file; byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardckpt.errors import UnsupportedError
from shardckpt.offline.targets.gguf.gguf_header import MetadataValue

# Token kinds, as llama.cpp and sentencepiece number them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_ADDED_SCORE = -1000.0
_SPACE = "▁"  # a space in sentencepiece

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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens, and how text becomes tokens."""

    model: str  # in llama.cpp: `gpt2` for byte-level BPE, `llama` for sentencepiece
    pre: str  # name for the word split before merges
    tokens: Sequence[str]  # text by id
    types: Sequence[int]  # kind by id
    scores: Sequence[float] = ()  # by id for sentencepiece, else empty
    merges: Sequence[str] = ()  # pairs in order for BPE, else empty
    # Whether a text gets `bos_token`, `eos_token` or `space_prefix`; unknown ones are missing.
    adds: Mapping[str, bool] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # how llama.cpp makes other tokens, one sentence each

    @property
    def metadata(self) -> dict[str, MetadataValue]:
        """Keys and values for GGUF."""
        lists: dict[str, MetadataValue] = {"scores": self.scores, "token_type": self.types, "merges": self.merges}
        return {
            "tokenizer.ggml.model": self.model,
            "tokenizer.ggml.pre": self.pre,
            "tokenizer.ggml.tokens": self.tokens,
            **{f"tokenizer.ggml.{key}": values for key, values in lists.items() if values},
            **{f"tokenizer.ggml.add_{name}": is_added for name, is_added in self.adds.items()},
        }


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that was added to a vocabulary."""

    number: int
    text: str
    is_special: bool  # a control token, never part of a text

    @classmethod
    def read(cls, number: int, content: Mapping[str, Any]) -> AddedToken:
        """Return a token in `tokenizer.json` or `tokenizer_config.json`."""
        text = content["content"]
        looks_special = text.startswith("<|") and text.endswith("|>")
        is_special = bool(content.get("special")) or looks_special or text == "<pad>"
        return cls(number, text if is_special else text.replace(_SPACE, " "), is_special)


class TokenTable:
    """Tokens by id, with an unused token for each embedding row that has none."""

    def __init__(self, size: int) -> None:
        self.tokens = [f"[PAD{number}]" for number in range(size)]
        self.types = [UNUSED] * size
        self.scores = [-10000.0] * size

    def put(self, number: int, text: str, kind: int, score: float = 0.0) -> None:
        """Set a token. Raises UnsupportedError if the embedding has no row for it."""
        if not 0 <= number < len(self.tokens):
            raise UnsupportedError(f"the token {text!r} has the id {number}, and the embedding {len(self.tokens)} rows")
        self.tokens[number], self.types[number], self.scores[number] = text, kind, score

    def put_added(self, added: Iterable[AddedToken]) -> None:
        """Set added tokens, which replace others. Raises UnsupportedError as `put`."""
        for token in added:
            self.put(token.number, token.text, CONTROL if token.is_special else USER_DEFINED, _ADDED_SCORE)


def is_byte_level(content: Mapping[str, Any]) -> bool:
    """Return True if `tokenizer.json` has a byte-level BPE."""
    return content["model"].get("type") == "BPE" and any(
        each["type"] == "ByteLevel" for each in _list_merge_steps(content)
    )


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


def _list_merge_steps(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the steps that split text into words."""
    first = content.get("pre_tokenizer") or {"type": ""}
    return list(first["pretokenizers"]) if first["type"] == "Sequence" else [first]


def _name_split(content: Mapping[str, Any]) -> str:
    steps = _list_merge_steps(content)
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
