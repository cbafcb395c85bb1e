"""`PeerMemory`: settings for the memory tier, and the run and node that its holder belongs to."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from shardckpt.errors import UsageError
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.tiers.holder.holder_sockets import NODE, socket_folder
from shardckpt.tiers.holder.holders import IDLE_S
from shardckpt.tiers.peers.node_files import Node

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class PeerMemory:
    """Tier in shared memory, whose captures survive the training processes.

    A holder process on each node keeps them. The first save starts it; it survives the training processes, and ends
    after `idle_s` seconds without one, or by `shardckpt tiers stop`.

    Args:
        copies: How many other machines keep a copy of each capture. Copies are written in the background, and need
            `max_bytes` for as many more captures.
        every: Capture steps whose number is a multiple of this.
        max_bytes: Maximum memory for each node's holder, in bytes or as text such as `"64GB"`. The old capture stays
            until the new one is complete, so there must be memory for both. By default half the machine's memory.
        keep_last: How many newest captures to keep.
        idle_s: Seconds without a training process after which the holder ends.
        rack: Label for machines that may fail together with this one, such as its rack. Copies go to machines with
            another label if possible.

    Raises:
        UsageError: An argument has an invalid value.
    """

    copies: int = 0
    every: int = 1
    max_bytes: int | str | None = None
    keep_last: int = 1
    idle_s: float = IDLE_S
    rack: str = ""

    def __post_init__(self) -> None:
        for name, least in (("copies", 0), ("every", 1), ("keep_last", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"`{name}` of PeerMemory must be an integer from {least}", found=repr(value))
        if type(self.idle_s) not in (int, float) or not 0 < self.idle_s < float("inf"):
            raise UsageError("`idle_s` of PeerMemory must be a positive number", found=repr(self.idle_s))
        if self.max_bytes is not None:
            parse_size(self.max_bytes)
        if not isinstance(self.rack, str):
            raise UsageError("`rack` of PeerMemory must be text", found=repr(self.rack))

    def limit(self, memory_bytes: int) -> int:
        """Return a holder's maximum bytes, on a machine with this much memory in bytes."""
        return memory_bytes // 2 if self.max_bytes is None else parse_size(self.max_bytes)


def find_node(rack: str = "") -> Node:
    """Return this process's node; `rack` labels machines that may fail together."""
    return Node(find_node_id(), _find_machine_id(), rack)


def _find_machine_id() -> str:
    """Return this machine's id, which its containers share."""
    boot = ""
    with suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot} {os.environ.get(NODE, '')}"


def find_node_id() -> str:
    """Return this node's id, equal for processes that find the same holders."""
    place = ""
    with suppress(OSError, UsageError):  # containers on one machine have different folders
        status = os.stat(os.path.dirname(socket_folder()))
        place = f"{status.st_dev} {status.st_ino}"
    return f"{_find_machine_id()} {place}"
