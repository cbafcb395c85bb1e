"""Rank files of `torch.save`: group them, find their ranks, split their content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardckpt.errors import FormatError
from shardckpt.manifest import Lazy, Manifest, ObjectEntry, Path, TensorEntry
from shardckpt.readers.merge_shards import PathContent, RankOrigin, require_one_save, split_content
from shardckpt.readers.torchsave.dtensor_spec import ShardInfo
from shardckpt.readers.torchsave.replicas import combine_values
from shardckpt.readers.torchsave.tensor_views import ZipView

STATE, GROUPS = "state", "param_groups"

_RANK = re.compile(r"(?<![a-zA-Z])rank[_-]?(\d{1,9})(?!\d)")
_WORLD = re.compile(r"world_size[_-]?(\d{1,9})(?!\d)")
_DIGITS = re.compile(r"\d+")
_DEEPEST = 3
_SMALL_BYTES = 8


class RankFile(NamedTuple):
    """A rank file, as described by its name."""

    name: str  # file name relative to the store
    prefix: Path  # prefix of its paths in the manifest of all files
    root: Path  # prefix of its paths in the merged checkpoint
    rank: int = -1  # rank that wrote it; -1 if its name does not contain it
    world: int = 0  # number of ranks; 0 if its name does not contain it


def parse_rank_names(names: Iterable[str], sharded: Iterable[str]) -> list[RankFile]:
    """Find the rank files by their names: `model_rank3.pt` is a part of `model`."""
    known = set(sharded)
    found: dict[str, tuple[str, int, int]] = {}
    for name in names:
        matches = list(_RANK.finditer(name))
        if not matches and name not in known:
            continue
        world = _WORLD.search(name)
        stem = name.rpartition(".")[0] or name
        stem = stem[: matches[-1].start()] + stem[matches[-1].end() :] if matches else _DIGITS.sub("", stem)
        stem = _WORLD.sub("", stem).strip("_-. ")
        found[name] = (stem, int(matches[-1][1]) if matches else -1, int(world[1]) if world else 0)
    is_alone = len({stem for stem, _, _ in found.values()}) == 1
    return [
        RankFile(name, (name,), () if is_alone or not stem else (stem,), rank, world)
        for name, (stem, rank, world) in found.items()
    ]


@dataclass(slots=True)
class RankContent(PathContent):
    """One rank file's content, by paths relative to its prefix."""

    file: str = ""
    rank: int = -1  # rank that wrote the file
    shards: dict[Path, ShardInfo] = field(default_factory=dict)  # layouts of the tensors that are shards


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One state's rank files."""

    root: Path  # prefix of its paths in the merged checkpoint
    ranks: Sequence[RankContent]  # content of the files, in rank order
    world: int  # number of ranks; 0 if unknown

    def paths(self) -> dict[Path, list[RankContent]]:
        """Return every path with its files, in saved order, the lowest rank's first."""
        found: dict[Path, list[RankContent]] = {}
        for content in self.ranks:
            for path in content.paths():
                found.setdefault(path, []).append(content)
        return found

    def optimizers(self) -> list[Path]:
        """Return the paths that have both `state` and `param_groups` below them."""
        seen: dict[Path, set[str]] = {}
        for path in self.paths():
            for at, key in enumerate(path[: _DEEPEST + 1]):
                if key in (STATE, GROUPS):
                    seen.setdefault(path[:at], set()).add(str(key))
        return [root for root, kinds in seen.items() if len(kinds) == 2]


def merge_values(path: Path, contents: Sequence[RankContent]) -> ObjectEntry:
    """Return the value that several ranks have at a path, like `combine_values`."""
    found = ((c.file, c.objects[path].value if path in c.objects else c.tensors[path]) for c in contents)
    return ObjectEntry(path, combine_values(path, found))


def group_rank_files(
    manifest: Manifest, shards: Mapping[Path, ShardInfo], files: Sequence[RankFile], url: str
) -> tuple[dict[Path, RankGroup], PathContent]:
    """Group rank files' content by state; return other files' content too."""
    contents, rest = split_content(manifest, [file.prefix for file in files])
    depth = len(files[0].prefix)
    shards_by_file: dict[Path, dict[Path, ShardInfo]] = {file.prefix: {} for file in files}
    for path, shard in shards.items():
        if path[:depth] in shards_by_file:
            shards_by_file[path[:depth]][path[depth:]] = shard
    ranks: dict[Path, list[RankContent]] = {}
    origins: dict[Path, list[RankOrigin]] = {}
    for file in files:
        content, mine = contents[file.prefix], shards_by_file[file.prefix]
        rank = _find_rank(file, mine.values(), url)
        ranks.setdefault(file.root, []).append(
            RankContent(content.tensors, content.objects, content.aliases, file.name, rank, mine)
        )
        worlds = {file.world, *(shard.world for shard in mine.values() if shard.mesh is None)}
        origins.setdefault(file.root, []).extend(RankOrigin(file.name, rank, world) for world in sorted(worlds))
    groups: dict[Path, RankGroup] = {}
    for root, members in ranks.items():
        require_one_save(origins[root], url)
        members.sort(key=lambda content: content.rank)
        world = max(origin.world for origin in origins[root])
        groups[root] = RankGroup(root, members, world or _largest_mesh(members))
    return groups, rest


def _largest_mesh(ranks: Iterable[RankContent]) -> int:
    meshes = {id(shard.mesh): shard.mesh for content in ranks for shard in content.shards.values()}
    return max((len(mesh.ranks) for mesh in meshes.values() if mesh is not None), default=0)


def _find_rank(file: RankFile, shards: Iterable[ShardInfo], url: str) -> int:
    """Return a file's rank: from its shards, else from its name."""
    ranks = {shard.rank for shard in shards} - {-1}
    if len(ranks) > 1:
        raise FormatError("a file has shards from several ranks", where=f"{url}/{file.name}", found=sorted(ranks))
    rank = ranks.pop() if ranks else file.rank
    if rank < 0:
        raise FormatError(
            "nothing says which rank wrote this file",
            where=f"{url}/{file.name}",
            expected="a name with rank0, rank1, ...",
            fix="Name each file by its rank, such as model_rank0.pt.",
        )
    return rank


def checksum(entry: TensorEntry) -> tuple[int, int] | None:
    """Return checksum and size if a tensor fills its storage; else None."""
    if len(entry.pieces) != 1 or not isinstance(entry.pieces[0].layout, Lazy):
        return None
    detail = entry.pieces[0].layout.detail
    if not isinstance(detail, ZipView) or detail.view.start or detail.view.strides is not None:
        return None
    if not detail.entry.crc32 or detail.entry.size != entry.nbytes:
        return None
    return detail.entry.crc32, detail.entry.size


def is_small(entry: TensorEntry) -> bool:
    """Return True if a tensor has one element."""
    return not entry.shape and entry.nbytes <= _SMALL_BYTES
