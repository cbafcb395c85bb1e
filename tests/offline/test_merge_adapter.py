"""A LoRA adapter merged into its base: as peft merges it, block by block, or refused by name."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardckpt
from shardckpt.errors import FormatError, ShardckptError, UnsafeError, UnsupportedError, UsageError
from shardckpt.plan.adapter import merge_plan as plans
from tests.kit.runs.cases import same_bits

PREFIX = "base_model.model."


def write(folder: Path, base: dict[str, torch.Tensor], own: dict[str, torch.Tensor], **config: Any) -> tuple[str, str]:
    """Write a base and an adapter; return where they lie."""
    (folder / "base").mkdir(parents=True)
    (folder / "adapter").mkdir()
    save_file(base, folder / "base" / "model.safetensors", {"format": "pt"})
    save_file({PREFIX + name: value for name, value in own.items()}, folder / "adapter" / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, **config}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    return str(folder / "base"), str(folder / "adapter")


def merged(folder: Path, base: dict[str, torch.Tensor], own: dict[str, torch.Tensor], **config: Any) -> Any:
    places = write(folder, base, own, **config)
    shardckpt.merge_adapter(*places, folder / "out")
    return load_file(folder / "out" / "model.safetensors")


def test_a_real_adapter_equals_what_peft_made_of_it(fixtures: Path, tmp_path: Path) -> None:
    case = fixtures / "peft_lora_llama"
    report = shardckpt.merge_adapter(case / "base", case / "ckpt", tmp_path / "out")
    found, truth = load_file(tmp_path / "out" / "model.safetensors"), load_file(case / "truth_merged.safetensors")
    base = load_file(case / "base" / "model.safetensors")
    assert set(found) == set(truth)
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-6, atol=1e-7)
    changed = {name for name in truth if not torch.equal(found[name], base[name])}
    assert changed == {name for name in truth if not torch.equal(truth[name], base[name])}
    assert len(changed) == 6
    assert report.cast == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [3, 700])
def test_sums_are_made_wide_and_rounded_once(tmp_path: Path, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    w = torch.randn(rows, 900).to(dtype)
    a, b = torch.randn(2, 900), torch.randn(rows, 2)
    found = merged(tmp_path, {"m.weight": w, "n": torch.ones(1)}, {"m.lora_A.weight": a, "m.lora_B.weight": b})
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = w.to(wide) + (b.to(wide) @ a.to(wide)) * 3
    assert found["m.weight"].dtype == dtype
    if dtype in (torch.bfloat16, torch.float16):
        assert (found["m.weight"] != expected.to(dtype)).float().mean() < 1e-3, "but for sums at a border of rounding"
    torch.testing.assert_close(found["m.weight"].to(wide), expected.to(dtype).to(wide), rtol=1e-2, atol=1e-5)
    assert torch.equal(found["n"], torch.ones(1))


@pytest.mark.parametrize("kind", ["linear", "conv1d", "embedding", "conv2d"])
def test_every_kind_of_layer_and_the_scale_of_its_own(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    w, a, b = torch.randn(6, 5), torch.randn(4, 5), torch.randn(6, 4)
    config: dict[str, Any] = {"rank_pattern": {"x.m": 4}, "alpha_pattern": {r"x\.m": 8}, "use_rslora": True}
    names = {"x.m.lora_A.weight": a, "x.m.lora_B.weight": b}
    added = b @ a
    if kind == "conv1d":
        w, added, config["fan_in_fan_out"] = w.T.contiguous(), added.T, True
    elif kind == "embedding":
        w, added = w.T.contiguous(), added.T
        names = {"x.m.lora_embedding_A": a, "x.m.lora_embedding_B": b}
    elif kind == "conv2d":
        w, a = torch.randn(6, 5, 3, 2), torch.randn(4, 5, 3, 2)
        names = {"x.m.lora_A.weight": a, "x.m.lora_B.weight": b.reshape(6, 4, 1, 1)}
        added = (b @ a.reshape(4, -1)).reshape(w.shape)
    other = {"y.m.weight": torch.zeros(2, 3)}
    names |= {"y.m.lora_A.weight": torch.ones(2, 3), "y.m.lora_B.weight": torch.ones(2, 2)}
    found = merged(tmp_path, {"x.m.weight": w, **other}, names, **{**config, "fan_in_fan_out": kind == "conv1d"})
    torch.testing.assert_close(found["x.m.weight"], w + added * 8 / sqrt(4))
    torch.testing.assert_close(found["y.m.weight"], torch.full((2, 3), 2 * 6 / sqrt(2)))


@pytest.mark.parametrize("batch", [1 << 16, 1 << 20])
def test_blocks_of_any_size_give_the_same(tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardckpt.offline.write import stream

    torch.manual_seed(2)
    w = torch.randn(3, 40_000)  # a row is larger than the smaller batch
    own = {"m.lora_A.weight": torch.randn(2, 40_000), "m.lora_B.weight": torch.randn(3, 2)}
    monkeypatch.setattr(stream, "_LOCAL_BATCH_BYTES", batch)
    found = merged(tmp_path, {"m.weight": w}, own)["m.weight"]
    torch.testing.assert_close(found, w + 3 * own["m.lora_B.weight"] @ own["m.lora_A.weight"])


def test_tensors_that_were_trained_in_full_replace_those_of_the_base(tmp_path: Path) -> None:
    base = {"head.weight": torch.zeros(3, 2, dtype=torch.bfloat16), "m.bias": torch.zeros(3), "k": torch.ones(2)}
    own = {"head.weight": torch.full((3, 2), 1.5), "m.base_layer.bias": torch.ones(3)}
    found = merged(tmp_path, base, own)
    assert same_bits(found["head.weight"], torch.full((3, 2), 1.5, dtype=torch.bfloat16))
    assert torch.equal(found["m.bias"], torch.ones(3))
    assert torch.equal(found["k"], base["k"])


def test_a_sharded_base_and_other_targets(tmp_path: Path) -> None:
    w, a, b = torch.randn(8, 4), torch.randn(2, 4), torch.randn(8, 2)
    places = write(tmp_path, {"m.weight": w}, {"m.lora_A.weight": a, "m.lora_B.weight": b})
    torch.save({"model": {"m.weight": w}}, tmp_path / "base.pt")
    shardckpt.reshard(tmp_path / "base.pt", tmp_path / "sharded", world_size=3, to="dcp")
    shardckpt.merge_adapter(places[0], places[1], tmp_path / "one")
    shardckpt.merge_adapter(tmp_path / "sharded", places[1], tmp_path / "two", to="dcp")
    assert shardckpt.diff(tmp_path / "one", tmp_path / "two").same
    shardckpt.merge_adapter(places[0], places[1], tmp_path / "m.pt", dry_run=True)
    assert not (tmp_path / "m.pt").exists()


@pytest.mark.parametrize(
    ("config", "name", "is_warned"),
    [
        ({"tie_word_embeddings": True}, "model.embed_tokens", True),
        ({"text_config": {"tie_word_embeddings": True}}, "model.embed_tokens", True),
        ({"tie_word_embeddings": False}, "model.embed_tokens", False),
        ({"tie_word_embeddings": True}, "model.norm", False),
    ],
)
def test_changed_embeddings_are_told_where_the_config_ties_the_head_to_them(
    tmp_path: Path, config: dict[str, Any], name: str, is_warned: bool
) -> None:
    base, adapter = write(tmp_path, {f"{name}.weight": torch.zeros(3, 2)}, {f"{name}.weight": torch.ones(3, 2)})
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    report = shardckpt.merge_adapter(base, adapter, tmp_path / "out")
    assert any("the merged model's head changes too" in warning for warning in report.warnings) == is_warned


def test_the_config_of_a_model_whose_head_is_untied_says_so_in_its_parts_too(tmp_path: Path) -> None:
    embed = torch.zeros(3, 2)
    base, adapter = write(tmp_path, {"model.embed_tokens.weight": embed}, {"lm_head.weight": embed + 1})
    config = {"model_type": "x", "text_config": {"tie_word_embeddings": True, "a": 1}, "vision_config": {"b": 2}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    shardckpt.merge_adapter(base, adapter, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    text = {"tie_word_embeddings": False, "a": 1}
    assert found == {**config, "text_config": text, "tie_word_embeddings": False}
    shardckpt.merge_adapter(base, adapter, tmp_path / "one.safetensors")
    assert sorted(load_file(tmp_path / "one.safetensors")) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_both_names_of_a_tied_weight_change_together_and_a_trained_head_is_its_own(tmp_path: Path) -> None:
    embed = torch.randn(6, 4)
    torch.save({"embed.weight": embed, "head.weight": embed}, tmp_path / "base.pt")
    own = {"embed.lora_embedding_A": torch.ones(2, 6), "embed.lora_embedding_B": torch.ones(4, 2)}
    _, adapter = write(tmp_path / "a", {"x": embed}, own)
    shardckpt.merge_adapter(tmp_path / "base.pt", adapter, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt")
    torch.testing.assert_close(found["head.weight"], embed + 6)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    _, adapter = write(tmp_path / "b", {"x": embed}, {"head.weight": torch.zeros(6, 4)})
    report = shardckpt.merge_adapter(tmp_path / "base.pt", adapter, tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["embed.weight"], embed)
    assert not found["head.weight"].any()
    assert any("tied in the base and differ now" in warning for warning in report.warnings)


FACTORS = {"m.lora_A.weight": torch.ones(2, 4), "m.lora_B.weight": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("own", "config", "kind", "message"),
    [
        (FACTORS, {"use_dora": True}, FormatError, "must have magnitudes.*found none"),
        ({**FACTORS, "m.lora_magnitude_vector": torch.ones(2)}, {"use_dora": True}, FormatError, "magnitudes.*fit"),
        (FACTORS, {"peft_type": "IA3"}, UnsupportedError, "only LoRA.*IA3"),
        (FACTORS, {"layer_replication": [[0, 1]]}, UnsupportedError, "replicated"),
        ({**FACTORS, "m.lora_B.bias": torch.ones(3)}, {}, UsageError, "adds a bias to m"),
        ({**FACTORS, "m.lora_A.bias": torch.ones(3)}, {}, UnsupportedError, "meaning is unknown"),
        (FACTORS, {"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "base that peft changed.*pissa_niter_4"),
        (FACTORS, {"init_lora_weights": "olora"}, UnsupportedError, "base that peft changed.*olora"),
        ({"m.lora_A.weight": torch.ones(2, 4)}, {}, FormatError, "only one factor"),
        (FACTORS, {"r": 3}, FormatError, "do not fit its rank"),
        (FACTORS, {"rank_pattern": {"(": 2}}, FormatError, "must be a regular expression"),
        (FACTORS, {"rank_pattern": {"(a+)+b": 2}}, UnsupportedError, "could take forever"),
        (FACTORS, {"rank_pattern": {"(" * 400 + ")" * 400: 2}}, UnsupportedError, "could take forever"),
        (FACTORS, {"rank_pattern": {"a" * 5000: 2}}, UnsupportedError, "too long"),
        (FACTORS, {"rank_pattern": ["x"]}, FormatError, "rank_pattern must map"),
        (FACTORS, {"rank_pattern": {"m": "x"}}, FormatError, "must be an integer"),
        (FACTORS, {"r": 2.0}, FormatError, "must be an integer"),
        (FACTORS, {"lora_alpha": "x"}, FormatError, "lora_alpha"),
        (FACTORS, {"lora_alpha": True}, FormatError, "lora_alpha"),
        (FACTORS, {"lora_alpha": 10**400}, FormatError, "lora_alpha"),
        (FACTORS, {"lora_alpha": float("inf")}, FormatError, "JSON"),
        ({**FACTORS, "m.lora_B.weight": torch.ones(5, 2)}, {}, UsageError, "do not fit its weight"),
        (
            {"gone.lora_A.weight": torch.ones(2, 4), "gone.lora_B.weight": torch.ones(3, 2)},
            {},
            UsageError,
            "gone.weight",
        ),
        ({"m.weight": torch.ones(3)}, {}, UsageError, "another shape"),
        ({"m.weight": torch.ones(3, 4, dtype=torch.int64)}, {}, UnsupportedError, "must have a float type"),
    ],
    ids=[str(i) for i in range(25)],
)
def test_what_cannot_be_merged_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, own: dict[str, torch.Tensor], config: dict[str, Any], kind: type[ShardckptError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        merged(tmp_path, {"m.weight": torch.zeros(3, 4)}, own, **config)
    assert not (tmp_path / "out").exists()


def test_options_are_those_of_consolidate_and_a_typo_is_named(tmp_path: Path) -> None:
    merged, consolidated = (
        get_args(get_type_hints(verb, include_extras=True)["options"])[0].__annotations__.keys()
        for verb in (shardckpt.merge_adapter, shardckpt.consolidate)
    )
    assert merged | {"base"} == consolidated
    with pytest.raises(TypeError, match=r"merge_adapter\(\) got an unexpected keyword argument 'dtpye'"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", dtpye="bf16")  # type: ignore[call-arg]


def test_a_folder_without_an_adapter_is_the_callers_fault(tmp_path: Path) -> None:
    base, _ = write(tmp_path, {"m.weight": torch.zeros(3, 4)}, FACTORS)
    with pytest.raises(UsageError, match=r"no adapter: adapter_config\.json is missing\. The base comes first"):
        shardckpt.merge_adapter(base, base, tmp_path / "out")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_adapter_in_the_folder_of_its_base_is_found_there(suffix: str, tmp_path: Path) -> None:
    base, adapter = write(tmp_path, {"m.weight": torch.zeros(3, 4)}, FACTORS)
    for file in Path(adapter).iterdir():
        shutil.move(file, base)
    if suffix == "bin":
        torch.save(load_file(Path(base) / "adapter_model.safetensors"), Path(base) / "adapter_model.bin")
        (Path(base) / "adapter_model.safetensors").unlink()
    shardckpt.merge_adapter(base, base, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["m.weight"], torch.full((3, 4), 6.0))
    shardckpt.consolidate(base, tmp_path / "alone")
    for written in ("out", "alone"):  # transformers would look for an adapter there
        assert not (tmp_path / written / "adapter_config.json").exists()


def test_a_base_without_floats_and_a_sum_that_overflows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"quantized.*found m\.weight in int64"):
        merged(tmp_path / "a", {"m.weight": torch.zeros(3, 4, dtype=torch.int64)}, FACTORS)
    big = torch.full((3, 4), 6e4, dtype=torch.float16)
    with pytest.raises(shardckpt.errors.PrecisionError, match=r"m\.weight"):
        merged(tmp_path / "b", {"m.weight": big}, {k: 100 * v for k, v in FACTORS.items()})


@pytest.mark.parametrize(
    ("pattern", "module", "fits"),
    [
        ("q_proj", "model.layers.0.q_proj", True),
        ("proj", "model.layers.0.q_proj", False),
        (r"layers\.[01]\.q_proj", "model.layers.1.q_proj", True),
        ("model.layers.1.q_proj", "model.layers.1.q_proj", True),
    ],
)
def test_a_pattern_is_the_end_of_a_modules_name(pattern: str, module: str, fits: bool) -> None:
    shapes = {
        f"{PREFIX}{module}.lora_A.weight": (4 if fits else 2, 3),
        f"{PREFIX}{module}.lora_B.weight": (5, 4 if fits else 2),
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "rank_pattern": {pattern: 4}}
    [found] = plans.plan_merge(config, shapes, {f"{module}.weight": (5, 3)}, "x").added
    assert found.scale == (0.5 if fits else 1.0)


def test_patterns_of_very_many_alternatives_are_refused_in_time() -> None:
    names = [f"model.layers.{i}.self_attn.{kind}_proj" for i in range(8) for kind in "qkvo"]
    shapes = {f"{PREFIX}{name}.lora_{side}.weight": (2, 2) for name in names for side in "AB"}
    patterns = {f"{'(.|x)' * 6}.*z{i}": 2 for i in range(1000)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "rank_pattern": patterns}
    started = time.process_time()
    with pytest.raises(UnsafeError, match="adapter's patterns"):
        plans.plan_merge(config, shapes, {f"{name}.weight": (2, 2) for name in names}, "x")
    assert time.process_time() - started < 2


def _save_base(folder: Path, seed: int, layers: int) -> Any:
    """Write a small Llama into `base` with transformers, and return it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    model.save_pretrained(folder / "base")
    return model


