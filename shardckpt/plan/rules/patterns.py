"""Name patterns in rules: literal, `{x}` for a component, or regex."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardckpt.errors import UsageError

_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SPECIAL = re.compile(r"[\\()\[\]*+?^$|]")
_NUMBERED = re.compile(r"\\(\d+)")
_MAX_DIGITS = 9


class Match:
    """A name that matches a pattern."""

    def __init__(self, match: re.Match[str], is_regex: bool) -> None:
        self._match, self._is_regex = match, is_regex

    def __getitem__(self, place: str) -> str:
        return self._match[place]

    def number(self, place: str) -> int | None:
        """Return a placeholder's text as a number; None for other text and leading zeros."""
        text = self._match[place]
        is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and str(int(text)) == text
        return int(text) if is_number else None

    def expand(self, replacement: str, more: Mapping[str, str] | None = None) -> str:
        """Return a replacement with the matched text at its placeholders."""
        known = {**self._match.groupdict(), **(more or {})}
        found = _PLACE.sub(lambda place: str(known[place[1]] or ""), replacement)
        if not self._is_regex:
            return found
        return _NUMBERED.sub(lambda group: self._match[int(group[1])] or "", found)


class Pattern:
    """A pattern for tensor names."""

    def __init__(self, text: str, where: str = "") -> None:
        self.text, self._where = text, where
        self.is_regex = _SPECIAL.search(text) is not None
        seen: set[str] = set()

        def group(place: re.Match[str]) -> str:
            name = place[1]
            if name in seen:
                return f"(?P={name})"
            seen.add(name)
            return f"(?P<{name}>[^.]+)"

        parts = _PLACE.split(text)
        if self.is_regex:
            source = _PLACE.sub(group, text)
        else:
            places = _PLACE.finditer(text)
            source = "".join(group(next(places)) if i % 2 else re.escape(part) for i, part in enumerate(parts))
        try:
            self._compiled = re.compile(source)
        except re.error as error:
            raise UsageError(f"invalid regular expression: {error}", where=where, found=text) from error

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def places(self) -> frozenset[str]:
        """The placeholders' names."""
        return frozenset(self._compiled.groupindex)

    def match(self, name: str) -> Match | None:
        """Match a full name; None if it does not match."""
        found = self._compiled.fullmatch(name)
        return None if found is None else Match(found, self.is_regex)

    def check(self, replacement: str, more: frozenset[str] = frozenset()) -> None:
        """Require that the pattern has all placeholders in a replacement."""
        unknown = [f"{{{name}}}" for name in _PLACE.findall(replacement) if name not in self.places | more]
        if self.is_regex:
            unknown += [f"\\{n}" for n in _NUMBERED.findall(replacement) if int(n) > self._compiled.groups]
        if unknown or not replacement:
            raise UsageError(
                f"{replacement!r} names {', '.join(unknown) or 'nothing'}, which {self.text!r} does not have",
                where=self._where,
            )
