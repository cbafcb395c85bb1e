"""A load plan: checkpoint data and their targets in a state."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from shardckpt.boxes import Box, full_box
from shardckpt.checkpoint.load.source import CheckpointSource, allocate
from shardckpt.checkpoint.stateful.stateful import dtype_name, has_memory
from shardckpt.dtypes import is_exact_upcast
from shardckpt.encodings.pickle_stubs import PerRankValue
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.plan.naming.fqn import make_cleaner
from shardckpt.plan.naming.sections import find_sections, model_paths
from shardckpt.plan.naming.weights import to_file_name
from shardckpt.plan.subclass_record import find_record
from shardckpt.readers.opened.state_tree import ForeignValue
from shardckpt.state.keys.slots import UnequalSteps, has_own_elements
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards, end_address, find_wrapper
from shardckpt.state.local.tensor_subclasses import find_difference, take_apart

Put = Callable[[Any], None]

_MAX_TEXT = 1 << 16  # bytes


class Taker(NamedTuple):
    """Saved value with the function that puts it into the state."""

    path: Path  # path of the target in the state
    tree: Any  # saved tree, with arrays as `TensorRef`
    put: Put  # function that puts the value into the state


class LoadItem(NamedTuple):
    """Saved array with its target on this rank."""

    path: Path  # path of the array in the state
    entry: TensorEntry
    array: TensorShards  # shards of this rank to fill


@dataclass
class LoadPlan:
    """A load plan, with all mismatches."""

    arrays: list[LoadItem] = field(default_factory=list)  # arrays to read directly into the state's memory
    values: list[Taker] = field(default_factory=list)  # values to put into the state, in order
    # Functions to call after the arrays are filled, in which models and optimizers use the new values.
    after: list[Callable[[], None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # mismatches, one sentence each
    taken: set[Path] = field(default_factory=set)  # paths of the checkpoint that are loaded, with everything below them
    missing: set[Path] = field(default_factory=set)  # paths that the checkpoint does not have
    unexpected: list[Path] = field(default_factory=list)  # paths that only the checkpoint has
    # Paths below models, and their optimizers, that this rank's state lacks; another pipeline stage may have them.
    of_others: list[Path] = field(default_factory=list)
    # Paths of models without any name that the checkpoint has, where names may be missing.
    unmatched: list[Path] = field(default_factory=list)
    # Whether models or objects may exchange data when they use what was read: those under torch's wrapper, and objects
    # with tensors.
    is_collective: bool = False

    @property
    def nbytes(self) -> int:
        """This rank's element bytes in `arrays`."""
        return sum(shard.tensor.nbytes for item in self.arrays for shard in item.array.shards)

    @property
    def fits(self) -> bool:
        """Whether the state fits, unless no rank has what this one lacks."""
        return not self.problems and not self.unexpected

    def add_unexpected(self, paths: Collection[Path]) -> None:
        """Make paths that no rank has unexpected ones."""
        self.unexpected += [path for path in self.of_others if path in paths]

    def unexpected_shown(self) -> list[str]:
        """Return the unexpected paths as text, with one line per unexpected subtree."""
        return [
            f"unexpected: {dotted(paths[0])}"
            if len(paths) == 1
            else f"unexpected: {dotted(root)} ({len(paths)} values)"
            for root, paths in self.unexpected_roots().items()
        ]

    def unexpected_roots(self) -> dict[Path, list[Path]]:
        """Return the unexpected paths by their highest unexpected parent."""
        known = {path[:n] for path in (*self.taken, *self.missing) for n in range(len(path) + 1)}
        groups: dict[Path, list[Path]] = {}
        for path in self.unexpected:
            root = next((path[:n] for n in range(1, len(path)) if path[:n] not in known), path)
            groups.setdefault(root, []).append(path)
        return groups


