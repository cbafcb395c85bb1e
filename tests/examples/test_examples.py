"""Every example runs as it stands, from another folder, and says that it succeeded."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.models.torch_limits import RUNS_FULLY_SHARD_ON_CPU
from tests.kit.runs.line_server import LineServer

USE_TORCH_FULLY_SHARD = {"consolidate_fsdp2.py", "dcp_drop_in.py"}
HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"

EQUAL = "equal, bit for bit"
RUNS = {
    "accelerate_training.py": [([], ("stopped after step 10, resumed from step 9", EQUAL))],
    "async_s3.py": [
        (
            [],
            (
                "world size 2, from step 0",
                "last save: training waited",
                "world size 1, from step 12",
                "complete steps in s3://training/run: 8, 12",
            ),
        )
    ],
    "consolidate_fsdp2.py": [
        ([], (EQUAL,)),
        (["--tied"], (EQUAL, "tied: lm_head.weight is model.embed_tokens.weight")),
    ],
    "dcp_drop_in.py": [([], ("3 ranks, from step 4", "steps: [4, 8]\nintact: True\nmerged: 43 tensors"))],
    "demo.py": [
        (
            [],
            (
                "They ended by SIGKILL, SIGKILL and left .step-00000030.partial-",
                "     10\n     20\n3. One rank resumes.\n   restored step 20, the newest complete one",
                "After 40 41 42 43 44 45 46 47 it generates 48 49 50 51 52 53 54 55.",
                EQUAL,
            ),
        )
    ],
    "elastic_resume.py": [
        (
            [],
            (
                "2 ranks, from step 5 to 7",
                "3 ranks, from step 8 to 12",
                "epoch 0: 60 samples, 60 different ones",
                "epoch 1: 60 samples, 60 different ones",
                "the samples of every step are the same",
            ),
        )
    ],
    "ema.py": [
        ([], ("3 ranks resume from step 20", "variants in the checkpoint: ema", "live: error 0.", "ema: error 0."))
    ],
    "lightning_trainer.py": [([], ("stopped after step 8, resumed from step 6", EQUAL))],
    "lora.py": [
        (
            [],
            (
                "are equal, bit for bit: True",
                "rejected: model.0.base.weight: a frozen parameter differs from the base",
                "adapter: 8 tensors, 33 kB\nfull: 16 tensors, 1,085 kB",
                "the moved base is found: True",
            ),
        )
    ],
    "ray_training.py": [
        (
            [],
            (
                "2 workers: from step 2 to step 6\n1 workers: from step 6 to step 8\n",
                "3 workers: from step 8 to step 12\nRay lists the steps [2, 4, 6, 8, 10, 12]; all intact: True\n",
                "losses: equal, up to ",
            ),
        )
    ],
    "rl_stream.py": [
        (
            [],
            (
                "server: ended by SIGKILL\ntrainer: ended by SIGKILL, SIGKILL\n",
                "trainer: restored step 20, whose weights are version 20",
                "server: joins at version 40 (epoch 2), and applies it at once",
                "server: version 40 after 1 update: 48 49 50 51 52 53 54 55",
                "versions in 2 epochs",
                "all intact: True\nthe exported version generates the same text",
            ),
        )
    ],
    "save_and_load.py": [
        ([], ("3 ranks, rows, from step 4", "head.weight in the checkpoint: SavedTensor(", *["step 7: loss 4.009"] * 2))
    ],
    "survive.py": [
        (
            ["--short", "--fork"],
            (
                "SIGKILL of a rank: 2 ranks go on, restored from memory: step",
                "the loss of a machine: agent, rank and memory: 1 rank goes on, restored from memory: step",
                f"and those of jobs resumed by hand: {EQUAL}",
            ),
        )
    ],
    "torchft_recovery.py": [([], ("is at step 3\nreplica 1 received the state of another one", EQUAL))],
    "torchtitan_manager.py": [([], ("from step 4", EQUAL, "steps: [4, 6, 8]"))],
    "train_fsdp.py": [([], ("2 ranks; rank 0 stores 108,160 of 216,320 parameters", "  19   0."))],
    "train_fully_shard.py": [([], ("head.weight: (256, 64), of which rank 0 stores (128, 64)", "  19   0."))],
    "transformers_trainer.py": [([], ("stopped after step 8, resumed from step 6", EQUAL))],
}
NEEDS = {
    "lightning_trainer.py": "lightning",
    "ray_training.py": "ray",
    "torchft_recovery.py": "torchft",
    "torchtitan_manager.py": "torchtitan",
}
"""What an example imports that is not installed for the tests."""

Run = Callable[[Path, list[str], Path], dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs an example in a folder, in a fork of one process that has imported torch and transformers for all."""
    settings = {"HF_HUB_OFFLINE": "1", "MKL_CBWR": "COMPATIBLE", "TOKENIZERS_PARALLELISM": "false"}
    with LineServer([sys.executable, str(HERE / "forking.py")], settings) as server:
        yield lambda file, arguments, folder: server.ask(
            {"file": str(file), "arguments": arguments, "folder": str(folder)}
        )


