"""The door of the script: interruptions before there is anything to undo, and what a verb imports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shardckpt_cli.app import build_command

from tests.kit.runs.command import ENVIRONMENT

HEAVY = (
    "numpy",
    "ml_dtypes",
    "torch",
    "fsspec",
    "asyncio",
    "rich",
    "pydantic",
    "importlib.metadata",
    "multiprocessing",
    "shardckpt.events.recorder",
    "shardckpt.events.run_events",
    "shardckpt.witness.records",
    "shardckpt.offline.results.comparison",
)
NOT_FOR_MODELS = (
    "hashlib",
    "fractions",
    "zstandard",
    *(("typing_extensions",) if sys.version_info >= (3, 11) else ()),
    "shardckpt.encodings.tagged_json",
    "shardckpt.offline.select.group_settings",
    "shardckpt.plan.optim.optimizer_state",
    "shardckpt.plan.optim.output_keys",
)
"""Modules that a conversion of a model that is neither compressed nor cast does not need."""
CHECKPOINTS = {"dcp": "dcp_fsdp2_llama_w2", "safetensors": "hf_pretrained_llama"}
READERS = {
    "dcp": {"shardckpt.readers.dcp.reader"},
    "safetensors": {"shardckpt.readers.huggingface.reader", "shardckpt.readers.torchsave.reader"},
}
"""The modules of formats that a verb needs for a checkpoint of one."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_command_is_loaded_is_one_line_and_its_code(number: signal.Signals, code: int) -> None:
    """Loading `app` sends the signal, as if it had arrived right then."""
    program = (
        "import os, sys, types\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        name == 'shardckpt_cli.app' and os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from shardckpt_cli.start import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("shardckpt: ")


def imported_by(*words: str) -> set[str]:
    """Return the modules that a command has imported when it ends."""
    program = (
        "import json, sys\n"
        "from shardckpt_cli.start import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print(json.dumps([*sys.modules]))\n"
    )
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("form", CHECKPOINTS)
@pytest.mark.parametrize("verb", ["consolidate", "convert", "inspect", "verify"])
def test_a_verb_imports_its_own_format_and_nothing_heavy(verb: str, form: str, fixtures: Path, tmp_path: Path) -> None:
    words = [verb, str(fixtures / CHECKPOINTS[form] / "ckpt")]
    found = imported_by(*words, *([str(tmp_path / "out")] if verb.startswith("con") else []))
    assert found & set(HEAVY) == set()
    readers = {name for name in found if name.startswith("shardckpt.readers.") and name.endswith(".reader")}
    assert readers - {"shardckpt.reader"} == READERS[form]
    assert ("shardckpt.readers.torchsave.tensor_views" in found) == (form == "safetensors"), "DCP has its own"
    targets = {name for name in found if name.startswith("shardckpt.offline.targets.")}
    assert len(targets) == (3 if verb.startswith("con") else 0), "the registry, the base and the one target"


def test_a_merge_of_dcp_imports_nothing_of_optimizers_hashes_or_compression(fixtures: Path, tmp_path: Path) -> None:
    found = imported_by("consolidate", str(fixtures / CHECKPOINTS["dcp"] / "ckpt"), str(tmp_path / "out"))
    assert found & set(NOT_FOR_MODELS) == set()


def test_a_cast_imports_numpy(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / CHECKPOINTS["dcp"] / "ckpt"
    found = imported_by("consolidate", str(source), str(tmp_path / "out"), "--dtype", "bf16")
    assert found & set(HEAVY) == {"numpy", "ml_dtypes"}


def completed(shell: str, words: str, **variables: str) -> str:
    """Return what the command prints for a shell that completes the last of some words."""
    program = "import sys; sys.argv[0] = 'shardckpt'; from shardckpt_cli.start import main; main()"
    asked = {
        "_SHARDCKPT_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": words,
        "COMP_WORDS": words,
        **variables,
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**ENVIRONMENT, **asked})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_shell_completes_verbs_and_their_options() -> None:
    assert completed("bash", "shardckpt con", COMP_CWORD="1").split() == ["consolidate", "convert"]
    shown = completed("zsh", "shardckpt reshard --t")
    assert "--to" in shown
    assert "torch, dcp, native" in shown, "the help names the formats"


def test_only_a_command_without_a_verb_builds_the_completion() -> None:
    assert [option.name for option in build_command("ls").params] == ["version"]
    names = [option.name for option in build_command().params]
    assert names == ["version", "install_completion", "show_completion"]
