"""Parse rules: TOML with one table per rule, and `FROM=TO` on a command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from shardckpt.dtypes import FLOATS, SHORT_NAMES
from shardckpt.errors import UsageError
from shardckpt.plan.rules.patterns import Pattern
from shardckpt.plan.rules.rules import EACH, Cast, Drop, Fuse, IfAny, Rename, Rule, Split, Stack, Transpose, Unstack

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The separator of FROM and TO, which excludes the `=` of a look-ahead or look-behind.
_EQUALS = re.compile(r"(?<![?<\\])=")

_MAX_PARTS = 10_000
_OPTIONAL = "optional"
_SHARES = "shares"  # key in a parsed rule that marks its sizes as proportions


def parse_rename(text: str) -> Rename:
    """Parse `--rename FROM=TO` to a rule."""
    where = f"--rename {text}"
    split = _EQUALS.search(text)
    if split is None or not split.start():
        raise UsageError("a renaming must have the form FROM=TO", where=where, expected=r"such as 'model\.(.*)=\1'")
    return _rename({"from": text[: split.start()], "to": text[split.end() :]}, where)


def parse_rules(text: str, where: str, config: Mapping[str, object] | None = None) -> tuple[Rule, ...]:
    """Parse the rules in a TOML file."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"invalid TOML: {error}", where=where) from error
    tables = raw.get("rule")
    if set(raw) != {"rule"} or not isinstance(tables, list):
        raise UsageError(
            "a rules file must be a list of rules",
            where=where,
            found=", ".join(raw) or "nothing",
            expected="[[rule]] tables",
        )
    known = config or {}
    return tuple(_rule(table, f"{where}, rule {number}", known) for number, table in enumerate(tables, 1))


def rules_text(place: str, read: Callable[[], str | None]) -> str:
    """Return a rules file's text, or a built-in set."""
    found = read()
    if found is not None:
        return found
    own = shipped()
    if place not in own:
        raise UsageError("rules are not found", where=place, expected=f"a TOML file, or one of {', '.join(own)}")
    return own[place]


def shipped() -> dict[str, str]:
    """Return built-in rules: name to TOML."""
    folder = files("shardckpt.plan") / "rule_sets"
    named = sorted((each.name, each) for each in folder.iterdir() if each.name.endswith(".toml"))
    return {name.removesuffix(".toml"): each.read_text(encoding="utf-8") for name, each in named}


def _rule(table: object, where: str, config: Mapping[str, object]) -> Rule:
    found: object = ", ".join(table) if isinstance(table, dict) else table
    kinds = [key for key in table if key != _OPTIONAL] if isinstance(table, dict) else []
    if not isinstance(table, dict) or len(kinds) != 1 or kinds[0] not in KINDS:
        raise UsageError("a rule must have one known kind", where=where, found=found, expected=", ".join(KINDS))
    [kind], given = kinds, table[kinds[0]]
    may_miss = table.get(_OPTIONAL, False)
    if type(may_miss) is not bool:
        raise UsageError("`optional` must be true or false", where=where, found=may_miss)
    make, needed, optional = KINDS[kind]
    where = f"{where} ({kind})"
    if not isinstance(given, dict) or not needed <= set(given) or not set(given) <= needed | optional:
        found = ", ".join(given) if isinstance(given, dict) else given
        wanted = ", ".join(sorted(needed)) + (f", and perhaps {', '.join(sorted(optional))}" if optional else "")
        raise UsageError("the rule's keys do not fit its kind", where=where, found=found, expected=wanted)
    rule = make(_with_numbers(given, where, config), where)
    return IfAny(rule) if may_miss else rule


def _with_numbers(given: Mapping[str, Any], where: str, config: Mapping[str, object]) -> dict[str, Any]:
    """Replace names in `groups` and `sizes` by numbers from the model's config."""

    def number(value: object) -> object:
        if not isinstance(value, str):
            return value
        found = config.get(value)
        if type(found) is not int:
            raise UsageError(
                f"the rule needs {value!r} from the model's config.json, which does not have it",
                where=where,
                fix="Name the folder that holds it with --config-from, or write the number into the rule.",
            )
        return found

    found = dict(given)
    if "groups" in given:
        found["groups"] = EACH if given["groups"] == "each" else _count(number(given["groups"]), where)
    sizes = given.get("sizes")
    if isinstance(sizes, list) and sizes and all(isinstance(size, str) for size in sizes):
        found["sizes"], found[_SHARES] = [number(size) for size in sizes], True
    return found


