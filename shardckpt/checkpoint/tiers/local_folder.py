"""`Local`: settings of the tier in a folder of this node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from shardckpt.errors import UsageError
from shardckpt.plan.retention import Retention
from shardckpt.storage.publish import overlaps
from shardckpt.storage.resolve_url import as_url, local_path


@dataclass(frozen=True)
class Local:
    """Tier in a folder on a disk of this node, which survives the training processes.

    Steps there are those of a run, `step-00000100` and so on, which every function and command reads.

    Args:
        path: Folder for the steps of this run alone. It must not be the root, in it, or around it.
        every: Capture the steps whose number is a multiple of this.
        keep_last: Number of newest steps to keep; without rules all steps are kept.
        keep_every: Keep steps whose number is a multiple of this.
        keep_for: Age up to which steps are kept: a timedelta, or text with a unit such as `"36h"`, `"7d"`, `"2w"`.

    Raises:
        UsageError: An argument has an invalid value, or the path is a URL of a store.
    """

    path: str | os.PathLike[str]
    every: int = 1
    keep_last: int | None = 1
    keep_every: int | None = None
    keep_for: timedelta | str | None = None

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
