"""Small Trainers for tests, on forked ranks: DDP, FSDP1 and FSDP2 on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from shardckpt.integrations.transformers import ShardckptCallback
from tests.kit.runs.accelerators import be_rank, kill, wait_for

STEPS, BATCH = 8, 12  # two epochs of four steps; the samples of a step do not depend on the number of ranks
FSDP = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"}
SHARDING: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp1": {"fsdp": True, "fsdp_config": {**FSDP, "version": 1, "sync_module_states": False}},
    "fsdp2": {"fsdp": True, "fsdp_config": {**FSDP, "version": 2}},
}


class CountingSequences(Dataset):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return STEPS * BATCH // 2

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (number * 7 + torch.arange(8)) % 64
        return {"input_ids": ids, "labels": ids}


class WholeNormTrainer(Trainer):
    """A Trainer that logs the norm over all ranks: of a DTensor, torch 2.6 would give it this rank's part."""

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Losses(TrainerCallback):
    """Loss and gradient norm by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, tuple[float, float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kw: Any) -> None:
        if "loss" in logs:
            self.by_step[state.global_step] = (logs["loss"], logs["grad_norm"])


class KilledAt(TrainerCallback):
    """Ends the process without a warning, once a file exists."""

    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if state.global_step == self.step:
            wait_for(self.file)
            kill()


class SignalledAt(TrainerCallback):
    """Sends the process a signal in the middle of a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def build(
    kind: str,
    folder: Path,
    *callbacks: TrainerCallback,
    seed: int = 1,
    dropout: float = 0.2,
    model: torch.nn.Module | None = None,
    **arguments: Any,
) -> tuple[Trainer, Losses]:
    """Return a Trainer of a given or new model that saves every third step, and what notes its losses."""
    torch.manual_seed(seed)
    losses, world = Losses(), int(os.environ["WORLD_SIZE"])
    given = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // world,
        learning_rate=1e-2,
        seed=11,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        **{"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, **SHARDING[kind], **arguments},
    )
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if model is None:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, attention_dropout=dropout, use_cache=False))
    evaluation = {"eval_dataset": CountingSequences()} if "eval_strategy" in arguments else {}
    trainer = WholeNormTrainer(
        model, given, train_dataset=CountingSequences(), **evaluation, callbacks=[losses, *callbacks]
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, losses


def train(
    rank: int, world: int, kind: str, folder: Path, resume: str | bool | None, dropout: float = 0.2, **arguments: Any
) -> dict[int, tuple[float, float]]:
    """Train with steps in `folder / "run"`; the losses. For the harness."""
    be_rank(rank, world)
    callback = ShardckptCallback(folder / "run")
    trainer, losses = build(kind, folder / "out", callback, seed=2, dropout=dropout, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return losses.by_step
