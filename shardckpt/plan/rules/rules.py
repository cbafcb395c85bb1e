"""Rules that rename and reshape a model's tensors, planned without data.

Each rule works on the previous rules' results. For every final name, the plan says how to construct it from the
checkpoint's tensors: concatenate, split, permute. Optimizer slots are constructed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import FLOATS, bits
from shardckpt.errors import NameCollisionError, UsageError
from shardckpt.manifest import Piece, TensorEntry
from shardckpt.plan.layout.copy_plan import narrow, permute, shift_pieces, squeeze, unsqueeze
from shardckpt.plan.rules.patterns import Match, Pattern

EACH = 0  # for `groups`: as many groups as a dimension has elements


@dataclass(frozen=True, slots=True)
class Rename:
    """Rename tensors."""

    source: Pattern
    to: str  # new name, with the pattern's placeholders


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop tensors."""

    name: Pattern


@dataclass(frozen=True, slots=True)
class Stack:
    """Stack tensors of equal shape along a new dimension."""

    source: Pattern  # its placeholder `over` counts tensors: 0, 1, 2 and so on
    over: str  # placeholder for the index
    to: str
    dim: int


@dataclass(frozen=True, slots=True)
class Unstack:
    """Unstack tensors along a dimension: the inverse of `Stack`."""

    source: Pattern
    over: str  # placeholder for each result's index
    to: str  # the results' names, with that placeholder
    dim: int  # dimension to remove


@dataclass(frozen=True, slots=True)
class Split:
    """Split tensors along one dimension."""

    source: Pattern
    to: tuple[str, ...]  # the parts' names, in order
    sizes: tuple[int, ...]  # each part's elements along `dim`, or proportions; empty for equal parts
    dim: int
    # Equal groups along `dim`, each with a piece from every part; with `EACH`, one element from every part.
    groups: int = 1
    are_shares: bool = False  # whether `sizes` are proportions


@dataclass(frozen=True, slots=True)
class Fuse:
    """Concatenate tensors along one dimension: the inverse of `Split`."""

    source: tuple[Pattern, ...]  # in order
    to: str
    dim: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Transpose:
    """Permute tensors' dimensions."""

    name: Pattern
    dims: tuple[int, ...]  # for every new dimension, the index of the old one


@dataclass(frozen=True, slots=True)
class Cast:
    """Write a model's tensors in another float dtype; optimizer slots keep theirs."""

    name: Pattern
    dtype: str  # in torch's spelling


@dataclass(frozen=True, slots=True)
class IfAny:
    """A rule that may match nothing."""

    rule: Rename | Drop | Stack | Unstack | Split | Fuse | Transpose | Cast


Rule = Rename | Drop | Stack | Unstack | Split | Fuse | Transpose | Cast | IfAny


class SourceTensor(NamedTuple):
    """A tensor in the checkpoint."""

    name: str
    shape: Shape


class Narrow(NamedTuple):
    """A tensor's slice along one dimension, from `start`."""

    of: Recipe
    dim: int
    start: int
    shape: Shape


class Concat(NamedTuple):
    """Tensors concatenated along one dimension."""

    parts: tuple[Recipe, ...]
    dim: int
    shape: Shape


class Unsqueeze(NamedTuple):
    """A tensor with an additional dimension: its size is 1."""

    of: Recipe
    dim: int
    shape: Shape


class Squeeze(NamedTuple):
    """A tensor without a dimension: its size was 1."""

    of: Recipe
    dim: int
    shape: Shape


class Permute(NamedTuple):
    """A tensor with permuted dimensions."""

    of: Recipe
    dims: tuple[int, ...]
    shape: Shape


# A tensor's construction from others; every class has a `shape`.
Recipe = SourceTensor | Narrow | Concat | Unsqueeze | Squeeze | Permute


class RemappedTensor(NamedTuple):
    """One tensor that the rules produce."""

    recipe: Recipe
    dtype: str  # its sources' dtype
    cast: str = ""  # dtype to write, if a rule sets it


@dataclass(frozen=True, slots=True)
class RemapPlan:
    """Tensors that rules produce from a model."""

    made: Mapping[str, RemappedTensor]  # final name to its construction, in order
    dropped: tuple[str, ...]  # checkpoint tensors that rules dropped


def plan_remap(rules: Sequence[Rule], tensors: Mapping[str, tuple[Shape, str]]) -> RemapPlan:
    """Plan the tensors that the rules produce."""
    made = {name: RemappedTensor(SourceTensor(name, shape), dtype) for name, (shape, dtype) in tensors.items()}
    for number, each in enumerate(rules, 1):
        rule = each.rule if isinstance(each, IfAny) else each
        where = f"rule {number} ({type(rule).__name__.lower()})"
        made = _apply(rule, made, where, may_miss=rule is not each)
    used = {leaf.name for each in made.values() for leaf in iter_sources(each.recipe)}
    return RemapPlan(made, tuple(name for name in tensors if name not in used))


