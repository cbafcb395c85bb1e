"""The entry point for vLLM costs little, and leaves every version of vLLM as it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardckpt.integrations.vllm_plugin import register

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FACTORY = "vllm.distributed.weight_transfer.factory"


class Factory:
    """vLLM's registry: a name is registered once."""

    def __init__(self) -> None:
        self.engines: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, engine: str) -> None:
        if name in self.engines:
            raise ValueError(f"{name} is registered")
        self.engines[name] = (module, engine)


def install(monkeypatch: pytest.MonkeyPatch, **registries: Any) -> None:
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", FACTORY):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, registry in registries.items():
        setattr(sys.modules[FACTORY], name, registry)
    sys.modules["vllm.distributed.weight_transfer"].factory = sys.modules[FACTORY]  # type: ignore[attr-defined]


def test_the_package_declares_the_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["entry-points"]["vllm.general_plugins"]
    assert declared == {"shardckpt": f"{register.__module__}:{register.__name__}"}


def test_without_vllm_nothing_is_registered_and_torch_is_not_imported() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from shardckpt.integrations.vllm_plugin import register\n"
        "register(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_both_engines_are_registered_by_their_names_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, trainers = Factory(), Factory()
    install(monkeypatch, WeightTransferEngineFactory=workers, WeightTransferTrainerFactory=trainers)
    register()
    register()
    assert workers.engines == {"shardckpt": ("shardckpt.integrations.vllm", "Engine")}
    assert trainers.engines == {"shardckpt": ("shardckpt.integrations.vllm_trainer", "Trainer")}
    assert "shardckpt.integrations.vllm" not in sys.modules


def test_a_vllm_without_engines_for_trainers_gets_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Factory()
    install(monkeypatch, WeightTransferEngineFactory=workers)
    register()
    assert list(workers.engines) == ["shardckpt"]
