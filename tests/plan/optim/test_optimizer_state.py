"""Optimizer state by name, whatever it was stored by: names, ids, or one flat key a value. Never by a guess."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import full_box
from shardckpt.errors import AmbiguousError, FormatError, NameCollisionError, UsageError
from shardckpt.manifest import Path, Piece, Span, TensorEntry
from shardckpt.plan.naming.fqn import make_cleaner
from shardckpt.plan.optim.optimizer_state import (
    OptimizerState,
    RawOptimizer,
    has_match,
    key_by_name,
    match_by_kind,
    match_in_order,
)

MODEL: dict[str, tuple[int, ...]] = {"a.w": (2, 3), "a.b": (3,), "c": (5,)}


def tensor(path: Path, shape: tuple[int, ...] = (1,)) -> TensorEntry:
    return TensorEntry(path, shape, "float32", (Piece(full_box(shape), "f", Span(0, 4)),))


def raw(tensors: dict[Path, tuple[int, ...]], values: dict[Path, object] | None = None) -> RawOptimizer:
    return RawOptimizer({p: tensor(p, s) for p, s in tensors.items()}, values or {})


def slots(state: OptimizerState) -> dict[str, Path]:
    return {name: entry.path for name, entry in state.tensors.items()}


def nested(
    ids: dict[int, tuple[int, ...]], groups: list[dict[str, object]], *, keeps_order: bool = False
) -> RawOptimizer:
    values = {("param_groups", i, k): v for i, g in enumerate(groups) for k, v in g.items()}
    return replace(raw({("state", i, "exp_avg"): s for i, s in ids.items()}, values), keeps_order=keeps_order)


class TestByName:
    def test_names_with_dots_stay_whole(self) -> None:
        found = key_by_name(
            raw({("state", "a.w", "exp_avg"): (2, 3)}, {("param_groups",): [{"params": ["a.w"]}]}), MODEL
        )
        assert slots(found) == {"a.w/exp_avg": ("state", "a.w", "exp_avg")}
        assert found.groups == [{"params": ["a.w"]}]

    def test_params_that_are_no_ids_are_refused(self) -> None:
        with pytest.raises(FormatError, match="must be a list of names or ids"):
            key_by_name(nested({0: (2, 3)}, [{"params": [0, {}]}]), MODEL)

    def test_a_tensor_in_place_of_the_optimizer_is_refused(self) -> None:
        with pytest.raises(FormatError, match="not a place for optimizer state"):
            key_by_name(raw({(): (2, 3)}), MODEL)
        assert key_by_name(raw({}, {(): None}), MODEL).groups == []

    def test_slots_may_be_nested(self) -> None:
        found = key_by_name(raw({("state", "c", "shampoo", 0, "q"): (5,)}), MODEL)
        assert list(found.tensors) == ["c/shampoo.0.q"]

    def test_state_that_is_no_tensor_is_kept(self) -> None:
        found = key_by_name(raw({}, {("state", "c", "step"): 3, ("param_groups", 0, "params"): ["c"]}), MODEL)
        assert found.scalars == {"c": {"step": 3}}

    def test_names_are_cleaned_as_the_models_were(self) -> None:
        clean = make_cleaner(["module._orig_mod.a.w"])
        found = key_by_name(
            raw({("state", "module._orig_mod.a.w", "m"): (2, 3)}, {("param_groups",): [{"params": ["module.a.w"]}]}),
            MODEL,
            clean=clean,
        )
        assert list(found.tensors) == ["a.w/m"]
        assert found.groups == [{"params": ["a.w"]}]

    def test_two_entries_of_one_name_are_refused(self) -> None:
        clashing = raw({("state", "_orig_mod.c", "m"): (5,), ("state", "c", "m"): (5,)})
        with pytest.raises(NameCollisionError, match="c/m"):
            key_by_name(clashing, MODEL, clean=make_cleaner(["c"]))

    def test_two_slots_of_one_name_are_refused(self) -> None:
        clashing = raw({("state", "c", "m/v"): (5,), ("state", "c/m", "v"): (5,)})
        with pytest.raises(NameCollisionError, match="c/m/v"):
            key_by_name(clashing, MODEL)

    def test_groups_stored_value_by_value_are_put_back_in_order(self) -> None:
        values: dict[Path, object] = {("param_groups", i, "lr"): i / 10 for i in (10, 2, 0)}
        found = key_by_name(raw({}, values), MODEL)
        assert [g["lr"] for g in found.groups] == [0.0, 0.2, 1.0]


class TestFlattened:
    """Keys such as `state.a.w.exp_avg`: both names and slots contain dots, the longest name wins."""

    def test_the_longest_name_wins(self) -> None:
        model = {"a": (1,), "a.w": (2,), "a.w.exp": (3,)}
        found = key_by_name(raw({("state.a.w.exp.exp_avg",): (3,), ("state.a.w.exp_avg",): (2,)}), model)
        assert list(found.tensors) == ["a.w.exp/exp_avg", "a.w/exp_avg"]

    def test_slots_may_have_dots(self) -> None:
        found = key_by_name(raw({("state.c.factors.0",): (5,)}), MODEL)
        assert list(found.tensors) == ["c/factors.0"]

    def test_a_parameter_that_the_model_lacks_is_cut_at_the_last_dot(self) -> None:
        found = key_by_name(raw({("state.gone.w.exp_avg",): (5,)}), MODEL)
        assert list(found.tensors) == ["gone.w/exp_avg"]

    def test_parameters_with_equal_hypers_are_one_group(self) -> None:
        values: dict[Path, object] = {
            ("param_groups.a.w.lr",): 0.1,
            ("param_groups.c.lr",): 0.2,
            ("param_groups.a.b.lr",): 0.1,
            ("state.c.step",): 4,
        }
        found = key_by_name(raw({("state.a.w.exp_avg",): (2, 3)}, values), MODEL)
        assert found.groups == [{"lr": 0.1, "params": ["a.w", "a.b"]}, {"lr": 0.2, "params": ["c"]}]
        assert found.scalars == {"c": {"step": 4}}


class TestIds:
    def test_names_in_the_groups_are_believed(self) -> None:
        found = key_by_name(
            nested({0: (5,), 1: (2, 3)}, [{"params": [0, 1], "param_names": ["c", "a.w"], "lr": 1.0}]), MODEL
        )
        assert list(found.tensors) == ["c/exp_avg", "a.w/exp_avg"]
        assert found.groups == [{"lr": 1.0, "params": ["c", "a.w"]}]

    def test_names_that_the_caller_gives_come_first(self) -> None:
        source = nested({0: (5,)}, [{"params": [0], "param_names": ["wrong"]}])
        assert list(key_by_name(source, MODEL, {0: "c"}).tensors) == ["c/exp_avg"]

    def test_names_in_the_groups_are_cleaned_as_the_models_were(self) -> None:
        """An optimizer made from the named parameters of a wrapped model keeps the wrapper's names."""
        source = nested({0: (5,)}, [{"params": [0], "param_names": ["module.c"]}])
        found = key_by_name(source, MODEL, clean=make_cleaner([f"module.{name}" for name in MODEL]))
        assert list(found.tensors) == ["c/exp_avg"]
        assert found.groups == [{"params": ["c"]}]

    def test_a_given_name_that_the_model_lacks_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"id 0 'nope', which the model lacks.*a\.w"):
            key_by_name(nested({0: (5,)}, [{"params": [0]}]), MODEL, {0: "nope"})

    def test_given_names_in_the_wrong_order_are_refused(self) -> None:
        with pytest.raises(UsageError, match=r"id 0 'a\.w', which has another shape.*\(5,\)"):
            key_by_name(nested({0: (5,), 1: (2, 3)}, [{"params": [0, 1]}]), MODEL, {0: "a.w", 1: "c"})

    def test_ids_without_a_name_are_refused(self) -> None:
        with pytest.raises(UsageError, match=r"ids \[1\] have no name.*--param-names"):
            key_by_name(nested({0: (5,), 1: (2, 3)}, [{"params": [0, 1]}]), MODEL, {0: "c"})

    @pytest.mark.parametrize("keeps_order", [True, False])
    def test_shapes_name_ids_where_only_one_way_fits(self, keeps_order: bool) -> None:
        groups: list[dict[str, object]] = [{"params": [0, 1]}, {"params": [2]}]
        source = nested({0: (2, 3), 1: (3,), 2: (5,)}, groups, keeps_order=keeps_order)
        found = key_by_name(source, MODEL)
        assert list(found.tensors) == ["a.w/exp_avg", "a.b/exp_avg", "c/exp_avg"]
        assert not found.is_by_order

    def test_different_shapes_name_ids_whatever_the_order(self) -> None:
        found = key_by_name(nested({0: (2, 3), 1: (3,), 2: (5,)}, [{"params": [0, 1, 2]}]), dict(sorted(MODEL.items())))
        assert list(found.tensors) == ["a.w/exp_avg", "a.b/exp_avg", "c/exp_avg"]

    def test_buffers_between_parameters_are_passed_over(self) -> None:
        model = {"a": (2,), "running": (7,), "b": (3,)}
        found = key_by_name(nested({0: (2,), 1: (3,)}, [{"params": [0, 1]}]), model)
        assert list(found.tensors) == ["a/exp_avg", "b/exp_avg"]

    @pytest.mark.parametrize("keeps_order", [True, False])
    @pytest.mark.parametrize(
        ("model", "problem"),
        [({"a": (2,), "b": (2,)}, "in several ways"), ({"a": (9,)}, "do not match"), ({}, "holds no model")],
    )
    def test_several_ways_or_none_need_help(
        self, model: dict[str, tuple[int, ...]], problem: str, keeps_order: bool
    ) -> None:
        with pytest.raises(AmbiguousError, match=f"{problem}.*--param-names"):
            key_by_name(nested({0: (2,)}, [{"params": [0]}], keeps_order=keeps_order), model)

    def test_the_ids_of_all_groups_are_counted(self) -> None:
        with pytest.raises(AmbiguousError, match="2 ids"):
            key_by_name(nested({0: (2,), 1: (2,)}, [{"params": [0]}, {"params": [1]}]), {})

    def test_equal_shapes_are_named_in_order_only_where_it_is_kept_and_this_is_told(self) -> None:
        model = {"a": (2,), "b": (2,)}
        state, groups = {0: (2,), 1: (2,)}, [{"params": [0, 1]}]
        found = key_by_name(nested(state, groups, keeps_order=True), model)
        assert list(found.tensors) == ["a/exp_avg", "b/exp_avg"]
        assert found.is_by_order
        with pytest.raises(AmbiguousError, match=r"keep no order.*--param-names"):
            key_by_name(nested(state, groups), model)

    def test_slots_of_other_shapes_than_the_parameter_name_nothing(self) -> None:
        factored = {("state", 0, "exp_avg_sq_row"): (4,), ("state", 0, "exp_avg_sq_col"): (6,)}
        with pytest.raises(AmbiguousError, match="--param-names"):
            key_by_name(raw(factored, {("param_groups",): [{"params": [0]}]}), {"w": (4, 6), "b": (4,)})

    @given(data=st.data(), keeps_order=st.booleans())
    def test_an_id_is_named_rightly_or_refused_or_the_order_is_announced(
        self, data: st.DataObject, keeps_order: bool
    ) -> None:
        kinds = data.draw(st.lists(st.sampled_from([(2,), (3,), (2, 2), (4,), (5,)]), min_size=1, max_size=5))
        model = {f"p{i}": shape for i, shape in enumerate(kinds)}
        stored = dict(data.draw(st.permutations(list(model.items()))))
        order = data.draw(st.permutations(list(model)))
        order = order[: data.draw(st.integers(1, len(order)), label="parameters, the rest are buffers")]
        cut = data.draw(st.integers(0, len(order)))
        trained = data.draw(st.sets(st.sampled_from(range(len(order)))), label="those that have state")
        groups: list[dict[str, object]] = [{"params": list(range(cut))}, {"params": list(range(cut, len(order)))}]
        source = nested({i: model[order[i]] for i in trained}, groups, keeps_order=keeps_order)
        try:
            found = key_by_name(source, stored)
        except AmbiguousError:
            return
        members = [name for group in found.groups for name in group["params"]]  # type: ignore[attr-defined]
        ids = {f"{order[i]}/exp_avg": ("state", i, "exp_avg") for i in trained}
        assert found.is_by_order or (members == order and slots(found) == ids)
        assert keeps_order or not found.is_by_order

    def test_an_empty_group_stays(self) -> None:
        found = key_by_name(nested({0: (5,)}, [{"params": [0]}, {"params": [], "lr": 9}]), MODEL, {0: "c"})
        assert found.groups == [{"params": ["c"]}, {"lr": 9, "params": []}]


