"""Where model and optimizers are, by the rules of the shapes that frameworks save, and by the options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardckpt.boxes import full_box
from shardckpt.errors import AmbiguousError, UsageError
from shardckpt.manifest import Manifest, ObjectEntry, Path, Piece, Span, TensorEntry
from shardckpt.plan.naming.sections import find_key, find_sections, model_paths, split_flat_names


def holding(tensors: list[Path], objects: list[Path] | None = None) -> Manifest:
    entries = {p: TensorEntry(p, (1,), "float32", (Piece(full_box((1,)), "a", Span(0, 4)),)) for p in tensors}
    return Manifest("test", {"a": 4}, entries, {p: ObjectEntry(p, 1) for p in objects or []})


OPTIM: list[Path] = [("state", "w", "exp_avg")]
GROUPS: list[Path] = [("param_groups", 0, "lr")]


def below(*root: str | int) -> list[Path]:
    return [(*root, *p) for p in OPTIM]


def groups(*root: str | int) -> list[Path]:
    return [(*root, *p) for p in GROUPS]


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_the_model_has_one_of_three_names(key: str) -> None:
    found = find_sections(holding([(key, "w"), ("ema", "w"), *below("optim")], groups("optim")))
    assert (found.model, found.optimizers, found.others) == ((key,), (("optim",),), (("ema",),))


def test_inner_tensors_count_as_the_tensor_that_they_make_up() -> None:
    inner: list[Path] = [("a.weight", "qdata"), ("a.weight", "scale")]
    record: list[Path] = [("a.weight", "__tensor_subclass__")]
    more: list[Path]
    for more in ([], [("b.weight",)]):
        manifest = holding([*inner, *more], [*record, ("epoch",)])
        found = find_sections(manifest)
        assert (found.model, found.others) == ((), (("epoch",),))
        assert list(model_paths(manifest, found)) == [*inner, *more]


def test_the_only_subtree_with_tensors_is_the_model() -> None:
    found = find_sections(holding([("net", "w"), *below("o")], [*groups("o"), ("epoch",)]))
    assert (found.model, found.others) == (("net",), (("epoch",),))


def test_without_a_subtree_the_top_is_the_model() -> None:
    found = find_sections(holding([("w",), ("layers.0.b",)]))
    assert (found.model, found.optimizers, found.others) == ((), (), ())
    found = find_sections(holding([("a", "w"), ("b", "w")]))
    assert found.model == ()


@pytest.mark.parametrize("name", ["layers.0.w", "weight"])
def test_what_lies_deeper_than_a_flat_state_dict_is_another_part(name: str) -> None:
    manifest = holding([("b",), (name,), ("trainer", "dotted.key"), ("ema", "w")], [("trainer", "epoch")])
    found = find_sections(manifest)
    assert (found.model, found.others) == ((), (("trainer",), ("ema",)))
    assert list(model_paths(manifest, found)) == [("b",), (name,)]


def test_a_number_beside_subtrees_is_no_flat_state_dict() -> None:
    manifest = holding([("step",), ("encoder", "w"), ("decoder", "w")])
    found = find_sections(manifest)
    assert (found.model, found.others) == ((), ())
    assert len(list(model_paths(manifest, found))) == 3


def test_an_optimizer_is_what_holds_state_and_groups() -> None:
    assert find_sections(holding([("model", "w"), *below("o")])).optimizers == (), "state alone is not enough"
    found = find_sections(holding([("model", "w"), *below("opt", "adam")], groups("opt", "adam")))
    assert found.optimizers == (("opt", "adam"),)
    found = find_sections(holding([*below("optimizer_states", 0)], groups("optimizer_states", 0)))
    assert found.optimizers == (("optimizer_states", 0),)


def test_nothing_below_an_optimizer_of_the_manifest_is_the_models() -> None:
    paths: list[Path] = [("m", "w"), ("o", "slow", "w"), *below("o", "base")]
    values = [*groups("o", "base"), ("o", "k")]
    for root, model in (((), ("m",)), (("app",), ("app",))):
        at = [(*root, *path) for path in paths]
        manifest = replace(holding(at, [(*root, *path) for path in values]), optimizers=((*root, "o"),))
        found = find_sections(manifest)
        assert (found.model, found.optimizers) == (model, ((*root, "o", "base"),))
        assert found.others == ((*root, "o", "slow"), (*root, "o", "k"))
        assert list(model_paths(manifest, found)) == [(*root, "m", "w")]
    found = find_sections(manifest, model_key="app.o.slow")
    assert list(model_paths(manifest, found)) == [("app", "o", "slow", "w")], "an option overrides the rule"


def test_an_optimizer_that_is_not_wanted_is_no_model() -> None:
    manifest = holding([("m", "w"), *below("a"), *below("b")], [*groups("a"), *groups("b")])
    found = find_sections(manifest, optim_key="b")
    assert (found.model, found.optimizers, found.others) == (("m",), (("b",),), (("a",),))


def test_a_flattened_optimizer_is_one_too() -> None:
    flat: list[Path] = [("optim", "state.layers.0.w.exp_avg")]
    found = find_sections(holding([("model", "layers.0.w"), *flat], [("optim", "param_groups.layers.0.w.lr")]))
    assert found.optimizers == (("optim",),)


def test_a_model_with_a_module_named_state_is_no_optimizer() -> None:
    found = find_sections(holding([("model", "state", "w"), ("model", "head", "w")]))
    assert (found.model, found.optimizers) == (("model",), ())


def test_names_with_dots_of_old_folders_are_split() -> None:
    """Folders of before torch 2.3 keep no paths; `optim.` and `model.` at the start tell the parts."""
    flat = holding([("model.w",), ("optim.state.w.exp_avg",)], [("optim.param_groups.w.lr",), ("epoch",)])
    split = split_flat_names(flat)
    assert list(split.tensors) == [("model", "w"), ("optim", "state.w.exp_avg")]
    found = find_sections(split)
    assert (found.model, found.optimizers, found.others) == (("model",), (("optim",),), (("epoch",),))


def test_names_with_dots_of_a_plain_model_are_left() -> None:
    plain = holding([("model.embed.w",), ("model.state.w",)])
    assert split_flat_names(plain) is plain
    nested = holding([("model", "w"), ("optim.state.w.exp_avg",)])
    assert split_flat_names(nested) is nested


def test_two_models_need_a_choice() -> None:
    both = holding([("a", "model", "w"), ("b", "model", "w")])
    with pytest.raises(AmbiguousError, match=r"a\.model, b\.model.*--model-key"):
        find_sections(both)
    assert find_sections(both, "b.model").model == ("b", "model")


def test_files_of_a_folder_are_parts_by_their_stem() -> None:
    found = find_sections(
        holding(
            [("model.pt", "w"), *below("optim_a.pt"), *below("optim_b.pt")], groups("optim_a.pt") + groups("optim_b.pt")
        )
    )
    assert found.model == ("model.pt",)
    assert found.optimizers == (("optim_a.pt",), ("optim_b.pt",))


@pytest.mark.parametrize("key", ["optim.pt:adam", "optim.pt.adam"])
def test_a_key_may_name_a_file_and_what_is_in_it(key: str) -> None:
    many = holding([("model.pt", "w"), *below("optim.pt", "adam"), *below("optim.pt", "sgd")])
    assert find_key(many, key, "--optim-key") == ("optim.pt", "adam")
    assert find_sections(many, optim_key=key).optimizers == (("optim.pt", "adam"),)


def test_a_key_that_leads_nowhere_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"--model-key 'modle'.*model, ema"):
        find_sections(holding([("model", "w"), ("ema", "w")]), "modle")


def test_a_key_where_all_tensors_lie_side_by_side_is_to_be_left_out() -> None:
    with pytest.raises(UsageError, match="omit --optim-key"):
        find_key(holding([("w",), ("b",)]), "optimizer.pt", "--optim-key")


def test_nothing_is_dropped_in_silence() -> None:
    manifest = holding(
        [("model", "w"), ("ema", "net", "w"), *below("optim")],
        [*groups("optim"), ("trainer", "epoch"), ("trainer", "step"), ("args",)],
    )
    found = find_sections(manifest)
    assert set(found.others) == {("ema",), ("trainer",), ("args",)}
    covered = (found.model, *found.optimizers, *found.others)
    for path in [*manifest.tensors, *manifest.objects]:
        assert sum(path[: len(part)] == part for part in covered) == 1
