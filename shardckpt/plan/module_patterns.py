r"""Match module patterns from adapter configs in linear time.

Supports the subset that peft writes. `re` takes exponential time for some patterns, and these come from untrusted
files. Supported are characters, `.`, classes such as `[0-9]`, `\d`, `\w`, and escaped characters, each with or without
`*`, `+` or `?`, and alternatives in groups without repetition, such as `layers\.(0|1)\.mlp`. Plain characters and dots
are compared directly; other patterns become an automaton whose states are created on demand.
`MatchBudget` limits the total work.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shardckpt.errors import FormatError, UnsafeError, UnsupportedError

_LONGEST = 1000
_DEEPEST = 64
_ESCAPES = {letter: re.compile(rf"\{letter}") for letter in "dwsDWS"}
_REPEATS = "*+?"
_PLAIN = re.compile(r"(?:[^\\^$*+?{}\[\]|()\n]|\\[^\w\n])*", re.ASCII)
_PLAIN_PART = re.compile(r"\\(.)|\.")
_TAIL = re.compile(r"\w*\Z", re.ASCII)

_FREE_STEPS = 3_000_000
_STEPS_PER_CHARACTER = 2
# Costs: one step is a quarter of a microsecond, or four bytes of memory.
_PATTERN_STEPS, _PART_STEPS, _NODE_STEPS, _CLASS_STEPS = 60, 2, 25, 1200
_STATE_STEPS, _ARC_STEPS = 120, 25


class MatchBudget:
    """Limits the work for matching in proportion to the length of names and patterns."""

    __slots__ = ("_left", "_where")

    def __init__(self, characters: int, where: str) -> None:
        self._left = _FREE_STEPS + _STEPS_PER_CHARACTER * characters
        self._where = where

    def spend(self, count: int) -> None:
        """Subtract steps."""
        self._left -= count
        if self._left < 0:
            raise UnsafeError(
                "the adapter's patterns take too long to match for its size",
                where=self._where,
                fix="They look made to take hours: do not trust their source.",
            )


class _Place(NamedTuple):
    """A pattern element."""

    # Matches one character: this character, or this expression; None matches all but a line break.
    test: str | re.Pattern[str] | None
    repeats: bool = False  # whether it may occur several times
    is_optional: bool = False  # whether it may be missing

    def fits(self, character: str) -> bool:
        if self.test is None:
            return character != "\n"
        return self.test == character if isinstance(self.test, str) else self.test.match(character) is not None


class _Branch(NamedTuple):
    """A branch that consumes no character; all its later targets are tried."""

    targets: tuple[int, ...]


_Nodes = list[_Place | _Branch]


class ModulePattern:
    """A pattern that matches a module's name, or its end after a dot; with `^` the full name alone."""

    __slots__ = ("_automaton", "_is_full", "_parts", "_steps", "_tail")

    def __init__(self, text: object, where: str, steps: MatchBudget) -> None:
        if not isinstance(text, str):
            raise FormatError("a module pattern must be text", where=where, found=text)
        if len(text) > _LONGEST:
            raise UnsupportedError(
                "a module pattern is too long", where=where, found=f"{len(text)} characters", expected=_LONGEST
            )
        steps.spend(_PATTERN_STEPS)
        self._steps = steps
        self._automaton: _Automaton | None = None
        self._parts = ""
        self._is_full = text.startswith("^")
        inner = text.removeprefix("^").removesuffix("$")
        if _PLAIN.fullmatch(inner):
            self._parts = _PLAIN_PART.sub(lambda found: found[1] or "\n", inner)  # "\n" represents any character
            self._tail = self._parts.rpartition("\n")[2]
            return
        self._tail = _literal_tail(inner)
        nodes = _Parser(inner, text, where, steps).parse(is_full=self._is_full)
        self._automaton = _Automaton(nodes, steps, is_full=self._is_full)

    def fits(self, name: str) -> bool:
        """Return True if the pattern matches the end of a name."""
        self._steps.spend(1)
        if not name.endswith(self._tail):
            return False
        return self._automaton.fits(name) if self._automaton is not None else self._fits_parts(name)

    def _fits_parts(self, name: str) -> bool:
        """Compare the parts between dots, which match any character, with a name's end."""
        at = len(name) - len(self._parts)
        if at < 0 or (at and (self._is_full or name[at - 1] != ".")):
            return False
        for part in self._parts.split("\n"):
            self._steps.spend(_PART_STEPS)
            if not name.startswith(part, at) or name[at + len(part) : at + len(part) + 1] == "\n":
                return False
            at += len(part) + 1
        return True


def _literal_tail(text: str) -> str:
    """Return characters that end every matching name; empty if they differ."""
    found = _TAIL.search(text)
    assert found is not None
    is_escaped = text.endswith("\\", 0, found.start())
    return "" if "|" in text else found[0][1:] if is_escaped else found[0]


