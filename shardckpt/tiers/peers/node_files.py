"""A catalog of a run's files on several nodes, from the ranks' reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from shardckpt.encodings.typed_json import decode
from shardckpt.errors import CheckpointError, FormatError, MissingFileError
from shardckpt.native.commit import COMMIT, WRITTEN, Commit, SaveMark, is_of_save, read_commit
from shardckpt.native.run_directory import describe_missing_files, is_step_name
from shardckpt.storage.store import Store, SubfolderStore, check_name


class Node(NamedTuple):
    """A node: processes that reach the same files without a network."""

    name: str  # id
    machine: str  # id of the machine, which nodes share that fail together
    rack: str = ""  # label of the machines that may fail together; empty without one
    host: str = ""  # name of the machine, for messages; empty if unknown
    urls: Mapping[str, str] = {}  # path or URL of each tier there by the tier's name, for messages


class NodeStep(NamedTuple):
    """A node's files of one committed step."""

    save: str  # id
    total: int  # number of files on all nodes
    files: Mapping[str, int]  # size in bytes by name, of the files on this node
    branch: int = 0
    mark: SaveMark | None = None
    others: Mapping[str, int] = {}  # as `files`, of other saves in the folder: the step is being replaced

    @property
    def order(self) -> tuple[int, int, str]:
        """Position among a step's saves: node clocks differ, so the save's time counts last."""
        return self.branch, 0 if self.mark is None else self.mark.sequence, self.save

    def select(self, save: str) -> NodeStep | None:
        """Return a save's files, even if this node has committed another save; None without any."""
        if save == self.save:
            return self
        files = {name: nbytes for name, nbytes in self.others.items() if is_of_save(name, save)}
        return NodeStep(save, 0, files) if files else None


@dataclass(frozen=True)
class NodeReport:
    """A rank's report: the committed steps on its node."""

    node: Node
    steps: Mapping[str, NodeStep] = field(default_factory=dict)  # steps by the name of their folder
    # Why a folder's content does not count, or not all of it, by the folder's name.
    faults: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the report as bytes."""
        return json.dumps([self.node, self.steps, *([self.faults] if self.faults else [])]).encode()

    @classmethod
    def decode(cls, data: bytes) -> NodeReport:
        """Parse what `encode` returned, in linear time."""
        try:
            node, steps, *rest = json.loads(data)
            name, machine, rack, host = map(str, node[:4])
            urls = {str(tier): str(url) for tier, url in node[4].items()}
            faults = {str(folder): str(fault) for each in rest for folder, fault in each.items()}
            found = {str(folder): _decode_step(step) for folder, step in steps.items()}
        except (ValueError, TypeError, AttributeError, IndexError, RecursionError, CheckpointError) as error:
            raise FormatError("a node's report of its files is damaged", found=f"{len(data)} bytes") from error
        for folder, step in found.items():
            for each in (folder, *step.files, *step.others):
                check_name(each, name)
        return cls(Node(name, machine, rack, host, urls), found, faults)


def _decode_step(step: Any) -> NodeStep:
    save, total, files, branch, mark, others = step
    held, other = ({str(name): int(size) for name, size in each.items()} for each in (files, others))
    return NodeStep(str(save), int(total), held, int(branch), None if mark is None else decode(SaveMark, mark), other)


def report_files(store: Store, node: Node, folders: Iterable[str] | None = None) -> NodeReport:
    """Return the committed steps in a node's store; files with another size than the committed one do not count."""
    if folders is None:
        folders = [entry.name for entry in store.list() if entry.is_folder and is_step_name(entry.name)]
    steps, faults = {}, {}
    for folder in folders:
        inside = SubfolderStore(store, folder)
        sizes: dict[str, int] = {}
        try:
            sizes = {entry.name: entry.size for entry in inside.list() if not entry.is_folder}
            commit = read_commit(inside, sizes)
        except (CheckpointError, MissingFileError) as error:  # damaged, of another version, or being removed
            if sizes:
                faults[folder] = str(error)
            continue
        steps[folder] = step = _find_held(commit, sizes)
        wrong = [name for name in (*commit.files, commit.manifest) if name in sizes and name not in step.files]
        if wrong or commit.manifest not in sizes:  # other nodes may have the other files, but each has the manifest
            faults[folder] = describe_missing_files(inside.url, commit, wrong or [commit.manifest])
    return NodeReport(node, steps, faults)


