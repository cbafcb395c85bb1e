"""Adapters of every kind, as peft itself trains and merges them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardckpt
from shardckpt.errors import AmbiguousError, FormatError, PrecisionError, UnsupportedError, UsageError
from tests.kit.runs.cases import load_folder

peft = pytest.importorskip("peft")

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}
EXPERTS = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 12, "head_dim": 4, "decoder_sparse_step": 1},
    "gpt_oss": {"num_local_experts": 3, "head_dim": 4},
    "llama4_text": {"num_local_experts": 3, "intermediate_size_mlp": 24, "head_dim": 4},
}


def build(kind: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Return a small model of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = SIZES
    if kind == "gpt2":
        sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    if kind in EXPERTS:
        sizes = {**SIZES, "num_key_value_heads": 2, **EXPERTS[kind]}
    if kind == "llama":
        sizes = {**SIZES, "attention_bias": True}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **more})).to(dtype)


def adapt(model: Any, folder: Path, **settings: Any) -> Any:
    """Write a base, and an adapter for it with random values; return the model with the adapter."""
    model.save_pretrained(folder / "base")
    told = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "init_lora_weights": False, **settings})
    wrapped = peft.get_peft_model(model, told)
    randomize(wrapped)
    wrapped.save_pretrained(folder / "adapter")
    return wrapped


def randomize(wrapped: Any) -> None:
    torch.manual_seed(1)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)


def assert_close(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], **limits: float) -> None:
    assert set(found) == set(truth)
    for name, expected in truth.items():
        assert found[name].dtype == expected.dtype
        torch.testing.assert_close(found[name], expected, **{"rtol": 1e-5, "atol": 1e-6, **limits})


def assert_merged_as_peft_does(wrapped: Any, folder: Path, **limits: float) -> shardckpt.results.Report:
    report = shardckpt.merge_adapter(folder / "base", folder / "adapter", folder / "out")
    wrapped.merge_and_unload().save_pretrained(folder / "truth")
    found, base = load_folder(folder / "out"), load_folder(folder / "base")
    assert_close(found, load_folder(folder / "truth"), **limits)
    assert any(not torch.equal(found[name], base[name]) for name in base)
    return report


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("llama", ["q_proj", "down_proj"]),
        ("llama", ["embed_tokens", "lm_head"]),
        ("gpt2", ["c_attn", "c_proj"]),
    ],
    ids=["linear", "embedding", "conv1d"],
)
@pytest.mark.parametrize("is_stabilised", [False, True], ids=["lora", "rslora"])
def test_dora_is_merged_as_peft_does(kind: str, modules: list[str], is_stabilised: bool, tmp_path: Path) -> None:
    patterns: dict[str, Any] = {"rank_pattern": {modules[0]: 3}, "alpha_pattern": {modules[1]: 5}}
    wrapped = adapt(build(kind), tmp_path, target_modules=modules, use_dora=True, use_rslora=is_stabilised, **patterns)
    assert_merged_as_peft_does(wrapped, tmp_path)


def test_dora_on_bf16_is_rounded_once(tmp_path: Path) -> None:
    wrapped = adapt(build(dtype=torch.bfloat16), tmp_path, target_modules=["q_proj", "down_proj"], use_dora=True)
    assert_merged_as_peft_does(wrapped, tmp_path, rtol=1e-2, atol=0)
    found, truth = load_folder(tmp_path / "out"), load_folder(tmp_path / "truth")
    different = sum(int((found[name] != truth[name]).sum()) for name in truth)
    assert different <= 2, "but for products at a border of rounding"


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Conv2d(4, 6, (3, 2))
        self.line = nn.Conv1d(4, 6, 3)
        self.point = nn.Conv2d(4, 6, 1)
        self.solid = nn.Conv3d(4, 6, 2)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_convolutions_are_merged_as_peft_does(use_dora: bool, tmp_path: Path) -> None:
    wrapped = adapt(_Convolutions(), tmp_path, target_modules=["wide", "line", "point", "solid"], use_dora=use_dora)
    shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert_close(load_folder(tmp_path / "out"), dict(wrapped.merge_and_unload().state_dict()))


@pytest.mark.parametrize(
    ("module", "name"), [("groups", "groups is a convolution in groups"), ("attention", "is a MultiheadAttention")]
)
def test_layers_that_peft_does_not_merge_or_adds_twice_are_refused(module: str, name: str, tmp_path: Path) -> None:
    model = _Convolutions()
    model.groups, model.attention = nn.Conv2d(4, 6, 3, groups=2), nn.MultiheadAttention(8, 2)
    adapt(model, tmp_path, target_modules=[module])
    with pytest.raises(UnsupportedError, match=name):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [["experts.gate_up_proj", "experts.down_proj"], ["experts.down_proj"]], ids=len)
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_merged_as_peft_does(kind: str, names: list[str], tmp_path: Path) -> None:
    """transformers writes experts in 3 dimensions, or each expert's weights, whose names it may change."""
    patterns = {"rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"experts.gate_up_proj": 7}}
    wrapped = adapt(build(kind), tmp_path, target_modules=["q_proj"], target_parameters=names, **patterns)
    assert_merged_as_peft_does(wrapped, tmp_path)


@pytest.mark.parametrize("kind", EXPERTS)
def test_square_experts_are_merged_as_peft_does(kind: str, tmp_path: Path) -> None:
    """Shapes leave open which dimension is the input, as in a gpt-oss."""
    model = build(kind, intermediate_size=16, moe_intermediate_size=16)
    wrapped = adapt(model, tmp_path, target_parameters=["experts.down_proj"])
    assert_merged_as_peft_does(wrapped, tmp_path)


def test_experts_in_memory_have_the_names_of_the_module(tmp_path: Path) -> None:
    """A base in a step has the names and the dimensions of the module."""
    model = build("mixtral")
    shardckpt.save({"model": model}, tmp_path / "step")
    wrapped = adapt(model, tmp_path, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    shardckpt.merge_adapter(tmp_path / "step", tmp_path / "adapter", tmp_path / "out")
    assert_close(load_folder(tmp_path / "out"), dict(wrapped.merge_and_unload().state_dict()))


def test_a_parameter_in_two_dimensions_is_merged_as_peft_does(tmp_path: Path) -> None:
    wrapped = adapt(build(), tmp_path, target_modules=["v_proj"], target_parameters=["q_proj.weight"])
    assert_merged_as_peft_does(wrapped, tmp_path)


@pytest.mark.parametrize("bias", ["none", "all"])
def test_biases_of_factors_are_added_as_peft_does(bias: str, tmp_path: Path) -> None:
    wrapped = adapt(build(), tmp_path, target_modules=["q_proj", "v_proj"], lora_bias=True, bias=bias)
    assert_merged_as_peft_does(wrapped, tmp_path)


def test_biases_of_several_adapters_add_up(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "base")
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 4, "init_lora_weights": False, "lora_bias": True}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], **settings), adapter_name="a")
    wrapped.add_adapter("b", peft.LoraConfig(target_modules=["q_proj", "v_proj"], **settings))
    for name, parameter in wrapped.named_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * ("lora_B" in name)
    wrapped.save_pretrained(tmp_path)
    shardckpt.merge_adapter(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    truth = wrapped.merge_and_unload(adapter_names=["a", "b"]).state_dict()
    assert_close(load_folder(tmp_path / "out"), dict(truth))


def test_a_bias_for_a_layer_without_one_is_refused_as_by_peft(tmp_path: Path) -> None:
    adapt(build(attention_bias=False), tmp_path, target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(UsageError, match=r"adds a bias to .*q_proj.*found none.*peft cannot merge it either"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_single_tokens_are_merged_as_peft_does(is_tied: bool, tmp_path: Path) -> None:
    model = build(tie_word_embeddings=is_tied)
    wrapped = adapt(model, tmp_path, target_modules=["q_proj"], trainable_token_indices=[5, 1])
    assert assert_merged_as_peft_does(wrapped, tmp_path).warnings == ()


def test_single_tokens_of_a_head_are_its_own(tmp_path: Path) -> None:
    tokens = {"embed_tokens": [1, 5], "lm_head": [2]}
    wrapped = adapt(build(), tmp_path, target_modules=["q_proj"], trainable_token_indices=tokens)
    assert_merged_as_peft_does(wrapped, tmp_path)


def test_new_tokens_are_refused_or_come_with_their_embeddings(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(40)
    told = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, trainable_token_indices=[3, 35])
    wrapped = peft.get_peft_model(model, told)
    randomize(wrapped)
    wrapped.save_pretrained(tmp_path / "small", save_embedding_layers=False)
    with pytest.raises(UsageError, match=r"tokens that model\.embed_tokens\.weight lacks; found token 35.*\(36\)"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "small", tmp_path / "out")
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert_merged_as_peft_does(wrapped, tmp_path)


class _Refused:
    """Settings of kinds that are refused, by their names in messages."""

    @staticmethod
    def kasa() -> dict[str, Any]:
        return {"kasa_config": peft.tuners.lora.config.KasaConfig(), "init_lora_weights": True}

    @staticmethod
    def velora() -> dict[str, Any]:
        return {"velora_config": peft.tuners.lora.config.VeloraConfig(num_groups=2), "init_lora_weights": True}

    @staticmethod
    def montecLoRA() -> dict[str, Any]:  # noqa: N802
        return {"monteclora_config": peft.tuners.lora.config.MontecloraConfig(), "init_lora_weights": True}


@pytest.mark.parametrize(
    ("make", "name"), [(_Refused.kasa, "KaSA"), (_Refused.velora, "VeLoRA"), (_Refused.montecLoRA, "MonteCLoRA")]
)
def test_other_kinds_are_refused_by_their_names(make: Callable[[], dict[str, Any]], name: str, tmp_path: Path) -> None:
    adapt(build(), tmp_path, target_modules=["q_proj"], **make())
    with pytest.raises(UnsupportedError, match=rf"this adapter is {name}.*merge_and_unload"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.5]])
def test_dora_is_neither_weighted_nor_joined_with_another_adapter(weights: list[float], tmp_path: Path) -> None:
    adapt(build(), tmp_path, target_modules=["q_proj"], use_dora=True)
    adapters = [tmp_path / "adapter"] * len(weights)
    with pytest.raises(UsageError, match=r"magnitudes \(DoRA\) must have the weight 1|two adapters change .*q_proj"):
        shardckpt.merge_adapter(tmp_path / "base", adapters, tmp_path / "out", adapter_weights=weights)


def _read_settings(kind: str) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao", "fp8"])
def test_an_adapter_of_a_quantized_base_is_merged_into_the_plain_numbers(
    kind: str, use_dora: bool, tmp_path: Path
) -> None:
    """What `peft` merges into the same base, once that is dequantized."""
    pytest.importorskip("torchao" if kind == "torchao" else "bitsandbytes")
    from transformers import AutoModelForCausalLM

    build(hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "plain")
    quantization = {} if kind == "fp8" else {"quantization_config": _read_settings(kind), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32, **quantization)
    adapt(model, tmp_path, target_modules=["q_proj", "down_proj"], use_dora=use_dora)
    if kind == "fp8":
        shardckpt.convert(tmp_path / "plain", tmp_path / "base", quantize="fp8-block", overwrite=True)
    with pytest.raises(UnsupportedError, match="--dequantize"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", dequantize=True)
    shardckpt.consolidate(tmp_path / "base", tmp_path / "dequantized", dequantize=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized")
    merged = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == plain.dtype
    assert_close(dict(found.state_dict()), dict(merged.state_dict()))


def test_magnitudes_without_use_dora_are_refused(tmp_path: Path) -> None:
    adapt(build(), tmp_path, target_modules=["q_proj"], use_dora=True)
    told = tmp_path / "adapter" / "adapter_config.json"
    told.write_text(told.read_text().replace('"use_dora": true', '"use_dora": false'))
    with pytest.raises(FormatError, match=r"q_proj must have magnitudes .* if and only if use_dora"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


def _write_bases(model: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """Write a model as each kind of base, with the options that a merge needs."""
    model.save_pretrained(folder / "base")
    shardckpt.save({"model": model}, folder / "native", model_files=model)
    torch.save(model.state_dict(), folder / "state.pt")
    return {"base": {}, "native": {}, "state.pt": {"config_from": folder / "base"}}


def _compute(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 11)[None]).logits


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["embed_tokens", "lm_head"]], ids=["head", "both"])
def test_a_tied_head_with_factors_is_untied_in_every_form_of_base(targets: list[str], tmp_path: Path) -> None:
    model = build(tie_word_embeddings=True)
    bases = _write_bases(model, tmp_path)
    wrapped = adapt(model, tmp_path, target_modules=targets)
    shardckpt.save({"model": wrapped}, tmp_path / "step", model_files=wrapped)
    adapted = _compute(wrapped)
    for base, options in {**bases, "step": {"config_from": tmp_path / "base"}}.items():
        adapter = "step" if base == "step" else "adapter"
        out = tmp_path / f"out-{Path(base).stem}"
        report = shardckpt.merge_adapter(tmp_path / base, tmp_path / adapter, out, **options)
        found = type(model).from_pretrained(out)
        torch.testing.assert_close(_compute(found), adapted, rtol=1e-4, atol=1e-4)
        assert found.config.tie_word_embeddings is False
        assert any("tied in the base and differ now" in warning for warning in report.warnings)


def test_a_changed_embedding_of_a_tied_model_is_told_for_every_form_of_base(tmp_path: Path) -> None:
    model = build(tie_word_embeddings=True)
    bases = _write_bases(model, tmp_path)
    adapt(model, tmp_path, target_modules=["q_proj", "embed_tokens"])
    for base, options in bases.items():
        report = shardckpt.merge_adapter(
            tmp_path / base, tmp_path / "adapter", tmp_path / f"out-{Path(base).stem}", **options
        )
        assert [warning for warning in report.warnings if "merged model's head changes too" in warning], base


def _build_masked(kind: str) -> Any:
    """Return a masked language model, whose decoder shares its weight and its bias."""
    import transformers as hf

    torch.manual_seed(0)
    model = hf.AutoModelForMaskedLM.from_config(hf.AutoConfig.for_model(kind, **SIZES))
    (model.cls.predictions if kind == "bert" else model.lm_head).bias.data.normal_()
    return model


MASKED = {"base": ["bert"], "native": ["bert", "roberta"], "state.pt": ["bert", "roberta"]}


@pytest.mark.parametrize(("base", "kind"), [(base, kind) for base, kinds in MASKED.items() for kind in kinds])
def test_a_decoder_that_is_untied_keeps_the_bias_that_it_shared(base: str, kind: str, tmp_path: Path) -> None:
    model = _build_masked(kind)
    options = _write_bases(model, tmp_path)[base]
    adapted = _compute(adapt(model, tmp_path, target_modules=["query", "decoder"]))
    shardckpt.merge_adapter(tmp_path / base, tmp_path / "adapter", tmp_path / "out", **options)
    found, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert found.config.tie_word_embeddings is False
    torch.testing.assert_close(_compute(found), adapted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"bias": "all"}, {"modules_to_save": ["decoder"]}], ids=["biases", "saved"])
