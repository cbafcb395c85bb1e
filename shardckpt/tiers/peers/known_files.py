"""`KnownFiles`: what a rank knows about all nodes' files; rank 0 has the full catalog, and ranks ask it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from shardckpt.errors import CheckpointError, StorageError
from shardckpt.native.commit import COMMIT, decode_commit
from shardckpt.storage.store import Read
from shardckpt.tiers.peers.node_files import Node, NodeCatalog, NodeReport
from shardckpt.tiers.peers.tier_files import FileReader


class NodeFile(NamedTuple):
    """A copy of a file on one node."""

    node: int
    name: str  # on the node

    @property
    def tier(self) -> str:
        """First part of the name: the tier with the copy, if nodes have several."""
        return self.name.partition("/")[0]


class PeerFile(NamedTuple):
    """A file and where its copies are."""

    nbytes: int
    places: tuple[NodeFile, ...]  # the nearest tier first


class SharedStep(NamedTuple):
    """A step with files on some nodes."""

    sources: tuple[str, ...]  # folders in the catalog with its files, the nearest tier first
    save: str  # id
    is_complete: bool  # the nodes together have all files

    @classmethod
    def from_json(cls, fields: Any) -> SharedStep:
        """Return the step from its fields after JSON."""
        sources, save, is_complete = fields
        return cls(tuple(sources), str(save), bool(is_complete))


class NodeRanks(NamedTuple):
    """A node that has copies."""

    host: str  # name of the machine
    urls: Mapping[str, str]  # path or URL of each tier there, by the tier's name
    ranks: tuple[int, ...]


class FoundFiles(NamedTuple):
    """Rank 0's answer to a rank that asks for files."""

    # Name in the catalog, size in bytes and node indices for each file.
    files: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    nodes: tuple[tuple[int, NodeRanks], ...] = ()  # these nodes by index

    @classmethod
    def from_json(cls, fields: Any) -> FoundFiles:
        """Return the answer from its fields after JSON."""
        files, nodes = fields
        return cls(
            tuple((name, nbytes, tuple(held)) for name, nbytes, held in files),
            tuple((index, NodeRanks(host, urls, tuple(ranks))) for index, (host, urls, ranks) in nodes),
        )


# Asks rank 0 for files by their names in the catalog; a folder's name ends with a slash.
AskForFiles = Callable[[Sequence[str]], FoundFiles]


def find_files(catalog: NodeCatalog | None, names: Iterable[str]) -> FoundFiles:
    """Return where the copies of files are, for names of files or folders."""
    if catalog is None:
        return FoundFiles()
    found: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    for name in names:
        folder, _, base = name.rpartition("/")
        named = catalog.files.get(folder, {})
        for each in named if not base else [base] if base in named else []:
            found[f"{folder}/{each}"] = (f"{folder}/{each}", *named[each])
    indices = sorted({node for _, _, held in found.values() for node in held})
    nodes = tuple((at, _describe_node(catalog.nodes[at], catalog.ranks[at])) for at in indices)
    return FoundFiles(tuple(found.values()), nodes)


def _describe_node(node: Node, ranks: tuple[int, ...]) -> NodeRanks:
    return NodeRanks(node.host, node.urls, ranks)


def _is_at(name: str, removed: str) -> bool:
    """Return True if a file was removed, or is in a removed folder, whose name ends with a slash."""
    return name.startswith(removed) if removed.endswith("/") else name == removed


