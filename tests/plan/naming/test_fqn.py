"""Names of the unwrapped model: wrapper segments go, collisions are refused, globs match final names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import NameCollisionError, UsageError
from shardckpt.plan.naming.fqn import WRAPPERS, clean_names, make_cleaner, require_unique, select_names, strip_wrappers

plain = st.lists(st.sampled_from(["layers", "0", "w", "attn", "module_x"]), min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("_orig_mod.a.w", "a.w"),
        ("a._orig_mod.w", "a.w"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.w", "a.w"),
        ("a._checkpoint_wrapped_module._fsdp_wrapped_module.w", "a.w"),
        ("_orig_mod._orig_mod.w", "w"),
        ("_forward_module.module.a.w", "a.w"),
        ("module.a.w", "a.w"),
        ("module.module.a.w", "a.w"),
        ("module._orig_mod.module.a.w", "a.w"),
        ("_orig_mod.module.a.w", "a.w"),
        ("a.w", "a.w"),
        ("a_orig_mod.w", "a_orig_mod.w"),
    ],
)
def test_wrappers_go_in_any_nesting(stored: str, expected: str) -> None:
    assert clean_names([stored]) == {stored: expected}


def test_module_goes_only_where_every_name_starts_with_it() -> None:
    assert clean_names(["module.w", "head.w"]) == {"module.w": "module.w", "head.w": "head.w"}
    assert clean_names(["module.w", "module.module.v"]) == {"module.w": "w", "module.module.v": "module.v"}
    assert clean_names(["a.module.w"]) == {"a.module.w": "a.module.w"}


def test_two_names_that_become_one_are_refused() -> None:
    with pytest.raises(NameCollisionError, match=r"'a\.w'.*'_orig_mod\.a\.w'"):
        clean_names(["a.w", "_orig_mod.a.w"])
    with pytest.raises(NameCollisionError):
        require_unique({"x": "n", "y": "n"})


@given(st.lists(plain, unique=True, max_size=5), st.lists(st.sampled_from([*sorted(WRAPPERS), "module"]), max_size=4))
def test_cleaning_undoes_any_wrapping_of_the_whole_model(names: list[str], wrappers: list[str]) -> None:
    wrapped = [".".join([*wrappers, name]) for name in names]
    cleaned = clean_names(wrapped)
    assert list(cleaned.values()) == names
    apply = make_cleaner(wrapped)
    for name, stored in zip(names, wrapped, strict=True):
        assert apply(stored) == name, "optimizer state is named as the model is"


@pytest.mark.parametrize("other", ["module.extra.w", "_orig_mod.module.extra.w"])
def test_names_the_model_lacks_are_cleaned_as_its_own_were(other: str) -> None:
    assert make_cleaner(["module.a.w", "module.b.w"])(other) == "extra.w"


def test_a_name_of_wrappers_alone_does_not_become_nothing() -> None:
    for stored in ("module", "_orig_mod", "module.module"):
        assert all(clean_names([stored]).values()), f"{stored} would be written without a name"


NAMES = ["model.layers.0.w", "model.layers.1.w", "model.norm.w", "head.w"]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ([], [], NAMES),
        (["model.layers.*"], [], NAMES[:2]),
        (["*"], ["*norm*"], [NAMES[0], NAMES[1], NAMES[3]]),
        (["head.w", "model.norm.?"], [], NAMES[2:]),
        (["model.*"], ["*.1.w"], [NAMES[0], NAMES[2]]),
    ],
)
def test_globs_choose(include: list[str], exclude: list[str], expected: list[str]) -> None:
    assert select_names(NAMES, include, exclude) == expected


@pytest.mark.parametrize(("include", "exclude"), [(["modle.*"], []), ([], ["*.bias"]), (["HEAD.w"], [])])
def test_a_glob_that_matches_nothing_is_a_slip(include: list[str], exclude: list[str]) -> None:
    with pytest.raises(UsageError, match="matches no tensor"):
        select_names(NAMES, include, exclude)


@pytest.mark.parametrize("include", [(), ("a*",)])
def test_globs_that_leave_nothing_are_refused(include: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"--exclude leaves? nothing"):
        select_names(["a.w", "b.w"], include, ("*",))
    assert select_names([], (), ()) == []


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.w", "a.w"),
        ("_orig_mod.a.w", "a.w"),
        ("a.w", "a.w"),
        ("_orig_mod", "_orig_mod"),
        ("", ""),
    ],
)
def test_wrappers_leave_no_trace(name: str, clean: str) -> None:
    assert strip_wrappers(name) == clean