def _peft(folder: Path, change: Callable[[Any], None]) -> Path:
    """Write a base and an adapter with peft itself, and what its own merge gives."""
    peft = pytest.importorskip("peft")
    model = _save_base(folder, seed=3, layers=2)
    told = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    change(told)
    wrapped = peft.get_peft_model(model, told)
    wrapped.save_pretrained(folder / "adapter")
    torch.save(wrapped.merge_and_unload().state_dict(), folder / "truth.pt")
    return folder


def _rslora(config: Any) -> None:
    config.use_rslora, config.rank_pattern, config.alpha_pattern = (
        True,
        {"down_proj": 2},
        {"layers.0.self_attn.q_proj": 5},
    )


def _whole(config: Any) -> None:
    config.modules_to_save, config.target_modules = ["lm_head"], ["embed_tokens", "v_proj"]


@pytest.mark.parametrize("change", [lambda _config: None, _rslora, _whole], ids=["plain", "rslora", "whole"])
def test_pefts_own_merge_gives_the_same(change: Callable[[Any], None], tmp_path: Path) -> None:
    folder = _peft(tmp_path, change)
    shardckpt.merge_adapter(folder / "base", folder / "adapter", folder / "out.pt")
    found, truth = torch.load(folder / "out.pt"), torch.load(folder / "truth.pt")
    assert set(found) == set(truth)
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "gaussian", "mica"])
def test_an_adapter_is_merged_into_the_base_as_saved_only_where_peft_gives_the_same(start: str, tmp_path: Path) -> None:
    folder = _peft(tmp_path, lambda config: setattr(config, "init_lora_weights", start))
    try:
        shardckpt.merge_adapter(folder / "base", folder / "adapter", folder / "out.pt")
    except UnsupportedError:
        assert start not in ("gaussian", "mica")
        return
    found, truth = torch.load(folder / "out.pt"), torch.load(folder / "truth.pt")
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 3], "lm_head": [2]}},
    ],
    ids=["saved-both", "saved-head", "lora-head", "lora-both", "tokens"],
)
def test_a_head_that_the_files_of_the_base_lack_is_merged_as_the_adapter_computes(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """transformers writes a head that is tied to the embeddings under their name alone."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(6)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True, **sizes))
    model.save_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **settings))
    for name, parameter in wrapped.named_parameters():
        is_trained = "modules_to_save.default" in name or "trainable_tokens_delta" in name
        parameter.data += torch.randn_like(parameter) * is_trained
    wrapped.save_pretrained(tmp_path / "adapter")
    report = shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    truth = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(merged(tokens).logits, truth(tokens).logits, rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("tied in the base and differ now" in warning for warning in report.warnings)


def _two_adapters(folder: Path) -> Any:
    """Write a base and two adapters with peft itself; return the wrapped model."""
    peft = pytest.importorskip("peft")
    model = _save_base(folder, seed=4, layers=1)
    first = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    second = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, first, adapter_name="a")
    wrapped.add_adapter("b", second)
    wrapped.save_pretrained(folder)
    return wrapped


def test_weighted_adapters_are_those_that_peft_concatenates(tmp_path: Path) -> None:
    wrapped = _two_adapters(tmp_path)
    wrapped.add_weighted_adapter(["a", "b"], [0.7, 0.5], "both", combination_type="cat")
    wrapped.set_adapter("both")
    truth = wrapped.merge_and_unload().state_dict()
    adapters = [tmp_path / "a", tmp_path / "b"]
    shardckpt.merge_adapter(tmp_path / "base", adapters, tmp_path / "out.pt", adapter_weights=[0.7, 0.5])
    found = torch.load(tmp_path / "out.pt")
    assert set(found) == set(truth)
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-5, atol=1e-6)


def test_adapters_without_weights_are_those_that_peft_merges_one_after_the_other(tmp_path: Path) -> None:
    truth = _two_adapters(tmp_path).merge_and_unload(adapter_names=["a", "b"]).state_dict()
    shardckpt.merge_adapter(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-5, atol=1e-6)


def test_the_sum_of_adapters_is_rounded_once_to_the_requested_dtype(tmp_path: Path) -> None:
    torch.manual_seed(5)
    w, a, b = torch.randn(300, 200), torch.randn(2, 200), torch.randn(300, 2)
    own = {"m.lora_A.weight": a, "m.lora_B.weight": b}
    base, one = write(tmp_path / "1", {"m.weight": w, "n": torch.ones(1)}, own)
    _, two = write(tmp_path / "2", {"x": w}, own, lora_alpha=2)
    shardckpt.merge_adapter(base, [one, two], tmp_path / "out", dtype="bf16", adapter_weights=[1, -0.5])
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = (w + 3 * (b @ a) + -0.5 * (b @ a)).bfloat16()
    assert found["m.weight"].dtype == found["n"].dtype == torch.bfloat16
    assert (found["m.weight"] != expected).float().mean() < 1e-3, "but for sums at a border of rounding"


@pytest.mark.parametrize(
    ("first", "second", "weights", "message"),
    [
        (FACTORS, FACTORS, [1.0], "each adapter must have a weight"),
        (FACTORS, FACTORS, [1.0, float("nan")], "finite"),
        (FACTORS, FACTORS, [1.0, "0.5"], "finite number; found '0.5'"),
        (FACTORS, FACTORS, [1.0, True], "finite number; found True"),
        (FACTORS, FACTORS, [1.0, -float("inf")], "finite number; found -inf"),
        (FACTORS, FACTORS, [1.0, 10**5000], "finite number; found an integer in 16610 bits"),
        (FACTORS, {"m.weight": torch.ones(3, 4)}, None, "sets it in full"),
        ({"m.weight": torch.ones(3, 4)}, FACTORS, None, "sets it in full"),
        ({**FACTORS, "m.base_layer.weight": torch.ones(3, 4)}, FACTORS, None, "sets it in full"),
        (FACTORS, {"n": torch.ones(2)}, [1.0, 0.5], "must have the weight 1"),
    ],
    ids=[str(i) for i in range(10)],
)
def test_adapters_that_contradict_each_other_are_refused(
    tmp_path: Path, first: Any, second: Any, weights: Any, message: str
) -> None:
    base, one = write(tmp_path / "1", {"m.weight": torch.zeros(3, 4), "n": torch.zeros(2)}, first)
    _, two = write(tmp_path / "2", {"x": torch.zeros(1)}, second)
    with pytest.raises(UsageError, match=message):
        shardckpt.merge_adapter(base, [one, two], tmp_path / "out", adapter_weights=weights)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_adapters_weights_and_a_dtype(tmp_path: Path) -> None:
    from shardckpt_cli.app import build_command

    base, one = write(tmp_path / "1", {"m.weight": torch.zeros(3, 4)}, FACTORS)
    _, two = write(tmp_path / "2", {"x": torch.zeros(1)}, FACTORS)
    weights = ["--adapter-weight", "0.5", "--adapter-weight", "2"]
    words = ["merge-adapter", base, one, two, str(tmp_path / "out"), *weights, "--dtype", "bf16", "-q"]
    build_command("merge-adapter")(words, standalone_mode=False)
    found = load_file(tmp_path / "out" / "model.safetensors")["m.weight"]
    assert torch.equal(found, torch.full((3, 4), 15.0, dtype=torch.bfloat16))


def _factors(adapter: str = "") -> dict[str, torch.Tensor]:
    return {f"m.lora_{side}{adapter}.weight": torch.randn(FACTORS[f"m.lora_{side}.weight"].shape) for side in "AB"}


def test_a_file_of_two_adapters_is_refused_by_their_names(tmp_path: Path) -> None:
    with pytest.raises(shardckpt.errors.AmbiguousError, match="several adapters; found default, reference"):
        merged(tmp_path, {"m.weight": torch.zeros(3, 4)}, _factors(".default") | _factors(".reference"))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", ["modules_to_save.", "modules_to_save.default.", ""])
def test_a_trained_module_wins_over_its_original(name: str, order: int, tmp_path: Path) -> None:
    trained, original = torch.ones(5, 4), torch.zeros(5, 4)
    own = {**_factors(".default"), f"head.{name}weight": trained, "head.original_module.weight": original}
    base = {"m.weight": torch.zeros(3, 4), "head.weight": original}
    base_folder, adapter = write(tmp_path, base, {})
    (Path(adapter) / "adapter_model.safetensors").unlink()
    torch.save({PREFIX + key: own[key] for key in [*own][::order]}, Path(adapter) / "adapter_model.bin")
    shardckpt.merge_adapter(base_folder, adapter, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["head.weight"], trained)


def test_two_names_of_one_tensor_need_equal_values(tmp_path: Path) -> None:
    base = {"m.weight": torch.zeros(3, 4), "head.weight": torch.zeros(5, 4)}
    own = {"head.modules_to_save.weight": torch.ones(5, 4), "head.weight": torch.ones(5, 4)}
    found = merged(tmp_path / "same", base, {**FACTORS, **own})
    assert torch.equal(found["head.weight"], torch.ones(5, 4))
    own["head.weight"][4, 3] = 2
    with pytest.raises(shardckpt.errors.NameCollisionError, match=r"head\.modules_to_save\.weight"):
        merged(tmp_path / "other", base, {**FACTORS, **own})
    with pytest.raises(shardckpt.errors.NameCollisionError, match=r"both be named 'base_model\.model\.head\.weight'"):
        merged(tmp_path / "third", base, {"head.weight": torch.ones(5, 4), "_orig_mod.head.weight": torch.ones(5, 4)})
    base_folder, adapter = write(tmp_path / "fourth", base, FACTORS)
    save_file(
        {**FACTORS, **{PREFIX + k: v + 1 for k, v in FACTORS.items()}}, Path(adapter) / "adapter_model.safetensors"
    )
    with pytest.raises(shardckpt.errors.NameCollisionError, match=r"both be named 'm\.lora_A'"):
        shardckpt.merge_adapter(base_folder, adapter, tmp_path / "fourth" / "out")


@pytest.mark.parametrize("place", ["_orig_mod.base_model.model.", "base_model.model._orig_mod."])
def test_the_prefix_of_torch_compile_is_not_part_of_a_name(place: str, tmp_path: Path) -> None:
    base, adapter = write(tmp_path, {"m.weight": torch.zeros(3, 4)}, FACTORS)
    save_file({place + name: value for name, value in FACTORS.items()}, Path(adapter) / "adapter_model.safetensors")
    shardckpt.merge_adapter(base, adapter, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["m.weight"], torch.full((3, 4), 6.0))


def _tied_model(kind: str) -> Any:
    """Return a small model of a class that ties its head by default."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    more = {
        "gemma": {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8},
        "cohere": {"intermediate_size": 24},
        "gpt2": {},
        "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
        "bloom": {},
    }[kind]
    return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **sizes, **ids, **more))


