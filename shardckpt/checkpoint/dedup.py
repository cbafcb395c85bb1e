"""Dedup of a save against its base.

Rank 0 finds the chunks that the base has; each rank compares its own chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import xxhash

from shardckpt.checkpoint.base_checkpoint import BaseCheckpoint, BaseReferences, has_all_files, merge_block_hashes
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, RankSavePlan
from shardckpt.checkpoint.stateful.tensor_bytes import tensor_bytes, view_box
from shardckpt.devices import CurrentStreams
from shardckpt.dtypes import is_exact_upcast
from shardckpt.encodings.typed_json import JsonForm
from shardckpt.errors import UsageError
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.native.commit import MAX_BASES
from shardckpt.native.manifest_json import PartialManifest
from shardckpt.native.payload import PayloadChunk
from shardckpt.native.records import Base, FileRecord
from shardckpt.plan.layout.write_plan import TensorSpec
from shardckpt.state.local.tensor_shards import TensorShards
from shardckpt.storage.thread_pool import ThreadPool

_HASHERS = 4
_WORTH_THREADS_BYTES = 64 << 20

# Block hashes of files without stored hashes, by folder, name and version of the file.
_Hashes = dict[tuple[str, str, str], bytes]


def chunk_digest(chunk: PayloadChunk, arrays: Mapping[Path, TensorShards]) -> bytes:
    """Return a chunk's xxh3-128 in memory."""
    hasher = xxhash.xxh3_128()
    for part in tensor_bytes(view_box(arrays[chunk.path], chunk.box)):
        hasher.update(part)
    return hasher.digest()


def chunk_digests(chunks: Sequence[PayloadChunk], arrays: Mapping[Path, TensorShards]) -> list[bytes]:
    """Return the xxh3-128 of each chunk in memory; several threads hash large chunks."""
    if sum(chunk.nbytes for chunk in chunks) < _WORTH_THREADS_BYTES:
        return [chunk_digest(chunk, arrays) for chunk in chunks]
    streams = CurrentStreams(shard.tensor.device for chunk in chunks for shard in arrays[chunk.path].shards)

    def digest(chunk: PayloadChunk) -> bytes:
        with streams.use():
            return chunk_digest(chunk, arrays)

    with ThreadPool(_HASHERS, thread_name_prefix="shardckpt-hash") as pool:
        return list(pool.map(digest, chunks))


def _pack_digests(digests: Mapping[int, bytes]) -> list[object]:
    return [list(digests), b"".join(digests.values()).hex()]


def _unpack_digests(value: Any) -> dict[int, bytes]:
    positions, digits = value
    data = bytes.fromhex(digits)
    return {at: data[16 * n : 16 * n + 16] for n, at in enumerate(positions)}


@dataclass(frozen=True)
class BaseHints:
    """Facts about the base that rank 0 sends one rank."""

    url: str = ""  # path or URL of the base; empty if the base does not have frozen parameters
    # Key that changes with the locations of frozen parameters in the base; empty without frozen parameters.
    key: str = ""
    # xxh3-128 of the base's bytes of a chunk, by position of the chunk in the rank's plan.
    digests: Annotated[Mapping[int, bytes], JsonForm(_unpack_digests, _pack_digests)] = field(default_factory=dict)
    # Sizes in bytes, by name, of files in the base; each rank hashes a share of their blocks.
    files: Mapping[str, int] = field(default_factory=dict)
    # Positions of chunks in `digests` whose statistics the save stores and the base lacks.
    unmeasured: Sequence[int] = ()

    def unchanged(self, chunks: Sequence[PayloadChunk], arrays: Mapping[Path, TensorShards]) -> tuple[int, ...]:
        """Return the positions of chunks that are equal in the base."""
        digests = chunk_digests([chunks[at] for at in self.digests], arrays)
        return tuple(at for (at, digest), own in zip(self.digests.items(), digests, strict=True) if own == digest)

    def hash_blocks(self, rank: int, world: int) -> list[str]:
        """Hash this rank's share of the blocks that have no stored hash."""
        return BaseCheckpoint(self.url).hash_blocks(self.files, rank, world) if self.files else []


class FrozenParamCache:
    """Digests of frozen parameters in the base, which a rank reads once."""

    def __init__(self) -> None:
        self.hashes: _Hashes = {}  # block hashes of files without stored hashes
        self._key = ""
        self._digests: dict[PayloadChunk, bytes] = {}

    def copy(self) -> FrozenParamCache:
        """Return a copy for one save, to replace this cache when the save is committed."""
        copied = FrozenParamCache()
        copied.hashes, copied._key, copied._digests = dict(self.hashes), self._key, dict(self._digests)
        return copied

    def compare(
        self,
        chunks: Sequence[PayloadChunk],
        hints: BaseHints,
        arrays: Mapping[Path, TensorShards],
        ties: Mapping[Path, Path],
        rules: Mapping[str, str],
    ) -> None:
        """Check that frozen parameters are equal in the base; its digests are cached."""
        if self._key != hints.key:
            self._key = hints.key
            self._digests.clear()
        new = [chunk for chunk in chunks if chunk not in self._digests]
        if new:
            base = BaseCheckpoint(hints.url, rules=rules)
            specs = {chunk.path: TensorSpec(chunk.path, chunk.shape, chunk.dtype) for chunk in new}
            entries = _entries(base, specs.values(), ties)
            digests = base.digests([(entries[chunk.path], chunk.box, chunk.dtype) for chunk in new])
            self._digests.update(zip(new, digests, strict=True))
        for chunk, own in zip(chunks, chunk_digests(chunks, arrays), strict=True):
            if own != self._digests[chunk]:
                raise UsageError(
                    "a frozen parameter differs from the base",
                    where=dotted(chunk.path),
                    found=f"values that differ from {hints.url} in {chunk.box}",
                    fix="Load the base into the model, or save without trainable_only.",
                )