@pytest.mark.parametrize(
    "values",
    [
        {("param_groups",): "no list"},
        {("param_groups",): [1, 2]},
        {("param_groups",): [{"params": 5}]},
        {("param_groups",): [{"params": [None]}]},
        {("param_groups",): [{"params": [[1]]}]},
        {("param_groups", 0): 7},
        {("param_groups", 0, "params"): {"a": 1}},
    ],
)
def test_groups_that_are_none_are_a_format_error(values: dict[Path, object]) -> None:
    with pytest.raises(FormatError):
        key_by_name(raw({}, values), MODEL)


@pytest.mark.parametrize("path", [("other", "x"), ("state",), ("state", "x")])
def test_tensors_in_odd_places_are_a_format_error(path: Path) -> None:
    with pytest.raises(FormatError, match="not a place"):
        key_by_name(raw({path: (1,)}, {("param_groups",): []}), MODEL)


@pytest.mark.parametrize("key", [True, 1.5, None, ("a",)])
def test_keys_that_are_neither_name_nor_id_are_a_format_error(key: object) -> None:
    with pytest.raises(FormatError):
        key_by_name(raw({("state", key, "m"): (1,)}, {("param_groups",): []}), MODEL)  # type: ignore[dict-item]


KINDS = st.sampled_from([None, 1, 2])


