"""A store of the files that several nodes have together: those of the own node are read, others pulled from peers."""

from __future__ import annotations

import builtins
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardckpt.checkpoint.peers.exchange_round import PIECE_BYTES, FilePiece
from shardckpt.checkpoint.peers.known_files import KnownFiles, NodeFile
from shardckpt.checkpoint.peers.peer_exchange import PieceExchange
from shardckpt.checkpoint.peers.tier_files import FileReader
from shardckpt.errors import CheckpointError, MissingFileError, StorageError, TruncatedError
from shardckpt.storage.store import Capabilities, Listed, Read, Writer, check_name

_LOG = logging.getLogger("shardckpt")


class RejectedRange(NamedTuple):
    """A range of a file that one copy cannot give.

    Attributes:
        start: First byte.
        stop: End.
        place: The copy.
        reason: Why it cannot.
    """

    start: int
    stop: int
    place: NodeFile
    reason: str


class PeerStore:
    """Files of all nodes, during a restore. Reads are thread-safe.

    A range is read from the own node if that has the file, and otherwise from another node. A range that a copy cannot
    give is read from the next one.

    Args:
        own: Files of this node, by the names of the catalog.
        known: Files of all nodes, as far as this rank knows them.
        rank: This rank.
        url: Path or URL of this store; None for that of `own`.

    Attributes:
        exchange: PieceExchange with the other ranks; set before the first read.
        own_bytes: Bytes that were read from the own node.
        pulled_bytes: Bytes that came from other nodes.
        tier_bytes: Bytes that were read, by tier.
        rejected: Ranges that copies could not give, by the name of the file.
        faults: Reasons why copies were not read, one for each.
    """

    exchange: PieceExchange

    def __init__(self, own: FileReader, known: KnownFiles, rank: int, url: str | None = None) -> None:
        self._own, self._known, self._rank = own, known, rank
        self._url = own.url if url is None else url
        self.rejected: dict[str, builtins.list[RejectedRange]] = {}
        self.faults: builtins.list[str] = []
        self.own_bytes = self.pulled_bytes = 0
        self.tier_bytes: Counter[str] = Counter()

    @property
    def url(self) -> str:
        """Path or URL of the run's files."""
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: with other nodes, reads may cross the network and each rank reads for itself."""
        is_alone = self._known.is_alone
        return Capabilities(renames=False, is_local=is_alone, is_shared=is_alone)

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder` on all nodes, sorted by name. Raises UnsafeError."""
        if folder:
            check_name(folder, self.url)
        prefix = f"{folder}/" if folder else ""
        found: dict[str, Listed] = {}
        for name, nbytes in self._known.list_sizes(folder, self.exchange.find).items():
            if name.startswith(prefix):
                base, slash, _ = name[len(prefix) :].partition("/")
                found[base] = Listed(prefix + base, 0 if slash else nbytes, bool(slash))
        return sorted(found.values())

    def size(self, name: str) -> int:
        """Return a file's size in bytes. Raises MissingFileError."""
        self._known.learn([name], self.exchange.find)
        file = self._known.find(name)
        if file is None:
            raise MissingFileError("no node has this file", where=f"{self.url}/{name}")
        return file.nbytes

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer.

        Raises:
            TruncatedError: A file ends before a range does.
            MissingFileError: No node has the file, or none of them can give the range.
            RankError: A rank is lost.
        """
        self._known.learn([read.name for read in reads], self.exchange.find)
        for read in reads:
            if read.offset + len(read.buffer) > self.size(read.name):
                raise TruncatedError("the file ends too early", where=f"{self.url}/{read.name}")
        left = [read for read in reads if len(read.buffer)]
        while left:
            left = self._read_once(left)

    def _read_once(self, reads: Sequence[Read]) -> builtins.list[Read]:
        """Read each range from the nearest copy that may give it; return those that it did not give."""
        own: builtins.list[tuple[Read, NodeFile]] = []
        pulled: builtins.list[tuple[FilePiece, Read, NodeFile]] = []
        for read in reads:
            for part, place in self._assign(read):
                if place.node == self._known.own:
                    own.append((part, place))
                else:
                    members = self._known.nodes[place.node].ranks
                    peer = members[self._rank % len(members)]
                    pulled += [
                        (FilePiece(peer, place.name, each.offset, len(each.buffer)), each, place)
                        for each in _split(part)
                    ]
        left = self._read_own(own)
        came = self.exchange.pull([(piece, each.buffer) for piece, each, _ in pulled]) if pulled else []
        for (_, each, place), is_filled in zip(pulled, came, strict=True):
            if is_filled:
                self.pulled_bytes += len(each.buffer)
                self.tier_bytes[place.tier] += len(each.buffer)
            else:
                self._reject(each, place, "does not give it")
                left.append(each)
        return left

    def _assign(self, read: Read) -> Iterator[tuple[Read, NodeFile]]:
        """Yield parts of a range, each with the copy to read it from."""
        rejected = self.rejected.get(read.name, ())
        end = read.offset + len(read.buffer)
        bounds = {read.offset, end, *(at for each in rejected for at in each[:2] if read.offset < at < end)}
        edges = sorted(bounds)
        for start, stop in pairwise(edges):
            bad = {each.place for each in rejected if each.start < stop and start < each.stop}
            place = next((place for place in self._list_places(read.name) if place not in bad), None)
            if place is None:
                raise MissingFileError("no node gives this range of a file", where=f"{self.url}/{read.name}")
            yield Read(read.name, start, read.buffer[start - read.offset : stop - read.offset]), place

    def _list_places(self, name: str) -> Iterator[NodeFile]:
        """Yield the copies of a file: on the own node first; those of others in an order that differs between ranks."""
        yield from (place for place in self._known.list_places(name) if place.node == self._known.own)
        self._known.learn([name], self.exchange.find, all_copies=True)
        places = [place for place in self._known.list_places(name) if place.node != self._known.own]
        for tier in dict.fromkeys(place.tier for place in places):
            others = [place for place in places if place.tier == tier]
            turn = self._rank % len(others)
            yield from (*others[turn:], *others[:turn])

    def _read_own(self, reads: Sequence[tuple[Read, NodeFile]]) -> builtins.list[Read]:
        """Read ranges from the own node; return those that it did not give."""
        try:
            if reads:
                self._own.read([read._replace(name=place.name) for read, place in reads])
        except (StorageError, CheckpointError) as error:
            if len(reads) > 1:
                return [left for each in reads for left in self._read_own([each])]
            read, place = reads[0]
            self._reject(read, place, str(error))
            return [read]
        for read, place in reads:
            self.own_bytes += len(read.buffer)
            self.tier_bytes[place.tier] += len(read.buffer)
        return []

    def reject(self, name: str, offset: int, nbytes: int) -> bool:
        """Read a damaged range from another copy from now on; return False if no other copy is left."""
        damaged = Read(name, offset, memoryview(bytearray(nbytes)))
        try:
            for part, place in [*self._assign(damaged)]:
                self._reject(part, place, "a block is damaged")
            return bool([*self._assign(damaged)])
        except MissingFileError:
            return False

    def is_near(self, name: str) -> bool:
        """Return True if the own node has a file."""
        return any(place.node == self._known.own for place in self._known.list_places(name))

    def _reject(self, read: Read, place: NodeFile, reason: str) -> None:
        """Read a range from another copy from now on; the first range of a copy is a warning in the log."""
        rejected = self.rejected.setdefault(read.name, [])
        is_first = all(each.place != place for each in rejected)
        rejected.append(RejectedRange(read.offset, read.offset + len(read.buffer), place, reason))
        if is_first:
            node = f"node {self._known.nodes[place.node].name}"
            self.faults.append(
                f"{self.url}/{read.name} is read from another copy than {place.name} of {node}: {reason}"
            )
            _LOG.warning("%s", self.faults[-1])

    def create(self, name: str) -> Writer:
        """Raise an error: this store is only read."""
        raise StorageError("files of several nodes can be read only", where=f"{self.url}/{name}")

    def delete(self, name: str) -> None:
        """Remove a file on all nodes, which delete its copies in the next round of the exchange."""
        for copy in self._known.drop(name):
            self.exchange.delete(copy)

    def delete_folder(self, folder: str) -> None:
        """Remove a folder on all nodes, as `delete`."""
        for copy in self._known.sources.get(folder, ()):
            self.forget(f"{copy}/")
            self.exchange.delete(f"{copy}/")

    def forget(self, name: str) -> None:
        """Remove copies from this view.

        Args:
            name: Name of a file among those of the nodes, or of a folder with a slash at the end.
        """
        self._known.forget(name)

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
