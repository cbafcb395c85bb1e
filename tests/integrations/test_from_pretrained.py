"""A step of each framework becomes a folder that `from_pretrained` generates from, without an option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from tests.kit.ranks.harness import run

IDS = torch.arange(4)[None]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    import accelerate
    import lightning

    import shardckpt.integrations.accelerate
    from tests.kit.runs import accelerators, lightning_trainers, trainers

    assert all((accelerate, lightning, shardckpt.integrations.accelerate, accelerators, lightning_trainers, trainers))


def build_tokenizer() -> Any:
    """Return a tokenizer of 64 words that needs no download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages }}")


def build_llama() -> Any:
    from transformers import LlamaForCausalLM

    from tests.kit.models.tiny_llama import llama_config

    torch.manual_seed(3)
    return LlamaForCausalLM(llama_config(64, 16, 32, eos_token_id=None))


def describe(model: Any, config: Any, prefix: str = "") -> tuple[Any, Any]:
    """Return what a model in training generates, and its logits."""
    weights = shardckpt.model_state_dict(model)
    with torch.device("cpu"):
        whole = type(build_llama())(config)
    whole.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()})
    return generate(whole)


def generate(model: Any) -> tuple[Any, Any]:
    model.eval()
    with torch.no_grad():
        tokens = model.generate(IDS, max_new_tokens=8, do_sample=False)
        return tokens.tolist(), model(IDS).logits.tolist()


def from_step(step: Path, folder: Path) -> tuple[Any, Any]:
    """Return what the folder generates that `consolidate` makes from a step."""
    from transformers import AutoModelForCausalLM

    report = shardckpt.consolidate(step, folder)
    assert report.warnings == ()
    return generate(AutoModelForCausalLM.from_pretrained(folder))


def assert_has_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w3 w5").input_ids == [3, 5]
    assert tokenizer.chat_template == "{{ messages }}"


def train_with_trainer(rank: int, world: int, kind: str, folder: Path) -> tuple[Any, Any]:
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    callback = trainers.ShardckptCallback(folder / "run")
    trainer, _ = trainers.build(kind, folder / "out", callback, max_steps=3)
    trainer.processing_class = build_tokenizer()
    trainer.train()
    return describe(trainer.model, trainer.model.config)


@pytest.mark.shown_by("[fsdp2]", "ddp", "fsdp1")
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_step_of_the_trainer_generates_what_the_model_in_training_does(kind: str, tmp_path: Path) -> None:
    found = run(2, train_with_trainer, kind, tmp_path)
    assert from_step(tmp_path / "run" / "step-00000003", tmp_path / "model") == found[0]
    assert_has_tokenizer(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")


def train_with_lightning(rank: int, world: int, kind: str, folder: Path) -> tuple[Any, Any]:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from tests.kit.runs import lightning_trainers

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.llama, self.tokenizer = build_llama(), build_tokenizer()
            self.score = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.llama(batch, labels=batch).loss + 0 * self.score.weight.sum() + 0 * self.score.bias.sum()

        def configure_model(self) -> None:
            if kind == "fsdp2":
                torch.distributed.fsdp.fully_shard(self.llama, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            return lightning_trainers.WholeAdamW(self.parameters(), lr=1e-2)

    lightning_trainers.be_rank(rank, world)
    module, strategy = Module(), lightning_trainers.build_strategy(kind, world)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_steps=2,
        callbacks=[lightning_trainers.ShardckptModelCheckpoint(folder / "run")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.arange(64).view(8, 8), batch_size=2))
    weights = shardckpt.model_state_dict(strategy.model)
    whole = build_llama()
    whole.load_state_dict({n.removeprefix("llama."): value for n, value in weights.items() if n.startswith("llama.")})
    return generate(whole)


@pytest.mark.shown_by("[fsdp2]", "ddp", "fsdp1")
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_step_of_lightning_generates_what_the_model_in_training_does(kind: str, tmp_path: Path) -> None:
    found = run(2, train_with_lightning, kind, tmp_path)
    (step,) = (tmp_path / "run").glob("step-*2")
    assert from_step(step, tmp_path / "model") == found[0]
    assert_has_tokenizer(tmp_path / "model")


def train_with_accelerate(rank: int, world: int, folder: Path) -> tuple[Any, Any]:
    from accelerate import Accelerator

    from shardckpt.integrations.accelerate import register
    from tests.kit.runs import accelerators

    accelerators.be_rank(rank, world)
    accelerator = Accelerator(cpu=True)
    register(accelerator, model_files=build_tokenizer())
    model = build_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.backward(model(IDS, labels=IDS).loss)
    optimizer.step()
    accelerator.save_state(folder / "step_8")
    return describe(accelerator.unwrap_model(model), accelerator.unwrap_model(model).config)


def test_a_folder_of_accelerate_is_opened_by_every_command(tmp_path: Path) -> None:
    found = run(2, train_with_accelerate, tmp_path)
    folder = tmp_path / "step_8"
    assert from_step(folder, tmp_path / "model") == found[0]
    assert_has_tokenizer(tmp_path / "model")
    assert not shardckpt.verify(folder).problems
    assert shardckpt.inspect(folder).format == "native"
    copied = shardckpt.copy(folder, tmp_path / "copied")
    assert (copied.copied, [path.name for path in (tmp_path / "copied").iterdir()]) == (("shardckpt",), ["shardckpt"])
    assert shardckpt.diff(folder, tmp_path / "copied").equal


def save_two_models(rank: int, world: int, folder: Path) -> list[str]:
    import warnings

    from accelerate import Accelerator

    from shardckpt.integrations.accelerate import register
    from tests.kit.runs import accelerators

    accelerators.be_rank(rank, world)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(build_llama(), build_llama())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        register(accelerator)
        accelerator.save_state(folder / "a")
    return [str(each.message) for each in caught]


def test_two_models_are_named_in_a_warning_and_store_no_config(tmp_path: Path) -> None:
    (messages,) = run(1, save_two_models, tmp_path)
    assert any("2 transformers models, so its steps store the files of none" in message for message in messages)
    assert not [*(tmp_path / "a" / "shardckpt").glob("*config.json")]
