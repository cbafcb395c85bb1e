"""`shardckpt tiers`: list the captures in memory of this user, remove those of one run or all."""

import json
import shutil

import pytest
import torch

import shardckpt
from shardckpt import Checkpointer, Local, PeerMemory
from shardckpt.storage.resolve_url import open_store
from shardckpt.tiers.memory import run_folders
from tests.kit.runs.command import run_here
from tests.kit.runs.tier_runs import end_janitor, forget_process


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    mount = tmp_path / "shm"
    mount.mkdir()
    monkeypatch.setattr(run_folders, "SHARED_MEMORY", str(mount))
    yield
    forget_process()
    for base in mount.iterdir():
        end_janitor(base)


def capture(root, *steps):
    ck = Checkpointer(root, save_every=100, tiers=[PeerMemory(max_bytes="1MiB", keep_last=2)])
    for step in steps:
        ck.save(step, {"w": torch.ones(10)})
    ck.wait()
    forget_process()


def test_captures_are_listed_with_their_steps_and_limits_and_removed(tmp_path):
    assert run_here("tiers").err == "this user has no captures in memory\n"
    capture(tmp_path / "a", 1, 2)
    capture(tmp_path / "b", 3)
    found = run_here("tiers")
    header, *rows = [line.split("  ") for line in found.out.splitlines()]
    assert [header[0].strip(), len(rows)] == ["run", 2]
    assert any("1 2" in row for row in found.out.splitlines()) and found.out.count("1.0 MB") == 2
    listed = json.loads(run_here("tiers", "--json").out)["runs"]
    assert sorted(each["steps"] for each in listed) == [[1, 2], [3]]
    run = next(each["run"] for each in listed if each["steps"] == [3])
    assert run_here("ls", f"shardckpt-memory://{run}").out == "3\n"
    assert run_here("tiers", "stop", run).out == f"stopped {run}\n"
    assert run_here("tiers", "stop").out.count("stopped") == 1
    assert shardckpt.list_tiers().runs == ()


def test_removed_captures_are_listed_as_json_with_those_that_are_left(tmp_path):
    assert json.loads(run_here("tiers", "stop", "--json").out)["stopped"] == []
    capture(tmp_path / "a", 1)
    capture(tmp_path / "b", 2)
    first, second = shardckpt.list_tiers().runs
    found = json.loads(run_here("tiers", "stop", first.run, "--json").out)
    assert (found["stopped"], [each["run"] for each in found["runs"]]) == ([first.run], [second.run])
    listed = json.loads(run_here("tiers", "--json").out)
    assert found.keys() == listed.keys() and listed["stopped"] == []
    found = json.loads(run_here("tiers", "stop", "--json").out)
    assert (found["stopped"], found["runs"]) == ([second.run], [])


def test_a_capture_is_rescued_by_copy_and_verified_like_any_step(tmp_path):
    capture(tmp_path / "a", 7)
    url = shardckpt.list_tiers().runs[0].url
    assert run_here("verify", f"{url}/step-00000007").code == 0
    assert run_here("copy", url, tmp_path / "rescued").code == 0
    assert torch.equal(shardckpt.load(str(tmp_path / "rescued/step-00000007"))["w"], torch.ones(10))


def test_a_part_of_a_capture_is_shown_as_one(tmp_path):
    (tmp_path / "a").mkdir()
    capture(tmp_path / "a", 7)
    store = open_store(shardckpt.list_tiers().runs[0].url)
    (payload,) = [entry.name for entry in store.list("step-00000007") if entry.name.endswith(".safetensors")]
    store.delete(payload)
    assert "  7 (part)  " in run_here("tiers").out
    (row,) = run_here("ls", tmp_path / "a", "--durability").out.splitlines()[1:]
    assert "unknown (part)" in row and "process" not in row


