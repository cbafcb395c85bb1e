"""Servers of the real vLLM on a CPU, with a tiny Llama, a hook for faults, and what they compute."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.kit.models.tiny_llama import llama_config

UNPACKED = "SHARDCKPT_TEST_UNPACKED"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
SIZES = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 26, "dtype": "bfloat16", "enforce_eager": True}
PROMPTS = [f"w{number} w{number + 3}" for number in range(5, 17)]

if os.environ.get(UNPACKED):  # in a worker, which imports this module for `Faults`
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False  # a CPU then computes with its parameters as loaded, as most GPUs do


class Faults:
    """Methods that vLLM adds to its workers."""

    rank: int
    get_model: Any

    def break_load(self, name: str, rank: int) -> None:
        """Let one worker's next load fail at a tensor."""
        if self.rank != rank:
            return
        kind = type(self.get_model())
        real = kind.load_weights

        def fail_once(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Any:
            def iterate() -> Iterator[tuple[str, torch.Tensor]]:
                for each, tensor in weights:
                    if each == name:
                        kind.load_weights = real
                        raise OSError(f"the test breaks {name}")
                    yield each, tensor

            return real(model, iterate())

        kind.load_weights = fail_once

    def computes_logits(self) -> bool:
        """Return whether the model turns hidden states into logits."""
        model = self.get_model()
        try:
            model.compute_logits(torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16))
        except RuntimeError:
            return False
        return True

    def writes_in_place(self) -> bool:
        """Return whether the engine writes into the parameters."""
        return bool(self.weight_transfer_engine._served.in_place)  # type: ignore[attr-defined]


def write_model(folder: Path, *, is_tied: bool = False) -> dict[str, torch.Tensor]:
    """Write a Llama with random weights and a tokenizer of words; return the weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(folder)
    others = {"head_dim": 32, "initializer_range": 0.2, "eos_token_id": 2, "tie_word_embeddings": is_tied}
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(128, 64, 128, **others)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def write_weights(folder: Path, source: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """Write the model of another folder with other weights."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def change_weights(weights: Mapping[str, torch.Tensor], seed: int, share: float = 0.05) -> dict[str, torch.Tensor]:
    """Return weights of which a share has other values."""
    random = torch.Generator().manual_seed(seed)
    changed = {}
    for name, value in weights.items():
        noise = torch.randn(value.shape, generator=random).to(value.dtype)
        changed[name] = torch.where(torch.rand(value.shape, generator=random) < share, value + noise, value)
    return changed


class Server:
    """An `LLM` in processes of its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import LLM

        extension = f"{__name__}.{Faults.__qualname__}"
        self.llm = LLM(str(folder), disable_log_stats=True, worker_extension_cls=extension, **SIZES, **options)

    def follow(self, url: Path, **options: Any) -> None:
        """Open a stream."""
        self.llm.init_weight_transfer_engine({"init_info": {"url": str(url), **options}})

    def update(self, version: int, *, is_named: bool = True) -> None:
        """Load a version, and label it."""
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": version} if is_named else {}})
        self.llm.finish_weight_update(str(version))

    def ask_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each worker."""
        answers: list[Any] = self.llm.llm_engine.collective_rpc(method, args=args)
        return answers

    def measure(self) -> tuple[list[str], list[dict[str, str]]]:
        """Return greedy text, and the checksums of each worker's parameters."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        texts = [each.outputs[0].text for each in self.llm.generate(PROMPTS, greedy, use_tqdm=False)]
        return texts, self.ask_workers("compute_weight_checksums")

    def close(self) -> None:
        """End its processes."""
        self.llm.llm_engine.engine_core.shutdown()
