"""Rules on whole checkpoints: model and optimizer come out in the names and shapes of the other side, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import shardckpt
from shardckpt.errors import IncompleteError, UsageError
from tests.kit.models.tiny_llama import llama_config
from tests.kit.runs.cases import same_bits

EXPERTS = {f"layers.{layer}.experts.{expert}.w1.weight": torch.randn(4, 6) for layer in range(2) for expert in range(3)}
MODEL = {**EXPERTS, "wq": torch.randn(8, 5), "wk": torch.randn(4, 5), "norm": torch.ones(5)}
RULES = """
[[rule]]
stack = {from = "layers.{l}.experts.{e}.w1.weight", over = "e", to = "layers.{l}.experts.w1", dim = 0}
[[rule]]
transpose = {name = "layers.0.experts.w1", dims = [0, 2, 1]}
[[rule]]
fuse = {from = ["wq", "wk"], to = "wqk", dim = 0}
[[rule]]
cast = {name = "norm", dtype = "bf16"}
"""


def made(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `RULES` ask for, by torch."""
    stacked = [torch.stack([tensors[f"layers.{n}.experts.{e}.w1.weight"] for e in range(3)]) for n in range(2)]
    return {
        "layers.0.experts.w1": stacked[0].transpose(1, 2),
        "layers.1.experts.w1": stacked[1],
        "wqk": torch.cat([tensors["wq"], tensors["wk"]]),
        "norm": tensors["norm"],
    }


def write(folder: Path, change: Callable[[dict[str, Any]], object] = lambda state: None) -> tuple[str, str]:
    """Write a model with its optimizer and the rules; return where they lie."""
    state = {name: {"exp_avg": 2 * value, "step": torch.tensor(3.0), "kept": 1} for name, value in MODEL.items()}
    groups = [{"params": list(state), "lr": 0.1}]
    nest = {"model": dict(MODEL), "optimizer": {"state": state, "param_groups": groups}}
    change(nest)
    torch.save(nest, folder / "src.pt")
    (folder / "rules.toml").write_text(RULES)
    return str(folder / "src.pt"), str(folder / "rules.toml")


def assert_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


@pytest.mark.parametrize("shards", [1, 3])
def test_model_and_optimizer_are_made_alike(tmp_path: Path, shards: int) -> None:
    src, rules = write(tmp_path)
    if shards > 1:
        shardckpt.reshard(src, str(tmp_path / "sharded"), world_size=shards, to="dcp")
        src = str(tmp_path / "sharded")
    report = shardckpt.consolidate(src, str(tmp_path / "out.pt"), part="all", rules=rules, rename=["norm=final.norm"])
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = made(MODEL)
    expected["final.norm"] = expected.pop("norm").bfloat16()
    assert_tensors(found["model"], expected)
    moments = {name: 2 * value for name, value in made(MODEL).items()}
    moments["final.norm"] = moments.pop("norm")
    state = found["optimizer"]["state"]
    assert_tensors({name: slots["exp_avg"] for name, slots in state.items()}, moments)
    assert all(slots["step"] == 3 and slots["kept"] == 1 for slots in state.values())
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "params": list(found["model"])}]
    assert report.cast == {"float32 -> bfloat16": 1}


def test_globs_match_new_names_and_dropped_tensors_are_reported(tmp_path: Path) -> None:
    src, rules = write(tmp_path)
    with (tmp_path / "rules.toml").open("a") as file:
        file.write('[[rule]]\ndrop = {name = "wqk"}\n')
    report = shardckpt.consolidate(src, str(tmp_path / "out"), rules=rules, include=["layers.1.*"], part="all")
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["layers.1.experts.w1"]
    assert set(load_file(tmp_path / "out" / "optimizer.safetensors")) == {
        "layers.1.experts.w1/exp_avg",
        "layers.1.experts.w1/step",
    }
    assert "wq (by a rule)" in report.left_out
    with pytest.raises(UsageError, match="matches no tensor"):
        shardckpt.consolidate(src, str(tmp_path / "x"), rules=rules, include=["wq"])


