"""Rank files of DTensors and ShardedTensors put together: what torch's ranks saved by themselves becomes whole arrays.

Where several ranks hold the same box, the lowest one's is taken; a box that no file holds is named with its rank. What
each rank has whole (buffers, steps, groups) is that of the lowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod

from shardckpt.boxes import Box
from shardckpt.errors import FormatError
from shardckpt.format.ranks.fsdp1_states import FlatStates
from shardckpt.format.ranks.rank_files import (
    STATE,
    ManifestBuilder,
    RankContent,
    RankFile,
    RankGroup,
    checksum,
    group_rank_files,
    is_small,
)
from shardckpt.format.reader import ParamShapes
from shardckpt.format.torchsave.dtensor_spec import ShardInfo
from shardckpt.format.torchsave.tensor_views import UnreadableTensor
from shardckpt.manifest import Lazy, Manifest, Path, Piece, TensorEntry, dotted

FORMAT_NAME = "ranks"
_SHOWN = 64
"""Missing parts of an array that are named one by one; beyond, elements that nobody holds say enough."""

_SEARCHED = 1 << 16
"""Parts of an array among which those are looked for."""

_STEPS = frozenset({"step", "global_step", "iteration", "epoch", "last_epoch"})
_STEP = "step"
_ODD = 4
"""Names that a warning lists."""


def merge_dtensor_shards(
    manifest: Manifest,
    shares: Mapping[Path, ShardInfo],
    files: Sequence[RankFile],
    url: str,
    known: ParamShapes | None = None,
) -> Manifest:
    """Merge the DTensor shards of rank files; keep the content of other files.

    Args:
        manifest: The files as they are, paths starting with each file's prefix.
        shares: Path in it to the share that lies there.
        files: Those that are one rank's.
        url: Of the store, for messages.
        known: Whole shapes, for flat parameters; without them those can be listed and not be read.

    Raises:
        FormatError: The files are not of one save, or contradict one another.
        UsageError: The shapes do not fit the flat parameters.
    """
    groups = group_rank_files(manifest, shares, files, url)
    made = ManifestBuilder(url)
    flats = FlatStates(groups, made, known)
    for group in groups.values():
        _require_one_step(group, url)
        taken = flats.put(group)
        _GroupMerger(group, made).join(taken)
        _note_missing(group, taken, made)
    depth = len(files[0].prefix)
    mine = {file.prefix for file in files}
    for path, tensor in manifest.tensors.items():
        if path[:depth] not in mine:
            made.put(tensor)
    objects = {path: value for path, value in manifest.objects.items() if path[:depth] not in mine}
    aliases = {a: b for a, b in manifest.aliases.items() if a[:depth] not in mine and b[:depth] not in mine}
    return replace(
        manifest,
        format=FORMAT_NAME,
        files={**manifest.files, **made.absent},
        tensors=made.tensors,
        objects={**made.objects, **objects},
        aliases={**made.aliases, **aliases},
        warnings=(*_drop_repeats(manifest.warnings, files), *made.warnings),
        missing=(*manifest.missing, *made.missing),
        by_order=frozenset(made.by_order),
    )


def _drop_repeats(warnings: Sequence[str], files: Sequence[RankFile]) -> list[str]:
    """Return the warnings, once where each rank's file gave the same."""
    names = [file.name for file in files]
    return list(dict.fromkeys(_strip_prefix(warning, names) for warning in warnings))


def _strip_prefix(warning: str, names: Sequence[str]) -> str:
    return next((warning[len(name) + 1 :] for name in names if warning.startswith(f"{name}.")), warning)