def list_matches(wanted: list[int | None], choices: Iterable[tuple[tuple[str, int], ...]]) -> list[list[str]]:
    """Return the names of the choices that fit what is wanted, one by one."""
    return [
        [name for name, _ in chosen]
        for chosen in choices
        if all(want in (None, kind) for want, (_, kind) in zip(wanted, chosen, strict=True))
    ]


@given(wanted=st.lists(KINDS, max_size=4), offered=st.lists(st.sampled_from([1, 2, 3]), max_size=6))
def test_a_match_in_order_is_given_only_where_it_is_the_only_one(wanted: list[int | None], offered: list[int]) -> None:
    named = [(f"n{i}", kind) for i, kind in enumerate(offered)]
    ways = list_matches(wanted, combinations(named, len(wanted)))
    assert match_in_order([wanted], named) == (ways if len(ways) == 1 else None)


@given(wanted=st.lists(KINDS, max_size=4), offered=st.lists(st.sampled_from([1, 2, 3]), max_size=5))
def test_a_match_by_kind_is_the_only_one_in_any_order(wanted: list[int | None], offered: list[int]) -> None:
    named = [(f"n{i}", kind) for i, kind in enumerate(offered)]
    ways = list_matches(wanted, permutations(named, len(wanted)))
    assert match_by_kind(wanted, named) == (ways[0] if len(ways) == 1 else None)
    if None not in wanted:
        assert has_match(wanted, named) == bool(ways)


def test_groups_take_names_one_after_the_other() -> None:
    offered = [("a.w", 1), ("a.b", 2), ("c.w", 1), ("c.b", 2)]
    assert match_in_order([[2, 2], [1, 1]], offered) == [["a.b", "c.b"], ["a.w", "c.w"]]
    assert match_in_order([[1], [1]], offered) is None
    assert match_in_order([[1, 2, 1, 2, 1]], offered) is None


def test_many_groups_cost_no_product_of_their_numbers() -> None:
    count = 20_000
    offered = [pair for i in range(count) for pair in ((f"w{i}", "same"), (f"b{i}", i))]
    started = time.process_time()
    match = match_in_order([["same", i] for i in range(count)], offered)
    assert match is not None and match[-1] == [f"w{count - 1}", f"b{count - 1}"]
    assert time.process_time() - started < 10
