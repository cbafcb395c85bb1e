"""A model's tokenizer, as GGUF metadata."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import FormatError, ShardckptError, UnsupportedError, describe_with_class
from shardckpt.offline.select.config_files import ConfigFiles
from shardckpt.offline.targets.gguf.gguf_header import MetadataValue
from shardckpt.offline.targets.gguf.vocabulary import (
    BYTE,
    NORMAL,
    UNKNOWN,
    AddedToken,
    TokenTable,
    Vocabulary,
    is_byte_level,
    read_byte_level,
)
from shardckpt.storage.store import read_bytes

JSON, MODEL, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
_ADDED, _JINJA = "added_tokens.json", "chat_template.jinja"
_MAX_BYTES = 64 * 2**20

# Special token to its key, as llama.cpp spells them.
_SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A model's tokenizer."""

    metadata: Mapping[str, MetadataValue]
    warnings: tuple[str, ...] = ()  # one sentence each


def read_tokenizer(files: ConfigFiles, size: int) -> Tokenizer:
    """Return the tokenizer in a model's folder; if llama.cpp lacks it, a warning says why."""
    folder = _Folder(files)
    try:
        return folder.read(size)
    except UnsupportedError as error:
        warning = f"tokenizer not written, because {error.what}: llama.cpp takes token ids only"
        return Tokenizer({"tokenizer.ggml.model": "none"}, (warning,))


