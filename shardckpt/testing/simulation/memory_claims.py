"""Claims of durability in a history, and which of them have to hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import NamedTuple

from shardckpt.checkpoint.peers.node_files import Node
from shardckpt.format.durability.step_copies import StepCopy
from shardckpt.format.native.commit import COMMIT, decode_commit
from shardckpt.testing.simulation.scheduler import HistoryError, Process
from shardckpt.testing.simulation.stores.simulated_holders import SimulatedHolders


class ClaimedHolder(NamedTuple):
    """A holder that may have a part of a claimed capture.

    Attributes:
        node: Its node.
        process: Its process; None if the node had no living holder.
    """

    node: Node
    process: Process | None


class MemoryClaim(NamedTuple):
    """Claim that an attempt survives the end of all training processes, by its capture in memory or on a disk.

    Attributes:
        content: The attempt.
        most_lost: Number of machines that may be lost.
        holders: Holders of all nodes of the job; empty for a capture on a disk.
    """

    content: int
    most_lost: int
    holders: tuple[ClaimedHolder, ...]


class Claims:
    """Claims of a run that rest on captures in memory.

    Args:
        nodes: Nodes by name.
        holders: Holders of all nodes.
    """

    def __init__(self, nodes: Mapping[str, Node], holders: SimulatedHolders) -> None:
        self._nodes, self._holders = nodes, holders
        self._claims: list[MemoryClaim] = []
        self._lost: set[Process] = set()

    def find_holders(self) -> Mapping[str, Process]:
        """Return the living holders by the name of their node."""
        return self._holders.find_living()

    def add(self, content: int, copy: StepCopy, nodes: Collection[str], holders: Mapping[str, Process]) -> None:
        """Record that a capture in memory is claimed.

        Args:
            content: The attempt.
            copy: The claimed copy.
            nodes: Names of the nodes of the job.
            holders: Holders by node that were alive when the claim was asked for.

        Raises:
            HistoryError: It does not survive the failures that the claim names.
        """
        named = tuple(ClaimedHolder(self._nodes[name], holders.get(name)) for name in sorted(set(nodes)))
        most_lost = len(copy.survives) - 1
        found = self._count_machines(copy.path.rpartition("/")[2], named)
        if found <= most_lost:
            raise HistoryError(f"attempt {content} is claimed to survive {copy.survives}, but is on {found} machines")
        self._claims.append(MemoryClaim(content, most_lost, named))

    def add_local(self, content: int) -> None:
        """Record that a copy on the disk of the node is claimed, which needs no holder.

        Args:
            content: The attempt.
        """
        self._claims.append(MemoryClaim(content, 0, ()))

    def _count_machines(self, folder: str, holders: Sequence[ClaimedHolder]) -> int:
        """Return on how many machines each file of a capture is, at least; a holder that has died may have had all."""
        held = [
            (each.node.machine, None if self._is_lost(each.process) else self._holders.list_files(each.process))
            for each in holders
            if each.process is not None
        ]
        marks = [files[f"{folder}/{COMMIT}"] for _, files in held if files and f"{folder}/{COMMIT}" in files]
        if not marks:
            return len({machine for machine, files in held if files is None})
        commit = max(map(decode_commit, map(bytes, marks)), key=lambda each: each.save)
        return min(_count_equal(held, f"{folder}/{name}") for name in (*commit.files, commit.manifest, COMMIT))

    def newest(self, nodes: Collection[str]) -> MemoryClaim | None:
        """Return the newest claim that has to hold for a job: the failures since are those that it names.

        Args:
            nodes: Names of the nodes of the job.
        """
        return next((claim for claim in reversed(self._claims) if self.holds(claim, nodes)), None)

    def holds(self, claim: MemoryClaim, nodes: Collection[str]) -> bool:
        """Return True while a claim has to hold for a job on some nodes."""
        lost = {each.node.machine for each in claim.holders if not self._is_reachable(each, nodes)}
        return claim in self._claims and len(lost) <= claim.most_lost

    def _is_reachable(self, holder: ClaimedHolder, nodes: Collection[str]) -> bool:
        process = holder.process
        return process is not None and not self._is_lost(process) and holder.node.name in nodes

    def _is_lost(self, process: Process) -> bool:
        return process.is_dead or process in self._lost

    def lose(self, holder: Process) -> None:
        """Record that a holder hangs, or has a flipped bit: what it has is lost."""
        self._lost.add(holder)

    def flip(self, random: Random) -> str:
        """Damage a file of a holder; return its name, empty if no holder has files."""
        full = [(node, process, files) for node, process, files in self._list_all() if files]
        if not full:
            return ""
        node, process, files = random.choice(full)
        name = random.choice(sorted(files))
        files[name][-1 - random.randrange(len(files[name]))] ^= 1 << random.randrange(8)
        self.lose(process)
        return f"{node}: {name}"

    def _list_all(self) -> list[tuple[str, Process, dict[str, bytearray]]]:
        return [(node, each, self._holders.list_files(each)) for node, each in self.find_holders().items()]

    def lose_local(self) -> None:
        """Record that the disk of the node gives errors: what it has is lost."""
        self._claims = [claim for claim in self._claims if claim.holders]

    def give_up(self, nodes: Collection[str] | None = None) -> None:
        """Drop the claims that a job does not know of: the run goes on without their captures.

        Args:
            nodes: Names of the nodes of the job, whose captures it can read; None for a job without tiers.
        """
        self._claims = [] if nodes is None else [claim for claim in self._claims if self.holds(claim, nodes)]


def _count_equal(held: Sequence[tuple[str, Mapping[str, bytearray] | None]], name: str) -> int:
    """Return how many machines have equal bytes of a file, at most; one whose holder has died counts as well."""
    machines = {(machine, bytes(files[name])) for machine, files in held if files is not None and name in files}
    equal = Counter(data for _, data in machines)
    return max(equal.values(), default=0) + len({machine for machine, files in held if files is None})