LAYERS = {
    "gemma": ["q_proj"],
    "cohere": ["q_proj"],
    "gpt2": ["c_attn", "c_proj"],  # the last one is square in attention
    "opt": ["q_proj"],
    "bloom": ["query_key_value"],
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved-head", "lora-head"])
def test_a_head_that_the_class_ties_is_merged_as_the_adapter_computes(
    kind: str, is_saved: bool, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    _tied_model(kind).save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "tie_word_embeddings"}
    path.write_text(json.dumps(config))
    settings = {"modules_to_save": ["lm_head"]} if is_saved else {}
    targets = [*LAYERS[kind], *([] if is_saved else ["lm_head"])]
    told = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False, **settings)
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), told)
    for name, parameter in wrapped.named_parameters():
        parameter.data += torch.randn_like(parameter) * ("modules_to_save.default" in name)
    wrapped.save_pretrained(tmp_path / "adapter")
    shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    truth = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(3, 11)[None]
    torch.testing.assert_close(found(tokens).logits, truth(tokens).logits, rtol=1e-4, atol=1e-4)


def test_changed_embeddings_that_the_class_ties_are_those_of_pefts_own_merge(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = _tied_model("gemma")
    model.save_pretrained(tmp_path / "base")
    told = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, told)
    wrapped.save_pretrained(tmp_path / "adapter")
    shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    truth = wrapped.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert set(found) == set(truth)
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_saved", [True, False], ids=["saved-modules", "saved-embeddings"])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_vocabulary_that_grew_is_merged_as_peft_does(kind: str, is_saved: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    if kind == "llama":
        model = _save_base(tmp_path, seed=7, layers=1)
    else:
        model = _tied_model(kind)
        model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(48)
    settings = {"modules_to_save": ["embed_tokens", "lm_head"]} if is_saved else {}
    told = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False, **settings)
    wrapped = peft.get_peft_model(model, told)
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    truth = wrapped.merge_and_unload().state_dict()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.vocab_size == 48
    found = loaded.state_dict()
    assert set(found) == set(truth)
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-5, atol=1e-6)


