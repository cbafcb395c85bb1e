"""Errors for damaged checkpoints, which name the checkpoint before.

A framework cannot take that one by itself: it has read the step's number, and more, before it finds damaged bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from shardckpt import ShardckptError, ls
from shardckpt.errors import ChecksumError, FormatError, IncompleteError, MissingFileError, NoCompleteCheckpoint

__all__ = ["name_earlier", "name_earlier_step"]

_DAMAGE = (ChecksumError, FormatError, IncompleteError, MissingFileError, NoCompleteCheckpoint)


@contextmanager
def name_earlier(find_earlier: Callable[[], str], fix: str) -> Iterator[None]:
    """Add the complete checkpoint before a damaged one to its error.

    Args:
        find_earlier: Returns the earlier checkpoint's path; empty without one.
        fix: How a job resumes from it, with `{}` for the path.
    """
    try:
        yield
    except _DAMAGE as error:
        with suppress(ShardckptError):
            earlier = find_earlier()
            known = f"To continue from the one before it, {fix.format(earlier)}."
            hint = known if earlier else "None was found before it."
            error.args = (f"{str(error).rstrip('.')}. {hint}", *error.args[1:])
        raise


def name_earlier_step(path: str | os.PathLike[str], argument: str) -> AbstractContextManager[None]:
    """Add the complete step before a damaged one to its error.

    Args:
        path: Path or URL of the step to load.
        argument: The framework's argument for a step's path.
    """
    return name_earlier(partial(_find_earlier_step, os.fspath(path)), f'pass {argument}="{{}}", or remove this one')


def _find_earlier_step(path: str) -> str:
    """Return the path of the newest complete step before a step; empty without one."""
    root, _, name = path.rstrip("/").rpartition("/")
    paths = [step.path for step in ls(root or ".").complete]
    names = [each.rpartition("/")[2] for each in paths]
    before = paths[: names.index(name)] if name in names else paths
    return before[-1] if before else ""
