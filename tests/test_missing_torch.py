"""What needs torch says what to install where there is none; everything else works without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardckpt
from shardckpt.errors import MissingTorchError, require_torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "installation.md"
BLOCKED = "import sys; sys.modules['torch'] = None; "
IN_A_JOB = {
    "Checkpointer",
    "Local",
    "PeerMemory",
    "PerRank",
    "RNGState",
    "Variant",
    "Witness",
    "async_save",
    "load",
    "load_model_state_dict",
    "load_optim_state_dict",
    "model_state_dict",
    "optim_state_dict",
    "prove_resume",
    "register_slot",
    "Publisher",
    "Subscriber",
    "save",
}
"""Public names that need torch."""


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that cannot import torch."""
    command = [sys.executable, "-c", BLOCKED + code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def last_line(code: str) -> str:
    """Return the last line of the traceback of a program that fails."""
    done = run_blocked(code)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_public_names_need_torch_or_do_not_as_listed() -> None:
    code = """
import json, sys, shardckpt
from shardckpt.errors import MissingTorchError
found = {}
for name in dir(shardckpt):
    try:
        getattr(shardckpt, name)
    except MissingTorchError as error:
        found[name] = str(error)
print(json.dumps([found, dir(shardckpt)]))
"""
    done = run_blocked(code)
    assert done.returncode == 0, done.stderr
    found, listed = json.loads(done.stdout)
    assert set(shardckpt.__all__) <= set(listed), "dir() lists every name"
    assert found == {
        name: f"shardckpt.{name}: torch must be installed. Run pip install 'shardckpt[torch]'." for name in IN_A_JOB
    }


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from shardckpt import save", "shardckpt.save"),
        ("import shardckpt; shardckpt.Checkpointer", "shardckpt.Checkpointer"),
        ("from shardckpt.core import fully_shard", "shardckpt.core"),
        ("import shardckpt.state", "shardckpt.state"),
        ("from shardckpt.data import ElasticBatchSampler", "shardckpt.data"),
        ("from shardckpt.checkpoint.load.lazy import open", "shardckpt.checkpoint"),
        ("from shardckpt.checkpoint.save import save", "shardckpt.checkpoint"),
    ],
)
def test_the_error_is_one_line_that_names_what_to_install(code: str, name: str) -> None:
    message = f"{name}: torch must be installed. Run pip install 'shardckpt[torch]'."
    assert last_line(code) == f"shardckpt.errors.MissingTorchError: {message}"


def test_importing_all_names_takes_those_that_work() -> None:
    done = run_blocked("from shardckpt import *; import json; print(json.dumps(sorted(globals())))")
    assert done.returncode == 0, done.stderr
    assert set(shardckpt.__all__) - set(json.loads(done.stdout)) == IN_A_JOB


MODULES = [
    ("shardckpt.integrations.dcp", "torch", "'shardckpt[torch]'"),
    ("shardckpt.integrations.transformers", "torch", "'shardckpt[transformers]'"),
    ("shardckpt.integrations.transformers", "transformers", "'shardckpt[transformers]'"),
    ("shardckpt.integrations.transformers", "accelerate", "'shardckpt[transformers]'"),
    ("shardckpt.integrations.accelerate", "accelerate", "'shardckpt[accelerate]'"),
    ("shardckpt.integrations.lightning", "lightning", "'shardckpt[lightning]'"),
    ("shardckpt.integrations.ray", "ray", "'shardckpt[ray]'"),
    ("shardckpt.integrations.torchft", "torchft", "'shardckpt[torchft]'"),
    ("shardckpt.integrations.torchtitan", "torchtitan", "'shardckpt[torchtitan]'"),
    ("shardckpt.integrations.sglang", "torch", "'shardckpt[torch]'"),
    ("shardckpt.integrations.trl", "torch", "'shardckpt[torch]'"),
    ("shardckpt.integrations.verl", "verl", "verl"),
    ("shardckpt.integrations.vllm", "vllm", "vllm"),
    ("shardckpt.integrations.vllm_trainer", "vllm", "vllm"),
    ("shardckpt.testing", "pytest", "pytest"),
]


@pytest.mark.parametrize(("module", "package", "install"), MODULES)
def test_a_module_whose_package_is_missing_says_what_to_install(module: str, package: str, install: str) -> None:
    code = f"""
import importlib, sys
sys.modules[{package!r}] = None
from shardckpt.errors import MissingPackageError
try:
    importlib.import_module({module!r})
except MissingPackageError as error:
    print(type(error).__name__, error.name, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    kind = "MissingTorchError" if package == "torch" else "MissingPackageError"
    assert done.stdout == f"{kind} {package} {module}: {package} must be installed. Run pip install {install}.\n"


def test_open_says_what_to_pass_instead() -> None:
    message = "shardckpt.open: torch must be installed. Run pip install 'shardckpt[torch]', or pass framework='numpy'."
    assert last_line("import shardckpt; shardckpt.open('.')") == f"shardckpt.errors.MissingTorchError: {message}"


def test_the_error_is_caught_as_what_a_missing_module_raises() -> None:
    code = """
try:
    import shardckpt.core
except ModuleNotFoundError as error:
    assert error.name == "torch", error.name
"""
    assert run_blocked(code).returncode == 0


def test_a_module_that_torch_itself_lacks_is_not_said_to_be_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torch.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught:
        require_torch("shardckpt.save")
    assert not isinstance(caught.value, MissingTorchError)


def test_the_suites_for_plugins_need_no_torch() -> None:
    assert run_blocked("import shardckpt.testing").returncode == 0


def test_the_page_lists_the_names_that_need_torch() -> None:
    rows = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| needs torch |")]
    listed = {name.removeprefix("shardckpt.") for name in re.findall(r"`([\w.]+)`", rows[0])}
    assert listed & set(shardckpt.__all__) == IN_A_JOB
