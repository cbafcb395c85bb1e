"""Read merged rank files of `torch.save`."""

from __future__ import annotations

from collections.abc import Sequence

from shardckpt.format.merge_shards import resolve_replicas
from shardckpt.format.torchsave.reader import TorchReader
from shardckpt.manifest import Piece


class RankFilesReader(TorchReader):
    """A reader of merged rank files, which compares replicas before it reads them."""

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Locate the storages of the pieces, and compare replicas that may differ.

        Raises:
            OverlapError: Replicas differ.
        """
        return resolve_replicas(self, pieces, super().resolve)