@dataclass(frozen=True)
class LoadOptions:
    """A load's options."""

    strict: bool = True  # whether missing or unexpected names are problems
    # Globs of dotted names to load; None for all names. A glob that matches a part includes everything below it.
    include: tuple[str, ...] | None = None
    ignore_extra: bool = False  # whether to accept values that only the checkpoint has
    cast: bool = False  # whether to accept other dtypes than the saved ones
    is_own_only: bool = False  # whether to skip files in other folders than the checkpoint
    unequal_steps: UnequalSteps = "error"  # handling of steps that differ among the members of one flat parameter

    @property
    def is_selective(self) -> bool:
        """Whether parts of the state may stay unchanged."""
        return self.include is not None and "*" not in self.include

    @property
    def takes_all(self) -> bool:
        """Whether the state must have all the checkpoint's values."""
        return self.include is None and not self.ignore_extra

    def matching_globs(self, path: Path) -> Iterator[str]:
        """Yield the globs that match a path, or a part that contains it."""
        names = [dotted(path[:n]) for n in range(min(1, len(path)), len(path) + 1)]
        for glob in self.include or ():
            if any(fnmatchcase(name, glob) or fnmatchcase(f"{name}.", glob) for name in names):
                yield glob

    def may_want_below(self, path: Path) -> bool:
        """Return True if a glob may match a path below a path."""
        name = f"{dotted(path)}."
        heads = [re.split(r"[*?\[]", glob, maxsplit=1)[0] for glob in self.include or ("*",)]
        return any(name.startswith(head) or head.startswith(name) for head in heads)