SHOWN_BY = {
    "accelerate_training.py": pytest.mark.shown_by(
        "integrations/test_accelerate.py::test_a_killed_training_resumes_bit_for_bit"
    ),
    "async_s3.py": pytest.mark.shown_by("checkpoint/test_stores.py::test_two_ranks_save_overwrite_and_restore"),
    "consolidate_fsdp2.py": pytest.mark.shown_by(
        "offline/test_consolidate.py::test_model_optimizer_and_groups_come_out_bit_for_bit"
    ),
    "dcp_drop_in.py": pytest.mark.shown_by(
        "integrations/test_dcp.py::test_ranks_save_and_load_as_torch_does_on_any_number_of_them"
    ),
    "demo.py": pytest.mark.shown_by(
        "checkpoint/test_resume.py::test_training_that_resumes_is_training_that_was_never_interrupted"
    ),
    "elastic_resume.py": pytest.mark.shown_by(
        "data/test_witnessed_resume.py::test_on_1_2_and_3_ranks_the_witness_finds_no_difference"
    ),
    "ema.py": pytest.mark.shown_by(
        "checkpoint/stateful/test_variant.py::test_averages_are_saved_as_they_are_sharded_and_come_back"
    ),
    "lightning_trainer.py": pytest.mark.shown_by(
        "integrations/test_lightning.py::test_a_killed_training_resumes_bit_for_bit"
    ),
    "lora.py": pytest.mark.shown_by(
        "checkpoint/test_trainable_only.py::TestOnRanks::test_the_base_is_left_where_it_is_and_read_from_there"
    ),
    "ray_training.py": (
        pytest.mark.timeout(900),  # each of its workers imports torch
        pytest.mark.shown_by(
            "integrations/test_ray.py::TestReports::test_each_step_is_listed_and_a_later_run_restores_the_newest"
        ),
    ),
    "rl_stream.py": pytest.mark.shown_by(
        "stream/test_trainers_and_receivers.py::test_every_trainer_publishes_the_weights_that_torch_gathers"
    ),
    "survive.py": pytest.mark.shown_by(
        "tiers/test_several_nodes.py::test_with_a_copy_the_loss_of_any_node_is_survived_on_other_numbers_of_ranks"
    ),
    "torchft_recovery.py": pytest.mark.shown_by(
        "integrations/test_torchft.py::test_another_process_receives_a_state_also_if_it_asks_early"
    ),
    "torchtitan_manager.py": pytest.mark.shown_by(
        "integrations/test_torchtitan.py::test_a_killed_training_resumes_bit_for_bit_and_keeps_the_latest_steps"
    ),
    "transformers_trainer.py": pytest.mark.shown_by(
        "integrations/test_transformers.py::test_a_killed_training_and_one_of_the_trainer_resume_bit_for_bit"
    ),
    "save_and_load.py": pytest.mark.shown_by(
        "checkpoint/test_ranks.py::TestElastic::test_saved_at_four_by_any_face_and_loaded_by_all_at_one_two_and_three"
    ),
    "train_fsdp.py": pytest.mark.shown_by("core/test_parity.py::test_every_case_on_two_ranks"),
    "train_fully_shard.py": pytest.mark.shown_by(
        "core/fsdp2/test_fully_shard.py::test_training_equals_that_of_the_unsharded_model"
    ),
}
"""What an example calls is tested by itself, and so are its imports."""


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [pytest.param(name, *run, marks=SHOWN_BY.get(name, ())) for name, runs in RUNS.items() for run in runs],
)
def test_an_example_runs(run: Run, name: str, arguments: list[str], said: tuple[str, ...], tmp_path: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    if name in USE_TORCH_FULLY_SHARD and not RUNS_FULLY_SHARD_ON_CPU:
        pytest.skip("torch's `fully_shard` of this torch runs on GPUs only")
    done = run(EXAMPLES / name, arguments, tmp_path)
    assert done["code"] == 0, done["err"]
    out = re.sub(r"(?m)^\[Gloo\].*\n", "", done["out"])  # torch 2.9's gloo prints, too
    assert [words for words in said if words not in out] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arguments", [[], *(["--style", style, "--fork"] for style in ("wrapper", "fsdp2", "ddp"))])
def test_six_incidents_under_torchrun_change_no_loss(run: Run, arguments: list[str], tmp_path: Path) -> None:
    done = run(EXAMPLES / "survive.py", arguments, tmp_path)
    assert done["code"] == 0, done["err"]
    restored = [line.partition(" restored ")[2].partition(":")[0] for line in done["out"].splitlines()]
    assert [place for place in restored if place] == ["nothing", *["from memory"] * 5, "from root"]
    assert f"and those of jobs resumed by hand: {EQUAL}" in done["out"]


STALL = f"""
import os, signal, sys, time
from pathlib import Path
sys.path[0] = {str(EXAMPLES)!r}
import survive
folder = Path("run")
(folder / "journal").mkdir(parents=True)
os.environ["XDG_RUNTIME_DIR"] = str(folder.resolve())
cluster = survive.Cluster(folder.resolve(), "ddp", time.monotonic() + 120, is_forking=True)
try:
    cluster.start("a")
    cluster.wait_for(1, 0)
    agent = cluster._agents["a"].pid
    os.kill(agent, signal.SIGSTOP)
    cluster.start("b")
    time.sleep(8)
    os.kill(agent, signal.SIGCONT)
    cluster.wait_for(2, 0)
finally:
    cluster.close()
"""


@pytest.mark.slow
def test_an_agent_that_stalls_for_seconds_is_not_given_up(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "stall.py"
    file.write_text(STALL)
    done = run(file, [], tmp_path)
    assert done["code"] == 0, done["err"]


@pytest.mark.shown_by("::test_what_an_example_imports_of_the_package_is_there")
def test_an_example_that_fails_is_told(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("print('so far')\nraise SystemExit('a rank failed')\n")
    assert run(file, [], tmp_path) == {"code": 1, "out": "so far\n", "err": "a rank failed"}
    file.write_text("raise ValueError(3)\n")
    assert "ValueError: 3" in run(file, [], tmp_path)["err"]


@pytest.mark.parametrize("name", RUNS)
def test_what_an_example_imports_of_the_package_is_there(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is not None]
    ours = [(node.module, alias.name) for node in imports if node.module[:9] == "shardckpt" for alias in node.names]
    for module, imported in ours:
        if not hasattr(importlib.import_module(module), imported):
            importlib.import_module(f"{module}.{imported}")


def test_every_example_is_run() -> None:
    assert set(RUNS) == {path.name for path in EXAMPLES.glob("*.py")}
