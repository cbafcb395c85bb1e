"""Merge rank files with DTensors and ShardedTensors into full tensors.

A missing box is named with its rank. Replicas, and data that each rank has in full (buffers, steps, groups), must be
equal: tensors are compared by checksums, or where they are read, and other values here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from shardckpt.boxes import Box
from shardckpt.errors import FormatError, UsageError
from shardckpt.manifest import Manifest, Path, TensorEntry, dotted
from shardckpt.reader import ParamShapes
from shardckpt.readers.merge_shards import (
    KEEP_ONE_SAVE,
    OTHER_SAVE,
    ManifestBuilder,
    Shard,
    merge_shards,
    note_missing_ranks,
)
from shardckpt.readers.ranks.fsdp1_model import FlatModel, is_flat, put_flat_model, read_flat_model
from shardckpt.readers.ranks.fsdp1_optimizer import put_flat_optimizer
from shardckpt.readers.ranks.rank_files import (
    STATE,
    RankContent,
    RankFile,
    RankGroup,
    checksum,
    group_rank_files,
    is_small,
    merge_values,
)
from shardckpt.readers.torchsave.dtensor_spec import ShardInfo

FORMAT_NAME = "ranks"

_STEPS = frozenset({"step", "global_step", "iteration", "epoch", "last_epoch"})
_STEP = "step"


def merge_dtensor_shards(
    manifest: Manifest,
    shards: Mapping[Path, ShardInfo],
    files: Sequence[RankFile],
    url: str,
    known: ParamShapes | None = None,
) -> Manifest:
    """Merge the DTensor shards in rank files; keep other files' content."""
    groups, rest = group_rank_files(manifest, shards, files, url)
    builder = ManifestBuilder(url)
    models = read_flat_models(groups, url, known)
    for group in groups.values():
        _require_one_step(group, url)
        done = put_flat_states(builder, group, models, known)
        _put_group(builder, group, done)
        names = {content.rank: content.tensors.keys() - done for content in group.ranks}
        note_missing_ranks(builder, group.world, names)
    builder.add(rest)
    warnings = tuple(_drop_repeats(manifest.warnings, files))
    return builder.build_manifest(replace(manifest, warnings=warnings), FORMAT_NAME)


def _drop_repeats(warnings: Sequence[str], files: Sequence[RankFile]) -> list[str]:
    """Return the warnings, with several ranks' equal ones only once."""
    names = [file.name for file in files]
    return list(dict.fromkeys(_strip_prefix(warning, names) for warning in warnings))


def _strip_prefix(warning: str, names: Sequence[str]) -> str:
    return next((warning[len(name) + 1 :] for name in names if warning.startswith(f"{name}.")), warning)


def _put_group(builder: ManifestBuilder, group: RankGroup, done: Collection[Path]) -> None:
    """Add all content in a group of rank files, except the paths in `done`."""
    paths = {path: contents for path, contents in group.paths().items() if path not in done}
    for path, contents in paths.items():
        target = (*group.root, *path)
        if any(path in content.shards for content in contents):
            builder.put(target, _merge_tensor(builder, target, path, contents))
        elif path not in contents[0].tensors:
            builder.put(target, merge_values(path, contents))
        else:
            builder.put(target, _merge_equal(builder, target, path, contents))
    for path in paths:
        _put_alias(builder, group, path)


def _merge_tensor(builder: ManifestBuilder, target: Path, path: Path, contents: Sequence[RankContent]) -> TensorEntry:
    """Return a tensor merged from all ranks' shards."""
    layouts = [_require_shard(path, content, builder.url) for content in contents]
    first = layouts[0]
    for layout, content in zip(layouts, contents, strict=True):
        if (layout.kind, layout.shape, layout.sharding, layout.refusal) != (
            first.kind,
            first.shape,
            first.sharding,
            first.refusal,
        ):
            raise FormatError(
                f"{dotted(target)!r} is sharded in different ways",
                where=builder.url,
                found=f"{layout.sharding or layout.shape} in {content.file}",
                expected=f"{first.sharding or first.shape}, as in {contents[0].file}",
                fix=OTHER_SAVE,
            )
    shards = [Shard(c.file, c.tensors[path].stored, c.tensors[path].pieces) for c in contents]
    missing = iter(()) if first.refusal else _label_parts(first)
    return merge_shards(builder, target, first.shape, shards, missing)


def _label_parts(layout: ShardInfo) -> Iterator[tuple[Box, str]]:
    """Yield every part of a tensor, with a label for the file that contains it."""
    for box, rank in layout.list_parts():
        if box.volume:
            yield box, f"the file of rank {rank}" if rank >= 0 else f"a file with {box} of it"


def _require_shard(path: Path, content: RankContent, url: str) -> ShardInfo:
    layout = content.shards.get(path)
    if layout is None:
        raise FormatError(
            f"{dotted(path)!r} is sharded in some files and not in others",
            where=f"{url}/{content.file}",
            fix=OTHER_SAVE,
        )
    return layout