class _Automaton:
    """An automaton that matches a pattern one character at a time."""

    # A state is the set of nodes that a match may have reached.

    def __init__(self, nodes: _Nodes, steps: MatchBudget, *, is_full: bool) -> None:
        self._nodes, self._steps, self._is_full = nodes, steps, is_full
        self._numbers: dict[frozenset[int], int] = {}
        self._states: list[frozenset[int]] = []
        self._arcs: list[dict[str, int]] = []
        self._start = self._number(self._closure([0]))

    def fits(self, name: str) -> bool:
        self._steps.spend(len(name) // 4 + 1)
        state = self._start
        for character in name:
            following = self._arcs[state].get(character)
            state = self._add_arc(state, character) if following is None else following
        return len(self._nodes) in self._states[state]

    def _add_arc(self, state: int, character: str) -> int:
        """Return the state after a character."""
        # A match may start after a dot, unless it has to be the full name.
        starts = [0] if character == "." and not self._is_full else []
        for at in self._states[state]:
            node = self._nodes[at] if at < len(self._nodes) else None
            if isinstance(node, _Place) and node.fits(character):
                starts += [at, at + 1] if node.repeats else [at + 1]
        self._steps.spend(_ARC_STEPS + len(self._states[state]))
        following = self._number(self._closure(starts))
        self._arcs[state][character] = following
        return following

    def _number(self, nodes: frozenset[int]) -> int:
        """Return a state's number; create a new state."""
        number = self._numbers.get(nodes)
        if number is None:
            self._steps.spend(_STATE_STEPS + 16 * len(nodes))
            number = self._numbers[nodes] = len(self._states)
            self._states.append(nodes)
            self._arcs.append({})
        return number

    def _closure(self, starts: list[int]) -> frozenset[int]:
        """Return nodes and all nodes that are reachable from them without a character."""
        reached: set[int] = set()
        while starts:
            at = starts.pop()
            if at in reached:
                continue
            reached.add(at)
            node = self._nodes[at] if at < len(self._nodes) else None
            if isinstance(node, _Branch):
                starts += node.targets
            elif node is not None and node.is_optional:
                starts.append(at + 1)
        self._steps.spend(len(reached))
        return frozenset(reached)


class _Parser:
    """Parses a pattern into nodes."""

    def __init__(self, text: str, full_text: str, where: str, steps: MatchBudget) -> None:
        self._text, self._pattern, self._where, self._steps = text, full_text, where, steps
        self._nodes: _Nodes = []
        self._at = 0

    def parse(self, *, is_full: bool) -> _Nodes:
        self._steps.spend(_NODE_STEPS * len(self._text))
        self._parse_alternatives(0)
        if self._at < len(self._text):
            raise self._malformed()
        first = self._nodes[0]
        if is_full and isinstance(first, _Branch) and len(first.targets) > 1:
            raise self._refused()  # `^` would belong to the first alternative alone
        return self._nodes

    def _parse_alternatives(self, depth: int) -> None:
        if depth > _DEEPEST:
            raise self._refused()
        nodes = self._nodes
        split, ends = len(nodes), []
        nodes.append(_Branch(()))
        targets = [len(nodes)]
        self._parse_sequence(depth)
        while self._peek() == "|":
            self._at += 1
            ends.append(len(nodes))
            nodes.append(_Branch(()))
            targets.append(len(nodes))
            self._parse_sequence(depth)
        nodes[split] = _Branch(tuple(targets))
        for end in ends:
            nodes[end] = _Branch((len(nodes),))

    def _parse_sequence(self, depth: int) -> None:
        while self._peek() not in ("", "|", ")"):
            if self._peek() == "(":
                self._parse_group(depth)
            else:
                self._nodes.append(self._place())

    def _parse_group(self, depth: int) -> None:
        self._at += 3 if self._text.startswith("(?:", self._at) else 1
        if self._peek() in ("?", *_REPEATS):
            raise self._refused()
        self._parse_alternatives(depth + 1)
        if self._peek() != ")":
            raise self._malformed()
        self._at += 1
        if self._peek() in (*_REPEATS, "{") and self._peek():
            raise self._refused()

    def _place(self) -> _Place:
        test = self._one()
        repeat = self._peek()
        if repeat == "{":
            raise self._refused()
        if repeat and repeat in _REPEATS:
            self._at += 1
            if self._peek() and self._peek() in (*_REPEATS, "{"):
                raise self._refused()
        else:
            repeat = ""
        return _Place(test, repeat in ("*", "+"), repeat in ("*", "?"))

    def _one(self) -> str | re.Pattern[str] | None:
        """Return the test for the pattern's next character."""
        character = self._peek()
        self._at += 1
        if character == "[":
            return self._character_class()
        if character == "\\":
            escaped = self._peek()
            self._at += 1
            if escaped in _ESCAPES:
                return _ESCAPES[escaped]
            if not escaped or escaped.isalnum():
                raise self._refused() if escaped else self._malformed()
            return escaped
        if character in _REPEATS:
            raise self._malformed()
        if character in ("^", "$"):
            raise self._refused()
        return None if character == "." else character

    def _character_class(self) -> re.Pattern[str]:
        end = self._text.find("]", self._at + (2 if self._text.startswith("^", self._at) else 1))
        if end < 0:
            raise self._malformed()
        source, self._at = self._text[self._at - 1 : end + 1], end + 1
        if "[" in source[1:] or "\\" in source:
            raise self._refused()
        self._steps.spend(_CLASS_STEPS + 4 * len(source))
        try:
            return re.compile(source)
        except re.error:
            raise self._malformed() from None

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _malformed(self) -> FormatError:
        return FormatError("a module pattern must be a regular expression", where=self._where, found=self._pattern)

    def _refused(self) -> UnsupportedError:
        return UnsupportedError(
            "a module pattern has a form that could take forever to match",
            where=self._where,
            found=self._pattern,
            expected=r"names, and parts such as [0-9]+, \d, .* and (a|b)",
            fix="Write module names in its place in adapter_config.json.",
        )
