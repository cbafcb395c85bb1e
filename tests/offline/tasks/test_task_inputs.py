"""What a task reads and writes, as data: no source is opened, and what was edited is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import ChecksumError, FormatError, ShardckptError, UsageError
from shardckpt.offline.tasks import task_inputs
from shardckpt.offline.tasks.task_inputs import describe_blocks
from shardckpt.offline.tasks.task_plan import TaskPlan, read_plan
from shardckpt.readers import registry

SMALL = 90_000
OPTIONS = {"max_shard_size": SMALL, "dtype": "bf16"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in several formats."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    shardckpt.save({"model": {f"w{at}": torch.randn(100, 100 + at) for at in range(6)}}, folder / "native")
    shardckpt.consolidate(folder / "native", folder / "hf", max_shard_size=SMALL)
    shardckpt.reshard(folder / "native", folder / "native-3", world_size=3)
    for name in ("dcp", "torch"):
        shardckpt.reshard(folder / "native", folder / name, world_size=3, to=name)
    return folder


@pytest.fixture
def plan(sources: Path, tmp_path: Path) -> Path:
    """A plan of two tasks, which cast a folder of safetensors files."""
    shardckpt.plan_tasks(tmp_path / "plan", "consolidate", sources / "hf", tmp_path / "many", **OPTIONS)
    return tmp_path / "plan"


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_all(plan: Path) -> None:
    for number in range(len(read_plan(plan).tasks)):
        shardckpt.run_task(plan, number)


@pytest.mark.parametrize("name", ["hf", "native", "native-3", "dcp", "torch"])
def test_tasks_that_open_no_source_write_what_one_process_writes(name, sources, tmp_path, monkeypatch):
    shardckpt.consolidate(sources / name, tmp_path / "one", **OPTIONS)
    shardckpt.plan_tasks(tmp_path / "p", "consolidate", sources / name, tmp_path / "many", **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "open_reader", lambda *_: pytest.fail("a task opened the source"))
        run_all(tmp_path / "p")
    shardckpt.commit_plan(tmp_path / "p")
    assert read_files(tmp_path / "many") == read_files(tmp_path / "one")


def test_a_task_reads_its_own_block_and_needs_its_own_files_alone(plan, sources, tmp_path, monkeypatch):
    stored = read_plan(plan)
    block = Path(stored.folder, "inputs").read_bytes()[: stored.inputs[0].end]
    used = {file[0] for file in json.loads(block)["files"]}
    assert used and used < {path.name for path in (sources / "hf").glob("*.safetensors")}
    asked = []
    read_bytes = task_inputs.read_bytes
    monkeypatch.setattr(task_inputs, "read_bytes", lambda *given: asked.append(given[2:]) or read_bytes(*given))
    shardckpt.run_task(plan, 0)
    assert asked == [(0, stored.inputs[0].end)]


def test_a_block_of_a_step_is_checked_as_it_is_read(sources, tmp_path):
    shardckpt.reshard(sources / "native", tmp_path / "step", world_size=2)
    payload = next((tmp_path / "step").glob("*.safetensors"))
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    shardckpt.plan_tasks(tmp_path / "p", "consolidate", tmp_path / "step", tmp_path / "many", **OPTIONS)
    assert read_plan(tmp_path / "p").inputs
    with pytest.raises(ChecksumError):
        run_all(tmp_path / "p")
    assert not (tmp_path / "many").exists()


def test_inputs_that_are_too_large_or_need_code_leave_the_verbs_own_call(sources, tmp_path, monkeypatch):
    shardckpt.plan_tasks(tmp_path / "p", "reshard", sources / "hf", tmp_path / "steps", world_size=2, to="dcp")
    monkeypatch.setattr(task_inputs, "MAX_PLAN_BYTES", 100)
    shardckpt.plan_tasks(tmp_path / "q", "consolidate", sources / "hf", tmp_path / "many", **OPTIONS)
    for name in ("p", "q"):
        assert read_plan(tmp_path / name).inputs == ()
        run_all(tmp_path / name)
        shardckpt.commit_plan(tmp_path / name)
    assert shardckpt.diff(sources / "hf", tmp_path / "steps").same


def test_a_damaged_block_is_refused(plan):
    inputs = Path(read_plan(plan).folder, "inputs")
    data = inputs.read_bytes()
    for content in (data.replace(b"w0", b"w1"), data[:-1], b""):
        inputs.write_bytes(content)
        with pytest.raises(ShardckptError):
            run_all(plan)
    inputs.write_bytes(data)
    run_all(plan)


def rewrite(plan: Path, change: Callable[[dict[str, Any]], None]) -> TaskPlan:
    """Change the first task's block, and make the plan agree with it."""
    stored = read_plan(plan)
    folder, start, blocks = Path(stored.folder), 0, []
    for block in stored.inputs:
        blocks.append((folder / "inputs").read_bytes()[start : block.end])
        start = block.end
    content = json.loads(blocks[0])
    change(content)
    blocks[0] = json.dumps(content).encode()
    new = replace(stored, inputs=describe_blocks(blocks))
    (folder / "inputs").write_bytes(b"".join(blocks))
    for path in (folder / "plan.json", plan):
        path.write_bytes(new.encode())
    return new


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block["parts"][0][2][0][1][3].__setitem__(0, 9),
        lambda block: block["parts"][0][2][0][1][3].__setitem__(1, 1 << 40),
        lambda block: block["parts"][0][2][0][1][3].__setitem__(2, 5),
        lambda block: block["parts"][0][2][0][1][3].pop(),
        lambda block: block["parts"][0][2][0][1].__setitem__(2, [10**9, 10**9]),
        lambda block: block["parts"][0][2][0].__setitem__(0, "code"),
        lambda block: block["parts"][0].__setitem__(1, "zz"),
        lambda block: block["parts"][0].__setitem__(1, ""),
        lambda block: block["parts"][0].__setitem__(2, []),
        lambda block: block["files"][0].__setitem__(0, "../../etc/passwd"),
        lambda block: block["files"][0].__setitem__(1, -1),
        lambda block: block["files"][0].__setitem__(2, ""),
        lambda block: block["files"][0].append("00"),
        lambda block: block.__setitem__("files", []),
        lambda block: block.__setitem__("source", "/none"),
        lambda block: block.__setitem__("others", ""),
        lambda block: block.__setitem__("settings", [0, 0, 0]),
        lambda block: block.pop("parts"),
    ],
)
def test_a_hostile_block_is_a_typed_error_and_writes_no_result(change, plan):
    new = rewrite(plan, change)
    with pytest.raises(ShardckptError):
        shardckpt.run_task(plan, 0)
    assert shardckpt.read_plan_status(plan).missing[0] == 0
    assert not list(Path(new.staging).glob("*.safetensors"))


