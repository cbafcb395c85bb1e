"""The tokenizer beside a model is in its GGUF file, or a warning says why it is not."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt.errors import FormatError
from shardckpt.offline.targets.gguf.tokenizer import read_byte_fallback
from shardckpt.offline.targets.gguf.vocabulary import _SPLITS as SPLITS
from tests.kit.models.gguf_models import build_model, open_file, write_model

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
QWEN2 = next(regex for (regex, _), name in SPLITS.items() if name == "qwen2")
LLAMA3 = next(regex for (regex, _), name in SPLITS.items() if name == "llama-bpe")


def split_by(regex: str) -> dict[str, Any]:
    first = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [first, BYTE_LEVEL]}


def build_tokenizer(**changes: Any) -> dict[str, Any]:
    """Return a `tokenizer.json` of a byte-level BPE with 37 tokens, for 40 rows."""
    model = {"type": "BPE", "vocab": {f"t{n}": n for n in range(34)}, "merges": [["t", "1"], ["Ġ a", "b"]]}
    added = [
        {"id": 34, "content": "<s>", "special": True},
        {"id": 35, "content": "<|end|>", "special": False},
        {"id": 36, "content": "▁tool", "special": False},
    ]
    return {"model": model, "added_tokens": added, "pre_tokenizer": split_by(QWEN2), "post_processor": None, **changes}


def add_tokenizer(folder: Path, content: dict[str, Any] | None, settings: dict[str, Any], **config: Any) -> Path:
    """Write a model with a tokenizer."""
    src = write_model(folder, build_model(), **config)
    if content is not None:
        (src / "tokenizer.json").write_text(json.dumps(content))
    (src / "tokenizer_config.json").write_text(json.dumps(settings))
    return src


def convert(src: Path, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Return the metadata of the tokenizer, and the warnings."""
    report = shardckpt.convert(src, tmp_path / "out.gguf", overwrite=True)
    fields = open_file(tmp_path / "out.gguf", tmp_path).fields
    start = "tokenizer."
    found = {key.removeprefix(start): field.contents() for key, field in fields.items() if key.startswith(start)}
    return found, "; ".join(report.warnings)


class TestByteLevel:
    def test_tokens_kinds_and_merges_are_written(self, tmp_path: Path) -> None:
        settings = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"}
        src = add_tokenizer(tmp_path / "src", build_tokenizer(), settings, pad_token_id=7)
        found, warnings = convert(src, tmp_path)
        tokens, kinds = found.pop("ggml.tokens"), found.pop("ggml.token_type")
        assert tokens[33:] == ["t33", "<s>", "<|end|>", " tool", "[PAD37]", "[PAD38]", "[PAD39]"]
        assert kinds[33:] == [1, 3, 3, 4, 5, 5, 5]
        assert found == {
            "ggml.model": "gpt2",
            "ggml.pre": "qwen2",
            "ggml.merges": ["t 1", "ĠĠa b"],
            "ggml.bos_token_id": 34,
            "ggml.eos_token_id": 35,
            "ggml.padding_token_id": 7,
            "chat_template": "{{ messages }}",
        }
        assert not warnings

    def test_ends_of_a_text_are_those_of_the_last_step(self, tmp_path: Path) -> None:
        ends = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [34]}},
        }
        steps = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, ends]}
        settings = {"bos_token": "<s>", "add_bos_token": False}
        src = add_tokenizer(tmp_path / "src", build_tokenizer(post_processor=steps), settings)
        found, _ = convert(src, tmp_path)
        assert (found["ggml.add_bos_token"], found["ggml.add_eos_token"]) == (True, False)

    def test_a_chat_format_in_a_file_or_a_list_is_found(self, tmp_path: Path) -> None:
        src = add_tokenizer(tmp_path / "src", build_tokenizer(), {})
        (src / "chat_template.jinja").write_text("from a file")
        assert convert(src, tmp_path)[0]["chat_template"] == "from a file"
        several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
        (src / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
        assert convert(src, tmp_path)[0]["chat_template"] == "b"

    @pytest.mark.parametrize(
        ("splits", "ignore_merges", "name"),
        [
            (split_by(LLAMA3), True, "llama-bpe"),
            (split_by(LLAMA3), False, "smaug-bpe"),
            ({**BYTE_LEVEL, "use_regex": True}, False, "gpt-2"),
            (
                {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}],
                },
                False,
                "smollm",
            ),
        ],
    )
    def test_the_split_of_text_has_llama_cpps_name(
        self, splits: dict[str, Any], ignore_merges: bool, name: str, tmp_path: Path
    ) -> None:
        content = build_tokenizer(pre_tokenizer=splits)
        content["model"] |= {"ignore_merges": ignore_merges}
        found, _ = convert(add_tokenizer(tmp_path / "src", content, {}), tmp_path)
        assert found["ggml.pre"] == name

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"pre_tokenizer": split_by("[a-z]+")}, "no known name for its split"),
            (
                {"pre_tokenizer": split_by(QWEN2) | {"pretokenizers": [BYTE_LEVEL | {"add_prefix_space": True}]}},
                "split",
            ),
            ({"added_tokens": [{"id": 40, "content": "<x>"}]}, "'<x>' has the id 40, and the embedding 40 rows"),
            (
                {"model": {"type": "Unigram", "vocab": []}},
                "tokenizer.json has neither a byte-level nor a sentencepiece BPE, and tokenizer.model",
            ),
            (None, "neither tokenizer.json nor tokenizer.model is next to"),
        ],
    )
    def test_a_tokenizer_that_llama_cpp_lacks_is_a_warning(
        self, changes: dict[str, Any] | None, message: str, tmp_path: Path
    ) -> None:
        content = None if changes is None else build_tokenizer(**changes)
        found, warnings = convert(add_tokenizer(tmp_path / "src", content, {}), tmp_path)
        assert found == {"ggml.model": "none"}
        assert warnings.startswith("tokenizer not written, because ")
        assert message in warnings

    @pytest.mark.parametrize(
        "content", ["[]", "{", '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}', '{"model": 3}']
    )
    def test_a_damaged_tokenizer_is_an_error(self, content: str, tmp_path: Path) -> None:
        src = add_tokenizer(tmp_path / "src", None, {})
        (src / "tokenizer.json").write_text(content)
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            shardckpt.convert(src, tmp_path / "out.gguf")


