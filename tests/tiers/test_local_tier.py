"""The tier in a folder of the node: what a killed trainer leaves, what is restored, which folders are refused."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import signal
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt import Checkpointer, Local, PeerMemory
from shardckpt.checkpoint.run import step_restore
from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.errors import NoCompleteCheckpoint, StorageError, UsageError
from shardckpt.events import FallbackEvent, RestoreEvent, WithdrawalEvent
from shardckpt.tiers import capture_tier, tiered_finder
from shardckpt.tiers.memory_tier import MemoryTier
from tests.kit.ranks.forks import is_killed
from tests.kit.ranks.harness import run
from tests.kit.runs.tier_runs import DAMAGES, damage_step, make_state, restore, save


def make(folder: Path, *, every: int = 1, save_every: int = 100, on_event=None, **rules: object) -> Checkpointer:
    tiers = [Local(folder / "local", every=every, **rules)]
    return Checkpointer(folder / "run", save_every=save_every, tiers=tiers, on_event=on_event)


def flip(step: Path) -> None:
    """Change one bit of the data of a step."""
    file = next(step.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_step_survives_a_killed_trainer_as_a_step_that_every_command_reads(tmp_path):
    def train() -> None:
        ck = make(tmp_path, every=2, save_every=4, keep_last=2)
        assert [step for step in range(1, 10) if ck.should_save(step)] == [2, 4, 6, 8]
        save(ck, 2, 4, 6)
        os.kill(os.getpid(), signal.SIGKILL)

    assert is_killed(train)
    local = tmp_path / "local"
    assert Checkpointer(tmp_path / "run").steps() == (4,)
    assert [step.number for step in shardckpt.ls(local).complete] == [4, 6], "the rules of the tier are its own"
    assert not shardckpt.verify(local / "step-00000006").problems
    ck = make(tmp_path, every=2, save_every=4)
    assert restore(ck) == 6 and restore(make(tmp_path), step=4) == 4
    copies = ck.durability(4).copies
    assert [(copy.tier, copy.survives) for copy in copies] == [("local", ("process",)), ("root", ("process",))]
    assert copies[0].path == str(local / "step-00000004")


def test_a_step_restored_from_memory_is_claimed_by_its_attempt_if_the_root_is_bad(tmp_path):
    """Local and root have an earlier attempt; the manifest in the root, which would tell so, cannot be read."""

    def begin() -> Checkpointer:
        tiers = [PeerMemory(), Local(tmp_path / "local")]
        return Checkpointer(tmp_path / "run", save_every=1, tiers=tiers)

    steps = [tmp_path / place / "step-00000002" for place in ("local", "run")]
    ck = begin()
    save(ck, 2)
    for step in steps:
        shutil.copytree(step, tmp_path / "kept" / step.parent.name)
    ck.save(2, make_state(22), overwrite=True)
    ck.wait()
    assert [copy.tier for copy in ck.durability(2).copies] == ["memory", "local", "root"]
    for step in steps:
        shutil.rmtree(step)
        shutil.copytree(tmp_path / "kept" / step.parent.name, step)
    manifest = next(steps[1].glob("*.manifest.json"))
    manifest.write_bytes(manifest.read_bytes().replace(b"w", b"v", 1))
    ck, state = begin(), make_state()
    assert ck.restore(state) == 2 and state["step"] == 22
    assert [copy.tier for copy in ck.durability(2).copies] == ["memory"]


def test_captures_from_before_the_root_was_emptied_do_not_count_later(tmp_path):
    """The root was emptied, and the next start ran on another machine; then both machines meet."""
    local, away = tmp_path / "local", tmp_path / "away"
    save(make(tmp_path), 1, 2)
    shutil.rmtree(tmp_path / "run")
    local.rename(away)
    other = make(tmp_path)
    assert restore(other) is None
    save(other, 1)
    (away / "step-00000002").rename(local / "step-00000002")
    assert restore(make(tmp_path)) == 1
    with pytest.raises(NoCompleteCheckpoint):
        restore(make(tmp_path), step=2)
    shutil.rmtree(local / "step-00000001")
    assert restore(make(tmp_path)) is None
    assert [step.number for step in shardckpt.ls(local).complete] == [2], "it is not removed"


def test_after_a_restore_only_copies_of_the_restored_attempt_are_claimed(tmp_path):
    """A start without the folder has captured the step again."""
    memory, both = [PeerMemory(max_bytes="1GB")], [PeerMemory(max_bytes="1GB"), Local(tmp_path / "local")]

    def start(tiers: list, save_every: int) -> Checkpointer:
        return Checkpointer(tmp_path / "run", save_every=save_every, tiers=tiers)

    def list_claimed(ck: Checkpointer) -> list[str]:
        return [copy.tier for copy in ck.durability(2).copies]

    save(start(both, 100), 2)
    assert restore(ck := start(both, 100)) == 2 and list_claimed(ck) == ["memory", "local"], "of one save"
    again = start(memory, 100)
    again.save(2, make_state(2), overwrite=True)
    again.wait()
    assert restore(ck := start(both, 100)) == 2 and list_claimed(ck) == ["memory"]
    saved = start(memory, 2)
    saved.save(2, make_state(2), overwrite=True)
    saved.wait()
    assert restore(ck := start(both, 100)) == 2 and list_claimed(ck) == ["memory", "root"], "of one attempt"
    shardckpt.stop_tiers()
    assert restore(ck := start(both, 100)) == 2 and list_claimed(ck) == ["root"]


def test_rules_of_the_tier_keep_steps_and_every_rule_is_checked(tmp_path):
    save(make(tmp_path, keep_last=1, keep_every=3), 1, 3, 4, 5)
    assert [step.number for step in shardckpt.ls(tmp_path / "local").complete] == [3, 5]
    for name, value in {"every": 0, "keep_last": 0, "keep_every": -1, "keep_for": "x", "copies": -1, "rack": 3}.items():
        with pytest.raises(UsageError, match=f"{name}|not a time"):
            Local("folder", **{name: value})


def test_the_rules_leave_an_earlier_save_of_the_step_that_is_being_captured(tmp_path, monkeypatch):
    ck = make(tmp_path, keep_last=1)
    (tier,) = ck._saver._captures._tiers
    tier._list_needed = lambda _: (4,)  # as if it were being promoted
    save(ck, 4, 6)
    tier._list_needed = lambda _: ()
    tier.promoted.count_all()
    start, found = capture_tier.start_async_save, list[int]()

    def apply_and_start(*args: object, **options: object) -> object:
        with monkeypatch.context() as several:
            several.setattr(tier, "is_spread", True)  # then whole folders are removed
            tier.apply_rules()
        found.extend(step.number for step in shardckpt.ls(tmp_path / "local").complete)
        return start(*args, **options)

    monkeypatch.setattr(capture_tier, "start_async_save", apply_and_start)
    ck.save(4, make_state(44), overwrite=True)
    ck.wait()
    assert found == [4, 6]


def test_a_step_that_was_captured_here_leaves_when_copies_of_newer_ones_come(tmp_path, monkeypatch):
    tiers = [PeerMemory(), Local(tmp_path / "local", keep_last=1)]
    ck = Checkpointer(tmp_path / "run", save_every=100, tiers=tiers)

    def fail(*_: object) -> None:
        raise StorageError("the folder cannot be used")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="not captured in memory"):
        patch.setattr(MemoryTier, "open_node", fail)
        save(ck, 1)
    save(ck, 2, 3)
    assert [step.number for step in shardckpt.ls(tmp_path / "local").complete] == [3]


def test_a_damaged_copy_falls_to_the_next_then_to_the_step_before_each_with_a_word(tmp_path):
    save(make(tmp_path, keep_last=3, save_every=2), 1, 2, 3)
    events: list[FallbackEvent] = []
    ck = make(tmp_path, on_event=lambda event: events.append(event) if isinstance(event, FallbackEvent) else None)
    for name in ("step-00000003", "step-00000002"):
        flip(tmp_path / "local" / name)
    with pytest.warns(UserWarning, match="restored") as warned:
        assert restore(ck) == 2
    first, *others = str(warned[0].message).split(" is not used: ")
    assert first == "restored step 2 from the root. Newer step 3" and len(others) == 2
    assert "local/step-00000003" in others[0] and others[0].endswith(". A copy of step 2")
    assert "local/step-00000002" in others[1]
    assert [event.path for event in events] == [str(tmp_path / "local" / f"step-0000000{n}") for n in (3, 2)]
    assert [copy.tier for copy in ck.durability(2).copies] == ["root"], "a copy that was found damaged is not claimed"
    flip(tmp_path / "run" / "step-00000002")
    with pytest.warns(UserWarning, match="restored step 1"):
        assert restore(make(tmp_path)) == 1


def test_after_a_restore_from_a_tier_no_save_refers_to_files_that_nobody_has_read(tmp_path):
    """The damage of a step that was not loaded would be in all saves that refer to it."""
    tiers = [Local(tmp_path / "local")]
    state = {"frozen": torch.ones(5000)}

    def train(*steps: int) -> int | None:
        ck = Checkpointer(tmp_path / "run", save_every=2, tiers=tiers, dedup=True)
        restored = ck.restore({"frozen": torch.zeros(5000)})
        for step in steps:
            ck.save(step, state)
        ck.wait()
        return restored

    train(2, 3)
    flip(tmp_path / "run" / "step-00000002")
    assert train(4, 6) == 3
    verified = [shardckpt.verify(tmp_path / "run" / f"step-0000000{n}") for n in (2, 4, 6)]
    assert [bool(each.problems) for each in verified] == [True, False, False]
    (base,) = [json.loads(line) for line in (tmp_path / "run/step-00000006/COMMIT").read_text().splitlines()[:1]]
    assert [url for url, _ in base["bases"]] == ["../step-00000004"], "later saves are bases again"


def test_copies_that_are_overwritten_are_not_withdrawn(tmp_path):
    events: list[object] = []
    ck = make(tmp_path, save_every=1, on_event=events.append)
    for _ in range(2):
        ck.save(1, make_state(), overwrite=True)
        ck.wait()
        assert [copy.tier for copy in ck.durability(1).copies] == ["local", "root"]
    assert not [event for event in events if isinstance(event, WithdrawalEvent)]


def test_a_step_that_another_job_replaces_before_it_is_loaded_is_not_claimed(tmp_path, monkeypatch):
    """Its copy in the folder, made meanwhile, is of the save that was found, and not of the one that was loaded."""
    memory, both = [PeerMemory(max_bytes="1GB")], [PeerMemory(max_bytes="1GB"), Local(tmp_path / "local")]
    promoted, kept = tmp_path / "local" / "step-00000002", tmp_path / "kept"

    def start(tiers: list) -> Checkpointer:
        return Checkpointer(tmp_path / "run", save_every=100, tiers=tiers)

    def load(state, path, **options) -> None:
        other = start(memory)
        other.save(2, make_state(7), overwrite=True)
        other.wait()
        kept.rename(promoted)
        shardckpt.load(state, path, **options)

    save(start(both), 2)
    promoted.rename(kept)
    monkeypatch.setattr(step_restore, "load", load)
    ck, into = start(both), make_state(-1)
    assert ck.restore(into) == 2 and into["step"] == 7
    assert ck.durability(2).copies == ()


def test_a_step_of_another_job_on_the_run_is_not_a_copy_of_the_own_one(tmp_path):
    """Both jobs have a step 1; the other one alone saves it in the root, later into the folder of both."""
    events: list[object] = []
    root, local = tmp_path / "run", Local(tmp_path / "local")
    ck = Checkpointer(root, save_every=100, tiers=[local], on_event=events.append)
    save(ck, 1)
    assert [copy.tier for copy in ck.durability(1).copies] == ["local"]
    save(Checkpointer(root, save_every=1, tiers=[Local(tmp_path / "other")]), 1)
    assert ck.durability(1).survives == set(), "the next start drops it"
    save(Checkpointer(root, save_every=100, tiers=[local]), 1)
    assert ck.durability(1).survives == set()
    assert [event.tier for event in events if isinstance(event, WithdrawalEvent)] == ["local"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_behind_memory", [False, True])
@pytest.mark.parametrize(("before", "expected"), [("local", 3), ("root", 3), ("nothing", None), ("the same", 4)])
def test_a_step_of_the_folder_that_is_passed_over_is_one_warning_and_one_event(
    tmp_path, before, expected, damage, is_behind_memory
):
    events: list[object] = []
    every = {"root": 3, "the same": 4}.get(before, 100)
    local = Local(tmp_path / "local", keep_last=2 if before == "local" else 1)
    tiers = [*([PeerMemory(max_bytes="1GB")] if is_behind_memory else []), local]

    def open_run() -> Checkpointer:
        return Checkpointer(tmp_path / "run", save_every=every, tiers=tiers, on_event=events.append)

    save(open_run(), *([4] if before == "nothing" else [3, 4]))
    step = tmp_path / "local" / "step-00000004"
    damage_step(step, damage)
    if is_behind_memory:
        assert restore(open_run()) == 4, "without a warning: memory is nearer"
        shardckpt.stop_tiers()
    events.clear()
    if (before, damage) == ("nothing", "neither"):
        assert restore(open_run()) is None, "as in the root: it looks like a first save that was killed"
        return
    with pytest.warns(UserWarning, match=DAMAGES[damage]) as warned:
        assert restore(open_run()) == expected
    (text,) = [str(each.message) for each in warned]
    assert f"local tier on the node of rank 0, {platform.node()}: {step}" in text
    assert text.startswith(
        {
            "local": "restored step 3 from the local tier. Newer step 4 is not used: ",
            "root": "restored step 3 from the root. Newer step 4 is not used: ",
            "nothing": "no step is restored. Step 4 is not used: ",
            "the same": "restored step 4 from the root. A copy of step 4 is not used: ",
        }[before]
    )
    (event,) = [each for each in events if isinstance(each, RestoreEvent)]
    assert len(event.warnings) == 1 and event.warnings[0] in text
    shown = shardckpt.ls(tmp_path / "local")
    assert [each.number for each in shown.incomplete] == [4]
    is_in_root = before == "the same"
    with pytest.warns(UserWarning) if is_in_root else pytest.raises(NoCompleteCheckpoint, match=DAMAGES[damage]):
        restore(open_run(), step=4)


def test_of_three_equal_copies_the_nearest_that_verifies_is_restored(tmp_path):
    tiers = [PeerMemory(max_bytes="1GB"), Local(tmp_path / "local")]
    save(Checkpointer(tmp_path / "run", save_every=1, tiers=tiers), 1)
    loads: list[str] = []
    tiers_of_restores: list[str] = []

    def note(event: shardckpt.events.OperationEvent) -> None:
        loads.extend([event.path] * (event.operation == "load"))
        tiers_of_restores.extend([event.tier] if isinstance(event, shardckpt.events.RestoreEvent) else [])

    def again() -> Checkpointer:
        return Checkpointer(tmp_path / "run", save_every=1, tiers=tiers, on_event=note)

    assert [copy.tier for copy in again().durability(1).copies] == ["memory", "local", "root"]
    assert restore(again()) == 1
    shardckpt.stop_tiers()
    assert restore(again()) == 1
    shutil.rmtree(tmp_path / "local")
    assert restore(again()) == 1
    assert tiers_of_restores == ["memory", "local", "root"]
    schemes = [path.partition("://")[0] for path in loads]
    assert schemes == ["shardckpt-memory", str(tmp_path / "local/step-00000001"), str(tmp_path / "run/step-00000001")]


def test_a_folder_that_is_lost_is_not_claimed_and_the_next_capture_makes_it_again(tmp_path):
    ck = make(tmp_path)
    save(ck, 1)
    shutil.rmtree(tmp_path / "local")
    assert ck.durability(1).survives == set()
    with pytest.raises(StorageError, match="step 1 does not survive"):
        ck.wait(1, survives="process")
    save(ck, 2)
    assert ck.durability(2).survives == {"process"} and restore(make(tmp_path)) == 2


def test_a_false_claim_is_withdrawn_with_an_event_and_one_ended_by_retention_is_not(tmp_path):
    events: list[WithdrawalEvent] = []

    def note(event: shardckpt.events.OperationEvent) -> None:
        events.extend([event] if isinstance(event, WithdrawalEvent) else [])

    ck = make(tmp_path, save_every=2, on_event=note)
    for step in (2, 3):
        save(ck, step)
        assert [copy.tier for copy in ck.durability(2).copies] == ["local", "root"][step - 2 :]
    assert ck.durability(3).survives == {"process"} and events == []
    flip(tmp_path / "local" / "step-00000003")
    with pytest.warns(UserWarning, match="restored step 2"):
        assert restore(ck) == 2
    for _ in range(2):
        assert ck.durability(3).survives == set()
    (event,) = events
    path = str(tmp_path / "local" / "step-00000003")
    assert (event.path, event.step, event.tier, event.survives) == (path, 3, "local", ())


@pytest.mark.parametrize("is_behind_memory", [False, True])
def test_a_full_disk_of_the_tier_is_one_warning_and_the_root_has_its_steps(
    tmp_path, monkeypatch, caplog, is_behind_memory
):
    write = os.write

    def refuse(fd: int, data: bytes) -> int:
        if "/local/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    ck = make(tmp_path, save_every=4)
    if is_behind_memory:
        tiers = [PeerMemory(max_bytes="1GB"), Local(tmp_path / "local")]
        ck = Checkpointer(tmp_path / "run", save_every=4, tiers=tiers)
    save(ck, 1)
    with monkeypatch.context() as full, pytest.warns(UserWarning, match="not captured in .*local.*No space") as warned:
        full.setattr(os, "write", refuse)
        for step in (2, 3, 4):
            save(ck, step)  # and its copy: after three failures in a row more steps would be left out
    assert len(warned) == 1 and ck.steps() == (4,)
    assert "ERROR" not in [record.levelname for record in caplog.records], "the warning is the only line"
    assert [copy.tier for step in (2, 3, 4) for copy in ck.durability(step).copies if copy.tier != "memory"] == ["root"]
    save(ck, 5, 6, 7, 9)
    assert ck.durability(9).copies[-1].tier == "local", "after failures, an attempt is made again"


def test_a_start_with_a_read_only_folder_is_one_warning_and_keeps_its_captures(tmp_path, monkeypatch, caplog):
    save(make(tmp_path), 1)
    assert restore(make(tmp_path)) == 1
    ck = make(tmp_path, save_every=3)
    with monkeypatch.context() as read_only:
        access = os.access
        read_only.setattr(os, "access", lambda path, mode: "local" not in str(path) and access(path, mode))
        with pytest.warns(UserWarning, match=r"not captured in .*: the folder of Local cannot be written") as warned:
            save(ck, 1, 2, 3)
    assert len(warned) == 1 and restore(make(tmp_path)) == 3
    assert "no capture of the last start" not in caplog.text


def test_the_folder_of_another_run_is_neither_read_nor_changed(tmp_path, caplog):
    save(make(tmp_path), 1)
    other = Checkpointer(tmp_path / "other", save_every=5, tiers=[Local(tmp_path / "local")])
    assert restore(other) is None
    with pytest.warns(UserWarning, match=r"steps of another run.*found .*run.*expected .*other") as warned:
        save(other, 2, 3, 5)
    assert len(warned) == 1 and [other.durability(3).survives for _ in range(3)] == [set()] * 3
    assert caplog.text.count("cannot be read") == 1, "a fault that lasts is logged once"
    assert restore(other) == 5 and restore(make(tmp_path)) == 1


@pytest.mark.parametrize("owner", [None, b"", b"{", b"[1]", b"[" * 70_000, b'{"run": 3}', b'{"run": "abc"}', b"\xff"])
def test_a_folder_of_an_unknown_run_is_used_once_its_record_is_written_as_warned(tmp_path, owner):
    local = tmp_path / "local"
    save(make(tmp_path), 1)
    record = local / ".shardckpt-tier.json"
    record.unlink()
    if owner is not None:
        record.write_bytes(owner)
    ck, found = make(tmp_path), "missing" if owner is None else "damaged"
    assert restore(ck) is None
    is_another = owner == b'{"run": "abc"}'
    text = "steps of another run" if is_another else rf"belong to an unknown run: \.shardckpt-tier\.json is {found}"
    with pytest.warns(UserWarning, match=text) as warned:
        save(ck, 2)
    assert [step.number for step in shardckpt.ls(local).complete] == [1]
    if not is_another:
        record.write_text(str(warned[0].message).partition("write ")[2].partition(" into")[0])
        assert restore(make(tmp_path)) == 1


def test_a_damaged_record_of_a_folder_without_steps_is_written_anew(tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / ".shardckpt-tier.json").write_bytes(b"{")
    ck = make(tmp_path)
    save(ck, 1)
    assert ck.durability(1).survives == {"process"}


@pytest.mark.parametrize("place", ["run", "run/local", ".", "link"])
def test_a_folder_that_overlaps_the_root_is_refused(tmp_path, place):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(UsageError, match="the folder of Local and the root must be apart"):
        Checkpointer(tmp_path / "run", save_every=1, tiers=[Local(tmp_path / place)])


def test_a_tier_is_a_folder_of_this_node_and_tiers_are_listed_nearest_first(tmp_path):
    with pytest.raises(UsageError, match="must be a folder of this node"):
        Local("s3://bucket/run")
    assert Local("relative").folder == os.path.abspath("relative")
    for tiers in ([Local("a"), Local("b")], [Local("a"), PeerMemory()]):
        with pytest.raises(UsageError, match="at most one PeerMemory and one Local, in this order"):
            Checkpointer(tmp_path, save_every=1, tiers=tiers)


def test_steps_of_a_run_whose_root_was_emptied_are_not_restored(tmp_path):
    save(make(tmp_path, save_every=5), 5, 6, 7)
    shutil.rmtree(tmp_path / "run")
    assert restore(make(tmp_path)) is None
    assert 7 in [step.number for step in shardckpt.ls(tmp_path / "local").complete], "it is not removed"


def test_an_overwrite_that_the_root_lacks_is_restored(tmp_path):
    ck, step = make(tmp_path, save_every=1), tmp_path / "run" / "step-00000002"
    save(ck, 2)
    shutil.copytree(step, tmp_path / "kept")
    ck.save(2, make_state(22), overwrite=True)
    ck.wait()
    shutil.rmtree(step)
    shutil.copytree(tmp_path / "kept", step)  # as if the save into the root had failed
    state = make_state()
    assert make(tmp_path).restore(state) == 2 and state["step"] == 22


def test_of_a_step_that_was_saved_again_no_tier_gives_the_first_attempt(tmp_path, monkeypatch):
    tiers = [PeerMemory(), Local(tmp_path / "local")]
    ck, state = Checkpointer(tmp_path / "run", save_every=100, tiers=tiers), make_state()
    save(ck, 1, 2)

    def fail(*_: object) -> None:
        raise StorageError("the folder cannot be used")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryTier, "open_node", fail)
        with pytest.warns(UserWarning, match="not captured in memory"):
            ck.save(2, make_state(22), overwrite=True)
        ck.wait()
    assert Checkpointer(tmp_path / "run", tiers=tiers, save_every=100).restore(state) == 2 and state["step"] == 22
    flip(tmp_path / "local" / "step-00000002")
    with pytest.warns(UserWarning, match="restored step 2 from the memory tier"):
        assert Checkpointer(tmp_path / "run", tiers=tiers, save_every=100).restore(state) == 2 and state["step"] == 2


def test_a_tier_whose_captures_could_not_be_compared_is_not_used(tmp_path, monkeypatch):
    tiers = [PeerMemory(), Local(tmp_path / "local")]
    ck, state, find = Checkpointer(tmp_path / "run", save_every=100, tiers=tiers), make_state(), tiered_finder.read_tier
    save(ck, 2)

    def fail(*_: object) -> None:
        raise StorageError("the folder cannot be used")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="not captured in memory"):
        patch.setattr(MemoryTier, "open_node", fail)
        ck.save(2, make_state(22), overwrite=True)
        ck.wait()
    asked = []

    def fail_once(place: object, read: object, otherwise: object) -> object:
        asked.append(place.name)
        return otherwise if asked == ["memory"] else find(place, read, otherwise)

    monkeypatch.setattr(tiered_finder, "read_tier", fail_once)
    assert Checkpointer(tmp_path / "run", tiers=tiers, save_every=100).restore(state) == 2 and state["step"] == 22


def test_a_start_that_saw_an_emptied_root_before_its_first_capture_is_restored(tmp_path, monkeypatch):
    save(make(tmp_path, save_every=2), 2)
    ck = make(tmp_path, save_every=100, keep_last=1)
    assert restore(ck) == 2
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(UserWarning, match="are gone while the run continues"):
        assert [copy.tier for copy in ck.durability(2).copies] == ["local"]
    monkeypatch.setattr(Lineage, "look", lambda _: None)
    save(ck, 3)
    assert [step.number for step in shardckpt.ls(tmp_path / "local").complete] == [3]
    assert restore(make(tmp_path)) == 3


def test_a_capture_is_not_restored_if_a_process_without_tiers_saved_its_step_again(tmp_path):
    save(make(tmp_path, save_every=1), 2)
    Checkpointer(tmp_path / "run").save(2, make_state(22), overwrite=True)
    state = make_state()
    assert make(tmp_path).restore(state) == 2 and state["step"] == 22


def test_ranks_of_one_node_capture_one_step_together(tmp_path):
    def train(rank: int, world: int) -> tuple:
        ck = make(tmp_path)
        save(ck, 1, 2)
        return ck.durability(2).survives

    assert run(2, train) == [{"process"}] * 2
    assert [step.number for step in shardckpt.ls(tmp_path / "local").complete] == [2]
    assert restore(make(tmp_path)) == 2
