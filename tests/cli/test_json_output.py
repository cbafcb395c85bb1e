"""`--json` of every command has a version, and is as docs/output.schema.json describes it.

`UPDATE_DOCS=1 pytest tests/cli/test_json_output.py` writes the schema.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.native.run_directory import step_name
from shardckpt.storage.local import LocalStore
from shardckpt.witness.files.resume_file import add_resumes
from tests.kit.runs.command import run_here
from tests.kit.runs.json_schema import build_schema, close_objects, list_verbs
from tests.kit.writers.native_writer import write_step

SCHEMA = Path(__file__).parents[2] / "docs" / "output.schema.json"

COMMANDS = {
    "consolidate": ["SRC/w.safetensors OUT", "STEP OUT --part all --dtype bf16 --dry-run"],
    "convert": ["SRC OUT"],
    "rekey": ["STEP OUT --to-names"],
    "reshard": ["STEP OUT --world-size 2"],
    "merge-adapter": ["SRC/w.safetensors ADAPTER OUT"],
    "inspect": ["SRC", "STEP", "SHORT", "MEASURED"],
    "formats": [""],
    "copy": ["RUN OUT", "STEP OUT --dry-run"],
    "repair": ["STEP", "LOST"],
    "verify": ["SRC", "STEP", "SHORT", "FLIPPED"],
    "diff": ["SRC SRC", "SRC STEP", "STEP OTHER"],
    "stats": ["SRC", "STEP"],
    "history": ["RUN --tensor a.w"],
    "bisect": ["RUN --when nan", "RUN --when l2>1e9 --scan"],
    "ls": ["RUN", "RUN --durability"],
    "prove": ["RUN", "PROVEN"],
    "doctor": ["RUN", "PROVEN"],
    "prune": ["RUN --dry-run --keep-last 1"],
    "tiers": ["", "stop"],
    "task": ["PLAN 0", "PLAN --status"],
    "commit": ["DONE", "VERDICT"],
    "stream": ["ls STREAM", "verify VERSION", "export VERSION OUT", "export STREAM OUT --dialect hf-delta"],
}
"""Arguments of calls of each command; capital words are paths that `places` makes."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    names = {"RUN": "run", "STEP": f"run/{step_name(1)}", "SHORT": "short", "FLIPPED": "flipped", "LOST": "lost"}
    names |= {"MEASURED": "measured", "OTHER": "other", "SRC": "src", "OUT": "out", "ADAPTER": "adapter"}
    names |= {"PROVEN": "proven", "STREAM": "stream", "VERSION": "stream@2"}
    names |= {"PLAN": "plan.json", "DONE": "done.json", "VERDICT": "verdict.json"}
    places = {name: folder / path for name, path in names.items()}
    state = {
        "model": {"a.w": torch.eye(3), "b": torch.tensor([float("nan"), float("inf"), 0.0])},
        "optim": {
            "state": {0: {"exp_avg": torch.ones(3, 3)}, 1: {"exp_avg": torch.ones(3)}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        },
        "epoch": 3,
    }
    for number in (1, 2):
        write_step(folder / "run" / step_name(number), state)
    changed = {**state, "model": {"a.w": torch.zeros(3, 3), "b": torch.ones(4)}, "epoch": 4}
    write_step(places["OTHER"], changed)
    for name in ("SHORT", "FLIPPED", "LOST"):
        shutil.copytree(places["STEP"], places[name])
    (places["LOST"] / "COMMIT").unlink()
    flip_last_byte(next(places["FLIPPED"].glob("*.safetensors")))
    payload = next(places["SHORT"].glob("*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-4])
    shardckpt.save(state, places["MEASURED"], stats=True)
    with shardckpt.Publisher(places["STREAM"]) as publisher:
        for number in (1, 2):
            publisher.publish(number, {"w": torch.full((3,), float(number))})
    places["SRC"].mkdir()
    save_file({"layers.0.weight": torch.eye(3), "layers.0.bias": torch.ones(2)}, places["SRC"] / "w.safetensors")
    write_adapter(places["ADAPTER"])
    for name in ("PLAN", "DONE"):
        shardckpt.plan_tasks(places[name], "convert", places["SRC"], folder / f"of-{name}")
    shardckpt.plan_tasks(places["VERDICT"], "verify", places["FLIPPED"])
    for name in ("DONE", "VERDICT"):
        shardckpt.run_task(places[name], 0)
    write_step(places["PROVEN"] / step_name(1), state, save="0" * 15)
    found = shardckpt.results.Divergence("schedule", 2, "lr", "lr is 1", "Put it into the state", (0,))
    resume = shardckpt.results.Resume("1" * 15, 1.5, (2, 3), 0, 1, 2, "Net", "Net", divergence=found)
    add_resumes(LocalStore(str(places["PROVEN"])), step_name(1), "0" * 15, resume)
    return places


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def write_adapter(folder: Path) -> None:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["w"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.layers.0"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(1, 3), f"{name}.lora_B.weight": torch.ones(3, 1)},
        folder / "adapter_model.safetensors",
    )


def test_the_published_schema_is_that_of_the_code() -> None:
    text = json.dumps(build_schema(), indent=2) + "\n"
    if os.environ.get("UPDATE_DOCS"):
        SCHEMA.write_text(text)
    assert SCHEMA.read_text() == text, "run UPDATE_DOCS=1 pytest tests/cli/test_json_output.py"


def test_a_name_is_that_of_lists_or_of_numbers_in_all_results() -> None:
    kinds: dict[str, set[str]] = {}
    for definition in build_schema()["$defs"].values():
        for name, content in definition.get("properties", {}).items():
            kinds.setdefault(name, set()).add(content.get("type", ""))
    both = {name for name, found in kinds.items() if found >= {"array", "integer"}}
    assert both == {"nans", "offset"}, "of two checkpoints, and along each dimension"


def test_every_command_with_json_is_tried() -> None:
    assert COMMANDS.keys() == list_verbs().keys()


@pytest.mark.parametrize("verb", COMMANDS)
def test_what_a_command_prints_is_as_published(verb: str, places: dict[str, Path]) -> None:
    schema = json.loads(SCHEMA.read_text())
    for arguments in COMMANDS[verb]:
        shutil.rmtree(places["OUT"], ignore_errors=True)
        found = run_here(verb, *(fill_in(word, places) for word in arguments.split()), "--json")
        assert found.out, found.err
        content = json.loads(found.out, parse_constant=refuse)
        jsonschema.validate(content, {**schema, "$ref": f"#/$defs/{verb}"})
        assert content.pop("schema_version") == 1
        classes = get_args(list_verbs()[verb]) or (list_verbs()[verb],)
        closed = {"anyOf": [{"$ref": f"#/$defs/{each.__name__}"} for each in classes]}
        jsonschema.validate(content, {**close_objects(schema), **closed})


def fill_in(word: str, places: dict[str, Path]) -> str:
    name, slash, rest = word.partition("/")
    return f"{places[name]}{slash}{rest}" if name in places else word


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")
