"""Plan of the copies of a step on other nodes: partners by failure domain, and the files that each rank copies."""

from __future__ import annotations

from collections.abc import Sequence

from shardckpt.checkpoint.peers.node_files import Node, NodeCatalog


def choose_partners(nodes: Sequence[Node], copies: int) -> list[tuple[int, ...]]:
    """Return for each node the indices of the nodes that keep copies of its files.

    A partner is on another machine than the node and its other partners; on another rack if that is possible. Every
    node keeps copies for about as many others. There are fewer partners if there are fewer machines.

    Args:
        nodes: The nodes.
        copies: Number of partners of each node.
    """
    load = [0] * len(nodes)
    partners = []
    for index, node in enumerate(nodes):
        chosen: list[int] = []
        for _ in range(copies):
            machines = {node.machine, *(nodes[other].machine for other in chosen)}
            racks = {node.rack, *(nodes[other].rack for other in chosen)}
            free = [other for other, each in enumerate(nodes) if each.machine not in machines]
            if not free:
                break

            def rank_partner(other: int, index: int = index, racks: set[str] = racks) -> tuple[bool, int, int]:
                return nodes[other].rack in racks, load[other], (other - index) % len(nodes)

            chosen.append(min(free, key=rank_partner))
            load[chosen[-1]] += 1
        partners.append(tuple(chosen))
    return partners


def plan_copies(catalog: NodeCatalog, folder: str, copies: int) -> dict[int, list[str]]:
    """Return the files of a step that ranks copy to their nodes, by rank.

    Afterwards each file is on `copies` machines more than one, if there are as many.

    Args:
        catalog: Files of all nodes.
        folder: Name of the step's folder.
        copies: Number of copies of each file on other machines.
    """
    partners = choose_partners(catalog.nodes, copies)
    orders: dict[int, list[str]] = {}
    for number, (name, held) in enumerate(sorted(catalog.files.get(folder, {}).items())):
        machines = {catalog.nodes[index].machine for index in held.nodes}
        for target in partners[held.nodes[0]]:
            machine = catalog.nodes[target].machine
            if len(machines) <= copies and machine not in machines:
                machines.add(machine)
                members = catalog.ranks[target]
                orders.setdefault(members[number % len(members)], []).append(name)
    return orders
