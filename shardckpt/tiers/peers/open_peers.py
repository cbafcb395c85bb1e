"""Open all nodes' files in all tiers as stores, during a restore."""

from __future__ import annotations

import json
import logging
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from shardckpt.errors import ShardckptError
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.storage.resolve_url import mount_store
from shardckpt.storage.store import Store
from shardckpt.tiers.peers.known_files import (
    AskForFiles,
    KnownFiles,
    SharedStep,
    collect_files,
    find_files,
)
from shardckpt.tiers.peers.node_files import Node, NodeCatalog, NodeReport, find_saves_of_run, report_files
from shardckpt.tiers.peers.peer_exchange import LoneExchange, PeerExchange, PieceExchange
from shardckpt.tiers.peers.peer_store import PeerStore
from shardckpt.tiers.peers.tier_files import FileReader, TierFiles

_LOG = logging.getLogger("shardckpt")


class NodeTier(NamedTuple):
    """A tier in which each node has its own files."""

    name: str
    url: str  # path or URL of the steps on this node
    open_own: Callable[[], Store | None]  # returns this node's store; None if it cannot be read


class NodeFault(NamedTuple):
    """A step with files on a node that do not count."""

    tier: str
    folder: str
    rank: int  # lowest rank of the node
    fault: str  # name of the machine, path or URL, and the fault


class SharedFaults(NamedTuple):
    """Faults that the ranks have found in copies of files."""

    files: frozenset[str] = frozenset()  # files of this rank's node that a rank could not read, or found damaged
    copies: Sequence[tuple[str, str, str]] = ()  # folder of the step, place and fault of each copy. On rank 0


class OpenedTiers(NamedTuple):
    """Steps that nodes have together, as one store per tier."""

    node: int  # index of this rank's node
    stores: Mapping[str, PeerStore]  # by tier; empty if files are read where they are
    node_faults: Sequence[NodeFault] = ()  # on rank 0

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes that this rank has read, by tier."""
        return dict(sum((store.tier_bytes for store in self.stores.values()), Counter[str]()))

    def share_faults(self, coordinator: LinkedGroup) -> SharedFaults:
        """Share the faults that ranks have found in copies; rank 0 gets each once. Collective."""
        faults = [[*each] for store in self.stores.values() for each in store.list_faults()]
        merged: dict[tuple[int, str], tuple[str, str]] = {}

        def decide(messages: list[bytes]) -> list[bytes]:
            for message in messages:
                for (node, name), where, text in json.loads(message):
                    merged.setdefault((node, name), (where, text))
            return [json.dumps([*merged]).encode()] * len(messages)

        answer = coordinator.ask_rank0("sharing damaged copies", json.dumps(faults).encode(), decide)
        files = frozenset(str(name) for node, name in json.loads(answer) if node == self.node)
        return SharedFaults(files, [(name.split("/")[1], *fault) for (_, name), fault in merged.items()])


@contextmanager
def open_peers(
    tiers: Sequence[NodeTier], node: Node, group: dist.ProcessGroup | None, find_run: Callable[[], str] = str
) -> Iterator[OpenedTiers]:
    """Open each tier's path or URL as one store with all nodes' files; prefer a run's saves. Collective."""
    # Each rank reads files for the others until the end of the context, which all ranks must reach.
    ranks = get_ranks(group)
    own = TierFiles({tier.name: store for tier in tiers if (store := tier.open_own()) is not None})
    reports = {name: report_or_nothing(store, node) for name, store in own.stores.items()}
    report = NodeReport(
        node._replace(host=platform.node(), urls={tier.name: tier.url for tier in tiers}),
        {f"{name}/{folder}": step for name, each in reports.items() for folder, step in each.steps.items()},
        {
            f"{name}/{folder}": f"{platform.node()}: {fault}"
            for name, each in reports.items()
            for folder, fault in each.faults.items()
        },
    )
    shared = share_files(ranks, own, report, tiers, find_run)
    if shared.is_alone and all(len(sources) < 2 for each in shared.known.values() for sources in each.sources.values()):
        yield OpenedTiers(shared.node, {}, shared.faults)  # files are read where they are
        return

    def delete(name: str) -> None:
        for known in shared.known.values():
            known.forget(name)
        try:
            own.remove(name)
        except ShardckptError as error:
            _LOG.warning("a file was not deleted: %s", error)

    with ExitStack() as stack:
        exchange: PieceExchange = LoneExchange(delete, shared.find)
        if not shared.is_alone:
            coordinator = ranks.background("peers")
            exchange = stack.enter_context(PeerExchange(coordinator, own, delete, shared.find))
        stores = {
            name: PeerStore(own, known, exchange, ranks.rank, shared.urls[name]) for name, known in shared.known.items()
        }
        for store in stores.values():
            stack.enter_context(mount_store(store.url, store))  # under the paths of rank 0
        yield OpenedTiers(shared.node, stores, shared.faults)


