"""Factors without a layer of their own: shapes decide whose they are, or the call is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardckpt.boxes import Shape
from shardckpt.errors import AmbiguousError, FormatError, ShardckptError, UsageError
from shardckpt.plan.adapter.merge_plan import Merge, list_changed, plan_merge

CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 2,
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
INNER, OUTER = "base_model.model.m.experts.base_layer.lora_", "base_model.model.m.experts.lora_"


def plan(adapter: dict[str, Shape], base: dict[str, Shape], model_type: str = "", **config: Any) -> Merge:
    return plan_merge({**CONFIG, **config}, adapter, base, "x", model_type=model_type)


def factors(prefix: str, ins: int, outs: int, experts: int = 3) -> dict[str, Shape]:
    return {f"{prefix}A.weight": (2 * experts, ins), f"{prefix}B.weight": (outs, 2 * experts)}


def experts_of(base: dict[str, Shape]) -> dict[str, Shape]:
    return {f"m.experts.{name}": shape for name, shape in base.items()}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_shapes_tell_parameters_and_dimensions_apart(is_turned: bool, is_swapped: bool) -> None:
    base = experts_of({"gate_up_proj": (3, 12, 8), "down_proj": (3, 8, 6)})
    if is_turned:
        base = {name: (shape[0], shape[2], shape[1]) for name, shape in base.items()}
    prefixes = (OUTER, INNER) if is_swapped else (INNER, OUTER)
    adapter = factors(prefixes[0], 8, 12) | factors(prefixes[1], 6, 8)
    found = {each.weight: each for each in plan(adapter, base).added}
    assert found["m.experts.gate_up_proj"].a == f"{prefixes[0]}A.weight"
    assert found["m.experts.down_proj"].a == f"{prefixes[1]}A.weight"
    assert {each.is_turned for each in found.values()} == {is_turned}
    assert {each.experts for each in found.values()} == {3}
    assert list_changed(CONFIG, adapter, base, "x") == base.keys()


@pytest.mark.parametrize(("model_type", "is_turned"), [("gpt_oss", True), ("qwen3_moe", False), ("new", None)])
def test_the_type_of_model_decides_for_square_weights(model_type: str, is_turned: bool | None) -> None:
    base, adapter = experts_of({"down_proj": (3, 8, 8)}), factors(OUTER, 8, 8)
    if is_turned is None:
        with pytest.raises(AmbiguousError, match=r"in several ways.*merge_and_unload"):
            plan(adapter, base, model_type)
        return
    [each] = plan(adapter, base, model_type).added
    assert each.is_turned == is_turned


def test_the_other_parameter_decides_for_a_square_one() -> None:
    base = experts_of({"gate_up_proj": (3, 8, 16), "down_proj": (3, 8, 8)})
    found = plan(factors(INNER, 8, 16) | factors(OUTER, 8, 8), base).added
    assert [each.is_turned for each in found] == [True, True]


def test_rows_of_stacked_parameters_belong_to_each_experts_weights() -> None:
    sizes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    base = {f"m.experts.{i}.{name}.weight": shape for i in range(3) for name, shape in sizes.items()}
    adapter = factors(INNER, 8, 12) | factors(OUTER, 6, 8)
    found = {each.weight: (each.expert, each.row, each.is_turned) for each in plan(adapter, base).added}
    assert found["m.experts.2.up_proj.weight"] == (2, 6, False)
    assert found["m.experts.1.gate_proj.weight"] == (1, 0, False)
    assert found.keys() == base.keys() == list_changed(CONFIG, adapter, base, "x")


@pytest.mark.parametrize(
    ("adapter", "base", "config", "kind", "message"),
    [
        (factors(OUTER, 6, 8), experts_of({"down_proj": (3, 8, 7)}), {}, UsageError, "do not fit its parameters"),
        (factors(OUTER, 6, 8), experts_of({"down_proj": (3, 8, 6)}), {"r": 3}, UsageError, "do not fit its param"),
        (factors(OUTER, 6, 8), {"m.experts.other": (3, 8, 6)}, {}, UsageError, "2 factors for no such parameter"),
        (
            factors(OUTER, 6, 8),
            experts_of({"down_proj": (3, 8, 6), "gate_up_proj": (3, 12, 8)}),
            {},
            UsageError,
            "2 factors for .*down_proj, .*gate_up_proj",
        ),
        (
            factors(INNER, 8, 6) | factors(OUTER, 8, 6),
            experts_of({"a": (3, 6, 8), "b": (3, 6, 8)}),
            {"target_parameters": ["experts.a", "experts.b"]},
            AmbiguousError,
            "in several ways",
        ),
        (
            {**factors(OUTER, 6, 8), f"{OUTER}magnitude_vector": (8,)},
            experts_of({"down_proj": (3, 8, 6)}),
            {"use_dora": True},
            FormatError,
            "more than factors",
        ),
        (
            factors(OUTER, 6, 8),
            {"m.experts.0.down_proj.weight": (8, 6), "m.experts.1.down_proj.weight": (8, 7)},
            {},
            UsageError,
            "must have equal shapes",
        ),
        ({f"{OUTER}A.weight": (6, 6)}, experts_of({"down_proj": (3, 8, 6)}), {}, FormatError, "only one factor"),
        ({}, {}, {"target_parameters": "experts"}, FormatError, "must be a list of names"),
    ],
    ids=[str(i) for i in range(9)],
)
def test_factors_that_fit_no_parameter_are_refused(
    adapter: dict[str, Shape], base: dict[str, Shape], config: dict[str, Any], kind: type[ShardckptError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        plan(adapter, base, **config)
