"""The plan of a load: which data of a checkpoint goes into which objects of a state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from shardckpt.boxes import Box
from shardckpt.checkpoint.load.source import CheckpointSource, allocate
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.format.opened.state_tree import ForeignValue
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.plan.naming.fqn import make_cleaner
from shardckpt.plan.naming.sections import find_sections, model_paths
from shardckpt.state.keys.slots import UnequalSteps
from shardckpt.state.local.local_shards import LocalShard, TensorShards

Put = Callable[[Any], None]


class Taker(NamedTuple):
    """A value that is built from the checkpoint and passed to an object.

    Attributes:
        path: What the user calls who takes it.
        tree: As it was saved, arrays as `TensorRef`.
        put: Takes it.
    """

    path: Path
    tree: Any
    put: Put


class LoadItem(NamedTuple):
    """A saved array, and where its elements go.

    Attributes:
        path: What the user calls it.
        entry: The saved array.
        array: The places on this rank.
    """

    path: Path
    entry: TensorEntry
    array: TensorShards


@dataclass
class LoadPlan:
    """The plan of a load, and every reason not to do it.

    Attributes:
        arrays: Arrays that are read straight into their places.
        values: Values that are built from the checkpoint and passed to objects, in order.
        after: Called when the arrays are filled: models and optimizers take over their values.
        problems: What does not fit, one sentence each.
        taken: Paths of the checkpoint that the state wants, with all below them.
        missing: Paths that the checkpoint lacks.
        unexpected: Paths that only the checkpoint has.
    """

    arrays: list[LoadItem] = field(default_factory=list)
    values: list[Taker] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    taken: set[Path] = field(default_factory=set)
    missing: set[Path] = field(default_factory=set)
    unexpected: list[Path] = field(default_factory=list)

    def unexpected_shown(self) -> list[str]:
        """Return the unexpected paths, an unexpected subtree in one line."""
        return [
            f"unexpected: {dotted(paths[0])}"
            if len(paths) == 1
            else f"unexpected: {dotted(root)} ({len(paths)} values)"
            for root, paths in self.unexpected_roots().items()
        ]

    def unexpected_roots(self) -> dict[Path, list[Path]]:
        """Return the unexpected paths, by the shortest path below which all are unexpected."""
        known = {path[:n] for path in (*self.taken, *self.missing) for n in range(len(path) + 1)}
        groups: dict[Path, list[Path]] = {}
        for path in self.unexpected:
            root = next((path[:n] for n in range(1, len(path)) if path[:n] not in known), path)
            groups.setdefault(root, []).append(path)
        return groups


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load.

    Attributes:
        strict: Names that are missing or unexpected are problems.
        include: Globs of dotted names: nothing else is loaded; None for everything. One that matches the name of a part
            takes all that is below it.
        ignore_extra: Values that only the checkpoint has are not problems.
        cast: Another type than the saved one is not a problem.
        is_own_only: Files in other folders than the checkpoint are not read.
        unequal_steps: What becomes of steps that differ among parameters that are one flat parameter now.
    """

    strict: bool = True
    include: tuple[str, ...] | None = None
    ignore_extra: bool = False
    cast: bool = False
    is_own_only: bool = False
    unequal_steps: UnequalSteps = "error"

    @property
    def is_selective(self) -> bool:
        """Whether some of the state is to stay as it is."""
        return self.include is not None and "*" not in self.include

    @property
    def takes_all(self) -> bool:
        """Whether the state has to have all that the checkpoint has."""
        return self.include is None and not self.ignore_extra

    def matching_globs(self, path: Path) -> Iterator[str]:
        """Yield the globs that match a path, or a part that contains it."""
        names = [dotted(path[:n]) for n in range(min(1, len(path)), len(path) + 1)]
        for glob in self.include or ():
            if any(fnmatchcase(name, glob) or fnmatchcase(f"{name}.", glob) for name in names):
                yield glob

    def may_want_below(self, path: Path) -> bool:
        """Return True if a glob may match something below a path."""
        name = f"{dotted(path)}."
        heads = [re.split(r"[*?\[]", glob, maxsplit=1)[0] for glob in self.include or ("*",)]
        return any(name.startswith(head) or head.startswith(name) for head in heads)


