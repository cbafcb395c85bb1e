"""What is taken and under which names: globs, keys, wrappers, collisions, ties, ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import AmbiguousError, IncompleteError, NameCollisionError, UnsupportedError, UsageError
from tests.kit.runs.cases import assert_same, load_folder, same_bits


def saved(folder: Path, content: object, name: str = "a.pt") -> str:
    torch.save(content, folder / name)
    return str(folder / name)


def trained(names: list[str] | None = None) -> tuple[torch.nn.Module, dict[str, Any]]:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    adam = torch.optim.AdamW(net.parameters(), lr=0.5)
    net(torch.ones(3)).sum().backward()
    adam.step()
    state = adam.state_dict()
    if names:
        state["param_groups"][0]["param_names"] = names
    return net, state


class TestNames:
    def test_wrapper_prefixes_are_removed_and_the_optimizer_follows(self, tmp_path: Path) -> None:
        net, state = trained()
        wrapped = {f"module._orig_mod.{k}": v for k, v in net.state_dict().items()}
        state["state"] = {
            f"module._orig_mod.{k}": v for k, v in zip(net.state_dict(), state["state"].values(), strict=True)
        }
        state["param_groups"][0]["params"] = list(state["state"])
        src = saved(tmp_path, {"model": wrapped, "optim": state})
        shardckpt.consolidate(src, str(tmp_path / "out"), part="all")
        found = load_folder(tmp_path / "out")
        assert {n: found[n] for n in net.state_dict()}.keys() == net.state_dict().keys()
        assert "0.weight/exp_avg" in found
        groups = json.loads((tmp_path / "out" / "param_groups.json").read_text())
        assert groups["param_groups"][0]["params"] == list(net.state_dict())

    def test_two_names_that_become_one_are_refused(self, tmp_path: Path) -> None:
        src = saved(tmp_path, {"a.w": torch.ones(1), "_orig_mod.a.w": torch.zeros(1)})
        with pytest.raises(NameCollisionError, match=r"a\.w.*_orig_mod\.a\.w"):
            shardckpt.consolidate(src, str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()

    def test_a_dotted_key_and_a_nest_that_collide_are_refused(self, tmp_path: Path) -> None:
        src = saved(tmp_path, {"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}})
        with pytest.raises(NameCollisionError):
            shardckpt.consolidate(src, str(tmp_path / "out"))

    def test_odd_names_survive(self, tmp_path: Path) -> None:
        odd = {"a\nb": torch.ones(1), "\x1b[31m": torch.ones(2), "\u00fc \U0001f600": torch.ones(3), "": torch.ones(4)}
        shardckpt.consolidate(saved(tmp_path, {"model": odd}), str(tmp_path / "out"))
        found = load_folder(tmp_path / "out")
        assert {n for n in odd if n} <= set(found)


class TestGlobs:
    def test_include_and_exclude_match_final_names(self, fixtures: Path, tmp_path: Path) -> None:
        src = str(fixtures / "dcp_fsdp2_llama_w2" / "ckpt")
        shardckpt.consolidate(src, str(tmp_path / "out"), include=["model.layers.0.*"], exclude=["*.mlp.*"], part="all")
        found = load_folder(tmp_path / "out")
        assert found
        assert all(n.startswith("model.layers.0.") and ".mlp." not in n for n in found)
        assert any(n.endswith("/exp_avg") for n in found)

    @pytest.mark.parametrize(
        "options", [{"include": ["nope.*"]}, {"exclude": ["nope"]}, {"dtype": "bf16", "keep_fp32": ["nope"]}]
    )
    def test_a_glob_that_matches_nothing_is_refused(
        self, options: dict[str, Any], fixtures: Path, tmp_path: Path
    ) -> None:
        src = str(fixtures / "hf_pretrained_llama" / "ckpt")
        with pytest.raises(UsageError, match="nope"):
            shardckpt.consolidate(src, str(tmp_path / "out"), **options)
        assert not (tmp_path / "out").exists()

    def test_leaving_everything_out_is_refused(self, fixtures: Path, tmp_path: Path) -> None:
        src = str(fixtures / "hf_pretrained_llama" / "ckpt")
        with pytest.raises(UsageError, match="--exclude leaves nothing"):
            shardckpt.consolidate(src, str(tmp_path / "out"), exclude=["*"])
        assert not (tmp_path / "out").exists()


class TestKeys:
    def test_another_subtree_may_be_the_model(self, tmp_path: Path) -> None:
        src = saved(tmp_path, {"model": {"w": torch.ones(1)}, "ema": {"net": {"w": torch.zeros(1)}}})
        report = shardckpt.consolidate(src, str(tmp_path / "out"), model_key="ema.net")
        assert_same(load_folder(tmp_path / "out"), {"w": torch.zeros(1)})
        assert "model" in report.left_out

    def test_a_key_that_leads_nowhere_is_refused(self, tmp_path: Path) -> None:
        src = saved(tmp_path, {"model": {"w": torch.ones(1)}})
        with pytest.raises(UsageError, match="--model-key"):
            shardckpt.consolidate(src, str(tmp_path / "out"), model_key="ema")

    def test_one_of_several_optimizers_is_chosen(self, tmp_path: Path) -> None:
        net, state = trained()
        _, other = trained()
        src = saved(tmp_path, {"model": net.state_dict(), "optim_a": state, "optim_b": other})
        names = tmp_path / "names.json"
        names.write_text(json.dumps(list(net.state_dict())))
        shardckpt.consolidate(src, str(tmp_path / "out"), part="optim", optim_key="optim_b", param_names=str(names))
        found = load_folder(tmp_path / "out")
        assert same_bits(found["0.weight/exp_avg"], other["state"][0]["exp_avg"])
        assert not any(n in found for n in net.state_dict())

    @pytest.mark.parametrize("key", ["optim.pt", "optim.pt:inner", "optim"])
    def test_an_optimizer_may_be_in_a_file_of_its_own(self, key: str, tmp_path: Path) -> None:
        net, state = trained(names=list(trained()[0].state_dict()))
        folder = tmp_path / "src"
        folder.mkdir()
        saved(folder, net.state_dict(), "model.pt")
        saved(folder, {"inner": state} if key.endswith("inner") else state, "optim.pt")
        if key == "optim":
            with pytest.raises(UsageError, match="--optim-key"):
                shardckpt.consolidate(str(folder), str(tmp_path / "out"), part="all", optim_key=key)
            return
        shardckpt.consolidate(str(folder), str(tmp_path / "out"), part="all", optim_key=key)
        assert "1.bias/exp_avg_sq" in load_folder(tmp_path / "out")


class TestIds:
    def test_names_by_shape_where_only_one_way_fits(self, tmp_path: Path) -> None:
        net, state = trained()
        src = saved(tmp_path, {"model": net.state_dict(), "optim": state})
        shardckpt.consolidate(src, str(tmp_path / "out"), part="all")
        assert same_bits(load_folder(tmp_path / "out")["1.bias/exp_avg"], state["state"][3]["exp_avg"])

    def test_shapes_that_fit_in_two_ways_are_never_guessed(self, tmp_path: Path) -> None:
        net = {"a": torch.ones(2), "b": torch.ones(2)}
        state = {"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
        with pytest.raises(AmbiguousError, match="--param-names"):
            shardckpt.consolidate(saved(tmp_path, {"model": net, "optim": state}), str(tmp_path / "out"), part="all")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("text", ["5", "{", '{"a": "w"}', "[]", "{}", "[1]", '{"0": 1}', '"x"', "null"])
    def test_a_list_of_names_that_is_none_is_refused(self, text: str, tmp_path: Path) -> None:
        net, state = trained()
        (tmp_path / "names.json").write_text(text)
        src = saved(tmp_path, {"model": net.state_dict(), "optim": state})
        with pytest.raises(UsageError, match="--param-names"):
            shardckpt.consolidate(src, str(tmp_path / "out"), part="all", param_names=str(tmp_path / "names.json"))

    def test_a_list_of_names_that_is_not_there_is_the_callers_fault(self, tmp_path: Path) -> None:
        net, state = trained()
        src = saved(tmp_path, {"model": net.state_dict(), "optim": state})
        with pytest.raises(shardckpt.ShardckptError, match=r"names\.json"):
            shardckpt.consolidate(src, str(tmp_path / "out"), part="all", param_names=str(tmp_path / "names.json"))


class TestTies:
    def test_a_shared_storage_is_written_once(self, tmp_path: Path) -> None:
        weight = torch.arange(6.0).reshape(2, 3)
        src = saved(tmp_path, {"first": weight, "second": weight, "third": weight.clone()})
        report = shardckpt.consolidate(src, str(tmp_path / "out"))
        assert report.ties == {"second": "first"}, "equal values are no tie"
        assert set(load_folder(tmp_path / "out")) == {"first", "third"}

    def test_different_views_of_one_storage_are_not_tied(self, tmp_path: Path) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        tensors = {"base": base, "t": base.T, "row": base[1], "same": base}
        report = shardckpt.consolidate(saved(tmp_path, tensors), str(tmp_path / "out"))
        assert report.ties == {"same": "base"}
        assert_same(load_folder(tmp_path / "out"), {"base": base, "t": base.T.contiguous(), "row": base[1]})

    @pytest.mark.parametrize("equal", [True, False])
    def test_a_tie_that_config_states_is_believed_only_where_values_agree(self, equal: bool, tmp_path: Path) -> None:
        src = tmp_path / "src"
        src.mkdir()
        embed = torch.arange(6.0).reshape(3, 2)
        head = embed.clone() if equal else embed + 1
        save_file({"lm_head.weight": head, "model.embed_tokens.weight": embed}, src / "model.safetensors")
        (src / "config.json").write_text('{"model_type": "x", "tie_word_embeddings": true}')
        report = shardckpt.consolidate(str(src), str(tmp_path / "out"))
        if equal:
            assert report.ties == {"lm_head.weight": "model.embed_tokens.weight"}
        else:
            assert report.ties == {}
            assert any("values differ" in w for w in report.warnings)
        assert len(load_folder(tmp_path / "out")) == 2 - equal
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config == {"model_type": "x", "tie_word_embeddings": equal}

    @pytest.mark.parametrize(
        "head", [torch.ones(4, 2), torch.arange(6.0).reshape(3, 2).bfloat16()], ids=["rows", "dtype"]
    )
    def test_a_head_unlike_its_embeddings_is_not_tied_in_the_written_config(
        self, head: torch.Tensor, tmp_path: Path
    ) -> None:
        src = tmp_path / "src"
        src.mkdir()
        embed = torch.arange(6.0).reshape(3, 2)
        save_file({"lm_head.weight": head, "model.embed_tokens.weight": embed}, src / "model.safetensors")
        text = {"tie_word_embeddings": True, "hidden_size": 2}
        (src / "config.json").write_text(json.dumps({"model_type": "x", "text_config": text}))
        report = shardckpt.convert(src, tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        untied = {"tie_word_embeddings": False}
        assert config == {"model_type": "x", "text_config": {**text, **untied}, **untied}
        assert any("values differ" in warning for warning in report.warnings)


def test_a_learning_rate_in_a_tensor_is_written_as_a_number_and_this_is_told(tmp_path: Path) -> None:
    net, state = trained(["0.weight", "0.bias", "1.weight", "1.bias"])
    plain = saved(tmp_path, {"model": net.state_dict(), "optim": state})
    assert shardckpt.consolidate(plain, tmp_path / "plain", part="all").warnings == ()
    state["param_groups"][0]["lr"] = torch.tensor(0.5)
    src = saved(tmp_path, {"model": net.state_dict(), "optim": state}, "b.pt")
    report = shardckpt.consolidate(src, tmp_path / "out.pt", part="all")
    assert torch.load(tmp_path / "out.pt")["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert report.warnings == ("optim.param_groups.0.lr: a tensor among the optimizer settings, written as a number",)
    assert shardckpt.consolidate(src, tmp_path / "model").warnings[1:] == ()


class TestShapesFrom:
    def test_a_tensor_of_another_shape_is_refused(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
        save_file({"w": torch.ones(4)}, tmp_path / "b.safetensors")
        with pytest.raises(IncompleteError, match=r"found \(3,\); expected \(4,\)"):
            shardckpt.consolidate(
                str(tmp_path / "a.safetensors"), str(tmp_path / "out"), shapes_from=str(tmp_path / "b.safetensors")
            )

    def test_a_missing_tensor_is_refused(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
        save_file({"w": torch.ones(3), "v": torch.ones(1)}, tmp_path / "b.safetensors")
        with pytest.raises(IncompleteError, match=r": v is in --shapes-from"):
            shardckpt.consolidate(
                str(tmp_path / "a.safetensors"), str(tmp_path / "out"), shapes_from=str(tmp_path / "b.safetensors")
            )

    def test_a_name_that_is_tied_there_may_be_absent_here(self, tmp_path: Path) -> None:
        weight = torch.ones(3)
        both = saved(tmp_path, {"embed": weight, "head": weight})
        save_file({"embed": weight}, tmp_path / "one.safetensors")
        shardckpt.consolidate(str(tmp_path / "one.safetensors"), str(tmp_path / "out"), shapes_from=both)
        shardckpt.consolidate(both, str(tmp_path / "out2"), shapes_from=str(tmp_path / "one.safetensors"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, 1 + 2j, b"bytes", object])
def test_groups_with_odd_values_are_written_as_valid_json(value: object, tmp_path: Path) -> None:
    net, state = trained(names=list(trained()[0].state_dict()))
    state["param_groups"][0]["odd"] = value
    src = saved(tmp_path, {"model": net.state_dict(), "optim": state})
    if value is object:
        with pytest.raises(UsageError, match=r"param_groups\.0\.odd.*--allow-loss"):
            shardckpt.consolidate(src, str(tmp_path / "out"), part="all")
    report = shardckpt.consolidate(src, str(tmp_path / "out"), part="all", allow_loss=value is object)
    assert any("written as text: param_groups.0.odd" in w for w in report.warnings) == (value is object)
    text = (tmp_path / "out" / "param_groups.json").read_text()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads(text, parse_constant=refuse)
    assert shardckpt.verify(str(tmp_path / "out")).ok


def test_a_learning_rate_that_is_a_tensor_is_written_as_a_number(tmp_path: Path) -> None:
    net, state = trained(names=list(trained()[0].state_dict()))
    state["param_groups"][0]["lr"] = torch.tensor(0.25)
    src = saved(tmp_path, {"model": net.state_dict(), "optim": state})
    shardckpt.consolidate(src, str(tmp_path / "out"), part="all")
    groups = json.loads((tmp_path / "out" / "param_groups.json").read_text())
    assert groups["param_groups"][0]["lr"] == 0.25


@pytest.mark.parametrize("verb", [shardckpt.consolidate, shardckpt.convert])
def test_an_optimizer_beside_that_is_not_read_is_not_left_out_in_silence(verb: Any, tmp_path: Path) -> None:
    net, state = trained()
    (tmp_path / "src").mkdir()
    save_file(net.state_dict(), tmp_path / "src" / "model.safetensors")
    saved(tmp_path / "src", state, "optimizer.pt")
    with pytest.raises(UnsupportedError, match=r"found optimizer\.pt.*--part model.*--param-names"):
        verb(tmp_path / "src", tmp_path / "out", part="all")
    verb(tmp_path / "src", tmp_path / "out", part="model")
    names = tmp_path / "names.json"
    names.write_text(json.dumps([name for name, _ in net.named_parameters()]))
    verb(tmp_path / "src" / "optimizer.pt", tmp_path / "optim", part="optim", param_names=str(names))
    assert "1.bias/exp_avg" in load_folder(tmp_path / "optim")


def test_values_next_to_state_and_groups_of_an_optimizer_are_listed(tmp_path: Path) -> None:
    net, state = trained(["0.weight", "0.bias", "1.weight", "1.bias"])
    state |= {"ema": {"decay": 0.9, "w": torch.ones(5)}, "n": 3, "t": torch.ones(2)}
    together = saved(tmp_path, {"model": net.state_dict(), "optim": state})
    report = shardckpt.consolidate(together, tmp_path / "all", part="all")
    assert set(report.left_out) == {"optim.ema", "optim.n", "optim.t"}
    assert shardckpt.diff(together, together, part="optim").same
    changed = saved(tmp_path, {"model": net.state_dict(), "optim": {**state, "t": torch.zeros(2)}}, "changed.pt")
    [found] = shardckpt.diff(together, changed, part="optim").differences
    assert found.name == "optim.t"
    alone = saved(tmp_path, state, "optimizer.pt")
    report = shardckpt.consolidate(alone, tmp_path / "optim", part="optim")
    assert sorted(report.left_out) == ["ema", "n", "t"]


def test_a_glob_with_the_models_key_is_explained(tmp_path: Path) -> None:
    src = saved(tmp_path, {"model": {"w": torch.ones(2)}})
    with pytest.raises(UsageError, match=r"found 1 names such as w.*without its key"):
        shardckpt.consolidate(src, tmp_path / "out", include=["model.*"])
