"""Faults in a history, and the events from which they hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from shardckpt.tiers.memory.lease import LEASE
from tests.simulation.stores.node_disks import MOUNT
from tests.simulation.stores.node_memory import SHM

READS = frozenset({"list", "open", "read", "get", "head"})
DISK_WRITES = frozenset({"create", "write", "fsync", "mkdir", "rename", "exchange", "link", "unlink", "rmdir"})
BUCKET_WRITES = frozenset({"put", "start", "part", "complete", "delete"})
MESSAGES = frozenset({"send"})
EVERYTHING = frozenset({"any"})
_ANSWER = "0 -> "  # start of the route of messages from rank 0
_PAYLOAD = ".safetensors"  # suffix of files with tensors
_LAST = "/COMMIT"  # end of a step's last file, in the subject of its rename

CLOCK_JUMPS_S = (-172_800.0, -3_600.0, -30.0, 30.0, 3_600.0, 172_800.0)
LONGEST_STALL_S = 60.0


class FaultKind(NamedTuple):
    """A kind of fault: where it hits, and what it shows."""

    name: str
    verbs: frozenset[str]  # events that it can hit
    # What the operation shows, such as an errno name; empty for a fault in the environment.
    shown: str = ""
    lasts: bool = False  # hits all such operations for a while
    within: str = ""  # text in the subject of the events: part of a name or message route

    def shows_at(self, verb: str, subject: str) -> bool:
        """Return True if an event can show it."""
        return (self.verbs is EVERYTHING or verb in self.verbs) and self.within in subject


COMMON = (
    FaultKind("kill", EVERYTHING),
    FaultKind("kill while writing", DISK_WRITES | BUCKET_WRITES),
    FaultKind("stall", EVERYTHING),
    FaultKind("stall while writing", DISK_WRITES | BUCKET_WRITES),
    FaultKind("clock jump", EVERYTHING),
    FaultKind("message lost", MESSAGES, "lost"),
    FaultKind("message late", MESSAGES, "late"),
    FaultKind("message doubled", MESSAGES, "doubled"),
    FaultKind("flip", EVERYTHING),
    FaultKind("flip while reading", READS),
    FaultKind("rank 0's answer lost", MESSAGES, "lost", within=_ANSWER),
    FaultKind("kill while answering", MESSAGES, within=_ANSWER),
    FaultKind("stall before an answer", MESSAGES, within=_ANSWER),
)
DISK = (
    FaultKind("power loss", EVERYTHING),
    FaultKind("power loss while writing", DISK_WRITES),
    FaultKind("write error", DISK_WRITES, "EIO"),
    FaultKind("read error", READS, "EIO"),
    FaultKind("write errors", DISK_WRITES, "EIO", lasts=True),
    FaultKind("read errors", READS, "EIO", lasts=True),
    FaultKind("payload unreadable", READS, "EIO", within=_PAYLOAD),
    FaultKind("full", frozenset({"create", "write", "mkdir"}), "ENOSPC", lasts=True),
)
BUCKET = (
    FaultKind("request dropped", READS | BUCKET_WRITES, "dropped"),
    FaultKind("request refused", READS | BUCKET_WRITES, "refused"),
    FaultKind("answer lost", BUCKET_WRITES, "answer lost"),
    FaultKind("put repeated below", frozenset({"put", "complete"}), "repeated below"),
    FaultKind("short answer", frozenset({"get"}), "short"),
    FaultKind("outage", READS | BUCKET_WRITES, "dropped", lasts=True),
    FaultKind("payload refused", READS, "refused", within=_PAYLOAD),
    FaultKind("refusals", BUCKET_WRITES, "refused", lasts=True),
    FaultKind("answers lost", BUCKET_WRITES, "answer lost", lasts=True),
    FaultKind("puts repeated below", frozenset({"put", "complete"}), "repeated below", lasts=True),
)

MEMORY = (
    FaultKind("memory emptied", READS | DISK_WRITES, within=SHM),
    FaultKind("janitor killed", EVERYTHING),
    FaultKind("stall at a lease", EVERYTHING, within=LEASE),
    FaultKind("kill at a lease", EVERYTHING, within=LEASE),
    FaultKind("kill while writing into memory", DISK_WRITES, within=SHM),
    FaultKind("kill before the last file", frozenset({"rename"}), within=_LAST),
    FaultKind("node loss", EVERYTHING),
    FaultKind("flip in memory", EVERYTHING),
    FaultKind("memory full", frozenset({"create", "write"}), "ENOSPC", lasts=True, within=SHM),
)
SEVERAL_NODES = (
    FaultKind("node loss while copying", frozenset({"read", "send"})),
    FaultKind("node loss before the last file", frozenset({"rename"}), within=_LAST),
    FaultKind("two nodes lost", EVERYTHING),
    FaultKind("memory emptied", frozenset({"open", "recv"})),
    FaultKind("kill while copying", MESSAGES, within="data"),
    FaultKind("data lost", MESSAGES, "lost", within="data"),
)

OWN_DISKS = (
    FaultKind("flip on a node's disk", EVERYTHING),
    FaultKind("node's disk full", frozenset({"create", "write", "mkdir"}), "ENOSPC", lasts=True, within=MOUNT),
    FaultKind("write error on a node's disk", DISK_WRITES, "EIO", within=MOUNT),
    FaultKind("kill while promoting", DISK_WRITES, within=MOUNT),
    FaultKind("memory emptied", frozenset({"list", "fsync", "unlink"})),
)
SEVERAL_DISKS = (
    FaultKind("node power loss", EVERYTHING),
    FaultKind("node power loss while promoting", DISK_WRITES, within=MOUNT),
    FaultKind("node loss while promoting", DISK_WRITES, within=MOUNT),
)
# A tier keeps the copy from an earlier save than a nearer tier.
REPLACED_COPY = (FaultKind("kill before a copy is replaced", frozenset({"exchange"}), within=MOUNT),)

# Only for runs with tiers: other runs cannot get their steps back.
EMPTIED_ROOT = (
    FaultKind("root emptied", EVERYTHING),
    FaultKind("root emptied, except hidden files", EVERYTHING),
)


class PlannedFault(NamedTuple):
    """A fault and the events that it may hit."""

    at: int  # first event that it can hit
    kind: FaultKind
    until: int = 0  # event at which a lasting fault ends

    def __str__(self) -> str:
        return f"{self.kind.name} from event {self.at}" + (f" to {self.until}" if self.kind.lasts else "")


def plan_faults(random: Random, kinds: Sequence[FaultKind], count: int, events: int) -> list[PlannedFault]:
    """Choose a history's faults."""
    planned = []
    for _ in range(count):
        at = random.randrange(events)
        planned.append(PlannedFault(at, random.choice(kinds), at + random.randrange(20, 200)))
    return sorted(planned, key=lambda fault: fault.at)


class Faults:
    """The faults in a running history."""

    def __init__(self, planned: Sequence[PlannedFault], act: Callable[[FaultKind], None]) -> None:
        self._waiting = list(planned)
        self._act = act
        self.fired: list[PlannedFault] = []

    def stop(self) -> None:
        """End all faults."""
        self._waiting = []

    def show(self, number: int, verb: str, subject: str) -> str:
        """Return what an event shows; empty without a fault."""
        for fault in self._waiting:
            if fault.at > number:
                return ""
            if fault.kind.shows_at(verb, subject):
                return self._fire(fault, number)
        return ""

    def _fire(self, fault: PlannedFault, number: int) -> str:
        if fault not in self.fired:
            self.fired.append(fault)
        if not fault.kind.lasts or number >= fault.until:
            self._waiting.remove(fault)
        if fault.kind.lasts and number >= fault.until:
            return ""
        if not fault.kind.shown:
            self._act(fault.kind)
            return fault.kind.name
        return fault.kind.shown