class LoadPlanBuilder:
    """Builds a load plan and records mismatches."""

    def __init__(self, source: CheckpointSource, options: LoadOptions) -> None:
        self.source, self.options = source, options
        self.plan = LoadPlan()  # plan so far
        self._matched: set[str] = set()

    def wants(self, path: Path) -> bool:
        """Return True if the options include a path."""
        if self.options.include is None:
            return True
        globs = set(self.options.matching_globs(path))
        self._matched |= globs
        return bool(globs)

    def wants_tensor(self, path: Path, inner: Iterable[str]) -> bool:
        """Return True if the options include a wrapper subclass; add a problem if they name a part of it alone."""
        if self.wants(path):
            return True
        parts = [dotted((*path, name)) for name in inner if self.wants((*path, name))]
        if parts:
            name = dotted(path)
            self.plan.problems.append(f"`include` must name {name} as one, and matches only {parts[0]} (add {name!r})")
        return False

    def unmatched_globs(self) -> list[str]:
        """Return the globs that match neither this rank's state nor the checkpoint."""
        # The states of other ranks may have more paths.
        left = [glob for glob in self.options.include or () if glob not in self._matched and glob != "*"]
        known = {glob for path in self.source.paths for glob in self.options.matching_globs(path)} if left else set()
        return [glob for glob in left if glob not in known]

    def add_problem(self, path: Path, text: str) -> None:
        """Add a problem, if the options include its path."""
        if self.wants(path):
            self.plan.problems.append(text)

    def add_missing(self, path: Path) -> None:
        """Add a path that the checkpoint does not have."""
        self.plan.missing.add(path)
        if self.options.strict:
            self.add_problem(path, f"missing: {dotted(path)}")

    def add_value(self, path: Path, put: Put) -> None:
        """Add a value, or an object's state."""
        value, is_there = self._take(path, path)
        if is_there and self.wants(path):
            self.plan.values.append(Taker(path, value, put))

    def _take(self, path: Path, source: Path) -> tuple[Any, bool]:
        """Return a checkpoint value, and whether it exists; note a missing one."""
        value, is_there = self.source.find(source)
        if is_there:
            self.plan.taken.add(source)
        else:
            self.add_missing(path)
        return value, is_there

    def add_array(self, path: Path, source: Path, array: TensorShards) -> None:
        """Add an array."""
        if find_wrapper(array) is not None:
            self._add_wrapper(path, source, array)
            return
        entry = self.source.arrays.get(source)
        if entry is None:
            value, is_there = self._take(path, source)
            if isinstance(value, dict) and (record := find_record(value)) is not None:
                if self.wants_tensor(path, value):
                    text = f"it was saved as a {record.kind}, and this is a plain tensor"
                    self.plan.problems.append(f"kind mismatch for {dotted(path)}: {text} (make it one before the load)")
                return
            if isinstance(value, ForeignValue) and isinstance(value.value, PerRankValue) and self.wants(path):
                raise value.value.error(dotted(source))
            if is_there:
                kind = "" if isinstance(value, ForeignValue) else f", but a value of type {type(value).__name__}"
                self.add_problem(path, f"kind mismatch for {dotted(path)}: the checkpoint has no tensor there{kind}")
            return
        self.plan.taken.add(source)
        if not self.wants(path) or (self.options.is_own_only and self.source.is_elsewhere(entry)):
            return
        layouts = {shard.tensor.layout for shard in array.shards if not shard.tensor.is_nested} - {torch.strided}
        if layouts:
            text = f"it was saved dense, and this has the layout {layouts.pop()}"
            self.add_problem(path, f"kind mismatch for {dotted(path)}: {text} (make it dense before the load)")
            return
        if not _fits(entry, array):
            if any(_repeats(shard.tensor) for shard in array.shards) and entry.shape == array.shape:
                array = self._without_repeats(path, entry, array)
            self.plan.problems += _find_mismatches(path, entry, array, can_cast=self._can_cast(entry, array))
        self.plan.arrays.append(LoadItem(path, entry, array))

    def _can_cast(self, entry: TensorEntry, array: TensorShards) -> bool:
        """Return True if the load may cast an array: as `trainable_only` accepts it from a base, or with `cast`."""
        is_upcast = is_exact_upcast(entry.dtype, dtype_name(array.dtype))
        return self.options.cast or (is_upcast and self.source.is_elsewhere(entry))

    def _can_fill(self, item: LoadItem) -> bool:
        """Return True if the saved array fits its target; otherwise there is a problem already."""
        _, entry, array = item
        is_type = entry.dtype == dtype_name(array.dtype) or self._can_cast(entry, array)
        return entry.shape == array.shape and is_type

    def _add_wrapper(self, path: Path, source: Path, array: TensorShards) -> None:
        """Add the inner tensors of a wrapper subclass."""
        saved, is_there = self._take(path, source)
        if not is_there or not self.wants_tensor(path, saved if isinstance(saved, dict) else ()):
            return
        record, inner = take_apart(array, dotted(path))
        if (difference := find_difference(record, find_record(saved))) is not None:
            self.add_problem(path, f"kind mismatch for {dotted(path)}: {difference}")
            return
        if missing := [name for name in inner if name not in saved]:  # also without `strict`: others need it
            self.add_problem(path, f"missing: {dotted((*path, missing[0]))}, which its other inner tensors need")
            return
        for name, part in inner.items():
            self.add_array((*path, name), (*source, name), part)

    def read_bytes(self, path: Path, source: Path) -> torch.Tensor | None:
        """Read a short text that was saved as bytes; None if it is missing, not wanted, or no text."""
        _, is_there = self._take(path, source)
        entry = self.source.arrays.get(source)
        if not is_there or not self.wants(path):
            return None
        if entry is None or entry.dtype != "uint8" or len(entry.shape) != 1 or entry.shape[0] > _MAX_TEXT:
            self.add_problem(path, f"kind mismatch for {dotted(path)}: it must be a text as bytes")
            return None
        scratch = torch.empty(entry.shape, dtype=torch.uint8)
        shard = LocalShard(full_box(entry.shape), scratch)
        return self._read_shard(LoadItem(path, entry, TensorShards(entry.shape, torch.uint8, (shard,))), shard)

    def require_equal(self, path: Path, source: Path, array: TensorShards) -> bool:
        """Add a problem if a saved array differs from quantized weights, whose scales the checkpoint does not have."""
        # Returns True if the array needs no more work: it is equal, or there is a problem. Otherwise it does not fit,
        # or is not wanted.
        entry = self.source.arrays.get(source)
        if entry is None or not self.wants(path) or any(_find_mismatches(path, entry, array, can_cast=False)):
            return False
        self.plan.taken.add(source)
        item = LoadItem(path, entry, array)
        if not all(_are_alike(self._read_shard(item, shard), shard.tensor.cpu()) for shard in array.shards):
            self.plan.problems.append(
                f"{dotted(path)} differs in quantization from the saved tensor, whose scales the checkpoint lacks"
                " (build the model from the same base and settings, or leave it out with `include`)"
            )
        return True

    def add_shared_array(self, spellings: Mapping[Path, Path | None], array: TensorShards) -> None:
        """Add a parameter with several names; add a problem if the checkpoint has different values for them."""
        wanted = [path for path in spellings if self.wants(path)] or list(spellings)
        found = [(path, source) for path in wanted if (source := spellings[path]) is not None]
        self.add_array(wanted[0], found[0][1] if found else wanted[0], array)
        arrays = self.source.arrays  # without wrapper subclasses
        entries = [(path, arrays[source]) for path, source in found if self.wants(path) and source in arrays]
        if self.options.is_own_only:
            entries = [(path, entry) for path, entry in entries if not self.source.is_elsewhere(entry)]
        if find_wrapper(array) is not None and len(found) > 1:
            self._compare_wrappers(found, array)
        for path, entry in entries[1:]:
            if not self._is_saved_alike(entries[0][1], entry, array):
                self.plan.problems.append(_untie(entries[0][0], path))

    def _compare_wrappers(self, found: Sequence[tuple[Path, Path]], array: TensorShards) -> None:
        """Add a problem for a shared wrapper subclass if its names have different inner tensors."""
        arrays, wanted = self.source.arrays, [each for each in found if self.wants(each[0])]
        first, others = found[0], [each for each in wanted if each != found[0]]
        for name, part in take_apart(array, dotted(first[0])).arrays.items():
            one = arrays.get((*first[1], name))
            for path, source in others:
                other = arrays.get((*source, name))
                if one is not None and (other is None or not self._is_saved_alike(one, other, part)):
                    self.plan.problems.append(_untie(first[0], path))

    def _is_saved_alike(self, one: TensorEntry, other: TensorEntry, array: TensorShards) -> bool:
        """Return True if two saved arrays have equal elements in this rank's shards."""
        if is_same_source(one, other) or one.shape != array.shape:  # another shape is a problem by itself
            return True
        return one.shape == other.shape and all(
            _are_alike(*(self._read_shard(LoadItem(each.path, each, array), shard) for each in (one, other)))
            for shard in array.shards
        )

    def check_shared_memory(self) -> None:
        """Add a problem for targets that share memory, and have different saved values there."""
        targets = []
        for item in self.plan.arrays:
            for shard in item.array.shards:
                tensor = shard.tensor
                if not tensor.is_meta and tensor.numel() and (address := tensor.data_ptr()):
                    targets.append((address, end_address(tensor), item, shard))
        targets.sort(key=lambda target: target[:2])
        group: list[tuple[LoadItem, LocalShard]] = []
        end = 0
        for first, behind, item, shard in targets:
            if first >= end:
                if len(group) > 1:
                    self._check_group(group)
                group = []
            group.append((item, shard))
            end = max(end, behind)
        if len(group) > 1:
            self._check_group(group)

    def _check_group(self, group: list[tuple[LoadItem, LocalShard]]) -> None:
        """Add a problem for targets in one memory range if the same elements have different saved values."""
        first, other = group[0]
        rest = [(item, shard) for item, shard in group[1:] if not _is_same_target(group[0], (item, shard))]
        if all(_has_same_elements(other, shard) for _, shard in rest):
            for item, shard in rest:
                if not _are_alike(self._read_shard(first, other), self._read_shard(item, shard)):
                    self.plan.problems.append(
                        f"{dotted(item.path)} is the memory of {dotted(first.path)} in this state, but their saved"
                        " values differ (give one its own memory: `tensor.clone()`)"
                    )
            return
        self._check_overlaps([(item, shard) for item, shard in (group[0], *rest) if self._can_fill(item)])

    def _check_overlaps(self, group: Sequence[tuple[LoadItem, LocalShard]]) -> None:
        """As above, for tensors that share some elements; views such as columns may share none."""
        tensors = [shard.tensor for _, shard in group]
        memory = SharedBytes(tensors)
        if not any(memory.take(tensor) for tensor in tensors):
            return
        memory = SharedBytes(tensors)
        for at, (item, shard) in enumerate(group):
            if memory.put(shard.tensor, self._read_shard(item, shard)):
                continue
            names = [dotted(each.path) for each, part in group[:at] if share_bytes(part.tensor, shard.tensor)]
            self.plan.problems.append(
                f"{dotted(item.path)} shares memory with {' and '.join(names[:2])} in this state, but saved values of"
                " the same elements differ (give one its own memory: `tensor.clone()`)"
            )

    def _read_shard(self, item: LoadItem, shard: LocalShard) -> torch.Tensor:
        """Return a shard's saved elements in new memory."""
        (located,) = self.source.locate([item.entry])  # before memory is allocated
        values = allocate(located, shard.tensor.shape)
        read = item.array._replace(dtype=values.dtype, shards=(LocalShard(shard.box, values),))
        self.source.elements.read([(located, read)])
        return values

    def _without_repeats(self, path: Path, entry: TensorEntry, array: TensorShards) -> TensorShards:
        """Return an expanded tensor's distinct elements as targets."""
        # Elements that share memory must have equal saved values.
        shards = []
        for shard in array.shards:
            size, at = shard.tensor.shape, _once(shard.tensor)
            if not shard.tensor.is_meta and has_memory(shard.tensor):
                values = self._read_shard(LoadItem(path, entry, array), shard)
                if not _are_alike(values, values[at].expand(size)):
                    self.add_problem(
                        path,
                        f"{dotted(path)} is an expanded tensor, whose elements share memory, but the saved"
                        " elements differ (make it contiguous: `tensor.expand(...).clone()`)",
                    )
            place = shard.tensor.detach()[at]
            shards.append(LocalShard(Box(shard.box.offset, tuple(place.shape)), place))
        return array._replace(shards=tuple(shards))


