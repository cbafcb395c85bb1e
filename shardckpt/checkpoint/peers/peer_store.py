"""A store of the files that several nodes have together: those of the own node are read, others pulled from peers."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardckpt.checkpoint.peers.exchange_round import PIECE_BYTES, FilePiece
from shardckpt.checkpoint.peers.node_files import NodeCatalog
from shardckpt.checkpoint.peers.peer_exchange import PeerExchange
from shardckpt.errors import CheckpointError, MissingFileError, StorageError, TruncatedError
from shardckpt.storage.store import Capabilities, Listed, Read, Store, Writer, check_name

_LOG = logging.getLogger("shardckpt")


class _Rejected(NamedTuple):
    """A range of a file that one node cannot give.

    Attributes:
        start: First byte.
        stop: End.
        node: Index of the node.
    """

    start: int
    stop: int
    node: int


class PeerStore:
    """Files of all nodes, during a restore. Reads are thread-safe.

    A range is read from the own node if that has the file, and otherwise from another node. A range that a node cannot
    give is read from the next one.

    Args:
        own: Store of this node.
        catalog: Files of all nodes.
        rank: This rank.

    Attributes:
        exchange: Exchange with the other ranks; set before the first read.
        own_bytes: Bytes that were read from the own node.
        pulled_bytes: Bytes that came from other nodes.
    """

    exchange: PeerExchange

    def __init__(self, own: Store, catalog: NodeCatalog, rank: int) -> None:
        self._own, self._catalog, self._rank = own, catalog, rank
        self._node = catalog.find_node(rank)
        self._files = {
            f"{folder}/{name}": each for folder, named in catalog.files.items() for name, each in named.items()
        }
        self._rejected: dict[str, builtins.list[_Rejected]] = {}
        self.own_bytes = self.pulled_bytes = 0

    @property
    def url(self) -> str:
        """URL of the run's files on this node."""
        return self._own.url

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: reads may cross the network, and each rank reads for itself."""
        return Capabilities(renames=False, is_local=False, is_shared=False)

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder` on all nodes, sorted by name. Raises UnsafeError."""
        if folder:
            check_name(folder, self.url)
        prefix = f"{folder}/" if folder else ""
        found: dict[str, Listed] = {}
        for name, copies in [*self._files.items()]:
            if name.startswith(prefix):
                base, slash, _ = name[len(prefix) :].partition("/")
                found[base] = Listed(prefix + base, 0 if slash else copies.nbytes, bool(slash))
        return sorted(found.values())

    def size(self, name: str) -> int:
        """Return a file's size in bytes. Raises MissingFileError."""
        copies = self._files.get(name)
        if copies is None:
            raise MissingFileError("no node has this file", where=f"{self.url}/{name}")
        return copies.nbytes

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer.

        Raises:
            TruncatedError: A file ends before a range does.
            MissingFileError: No node has the file, or none of them can give the range.
            RankError: A rank is lost.
        """
        for read in reads:
            if read.offset + len(read.buffer) > self.size(read.name):
                raise TruncatedError("the file ends too early", where=f"{self.url}/{read.name}")
        left = [read for read in reads if len(read.buffer)]
        while left:
            left = self._read_once(left)

    def _read_once(self, reads: Sequence[Read]) -> builtins.list[Read]:
        """Read each range from the nearest node that may give it; return those that it did not give."""
        own: builtins.list[Read] = []
        pulled: builtins.list[tuple[FilePiece, Read, int]] = []
        for read in reads:
            for part, node in self._assign(read):
                if node == self._node:
                    own.append(part)
                else:
                    members = self._catalog.ranks[node]
                    peer = members[self._rank % len(members)]
                    pulled += [(FilePiece(peer, *each[:2], len(each.buffer)), each, node) for each in _split(part)]
        left = self._read_own(own)
        came = self.exchange.pull([(piece, each.buffer) for piece, each, _ in pulled]) if pulled else []
        for (_, each, node), is_filled in zip(pulled, came, strict=True):
            if is_filled:
                self.pulled_bytes += len(each.buffer)
            else:
                self._reject(each, node, "does not give it")
                left.append(each)
        return left

    def _assign(self, read: Read) -> Iterator[tuple[Read, int]]:
        """Yield parts of a range, each with the node to read it from."""
        rejected = self._rejected.get(read.name, ())
        end = read.offset + len(read.buffer)
        bounds = {read.offset, end, *(at for each in rejected for at in each[:2] if read.offset < at < end)}
        edges = sorted(bounds)
        for start, stop in pairwise(edges):
            bad = {each.node for each in rejected if each.start < stop and start < each.stop}
            node = next((node for node in self._list_nodes(read.name) if node not in bad), None)
            if node is None:
                raise MissingFileError("no node gives this range of a file", where=f"{self.url}/{read.name}")
            yield Read(read.name, start, read.buffer[start - read.offset : stop - read.offset]), node

    def _list_nodes(self, name: str) -> Iterator[int]:
        """Yield the nodes that have a file: the own one first, the others in an order that differs between ranks."""
        nodes = self._files[name].nodes
        if self._node in nodes:
            yield self._node
        others = [node for node in nodes if node != self._node]
        turn = self._rank % len(others) if others else 0
        yield from (*others[turn:], *others[:turn])

    def _read_own(self, reads: Sequence[Read]) -> builtins.list[Read]:
        """Read ranges from the own node; return those that it did not give."""
        try:
            if reads:
                self._own.read(reads)
        except (StorageError, CheckpointError) as error:
            if len(reads) > 1:
                return [left for read in reads for left in self._read_own([read])]
            self._reject(reads[0], self._node, str(error))
            return [*reads]
        self.own_bytes += sum(len(read.buffer) for read in reads)
        return []

    def reject(self, name: str, offset: int, nbytes: int) -> bool:
        """Read a damaged range from another node from now on; return False if no other node is left."""
        damaged = Read(name, offset, memoryview(bytearray(nbytes)))
        try:
            for part, node in [*self._assign(damaged)]:
                self._reject(part, node, "a block is damaged")
            return bool([*self._assign(damaged)])
        except MissingFileError:
            return False

    def _reject(self, read: Read, node: int, reason: str) -> None:
        rejected = _Rejected(read.offset, read.offset + len(read.buffer), node)
        self._rejected.setdefault(read.name, []).append(rejected)
        name = self._catalog.nodes[node].name
        _LOG.warning("%s/%s is read from another copy: node %s: %s", self.url, read.name, name, reason)

    def create(self, name: str) -> Writer:
        """Raise an error: this store is only read."""
        raise StorageError("files of several nodes can be read only", where=f"{self.url}/{name}")

    def delete(self, name: str) -> None:
        """Remove a file on all nodes, which delete it in the next round of the exchange."""
        self.forget(name)
        self.exchange.delete(name)

    def delete_folder(self, folder: str) -> None:
        """Remove a folder on all nodes, as `delete`."""
        for entry in self.list(folder):
            self.delete(entry.name)

    def forget(self, name: str) -> None:
        """Remove a file from this view."""
        self._files = {each: copies for each, copies in self._files.items() if each != name}

    def changed_at(self, folder: str) -> float | None:  # noqa: ARG002
        """Return None: unknown."""
        return None

    def rename(self, source: str, target: str) -> None:  # noqa: ARG002
        """Raise an error: this store is only read."""
        self.create(target)


def _split(read: Read) -> Iterator[Read]:
    """Split a range into pieces that a rank may send."""
    for at in range(0, len(read.buffer), PIECE_BYTES):
        yield Read(read.name, read.offset + at, read.buffer[at : at + PIECE_BYTES])
