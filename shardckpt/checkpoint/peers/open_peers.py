"""Open the files that nodes have together as one store, for the time of a restore."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import Coordinator, get_channels
from shardckpt.checkpoint.peers.node_files import Node, NodeCatalog, NodeReport, report_files
from shardckpt.checkpoint.peers.peer_exchange import PeerExchange
from shardckpt.checkpoint.peers.peer_store import PeerStore
from shardckpt.errors import ShardckptError
from shardckpt.storage.resolve_url import mount_store, open_store
from shardckpt.storage.store import Store

_LOG = logging.getLogger("shardckpt")


@contextmanager
def open_peers(url: str, node: Node, group: dist.ProcessGroup | None) -> Iterator[PeerStore | None]:
    """Open a URL as the store of the files that all nodes have there together. Collective.

    Until the end of the context, which all ranks have to reach, each rank reads files for the others.

    Args:
        url: URL with a protocol, under which each node has files of its own.
        node: Node of this rank.
        group: Process group of the ranks; None for all ranks.

    Yields:
        The store; None if all ranks are on one node, which reads its own files.

    Raises:
        RankError: A rank is lost.
    """
    channels = get_channels(group)
    own = open_store(url)
    catalog = share_catalog(channels.main, _report_or_nothing(own, node))
    if len(catalog.nodes) < 2:
        yield None
        return
    store = PeerStore(own, catalog, channels.main.rank)
    coordinator = channels.background_coordinator(group, "peers")
    with mount_store(url, store), PeerExchange(coordinator, own, partial(_delete, own, store)) as exchange:
        store.exchange = exchange
        yield store


def share_catalog(coordinator: Coordinator, report: NodeReport) -> NodeCatalog:
    """Return the catalog of all nodes on every rank. Collective."""
    if coordinator.size == 1:
        return NodeCatalog.from_reports([report])

    def decide(messages: list[bytes]) -> list[bytes]:
        catalog = NodeCatalog.from_reports([NodeReport.decode(message) for message in messages])
        return [catalog.encode()] * len(messages)

    return NodeCatalog.decode(coordinator.coordinate("finding files on all nodes", report.encode(), decide))


def _report_or_nothing(own: Store, node: Node) -> NodeReport:
    """Return the report of this node, without steps if its store cannot be read."""
    try:
        return report_files(own, node)
    except ShardckptError as error:
        _LOG.warning("captures in memory cannot be read: %s", error)
        return NodeReport(node)


def _delete(own: Store, store: PeerStore, name: str) -> None:
    store.forget(name)
    try:
        own.delete(name)
    except ShardckptError as error:
        _LOG.warning("a file was not deleted: %s", error)