def _rename(given: Mapping[str, Any], where: str) -> Rename:
    source, to = _pattern(given["from"], where), _text(given["to"], where)
    source.check(to)
    return Rename(source, to)


def _drop(given: Mapping[str, Any], where: str) -> Drop:
    return Drop(_pattern(given["name"], where))


def _stack(given: Mapping[str, Any], where: str) -> Stack:
    source, over, to = _pattern(given["from"], where), _text(given["over"], where), _text(given["to"], where)
    source.check(to)
    if over not in source.places or f"{{{over}}}" in to:
        raise UsageError(f"{{{over}}} must stand in `from`, and not in `to`", where=where, found=f"{source} -> {to}")
    return Stack(source, over, to, _int(given.get("dim", 0), where))


def _unstack(given: Mapping[str, Any], where: str) -> Unstack:
    source, over, to = _pattern(given["from"], where), _text(given["over"], where), _text(given["to"], where)
    source.check(to, frozenset({over}))
    if over in source.places or f"{{{over}}}" not in to:
        raise UsageError(f"{{{over}}} must stand in `to`, and not in `from`", where=where, found=f"{source} -> {to}")
    return Unstack(source, over, to, _int(given.get("dim", 0), where))


def _split(given: Mapping[str, Any], where: str) -> Split:
    source = _pattern(given["from"], where)
    to = tuple(_text(each, where) for each in _list(given["to"], where))
    for each in to:
        source.check(each)
    sizes = tuple(_count(each, where) for each in _list(given["sizes"], where)) if "sizes" in given else ()
    if sizes and len(sizes) != len(to):
        raise UsageError("sizes and names differ in number", where=where, found=len(sizes), expected=len(to))
    return Split(source, to, sizes, _int(given.get("dim", 0), where), given.get("groups", 1), _SHARES in given)


def _fuse(given: Mapping[str, Any], where: str) -> Fuse:
    sources, to = tuple(_pattern(each, where) for each in _list(given["from"], where)), _text(given["to"], where)
    for source in sources:
        source.check(to)
    return Fuse(sources, to, _int(given.get("dim", 0), where), given.get("groups", 1))


def _transpose(given: Mapping[str, Any], where: str) -> Transpose:
    dims = tuple(_int(each, where) for each in _list(given["dims"], where))
    return Transpose(_pattern(given["name"], where), dims)


def _cast(given: Mapping[str, Any], where: str) -> Cast:
    text = _text(given["dtype"], where)
    dtype = SHORT_NAMES.get(text, text)
    if dtype not in FLOATS:
        raise UsageError("`dtype` must be a float type", where=where, found=text, expected=", ".join(sorted(FLOATS)))
    return Cast(_pattern(given["name"], where), dtype)


_Make = Callable[[Mapping[str, Any], str], Rename | Drop | Stack | Unstack | Split | Fuse | Transpose | Cast]
# Parser, required keys and optional keys, by kind.
KINDS: Mapping[str, tuple[_Make, frozenset[str], frozenset[str]]] = {
    "rename": (_rename, frozenset({"from", "to"}), frozenset()),
    "drop": (_drop, frozenset({"name"}), frozenset()),
    "stack": (_stack, frozenset({"from", "over", "to"}), frozenset({"dim"})),
    "unstack": (_unstack, frozenset({"from", "over", "to"}), frozenset({"dim"})),
    "split": (_split, frozenset({"from", "to"}), frozenset({"sizes", "dim", "groups"})),
    "fuse": (_fuse, frozenset({"from", "to"}), frozenset({"dim", "groups"})),
    "transpose": (_transpose, frozenset({"name", "dims"}), frozenset()),
    "cast": (_cast, frozenset({"name", "dtype"}), frozenset()),
}


def _pattern(value: object, where: str) -> Pattern:
    return Pattern(_text(value, where), where)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError("this must be text", where=where, found=value)
    return value


def _int(value: object, where: str) -> int:
    if type(value) is not int:
        raise UsageError("this must be an integer", where=where, found=value)
    return value


def _count(value: object, where: str) -> int:
    if _int(value, where) < 1:
        raise UsageError("this must be a number from 1", where=where, found=value)
    return _int(value, where)


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_PARTS:
        raise UsageError("this must be a list", where=where, found=value)
    return value
