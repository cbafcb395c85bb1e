"""Open the files that nodes have together in all tiers as stores, for the time of a restore."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import Coordinator, get_channels
from shardckpt.checkpoint.peers.node_files import Node, NodeCatalog, NodeReport, NodeStep, report_files
from shardckpt.checkpoint.peers.peer_exchange import LoneExchange, PeerExchange, PieceExchange
from shardckpt.checkpoint.peers.peer_store import PeerStore
from shardckpt.checkpoint.peers.tier_files import TierFiles
from shardckpt.errors import ShardckptError
from shardckpt.storage.resolve_url import mount_store
from shardckpt.storage.store import Store

_LOG = logging.getLogger("shardckpt")


class NodeTier(NamedTuple):
    """A tier of which each node has files of its own.

    Attributes:
        name: Name of the tier.
        url: Path or URL of its steps on this node.
        open_own: Returns the store of the files of this node; None if it cannot be read.
    """

    name: str
    url: str
    open_own: Callable[[], Store | None]


class OpenedTiers(NamedTuple):
    """Steps that nodes have together, as one store for each tier.

    A step of which several tiers have files of one save is in the nearest of them, and is read from all.

    Attributes:
        catalog: Files of all nodes, in folders such as `memory/step-00000010`.
        stores: Store of each tier, by its name.
    """

    catalog: NodeCatalog
    stores: Mapping[str, PeerStore]

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes that this rank has read, by the tier that had them."""
        return dict(sum((store.tier_bytes for store in self.stores.values()), Counter[str]()))

    @property
    def faults(self) -> tuple[str, ...]:
        """Reasons why copies were not read on this rank."""
        return tuple(fault for store in self.stores.values() for fault in store.faults)

    def share_rejected(self, coordinator: Coordinator) -> frozenset[str]:
        """Return the files of this rank's node that a rank could not read, or found damaged. Collective."""
        places = {each.place for store in self.stores.values() for found in store.rejected.values() for each in found}

        def decide(messages: list[bytes]) -> list[bytes]:
            return [json.dumps([place for message in messages for place in json.loads(message)]).encode()] * len(
                messages
            )

        answer = coordinator.coordinate("sharing damaged copies", json.dumps([*places]).encode(), decide)
        own = self.catalog.find_node(coordinator.rank)
        return frozenset(str(name) for node, name in json.loads(answer) if node == own)


@contextmanager
def open_peers(tiers: Sequence[NodeTier], node: Node, group: dist.ProcessGroup | None) -> Iterator[OpenedTiers | None]:
    """Open the path or URL of each tier as the store of the files that all nodes have there together. Collective.

    The stores are found under the paths of rank 0. Until the end of the context, which all ranks have to reach, each
    rank reads files for the others.

    Args:
        tiers: The tiers, the nearest first.
        node: Node of this rank.
        group: Process group of the ranks; None for all ranks.

    Yields:
        The stores; None if all ranks are on one node, and none of its steps is in several tiers: then files are read
        where they are.

    Raises:
        RankError: A rank is lost.
    """
    channels = get_channels(group)
    own = TierFiles({tier.name: store for tier in tiers if (store := tier.open_own()) is not None})
    report = NodeReport(
        node, {folder: step for name in own.stores for folder, step in _report(own, name, node).items()}
    )
    catalog, urls = _share_catalog_and_urls(channels.main, report, [tier.url for tier in tiers])
    folders = plan_folders(catalog, [tier.name for tier in tiers])
    is_alone = len(catalog.nodes) < 2
    if is_alone and all(len(sources) < 2 for each in folders.values() for sources in each.values()):
        yield None
        return
    rank = channels.main.rank
    stores = {
        tier.name: PeerStore(own, catalog, rank, folders[tier.name], url) for tier, url in zip(tiers, urls, strict=True)
    }

    def delete(name: str) -> None:
        for store in stores.values():
            store.forget(name)
        try:
            own.remove(name)
        except ShardckptError as error:
            _LOG.warning("a file was not deleted: %s", error)

    with ExitStack() as stack:
        for store in stores.values():
            stack.enter_context(mount_store(store.url, store))
        exchange: PieceExchange = LoneExchange(delete)
        if not is_alone:
            coordinator = channels.background_coordinator(group, "peers")
            exchange = stack.enter_context(PeerExchange(coordinator, own, delete))
        for store in stores.values():
            store.exchange = exchange
        yield OpenedTiers(catalog, stores)


def plan_folders(catalog: NodeCatalog, tiers: Sequence[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return for each tier the steps to read from it, each with the folders of the catalog that have their files.

    A step of which several tiers have files of one save is in the nearest of them alone.

    Args:
        catalog: Files of all nodes, in folders such as `memory/step-00000010`.
        tiers: Names of the tiers, the nearest first.
    """
    sources: dict[tuple[str, str], list[str]] = {}
    for tier in tiers:
        for folder, save in catalog.saves.items():
            name, _, step = folder.partition("/")
            if name == tier:
                sources.setdefault((step, save), []).append(folder)
    planned: dict[str, dict[str, tuple[str, ...]]] = {tier: {} for tier in tiers}
    for (step, _), folders in sources.items():
        planned[folders[0].partition("/")[0]][step] = tuple(folders)
    return planned


def share_catalog(coordinator: Coordinator, report: NodeReport) -> NodeCatalog:
    """Return the catalog of all nodes on every rank. Collective."""
    return _share_catalog_and_urls(coordinator, report, [])[0]


def _share_catalog_and_urls(
    coordinator: Coordinator, report: NodeReport, urls: Sequence[str]
) -> tuple[NodeCatalog, Sequence[str]]:
    """Return the catalog of all nodes, and the URLs of rank 0, on every rank. Collective."""
    if coordinator.size == 1:
        return NodeCatalog.from_reports([report]), urls

    def decide(messages: list[bytes]) -> list[bytes]:
        catalog = NodeCatalog.from_reports([NodeReport.decode(message) for message in messages])
        return [json.dumps([*urls]).encode() + b"\n" + catalog.encode()] * len(messages)

    answer = coordinator.coordinate("finding files on all nodes", report.encode(), decide)
    line, _, catalog = answer.partition(b"\n")
    return NodeCatalog.decode(catalog), json.loads(line)


def _report(own: TierFiles, tier: str, node: Node) -> Mapping[str, NodeStep]:
    """Return the committed steps of a tier of this node by their folders; none if its store cannot be read."""
    steps = report_or_nothing(own.stores[tier], node).steps
    return {f"{tier}/{folder}": step for folder, step in steps.items()}


def report_or_nothing(own: Store, node: Node) -> NodeReport:
    """Return the report of a node, without steps if its store cannot be read.

    Args:
        own: Store of the node, whose root is the run.
        node: The node.
    """
    try:
        return report_files(own, node)
    except ShardckptError as error:
        _LOG.warning("steps in %s cannot be read: %s", own.url, error)
        return NodeReport(node)
