"""A tokenizer's vocabulary for GGUF, from any kind of file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardckpt.encodings.gguf import MetadataValue
from shardckpt.errors import UnsupportedError

# Token kinds, as llama.cpp and sentencepiece number them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_ADDED_SCORE = -1000.0
_SPACE = "▁"  # a space in sentencepiece


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
