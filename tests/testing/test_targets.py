"""Every built-in target passes the suite that authors of plugins subclass."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from numpy.typing import NDArray

from shardckpt.offline.targets import dcp, deepspeed_universal, native, safetensors_files, torchsave, vllm_sharded
from shardckpt.offline.targets.gguf import target as gguf
from shardckpt.offline.targets.target_registry import load_targets
from shardckpt.testing import TargetSuite
from tests.kit.models import gguf_models, vllm_models


class TestSafetensors(TargetSuite):
    target = safetensors_files.TARGET


class TestTorch(TargetSuite):
    target = torchsave.TARGET


class TestDcp(TargetSuite):
    target = dcp.TARGET


class TestNative(TargetSuite):
    target = native.TARGET
    is_deterministic = False  # a step has a random id


class TestUniversal(TargetSuite):
    target = deepspeed_universal.TARGET
    options = MappingProxyType({"part": "all"})


class TestGguf(TargetSuite):
    target = gguf.TARGET
    suffix = ".gguf"
    config = gguf_models.CONFIG
    shapes = MappingProxyType(gguf_models.list_shapes({}))
    dtype_shapes = MappingProxyType(gguf_models.list_shapes({}))

    @pytest.fixture(autouse=True)
    def folder_for_copies(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.mktemp("copies")

    def read_model(self, place: str | Path) -> dict[str, NDArray[Any]]:
        return gguf_models.read_model(place, self.folder)


class TestVllmSharded(TargetSuite):
    target = vllm_sharded.TARGET
    options = MappingProxyType({"tp": 2})
    config = vllm_models.CONFIG
    shapes = MappingProxyType(gguf_models.list_shapes({}))
    dtype_shapes = MappingProxyType(gguf_models.list_shapes({}))

    def read_model(self, place: str | Path) -> dict[str, NDArray[Any]]:
        return vllm_models.read_model(place)


def test_every_target_is_tested() -> None:
    suites = (TestSafetensors, TestTorch, TestDcp, TestNative, TestUniversal, TestGguf, TestVllmSharded)
    assert {suite.target for suite in suites} == set(load_targets())
