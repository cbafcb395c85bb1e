"""Which steps all nodes have copied, and from when on the files of older saves are not needed any more."""

from __future__ import annotations

import json

from shardckpt.tiers.peers.promoted_steps import PromotedStep, PromotedSteps, find_common_steps

OLD, NEW = PromotedStep(1, "old"), PromotedStep(1, "new")
NEXT = PromotedStep(2, "next")


def share(*nodes: PromotedSteps) -> None:
    """Let all nodes know what all of them have, as a save does."""
    copied = [json.loads(json.dumps({"local": node.uncounted})) for node in nodes]
    for node in nodes:
        node.count([PromotedStep(*step) for step in find_common_steps(copied).get("local", ())])


def test_the_files_of_an_older_save_go_when_all_nodes_have_the_newer_one() -> None:
    first, second = PromotedSteps(), PromotedSteps()
    first.add(NEW, ["old-00000-00.safetensors"])
    share(first, second)
    assert first.take_removable(()) == [] and first.uncounted == [NEW]
    second.add(NEW, ["old-00001-00.safetensors"])
    share(first, second)
    assert first.take_removable(()) == [(1, ["old-00000-00.safetensors"])]
    assert second.take_removable(()) == [(1, ["old-00001-00.safetensors"])]
    assert first.take_removable(()) == [] and first.uncounted == []


def test_the_files_of_an_older_save_stay_while_a_capture_may_write_into_their_folder() -> None:
    node = PromotedSteps()
    for step in (NEW, NEXT):
        node.add(step, ["old"])
        share(node)
    assert node.take_removable({NEW.number}) == [(NEXT.number, ["old"])]
    assert node.take_removable(()) == [(NEW.number, ["old"])]


def test_another_save_of_the_step_on_another_node_is_not_the_same_step() -> None:
    first, second = PromotedSteps(), PromotedSteps()
    first.add(OLD, [])
    first.add(NEW, ["older", "old"])
    second.add(OLD, ["older"])
    share(first, second)
    assert first.uncounted == [NEW] and first.take_removable(()) == []
    assert second.take_removable(()) == [(1, ["older"])], "the first node has the files of `old` too"


def test_the_files_of_an_older_save_stay_if_a_node_never_had_the_newer_one() -> None:
    first, second = PromotedSteps(), PromotedSteps()
    first.add(NEW, ["old"])
    for node in (first, second):
        node.add(NEXT, [])
    share(first, second)
    assert first.uncounted == second.uncounted == [] and first.take_removable(()) == []


def test_only_the_newest_of_uncounted_steps_is_protected_once_one_is_counted() -> None:
    node = PromotedSteps()
    node.add(OLD, [])
    node.add(NEXT, [])
    assert node.list_protected([0, 1, 2]) == {0, 2}
    node.count([OLD])
    assert node.list_protected([0, 1, 2]) == {2}