class KnownFiles:
    """Files on the own node, and files on others that rank 0 was asked for. Thread-safe."""

    def __init__(
        self,
        own: int,
        report: NodeReport,
        reader: FileReader,
        steps: Mapping[str, SharedStep],
        *,
        is_alone: bool = False,
        first_rank: int = 0,
    ) -> None:
        self.own, self.is_alone = own, is_alone
        self._reader, self._steps = reader, steps
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._sizes: dict[str, Mapping[str, int]] = {}
        self._removed: list[str] = []
        self._folders = {source: folder for folder, step in steps.items() for source in step.sources}
        # Folders of the catalog with the files of each step, the nearest tier first.
        self.sources = {folder: step.sources for folder, step in steps.items()}
        self.nodes = {own: _describe_node(report.node, (first_rank,))}  # nodes that have known copies, by index
        self._files = _collect_own_files(own, report, steps)

    def find(self, name: str) -> PeerFile | None:
        """Return a file with its known copies; None if no copy is known."""
        return self._files.get(name)

    def list_places(self, name: str) -> Sequence[NodeFile]:
        """Return where a file's known copies are."""
        file = self.find(name)
        return () if file is None else file.places

    def learn(self, names: Iterable[str], ask: AskForFiles, *, all_copies: bool = False) -> None:
        """Ask rank 0 for files, unless it was asked before."""
        unknown = {
            name: self._list_names(name)
            for name in names
            if name not in self._asked and (all_copies or name not in self._files)
        }
        wanted = [each for listed in unknown.values() for each in listed]
        if wanted:
            self._add(ask(wanted))
        self._asked.update(unknown)

    def _list_names(self, name: str) -> list[str]:
        """Return the names that a file may have in the catalog."""
        folder, _, base = name.rpartition("/")
        return [f"{source}/{base}" for source in self.sources.get(folder, ())]

    def list_sizes(self, folder: str, ask: AskForFiles) -> Mapping[str, int]:
        """Return the sizes of a step's files, from its `COMMIT` or from rank 0."""
        if not folder:
            return {f"{each}/{COMMIT}": 0 for each, step in self._steps.items() if not self._has_lost(step)}
        sizes = self._sizes.get(folder) if folder in self._steps else {}
        if sizes is None:
            sizes = self._sizes[folder] = self._read_sizes(folder) or self._ask_for_sizes(folder, ask)
        return {f"{folder}/{base}": nbytes for base, nbytes in sizes.items()}

    def _has_lost(self, step: SharedStep) -> bool:
        """Return True if all the step's folders were removed."""
        return all(self._is_removed(f"{source}/") for source in step.sources)

    def _is_removed(self, name: str) -> bool:
        return any(_is_at(name, removed) for removed in self._removed)

    def _read_sizes(self, folder: str) -> Mapping[str, int]:
        """Return the sizes in the `COMMIT` on the own node; empty without one, or if files may be lost."""
        step, mark = self._steps[folder], self._files.get(f"{folder}/{COMMIT}")
        is_changed = any(name.startswith(f"{source}/") for name in self._removed for source in step.sources)
        if mark is None or is_changed or not step.is_complete:
            return {}
        data = bytearray(mark.nbytes)
        for place in mark.places:
            if place.node == self.own:
                with suppress(CheckpointError, StorageError):  # a reader of the step finds it too
                    self._reader.read([Read(place.name, 0, memoryview(data))])
                    commit = decode_commit(bytes(data))
                    if commit.save == step.save:
                        return {**commit.files, commit.manifest: commit.manifest_bytes, COMMIT: mark.nbytes}
        return {}

    def _ask_for_sizes(self, folder: str, ask: AskForFiles) -> Mapping[str, int]:
        names = self._add(ask([f"{source}/" for source in self._steps[folder].sources]))
        self._asked.update(names)
        return {name.rpartition("/")[2]: nbytes for name, nbytes in names.items()}

    def _add(self, found: FoundFiles) -> Mapping[str, int]:
        """Add copies; return the file sizes by name."""
        added: dict[str, PeerFile] = {}
        with self._lock:
            for name, nbytes, nodes in sorted(found.files, key=self._find_order):
                folder, _, base = name.rpartition("/")
                place = f"{self._folders[folder]}/{base}"
                file = added.get(place, PeerFile(nbytes, ()))
                if file.nbytes == nbytes and not self._is_removed(name):
                    added[place] = PeerFile(nbytes, (*file.places, *(NodeFile(node, name) for node in nodes)))
            self.nodes |= dict(found.nodes)
            self._files = {**self._files, **added}
        return {name: file.nbytes for name, file in added.items()}

    def _find_order(self, file: tuple[str, int, tuple[int, ...]]) -> int:
        """Return the position of a file's folder in its step's folders: the nearest tier is first."""
        source = file[0].rpartition("/")[0]
        return self.sources[self._folders[source]].index(source)

    def drop(self, name: str) -> Collection[str]:
        """Remove a file; return the names that it may have on nodes."""
        names = self._list_names(name)
        for each in names:
            self.forget(each)
        return names

    def forget(self, name: str) -> None:
        """Remove copies, including copies that rank 0 names later."""
        with self._lock:
            self._removed.append(name)
            self._sizes = {}
            found = {}
            for each, file in self._files.items():
                left = tuple(place for place in file.places if not _is_at(place.name, name))
                found.update({each: file._replace(places=left)} if left else {})
            self._files = found


def _collect_own_files(own: int, report: NodeReport, steps: Mapping[str, SharedStep]) -> dict[str, PeerFile]:
    """Return the own node's files, as `collect_files`."""
    found: dict[str, PeerFile] = {}
    for folder, step in steps.items():
        for source in step.sources:
            held = report.steps.get(source)
            # Only this save's `COMMIT` has the sizes. Without it, rank 0 is asked for the files.
            for name, nbytes in () if held is None or held.save != step.save else held.files.items():
                known = found.get(f"{folder}/{name}", PeerFile(nbytes, ()))
                if known.nbytes == nbytes:
                    found[f"{folder}/{name}"] = PeerFile(nbytes, (*known.places, NodeFile(own, f"{source}/{name}")))
    return found


def collect_files(catalog: NodeCatalog, sources: Mapping[str, Sequence[str]]) -> dict[str, PeerFile]:
    """Return the files in folders, each with its copies in several folders of a catalog."""
    found: dict[str, PeerFile] = {}
    for folder, folders in sources.items():
        for source in folders:
            for name, copies in catalog.files.get(source, {}).items():
                known = found.get(f"{folder}/{name}", PeerFile(copies.nbytes, ()))
                if known.nbytes == copies.nbytes:
                    places = tuple(NodeFile(node, f"{source}/{name}") for node in copies.nodes)
                    found[f"{folder}/{name}"] = PeerFile(known.nbytes, (*known.places, *places))
    return found