def _entries(base: BaseCheckpoint, specs: Iterable[TensorSpec], ties: Mapping[Path, Path]) -> dict[Path, TensorEntry]:
    """Return the base's entries for frozen parameters."""
    wanted = list(specs)
    names = {spec.path: [str(spec.path[-1])] for spec in wanted}
    for other, first in ties.items():
        if first in names and other[:-1] == first[:-1]:
            names[first].append(str(other[-1]))
    entries = base.locate(names)
    for path, shape, dtype in wanted:
        entry = entries[path]
        if entry.shape != shape or not (entry.stored == dtype or is_exact_upcast(entry.stored, dtype)):
            raise UsageError(
                "a frozen parameter has another type or shape than in the base",
                where=dotted(path),
                found=f"{dtype} {list(shape)}",
                expected=f"{entry.stored} {list(entry.shape)} in {base.url}",
                fix="Load the model in the base's type, or save without trainable_only.",
            )
    return entries


class BaseDedup:
    """One save's dedup against its base, on rank 0."""

    def __init__(self, base: BaseCheckpoint, plan: GlobalSavePlan, entries: Mapping[Path, TensorEntry]) -> None:
        self._base, self._plan, self._entries = base, plan, entries
        self._unhashed = base.find_unhashed_files(entries.values())
        self._versions = {name: base.get_file_version(name) for name in self._unhashed}
        self._asked: dict[str, int] = {}
        self._key = base.build_location_key(entries) if entries else ""

    def ask_for_hashes(self, known: _Hashes) -> None:
        """Choose the files whose blocks the ranks have to hash."""
        self._asked = {name: size for name, size in self._unhashed.items() if self._file_key(name) not in known}

    def _file_key(self, name: str) -> tuple[str, str, str]:
        return self._base.url, name, self._versions[name]

    def hints_for(self, rank_plan: RankSavePlan, *, stats: bool = False) -> BaseHints:
        """Return the hints for a rank."""
        digests = {
            at: digest
            for at, chunk in enumerate(rank_plan.chunks)
            if (digest := self._base.get_digest(chunk)) is not None
        }
        unmeasured = [at for at in digests if stats and not self._base.has_stats(rank_plan.chunks[at])]
        return BaseHints(self._base.url, self._key, digests, self._asked, unmeasured)

    def part(
        self,
        unchanged: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[str]],
        known: _Hashes,
        stats: Sequence[Mapping[str, str]] = (),
    ) -> PartialManifest:
        """Return the step's references to other folders."""
        for name, merged in merge_block_hashes(self._asked, blocks).items():
            known[self._file_key(name)] = merged
        hashes = {name: known[self._file_key(name)] for name in self._unhashed}
        references = BaseReferences()
        measured = stats or [{} for _ in unchanged]
        for rank_plan, positions, own in zip(self._plan.rank_plans, unchanged, measured, strict=True):
            for at in positions:
                path, shape, dtype, box = rank_plan.chunks[at]
                known_at = self._base.known(rank_plan.chunks[at])
                if str(at) in own:
                    known_at = known_at._replace(stats=bytes.fromhex(own[str(at)]))
                references.add(path, dtype, shape, box, known_at)
        for path, shape, _ in self._plan.frozen:
            entry = self._entries[path]  # its type may be narrower than the parameter's
            for box, where in self._base.rows(entry, hashes):
                references.add(path, entry.stored, shape, box, where)
        return references.part()

    def is_kept(self, files: Sequence[FileRecord]) -> bool:
        """Return True if the base is unchanged and has all files that the step refers to."""
        needed = [file for file in files if file.base]
        return not needed or (self._base.is_committed() and has_all_files(self._base.step, needed))

    def bases(self, files: Iterable[FileRecord]) -> tuple[Base, ...]:
        """Return records for the other folders that contain the step's files."""
        bases = self._base.bases(files)
        if len(bases) > MAX_BASES:
            raise UsageError(
                "the step would refer to too many folders",
                where=self._base.step,
                expected=f"{MAX_BASES} at most",
                fix="Save without a base this time.",
            )
        return bases

    def find_model_file(self, name: str, record: FileRecord) -> FileRecord | None:
        """Return the base's model file as the step refers to it, if it has equal bytes; None otherwise."""
        return self._base.find_model_file(name, record)


def open_base_dedup(
    url: str | None, step: str, rules: Mapping[str, str], plan: GlobalSavePlan, *, trainable_only: bool
) -> BaseDedup | None:
    """Open a save's base and return the dedup; None without a base."""
    if trainable_only and not plan.frozen:
        raise UsageError(
            "trainable_only finds no frozen parameter",
            where=step,
            fix="Set requires_grad to False before the model is sharded, or save without trainable_only.",
        )
    if not url:
        return None
    base = BaseCheckpoint(url, step, rules)
    return BaseDedup(base, plan, _entries(base, plan.frozen, plan.ties) if plan.frozen else {})