class _Folder:
    """A folder's tokenizer files."""

    def __init__(self, files: ConfigFiles) -> None:
        self._files = files
        self._content, self._settings = self._json(JSON), self._json(SETTINGS)

    def read(self, size: int) -> Tokenizer:
        """Return the tokenizer. Raises FormatError, and UnsupportedError if llama.cpp lacks it."""
        try:
            vocabulary = self._read_vocabulary(size)
            special = dict(self._find_special(vocabulary.tokens))
            adds = {**vocabulary.adds, **self._find_added(special)}
            chat = self._find_chat_format()
        except ShardckptError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise FormatError(
                "the tokenizer does not have the form that transformers writes",
                where=self._where(JSON if self._content else SETTINGS),
                found=describe_with_class(error),
            ) from error
        numbers = {f"tokenizer.ggml.{_SPECIAL[name]}": number for name, number in special.items()}
        metadata = {**replace(vocabulary, adds=adds).metadata, **numbers}
        return Tokenizer({**metadata, **({"tokenizer.chat_template": chat} if chat else {})}, vocabulary.warnings)

    def _read_vocabulary(self, size: int) -> Vocabulary:
        if self._content and is_byte_level(self._content):
            return read_byte_level(self._content, size)
        if MODEL in self._files.files:
            return read_sentencepiece(self._bytes(MODEL), self._list_added(), size, self._where(MODEL))
        if self._content and is_byte_fallback(self._content):
            return read_byte_fallback(self._content, size)
        if self._content:
            raise UnsupportedError(f"{JSON} has neither a byte-level nor a sentencepiece BPE, and {MODEL} is missing")
        raise UnsupportedError(f"neither {JSON} nor {MODEL} is next to config.json")

    def _list_added(self) -> Iterator[AddedToken]:
        """Yield the tokens that were added to a sentencepiece model."""
        for text, number in self._json(_ADDED).items():
            yield AddedToken.read(number, {"content": text})
        for number, content in self._settings.get("added_tokens_decoder", {}).items():
            yield AddedToken.read(int(number), content)

    def _find_special(self, tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield special tokens and their ids, from the tokenizer, else from `config.json`."""
        numbers = {text: number for number, text in enumerate(tokens)}
        for name in _SPECIAL:
            entry = self._settings.get(f"{name}_token")
            text = entry["content"] if isinstance(entry, dict) else entry
            number = numbers[text] if text in numbers else self._files.config.get(f"{name}_token_id")
            if isinstance(number, int) and 0 <= number < len(tokens):
                yield name, number

    def _find_added(self, special: Mapping[str, int]) -> dict[str, bool]:
        """Return what is added to a text, by the settings and by later steps, which decide."""
        settings = {"bos_token": "add_bos_token", "eos_token": "add_eos_token", "space_prefix": "add_prefix_space"}
        found = {name: self._settings[key] for name, key in settings.items() if _is_bool(self._settings.get(key))}
        for step in _list_steps(self._content):
            if step["type"] == "ByteLevel":
                found = {"bos_token": False, "eos_token": False, **found}
            elif step["type"] == "TemplateProcessing":
                found |= _read_ends(step, special)
        return found

    def _find_chat_format(self) -> str:
        """Return how chat messages become text, in Jinja; empty if unknown."""
        found = self._settings.get("chat_template")
        if isinstance(found, list):  # several, each an object with two values
            found = next((text for name, text in map(_read_named, found) if name == "default"), None)
        if found is None and _JINJA in self._files.files:
            found = self._bytes(_JINJA).decode()
        return found if isinstance(found, str) else ""

    def _json(self, name: str) -> dict[str, Any]:
        """Return a JSON file's content; empty without a file."""
        if name not in self._files.files:
            return {}
        content = parse_json(self._bytes(name), where=self._where(name))
        if not isinstance(content, dict):
            raise FormatError("no JSON object", where=self._where(name))
        return content

    def _bytes(self, name: str) -> bytes:
        size = self._files.files[name]
        if size > _MAX_BYTES:
            raise FormatError("too large for a tokenizer", where=self._where(name), found=f"{size} bytes")
        assert self._files.store is not None, "files have a store"
        return read_bytes(self._files.store, name, 0, size)

    def _where(self, name: str) -> str:
        return f"{self._files.store.url}/{name}" if self._files.store else name


def _read_named(entry: Mapping[str, str]) -> tuple[str, str]:
    """Return a chat format's name and text."""
    name = entry["name"]
    [text] = (value for key, value in entry.items() if key != "name")
    return name, text


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _list_steps(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the steps after tokenization in `tokenizer.json`."""
    first = content.get("post_processor")
    return first.get("processors", [first]) if first else []


def _read_ends(step: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, bool]:
    """Return whether a token is added at the start and at the end of a text."""
    single, ids = step["single"], {name: token["ids"] for name, token in step["special_tokens"].items()}
    ends = {"bos": single[0], "eos": single[-1]} if len(single) > 1 else {}
    found = {}
    for name, item in ends.items():
        token = item.get("SpecialToken", {}).get("id")
        if token is not None:
            found[f"{name}_token"] = ids.get(token) == [special.get(name)]
    return found


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


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_ALGORITHM, _UNIGRAM, _BPE = 3, 1, 2
_NORMALIZATION, _ADDS_SPACE, _REMOVES_SPACES = 2, 3, 4
_CHANGES_TEXT = (
    "tokenizer.model changes characters or spaces of a text first, and llama.cpp does not: tokens may differ"
)


def read_sentencepiece(data: bytes, added: Iterable[AddedToken], size: int, where: str) -> Vocabulary:
    """Return the vocabulary."""
    table, number, algorithm = TokenTable(size), 0, _UNIGRAM
    normalizer: dict[int, bytes | int] = {}
    try:
        for field, value in _read_fields(data):
            if field == _PIECES:
                piece = dict(_read_fields(_as_bytes(value)))
                [score] = struct.unpack("<f", _as_bytes(piece.get(_SCORE, bytes(4))))
                table.put(number, _as_bytes(piece[_TEXT]).decode(), int(piece.get(_KIND, NORMAL)), score)
                number += 1
            elif field == _TRAINER:
                algorithm = int(dict(_read_fields(_as_bytes(value))).get(_ALGORITHM, _UNIGRAM))
            elif field == _NORMALIZER:
                normalizer = dict(_read_fields(_as_bytes(value)))
    except ShardckptError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise FormatError("this is not a sentencepiece model", where=where, found=str(error)) from error
    if algorithm != _BPE:
        raise UnsupportedError("tokenizer.model has another algorithm than BPE", where=where)
    table.put_added(added)
    adds = {"space_prefix": bool(normalizer.get(_ADDS_SPACE, True))}
    changes_text = normalizer.get(_NORMALIZATION) or normalizer.get(_REMOVES_SPACES, True)
    warnings = (_CHANGES_TEXT,) if changes_text else ()
    return Vocabulary("llama", "default", table.tokens, table.types, table.scores, adds=adds, warnings=warnings)


def _as_bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number in place of bytes")
    return value


def _read_fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield each field's number and value."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field has the unknown kind {kind}")
        if at + size > len(data):
            raise ValueError("a field goes beyond the end")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number with 7 bits per byte, lowest first, and the position after it."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
    return value | data[at] << shift, at + 1