def _merge_equal(builder: ManifestBuilder, target: Path, path: Path, contents: Sequence[RankContent]) -> TensorEntry:
    """Return a tensor that each rank has in full."""
    entry = contents[0].tensors[path]
    for content in contents[1:]:
        other = content.tensors.get(path)
        if other is None or (other.shape, other.stored) != (entry.shape, entry.stored):
            raise FormatError(
                f"{dotted(path)!r} differs between ranks, and nothing says how it is sharded",
                where=f"{builder.url}/{content.file}",
                found=f"{other.stored} {other.shape}" if other else "no tensor",
                expected=f"{entry.stored} {entry.shape}, as in {contents[0].file}",
                fix="Save DTensors, ShardedTensors or shardckpt.state's LOCAL states, which describe their layout.",
            )
    shards = (Shard(c.file, c.tensors[path].stored, c.tensors[path].pieces) for c in contents)
    return merge_shards(builder, target, entry.shape, shards)


def _put_alias(builder: ManifestBuilder, group: RankGroup, path: Path) -> None:
    """Record a tensor's second name if all ranks with elements tie both."""
    target = (*group.root, *path)
    firsts = {content.aliases[path] for content in group.ranks if path in content.aliases}
    if len(firsts) != 1 or target not in builder.tensors:
        return
    [first] = firsts
    both = [c for c in group.ranks if all(p in c.tensors and c.tensors[p].pieces for p in (path, first))]
    mine, other = builder.tensors[target], builder.tensors.get((*group.root, *first))
    if other is None or any(c.aliases.get(path) != first for c in both):
        return
    if (mine.shape, {p.box for p in mine.pieces}) == (other.shape, {p.box for p in other.pieces}):
        builder.content.aliases[target] = other.path


def _require_one_step(group: RankGroup, url: str) -> None:
    """Reject ranks with different steps, by counters in files or optimizers."""
    counters: dict[Path, tuple[object, str]] = {}
    for content in group.ranks:
        for path, value in content.objects.items():
            if path and path[-1] in _STEPS and type(value.value) is int:
                first = counters.setdefault(path, (value.value, content.file))
                if first[0] != value.value:
                    found = f"{dotted(path)} is {first[0]} in {first[1]} and {value.value} in {content.file}"
                    raise _step_error(found, url)
    states = [(*root, STATE) for root in group.optimizers()]
    first_checksums: tuple[set[tuple[int, int]], str] | None = None
    for content in group.ranks:
        checksums = {
            known
            for path, entry in content.tensors.items()
            if path[-1:] == (_STEP,) and is_small(entry) and any(path[: len(s)] == s for s in states)
            if (known := checksum(entry)) is not None
        }
        if checksums and first_checksums and not checksums & first_checksums[0]:
            raise _step_error(f"an optimizer's step differs in {first_checksums[1]} and {content.file}", url)
        if checksums and first_checksums is None:
            first_checksums = checksums, content.file


def _step_error(found: str, url: str) -> FormatError:
    return FormatError("rank files from different steps are in one folder", where=url, found=found, fix=KEEP_ONE_SAVE)


FlatModels = Mapping[tuple[Path, Path], FlatModel]  # a group's root and the model's path in it, to the model


def read_flat_models(groups: Mapping[Path, RankGroup], url: str, known: ParamShapes | None) -> FlatModels:
    """Read the models with flat parameters in all rank files."""
    models: dict[tuple[Path, Path], FlatModel] = {}
    for group in groups.values():
        bases = {path[:-1] for content in group.ranks for path in content.shards if is_flat(path, content)}
        for base in sorted(bases, key=str):
            models[group.root, base] = _read_model(group, base, url, known)
    return models


def put_flat_states(
    builder: ManifestBuilder, group: RankGroup, models: FlatModels, known: ParamShapes | None
) -> set[Path]:
    """Add a group's flat parameters and their optimizers; return the added paths."""
    done: set[Path] = set()
    for (root, base), model in models.items():
        if root == group.root:
            done |= put_flat_model(builder, model) | {base}
            builder.warnings += model.warnings
    optimized = _find_model(models, group.root)
    if optimized is not None:
        for root in group.optimizers():
            done |= put_flat_optimizer(builder, group, root, optimized, known)
    return done


def _find_model(models: FlatModels, root: Path) -> FlatModel | None:
    """Return the model for a group's optimizers: the only one, or by its number."""
    if len(models) == 1:
        return next(iter(models.values()))
    near = [model for (other, _), model in models.items() if other == root or _number(other) == _number(root)]
    return near[0] if len(near) == 1 else None


def _read_model(group: RankGroup, base: Path, url: str, known: ParamShapes | None) -> FlatModel:
    """Return a model's flat parameters, with the first shapes that match."""
    if known is None or not known.others:
        return read_flat_model(group, base, url, known)
    try:
        return read_flat_model(group, base, url, replace(known, others=()))
    except UsageError:
        for other in known.others:
            with suppress(UsageError):
                return read_flat_model(group, base, url, other)
        raise


def _number(root: Path) -> str:
    """Return the number at a group name's end, which distinguishes several models."""
    return str(root[0]).rpartition("_")[2] if root and str(root[0])[-1:].isdigit() else ""
