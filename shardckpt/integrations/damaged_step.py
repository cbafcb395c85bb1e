"""Errors of damaged checkpoints: they name the one before, which a framework does not take by itself.

A framework has read the number of its step, and more, before the bytes turn out to be damaged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from shardckpt import (
    ChecksumError,
    FormatError,
    IncompleteError,
    MissingFileError,
    NoCompleteCheckpoint,
    ShardckptError,
    ls,
)

__all__ = ["name_earlier", "name_earlier_step"]

_DAMAGE = (ChecksumError, FormatError, IncompleteError, MissingFileError, NoCompleteCheckpoint)


@contextmanager
def name_earlier(find_earlier: Callable[[], str], fix: str) -> Iterator[None]:
    """Add the complete checkpoint before it to the error of a damaged one.

    Args:
        find_earlier: Returns the path of the checkpoint before it; empty without one.
        fix: How a job resumes from that, with `{}` for the path.
    """
    try:
        yield
    except _DAMAGE as error:
        with suppress(ShardckptError):
            earlier = find_earlier()
            known = f"To go on from the one before it, {fix.format(earlier)}."
            hint = known if earlier else "None was found before it."
            error.args = (f"{str(error).rstrip('.')}. {hint}", *error.args[1:])
        raise


def name_earlier_step(path: str | os.PathLike[str], argument: str) -> AbstractContextManager[None]:
    """Add the complete step before it to the error of a damaged step.

    Args:
        path: Path or URL of the step that is loaded.
        argument: Argument of the framework that takes the path of a step.
    """
    return name_earlier(partial(_find_earlier_step, os.fspath(path)), f'pass {argument}="{{}}", or remove this one')


def _find_earlier_step(path: str) -> str:
    """Return the path of the newest complete step before a step of its run; empty without one."""
    root, _, name = path.rstrip("/").rpartition("/")
    paths = [step.path for step in ls(root or ".").complete]
    names = [each.rpartition("/")[2] for each in paths]
    before = paths[: names.index(name)] if name in names else paths
    return before[-1] if before else ""
