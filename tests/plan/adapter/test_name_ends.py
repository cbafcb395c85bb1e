"""Ends of names are matched in linear time, however many a config lists."""

from __future__ import annotations

import time

import pytest

from shardckpt.errors import UnsafeError
from shardckpt.plan.adapter.merge_plan import plan_merge
from shardckpt.plan.adapter.name_ends import NameEnds
from shardckpt.plan.adapter.parameters import count_levels, strip_levels


def test_an_end_is_a_full_name_or_begins_after_a_dot() -> None:
    ends = NameEnds(["experts.w", "x.experts.v", "q"], "x")
    assert ends.find("a.experts.w") == ends.find("experts.w") == ["experts.w"]
    assert ends.find("a.myexperts.w") == ends.find("w") == []
    assert ends.list_keys("x.experts") == ["x.experts.q", "x.experts.v", "x.experts.w"]
    assert ends.list_keys("m") == ["m.q"]


def test_a_config_with_many_different_ends_is_refused() -> None:
    with pytest.raises(UnsafeError, match="too many different parameters; found 100"):
        NameEnds([f"m.p{i}" for i in range(100)], "x")
    with pytest.raises(UnsafeError, match="too many different parameters"):
        NameEnds(["x" + ".x" * i for i in range(100)], "x")


def test_many_modules_and_many_ends_take_linear_time() -> None:
    modules = [f"model.layers.{i}.experts" for i in range(4000)]
    sizes = {"A": (6, 8), "B": (8, 6)}
    shapes = {f"base_model.model.{name}.lora_{side}.weight": sizes[side] for name in modules for side in "AB"}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_parameters": [f"{name}.w" for name in modules]}
    started = time.process_time()
    found = plan_merge(config, shapes, {f"{name}.w": (3, 8, 8) for name in modules}, "x", model_type="mixtral")
    assert len(found.added) == 4000
    assert time.process_time() - started < 2


def test_levels_of_a_long_name_take_linear_time() -> None:
    started = time.process_time()
    name = "m" + ".base_layer" * 200_000
    assert (strip_levels(name), count_levels(name)) == ("m", 200_000)
    assert time.process_time() - started < 2