def test_a_tied_name_that_a_folder_lacks_is_found_in_a_native_step(settings: dict[str, Any], tmp_path: Path) -> None:
    model = _build_masked("bert")
    _write_bases(model, tmp_path)
    adapted = _compute(adapt(model, tmp_path, target_modules=["query"], **settings))
    with pytest.raises(UsageError, match=r"no 'cls\.predictions\.decoder\.bias'.*native step as BASE"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    shardckpt.merge_adapter(tmp_path / "native", tmp_path / "adapter", tmp_path / "out")
    found = type(model).from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_compute(found), adapted, rtol=1e-4, atol=1e-4)


def test_square_weights_beside_conv1d_are_turned_by_their_own_kind(tmp_path: Path) -> None:
    """A GPT-2 decoder has Conv1D layers, its encoder has Linear ones, and peft writes one flag for both."""
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    torch.manual_seed(0)
    encoder = ViTConfig(**{**SIZES, "image_size": 16, "patch_size": 8})
    decoder = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, add_cross_attention=True)
    model = VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))
    shardckpt.save({"model": model}, tmp_path / "step", model_files=model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    wrapped = adapt(model, tmp_path, target_modules=["q_proj", "c_proj", "c_attn", "q_attn"])
    shardckpt.merge_adapter(tmp_path / "step", tmp_path / "adapter", tmp_path / "out")
    truth = wrapped.merge_and_unload().state_dict()
    found = load_folder(tmp_path / "out")
    for name, value in found.items():
        torch.testing.assert_close(value, truth[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(AmbiguousError, match=r"q_proj\.weight is square.*Conv1D.*--config-from"):
        shardckpt.merge_adapter(tmp_path / "state.pt", tmp_path / "adapter", tmp_path / "other")


def _save_mixtral(folder: Path, **settings: Any) -> Any:
    """Write a Mixtral, whose files have other names than its modules, and an adapter; return both together."""
    model = build("mixtral")
    shardckpt.save({"model": model}, folder / "step", model_files=model)
    return adapt(model, folder, target_modules=["q_proj"], **settings)


@pytest.mark.parametrize("base", ["base", "step"])
@pytest.mark.parametrize(
    "settings",
    [{"modules_to_save": ["gate"]}, {"target_parameters": ["mlp.gate.weight", "mlp.experts.down_proj"]}],
    ids=["saved", "factors"],
)
def test_a_router_gets_its_values_under_the_name_in_the_base(
    settings: dict[str, Any], base: str, tmp_path: Path
) -> None:
    adapted = _compute(wrapped := _save_mixtral(tmp_path, **settings))
    report = shardckpt.merge_adapter(tmp_path / base, tmp_path / "adapter", tmp_path / "out")
    found, info = type(wrapped.base_model.model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert report.warnings == ()
    torch.testing.assert_close(_compute(found), adapted, rtol=1e-4, atol=1e-4)


def test_saved_experts_that_the_files_split_need_a_step_as_base(tmp_path: Path) -> None:
    adapted = _compute(wrapped := _save_mixtral(tmp_path, modules_to_save=["experts"]))
    with pytest.raises(UsageError, match=r"no 'model\.layers\.0\.mlp\.experts\..*native step as BASE"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    shardckpt.merge_adapter(tmp_path / "step", tmp_path / "adapter", tmp_path / "out")
    found = type(wrapped.base_model.model).from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_compute(found), adapted, rtol=1e-4, atol=1e-4)


def _fill(folder: Path, end: str, value: float) -> None:
    """Set an adapter's tensors whose names end so, as a run that diverged would."""
    file = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    assert any(name.endswith(end) for name in tensors)
    save_file({k: torch.full_like(v, value) if k.endswith(end) else v for k, v in tensors.items()}, file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("end", ["q_proj.lora_A.weight", "q_proj.lora_magnitude_vector", "norm.weight"])
def test_an_adapter_that_is_not_finite_is_refused_by_the_tensors_name(end: str, value: float, tmp_path: Path) -> None:
    adapt(build(), tmp_path, target_modules=["q_proj"], use_dora=True, modules_to_save=["norm"])
    _fill(tmp_path, end, value)
    with pytest.raises(PrecisionError, match=rf"the adapter's .*{end} must be finite"):
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", allow_overflow=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("value", "weight"), [(1e30, 1.0), (1.0, 1e300)], ids=["factors", "weight"])
def test_sums_beyond_float32_are_refused_unless_overflow_is_allowed(
    value: float, weight: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    adapt(build(dtype=dtype), tmp_path, target_modules=["q_proj"])
    for side in "AB":
        _fill(tmp_path, f"q_proj.lora_{side}.weight", value)
    places: Any = (tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(PrecisionError, match=r"finite values of .*q_proj\.weight' become infinite.*--allow-overflow"):
        shardckpt.merge_adapter(*places, adapter_weights=[weight])
    assert not (tmp_path / "out").exists()
    shardckpt.merge_adapter(*places, adapter_weights=[weight], allow_overflow=True)
    assert load_folder(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"].isinf().all()


def test_values_of_the_base_that_are_not_finite_stay_so(tmp_path: Path) -> None:
    model = build()
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = float("inf")
    assert_merged_as_peft_does(adapt(model, tmp_path, target_modules=["q_proj"]), tmp_path)