def _untie(first: Path, path: Path) -> str:
    return (
        f"{dotted(first)} and {dotted(path)} are one parameter in this model, but their saved values differ (untie them"
        " before the load, or leave one out by `rules`, with drop = { name = '...' })"
    )


def is_same_source(one: TensorEntry, other: TensorEntry) -> bool:
    """Return True if two saved arrays are the same file elements, as when tensors were saved as one."""
    return one is other or one[1:] == other[1:]


def _has_same_elements(one: LocalShard, other: LocalShard) -> bool:
    """Return True if two shards have all elements in common, in the same places."""
    first, second = one.tensor, other.tensor
    return first.data_ptr() == second.data_ptr() and (first.shape, first.stride(), first.dtype) == (
        second.shape,
        second.stride(),
        second.dtype,
    )


def _is_same_target(one: tuple[LoadItem, LocalShard], other: tuple[LoadItem, LocalShard]) -> bool:
    """Return True if two targets are the same memory, filled from the same file elements."""
    return is_same_source(one[0].entry, other[0].entry) and _has_same_elements(one[1], other[1])


def _fits(entry: TensorEntry, array: TensorShards) -> bool:
    """Return True if a saved array has its target's shape and dtype in contiguous memory, as nearly all have."""
    for _, tensor in array.shards:
        if not tensor.is_contiguous() or tensor.is_meta or not has_memory(tensor):
            return False
    return entry.shape == array.shape and entry.dtype == dtype_name(array.dtype)


