r"""Patterns for names of modules that a file brings along, matched in linear time: what peft writes, and no more.

`re` takes exponential time for some patterns, and these come from strangers. Known here are characters, `.`, classes
such as `[0-9]`, `\d`, `\w` and escaped characters, each with or without `*`, `+` or `?`, and alternatives in groups
that nothing repeats, such as `layers\.(0|1)\.mlp`. A match keeps the set of places in the pattern as bits of a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardckpt.errors import FormatError, UnsupportedError

_LONGEST = 1000
_MOST_ALTERNATIVES = 64
_ESCAPES = {"d": r"\d", "w": r"\w", "s": r"\s", "D": r"\D", "W": r"\W", "S": r"\S"}
_REPEATS = "*+?"


@dataclass(frozen=True, slots=True)
class _Place:
    """One place of a pattern.

    Attributes:
        kind: A regular expression for one character.
        repeats: Whether several may follow each other.
        is_optional: Whether there may be none.
    """

    kind: re.Pattern[str]
    repeats: bool = False
    is_optional: bool = False


_Sequence = tuple[_Place, ...]


class ModulePattern:
    """A pattern that fits the end of a module's name, from its start or from behind a dot.

    Args:
        text: The pattern, as peft writes it.
        where: The file, for messages.

    Raises:
        FormatError: It is no regular expression.
        UnsupportedError: It is one of a form that is not matched in linear time here.
    """

    def __init__(self, text: object, where: str) -> None:
        if not isinstance(text, str):
            raise FormatError("a pattern of modules is not text", where=where, found=text)
        if len(text) > _LONGEST:
            raise UnsupportedError(
                "a pattern of modules is too long", where=where, found=f"{len(text)} characters", expected=_LONGEST
            )
        found = _Parser(text.removeprefix("^").removesuffix("$"), text, where).parse()
        self._sequences = [_Matcher(sequence) for sequence in found]

    def fits(self, name: str) -> bool:
        """Tell whether the end of a name is as the pattern says."""
        return any(sequence.fits(name) for sequence in self._sequences)


class _Matcher:
    def __init__(self, places: _Sequence) -> None:
        self._places = places
        self._repeating = sum(1 << i for i, place in enumerate(places) if place.repeats)
        self._optional = sum(1 << i for i, place in enumerate(places) if place.is_optional)
        self._masks: dict[str, int] = {}

    def fits(self, name: str) -> bool:
        if not self._repeating | self._optional:  # of one length, so that only one place is a start
            start = len(name) - len(self._places)
            if start < 0 or (start and name[start - 1] != "."):
                return False
            return all(place.kind.match(c) for place, c in zip(self._places, name[start:], strict=True))
        waiting = 0  # the places that the next character may be at
        before = "."
        for character in name:
            if before == ".":
                waiting |= 1
            waiting = self._skipped(waiting)
            at = waiting & self._mask(character)
            waiting = (at << 1) | (at & self._repeating)
            before = character
        return bool(self._skipped(waiting | (1 if before == "." else 0)) >> len(self._places) & 1)

    def _skipped(self, waiting: int) -> int:
        """Return places with those behind optional ones."""
        more = waiting & self._optional
        while more:
            waiting |= more << 1
            more = (more << 1) & self._optional
        return waiting

    def _mask(self, character: str) -> int:
        """Return the places that a character fits."""
        mask = self._masks.get(character)
        if mask is None:
            mask = sum(1 << i for i, place in enumerate(self._places) if place.kind.match(character))
            self._masks[character] = mask
        return mask


class _Parser:
    """Takes a pattern apart into sequences without alternatives.

    Args:
        text: What is left of the pattern without its anchors.
        whole: The pattern, for messages.
        where: The file, for messages.
    """

    def __init__(self, text: str, whole: str, where: str) -> None:
        self._text, self._whole, self._where = text, whole, where
        self._at = 0

    def parse(self) -> list[_Sequence]:
        found = self._alternatives(0)
        if self._at < len(self._text):
            raise self._malformed()
        return found

    def _alternatives(self, depth: int) -> list[_Sequence]:
        if depth > _MOST_ALTERNATIVES:
            raise self._refused()
        found = self._concatenated(depth)
        while self._peek() == "|":
            self._at += 1
            found += self._concatenated(depth)
            if len(found) > _MOST_ALTERNATIVES:
                raise self._refused()
        return found

    def _concatenated(self, depth: int) -> list[_Sequence]:
        found: list[_Sequence] = [()]
        while self._peek() not in ("", "|", ")"):
            parts = self._group(depth) if self._peek() == "(" else [(self._place(),)]
            if len(found) * len(parts) > _MOST_ALTERNATIVES:
                raise self._refused()
            found = [(*head, *tail) for head in found for tail in parts]
        return found

    def _group(self, depth: int) -> list[_Sequence]:
        self._at += 3 if self._text.startswith("(?:", self._at) else 1
        if self._peek() in ("?", *_REPEATS):
            raise self._refused()
        found = self._alternatives(depth + 1)
        if self._peek() != ")":
            raise self._malformed()
        self._at += 1
        if self._peek() in (*_REPEATS, "{") and self._peek():
            raise self._refused()
        return found

    def _place(self) -> _Place:
        source = self._one()
        repeat = self._peek()
        if repeat == "{":
            raise self._refused()
        if repeat and repeat in _REPEATS:
            self._at += 1
            if self._peek() and self._peek() in (*_REPEATS, "{"):
                raise self._refused()
        else:
            repeat = ""
        try:
            return _Place(re.compile(source), repeat in ("*", "+"), repeat in ("*", "?"))
        except re.error:
            raise self._malformed() from None

    def _one(self) -> str:
        """Return the regular expression of the one character that follows."""
        character = self._peek()
        self._at += 1
        if character == "[":
            end = self._text.find("]", self._at + (2 if self._text.startswith("^", self._at) else 1))
            if end < 0:
                raise self._malformed()
            source, self._at = self._text[self._at - 1 : end + 1], end + 1
            if "[" in source[1:] or "\\" in source:
                raise self._refused()
            return source
        if character == "\\":
            escaped = self._peek()
            self._at += 1
            if escaped in _ESCAPES:
                return _ESCAPES[escaped]
            if not escaped or escaped.isalnum():
                raise self._refused() if escaped else self._malformed()
            return re.escape(escaped)
        if character in _REPEATS:
            raise self._malformed()
        if character in ("^", "$"):
            raise self._refused()
        return "." if character == "." else re.escape(character)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _malformed(self) -> FormatError:
        return FormatError("a pattern of modules is no regular expression", where=self._where, found=self._whole)

    def _refused(self) -> UnsupportedError:
        return UnsupportedError(
            "a pattern of modules is of a form that could take for ever to match",
            where=self._where,
            found=self._whole,
            expected=r"names, and parts such as [0-9]+, \d, .* and (a|b)",
            fix="Write the names of the modules in its place in adapter_config.json.",
        )
