"""What a save may replace: one step of this format."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from shardckpt.errors import CheckpointError, MissingFileError, TargetExistsError, UnsupportedError
from shardckpt.format.native_commit import COMMIT, WRITTEN
from shardckpt.format.native_payload import HF_INDEX
from shardckpt.format.native_step import read_commit
from shardckpt.storage.replaceable import FolderKind
from shardckpt.storage.store import Store


def _members(store: Store, sizes: Mapping[str, int]) -> Collection[str]:
    """Return the names that the step's `COMMIT` lists; none where it is damaged.

    Raises:
        TargetExistsError: A newer version wrote it, and nobody here knows what it holds.
        StorageError: The store failed.
    """
    if COMMIT not in sizes:
        return ()
    try:
        commit = read_commit(store, sizes)
    except UnsupportedError as error:
        raise TargetExistsError(
            "this version cannot read the step that lies here, so it does not replace it",
            where=store.url,
            found=error,
            fix="Update shardckpt, choose another target, or remove the step yourself.",
        ) from error
    except (CheckpointError, MissingFileError):  # missing: somebody replaces the step meanwhile
        return ()
    return (*commit.files, commit.manifest)


STEP = FolderKind(
    "one shardckpt checkpoint",
    payload=WRITTEN,
    beside=re.compile(f"{re.escape(COMMIT)}|{re.escape(HF_INDEX)}"),
    members=_members,
)
"""What `save`, and everything else that writes this format, replaces."""
