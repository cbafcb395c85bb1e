"""`PeerMemory`: settings for the tier in memory, and the node that its folder belongs to."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from shardckpt.errors import StorageError, UsageError
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.storage.orphans import find_machine_id
from shardckpt.tiers.local_folder import require_settings
from shardckpt.tiers.memory.lease import IDLE_S
from shardckpt.tiers.memory.run_folders import find_first_mount
from shardckpt.tiers.peers.node_files import Node


@dataclass(frozen=True)
class PeerMemory:
    """Tier in the node's memory, whose captures survive the training processes.

    It is a folder for the run in `/dev/shm`, which only this user may use. If `/dev/shm` is too small, the folder is on
    the disk for temporary files, with one warning; files are not synced there either. Captures stay until `idle_s`
    seconds after the last training process, or until `shardckpt tiers stop`.

    Args:
        copies: How many other machines keep a copy of each capture. Copies are written in the background, and need
            `max_bytes` for as many more captures.
        every: Capture steps whose number is a multiple of this.
        max_bytes: Maximum bytes in each node's folder, as a number or as text such as `"64GB"`. The old capture stays
            until the new one is complete, so there must be memory for both. By default half the machine's memory, and
            at most nine tenths of the file system.
        keep_last: How many newest captures to keep.
        idle_s: Seconds without a training process after which the captures are removed.
        rack: Label for machines that may fail together with this one, such as its rack. Copies go to machines with
            another label if possible.
        path: Mount of another file system, in place of `/dev/shm`; the run gets a folder there.

    Raises:
        UsageError: An argument has an invalid value.
    """

    copies: int = 0
    every: int = 1
    max_bytes: int | str | None = None
    keep_last: int = 1
    idle_s: float = IDLE_S
    rack: str = ""
    path: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        require_settings(self, ("copies", 0), ("every", 1), ("keep_last", 1))
        if type(self.idle_s) not in (int, float) or not 0 < self.idle_s < float("inf"):
            raise UsageError("`idle_s` of PeerMemory must be a positive number", found=repr(self.idle_s))
        if self.max_bytes is not None:
            parse_size(self.max_bytes)
        if not isinstance(self.path, (str, os.PathLike)) or (self.mount and not os.path.isabs(self.mount)):
            raise UsageError("`path` of PeerMemory must be the absolute path of a folder", found=repr(self.path))

    @property
    def mount(self) -> str:
        """The given mount; empty for `/dev/shm`."""
        return os.fsdecode(self.path)


def find_node(rack: str = "") -> Node:
    """Return this process's node; `rack` labels machines that may fail together."""
    return Node(find_node_id(), find_machine_id(), rack)


def find_node_id() -> str:
    """Return this node's id, equal for processes that find the same captures in memory."""
    place = ""
    with suppress(OSError, StorageError):  # containers on one machine have different folders
        status = os.stat(find_first_mount())
        place = f"{status.st_dev} {status.st_ino}"
    return f"{find_machine_id()} {place}"


def parse_machine_id(node: str) -> str:
    """Return the id of a node's machine, from what `find_node_id` returned there."""
    return node.removesuffix(" ") if node.endswith(" ") else node.rsplit(" ", 2)[0]
