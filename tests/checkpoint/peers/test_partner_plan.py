"""Partners and copies: pure, for any number of nodes, machines and racks."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checkpoint.peers.node_files import Node, NodeCatalog, NodeReport, NodeStep
from shardckpt.checkpoint.peers.partner_plan import choose_partners, plan_copies

FOLDER = "step-00000001"


@st.composite
def clusters(draw):
    machines = draw(st.integers(1, 7))
    racks = [draw(st.sampled_from(["", "r", "s"])) for _ in range(machines)]
    on = [*range(machines), *draw(st.lists(st.integers(0, machines - 1), max_size=3))]
    return [Node(f"n{number}", f"m{machine}", racks[machine]) for number, machine in enumerate(on)]


@given(clusters(), st.integers(0, 4))
def test_partners_are_on_other_machines_and_on_another_rack_if_there_is_one(nodes, copies):
    count = len({node.machine for node in nodes})
    for node, partners in zip(nodes, choose_partners(nodes, copies), strict=True):
        machines = [nodes[index].machine for index in partners]
        assert len({node.machine, *machines}) == 1 + len(machines) == 1 + min(copies, count - 1)
        if partners and any(each.rack != node.rack for each in nodes):
            assert nodes[partners[0]].rack != node.rack


@given(st.integers(2, 12), st.integers(1, 3))
def test_every_node_of_one_rack_keeps_as_many_copies_as_every_other(count, copies):
    partners = choose_partners([Node(f"n{at}", f"m{at}") for at in range(count)], copies)
    assert {*Counter(index for each in partners for index in each).values()} == {min(copies, count - 1)}


@given(clusters(), st.integers(0, 3), st.data())
def test_after_the_copies_each_file_is_on_as_many_machines_as_there_are_up_to_the_number(nodes, copies, data):
    names = [f"f{number}" for number in range(5)]
    held = [dict.fromkeys(sorted(data.draw(st.sets(st.sampled_from(names)))), 7) for _ in nodes]
    ranks = [*range(len(nodes)), *data.draw(st.lists(st.integers(0, len(nodes) - 1), max_size=4))]

    def report() -> NodeCatalog:
        found = {name for files in held for name in files}
        return NodeCatalog.from_reports(
            [NodeReport(nodes[at], {FOLDER: NodeStep("save", len(found), held[at])}) for at in ranks]
        )

    before = report()
    for rank, orders in plan_copies(before, FOLDER, copies).items():
        files = held[ranks[rank]]
        assert not files.keys() & set(orders), "a node copies only what it lacks"
        held[ranks[rank]] = {**files, **dict.fromkeys(orders, 7)}
    after = report()
    machines = len({node.machine for node in nodes})
    for name, held_by in after.files[FOLDER].items():
        count = len({nodes[ranks[after.ranks[index][0]]].machine for index in held_by.nodes})
        had = len({nodes[ranks[before.ranks[index][0]]].machine for index in before.files[FOLDER][name].nodes})
        assert count == max(had, min(1 + copies, machines))
    assert plan_copies(after, FOLDER, copies) == {}
