"""`Local`: settings of the tier in a folder of this node, and the run that such a folder belongs to."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta

from shardckpt.checkpoint.tiers.peer_memory import find_run_id
from shardckpt.errors import CheckpointError, MissingFileError, UsageError
from shardckpt.format.native.run_directory import is_step_name
from shardckpt.plan.retention import Retention
from shardckpt.storage.publish import overlaps
from shardckpt.storage.resolve_url import as_url, local_path
from shardckpt.storage.store import Store, read_bytes

_OWNER = ".shardckpt-tier.json"
"""File of a tier's folder that names its run."""

_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Local:
    """Tier in a folder on a disk of this node, which survives the training processes.

    Steps there are those of a run, `step-00000100` and so on, which every function and command reads.

    Args:
        path: Folder for the steps of this run alone. It must not be the root, in it, or around it.
        every: Capture the steps whose number is a multiple of this.
        keep_last: Number of newest steps to keep; without rules all steps are kept.
        keep_every: Keep steps whose number is a multiple of this.
        keep_for: Age up to which steps are kept: a timedelta, seconds, or text such as `"7d"`.

    Raises:
        UsageError: An argument has an invalid value, or the path is a URL of a store.
    """

    path: str | os.PathLike[str]
    every: int = 1
    keep_last: int | None = 1
    keep_every: int | None = None
    keep_for: timedelta | float | str | None = None

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise UsageError("`every` of Local must be an integer from 1", found=repr(self.every))
        _ = self.rules, self.folder

    @property
    def rules(self) -> Retention:
        """Rules that select the steps to keep."""
        return Retention.from_params(
            "Local", keep_last=self.keep_last, keep_every=self.keep_every, keep_for=self.keep_for
        )

    @property
    def folder(self) -> str:
        """Absolute path of the folder."""
        path = local_path(as_url(self.path))
        if path is None:
            raise UsageError(
                "the path of Local must be a folder of this node", found=repr(self.path), fix="Use it as the root."
            )
        return os.path.abspath(path)

    def require_apart(self, root: str) -> None:
        """Require that the folder is neither the root, nor in it, nor around it. Raises UsageError.

        Args:
            root: Path or URL of the run.
        """
        if overlaps(self.folder, root):
            raise UsageError(
                "the folder of Local and the root must be apart", where=root, found=self.folder, fix="Choose another."
            )


def require_own_folder(store: Store, root: str) -> None:
    """Require that a tier's folder is new, or has the steps of this run.

    Args:
        store: Store of the folder.
        root: Path or URL of the run.

    Raises:
        UsageError: It has steps of another run.
        StorageError: It cannot be read.
    """
    owner = _read_owner(store)
    if owner is None and not any(is_step_name(entry.name) for entry in store.list()):
        return
    if owner is None or owner.get("run") != find_run_id(root):
        raise UsageError(
            "the folder of Local has steps of another run",
            where=store.url,
            found=str((owner or {}).get("root", f"no {_OWNER}"))[:200],
            expected=root,
            fix="Choose another folder, or remove this one.",
        )


def claim_folder(store: Store, root: str) -> None:
    """Make a tier's folder that of a run.

    Args:
        store: Store of the folder.
        root: Path or URL of the run.

    Raises:
        UsageError: It has steps of another run.
        StorageError: It cannot be read or written.
    """
    require_own_folder(store, root)
    if _read_owner(store) is None:
        with store.create(_OWNER) as writer:
            writer.write(json.dumps({"run": find_run_id(root), "root": root}).encode("ascii") + b"\n")
        require_own_folder(store, root)  # another run may have claimed it meanwhile


def _read_owner(store: Store) -> dict[str, object] | None:
    """Return the record of the run that a folder belongs to; None without one, empty if it is damaged."""
    try:
        size = store.size(_OWNER)
        found = json.loads(read_bytes(store, _OWNER, 0, size)) if size <= _MOST_BYTES else {}
    except MissingFileError:
        return None
    except (CheckpointError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