class _GroupMerger:
    """Merges one group of rank files.

    Args:
        group: The files.
        made: Where whole arrays go.
    """

    def __init__(self, group: RankGroup, made: ManifestBuilder) -> None:
        self._group, self._made = group, made
        self._states = [(*root, STATE) for root in group.optimizers()]
        self._differing: list[str] = []

    def join(self, taken: set[Path]) -> None:
        """Add everything but what was taken care of."""
        for path, holders in self._group.paths().items():
            if path in taken:
                continue
            if any(path in content.shares for content in holders):
                self._made.put(self._merge_shards(path, holders))
            elif path in holders[0].tensors:
                self._made.put(self._take_plain(path, holders))
            else:
                whole = (*self._group.root, *path)
                self._made.objects[whole] = replace(holders[0].objects[path], path=whole)
        for path in self._group.paths():
            if path not in taken:
                self._tie(path)
        if self._differing:
            shown = ", ".join(self._differing[:_ODD])
            more = f" and {len(self._differing) - _ODD} more" if len(self._differing) > _ODD else ""
            self._made.warnings.append(
                f"{shown}{more}: not the same on all ranks, and whole on each; that of the lowest rank is taken"
            )

    # --------------------------------------------------------------------------------------------------- arrays

    def _merge_shards(self, path: Path, holders: Sequence[RankContent]) -> TensorEntry:
        """Return an array from the shares of all ranks."""
        whole = (*self._group.root, *path)
        first = holders[0]
        share, entry = self._share(path, first), first.tensors[path]
        pieces: dict[Box, Piece] = {}
        for content in holders:
            other, mine = self._share(path, content), content.tensors[path]
            if (other.kind, other.shape, other.cut, other.refused) != (
                share.kind,
                share.shape,
                share.cut,
                share.refused,
            ) or mine.stored != entry.stored:
                raise FormatError(
                    f"{dotted(whole)!r} is laid out in different ways",
                    where=self._made.url,
                    found=f"{mine.stored} {other.cut or other.shape} in {content.file}",
                    expected=f"{entry.stored} {share.cut or share.shape}, as in {first.file}",
                    fix="The files are not of one save: keep those of one, and nothing else, in a folder.",
                )
            for piece in mine.pieces:
                pieces.setdefault(piece.box, piece)
        if not share.refused and sum(box.volume for box in pieces) < prod(share.shape):
            every = islice(share.elsewhere(), _SEARCHED)
            gone = ((box, rank) for box, rank in every if box.volume and box not in pieces)
            for box, rank in islice(gone, _SHOWN):
                label = f"the file of rank {rank}" if rank >= 0 else f"a file with {box} of it"
                pieces[box] = self._made.lost(box, whole, label)
        return entry._replace(path=whole, pieces=tuple(pieces.values()))

    def _share(self, path: Path, content: RankContent) -> ShardInfo:
        share = content.shares.get(path)
        if share is None:
            raise FormatError(
                f"{dotted(path)!r} is spread over ranks in some files and not in others",
                where=f"{self._made.url}/{content.file}",
                fix="The files are not of one save: keep those of one, and nothing else, in a folder.",
            )
        return share

    def _take_plain(self, path: Path, holders: Sequence[RankContent]) -> TensorEntry:
        """Return an array that every rank has for itself: the lowest one's."""
        whole = (*self._group.root, *path)
        entry = holders[0].tensors[path]
        sums = {checksum(entry)}
        for content in holders[1:]:
            other = content.tensors.get(path)
            if other is None or (other.shape, other.stored) != (entry.shape, entry.stored):
                raise FormatError(
                    f"{dotted(whole)!r} differs over ranks, and nothing says how it is cut",
                    where=self._made.url,
                    found=f"{other.stored} {other.shape} in {content.file}" if other else f"no array in {content.file}",
                    expected=f"{entry.stored} {entry.shape}, as in {holders[0].file}",
                    fix="Save DTensors, ShardedTensors or LOCAL states of shardckpt.state, which say so.",
                )
            sums.add(checksum(other))
        if len(sums) < 2 or None in sums:
            return entry._replace(path=whole)
        if any(path[: len(state)] == state for state in self._states) and entry.shape:
            kind = "one rank's part of something that nothing tells the layout of: the ranks hold different values"
            self._made.warnings.append(f"{dotted(whole)} is {kind}")
            lost = holders[0].tensors[path].pieces[0]._replace(layout=Lazy(0, 0, UnreadableTensor(whole, kind)))
            return entry._replace(path=whole, pieces=(lost,))
        self._differing.append(dotted(whole))
        return entry._replace(path=whole)

    def _tie(self, path: Path) -> None:
        """Note that an array is another by a second name, where every rank that has elements of both says so."""
        whole = (*self._group.root, *path)
        pairs = {content.aliases[path] for content in self._group.ranks if path in content.aliases}
        if len(pairs) != 1 or whole not in self._made.tensors:
            return
        [first] = pairs
        target = (*self._group.root, *first)
        both = [c for c in self._group.ranks if all(p in c.tensors and c.tensors[p].pieces for p in (path, first))]
        mine, other = self._made.tensors[whole], self._made.tensors.get(target)
        if other is None or any(c.aliases.get(path) != first for c in both):
            return
        if (mine.shape, {p.box for p in mine.pieces}) == (other.shape, {p.box for p in other.pieces}):
            self._made.aliases[whole] = target


def _require_one_step(group: RankGroup, url: str) -> None:
    """Refuse ranks of different steps, where a counter in their files or their optimizers shows it."""
    counters: dict[Path, tuple[object, str]] = {}
    for content in group.ranks:
        for path, value in content.objects.items():
            if path and path[-1] in _STEPS and type(value.value) is int:
                known = counters.setdefault(path, (value.value, content.file))
                if known[0] != value.value:
                    found = f"{dotted(path)} is {known[0]} in {known[1]} and {value.value} in {content.file}"
                    raise _step_error(found, url)
    marks: list[tuple[set[tuple[int, int]], str]] = []
    states = [(*root, STATE) for root in group.optimizers()]
    for content in group.ranks:
        found_here = {
            mark
            for path, entry in content.tensors.items()
            if path[-1:] == (_STEP,) and is_small(entry) and any(path[: len(s)] == s for s in states)
            if (mark := checksum(entry)) is not None
        }
        if found_here and marks and not found_here & marks[0][0]:
            raise _step_error(f"an optimizer's step differs in {marks[0][1]} and {content.file}", url)
        if found_here:
            marks.append((found_here, content.file))


def _step_error(found: str, url: str) -> FormatError:
    return FormatError(
        "rank files of different steps lie in one folder",
        where=url,
        found=found,
        fix="Keep the files of one save, and nothing else, in a folder of their own.",
    )


def _note_missing(group: RankGroup, taken: set[Path], made: ManifestBuilder) -> None:
    """Say which ranks are not there; nobody can tell what they held where ranks hold different names."""
    present = {content.rank for content in group.ranks}
    if group.world <= len(present):
        return
    first = next(rank for rank in range(group.world) if rank not in present)
    gone = group.world - len(present)
    more = f" and {gone - 1} more" if gone > 1 else ""
    made.warnings.append(f"of {group.world} ranks, rank {first}{more} left no file here")
    names = {frozenset(content.tensors) - taken for content in group.ranks}
    if len(names) > 1:
        made.missing.append(f"that of rank {first} of {group.world}")
