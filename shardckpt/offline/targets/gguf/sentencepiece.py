"""A sentencepiece vocabulary, from `tokenizer.model`.

The file is a protocol buffer (https://github.com/google/sentencepiece, `sentencepiece_model.proto`); the few fields
that are needed are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from shardckpt.errors import FormatError, ShardckptError, UnsupportedError
from shardckpt.offline.targets.gguf.vocabulary import NORMAL, AddedToken, TokenTable, Vocabulary

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