def test_diff_compares_through_rules(tmp_path: Path) -> None:
    src, rules = write(tmp_path)
    (tmp_path / "rules.toml").write_text(RULES.rpartition("[[rule]]")[0])
    shardckpt.consolidate(src, str(tmp_path / "out"), part="all", rules=rules, to="dcp")
    assert not shardckpt.diff(src, str(tmp_path / "out")).same
    found = shardckpt.diff(src, str(tmp_path / "out"), rules=rules)
    assert found.differences == ()
    assert found.equal == 4 + 8


def _lack(state: dict[str, Any]) -> None:
    del state["optimizer"]["state"]["layers.1.experts.2.w1.weight"]


def _differ(state: dict[str, Any]) -> None:
    state["optimizer"]["state"]["wk"]["step"] = torch.tensor(4.0)


def _count(state: dict[str, Any]) -> None:
    state["optimizer"]["state"]["wk"]["kept"] = 2


def _reshape(state: dict[str, Any]) -> None:
    state["optimizer"]["state"]["wk"]["exp_avg"] = torch.ones(4)


def _part(state: dict[str, Any]) -> None:
    names = state["optimizer"]["param_groups"][0]["params"]
    names.remove("wk")
    state["optimizer"]["param_groups"].append({"params": ["wk"], "lr": 0.1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_lack, r"layers\.1\.experts\.2\.w1\.weight has no"),
        (_differ, "the parts of wqk/step differ"),
        (_count, "parts have different scalars"),
        (_reshape, "exp_avg is not shaped like its parameter"),
        (_part, "several groups"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_before_a_byte_is_written(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    src, rules = write(tmp_path, change)
    with pytest.raises((UsageError, IncompleteError), match=message):
        shardckpt.consolidate(src, str(tmp_path / "out"), rules=rules, part="all")
    assert not (tmp_path / "out").exists()
    shardckpt.consolidate(src, str(tmp_path / "out"), rules=rules)


def test_tied_tensors_stay_tied_where_rules_make_them_alike(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"embed": weight, "head": weight, "twin": weight.clone()}, tmp_path / "src.pt")
    turn = '[[rule]]\ntranspose = {name = "NAME", dims = [1, 0]}\n'
    for name, pattern, ties in (("both", ".*", {"head": "embed"}), ("one", "head", {})):
        (tmp_path / f"{name}.toml").write_text(turn.replace("NAME", pattern))
        rules = str(tmp_path / f"{name}.toml")
        assert shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / f"{name}.pt"), rules=rules).ties == ties
    assert torch.load(tmp_path / "one.pt")["head"].shape == (3, 2)


def test_one_rename_is_as_good_as_a_list_of_one(tmp_path: Path) -> None:
    src, _ = write(tmp_path)
    shardckpt.consolidate(src, tmp_path / "out", rename="wq=other", include="other")
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["other"]


def test_a_file_or_set_that_is_not_there_is_the_callers_fault(tmp_path: Path) -> None:
    src, _ = write(tmp_path)
    with pytest.raises(UsageError, match="llama-to-torchtitan"):
        shardckpt.consolidate(src, str(tmp_path / "out"), rules="no-such-set")


LLAMA = llama_config(32, 16, 24, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LLAMA).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    told = {key: value for key, value in LLAMA.to_dict().items() if key in vars(MixtralConfig())}
    MixtralForCausalLM(MixtralConfig(**{**told, "model_type": "mixtral"}, num_local_experts=3)).save_pretrained(folder)
    return folder


def applied(folder: Path, rules: str, target: Path) -> dict[str, torch.Tensor]:
    shardckpt.consolidate(str(folder), str(target), rules=rules)
    return load_file(target / "model.safetensors")


INVERSES = {
    "llama-to-torchtitan": "torchtitan-to-llama",
    "llama-to-megatron": "megatron-to-llama",
    "mixtral-to-torchtitan": "torchtitan-to-mixtral",
    "mixtral-stack-experts": "mixtral-unstack-experts",
}