def test_a_vocabulary_that_grew_in_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    base = {"model.embed_tokens.weight": torch.zeros(6, 4), "lm_head.weight": torch.zeros(6, 4)}
    with pytest.raises(UsageError, match=r"has 8 tokens in model\.embed_tokens.*resize_token_embeddings\(8\)"):
        merged(tmp_path / "a", base, {"model.embed_tokens.weight": torch.ones(8, 4)})
    own = {
        "model.embed_tokens.lora_embedding_A": torch.ones(2, 8),
        "model.embed_tokens.lora_embedding_B": torch.ones(4, 2),
    }
    with pytest.raises(UsageError, match=r"do not fit its weight.*resize_token_embeddings\(8\)"):
        merged(tmp_path / "b", base, own)


def test_a_new_head_of_a_classifier_is_merged_as_peft_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    _save_base(tmp_path, seed=8, layers=1)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    told = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, told)
    wrapped.save_pretrained(tmp_path / "adapter")
    report = shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert any("score.weight is not in the base" in warning for warning in report.warnings)
    truth = wrapped.merge_and_unload().state_dict()
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=3).state_dict()
    assert set(found) == set(truth)
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-5, atol=1e-6)


QUANTIZED = {
    "gptq": {"m.qweight": torch.zeros(2, 3, dtype=torch.int32), "m.scales": torch.ones(1, 3).half()},
    "bitsandbytes": {"m.weight": torch.zeros(6, 1, dtype=torch.uint8), "m.weight.absmax": torch.ones(1)},
    "fp8": {"m.weight": torch.ones(3, 4).to(torch.float8_e4m3fn), "m.weight_scale_inv": torch.full((1, 1), 0.5)},
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_base_is_named_with_the_way_out(kind: str, tmp_path: Path) -> None:
    base, adapter = write(tmp_path, QUANTIZED[kind], FACTORS)
    (tmp_path / "base" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": kind}}))
    with pytest.raises(UnsupportedError, match=rf"to m\.weight; found m\.q?weight in .*{kind}.*dequantize"):
        shardckpt.merge_adapter(base, adapter, tmp_path / "out")
    if kind == "fp8":
        shardckpt.merge_adapter(base, [adapter, adapter], tmp_path / "out", dtype="bf16")
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert same_bits(found["m.weight"], torch.full((3, 4), 0.5 + 12).bfloat16())
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_the_state_dict_of_a_peft_model_comes_with_the_way_to_its_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = _save_base(tmp_path, seed=9, layers=1)
    told = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, told)
    wrapped.save_pretrained(tmp_path / "truth")
    torch.save(wrapped.state_dict(), tmp_path / "state.pt")
    report = shardckpt.consolidate(tmp_path / "state.pt", tmp_path / "out", config_from=tmp_path / "base")
    [warning] = report.warnings
    assert "are PEFT names" in warning
    assert not shardckpt.merge_adapter(tmp_path / "state.pt", tmp_path / "truth", tmp_path / "merged").warnings
    shardckpt.merge_adapter(tmp_path / "base", tmp_path / "truth", tmp_path / "usual")
    assert shardckpt.diff(tmp_path / "merged", tmp_path / "usual").same
    to_base = [r"base_model\.model\.(.*)=\1", r"(.*)\.base_layer(\..*)=\1\2"]
    to_file = r"(.*\.lora_[^.]*)\.default(.*)=\1\2"
    assert f"--exclude '*.lora_*' --rename '{to_base[0]}' --rename '{to_base[1]}'" in warning
    assert f"--include '*.lora_*' --rename '{to_file}'" in warning
    shardckpt.consolidate(tmp_path / "state.pt", tmp_path / "plain", exclude="*.lora_*", rename=to_base)
    (tmp_path / "adapter").mkdir()
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    assert not shardckpt.consolidate(tmp_path / "state.pt", file, include="*.lora_*", rename=to_file).warnings
    assert shardckpt.diff(tmp_path / "plain", tmp_path / "base").same
    found, truth = load_file(file), load_file(tmp_path / "truth" / "adapter_model.safetensors")
    assert set(found) == set(truth)
    assert all(torch.equal(found[name], truth[name]) for name in truth)