class LoadPlanBuilder:
    """Adds arrays and values of a checkpoint to a plan, and notes what does not fit.

    Args:
        source: The checkpoint.
        options: Options of the load.

    Attributes:
        source: As given.
        options: As given.
        plan: The plan so far.
    """

    def __init__(self, source: CheckpointSource, options: LoadOptions) -> None:
        self.source, self.options = source, options
        self.plan = LoadPlan()
        self._matched: set[str] = set()

    def wants(self, path: Path) -> bool:
        """Return True if something is to be loaded."""
        if self.options.include is None:
            return True
        globs = set(self.options.matching_globs(path))
        self._matched |= globs
        return bool(globs)

    def unmatched_globs(self) -> list[str]:
        """Return the globs that match nothing, in the state or in the checkpoint: other ranks' states may have more."""
        left = [glob for glob in self.options.include or () if glob not in self._matched and glob != "*"]
        known = {glob for path in self.source.paths for glob in self.options.matching_globs(path)} if left else set()
        return [glob for glob in left if glob not in known]

    def add_problem(self, path: Path, text: str) -> None:
        """Add a problem, if its path is to be loaded."""
        if self.wants(path):
            self.plan.problems.append(text)

    def add_missing(self, path: Path) -> None:
        """Add a path that the checkpoint does not have."""
        self.plan.missing.add(path)
        if self.options.strict:
            self.add_problem(path, f"missing: {dotted(path)}")

    def add_value(self, path: Path, put: Put) -> None:
        """Add a value, or the state of an object.

        Args:
            path: Its path in the state.
            put: Receives it.
        """
        value, is_there = self.source.find(path)
        if not is_there:
            self.add_missing(path)
            return
        self.plan.taken.add(path)
        if self.wants(path):
            self.plan.values.append(Taker(path, value, put))

    def add_array(self, path: Path, source: Path, array: TensorShards) -> None:
        """Add an array.

        Args:
            path: Its path in the state.
            source: Its path in the checkpoint.
            array: Where its elements go.
        """
        entry = self.source.arrays.get(source)
        if entry is None:
            value, is_there = self.source.find(source)
            if not is_there:
                self.add_missing(path)
                return
            self.plan.taken.add(source)
            kind = "" if isinstance(value, ForeignValue) else f", but a value of type {type(value).__name__}"
            self.add_problem(path, f"kind mismatch for {dotted(path)}: the checkpoint has no tensor there{kind}")
            return
        self.plan.taken.add(source)
        if not self.wants(path) or (self.options.is_own_only and self.source.is_elsewhere(entry)):
            return
        if any(_repeats(shard.tensor) for shard in array.shards) and entry.shape == array.shape:
            array = self._without_repeats(path, entry, array)
        self.plan.problems += _find_mismatches(path, entry, array, can_cast=self.options.cast)
        self.plan.arrays.append(LoadItem(path, entry, array))

    def _without_repeats(self, path: Path, entry: TensorEntry, array: TensorShards) -> TensorShards:
        """Return the places of an expanded tensor, each once; the saved values have to be equal where it repeats."""
        shards = []
        for shard in array.shards:
            size, at = shard.tensor.shape, _once(shard.tensor)
            if not shard.tensor.is_meta:
                (located,) = self.source.locate([entry])  # before memory is taken for it
                values = allocate(located, size)
                self.source.elements.read([(located, array._replace(shards=(LocalShard(shard.box, values),)))])
                if not _are_alike(values, values[at].expand(size)):
                    self.add_problem(
                        path,
                        f"{dotted(path)} is an expanded tensor, whose elements share memory, and the saved values"
                        " differ where it repeats itself (make it contiguous: `tensor.expand(...).clone()`)",
                    )
            place = shard.tensor.detach()[at]
            shards.append(LocalShard(Box(shard.box.offset, tuple(place.shape)), place))
        return array._replace(shards=tuple(shards))


def _find_mismatches(path: Path, entry: TensorEntry, array: TensorShards, *, can_cast: bool) -> Iterator[str]:
    """Yield why the saved array cannot be read to its place."""
    name, dtype = dotted(path), dtype_name(array.dtype)
    if any(shard.tensor.is_meta for shard in array.shards):
        yield f"no memory for {name}: it is on the meta device (`to_empty` gives some)"
    if entry.shape != array.shape:
        yield f"size mismatch for {name}: found {list(entry.shape)}, expected {list(array.shape)}"
    if entry.dtype != dtype and not can_cast:
        yield f"dtype mismatch for {name}: found {entry.dtype}, expected {dtype} (cast=True converts)"


def _repeats(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor share memory, as `expand` makes them."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _once(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the index that takes each element of an expanded tensor once."""
    return tuple(slice(0, 1) if not stride else slice(None) for stride in tensor.stride())


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124  (NaN)


def model_names(saved: CheckpointSource, path: Path, names: Iterable[str]) -> Mapping[str, Path]:
    """Return the names of a model's tensors in the checkpoint, with where they are.

    They are at the model's own path; in a checkpoint of another tool, where that has its model, as it spells them.

    Args:
        saved: The checkpoint.
        path: Where the model is in the state.
        names: Of its tensors.
    """
    n = len(path)
    here = {str(at[n]): at for at in saved.arrays if len(at) == n + 1 and at[:n] == path}
    if saved.is_native or any(name in here for name in names):
        clean = make_cleaner(here)
        return {**{clean(name): at for name, at in here.items()}, **here}
    sections = find_sections(saved.manifest)
    depth = len(sections.model)
    back = dict(zip(saved.manifest.tensors, saved.arrays, strict=True))
    stored = {back[at]: ".".join(map(str, at[depth:])) or dotted(at) for at in model_paths(saved.manifest, sections)}
    clean = make_cleaner(stored.values())
    return {saved.rename_key(clean(name)): at for at, name in stored.items()}
