"""Memory file systems of nodes: each node's processes find their own at `/dev/shm`; it ends with the node's power."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from shardckpt.tiers.memory.janitor import watch
from shardckpt.tiers.memory.lease import LEASE, Lease
from tests.simulation.scheduler import HistoryError, Process, Scheduler
from tests.simulation.stores.disk import ChangeCount, Disk, File

SHM = "/dev/shm"
_FOLDERS = len(f"{SHM}/user/run/".split("/")) - 1  # parts of a path before the tier's folder


class NodeMemory:
    """The memory file systems on all nodes."""

    def __init__(self, changes: ChangeCount, nodes: Collection[str] = ()) -> None:
        self._changes, self._disks, self._gone = changes, dict[str, Disk](), list[Disk]()
        self.on_removal: Callable[[Disk], object] = lambda _disk: None
        for node in nodes:
            self.empty(node)

    def empty(self, node: str) -> Disk | None:
        """Give a node an empty memory file system; return the one that it had."""
        before = self._disks.get(node)
        self._gone += [] if before is None else [before]
        disk = self._disks[node] = Disk(self._changes)
        disk.make_folder("/dev", 0.0)
        disk.make_folder(SHM, 0.0)
        return before

    def find(self, node: str) -> Disk:
        """Return a node's memory file system."""
        if node not in self._disks:
            self.empty(node)  # in a large job
        return self._disks[node]

    def find_living(self) -> Mapping[str, Disk]:
        """Return the memory file systems by node name."""
        return dict(self._disks)

    def list_files(self, disk: Disk) -> dict[str, bytearray]:
        """Return the tier's files in memory by name, for the harness to check and damage."""
        parts = ((path.split("/"), file.data) for path, file in disk.walk(SHM))
        return {"/".join(path[_FOLDERS:]): data for path, data in parts if len(path) > _FOLDERS and path[4][:1] != "."}

    @property
    def version(self) -> int:
        """Counts changes in all memory file systems, also those that are gone."""
        return sum([disk.version for disk in (*self._disks.values(), *self._gone)])

    def check_removal(self, disk: Disk, folder: str, now: float, *, is_used: bool) -> None:
        """Require that nobody has used a removed folder for the idle time. Raises HistoryError."""
        lease = disk.find(f"{folder}/{LEASE}")
        assert isinstance(lease, File)
        if is_used:
            raise HistoryError("the captures of a process that uses them are removed")
        unused_s, idle_s = now - lease.released_at, Lease.decode(bytes(lease.data)).idle_s
        if unused_s < idle_s:
            raise HistoryError(f"captures are removed {unused_s:.0f} s after their last use, before {idle_s:.0f} s")
        self.on_removal(disk)


class Janitors:
    """The janitors on all nodes: each runs the real loop in its own process."""

    def __init__(self, scheduler: Scheduler, make_process: Callable[[str, str], Process]) -> None:
        self._scheduler, self._make_process = scheduler, make_process
        self._started: list[Process] = []

    def start(self, command: list[str], **_options: object) -> None:
        """Start the janitor that a command names, instead of `subprocess.run`."""
        assert self._scheduler.current is not None
        node, base = self._scheduler.current.process.node, command[-1]
        self._scheduler.step("start", "janitor")
        process = self._make_process(f"janitor {node}".rstrip(), node)
        self._started.append(process)

        def run() -> None:
            with suppress(OSError):  # a fault, or its folder is gone: a real one ends too
                watch(base)
            process.die()

        self._scheduler.spawn(process, process.name, run)

    def kill(self, nodes: Collection[str], *, silently: bool = False) -> None:
        """Kill the janitors on some nodes."""
        for process in self._started:
            if process.node in nodes:
                process.die(silently=silently)