def iter_sources(recipe: Recipe) -> Iterator[SourceTensor]:
    """Yield a recipe's source tensors in order, including repetitions."""
    if isinstance(recipe, SourceTensor):
        yield recipe
    elif isinstance(recipe, Concat):
        for part in recipe.parts:
            yield from iter_sources(part)
    else:
        yield from iter_sources(recipe.of)


def replace_sources(recipe: Recipe, names: Mapping[str, str]) -> Recipe:
    """Rename a recipe's source tensors, whose shapes must be equal; names not in `names` stay."""
    if isinstance(recipe, SourceTensor):
        return recipe._replace(name=names.get(recipe.name, recipe.name))
    if isinstance(recipe, Concat):
        return recipe._replace(parts=tuple(replace_sources(part, names) for part in recipe.parts))
    return recipe._replace(of=replace_sources(recipe.of, names))


def apply_recipe(recipe: Recipe, name: str, entries: Mapping[str, TensorEntry]) -> TensorEntry:
    """Build a tensor's entry from resolved entries."""
    found = [entries[leaf.name] for leaf in iter_sources(recipe)]
    types = {(entry.stored, entry.delivered) for entry in found}
    if len(types) > 1:
        raise UsageError(
            "a tensor would be made of several types", where=name, found=", ".join(sorted(map(str, types)))
        )
    first = found[0]
    if isinstance(recipe, SourceTensor):
        return first._replace(path=(name,))
    if bits(first.stored) % 8:
        raise UsageError("elements narrower than a byte cannot be split", where=name, found=first.stored)
    return TensorEntry((name,), recipe.shape, first.stored, tuple(_pieces(recipe, entries)), first.delivered)


def _pieces(recipe: Recipe, entries: Mapping[str, TensorEntry]) -> list[Piece]:
    if isinstance(recipe, SourceTensor):
        return list(entries[recipe.name].pieces)
    if isinstance(recipe, Concat):
        found, at = [], 0
        for part in recipe.parts:
            found += shift_pieces(_pieces(part, entries), recipe.dim, at)
            at += part.shape[recipe.dim]
        return found
    inner = _pieces(recipe.of, entries)
    if isinstance(recipe, Narrow):
        offset = tuple(recipe.start if d == recipe.dim else 0 for d in range(len(recipe.shape)))
        dtype = next(entries[leaf.name].stored for leaf in iter_sources(recipe))
        return narrow(inner, Box(offset, recipe.shape), dtype)
    if isinstance(recipe, Unsqueeze):
        return unsqueeze(inner, recipe.dim)
    return squeeze(inner, recipe.dim) if isinstance(recipe, Squeeze) else permute(inner, recipe.dims)


_Tensors = dict[str, RemappedTensor]


def _apply(rule: Rule, made: _Tensors, where: str, *, may_miss: bool) -> _Tensors:
    """Apply one rule to all tensors."""
    does: Mapping[type, Callable[..., dict[str, _Tensors]]] = {
        Rename: _rename,
        Drop: _drop,
        Stack: _stack,
        Unstack: _unstack,
        Split: _split,
        Fuse: _fuse,
        Transpose: _transpose,
        Cast: _cast,
    }
    # Replacements for each matching name; a result with several sources replaces the first.
    taken = does[type(rule)](rule, made, where)
    if not taken and not may_miss:
        raise UsageError(
            "the rule matches no tensor",
            where=where,
            found=f"{len(made)} names such as {', '.join(list(made)[:3])}",
            fix="`shardckpt inspect` lists names; rules apply in order. A rule in a file may have `optional = true`.",
        )
    found: _Tensors = {}
    for name, each in made.items():
        for new, thing in taken.get(name, {name: each}).items():
            if new in found:
                raise NameCollisionError(f"two tensors would both be named {new!r}", where=where)
            found[new] = thing
    return found


def _find_matches(pattern: Pattern, made: _Tensors) -> Iterator[tuple[str, Match]]:
    for name in made:
        match = pattern.match(name)
        if match is not None:
            yield name, match


def _rename(rule: Rename, made: _Tensors, _where: str) -> dict[str, _Tensors]:
    return {name: {match.expand(rule.to): made[name]} for name, match in _find_matches(rule.source, made)}


def _drop(rule: Drop, made: _Tensors, _where: str) -> dict[str, _Tensors]:
    return {name: {} for name, _ in _find_matches(rule.name, made)}


