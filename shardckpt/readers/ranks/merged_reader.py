"""Merge rank files by `torch.save` into a checkpoint with full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardckpt.encodings.budget import gc_paused
from shardckpt.reader import ParamShapes, Reader
from shardckpt.readers.ranks.fsdp1_model import has_flat_parameters
from shardckpt.readers.ranks.merge_dtensors import merge_dtensor_shards
from shardckpt.readers.ranks.merge_local_states import merge_local_states
from shardckpt.readers.ranks.rank_files import RankFile, parse_rank_names
from shardckpt.readers.torchsave.reader import TorchReader


class MergedTorchReader(TorchReader):
    """Reads merged rank files, and can merge again after shapes become known."""

    def __init__(self, apart: TorchReader, files: Sequence[RankFile], known: ParamShapes | None = None) -> None:
        manifest = merge_dtensor_shards(apart.manifest, apart.shards, files, apart.store.url, known)
        super().__init__(apart.store, manifest, apart.archives)
        self._apart = apart
        self._files = files
        self._known = known

    @property
    def is_flat(self) -> bool:
        """Whether the files contain flat parameters."""
        return has_flat_parameters(self._apart.shards)

    @property
    def needs_param_shapes(self) -> bool:
        """Whether the files contain flat parameters without known shapes."""
        return self.is_flat and self._known is None

    def with_param_shapes(self, known: ParamShapes) -> Reader:
        """Return a reader with the given shapes; metadata files in the folder take precedence."""
        if self._known is not None:
            known = replace(self._known, ids=known.ids or self._known.ids)
        if not self.is_flat or not known.shapes:
            return self
        return MergedTorchReader(self._apart, self._files, known)


def merge_rank_files(reader: TorchReader, known: ParamShapes | None = None) -> TorchReader:
    """Return a reader for the merged tensors; the same reader without rank files."""
    with gc_paused():
        if reader.notes:
            return reader.with_manifest(merge_local_states(reader.manifest, reader.notes, reader.store.url))
        if not reader.shards:
            return reader
        names = list(reader.manifest.files)
        if len(names) == 1:
            return MergedTorchReader(reader, [RankFile(names[0], (), (), 0)], known)
        return MergedTorchReader(reader, parse_rank_names(names, {str(path[0]) for path in reader.shards}), known)
