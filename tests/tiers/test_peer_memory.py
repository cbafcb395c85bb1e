"""The memory tier with real processes: what a killed trainer leaves, what is restored, what is claimed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardckpt
from shardckpt import Checkpointer, Local, PeerMemory
from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.checkpoint.save.handle import AsyncSaveTask, SaveHandle
from shardckpt.errors import MissingFileError, NoSpaceError, StorageError, UnsupportedError, UsageError
from shardckpt.native import run_record
from shardckpt.native.run_directory import RECORD
from shardckpt.native.run_record import read_run_record
from shardckpt.storage.local import LocalWriter
from shardckpt.storage.resolve_url import open_store
from shardckpt.tiers import capture_tier, peer_memory
from shardckpt.tiers.memory import run_folders
from shardckpt.tiers.memory.memory_store import MemoryWriter
from shardckpt.tiers.memory_tier import MemoryTier
from tests.kit.ranks.forks import is_killed
from tests.kit.ranks.harness import run
from tests.kit.ranks.held_saves import holding_saves
from tests.kit.runs import tier_runs
from tests.kit.runs.tier_runs import empty_memory, forget_process, save, wait_for
from tests.kit.runs.tier_runs import make_state as state
from tests.kit.stores.disk import watched

DEADLINE_S = 30.0


def make(root: Path, *, every: int = 1, save_every: int = 100, on_event=None, **options: object) -> Checkpointer:
    return Checkpointer(root, save_every=save_every, tiers=[PeerMemory(every=every, **options)], on_event=on_event)


def restore(root: Path, **options: object) -> int | None:
    return tier_runs.restore(make(root), **options)


@contextmanager
def before_change(number: int, act: Callable[[], object]) -> Iterator[list[str]]:
    """Act before a change of the disk or of memory; yields the changes so far."""
    changes: list[str] = []

    def note(name: str, _args: tuple) -> None:
        changes.append(name)
        if len(changes) == number:
            act()

    with watched(note, lambda *_: None):
        yield changes


def only_on_disk(act: Callable[..., object]) -> Callable[..., object]:
    """Return a `LocalWriter.write` that acts for files on a disk; those in memory are written."""
    write = LocalWriter.write
    return lambda writer, data: write(writer, data) if isinstance(writer, MemoryWriter) else act(writer, data)


def list_steps() -> list[tuple[int, ...]]:
    return [held.steps for held in shardckpt.list_tiers().runs]


def test_a_start_that_cannot_be_recorded_in_the_root_captures_nothing(tmp_path):
    """A later start, which does not reach its captures, could not know of them."""
    record = tmp_path / "run" / RECORD
    record.mkdir(parents=True)
    ck = make(tmp_path / "run")
    with pytest.warns(UserWarning, match="not captured in memory"):
        save(ck, 1)
    assert ck.durability(1).copies == ()
    record.rmdir()
    save(ck, 2, 3)
    assert [len(ck.durability(step).copies) for step in (2, 3)] == [0, 1], "one capture is left out"


def test_after_each_failure_in_a_row_twice_as_many_captures_are_left_out():
    attempts, left_out = capture_tier._CaptureAttempts(), []
    for _ in range(8):
        attempts.note_failure()
        left_out.append(0)
        while attempts.is_left_out():
            left_out[-1] += 1
    assert left_out == [1, 3, 7, 15, 31, 63, 64, 64]


def test_a_restore_that_finds_no_capture_of_the_last_start_says_so(tmp_path, caplog):
    save(make(tmp_path / "run"), 1)
    assert restore(tmp_path / "run") == 1
    assert "no capture of the last start" not in caplog.text
    empty_memory()
    assert restore(tmp_path / "run") is None
    assert caplog.text.count("no capture of the last start") == 1
    assert (
        "it completed none (see its log), this start has other machines, or they were removed from memory"
        in caplog.text
    )


def test_a_restore_that_tries_several_steps_warns_once_of_the_last_starts_captures(tmp_path, caplog):
    save(make(tmp_path / "run", save_every=1, every=2), 1, 2)
    save(make(tmp_path / "run", save_every=10), 3)
    empty_memory()
    flip_file(max((tmp_path / "run" / "step-00000002").glob("*.safetensors")))
    with pytest.warns(UserWarning, match="restored step 1 from the root"):
        assert restore(tmp_path / "run") == 1
    assert caplog.text.count("no capture of the last start") == 1


def test_a_captured_step_survives_a_killed_trainer_and_the_root_has_its_own_steps(tmp_path):
    def train() -> None:
        ck = make(tmp_path / "run", every=2, save_every=4)
        assert [step for step in range(1, 10) if ck.should_save(step)] == [2, 4, 6, 8]
        save(ck, 2, 4, 6)
        os.kill(os.getpid(), signal.SIGKILL)

    assert is_killed(train)
    assert Checkpointer(tmp_path / "run").steps() == (4,)
    assert list_steps() == [(6,)]
    assert restore(tmp_path / "run") == 6
    assert restore(tmp_path / "run", step=4) == 4
    assert Checkpointer(tmp_path / "run").restore(state()) == 4, "without tiers only the root counts"


strides = pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])


@strides
def test_a_trainer_killed_at_any_change_leaves_the_old_capture_or_the_new_one(tmp_path, stride):
    number, was_killed, found = 1 - stride, True, []
    while was_killed:
        number += stride
        root = tmp_path / str(number)

        def train(root: Path = root, number: int = number) -> None:
            ck = make(root)
            save(ck, 1)
            with before_change(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                save(ck, 2)

        was_killed = is_killed(train)
        found.append(restore(root))
        (held,) = shardckpt.list_tiers().runs
        assert len(held.steps) in {1, 2} and held.steps[-1] == found[-1], "nothing torn is listed"
        save(make(root), 3)
        wait_for(lambda: list_steps() == [(3,)])
        files = [name for entry in open_store(held.url).list() for name in open_store(held.url).list(entry.name)]
        assert len(files) == 3, "the memory of a killed save is free"
        forget_process()
        shardckpt.stop_tiers()
    assert found == sorted(found) and {1, 2} == set(found)
    assert number > 10


@strides
def test_training_goes_on_without_false_claims_if_captures_are_removed_anytime(tmp_path, stride):
    number, is_over = 1 - stride, False
    while not is_over:
        number += stride
        root, events = tmp_path / str(number), []
        ck = make(root, save_every=2, on_event=events.append)
        save(ck, 2)
        with warnings.catch_warnings(record=True) as warned, before_change(number, empty_memory) as changes:
            warnings.simplefilter("always")
            save(ck, 3)
        is_over = len(changes) < number
        claims = ck.durability(3).survives
        assert claims == ({"process"} if any(list_steps()) else set())
        texts = [str(each.message) for each in warned if "not captured in memory" in str(each.message)]
        withdrawn = [event for event in events if event.operation == "fallback" and event.step == 3]
        assert len(texts) == len(withdrawn) <= 1
        assert restore(root) == (3 if claims else 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(ck, 4, 5, 6)
        assert "process" in ck.durability(6).survives and len(ck.durability(6).copies) == 2
        forget_process()
        shardckpt.stop_tiers()
    assert number > 10


def test_other_numbers_of_ranks_restore_what_killed_ranks_captured(tmp_path):
    values = torch.arange(70.0).reshape(10, 7)

    def train(rank: int, world: int, root: str) -> list[tuple[str, ...]]:
        mesh = init_device_mesh("cpu", (world,))
        ck = make(Path(root), save_every=2)
        for step in (1, 2, 3):
            ck.save(step, {"w": distribute_tensor(values * step, mesh, [Shard(0)]), "step": step})
        ck.wait(3, survives="process")
        return [copy.tier for copy in ck.durability(2).copies]

    def resume(rank: int, world: int, root: str) -> tuple:
        mesh = init_device_mesh("cpu", (world,))
        into = {"w": distribute_tensor(torch.zeros(10, 7), mesh, [Shard(0)]), "step": 0}
        step = make(Path(root)).restore(into)
        return step, into["step"], torch.equal(into["w"].full_tensor(), values * 3)

    root = str(tmp_path / "run")
    assert run(3, train, root) == [["root"]] * 3
    for world in (2, 4):
        assert run(world, resume, root) == [(3, 3, True)] * world
    assert restored_bytes(root, values * 3)


def restored_bytes(root: str, expected: torch.Tensor) -> bool:
    tree = shardckpt.load(shardckpt.list_tiers().runs[0].url + "/step-00000003")
    return torch.equal(tree["w"], expected)


def test_of_a_capture_and_a_step_of_the_root_the_newer_one_is_restored(tmp_path):
    ck = make(tmp_path / "run", every=2, save_every=3)
    save(ck, 2, 3)
    assert restore(tmp_path / "run") == 3
    save(ck, 4)
    assert restore(tmp_path / "run") == 4


def test_after_an_older_step_is_restored_its_successors_are_newer_than_all_captures(tmp_path):
    ck = make(tmp_path / "run", save_every=5)
    save(ck, 5, 8)
    assert ck.restore(state(), step=5) == 5
    save(ck, 6)
    assert restore(tmp_path / "run") == 6


def test_captures_that_a_start_in_an_emptied_root_cannot_reach_replace_no_step(tmp_path, monkeypatch, caplog):
    root = tmp_path / "run"
    save(make(root, save_every=2, keep_last=3), 1, 2, 3)
    shutil.rmtree(root)

    def refuse(*_: object) -> None:
        raise StorageError("the folder cannot be used")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="not captured in memory"):
        patch.setattr(MemoryTier, "open_node", refuse)
        save(make(root, save_every=2), 1, 2)
    assert restore(root) == 2
    assert "captures of another run are not used" in caplog.text


def test_captures_of_a_run_whose_root_was_emptied_are_not_restored(tmp_path):
    root = tmp_path / "run"
    ck = make(root, save_every=2)
    save(ck, 2)
    save(ck, 3)
    root.rename(tmp_path / "moved")
    assert restore(root) is None
    (tmp_path / "moved").rename(root)
    assert restore(root) == 3


def empty(root: Path, *, has_record: bool = False) -> None:
    for each in root.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif not has_record:
            each.unlink()


@pytest.mark.parametrize("has_record", [False, True])
@pytest.mark.parametrize("is_claimed", [False, True])
def test_captures_of_a_run_that_goes_on_in_an_emptied_root_are_claimed_and_restored(tmp_path, has_record, is_claimed):
    root, events = tmp_path / "run", []
    ck = make(root, save_every=10, on_event=events.append)
    save(ck, 10)
    save(ck, 11)
    empty(root, has_record=has_record)
    with pytest.warns(UserWarning, match=r"all steps in .*run are gone while the run continues: .* restored") as warned:
        if is_claimed:
            ck.wait(11, survives="process")
        else:
            save(ck, 12)  # in whose background the list of the root is read
            save(ck, 13)
    step = 11 if is_claimed else 13
    assert ck.durability(step).survives == {"process"} and len(warned) == 1
    assert [event.path for event in events if event.operation == "fallback"] == [str(root)]
    assert restore(root) == step
    again = make(root, save_every=10)
    assert tier_runs.restore(again) == step
    save(again, 20)
    save(again, 21)
    assert restore(root) == 21
    empty(root)
    assert restore(root) is None, "what a start has captured before the root was emptied and no start went on"


def test_captures_that_followed_other_steps_than_the_root_lost_are_dropped(tmp_path):
    root = tmp_path / "run"
    ck = make(root, save_every=10)
    save(ck, 10)
    save(ck, 11)
    empty(root)
    with pytest.warns(UserWarning, match="are gone"):
        ck.wait(11, survives="process")
    save(ck, 20)
    save(ck, 21)
    empty(root, has_record=True)
    assert restore(root) is None


def test_captures_before_a_root_in_memory_claim_nothing(tmp_path):
    """A new process finds an empty root there, and drops them."""
    ck = make(f"memory://{tmp_path.name}-{os.getpid()}/run", save_every=2)
    for step in (1, 2, 3):
        ck.save(step, state(step))
    ck.wait()
    durability = ck.durability(3)
    assert [copy.tier for copy in durability.copies] == ["memory"] and durability.survives == frozenset()
    with pytest.raises(StorageError, match="does not survive losing the process"):
        ck.wait(3, survives="process")


def test_a_claim_is_withdrawn_if_the_emptied_root_does_not_take_the_record(tmp_path, caplog):
    root, events = tmp_path / "run", []
    ck = make(root, save_every=10, on_event=events.append)
    save(ck, 10)
    save(ck, 11)
    ck.wait(11, survives="process")
    empty(root)
    (root / RECORD).mkdir()
    with pytest.raises(StorageError, match="step 11 does not survive"):
        ck.wait(11, survives="process")
    assert [(event.step, event.tier) for event in events if event.operation == "withdrawal"] == [(11, "memory")]
    assert "it cannot be recorded that captures are still needed" in caplog.text
    (root / RECORD).rmdir()
    assert restore(root) is None


def test_captures_are_restored_once_an_emptied_root_takes_their_record(tmp_path, monkeypatch):
    root = tmp_path / "run"
    ck = make(root, save_every=10)
    save(ck, 10)
    save(ck, 11)
    empty(root)
    (root / RECORD).mkdir()
    assert not ck.durability(11).survives
    (root / RECORD).rmdir()
    monkeypatch.setattr(Lineage, "look", lambda _: None)
    with pytest.warns(UserWarning, match="are gone while the run continues"):
        save(ck, 12)
    assert restore(root) == 12


def test_in_an_emptied_root_captures_of_a_run_that_continues_are_claimed(tmp_path):
    root, events = tmp_path / "run", []
    save(make(root, save_every=10), 10)
    save(make(root, save_every=10), 11)
    ck = make(root, save_every=10, on_event=events.append)
    assert tier_runs.restore(ck) == 11 and ck.durability(11).survives == {"process"}
    empty(root)
    with pytest.warns(UserWarning, match="are gone"):
        assert ck.durability(11).survives == {"process"}
    assert restore(root) == 11
    save(ck, 12)
    assert ck.durability(12).survives == {"process"}
    assert restore(root) == 12


def test_captures_are_not_claimed_once_a_process_without_tiers_has_saved_newer_steps(tmp_path):
    root = tmp_path / "run"
    ck = make(root, save_every=5)
    save(ck, 5)
    save(ck, 9)
    assert ck.durability(9).survives == {"process"}
    Checkpointer(root).save(6, state(6))
    assert ck.durability(9).survives == set()
    assert make(root).durability(9).survives == set(), "neither by a process that did not capture it"
    assert restore(root) == 6


def test_a_record_that_was_removed_is_written_again_with_all_that_this_start_wrote(tmp_path):
    root, folder = tmp_path / "run", str(tmp_path / "local")
    tiers = [PeerMemory(max_bytes="1GB"), Local(folder, every=2)]
    ck = Checkpointer(root, save_every=10, tiers=tiers)
    save(ck, 9, 10)
    before = read_run_record(open_store(str(root)))
    assert before.local == folder and before.run and before.is_rooted
    (root / RECORD).unlink()
    save(ck, 11, 13)
    assert read_run_record(open_store(str(root))) == before


def test_captures_of_a_course_that_was_given_up_without_tiers_are_not_restored(tmp_path):
    root = tmp_path / "run"
    ck = make(root, save_every=5)
    save(ck, 5)
    save(ck, 9)
    plain = Checkpointer(root)
    assert plain.restore(state()) == 5
    plain.save(6, state(6))
    assert restore(root) == 6


@pytest.mark.parametrize("save_every", [5, 100])
def test_a_step_of_the_root_counts_if_its_capture_is_of_another_course(tmp_path, save_every, monkeypatch):
    def fail(_writer: LocalWriter) -> None:
        raise StorageError("Input/output error")

    root = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(LocalWriter, "close", fail)
        ck = make(root, save_every=save_every)
        ck.save(5, state(-5.0))  # with a schedule of 5, its save in the root fails
        with pytest.raises(StorageError) if save_every == 5 else nullcontext():
            ck.wait()
    Checkpointer(root).save(5, state(5))
    assert restore(root) == 5, "with the values of the root"
    assert list_steps() == [()]


def test_a_capture_is_kept_if_the_same_step_is_damaged_in_the_root(tmp_path):
    root = tmp_path / "run"
    save(make(root, save_every=5), 5)
    (manifest,) = root.glob("step-00000005/*.manifest.json")
    manifest.write_bytes(b"x" * manifest.stat().st_size)
    assert restore(root) == 5


def test_a_capture_is_kept_if_the_next_step_was_complete_in_the_root_only(tmp_path):
    root = tmp_path / "run"
    save(make(root, save_every=5), 4)
    Checkpointer(root).save(5, state(5))
    assert restore(root) == 5
    assert list_steps() == [(4,)]


def test_captures_are_given_if_the_root_has_lost_the_steps_that_they_followed(tmp_path):
    root = tmp_path / "run"
    ck = make(root, save_every=5)
    for step in (5, 10, 11):
        save(ck, step)
    for number, expected in ((10, 11), (5, 11)):
        (root / f"step-{number:08d}" / "COMMIT").unlink()
        with (
            pytest.warns(
                UserWarning, match="^restored step 11 from the memory tier. Step 10 is not used: .*never committed"
            )
            if number == 10
            else nullcontext()
        ):
            assert restore(root) == expected


def test_a_damaged_capture_is_never_given(tmp_path, monkeypatch):
    root = tmp_path / "run"
    ck = make(root, save_every=2)
    save(ck, 2)
    write = os.write
    with monkeypatch.context() as flipped:
        # What is written differs in one bit from what was hashed, as after a fault of the memory.
        flipped.setattr(os, "write", lambda fd, data: write(fd, flip(data)) if len(data) > 1000 else write(fd, data))
        save(ck, 3)
    with pytest.warns(UserWarning, match="restored step 2 from the root. Newer step 3 is not used: "):
        assert restore(root) == 2


def flip_file(file: Path) -> None:
    file.write_bytes(flip(file.read_bytes()))


def flip(data: memoryview | bytes) -> bytes:
    changed = bytearray(data)
    changed[-1] ^= 1
    return bytes(changed)


def test_too_little_memory_is_one_warning_that_names_the_limit_and_no_claim(tmp_path):
    ck = make(tmp_path / "run", save_every=4, max_bytes=1000)
    with pytest.warns(UserWarning, match=r"not captured in memory.*expected at most 1000 bytes.*max_bytes") as warned:
        save(ck, 1, 2, 3)
    assert len(warned) == 1
    assert ck.durability(1).survives == set()
    save(ck, 4)
    assert ck.durability(4).survives == {"process"}
    with pytest.raises(StorageError, match="does not survive losing the node"):
        ck.wait(4, survives="node")


def test_an_older_copy_of_a_step_that_could_not_be_captured_again_is_not_claimed(tmp_path):
    save(make(tmp_path / "run", save_every=5), 5, 8)
    ck = make(tmp_path / "run", save_every=5, max_bytes=1000)
    assert ck.restore(state(), step=5) == 5
    assert ck.durability(8).survives == {"process"}
    with pytest.warns(UserWarning, match="not captured in memory"):
        save(ck, 8)
    with pytest.raises(StorageError, match="step 8 does not survive"):
        ck.wait(8, survives="process")


def test_captures_whose_folder_a_new_process_passes_over_are_not_claimed(tmp_path, memory):
    ck = make(tmp_path / "run")
    save(ck, 1)
    (base,) = memory.iterdir()
    base.chmod(0o755)
    assert ck.durability(1).survives == set()
    base.chmod(0o700)
    assert ck.durability(1).survives == {"process"}


def test_removed_captures_are_not_claimed_and_the_next_one_makes_the_folder_again(tmp_path):
    ck = make(tmp_path / "run")
    save(ck, 1)
    with pytest.warns(UserWarning, match="processes use the captures that were removed"):
        shardckpt.stop_tiers()
    assert ck.durability(1).survives == set()
    save(ck, 2)
    assert ck.durability(2).survives == {"process"}
    assert restore(tmp_path / "run") == 2


def test_an_idle_time_may_be_longer_than_the_days_that_the_system_waits_at_once(tmp_path):
    ck = make(tmp_path / "run", idle_s=30 * 86400)
    save(ck, 1)
    assert ck.durability(1).survives == {"process"}


def test_processes_with_other_memory_file_systems_are_on_other_nodes(tmp_path, monkeypatch):
    node = peer_memory.find_node_id()
    assert peer_memory.find_node_id() == node
    (tmp_path / "container").mkdir()
    monkeypatch.setattr(run_folders, "SHARED_MEMORY", str(tmp_path / "container"))
    assert peer_memory.find_node_id() != node


def test_a_run_never_restores_captures_of_another_one_whose_root_has_the_same_path(tmp_path, caplog):
    """As that of another container of the machine, in which another folder has the path."""
    root = tmp_path / "run"

    @contextmanager
    def mounted(name: str) -> Iterator[Checkpointer]:
        (tmp_path / name).rename(root)
        yield make(root, save_every=2)
        root.rename(tmp_path / name)

    for value, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        with mounted(name) as ck:
            for step in (2, 3):
                ck.save(step, {"w": torch.full((3,), float(value))})
                ck.wait()
    with mounted("one") as ck:
        found = {"w": torch.full((3,), -1.0)}
        assert ck.restore(found) == 2
    assert found["w"].tolist() == [0.0] * 3
    assert "of another run" in caplog.text and "SHARDCKPT_NODE" in caplog.text
    with mounted("two") as ck:
        assert ck.restore(found) == 3, "they stay for their own run"
    assert found["w"].tolist() == [1.0] * 3


def test_captures_of_one_run_go_on_while_those_of_another_one_of_the_process_fail(tmp_path):
    large, small = make(tmp_path / "large", max_bytes=100_000), make(tmp_path / "small")
    with pytest.warns(UserWarning, match="too many bytes") as warned:
        for step in (1, 2, 3):
            large.save(step, {"w": torch.zeros(100_000)})
            save(small, step)
            assert small.durability(step).survives == {"process"}
        large.wait()
    assert len(warned) == 1


def test_a_wait_that_is_interrupted_can_be_repeated(tmp_path, monkeypatch):
    ck, results = make(tmp_path / "run"), []

    def interrupt(handle: SaveHandle) -> None:
        results.append(handle)
        raise KeyboardInterrupt

    ck.save(1, state(1))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(SaveHandle, "result", interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                ck.wait()
    assert len(results) == 2
    ck.wait(1, survives="process")


def test_a_fault_of_the_state_is_raised_not_taken_for_one_of_the_memory(tmp_path):
    ck = make(tmp_path / "run")
    with pytest.raises(UnsupportedError, match="callback"):
        ck.save(1, {"callback": print})
    save(ck, 2)
    assert restore(tmp_path / "run") == 2


def test_a_failed_save_in_the_root_is_due_again_while_captures_go_on(tmp_path, monkeypatch):
    ck = make(tmp_path / "run", save_every=2)
    save(ck, 1)
    with monkeypatch.context() as full:
        full.setattr(LocalWriter, "write", only_on_disk(refuse))
        handle = ck.async_save(2, state(2))
        wait_for(handle.done)
    ck.save(3, state(3))
    with pytest.raises(StorageError, match=r"the save before this one, in the background to .*run/step-00000002"):
        ck.save(4, state(4))
    save(ck, 5, 6)
    assert [len(ck.durability(step).copies) for step in (2, 6)] == [0, 2]


def test_captures_go_on_while_a_save_in_the_root_is_running(tmp_path, monkeypatch):
    is_free, write = threading.Event(), LocalWriter.write
    ck = make(tmp_path / "run", save_every=2)
    save(ck, 1)
    with monkeypatch.context() as slow:
        slow.setattr(LocalWriter, "write", only_on_disk(lambda *args: is_free.wait(DEADLINE_S) and write(*args)))
        ck.save(2, state(2))
        for step in (3, 5, 7):
            ck.save(step, state(step))
        wait_for(lambda: list_steps() == [(7,)])
        assert ck.steps() == ()
        ck.save(9, state(9))
        is_free.set()
        ck.wait()
    assert [bool(ck.durability(step).copies) for step in (2, 7, 9)] == [True, False, True]


def test_a_capture_made_while_the_save_before_it_was_running_in_the_root_is_restored(tmp_path, monkeypatch):
    is_committed, write = (tmp_path / "run/step-00000002/COMMIT").exists, LocalWriter.write

    def write_one_step(*args):
        wait_for(lambda: is_committed() or list_steps() == [(4,)])
        return refuse() if is_committed() else write(*args)

    ck = make(tmp_path / "run", save_every=2)
    save(ck, 1)
    with monkeypatch.context() as slow:
        slow.setattr(LocalWriter, "write", only_on_disk(write_one_step))
        ck.save(2, state(2))
        ck.save(4, state(4))
        with pytest.raises(NoSpaceError):
            ck.wait()
    assert ck.steps() == (2,)
    assert ck.durability(4).survives == {"process"}
    assert restore(tmp_path / "run") == 4


def test_captures_after_a_restore_belong_to_a_root_whose_save_was_running_meanwhile(tmp_path, monkeypatch):
    is_free, write = threading.Event(), LocalWriter.write

    def write_behind_the_loop(*args):
        if threading.current_thread() is not threading.main_thread():
            is_free.wait(DEADLINE_S)
        return write(*args)

    ck = make(tmp_path / "run", save_every=2)
    save(ck, 1)
    with monkeypatch.context() as slow:
        slow.setattr(LocalWriter, "write", only_on_disk(write_behind_the_loop))
        ck.save(2, state(2))
        wait_for(lambda: list_steps() == [(2,)])
        assert ck.restore(state(0)) == 2
        ck.save(3, state(3))
        wait_for(lambda: list_steps() == [(3,)])
        is_free.set()
        ck.wait()
    assert ck.steps() == (2,)
    assert ck.durability(3).survives == {"process"}
    assert restore(tmp_path / "run") == 3


def refuse(*args: object) -> None:
    raise NoSpaceError("no space")


def restore_own(ck: Checkpointer, **options: object) -> int | None:
    """Restore in the process that saves; return the step, whose values have to be its own."""
    into = state(-1.0)
    step = ck.restore(into, **options)
    assert into["step"] == step and into["w"].unique().tolist() == [float(step)]
    return step


def test_a_restore_waits_for_the_capture_of_its_own_that_is_being_written(tmp_path):
    ck = make(tmp_path / "run")
    save(ck, 1)
    with holding_saves():
        ck.save(2, state(2))
        assert ck.durability(2).copies == (), "it says what is there, and does not wait"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert restore_own(ck) == 2
    assert ck.durability(2).survives == {"process"}


def test_a_restore_tells_of_the_capture_of_its_own_that_failed(tmp_path):
    ck = make(tmp_path / "run")
    save(ck, 1)
    with holding_saves(refuse):
        ck.save(2, state(2))
        with pytest.warns(UserWarning, match=r"restored step 1 .*Newer step 2 is not used: its save in the background"):
            assert restore_own(ck) == 1
    with pytest.warns(UserWarning, match=r"steps are not captured in .*no space"):
        ck.wait()


@pytest.mark.parametrize(("captured", "is_awaited"), [(4, True), (6, False)])
def test_a_restore_waits_for_its_save_in_the_root_unless_the_last_step_was_captured(
    captured, is_awaited, tmp_path, monkeypatch
):
    ck, waits, join = make(tmp_path / "run", every=2, save_every=5), [], AsyncSaveTask.join

    def wait(task, timeout=None):
        waits.append(Path(task.path).name)
        return join(task, timeout)

    save(ck, 2)
    for step in sorted((captured, 5)):
        ck.save(step, state(step))
    monkeypatch.setattr(AsyncSaveTask, "join", wait)
    assert restore_own(ck) == max(captured, 5)
    assert ("step-00000005" in waits) == is_awaited
    waits.clear()
    assert restore_own(ck, step=5) == 5
    assert "step-00000005" in waits


def test_a_capture_from_before_a_restore_does_not_stand_for_a_save_in_the_root(tmp_path):
    ck = make(tmp_path / "run", every=4, save_every=3)
    save(ck, 3, 4)
    ck.save(8, state(8))
    assert ck.restore(state(0), step=3) == 3
    with holding_saves():
        ck.save(6, state(6))
        assert restore_own(ck) == 6


def test_a_step_that_no_schedule_names_is_saved_in_the_root(tmp_path):
    ck = make(tmp_path / "run", every=10, save_every=100)
    save(ck, 7)
    assert ck.steps() == (7,) and shardckpt.list_tiers().runs == ()


def test_a_signal_asks_for_a_step_in_the_root(tmp_path):
    ck = make(tmp_path / "run")
    with ck.save_on_signal():
        os.kill(os.getpid(), signal.SIGTERM)
        assert ck.should_save(3)
        save(ck, 3)
    assert ck.steps() == (3,)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"copies": -1}, "copies"),
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
        ({"keep_last": 0}, "keep_last"),
        ({"idle_s": 0}, "idle_s"),
        ({"max_bytes": 0}, "a size must be"),
        ({"max_bytes": "much"}, "much"),
        ({"rack": 3}, "rack"),
        ({"path": 3}, "path"),
        ({"path": "ram"}, "path"),
    ],
)
def test_an_invalid_argument_is_named(options, text):
    with pytest.raises(UsageError, match=text):
        PeerMemory(**options)


def test_tiers_need_a_schedule_of_the_root_and_are_at_most_one(tmp_path):
    for tiers in ([PeerMemory()] * 2, [3], "memory", PeerMemory()):
        with pytest.raises(UsageError, match="`tiers` must be a list of at most one PeerMemory"):
            Checkpointer(tmp_path, save_every=1, tiers=tiers)
    with pytest.raises(UsageError, match="`save_every`"):
        Checkpointer(tmp_path, tiers=[PeerMemory()])


def test_a_file_of_removed_captures_is_missing(tmp_path):
    save(make(tmp_path / "run"), 1)
    store = open_store(shardckpt.list_tiers().runs[0].url)
    forget_process()
    shardckpt.stop_tiers()
    with pytest.raises(MissingFileError):
        store.size("step-00000001/COMMIT")


def test_copies_on_one_machine_are_one_warning_and_a_lower_claim(tmp_path):
    ck = make(tmp_path / "run", copies=1)
    with pytest.warns(UserWarning, match="1 machine for copies=1") as warned:
        save(ck, 1, 2)
    assert len(warned) == 1
    assert ck.durability(2).survives == {"process"}


def test_a_save_that_waits_for_the_capture_before_it_has_an_event(tmp_path, monkeypatch):
    is_free, write, events = threading.Event(), os.write, []
    ck = make(tmp_path / "run", on_event=events.append)
    save(ck, 1)
    with monkeypatch.context() as slow:
        slow.setattr(os, "write", lambda fd, data: is_free.wait(DEADLINE_S) and write(fd, data))
        ck.save(2, state(2))
        threading.Timer(0.05, is_free.set).start()
        ck.save(3, state(3))
    ck.wait()
    waits = [(event.step, event.seconds > 0) for event in events if event.operation == "backpressure"]
    assert waits == [(2, True)]


def test_a_restore_fails_while_the_roots_record_cannot_be_read(tmp_path, monkeypatch):
    save(make(tmp_path / "run"), 2)

    def fail(*_: object) -> None:
        raise StorageError("the root does not answer now")

    with monkeypatch.context() as away:
        away.setattr(run_record, "read_bytes", fail)
        with pytest.raises(StorageError, match="the root does not answer now"):  # captures may be of another run
            restore(tmp_path / "run")
    assert restore(tmp_path / "run") == 2


def test_a_forked_process_saves_without_tiers_and_is_refused_with_its_parents(tmp_path):
    ck, plain = make(tmp_path / "run"), Checkpointer(tmp_path / "plain")
    save(ck, 1)

    def save_in_child(_rank: int, _world: int) -> list[str]:
        refused = []
        for verb in (ck.save, ck.async_save):
            with pytest.raises(UsageError) as error:
                verb(2, state(2))
            refused.append(str(error.value))
        plain.save(2, state(2))
        return refused

    ((refused, same),) = run(1, save_in_child)
    assert refused == same and "a forked process cannot save with its parent's tiers" in refused
    assert plain.latest() == 2
    assert list_steps() == [(1,)]
    save(ck, 2)
    assert restore(tmp_path / "run") == 2
