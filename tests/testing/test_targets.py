"""Every built-in target passes the suite that authors of plugins subclass."""

from __future__ import annotations

from types import MappingProxyType

from shardckpt.offline.targets import dcp, deepspeed_universal, native, safetensors_files, torchsave
from shardckpt.offline.targets.target_registry import load_targets
from shardckpt.testing import TargetSuite


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


def test_every_target_is_tested() -> None:
    assert {suite.target for suite in (TestSafetensors, TestTorch, TestDcp, TestNative, TestUniversal)} == set(
        load_targets()
    )
