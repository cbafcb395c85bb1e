"""Disks of nodes: each node has its own, which its processes find at the same path."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tests.simulation.stores.disk import Disk
from tests.simulation.stores.node_memory import SHM, NodeMemory

MOUNT = "/local"  # mount point for each node's own disk


class NodeDisks:
    """The disks on all nodes."""

    folder = f"{MOUNT}/run"  # the tier's folder

    def __init__(self, shared: Disk, nodes: Collection[str] = ()) -> None:
        self.shared = shared  # disk that all processes see
        self._disks = dict.fromkeys(nodes, shared)
        self._apart: list[Disk] = []
        self.memory = NodeMemory(shared.changes, nodes)
        self.has_several = len(nodes) > 1  # nodes have their own disks
        for node in nodes if self.has_several else ():
            self.replace(node)

    def replace(self, node: str) -> None:
        """Give a node an empty disk."""
        disk = self._disks[node] = Disk(self.shared.changes)
        disk.make_folder(MOUNT, 0.0)
        disk.sync(disk.root)
        self._apart.append(disk)  # one that is lost counts as well, so that the number of changes only grows

    def find(self, path: str, node: str) -> Disk:
        """Return the disk that holds a path on a node."""
        if path.startswith(SHM):
            return self.memory.find(node)
        if not path.startswith(MOUNT) or path[len(MOUNT) :][:1] not in {"", "/"}:
            return self.shared
        return self._disks.get(node, self.shared)

    def find_living(self) -> Mapping[str, Disk]:
        """Return the disks with the tier, by node name."""
        return dict(self._disks)

    def list_apart(self, nodes: Iterable[str]) -> list[Disk]:
        """Return the disks that belong to single nodes."""
        return [self._disks[node] for node in nodes if self._disks[node] is not self.shared]

    def list_files(self, disk: Disk) -> dict[str, bytearray]:
        """Return the tier's files on a disk by name, for the harness to check and damage."""
        start = len(self.folder) + 1
        return {path[start:]: file.data for path, file in disk.walk(self.folder)}

    @property
    def version(self) -> int:
        """Counts changes on the disks that belong to single nodes."""
        return sum([disk.version for disk in self._apart]) if self._apart else 0
