"""A model's tokenizer, as GGUF metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardckpt.errors import FormatError, ShardckptError, UnsupportedError, describe_with_class
from shardckpt.format.encodings.gguf import MetadataValue
from shardckpt.format.encodings.safetensors import parse_json
from shardckpt.offline.select.config_files import ConfigFiles
from shardckpt.offline.targets.gguf.byte_fallback_bpe import is_byte_fallback, read_byte_fallback
from shardckpt.offline.targets.gguf.byte_level_bpe import is_byte_level, read_byte_level
from shardckpt.offline.targets.gguf.sentencepiece import read_sentencepiece
from shardckpt.offline.targets.gguf.vocabulary import AddedToken, Vocabulary
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