@pytest.mark.parametrize(("there", "back"), INVERSES.items())
def test_sets_that_come_along_undo_each_other(
    there: str, back: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(there.partition("-")[0])
    given = load_file(folder / "model.safetensors")
    found = applied(folder, there, tmp_path / "there")
    assert not any(name.startswith("model.layers.") and there != "mixtral-stack-experts" for name in found)
    assert_tensors(applied(tmp_path / "there", back, tmp_path / "back"), given)


def test_torchtitans_llama_has_its_names_shapes_and_rows(llama: Path, tmp_path: Path) -> None:
    given, found = load_file(llama / "model.safetensors"), applied(llama, "llama-to-torchtitan", tmp_path / "out")
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    layer = {
        **dict.fromkeys(("attention.wq.weight", "attention.wo.weight"), (16, 16)),
        **dict.fromkeys(("attention.wk.weight", "attention.wv.weight"), (8, 16)),
        **dict.fromkeys(("feed_forward.w1.weight", "feed_forward.w3.weight"), (24, 16)),
        "feed_forward.w2.weight": (16, 24),
        **dict.fromkeys(("attention_norm.weight", "ffn_norm.weight"), (16,)),
    }
    layers = {f"layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    assert shapes == {"tok_embeddings.weight": (32, 16), "norm.weight": (16,), "output.weight": (32, 16), **layers}
    for name, heads in (("q", 4), ("k", 2)):  # the published formula between the two ways to turn pairs of rows
        ours = given[f"model.layers.1.self_attn.{name}_proj.weight"]
        rows = ours.view(heads, 2, ours.shape[0] // heads // 2, 16).transpose(1, 2).reshape(ours.shape)
        assert same_bits(found[f"layers.1.attention.w{name}.weight"], rows.contiguous())
    assert same_bits(found["layers.1.feed_forward.w1.weight"], given["model.layers.1.mlp.gate_proj.weight"])


def test_megatrons_llama_has_its_queries_keys_and_values_by_group(llama: Path, tmp_path: Path) -> None:
    given, found = load_file(llama / "model.safetensors"), applied(llama, "llama-to-megatron", tmp_path / "out")
    q, k, v = (given[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    by_group = torch.cat([q.view(2, 8, 16), k.view(2, 4, 16), v.view(2, 4, 16)], 1).reshape(32, 16)
    assert same_bits(found["decoder.layers.0.self_attention.linear_qkv.weight"], by_group)
    fc1 = torch.cat([given["model.layers.0.mlp.gate_proj.weight"], given["model.layers.0.mlp.up_proj.weight"]])
    assert same_bits(found["decoder.layers.0.mlp.linear_fc1.weight"], fc1)
    assert {name for name in found if "layers" not in name} == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(UsageError, match="--config-from"):
        applied(tmp_path / "out", "megatron-to-llama", tmp_path / "back")


def test_stacked_experts_are_what_transformers_modules_hold(mixtral: Path, tmp_path: Path) -> None:
    held = MixtralForCausalLM.from_pretrained(mixtral).state_dict()
    assert_tensors(
        applied(mixtral, "mixtral-stack-experts", tmp_path / "out"), {k: v.contiguous() for k, v in held.items()}
    )
    found = applied(mixtral, "mixtral-to-torchtitan", tmp_path / "titan")
    given = load_file(mixtral / "model.safetensors")
    w2 = [given[f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight"] for e in range(3)]
    assert same_bits(found["layers.0.moe.experts.w2"], torch.stack(w2))
    assert found["layers.0.moe.router.gate.weight"].shape == (3, 16)


def test_a_model_with_tied_embeddings_has_no_head_to_rename(tmp_path: Path) -> None:
    given = {"model.embed_tokens.weight": torch.ones(4, 2), "model.norm.weight": torch.ones(2)}
    layer = "model.layers.0."
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"):
        given[f"{layer}{name}.weight"] = torch.ones(2, 2)
    for name in ("mlp.up_proj", "mlp.down_proj"):
        given[f"{layer}{name}.weight"] = torch.ones(2, 2)
    for name in ("input_layernorm", "post_attention_layernorm"):
        given[f"{layer}{name}.weight"] = torch.ones(2)
    save_file(given, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 1, "num_key_value_heads": 1}))
    assert "tok_embeddings.weight" in applied(tmp_path, "llama-to-torchtitan", tmp_path.parent / "tied")
