"""A store with several nodes' files: it reads files on the own node, and pulls others from peers."""

from __future__ import annotations

import builtins
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardckpt.errors import CheckpointError, MissingFileError, StorageError, TruncatedError
from shardckpt.storage.store import Capabilities, Listed, Read, Writer, check_name
from shardckpt.tiers.peers.exchange_round import PIECE_BYTES, FilePiece
from shardckpt.tiers.peers.known_files import KnownFiles, NodeFile
from shardckpt.tiers.peers.peer_exchange import PieceExchange
from shardckpt.tiers.peers.tier_files import FileReader


class RejectedRange(NamedTuple):
    """A file range that one copy cannot give."""

    start: int  # in bytes
    stop: int
    place: NodeFile
    reason: str  # as the rest of a sentence about the bytes


class CopyFault(NamedTuple):
    """A copy that was not read, or only in part."""

    place: NodeFile
    where: str  # tier, rank, machine and path
    text: str  # why, and which copy was read instead


class PeerStore:
    """All nodes' files, during a restore. Reads are thread-safe."""

    def __init__(
        self, own: FileReader, known: KnownFiles, exchange: PieceExchange, rank: int, url: str | None = None
    ) -> None:
        self._own, self._known, self._exchange, self._rank = own, known, exchange, rank
        self._url = own.url if url is None else url
        # By the name of the file.
        self.rejected: dict[str, builtins.list[RejectedRange]] = {}
        self.own_bytes = self.pulled_bytes = 0
        self.tier_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Path or URL, for messages."""
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: with other nodes, reads may cross the network and each rank reads for itself."""
        is_alone = self._known.is_alone
        return Capabilities(renames=False, is_local=is_alone, is_shared=is_alone)

    def list(self, folder: str = "") -> list[Listed]:
        """List `folder` on all nodes, sorted by name. Raises UnsafeError."""
        if folder:
            check_name(folder, self.url)
        prefix = f"{folder}/" if folder else ""
        found: dict[str, Listed] = {}
        for name, nbytes in self._known.list_sizes(folder, self._exchange.find).items():
            if name.startswith(prefix):
                base, slash, _ = name[len(prefix) :].partition("/")
                found[base] = Listed(prefix + base, 0 if slash else nbytes, bool(slash))
        return sorted(found.values())

    def size(self, name: str) -> int:
        """Return a file's size in bytes. Raises MissingFileError."""
        self._known.learn([name], self._exchange.find)
        file = self._known.find(name)
        if file is None:
            raise MissingFileError("no node has this file", where=f"{self.url}/{name}")
        return file.nbytes

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer, from the own node if it has the file."""
        self._known.learn([read.name for read in reads], self._exchange.find)
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
        came = self._exchange.pull([(piece, each.buffer) for piece, each, _ in pulled]) if pulled else []
        for (_, each, place), is_filled in zip(pulled, came, strict=True):
            if is_filled:
                self._count(each, place)
            else:
                self._reject(each, place, "could not be sent by that machine")
                left.append(each)
        return left

    def _assign(self, read: Read) -> Iterator[tuple[Read, NodeFile]]:
        """Yield parts of a range, each with the copy to read it from."""
        rejected = self.rejected.get(read.name, ())
        end = read.offset + len(read.buffer)
        bounds = {read.offset, end, *(at for each in rejected for at in each[:2] if read.offset < at < end)}
        edges = sorted(bounds)
        for start, stop in pairwise(edges):
            place = self._find_place(read.name, start, stop)
            if place is None:
                where = self.locate(read.name, start, stop - start)
                raise MissingFileError("no node can read this range of the file", where=where)
            yield Read(read.name, start, read.buffer[start - read.offset : stop - read.offset]), place

    def _find_place(self, name: str, start: int, stop: int) -> NodeFile | None:
        """Return the nearest copy that may give a range; None without one."""
        bad = {each.place for each in self.rejected.get(name, ()) if each.start < stop and start < each.stop}
        return next((place for place in self._list_places(name) if place not in bad), None)

    def _list_places(self, name: str) -> Iterator[NodeFile]:
        """Yield a file's copies: on the own node first, then on others in an order that differs between ranks."""
        yield from (place for place in self._known.list_places(name) if place.node == self._known.own)
        self._known.learn([name], self._exchange.find, all_copies=True)
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
            self._reject(read, place, f"cannot be read: {error}")
            return [read]
        for read, place in reads:
            self._count(read, place)
        return []

    def _count(self, read: Read, place: NodeFile) -> None:
        """Count the bytes of a read."""
        nbytes = len(read.buffer)
        with self._lock:  # reads come from several threads
            if place.node == self._known.own:
                self.own_bytes += nbytes
            else:
                self.pulled_bytes += nbytes
            self.tier_bytes[place.tier] += nbytes

    def reject(self, name: str, offset: int, nbytes: int) -> bool:
        """Read a damaged range from another copy from now on; return False if no other copy is left."""
        damaged = Read(name, offset, memoryview(bytearray(nbytes)))
        try:
            for part, place in [*self._assign(damaged)]:
                self._reject(part, place, "do not match their checksum")
            return bool([*self._assign(damaged)])
        except MissingFileError:
            return False

    def is_near(self, name: str) -> bool:
        """Return True if the own node has a file."""
        return any(place.node == self._known.own for place in self._known.list_places(name))

    def _reject(self, read: Read, place: NodeFile, reason: str) -> None:
        """Read a range from another copy from now on."""
        rejected = RejectedRange(read.offset, read.offset + len(read.buffer), place, reason)
        self.rejected.setdefault(read.name, []).append(rejected)

    def locate(self, name: str, offset: int, nbytes: int) -> str:
        """Return where the copy is that was last rejected for a range; without one, the path here."""
        found = [each for each in self.rejected.get(name, ()) if each.start < offset + nbytes and offset < each.stop]
        return self._show(found[-1].place) if found else f"{self.url}/{name}"

    def _show(self, place: NodeFile) -> str:
        """Return a copy's tier, rank, machine and path."""
        node, (tier, _, inside) = self._known.nodes[place.node], place.name.partition("/")
        rank = min(node.ranks, default=self._rank)
        return f"{tier} tier on the node of rank {rank}, {node.host}: {node.urls.get(tier, self.url)}/{inside}"

    def list_faults(self) -> builtins.list[CopyFault]:
        """Return the rejected copies, each with its first range and what was read instead."""
        found: dict[NodeFile, CopyFault] = {}
        for name, rejected in [*self.rejected.items()]:
            for start, stop, place, reason in rejected:
                if place not in found:
                    other = self._find_place(name, start, stop)
                    instead = "no other copy has them" if other is None else f"they were read from {self._show(other)}"
                    text = f"bytes {start} to {stop} {reason}; {instead}"
                    found[place] = CopyFault(place, self._show(place), text)
        return [*found.values()]

    def create(self, name: str) -> Writer:
        """Raise an error: this store is only read."""
        raise StorageError("files on several nodes are read-only", where=f"{self.url}/{name}")

    def delete(self, name: str) -> None:
        """Remove a file on all nodes, which delete their copies in the exchange's next round."""
        for copy in self._known.drop(name):
            self._exchange.delete(copy)

    def delete_files(self, folder: str, names: Collection[str]) -> None:
        """Remove some files in a folder on all nodes, as `delete`."""
        for name in sorted(names):
            self.delete(f"{folder}/{name}")

    def delete_folder(self, folder: str) -> None:
        """Remove a folder on all nodes, as `delete`."""
        for copy in self._known.sources.get(folder, ()):
            self._known.forget(f"{copy}/")
            self._exchange.delete(f"{copy}/")

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
