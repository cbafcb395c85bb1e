"""A rank that asks for files finds the copies that rank 0 knows, and asks for no others."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import MissingFileError
from shardckpt.native.commit import COMMIT, encode_commit, manifest_name
from shardckpt.native.records import FileRecord
from shardckpt.storage.store import Read
from shardckpt.tiers.peers.known_files import (
    FoundFiles,
    KnownFiles,
    NodeFile,
    PeerFile,
    collect_files,
    find_files,
)
from shardckpt.tiers.peers.node_files import Node, NodeCatalog, NodeReport, NodeStep
from shardckpt.tiers.peers.open_peers import find_shared_steps, plan_folders

TIERS = ["memory", "local"]
STEPS = ["step-00000001", "step-00000002"]
SAVES = ["0abcdefghijklm1", "0abcdefghijklm2"]
NAMES = ["x", "y", "z"]


def mark(save: str) -> bytes:
    return encode_commit(save, b"manifest", [FileRecord(f"{save}-{name}", 9, None) for name in NAMES])


def name_files(save: str) -> dict[str, int]:
    return {**{f"{save}-{name}": 9 for name in NAMES}, manifest_name(save): 8, COMMIT: len(mark(save))}


class OwnFiles:
    """The files of a node, of which only `COMMIT` is read; it may be damaged."""

    url = "own"

    def __init__(self, report: NodeReport, *, is_damaged: bool) -> None:
        self.report, self.is_damaged = report, is_damaged

    def read(self, reads: list[Read]) -> None:
        for name, offset, buffer in reads:
            folder, _, base = name.rpartition("/")
            if base != COMMIT or base not in self.report.steps[folder].files:
                raise MissingFileError("no such file", where=name)
            data = bytearray(mark(self.report.steps[folder].save))
            data[20] ^= self.is_damaged
            buffer[:] = data[offset : offset + len(buffer)]


@st.composite
def node_reports(draw) -> list[NodeReport]:
    """Reports of nodes, of which each has files of two saves of each step beside the marks of one, in each tier."""

    def report(at: int) -> NodeReport:
        steps = {}
        for folder in draw(st.sets(st.sampled_from([f"{tier}/{step}" for tier in TIERS for step in STEPS]))):
            files = name_files(save := draw(st.sampled_from(SAVES)))
            held = draw(st.sets(st.sampled_from(sorted(files)))) | {COMMIT}
            (other,) = {*SAVES} - {save}
            beside = {name: size for name, size in name_files(other).items() if name != COMMIT}
            others = {name: beside[name] for name in sorted(draw(st.sets(st.sampled_from(sorted(beside)))))}
            steps[folder] = NodeStep(save, len(files), {name: files[name] for name in sorted(held)}, others=others)
        return NodeReport(Node(f"n{at}", "m", host=f"h{at}"), steps)

    return [report(at) for at in range(draw(st.integers(2, 3)))]


class Asked:
    """Rank 0, as another rank asks it; the names that it was asked for."""

    def __init__(self, catalog: NodeCatalog) -> None:
        self.catalog, self.names = catalog, []

    def find(self, names) -> FoundFiles:
        self.names += names
        return FoundFiles.from_json(json.loads(json.dumps(find_files(self.catalog, names))))


def know(reports, tier: str, own: int, *, is_damaged: bool = False) -> tuple[KnownFiles, Asked]:
    catalog = NodeCatalog.from_reports(reports)
    steps = find_shared_steps(catalog, TIERS)[tier]
    reader = OwnFiles(reports[own], is_damaged=is_damaged)
    return KnownFiles(own, reports[own], reader, steps), Asked(catalog)


def find_left(catalog: NodeCatalog, tier: str, removed: list[str]) -> dict[str, PeerFile]:
    """Return the files of all nodes without removed copies, and folders, whose names end with a slash."""
    found = {}
    for name, file in collect_files(catalog, plan_folders(catalog, TIERS)[tier]).items():
        gone = [each for each in file.places if each.name in removed or f"{each.name.rpartition('/')[0]}/" in removed]
        if places := tuple(each for each in file.places if each not in gone):
            found[name] = PeerFile(file.nbytes, places)
    return found


@given(node_reports(), st.sampled_from(TIERS), st.booleans(), st.data())
def test_a_rank_that_asks_sees_the_files_and_copies_of_the_catalog(reports, tier, is_damaged, data):
    own = data.draw(st.integers(0, len(reports) - 1))
    known, asked = know(reports, tier, own, is_damaged=is_damaged)
    sources = [source for step in known.sources.values() for source in step]
    removed = []
    for folder in data.draw(st.lists(st.sampled_from(sources), max_size=2)) if sources else []:
        removed.append(data.draw(st.sampled_from([f"{folder}/", f"{folder}/{COMMIT}"])))
        known.forget(removed[-1])
    left = find_left(asked.catalog, tier, removed)
    for step in STEPS:
        expected = {name: file.nbytes for name, file in left.items() if name.startswith(step)}
        if data.draw(st.booleans()):
            assert known.list_sizes(step, asked.find) == expected
        for name in expected:
            known.learn([name], asked.find, all_copies=True)
            found, file = known.find(name), left[name]
            assert found is not None and found.nbytes == file.nbytes
            assert set(found.places) == set(file.places)
            assert [each.tier for each in found.places] == [each.tier for each in file.places], "the nearest first"
            assert all(known.nodes[each.node].host == f"h{each.node}" for each in found.places)
        known.learn([f"{step}/other"], asked.find)
        assert known.find(f"{step}/other") is None


def test_a_rank_asks_once_for_files_that_its_node_lacks_and_never_for_complete_steps():
    save, folder = SAVES[0], f"memory/{STEPS[0]}"
    files = name_files(save)
    own = {name: files[name] for name in (COMMIT, manifest_name(save), f"{save}-x")}
    reports = [
        NodeReport(Node(f"n{at}", "m"), {folder: NodeStep(save, 5, part)}) for at, part in enumerate((files, own))
    ]
    known, asked = know(reports, "memory", 1)
    assert known.list_sizes(STEPS[0], asked.find) == {f"{STEPS[0]}/{name}": size for name, size in files.items()}
    known.learn([f"{STEPS[0]}/{name}" for name in own], asked.find)
    assert asked.names == []
    for _ in range(2):
        known.learn([f"{STEPS[0]}/{save}-y", f"{STEPS[0]}/{save}-x"], asked.find)
    assert asked.names == [f"{folder}/{save}-y"]
    known.learn([f"{STEPS[0]}/{save}-x"], asked.find, all_copies=True)
    assert asked.names == [f"{folder}/{save}-y", f"{folder}/{save}-x"]


def test_the_names_of_a_step_that_was_saved_again_since_the_report_are_asked_for():
    folder, (first, second) = f"memory/{STEPS[0]}", SAVES
    reports, later = (
        [NodeReport(Node(f"n{at}", "m"), {folder: NodeStep(save, 5, name_files(save))}) for at in range(2)]
        for save in (first, second)
    )
    catalog = NodeCatalog.from_reports(reports)
    steps = find_shared_steps(catalog, TIERS)["memory"]
    known, asked = KnownFiles(1, reports[1], OwnFiles(later[1], is_damaged=False), steps), Asked(catalog)
    assert known.list_sizes(STEPS[0], asked.find) == {
        f"{STEPS[0]}/{name}": size for name, size in name_files(first).items()
    }
    assert asked.names == [f"{folder}/"]


def test_an_own_file_of_a_wrong_size_beside_other_marks_hides_no_good_copy():
    """An overwrite was interrupted on this node, which has a part of a file, and not yet the new `COMMIT`."""
    folder, (first, second) = f"memory/{STEPS[0]}", SAVES
    name, good = f"{STEPS[0]}/{second}-x", NodeStep(second, 5, name_files(second))
    torn = NodeStep(first, 5, {}, others={f"{second}-x": 4})
    for own in (0, 1):
        reports = [NodeReport(Node(f"n{at}", "m"), {folder: torn if at == own else good}) for at in range(2)]
        known, asked = know(reports, "memory", own)
        known.learn([name], asked.find)
        assert known.find(name) == PeerFile(9, (NodeFile(1 - own, f"{folder}/{second}-x"),))