def _find_held(commit: Commit, sizes: Mapping[str, int]) -> NodeStep:
    """Return a node's files of a committed step."""
    expected = {**commit.files, commit.manifest: commit.manifest_bytes, COMMIT: sizes[COMMIT]}
    held = {name: size for name, size in expected.items() if sizes.get(name) == size}
    # Files of another save count if some node has its `COMMIT`: until each node has the new marks there are two saves.
    others = {name: size for name, size in sizes.items() if name not in expected and WRITTEN.fullmatch(name)}
    return NodeStep(commit.save, len(expected), held, commit.branch, commit.mark, others)


class FileCopies(NamedTuple):
    """A file and the nodes that have it."""

    nbytes: int
    nodes: tuple[int, ...]  # indices of the nodes, in ascending order


@dataclass(frozen=True)
class NodeCatalog:
    """A run's files by node."""

    nodes: tuple[Node, ...]
    ranks: tuple[tuple[int, ...], ...]  # ranks of each node
    saves: Mapping[str, str]  # id of the save of each step, by the name of its folder
    totals: Mapping[str, int]  # number of files of each step
    # Copies of each file, by the names of its step's folder and of the file.
    files: Mapping[str, Mapping[str, FileCopies]]

    @classmethod
    def from_reports(
        cls, reports: Sequence[NodeReport], wanted: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> NodeCatalog:
        """Build the catalog from all ranks' reports, in rank order."""
        ranks = _group_ranks(reports)
        first = [reports[members[0]] for members in ranks.values()]  # the lowest rank reports for its node
        steps = _group_steps(first)
        chosen = {folder: _choose_save(held, wanted.get(folder)) for folder, held in steps.items()}
        return cls(
            tuple(report.node for report in first),
            tuple(map(tuple, ranks.values())),
            {folder: held[0][1].save for folder, held in chosen.items()},
            {folder: max(step.total for _, step in held) for folder, held in chosen.items()},
            {folder: _merge_files(held) for folder, held in chosen.items()},
        )

    def encode(self) -> bytes:
        """Return the catalog as bytes."""
        return json.dumps([self.nodes, self.ranks, self.saves, self.totals, self.files]).encode()

    @classmethod
    def decode(cls, data: bytes) -> NodeCatalog:
        """Parse what `encode` returned."""
        nodes, ranks, saves, totals, files = json.loads(data)
        copies = {
            folder: {name: FileCopies(nbytes, tuple(held)) for name, (nbytes, held) in named.items()}
            for folder, named in files.items()
        }
        return cls(tuple(Node(*node) for node in nodes), tuple(map(tuple, ranks)), saves, totals, copies)

    def find_node(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return next(index for index, members in enumerate(self.ranks) if rank in members)

    def select(self, folder: str, own: int, held: Iterable[str], others: Iterable[str]) -> NodeCatalog:
        """Return the part of the catalog about some files of one step."""
        files = self.files.get(folder, {})
        wanted = {name: files[name] for name in others}
        nodes = [own, *sorted({node for found in wanted.values() for node in found.nodes} - {own})]
        index = {node: at for at, node in enumerate(nodes)}
        chosen = {name: FileCopies(files[name].nbytes, (0,)) for name in held}  # the own copy alone
        chosen |= {
            name: FileCopies(each.nbytes, tuple(index[at] for at in each.nodes)) for name, each in wanted.items()
        }
        known = folder in self.files
        return NodeCatalog(
            tuple(self.nodes[node] for node in nodes),
            tuple(self.ranks[node] for node in nodes),
            {folder: self.saves[folder]} if known else {},
            {folder: self.totals[folder]} if known else {},
            {folder: chosen} if known else {},
        )

    def is_complete(self, folder: str) -> bool:
        """Return True if the nodes together have all the step's files."""
        return folder in self.files and len(self.files[folder]) == self.totals[folder]

    def count_machines(self, folder: str) -> int:
        """Return on how many machines each file is, at least; 0 if a file is on none."""
        if not self.is_complete(folder):
            return 0
        copies = self.files[folder].values()
        return min(len({self.nodes[index].machine for index in each.nodes}) for each in copies)

    def find_most_copied(self, folder: str) -> str:
        """Return the folder of the newest step on the most machines; prefer a given one if several are equal."""

        def rank_step(each: str) -> tuple[int, bool, str]:
            return self.count_machines(each), each == folder, self.saves[each]

        return max(self.files, key=rank_step, default=folder)


def find_saves_of_run(reports: Sequence[NodeReport], find_run: Callable[[], str]) -> dict[str, list[str]]:
    """Return a run's saves by the folder's name, where nodes have different saves."""
    held = {folder: [step for _, step in steps] for folder, steps in _group_steps(reports).items()}
    doubled = {folder: steps for folder, steps in held.items() if len({step.save for step in steps}) > 1}
    run = find_run() if doubled else ""
    return {
        folder: [step.save for step in steps if step.mark is not None and step.mark.run == run]
        for folder, steps in doubled.items()
    }


def find_sharing_hosts(reports: Sequence[NodeReport]) -> list[str]:
    """Return the names of machines that share one store; empty if none do."""
    hosts: dict[str, dict[str, str]] = {}
    for report in reports:
        hosts.setdefault(report.node.name, {})[report.node.machine] = report.node.host
    return next((sorted(each.values()) for each in hosts.values() if len(each) > 1), [])


def _group_ranks(reports: Sequence[NodeReport]) -> dict[str, list[int]]:
    """Group ranks by node name."""
    ranks: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        ranks.setdefault(report.node.name, []).append(rank)
    return ranks


def _group_steps(reports: Sequence[NodeReport]) -> dict[str, list[tuple[int, NodeStep]]]:
    """Group parts by the step's folder, each with its node index."""
    steps: dict[str, list[tuple[int, NodeStep]]] = {}
    for index, report in enumerate(reports):
        for folder, step in report.steps.items():
            steps.setdefault(folder, []).append((index, step))
    return steps


def _group_saves(held: Sequence[tuple[int, NodeStep]]) -> dict[str, list[tuple[int, NodeStep]]]:
    """Group a step's parts by save id, each with its node index."""
    saves = dict.fromkeys(step.save for _, step in held)
    return {save: [(index, part) for index, step in held if (part := step.select(save)) is not None] for save in saves}


def _is_complete(parts: Sequence[tuple[int, NodeStep]]) -> bool:
    """Return True if nodes together have all the save's files."""
    return len({name for _, step in parts for name in step.files}) == max(step.total for _, step in parts)


def _choose_save(
    held: Sequence[tuple[int, NodeStep]], wanted: Collection[str] | None
) -> Sequence[tuple[int, NodeStep]]:
    """Pick which save of a step to use; return its parts as (node index, part)."""
    saves = _group_saves(held)
    if len(saves) == 1:
        return held
    chosen = [parts for save, parts in saves.items() if wanted is None or save in wanted]
    # A complete save comes first, since an overwrite may have been interrupted; then the newest of the newest branch.
    return max(chosen or saves.values(), key=lambda parts: (_is_complete(parts), max(step.order for _, step in parts)))


def _merge_files(held: Sequence[tuple[int, NodeStep]]) -> dict[str, FileCopies]:
    """Group a save's files by name. If nodes disagree on a size, trust one with the save's `COMMIT`, then the first."""
    committed_first = sorted(held, key=lambda each: not each[1].total)
    sizes = {name: nbytes for _, step in reversed(committed_first) for name, nbytes in step.files.items()}
    found: dict[str, FileCopies] = {}
    for index, step in held:
        for name, nbytes in step.files.items():
            known = found.get(name, FileCopies(sizes[name], ()))
            if known.nbytes == nbytes:
                found[name] = FileCopies(nbytes, (*known.nodes, index))
    return found