def _cast(rule: Cast, made: _Tensors, where: str) -> dict[str, _Tensors]:
    found: dict[str, _Tensors] = {}
    for name, _ in _find_matches(rule.name, made):
        if made[name].dtype not in FLOATS:
            raise UsageError(f"{name} must have a float type to be cast", where=where, found=made[name].dtype)
        found[name] = {name: made[name]._replace(cast=rule.dtype)}
    return found


def _transpose(rule: Transpose, made: _Tensors, where: str) -> dict[str, _Tensors]:
    found: dict[str, _Tensors] = {}
    for name, _ in _find_matches(rule.name, made):
        each = made[name]
        shape = each.recipe.shape
        dims = tuple(d + len(shape) if d < 0 else d for d in rule.dims)
        if sorted(dims) != list(range(len(shape))):
            raise UsageError(
                f"dims do not fit {name}", where=where, found=list(rule.dims), expected=f"all of {len(shape)}"
            )
        recipe = Permute(each.recipe, dims, tuple(shape[d] for d in dims))
        found[name] = {name: each._replace(recipe=recipe)}
    return found


def _stack(rule: Stack, made: _Tensors, where: str) -> dict[str, _Tensors]:
    groups: dict[str, dict[int, str]] = {}
    for name, match in _find_matches(rule.source, made):
        number = match.number(rule.over)
        if number is None:
            raise UsageError(f"{{{rule.over}}} must be a number in {name}", where=where, found=match[rule.over])
        group = groups.setdefault(match.expand(rule.to), {})
        if number in group:
            raise NameCollisionError(f"{group[number]!r} and {name!r} have one place in a stack", where=where)
        group[number] = name
    found: dict[str, _Tensors] = {}
    for to, group in groups.items():
        missing = next((i for i in range(len(group)) if i not in group), None)
        if missing is not None:
            raise UsageError(
                f"{to} would have a hole: {{{rule.over}}} = {missing} is missing", where=where, found=sorted(group)
            )
        members = [group[i] for i in range(len(group))]
        first = _require_alike(members, made, where)
        shape = first.recipe.shape
        dim = _normalize_dim(rule.dim, len(shape) + 1, members[0], where)
        lifted_shape = (*shape[:dim], 1, *shape[dim:])
        parts = tuple(Unsqueeze(made[member].recipe, dim, lifted_shape) for member in members)
        recipe = Concat(parts, dim, (*shape[:dim], len(members), *shape[dim:]))
        found |= _replace_members(members, to, first._replace(recipe=recipe), made)
    return found


def _unstack(rule: Unstack, made: _Tensors, where: str) -> dict[str, _Tensors]:
    def parts(_name: str, match: Match, recipe: Recipe, dim: int) -> list[tuple[str, Recipe]]:
        shape = recipe.shape
        rest = (*shape[:dim], *shape[dim + 1 :])
        names = [match.expand(rule.to, {rule.over: str(i)}) for i in range(shape[dim])]
        return [(name, Squeeze(_narrow(recipe, dim, i, 1), dim, rest)) for i, name in enumerate(names)]

    return _split_each(rule, made, where, parts)


