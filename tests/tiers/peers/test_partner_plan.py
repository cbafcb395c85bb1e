"""Partners and copies: pure, for any number of nodes, machines and racks."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.tiers.peers.node_files import Node, NodeCatalog, NodeReport, NodeStep
from shardckpt.tiers.peers.partner_plan import CopyOrder, choose_partners, plan_copies, plan_copy_orders

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
def test_after_the_copies_each_file_is_on_all_machines_up_to_the_number(nodes, copies, data):
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


@given(clusters(), st.integers(0, 3), st.data())
def test_files_of_a_leaving_node_get_a_copy_on_a_machine_that_stays(nodes, copies, data):
    leaving = data.draw(st.sets(st.sampled_from([node.name for node in nodes])))
    reports = [NodeReport(node, {FOLDER: NodeStep("save", len(nodes), {f"f-{node.name}": 7})}) for node in nodes]
    orders = plan_copies(NodeCatalog.from_reports(reports), FOLDER, copies, leaving)
    targets = {name: [nodes[rank] for rank, names in orders.items() if name in names] for name in map(file_of, nodes)}
    for node in nodes:
        kept = targets[file_of(node)]
        free = {each.machine for each in nodes if each.name not in leaving} - {node.machine}
        assert all(each.name not in leaving and each.machine != node.machine for each in kept)
        assert len({each.machine for each in kept}) == len(kept)
        wanted = max(copies, 1) if node.name in leaving else copies
        assert len(kept) == min(wanted, len(free)), "and not more than asked for"


def file_of(node: Node) -> str:
    return f"f-{node.name}"


def read_orders(nodes: int) -> list[CopyOrder]:
    """Orders of a step whose nodes have two ranks each, with a file of each rank, and the marks on all nodes."""
    total = 2 * nodes + 1
    reports = [
        NodeReport(
            Node(f"n{rank // 2}", f"m{rank // 2}"),
            {FOLDER: NodeStep("save", total, {"COMMIT": 9, f"f{rank // 2 * 2}": 7, f"f{rank // 2 * 2 + 1}": 7})},
        )
        for rank in range(2 * nodes)
    ]
    return [CopyOrder.decode(each.encode()) for each in plan_copy_orders(NodeCatalog.from_reports(reports), FOLDER, 1)]


def test_an_order_names_the_files_of_its_rank_and_the_nodes_that_have_them():
    orders = read_orders(4)
    assert sorted(name for order in orders for name in order.names) == [f"f{number}" for number in range(8)]
    for rank, order in enumerate(orders):
        assert order.machines == 4
        assert order.catalog.find_node(rank) == 0, "the own node is the first"
        files = order.catalog.files[FOLDER]
        assert files.keys() == {"COMMIT", f"f{rank // 2 * 2}", f"f{rank // 2 * 2 + 1}", *order.names}
        assert files["COMMIT"].nodes == (0,)
        for name in order.names:
            (holder,) = files[name].nodes
            assert int(name[1:]) in order.catalog.ranks[holder]


def test_an_order_counts_the_files_that_no_node_has():
    reports = [NodeReport(Node(name, name), {FOLDER: NodeStep("save", 3, {"COMMIT": 9, name: 7})}) for name in "ab"]
    assert [each.lost for each in plan_copy_orders(NodeCatalog.from_reports(reports), FOLDER, 1)] == [0, 0]
    assert [each.lost for each in plan_copy_orders(NodeCatalog.from_reports(reports[:1]), FOLDER, 1)] == [1]
    assert [each.lost for each in plan_copy_orders(NodeCatalog.from_reports(reports[:1]), "step-00000009", 1)] == [1]


def test_the_bytes_of_an_order_do_not_grow_with_the_number_of_nodes():
    few, many = (max(len(order.encode()) for order in read_orders(nodes)) for nodes in (8, 80))
    assert many < 1.2 * few
