"""The catalog of the files of all nodes: pure, from reports that anybody may have written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardckpt
from shardckpt.errors import FormatError, UnsafeError
from shardckpt.native.commit import SaveMark
from shardckpt.storage.local import LocalStore
from shardckpt.tiers.peers.node_files import Node, NodeCatalog, NodeReport, NodeStep, find_saves_of_run, report_files

FOLDER = "step-00000001"
NAMES = [f"{number}.safetensors" for number in range(4)]


@st.composite
def reports(draw):
    """Reports of ranks on some nodes of some machines, each with some files of one save."""
    nodes = draw(st.integers(1, 4))
    machines = [draw(st.integers(0, nodes - 1)) for _ in range(nodes)]
    held = [draw(st.sets(st.sampled_from(NAMES))) for _ in range(nodes)]
    per_node = [
        NodeReport(
            Node(f"n{at}", f"m{machines[at]}"), {FOLDER: NodeStep("save", 4, dict.fromkeys(sorted(held[at]), 9))}
        )
        for at in range(nodes)
    ]
    return draw(st.lists(st.sampled_from(per_node), min_size=1, max_size=6))


@given(reports())
def test_a_step_survives_a_loss_of_machines_exactly_if_each_file_is_on_more_of_them(ranks):
    catalog = NodeCatalog.from_reports(ranks)
    assert NodeCatalog.decode(catalog.encode()) == catalog
    places = {name: {r.node.machine for r in ranks if name in r.steps[FOLDER].files} for name in NAMES}
    assert catalog.is_complete(FOLDER) is all(places.values())
    assert catalog.count_machines(FOLDER) == min(map(len, places.values()))
    for rank, report in enumerate(ranks):
        assert catalog.nodes[catalog.find_node(rank)] == report.node
    assert NodeReport.decode(ranks[0].encode()) == ranks[0]


def test_files_of_an_older_save_of_a_step_do_not_count():
    old = NodeReport(Node("a", "a"), {FOLDER: NodeStep("0001", 2, {"x": 1})})
    new = NodeReport(Node("b", "b"), {FOLDER: NodeStep("0002", 2, {"y": 1})})
    catalog = NodeCatalog.from_reports([old, new])
    assert catalog.saves == {FOLDER: "0002"} and [*catalog.files[FOLDER]] == ["y"]
    assert catalog.count_machines(FOLDER) == 0 and catalog.count_machines("step-00000009") == 0


def test_an_older_save_counts_while_only_it_has_all_files():
    """An overwrite was interrupted after the first node had its marks."""
    new = NodeReport(Node("a", "a"), {FOLDER: NodeStep("0002", 2, {"y": 1}, branch=1)})
    old = NodeReport(Node("b", "b"), {FOLDER: NodeStep("0001", 1, {"x": 1})})
    catalog = NodeCatalog.from_reports([new, old])
    assert catalog.saves == {FOLDER: "0001"} and catalog.is_complete(FOLDER)


def test_of_several_complete_saves_of_a_step_a_wanted_one_counts_whatever_its_branch():
    first = NodeReport(
        Node("a", "a"), {FOLDER: NodeStep("0002", 1, {"x": 1}, branch=1), "else": NodeStep("1", 1, {"x": 1})}
    )
    other = NodeReport(Node("b", "b"), {FOLDER: NodeStep("0001", 1, {"y": 1}), "else": NodeStep("2", 2, {"y": 1})})
    reports = [first, first, other]
    assert NodeCatalog.from_reports(reports).saves == {FOLDER: "0002", "else": "1"}
    assert NodeCatalog.from_reports(reports, {FOLDER: ["0001"]}).saves == {FOLDER: "0001", "else": "1"}
    for wanted in (["0001", "0002"], ["0003"], []):
        assert NodeCatalog.from_reports(reports, {FOLDER: wanted}).saves[FOLDER] == "0002"


def test_of_several_saves_of_a_step_the_runs_are_wanted():
    def report(node: str, **steps: tuple[str, str]) -> NodeReport:
        made = {name: NodeStep(save, 1, {"x": 1}, mark=SaveMark(run, "0", 1)) for name, (save, run) in steps.items()}
        return NodeReport(Node(node, node), made)

    same = [report("a", one=("1", "0")), report("b", one=("1", "0"))]
    assert find_saves_of_run(same, lambda: pytest.fail("nobody has to look for the run")) == {}
    doubled = [*same, report("c", one=("2", "f"), two=("1", "0"))]
    assert find_saves_of_run(doubled, lambda: "f") == {"one": ["2"]}
    assert find_saves_of_run(doubled, lambda: "0") == {"one": ["1", "1"]}
    assert find_saves_of_run([NodeReport.decode(each.encode()) for each in doubled], lambda: "f") == {"one": ["2"]}


OLD, NEW = "0mwzeuyy4tiuc2l", "0mwzeuyy5tiuc2l"


def test_a_newer_save_counts_whose_files_are_beside_the_older_marks_of_other_nodes():
    """An overwrite was interrupted before all nodes had the newer marks."""
    new = NodeReport(Node("a", "a"), {FOLDER: NodeStep(NEW, 3, {"COMMIT": 1, f"{NEW}-00000-00.safetensors": 1})})
    others = {f"{NEW}-00001-00.safetensors": 1, "0zzzeuyy5tiuc2l-00001-00.safetensors": 1}
    old = NodeReport(Node("b", "b"), {FOLDER: NodeStep(OLD, 3, {"COMMIT": 1}, others=others)})
    for reports in ([new, old], [old, new]):
        catalog = NodeCatalog.from_reports([NodeReport.decode(report.encode()) for report in reports])
        assert catalog.saves == {FOLDER: NEW} and catalog.is_complete(FOLDER)
        assert f"{NEW}-00001-00.safetensors" in catalog.files[FOLDER] and len(catalog.files[FOLDER]) == 3


def test_an_older_save_counts_whose_files_are_beside_the_newer_marks_of_other_nodes():
    new = NodeReport(
        Node("a", "a"), {FOLDER: NodeStep(NEW, 3, {"COMMIT": 1}, others={f"{OLD}-00000-00.safetensors": 1})}
    )
    old = NodeReport(Node("b", "b"), {FOLDER: NodeStep(OLD, 2, {"COMMIT": 1})})
    catalog = NodeCatalog.from_reports([new, old])
    assert catalog.saves == {FOLDER: OLD} and catalog.is_complete(FOLDER)


def test_a_node_reports_files_of_another_save_in_the_folder_and_no_other_files(tmp_path):
    shardckpt.save({"w": [1, 2]}, tmp_path / FOLDER)
    for name in (f"{NEW}-00001-00.safetensors", "notes.safetensors"):
        (tmp_path / FOLDER / name).write_text("four")
    step = report_files(LocalStore(str(tmp_path)), Node("a", "a")).steps[FOLDER]
    assert step.others == {f"{NEW}-00001-00.safetensors": 4}


def test_a_save_of_a_newer_branch_counts_whatever_the_clock_of_its_node():
    early = NodeReport(Node("a", "a"), {FOLDER: NodeStep("0001", 1, {"x": 1}, branch=2)})
    late = NodeReport(Node("b", "b"), {FOLDER: NodeStep("0002", 1, {"y": 1}, branch=1)})
    reports = [NodeReport.decode(report.encode()) for report in (early, late)]
    assert NodeCatalog.from_reports(reports).saves == {FOLDER: "0001"}


def test_a_node_reports_the_committed_files_that_have_their_sizes(tmp_path):
    shardckpt.save({"w": [1, 2]}, tmp_path / FOLDER)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / FOLDER / "notes").write_text("no part of the step")
    node, store = Node("a", "a"), LocalStore(str(tmp_path))
    report = report_files(store, node)
    step = report.steps[FOLDER]
    assert [*report.steps] == [FOLDER] and len(step.files) == step.total and "notes" not in step.files
    payload = max((tmp_path / FOLDER).glob("*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-1])
    assert len(report_files(store, node).steps[FOLDER].files) == step.total - 1
    (tmp_path / FOLDER / "COMMIT").write_text("damaged")
    assert report_files(store, node).steps == {}


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists, max_leaves=6))
def test_a_report_of_other_bytes_is_a_typed_error(data):
    with pytest.raises(FormatError, match="report"):
        NodeReport.decode(data if isinstance(data, bytes) else json.dumps(data).encode())


@pytest.mark.parametrize("name", ["../COMMIT", "/etc/passwd", ""])
def test_a_report_with_a_name_that_leaves_its_folder_is_refused(name):
    with pytest.raises(UnsafeError):
        NodeReport.decode(NodeReport(Node("a", "a"), {FOLDER: NodeStep("s", 1, {name: 1})}).encode())
