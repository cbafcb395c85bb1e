"""`Local`: settings for the tier in a local folder."""

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
    """Tier in a folder on this node's disk, which survives the training processes.

    Every function and command reads the steps there, as in a run's root: `step-00000100` and so on.

    Args:
        path: Folder for this run's steps alone. It must not be the root, in it, or around it.
        every: Capture steps whose number is a multiple of this.
        keep_last: How many newest steps to keep; without rules all steps are kept.
        keep_every: Keep steps whose number is a multiple of this.
        keep_for: Keep steps up to this age: a timedelta, or text with a unit such as `"36h"`, `"7d"`, `"2w"`.
        copies: How many other machines keep a copy of each step that is captured here. A step that a nearer tier
            captures has that tier's copies.
        rack: As for `PeerMemory`.

    Raises:
        UsageError: An argument has an invalid value, or the path is a URL.
    """

    path: str | os.PathLike[str]
    every: int = 1
    keep_last: int | None = 1
    keep_every: int | None = None
    keep_for: timedelta | str | None = None
    copies: int = 0
    rack: str = ""

    def __post_init__(self) -> None:
        require_settings(self, ("every", 1), ("copies", 0))
        _ = self.rules, self.folder

    @property
    def rules(self) -> Retention:
        """Rules that select the steps to keep."""
        return Retention.from_params(
            "Local", keep_last=self.keep_last, keep_every=self.keep_every, keep_for=self.keep_for
        )

    @property
    def folder(self) -> str:
        """Absolute path."""
        path = local_path(as_url(self.path))
        if path is None:
            raise UsageError(
                "the path of Local must be a folder of this node", found=repr(self.path), fix="Use it as the root."
            )
        return os.path.abspath(path)

    def require_apart(self, root: str) -> None:
        """Require that the folder is neither the root, nor in it, nor around it. Raises UsageError.

        Args:
            root: The run's path or URL.
        """
        if overlaps(self.folder, root):
            raise UsageError(
                "the folder of Local and the root must be apart", where=root, found=self.folder, fix="Choose another."
            )


def require_settings(settings: object, *least: tuple[str, int]) -> None:
    """Require settings of a tier to be integers from a least value, and its rack to be text. Raises UsageError."""
    tier = type(settings).__name__
    for name, minimum in least:
        value = getattr(settings, name)
        if type(value) is not int or value < minimum:
            raise UsageError(f"`{name}` of {tier} must be an integer from {minimum}", found=repr(value))
    rack = getattr(settings, "rack")  # noqa: B009  (each kind of settings has one)
    if not isinstance(rack, str):
        raise UsageError(f"`rack` of {tier} must be text", found=repr(rack))
