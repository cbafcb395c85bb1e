"""Plan a step's copies on other nodes: partners by failure domain, and the files that each rank copies."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.tiers.peers.node_files import Node, NodeCatalog


def choose_partners(nodes: Sequence[Node], copies: int, leaving: Collection[str] = ()) -> list[tuple[int, ...]]:
    """Return for each node which nodes, none of them leaving, keep copies of its files, as indices."""
    # Partners are on different machines, and on different racks if possible. Every node keeps copies for about as many
    # others. With too few machines there are fewer partners.
    racks: dict[str, _Rack] = {}
    for index, node in enumerate(nodes):
        if node.name not in leaving:
            racks.setdefault(node.rack, _Rack(node.rack)).add(index)
    least_loaded = [(0, number, rack) for number, rack in enumerate(racks.values())]
    partners = []
    for index, node in enumerate(nodes):
        machines, taken, chosen = {node.machine}, {node.rack}, list[int]()
        for _ in range(copies):
            other = _take_partner(least_loaded, index, taken, lambda at: nodes[at].machine not in machines)  # noqa: B023
            if other is None:
                break
            chosen.append(other)
            machines.add(nodes[other].machine)
            taken.add(nodes[other].rack)
        partners.append(tuple(chosen))
    return partners


class _Rack:
    """Nodes in one rack, by how many copies they keep."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._by_load: list[list[int]] = [[]]

    def add(self, index: int) -> None:
        """Add a node that keeps no copies; its index must be greater than all others."""
        self._by_load[0].append(index)

    @property
    def load(self) -> int:
        """Copies that the least loaded node keeps."""
        return next(load for load, indices in enumerate(self._by_load) if indices)

    def take(self, index: int, is_free: Callable[[int], bool]) -> int | None:
        """Return the node for one more copy: the least loaded, the next one after an index; None if no node is free."""
        for load, indices in enumerate(self._by_load):
            first = bisect_right(indices, index)
            for step in range(len(indices)):
                at = (first + step) % len(indices)
                if is_free(indices[at]):
                    return self._add_copy(load, at)
        return None

    def _add_copy(self, load: int, at: int) -> int:
        index = self._by_load[load].pop(at)
        if load + 1 == len(self._by_load):
            self._by_load.append([])
        insort(self._by_load[load + 1], index)
        return index


def _take_partner(
    least_loaded: list[tuple[int, int, _Rack]], index: int, taken: Collection[str], is_free: Callable[[int], bool]
) -> int | None:
    """Return a node in the least loaded rack that is not taken, otherwise in any rack; None if no node is free."""
    passed: list[tuple[int, int, _Rack]] = []
    chosen = None
    while least_loaded and chosen is None:
        _, number, rack = heappop(least_loaded)
        chosen = None if rack.name in taken else rack.take(index, is_free)
        passed.append((rack.load, number, rack))
    if chosen is None:
        for at, (_, number, rack) in enumerate(passed):
            chosen = rack.take(index, is_free)
            passed[at] = rack.load, number, rack
            if chosen is not None:
                break
    for each in passed:
        heappush(least_loaded, each)
    return chosen


def plan_copies(catalog: NodeCatalog, folder: str, copies: int, leaving: Collection[str] = ()) -> dict[int, list[str]]:
    """Return a step's files that ranks copy to their nodes, by rank."""
    # After the copies each file is on `copies` + 1 machines, if there are as many; a leaving node's is copied once at
    # least.
    partners = choose_partners(catalog.nodes, max(copies, 1) if leaving else copies, leaving)
    orders: dict[int, list[str]] = {}
    for number, (name, held) in enumerate(sorted(catalog.files.get(folder, {}).items())):
        machines = {catalog.nodes[index].machine for index in held.nodes}
        is_safe = not leaving or any(catalog.nodes[index].name not in leaving for index in held.nodes)
        for target in partners[held.nodes[0]]:
            machine = catalog.nodes[target].machine
            if (len(machines) <= copies or not is_safe) and machine not in machines:
                machines.add(machine)
                is_safe = True
                members = catalog.ranks[target]
                orders.setdefault(members[number % len(members)], []).append(name)
    return orders


class CopyOrder(NamedTuple):
    """Files that one rank copies to its node."""

    names: tuple[str, ...]
    machines: int
    lost: int  # number of files that no node has
    catalog: NodeCatalog  # files of the own node, and files to copy with the nodes that have them

    def encode(self) -> bytes:
        """Return the order as bytes."""
        return pack_message([self.names, self.machines, self.lost], self.catalog.encode())

    @classmethod
    def decode(cls, data: bytes) -> CopyOrder:
        """Parse what `encode` returned."""
        (names, machines, lost), catalog = unpack_message(data)
        return cls(tuple(names), machines, lost, NodeCatalog.decode(catalog))


def plan_copy_orders(catalog: NodeCatalog, folder: str, copies: int, leaving: Collection[str] = ()) -> list[CopyOrder]:
    """Return each rank's order, whose size does not grow with the nodes."""
    orders = plan_copies(catalog, folder, copies, leaving)
    machines = len({node.machine for node in catalog.nodes})
    files = catalog.files.get(folder, {})
    lost = catalog.totals.get(folder, 1) - len(files)
    held: list[list[str]] = [[] for _ in catalog.nodes]
    for name, found in files.items():
        for node in found.nodes:
            held[node].append(name)
    planned: dict[int, CopyOrder] = {}
    for node, members in enumerate(catalog.ranks):
        for rank in members:
            names = tuple(orders.get(rank, ()))
            planned[rank] = CopyOrder(names, machines, lost, catalog.select(folder, node, held[node], names))
    return [planned[rank] for rank in sorted(planned)]