def _find_mismatches(path: Path, entry: TensorEntry, array: TensorShards, *, can_cast: bool) -> Iterator[str]:
    """Yield reasons why a saved array cannot be read into its target."""
    name, dtype = dotted(path), dtype_name(array.dtype)
    if any(shard.tensor.is_meta for shard in array.shards):
        yield f"no memory for {name}: it is on the meta device (`to_empty` gives some)"
    elif opaque := [type(shard.tensor).__name__ for shard in array.shards if not has_own_elements(shard.tensor)]:
        yield f"a tensor of the class {opaque[0]} cannot be filled: {name} (leave it out by `include`)"
    elif not all(has_memory(shard.tensor) for shard in array.shards):
        yield f"no memory for {name}: its storage was freed or made smaller (`untyped_storage().resize_` gives some)"
    if entry.shape != array.shape:
        yield f"size mismatch for {name}: found {list(entry.shape)}, expected {list(array.shape)}"
    if entry.dtype != dtype and not can_cast:
        yield f"dtype mismatch for {name}: found {entry.dtype}, expected {dtype} (cast=True converts)"


def _repeats(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's elements share memory, as after `expand`."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _once(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the index of an expanded tensor's distinct elements."""
    return tuple(slice(0, 1) if not stride else slice(None) for stride in tensor.stride())


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124  (NaN)


def model_names(saved: CheckpointSource, path: Path, names: Collection[str]) -> Mapping[str, Path]:
    """Return where the checkpoint has a model's tensors, by name."""
    # Tensors are below the model's path, or where another tool puts and spells them. A file of one adapter fits none
    # of several adapters of a PEFT model.
    found = _saved_names(saved, path, names)
    return {**found, **_adapter_names(found, names)} if saved.manifest.format == "adapter" else found


def _saved_names(saved: CheckpointSource, path: Path, names: Collection[str]) -> Mapping[str, Path]:
    n = len(path)
    here = {str(at[n]): at[: n + 1] for at in saved.arrays if len(at) > n and at[:n] == path}
    if saved.is_native or any(name in here for name in names):
        clean = make_cleaner(here)
        return {**{clean(name): at for name, at in here.items()}, **here}
    sections = find_sections(saved.manifest)
    depth = len(sections.model)
    back = dict(zip(saved.manifest.tensors, saved.arrays, strict=True))
    stored = {back[at]: ".".join(map(str, at[depth:])) or dotted(at) for at in model_paths(saved.manifest, sections)}
    clean = make_cleaner(stored.values())
    return {saved.rename_key(clean(name)): at for at, name in stored.items()}


def _adapter_names(found: Mapping[str, Path], names: Iterable[str]) -> Mapping[str, Path]:
    """Return where the checkpoint has a PEFT model's tensors that its file names differently."""
    called: dict[str, list[str]] = {}
    for name in names:
        if name not in found:
            called.setdefault(to_file_name(name), []).append(name)
    return {each[0]: found[name] for name, each in called.items() if name in found and len(each) == 1}


class SharedBytes:
    """A CPU copy of memory, from the first to the last byte of some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._start = min(tensor.data_ptr() for tensor in tensors)
        size = max(end_address(tensor) for tensor in tensors) - self._start
        self._is_taken = torch.zeros(size, dtype=torch.bool)
        self._values = torch.empty(size, dtype=torch.uint8)

    def take(self, tensor: torch.Tensor) -> bool:
        """Take a tensor's bytes. Return True if some were taken before."""
        place = self._view(self._is_taken, tensor)
        was_taken = bool(place.any())
        place.fill_(True)
        return was_taken

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Take a tensor's bytes for values. Return False if some were taken for other bytes."""
        taken, place = self._view(self._is_taken, tensor), self._view(self._values, tensor)
        new = values.to(tensor.dtype).contiguous().reshape(-1).view(torch.uint8).reshape(place.shape)
        fits = not bool((taken & (place != new)).any())
        taken.fill_(True)
        place.copy_(new)
        return fits

    def _view(self, memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        steps = [step * size for step in tensor.stride()]
        return memory.as_strided((*tensor.shape, size), (*steps, 1), tensor.data_ptr() - self._start)


def share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have bytes in common."""
    memory = SharedBytes([one, other])
    return not memory.take(one) and memory.take(other)
