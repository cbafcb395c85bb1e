"""`shardckpt tiers`: list the holders of this user, end one or all."""

import json

import pytest
import torch
from command import run_here

import shardckpt
from shardckpt import Checkpointer, PeerMemory


@pytest.fixture(autouse=True)
def sockets(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield
    shardckpt.stop_tiers()


def capture(root, *steps):
    ck = Checkpointer(root, save_every=100, tiers=[PeerMemory(max_bytes="1MiB", keep_last=2)])
    for step in steps:
        ck.save(step, {"w": torch.ones(10)})
    ck.wait()


def test_holders_are_listed_with_their_steps_and_limits_and_ended(tmp_path):
    assert run_here("tiers").err == "no holder of this user answers\n"
    capture(tmp_path / "a", 1, 2)
    capture(tmp_path / "b", 3)
    found = run_here("tiers")
    header, *rows = [line.split("  ") for line in found.out.splitlines()]
    assert [header[0].strip(), len(rows)] == ["run", 2]
    assert any("1 2" in row for row in found.out.splitlines()) and found.out.count("1.0 MB") == 2
    listed = json.loads(run_here("tiers", "--json").out)["holders"]
    assert sorted(each["steps"] for each in listed) == [[1, 2], [3]]
    run = next(each["run"] for each in listed if each["steps"] == [3])
    assert run_here("ls", f"shardckpt-memory://{run}").out == "3\n"
    assert run_here("tiers", "stop", run).out == f"stopped {run}\n"
    assert run_here("tiers", "stop").out.count("stopped") == 1
    assert shardckpt.tiers().holders == ()


def test_a_capture_is_rescued_by_copy_and_verified_like_any_step(tmp_path):
    capture(tmp_path / "a", 7)
    url = shardckpt.tiers().holders[0].url
    assert run_here("verify", f"{url}/step-00000007").code == 0
    assert run_here("copy", url, tmp_path / "rescued").code == 0
    assert torch.equal(shardckpt.load(str(tmp_path / "rescued/step-00000007"))["w"], torch.ones(10))


def test_an_unknown_action_or_run_is_an_error_of_the_call():
    for args, text in ((("start",), "`tiers` has one action"), (("stop", "abc"), "no holder of this run")):
        found = run_here("tiers", *args)
        assert found.code == 2 and text in found.err, found
