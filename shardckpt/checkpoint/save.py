"""`save`: what a training run holds, on any number of ranks, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardckpt.checkpoint.corridor import How, Saver
from shardckpt.checkpoint.handle import BACKGROUND
from shardckpt.groups import Star, new_star


def save(
    state: Any,
    path: str,
    *,
    overwrite: bool = False,
    checksums: bool = True,
    group: dist.ProcessGroup | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Save what a training run holds. Collective: every rank of the group calls it with its own state.

    Nothing lies under `path` before all of it is there and safe; what lay there before stays until then. A save in the
    background is waited for first; if it failed and nobody has asked, that is raised here, and nothing is saved.

    Args:
        state: Models, optimizers, anything with `state_dict` and `load_state_dict`, tensors, plain values, in dicts and
            lists of any depth. Tensors that are no DTensors, and plain values, are the same on every rank.
        path: The folder to become the checkpoint, or a URL that fsspec knows.
        overwrite: Replace a checkpoint that lies there.
        checksums: Store a hash of every 4 MiB block, and make sure that what several ranks hold is the same.
        group: The ranks that save; all where None.
        about: Free text by name, kept in the manifest.

    Raises:
        TargetExistsError: Something lies there and `overwrite` is false.
        UnsupportedError: Something in the state cannot be saved; the message names its dotted path.
        UsageError: A value differs between ranks.
        RankError: Another rank failed or is gone; the message names it.
        StorageError: The storage failed. Whatever was written is gone again.
    """
    how = How(str(path), overwrite, checksums, dict(about or {}))
    with BACKGROUND.entry:
        BACKGROUND.wait()
        refusal = BACKGROUND.unheard()
        saver_of(group, refusal).save(state, how, refusal)


_SAVERS: WeakKeyDictionary[dist.ProcessGroup, Saver] = WeakKeyDictionary()


def saver_of(group: dist.ProcessGroup | None, refusal: Exception | None = None) -> Saver:
    """Return the saver of a group; its ranks get channels of their own at their first save. Collective then.

    Args:
        group: The ranks; all where None.
        refusal: Raised where a rank is gone, since nobody can be told.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Saver(Star(None))
    given = dist.group.WORLD if group is None else group
    assert given is not None
    known = _SAVERS.get(given)
    if known is not None and known.is_lost and refusal is not None:
        raise refusal
    if known is None or known.is_lost:
        known = _SAVERS[given] = Saver(new_star(group))
    return known


def star_of(group: dist.ProcessGroup | None) -> Star:
    """Return the channels that a group's saves and loads speak through. Collective at the first call."""
    return saver_of(group).star
