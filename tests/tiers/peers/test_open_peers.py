"""The steps that a restore reads from each tier: pure, from the catalog of all nodes."""

import json

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.tiers.peers.known_files import collect_files
from shardckpt.tiers.peers.node_files import Node, NodeCatalog, NodeReport, NodeStep
from shardckpt.tiers.peers.open_peers import find_shared_steps, plan_folders

TIERS = ["memory", "local"]
FOLDERS = [f"{tier}/step-0000000{number}" for tier in TIERS for number in (1, 2)]


@st.composite
def catalogs(draw):
    """Catalogs of nodes that have files of one of two saves of each step, in each tier."""
    saves = st.sampled_from(["s1", "s2"])
    files = st.sets(st.sampled_from(["x", "y", "COMMIT"])).map(lambda names: dict.fromkeys(sorted(names), 9))
    steps = st.builds(NodeStep, saves, st.just(3), files)
    held = st.dictionaries(st.sampled_from(FOLDERS), steps)
    reports = draw(st.lists(held, min_size=1, max_size=3))
    return NodeCatalog.from_reports([NodeReport(Node(f"n{at}", "m"), each) for at, each in enumerate(reports)])


@given(catalogs())
def test_a_step_is_in_its_nearest_tier_with_all_copies_of_its_save_alone(catalog):
    planned = plan_folders(catalog, TIERS)
    seen = [source for folders in planned.values() for sources in folders.values() for source in sources]
    assert sorted(seen) == sorted(catalog.files), "each folder is read once"
    for tier, folders in planned.items():
        for step, sources in folders.items():
            assert sources[0] == f"{tier}/{step}" and len({catalog.saves[source] for source in sources}) == 1
            assert [*sources] == sorted(sources, key=lambda source: TIERS.index(source.partition("/")[0]))
            for name, file in collect_files(catalog, {step: sources}).items():
                places = {(place.node, place.name) for place in file.places}
                base = name.partition("/")[2]
                assert places == {
                    (node, f"{source}/{base}")
                    for source in sources
                    if base in catalog.files[source]
                    for node in catalog.files[source][base].nodes
                }


@given(catalogs())
def test_ranks_learn_which_steps_the_nodes_have_together_and_if_they_have_all_files(catalog):
    shared = find_shared_steps(catalog, TIERS)
    for tier, folders in plan_folders(catalog, TIERS).items():
        assert {folder: step.sources for folder, step in shared[tier].items()} == folders
        for folder, sources in folders.items():
            held = {name for source in sources for name in catalog.files[source]}
            assert shared[tier][folder].save == catalog.saves[sources[0]]
            assert shared[tier][folder].is_complete == (len(held) == 3)


def test_what_ranks_are_told_does_not_grow_with_the_number_of_nodes():
    def tell(nodes: int) -> str:
        reports = [
            NodeReport(
                Node(f"n{at}", f"m{at}"),
                {FOLDERS[0]: NodeStep("s", nodes + 2, {"COMMIT": 9, "manifest": 9, f"x{at}": 9})},
            )
            for at in range(nodes)
        ]
        return json.dumps(find_shared_steps(NodeCatalog.from_reports(reports), TIERS))

    assert tell(100) == tell(2) == '{"memory": {"step-00000001": [["memory/step-00000001"], "s", true]}, "local": {}}'
