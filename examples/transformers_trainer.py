"""Save and resume transformers' Trainer with one callback.

    pip install '.[transformers]'
    python examples/transformers_trainer.py                             # forks two gloo ranks on the CPU
    torchrun --nproc-per-node 2 examples/transformers_trainer.py        # or any number of ranks

A small Llama is trained three times. The first training runs to the end. The second stops after step 8; its newest step
is 6, in the middle of an epoch. The third resumes from it, with other random weights at first. Its losses and weights
equal those of the first, bit for bit, with dropout.
"""

from __future__ import annotations

import os

# Set before torch is imported: no downloads, and matrix products that do not depend on the address of a weight.
os.environ.update(HF_HUB_OFFLINE="1", MKL_CBWR="COMPATIBLE", TOKENIZERS_PARALLELISM="false")

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from train_fsdp import launch, print_rank0
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import shardckpt
from shardckpt.integrations.transformers import ShardckptCallback

SAVE_STEPS, STOPPED_AT = 3, 8


class CountingSequences(Dataset):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (number * 7 + torch.arange(16)) % 128
        return {"input_ids": ids, "labels": ids}


class StopAt(TrainerCallback):
    """Stop training early, like the end of a job."""

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kw: Any) -> None:
        """Stop after `STOPPED_AT` steps."""
        control.should_training_stop = state.global_step == STOPPED_AT


def build_trainer(folder: Path, seed: int, *callbacks: TrainerCallback) -> Trainer:
    """Return a Trainer of a model with random weights."""
    torch.manual_seed(seed)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        num_train_epochs=3,  # of four steps
        per_device_train_batch_size=6 // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=1e-2,
        seed=11,
        logging_steps=1,
        save_strategy="steps" if callbacks else "no",
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=CountingSequences(), callbacks=list(callbacks))
    trainer.remove_callback(PrinterCallback)
    return trainer


def read_losses(trainer: Trainer) -> dict[int, float]:
    """Return the logged losses by step."""
    return {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}


def train(folder: Path) -> None:
    """Train three times, and compare."""
    uninterrupted = build_trainer(folder, 1)
    uninterrupted.train()
    expected = read_losses(uninterrupted)

    build_trainer(folder, 1, ShardckptCallback(folder / "run"), StopAt()).train()
    saved = [step.number for step in shardckpt.ls(folder / "run").complete]

    resumed = build_trainer(folder, 2, ShardckptCallback(folder / "run"))
    resumed.train(resume_from_checkpoint=True)
    print_rank0(f"stopped after step {STOPPED_AT}, resumed from step {saved[-1]}")
    for step, loss in list(read_losses(resumed).items())[saved[-1] :]:
        print_rank0(f"  step {step:2}: loss {loss:.4f}, without interruption {expected[step]:.4f}")
    pairs = zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(first, third) for first, third in pairs) and read_losses(resumed) == expected
    print_rank0(f"losses and weights: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if not same:
        raise SystemExit(1)


def main() -> None:
    """Train on this rank, in a folder of rank 0."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names)
        train(Path(names[0]))
        dist.barrier()


if __name__ == "__main__":
    launch(main)
