"""Files of `torch.save`, one of each rank: which belong together, whose each is, and what lies in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardckpt.boxes import Box
from shardckpt.errors import FormatError
from shardckpt.format.torchsave.dtensor_spec import ShardInfo
from shardckpt.format.torchsave.tensor_views import UnreadableTensor, ZipView
from shardckpt.manifest import Lazy, Manifest, ObjectEntry, Path, Piece, TensorEntry, dotted

STATE, GROUPS = "state", "param_groups"

_RANK = re.compile(r"(?<![a-zA-Z])rank[_-]?(\d{1,9})(?!\d)")
_WORLD = re.compile(r"world_size[_-]?(\d{1,9})(?!\d)")
_DIGITS = re.compile(r"\d+")
_DEEPEST = 3
_SMALL_BYTES = 8


class RankFile(NamedTuple):
    """One rank's file, by its name.

    Attributes:
        name: Relative to the store.
        prefix: What the paths of the file start with in the manifest.
        root: What they start with in the checkpoint that the files are together.
        rank: Whose it is; -1 where the name does not tell.
        world: Of how many ranks; 0 where the name does not tell.
    """

    name: str
    prefix: Path
    root: Path
    rank: int = -1
    world: int = 0


def parse_rank_names(names: Iterable[str], sharing: Iterable[str]) -> list[RankFile]:
    """Find the rank files by their names: `model_rank3.pt` is a part of `model`.

    Args:
        names: Of all files, which lie in one folder.
        sharing: Of those that are known to hold shares; they count even if they are called otherwise.
    """
    known = set(sharing)
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
class RankContent:
    """What one rank's file holds, by paths below its prefix.

    Attributes:
        file: Its name.
        rank: Whose it is.
        tensors: Arrays, and shares of arrays.
        objects: Other values.
        shares: What is known of the shares.
        aliases: Tied arrays to the first of the same elements in this file.
    """

    file: str
    rank: int
    tensors: dict[Path, TensorEntry] = field(default_factory=dict)
    objects: dict[Path, ObjectEntry] = field(default_factory=dict)
    shares: dict[Path, ShardInfo] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)

    def paths(self) -> Iterator[Path]:
        """Yield every path."""
        yield from self.tensors
        yield from self.objects


@dataclass(slots=True)
class RankGroup:
    """The files that are one state together.

    Attributes:
        root: What its paths start with in the whole checkpoint.
        ranks: The files, in the order of ranks.
        world: How many there should be; 0 where nothing tells.
    """

    root: Path
    ranks: list[RankContent]
    world: int

    def paths(self) -> dict[Path, list[RankContent]]:
        """Return every path with the files that hold it; those of the lowest rank first, in saved order."""
        found: dict[Path, list[RankContent]] = {}
        for content in self.ranks:
            for path in content.paths():
                found.setdefault(path, []).append(content)
        return found

    def optimizers(self) -> list[Path]:
        """Return the paths below which both `state` and `param_groups` lie."""
        seen: dict[Path, set[str]] = {}
        for content in self.ranks:
            for path in content.paths():
                for at, key in enumerate(path[: _DEEPEST + 1]):
                    if key in (STATE, GROUPS):
                        seen.setdefault(path[:at], set()).add(str(key))
        return [root for root, kinds in seen.items() if len(kinds) == 2]


@dataclass(slots=True)
class ManifestBuilder:
    """Collects the merged tensors and values.

    Attributes:
        url: Of the store, for messages.
        tensors: Arrays by path.
        objects: Values by path.
        aliases: Tied arrays to the first with the same elements.
        absent: Names for files that should be there, as in `Manifest.files`.
        warnings: What is odd.
        missing: Files that are gone, and with them nobody knows what.
        by_order: Optimizers whose ids got names by the order of the model's state dict.
    """

    url: str
    tensors: dict[Path, TensorEntry] = field(default_factory=dict)
    objects: dict[Path, ObjectEntry] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    by_order: set[Path] = field(default_factory=set)

    def put(self, entry: TensorEntry) -> None:
        """Add an array.

        Raises:
            FormatError: There is one of this path.
        """
        if entry.path in self.tensors:
            raise FormatError(f"{dotted(entry.path)!r} is in two places", where=self.url)
        self.tensors[entry.path] = entry

    def lost(self, box: Box, path: Path, label: str) -> Piece:
        """Return a piece that no file holds: reading it says whose is missing."""
        self.absent[label] = -1
        return Piece(box, label, Lazy(0, 0, UnreadableTensor(path, f"partly in {label}, which is missing")))


def group_rank_files(
    manifest: Manifest, shares: Mapping[Path, ShardInfo], files: Sequence[RankFile], url: str
) -> dict[Path, RankGroup]:
    """Group the content of rank files by the state that they share.

    Args:
        manifest: The files as they are.
        shares: Path in it to the share that lies there.
        files: Those that are one rank's.
        url: Of the store, for messages.

    Raises:
        FormatError: A file is of two ranks or of none, two files are of one rank, or files are of different worlds.
    """
    mine = {file.prefix: RankContent(file.name, file.rank) for file in files}
    depth = len(files[0].prefix)
    for path, tensor in manifest.tensors.items():
        if (content := mine.get(path[:depth])) is not None:
            content.tensors[path[depth:]] = tensor
    for path, value in manifest.objects.items():
        if (content := mine.get(path[:depth])) is not None:
            content.objects[path[depth:]] = value
    for path, share in shares.items():
        if (content := mine.get(path[:depth])) is not None:
            content.shares[path[depth:]] = share
    for path, first in manifest.aliases.items():
        if (content := mine.get(path[:depth])) is not None and first[:depth] == path[:depth]:
            content.aliases[path[depth:]] = first[depth:]
    groups: dict[Path, RankGroup] = {}
    worlds: dict[Path, tuple[int, str]] = {}
    for file in files:
        content = mine[file.prefix]
        content.rank = _rank(file, content, url)
        group = groups.setdefault(file.root, RankGroup(file.root, [], 0))
        group.ranks.append(content)
        for world in {file.world, *(s.world for s in content.shares.values() if s.mesh is None)} - {0}:
            known = worlds.setdefault(file.root, (world, file.name))
            if known[0] != world:
                raise _mixed_error(f"{known[0]} ranks in {known[1]} and {world} in {file.name}", url)
    for root, group in groups.items():
        group.ranks.sort(key=lambda content: content.rank)
        meshes = {id(s.mesh): s.mesh for c in group.ranks for s in c.shares.values() if s.mesh is not None}
        told = worlds.get(root, (0, ""))[0]
        group.world = told or max((len(mesh.ranks) for mesh in meshes.values()), default=0)
        _require_once(group, told, url)
    return groups


def _rank(file: RankFile, content: RankContent, url: str) -> int:
    """Return whose a file is, by what it holds, else by its name."""
    told = {share.rank for share in content.shares.values()} - {-1}
    if len(told) > 1:
        raise FormatError("a file holds shares of several ranks", where=f"{url}/{file.name}", found=sorted(told))
    rank = told.pop() if told else file.rank
    if rank < 0:
        raise FormatError(
            "nothing tells which rank this file is of",
            where=f"{url}/{file.name}",
            expected="a name with rank0, rank1, ...",
            fix="Call each file by its rank, such as model_rank0.pt.",
        )
    return rank


def _require_once(group: RankGroup, world: int, url: str) -> None:
    for one, other in zip(group.ranks, group.ranks[1:], strict=False):
        if one.rank == other.rank:
            raise _mixed_error(f"rank {one.rank} in {one.file} and in {other.file}", url)
    last = group.ranks[-1]
    if world and last.rank >= world:
        raise _mixed_error(f"rank {last.rank} in {last.file}, of {world} ranks", url)


def _mixed_error(found: str, url: str) -> FormatError:
    return FormatError(
        "rank files of different saves lie in one folder",
        where=url,
        found=found,
        fix="Keep the files of one save, and nothing else, in a folder of their own.",
    )


def checksum(entry: TensorEntry) -> tuple[int, int] | None:
    """Return the checksum and the bytes of the storage that an array fills; None where that is not known."""
    if len(entry.pieces) != 1 or not isinstance(entry.pieces[0].layout, Lazy):
        return None
    detail = entry.pieces[0].layout.detail
    if not isinstance(detail, ZipView) or detail.view.start or detail.view.strides is not None:
        return None
    if not detail.entry.crc32 or detail.entry.size != entry.nbytes:
        return None
    return detail.entry.crc32, detail.entry.size


def is_small(entry: TensorEntry) -> bool:
    """Return True if an array is one number."""
    return not entry.shape and entry.nbytes <= _SMALL_BYTES