def _split(rule: Split, made: _Tensors, where: str) -> dict[str, _Tensors]:
    def parts(name: str, match: Match, recipe: Recipe, dim: int) -> list[tuple[str, Recipe]]:
        sizes = _sizes(rule, recipe.shape[dim], name, where)
        groups = rule.groups or min(sizes)
        runs: list[list[Recipe]] = [[] for _ in sizes]
        at = 0
        for _ in range(groups):
            for run, size in zip(runs, sizes, strict=True):
                run.append(_narrow(recipe, dim, at, size // groups))
                at += size // groups
        return [(match.expand(to), _concat(run, dim)) for to, run in zip(rule.to, runs, strict=True)]

    return _split_each(rule, made, where, parts)


def _split_each(
    rule: Unstack | Split,
    made: _Tensors,
    where: str,
    parts: Callable[[str, Match, Recipe, int], list[tuple[str, Recipe]]],
) -> dict[str, _Tensors]:
    """Return replacements for each tensor that a rule splits."""
    found: dict[str, _Tensors] = {}
    for name, match in _find_matches(rule.source, made):
        each = made[name]
        dim = _normalize_dim(rule.dim, len(each.recipe.shape), name, where)
        split = parts(name, match, each.recipe, dim)
        found[name] = {to: each._replace(recipe=part) for to, part in split}
        if len(found[name]) < len(split):
            raise NameCollisionError(f"parts of {name} would get one name", where=where)
    return found


def _fuse(rule: Fuse, made: _Tensors, where: str) -> dict[str, _Tensors]:
    groups: dict[str, dict[int, str]] = {}
    for number, pattern in enumerate(rule.source):
        for name, match in _find_matches(pattern, made):
            group = groups.setdefault(match.expand(rule.to), {})
            if number in group:
                raise NameCollisionError(f"{group[number]!r} and {name!r} have one place in a tensor", where=where)
            group[number] = name
    found: dict[str, _Tensors] = {}
    for to, group in groups.items():
        missing = [str(p) for number, p in enumerate(rule.source) if number not in group]
        if missing:
            raise UsageError(f"{to} would have a hole: nothing matches {missing[0]!r}", where=where)
        members = [group[number] for number in range(len(rule.source))]
        twice = [member for member in members if member in found]
        if twice:
            raise UsageError(f"{twice[0]} would be part of two tensors", where=where, found=to)
        dim = _normalize_dim(rule.dim, len(made[members[0]].recipe.shape), members[0], where)
        first = _require_alike(members, made, where, but=dim)
        recipes = [made[member].recipe for member in members]
        count = rule.groups or min(recipe.shape[dim] for recipe in recipes)
        odd = [member for member in members if count < 1 or made[member].recipe.shape[dim] % count]
        if odd:
            raise UsageError(f"{odd[0]} is not in {count} groups", where=where, found=made[odd[0]].recipe.shape)
        runs = [
            _narrow(recipe, dim, run * (recipe.shape[dim] // count), recipe.shape[dim] // count)
            for run in range(count)
            for recipe in recipes
        ]
        found |= _replace_members(members, to, first._replace(recipe=_concat(runs, dim)), made)
    return found


def _sizes(rule: Split, length: int, name: str, where: str) -> tuple[int, ...]:
    """Return each part's size in elements, checked against `length`."""
    sizes = rule.sizes or (1,) * len(rule.to)
    if rule.are_shares or not rule.sizes:
        unit = length // sum(sizes)
        sizes = tuple(share * unit for share in sizes)
    groups = rule.groups or min(sizes)
    if sum(sizes) != length or groups < 1 or any(size % groups for size in sizes):
        raise UsageError(
            f"sizes do not fit {name}",
            where=where,
            found=f"{list(sizes)} in {groups} groups",
            expected=f"a sum of {length}, each a multiple of the groups",
        )
    return sizes


def _narrow(recipe: Recipe, dim: int, start: int, size: int) -> Recipe:
    """Slice a recipe; simplify slices and concatenated parts."""
    shape = recipe.shape
    if start == 0 and size == shape[dim]:
        return recipe
    if isinstance(recipe, Narrow) and recipe.dim == dim:
        return _narrow(recipe.of, dim, recipe.start + start, size)
    if isinstance(recipe, Concat) and recipe.dim == dim:
        inside, at = [], 0
        for part in recipe.parts:
            low, high = max(start, at), min(start + size, at + part.shape[dim])
            if low < high:
                inside.append(_narrow(part, dim, low - at, high - low))
            at += part.shape[dim]
        return _concat(inside, dim) if inside else Narrow(recipe, dim, start, (*shape[:dim], size, *shape[dim + 1 :]))
    return Narrow(recipe, dim, start, (*shape[:dim], size, *shape[dim + 1 :]))


def _concat(parts: Sequence[Recipe], dim: int) -> Recipe:
    if len(parts) == 1:
        return parts[0]
    shape = parts[0].shape
    total = sum(part.shape[dim] for part in parts)
    return Concat(tuple(parts), dim, (*shape[:dim], total, *shape[dim + 1 :]))


def _replace_members(members: Sequence[str], to: str, made_of: RemappedTensor, made: _Tensors) -> dict[str, _Tensors]:
    """Replace the first member by the result, and others by nothing."""
    first = next(name for name in made if name in set(members))
    return {member: {to: made_of} if member == first else {} for member in members}


def _require_alike(members: Sequence[str], made: _Tensors, where: str, but: int | None = None) -> RemappedTensor:
    """Require equal dtypes and shapes, except in dimension `but`; return the first tensor."""

    def facts(name: str) -> tuple[object, ...]:
        shape = made[name].recipe.shape
        known = shape if but is None else (*shape[:but], *shape[but + 1 :])
        return len(shape), known, made[name].dtype, made[name].cast

    for member in members[1:]:
        if facts(member) != facts(members[0]):
            raise UsageError(
                f"{member} does not fit {members[0]}",
                where=where,
                found=f"{made[member].dtype} {list(made[member].recipe.shape)}",
                expected=f"{made[members[0]].dtype} {list(made[members[0]].recipe.shape)}",
            )
    return made[members[0]]


def _normalize_dim(dim: int, dims: int, name: str, where: str) -> int:
    """Return a non-negative dimension index after checking its range."""
    found = dim + dims if dim < 0 else dim
    if not 0 <= found < dims:
        raise UsageError(f"{name} has no such dimension", where=where, found=dim, expected=f"less than {dims}")
    return found
