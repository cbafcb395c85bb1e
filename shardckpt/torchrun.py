"""Facts that torchrun leaves in the environment of a rank."""

from __future__ import annotations

import os


def local_world_size() -> int | None:
    """Return the number of ranks on this machine; None if torchrun did not start them.

    `LOCAL_WORLD_SIZE` counts as missing unless it is a positive decimal number. Callers choose what holds then.
    """
    setting = os.environ.get("LOCAL_WORLD_SIZE", "")
    return (int(setting) or None) if setting.isdecimal() else None