def encode_field(number: int, value: bytes | int | float) -> bytes:
    """Return a field of a protocol buffer."""
    if isinstance(value, bytes):
        return bytes([number << 3 | 2]) + encode_number(len(value)) + value
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3]) + encode_number(value)


def encode_number(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + encode_number(rest) if rest else bytes([low])


def build_sentencepiece(algorithm: int = 2, changes_text: int = 0) -> bytes:
    """Return a `tokenizer.model`: <unk>, <s>, a byte, two pieces, one of 200 characters."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("<0x00>", 0.0, 6), ("▁a", -1.5, 1), ("b" * 200, -2.5, 1)]
    data = b""
    for text, score, kind in pieces:
        kinds = encode_field(3, kind) if kind != 1 else b""
        data += encode_field(1, encode_field(1, text.encode()) + encode_field(2, score) + kinds)
    return data + encode_field(2, encode_field(3, algorithm)) + encode_field(3, encode_field(4, changes_text))


class TestSentencepiece:
    @pytest.fixture
    def src(self, tmp_path: Path) -> Path:
        settings = {
            "bos_token": "<s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "added_tokens_decoder": {"5": {"content": "▁tool", "special": False}},
        }
        src = add_tokenizer(tmp_path / "src", None, settings, eos_token_id=4)
        (src / "added_tokens.json").write_text('{"<pad>": 6}')
        (src / "tokenizer.model").write_bytes(build_sentencepiece())
        return src

    def test_pieces_scores_and_kinds_are_written(self, src: Path, tmp_path: Path) -> None:
        found, warnings = convert(src, tmp_path)
        assert found.pop("ggml.tokens")[:8] == ["<unk>", "<s>", "<0x00>", "▁a", "b" * 200, " tool", "<pad>", "[PAD7]"]
        assert found.pop("ggml.scores")[:8] == [0, 0, 0, -1.5, -2.5, -1000, -1000, -10000]
        assert found.pop("ggml.token_type")[:8] == [2, 3, 6, 1, 1, 4, 3, 5]
        assert found == {
            "ggml.model": "llama",
            "ggml.pre": "default",
            "ggml.add_space_prefix": True,
            "ggml.add_bos_token": True,
            "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 4,
            "ggml.unknown_token_id": 0,
        }
        assert not warnings

    def test_another_algorithm_is_a_warning(self, src: Path, tmp_path: Path) -> None:
        (src / "tokenizer.model").write_bytes(build_sentencepiece(algorithm=1))
        found, warnings = convert(src, tmp_path)
        assert found == {"ggml.model": "none"}
        assert "another algorithm than BPE" in warnings

    def test_more_pieces_than_rows_are_a_warning(self, src: Path, tmp_path: Path) -> None:
        (src / "tokenizer.model").write_bytes(build_sentencepiece() * 9)
        found, warnings = convert(src, tmp_path)
        assert found == {"ggml.model": "none"}
        assert "has the id 40, and the embedding 40 rows" in warnings

    def test_a_change_of_the_text_is_a_warning(self, src: Path, tmp_path: Path) -> None:
        (src / "tokenizer.model").write_bytes(build_sentencepiece(changes_text=1))
        found, warnings = convert(src, tmp_path)
        assert found["ggml.model"] == "llama"
        assert "tokens may differ" in warnings

    @pytest.mark.parametrize(
        "data", [build_sentencepiece()[:-3], b"\x0a", b"\xff" * 20, b"\x0f", b"\x08\x01", b"\x0a\x02\xff\xff"]
    )
    def test_a_damaged_model_is_an_error(self, data: bytes, src: Path, tmp_path: Path) -> None:
        (src / "tokenizer.model").write_bytes(data)
        with pytest.raises(FormatError, match="not a sentencepiece model"):
            shardckpt.convert(src, tmp_path / "out.gguf")


PIECES = ["▁a", "bc", "▁b", "abc", "▁abc", "▁▁", "ca", "cab", "▁cab", "▁ab", "ab"]
"""Texts that merges make, the first one first."""


def build_byte_fallback(**changes: Any) -> dict[str, Any]:
    """Return a `tokenizer.json` as transformers makes it of a sentencepiece model: 35 tokens, for 40 rows."""
    texts = ["<unk>", "<s>", *(f"<0x{n:02X}>" for n in (0xC3, 0xA9, 0x21)), *"▁abc", *PIECES]
    merges = [
        [text[:at], text[at:]]
        for text in PIECES
        for at in range(1, len(text))
        if text[:at] in texts and text[at:] in texts
    ]
    model = {
        "type": "BPE",
        "vocab": {text: number for number, text in enumerate(texts)},
        "merges": merges,
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
    }
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": n, "content": texts[n], **added} for n in (0, 1)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "model": {**model, **changes.pop("model", {})},
        **changes,
    }


def merge_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Return the tokens of a text as llama.cpp makes them for sentencepiece."""
    score = dict(zip(tokens, scores, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while pairs := [(score[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in score]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    of_bytes = [[part] if part in score else [f"<0x{each:02X}>" for each in part.encode()] for part in parts]
    return [tokens.index(each) for part in of_bytes for each in part]


class TestByteFallback:
    @given(texts=st.lists(st.text("abc é!", min_size=1), min_size=1))
    @settings(max_examples=40, deadline=None)
    def test_scores_make_the_tokens_that_merges_make(self, texts: list[str]) -> None:
        library = pytest.importorskip("tokenizers").Tokenizer.from_str(json.dumps(build_byte_fallback()))
        found = read_byte_fallback(build_byte_fallback(), 40)
        for text in texts:
            assert merge_by_score(text, [*found.tokens], [*found.scores]) == library.encode(text).ids, text

    def test_kinds_and_the_prefix_are_written(self, tmp_path: Path) -> None:
        src = add_tokenizer(tmp_path / "src", build_byte_fallback(), {"bos_token": "<s>", "unk_token": "<unk>"})
        found, warnings = convert(src, tmp_path)
        assert (found["ggml.model"], found["ggml.pre"], found["ggml.add_space_prefix"]) == ("llama", "default", True)
        assert found["ggml.token_type"][:6] == [3, 3, 6, 6, 6, 1]
        assert found["ggml.scores"][9:12] == [0, -1, -2]
        assert (found["ggml.bos_token_id"], found["ggml.unknown_token_id"]) == (1, 0)
        assert not warnings

    @pytest.mark.parametrize(("scheme", "has_prefix"), [("always", True), ("first", True), ("never", False)])
    def test_the_prefix_may_be_that_of_metaspace(self, scheme: str, has_prefix: bool) -> None:
        step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        found = read_byte_fallback(build_byte_fallback(normalizer=None, pre_tokenizer=step), 40)
        assert found.adds == {"space_prefix": has_prefix}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": {"merges": [["▁", "a"], ["b", "c"], ["▁", "b"]]}}, "lacks merges"),
            ({"model": {"merges": [["a", "b"], ["▁", "a"], ["a", "b"]]}}, "do not follow from scores"),
            ({"model": {"ignore_merges": True}}, "takes words that are tokens before merges"),
            ({"normalizer": {"type": "NFKC"}}, "changes a text in ways that llama.cpp lacks"),
            (
                {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}},
                "splits a text in ways that llama.cpp lacks",
            ),
        ],
    )
    def test_what_llama_cpp_would_split_otherwise_is_a_warning(
        self, changes: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        found, warnings = convert(add_tokenizer(tmp_path / "src", build_byte_fallback(**changes), {}), tmp_path)
        assert found == {"ggml.model": "none"}
        assert message in warnings