def test_all_copies_of_a_step_are_listed_with_what_they_survive(tmp_path):
    root, local = tmp_path / "run", tmp_path / "local"
    ck = Checkpointer(root, save_every=2, tiers=[PeerMemory(max_bytes="1MiB"), Local(local)])
    for step in (1, 2, 3):
        ck.save(step, {"w": torch.ones(10)})
    ck.wait()
    found = run_here("ls", root, "--durability")
    header, *rows = [line.split() for line in found.out.splitlines()]
    assert header == ["step", "tier", "survives", "verified", "path"]
    url = shardckpt.list_tiers().runs[0].url
    paths = [f"{root}/step-00000002", f"{url}/step-00000003", f"{local}/step-00000003"]
    kept = [(["2", "root"], paths[0]), (["3", "memory"], paths[1]), (["3", "local"], paths[2])]
    assert [(row[:2], row[-1]) for row in rows] == kept
    assert all(row[2] == "process" and row[3].startswith("20") for row in rows)
    listed = json.loads(run_here("ls", root, "--durability", "--json").out)["durability"]
    assert [(step["step"], step["survives"], len(step["copies"])) for step in listed] == [
        (2, ["process"], 1),
        (3, ["process"], 2),
    ]
    in_tiers = listed[1]["copies"]
    assert all(copy["saved_at"] <= copy["verified_at"] for copy in in_tiers)
    shardckpt.stop_tiers()
    found = run_here("ls", root, "--durability").out
    assert "memory" not in found and found.count("local") and run_here("ls", root).out == "2\n"


def test_a_run_whose_root_does_not_exist_is_listed_if_a_tier_has_a_copy(tmp_path):
    root = tmp_path / "run"
    ck = Checkpointer(root, save_every=100, tiers=[PeerMemory(max_bytes="1MiB")])
    ck.save(1, {"w": torch.ones(10)})
    ck.wait()
    shutil.rmtree(root)  # it has the record of the run
    assert run_here("ls", root, "--durability").out.split()[5:7] == ["1", "memory"]
    shardckpt.stop_tiers()
    found = run_here("ls", root, "--durability")
    assert found.code == run_here("ls", root).code != 0 and "nothing is stored here" in found.err


def test_a_run_that_has_only_captures_is_listed_and_the_folder_of_another_run_is_not(tmp_path):
    root, local = tmp_path / "run", tmp_path / "local"
    ck = Checkpointer(root, save_every=100, tiers=[Local(local)])
    ck.save(1, {"w": torch.ones(10)})
    ck.wait()
    assert run_here("ls", root, "--durability").out.count("process") == 1
    (local / ".shardckpt-tier.json").write_text('{"run": "another"}')
    found = run_here("ls", root, "--durability")
    assert found.code == 0 and found.out.split() == ["step", "tier", "survives", "verified", "path"]


def test_captures_that_a_process_uses_are_shown_and_removed_with_a_warning(tmp_path):
    ck = Checkpointer(tmp_path / "a", save_every=100, tiers=[PeerMemory(max_bytes="1MiB")])
    ck.save(1, {"w": torch.ones(10)})
    ck.wait()
    assert "  now " in run_here("tiers").out
    (held,) = shardckpt.list_tiers().runs
    assert held.is_used and held.idle_s == 3600.0 and held.path in run_here("tiers").out
    with pytest.warns(UserWarning, match=f"processes use the captures that were removed, .*: {held.run}"):
        assert shardckpt.stop_tiers(held.run) == (held.run,)
    assert shardckpt.list_tiers().runs == ()


def test_captures_that_no_process_uses_are_shown_with_the_time_since(tmp_path):
    capture(tmp_path / "a", 1)
    assert " s ago " in run_here("tiers").out
    assert not shardckpt.list_tiers().runs[0].is_used


def test_an_unknown_action_or_run_is_an_error_of_the_call():
    for args, text in (
        (("start",), "`tiers` has one action"),
        (("stop", "abc"), "no captures of this run are in memory"),
    ):
        found = run_here("tiers", *args)
        assert found.code == 2 and text in found.err, found