@pytest.fixture
def ranks(sources: Path, tmp_path: Path) -> Path:
    """A plan of seven tasks, whose files have parts of tensors of three files."""
    shardckpt.plan_tasks(tmp_path / "plan", "reshard", sources / "native-3", tmp_path / "many", world_size=7)
    return tmp_path / "plan"


@pytest.mark.parametrize("box", [[[5, 0], [10**9, 1]], [[-1, 0], [1, 1]], [[0], [1]], [[0, 0], [1, 1], [1, 1]], "all"])
def test_a_hostile_part_is_a_typed_error_and_writes_no_result(box, ranks):
    new = rewrite(ranks, lambda block: block["parts"][0][2][0].__setitem__(2, box))
    with pytest.raises(ShardckptError):
        shardckpt.run_task(ranks, 0)
    assert not list(Path(new.staging).glob("*.safetensors"))


def test_a_task_has_the_pieces_that_its_parts_need_alone(ranks):
    stored = read_plan(ranks)
    block = json.loads(Path(stored.folder, "inputs").read_bytes()[: stored.inputs[0].end])
    assert len(block["files"]) == 1, "one rank of three has the first seventh of all rows"
    assert all(len(tensor[1][3]) == 6 for tensor in block["parts"][0][2])


def test_a_task_that_wrote_other_bytes_than_the_call_is_not_published(plan, tmp_path):
    """The block has another tensor's bytes, of the same size."""
    rewrite(plan, lambda block: block["parts"][0][2][0][1][3].__setitem__(1, 512))
    run_all(plan)
    with pytest.raises(FormatError, match="did not write what this program plans"):
        shardckpt.commit_plan(plan)
    assert not (tmp_path / "many").exists()
    shardckpt.discard_plan(plan)


def test_a_part_that_is_not_in_its_block_is_refused(plan):
    rewrite(plan, lambda block: block["parts"].clear())
    with pytest.raises(FormatError, match="other parts"):
        shardckpt.run_task(plan, 0)


def test_a_file_that_another_task_reads_may_change_before_this_one(plan, sources, tmp_path):
    """The commit refuses it."""
    stored = read_plan(plan)
    start = stored.inputs[0].end
    block = Path(stored.folder, "inputs").read_bytes()[start : stored.inputs[1].end]
    file = sources / "hf" / json.loads(block)["files"][-1][0]
    data = file.read_bytes()
    file.write_bytes(data)
    shardckpt.run_task(plan, 0)
    for act in (lambda: shardckpt.run_task(plan, 1), lambda: shardckpt.commit_plan(plan)):
        with pytest.raises(UsageError, match=r"changed since the plan was made|ha(s|ve) not ended"):
            act()
    assert not (tmp_path / "many").exists()


def test_a_source_replaced_with_its_size_and_time_is_refused(sources, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(sources / "hf", source)
    shardckpt.plan_tasks(tmp_path / "p", "consolidate", source, tmp_path / "many", **OPTIONS)
    for file in source.glob("*.safetensors"):
        status = file.stat()
        file.write_bytes(bytes(reversed(file.read_bytes())))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UsageError, match="changed since the plan was made"):
        shardckpt.run_task(tmp_path / "p", 0)


@pytest.mark.parametrize("ranks", [2, 7])
@pytest.mark.parametrize("name", ["hf", "native", "native-3", "dcp"])
def test_tasks_that_open_no_source_write_the_files_of_ranks(name, ranks, sources, tmp_path, monkeypatch):
    shardckpt.plan_tasks(tmp_path / "p", "reshard", sources / name, tmp_path / "many", world_size=ranks)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "open_reader", lambda *_: pytest.fail("a task opened the source"))
        run_all(tmp_path / "p")
    shardckpt.commit_plan(tmp_path / "p")
    verified = shardckpt.verify(tmp_path / "many")
    assert verified.ok and "checksums" in verified.checks
    assert shardckpt.diff(sources / name, tmp_path / "many").same