def plan_folders(catalog: NodeCatalog, tiers: Sequence[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return for each tier the steps to read from it, each with the folders in the catalog that have its files."""
    sources: dict[tuple[str, str], list[str]] = {}
    for tier in tiers:
        for folder, save in catalog.saves.items():
            name, _, step = folder.partition("/")
            if name == tier:
                sources.setdefault((step, save), []).append(folder)
    planned: dict[str, dict[str, tuple[str, ...]]] = {tier: {} for tier in tiers}
    for (step, _), folders in sources.items():
        # The nearest tier reads from all that have the save.
        planned[folders[0].partition("/")[0]][step] = tuple(folders)
    return planned


class SharedFiles(NamedTuple):
    """One rank's knowledge about every node's files."""

    node: int  # index of the rank's node
    is_alone: bool  # all ranks are on one node
    urls: Mapping[str, str]  # path or URL of each tier on rank 0
    known: Mapping[str, KnownFiles]  # by tier
    find: AskForFiles  # on rank 0, or on each rank if all are on one node
    faults: Sequence[NodeFault]  # on rank 0


def share_files(
    coordinator: LinkedGroup,
    own: FileReader,
    report: NodeReport,
    tiers: Sequence[NodeTier],
    find_run: Callable[[], str] = str,
) -> SharedFiles:
    """Share which steps the nodes have; rank 0 gets all nodes' files. Collective."""
    # Other ranks ask rank 0 for files that they need: so the answer does not grow with the number of nodes.
    merged: NodeCatalog | None = None
    faults: list[NodeFault] = []

    def decide(messages: list[bytes]) -> list[bytes]:
        nonlocal merged, faults
        reports = [NodeReport.decode(message) for message in messages]
        merged = NodeCatalog.from_reports(reports, find_saves_of_run(reports, find_run))
        faults = list_node_faults(reports)
        return _encode_answers(merged, tiers)

    answer = coordinator.ask_rank0("finding files on all nodes", report.encode(), decide)
    line, text = answer.split(b"\n")
    (node, first_rank), (count, urls, shared) = map(int, line.split()), json.loads(text)
    is_alone = count == 1
    known = {
        tier: KnownFiles(
            node,
            report,
            own,
            {folder: SharedStep.from_json(step) for folder, step in held.items()},
            is_alone=is_alone,
            first_rank=first_rank,
        )
        for tier, held in shared.items()
    }
    catalog = NodeCatalog.from_reports([report]) if is_alone else merged
    return SharedFiles(node, is_alone, urls, known, partial(find_files, catalog), faults)


def _encode_answers(catalog: NodeCatalog, tiers: Sequence[NodeTier]) -> list[bytes]:
    """Return what each rank gets: its node, the lowest rank there, and the steps."""
    urls = {tier.name: tier.url for tier in tiers}
    steps = json.dumps([len(catalog.nodes), urls, find_shared_steps(catalog, [*urls])]).encode()
    nodes = {rank: f"{at} {members[0]}\n" for at, members in enumerate(catalog.ranks) for rank in members}
    return [nodes[rank].encode() + steps for rank in range(len(nodes))]


def list_node_faults(reports: Sequence[NodeReport]) -> list[NodeFault]:
    """Return the faults in all ranks' reports, once per node."""
    faults, known = [], set[str]()
    for rank, report in enumerate(reports):
        if report.node.name not in known:
            known.add(report.node.name)
            for name, fault in report.faults.items():
                tier, _, folder = name.partition("/")
                faults.append(NodeFault(tier, folder, rank, fault))
    return faults


def find_shared_steps(catalog: NodeCatalog, tiers: Sequence[str]) -> dict[str, dict[str, SharedStep]]:
    """Return each tier's steps, as every rank knows them."""

    def describe(folder: str, sources: Sequence[str]) -> SharedStep:
        found = len(collect_files(catalog, {folder: sources}))
        total = max(catalog.totals[source] for source in sources)
        return SharedStep(tuple(sources), catalog.saves[sources[0]], found == total)

    planned = plan_folders(catalog, tiers)
    return {tier: {folder: describe(folder, held) for folder, held in each.items()} for tier, each in planned.items()}


def share_most_copied(coordinator: LinkedGroup, report: NodeReport, folder: str) -> str:
    """Return on every rank the folder of the step on the most machines. Collective."""

    def decide(messages: list[bytes]) -> list[bytes]:
        catalog = NodeCatalog.from_reports([NodeReport.decode(message) for message in messages])
        return [catalog.find_most_copied(folder).encode()] * len(messages)

    return coordinator.ask_rank0("finding the capture with the most copies", report.encode(), decide).decode()


def report_or_nothing(own: Store, node: Node) -> NodeReport:
    """Return a node's report, without steps if its store cannot be read."""
    try:
        return report_files(own, node)
    except ShardckptError as error:
        _LOG.warning("steps in %s cannot be read: %s", own.url, error)
        return NodeReport(node)
