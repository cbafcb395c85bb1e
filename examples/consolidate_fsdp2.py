"""Train a small Llama on two ranks with `fully_shard`, save with torch DCP, consolidate, load, compare.

Nothing is downloaded: the weights are random at first. `--tied` ties the embeddings.
"""

from __future__ import annotations

import os

# Set before torch is imported: no downloads, and matrix products that do not depend on the address of a weight.
os.environ.update(HF_HUB_OFFLINE="1", MKL_CBWR="COMPATIBLE", TOKENIZERS_PARALLELISM="false")

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

RANKS = 2
STEPS = 8
PROMPTS = (4, 32)
"""Number of sequences, and tokens per sequence, of the batch whose logits are compared."""


def build_config(*, tied: bool) -> LlamaConfig:
    """Return the config of a Llama with four layers and about a million parameters."""
    return LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


def make_prompts(config: LlamaConfig) -> torch.Tensor:
    """Return the token ids, of shape `PROMPTS`, whose logits are compared."""
    return torch.randint(config.vocab_size, PROMPTS, generator=torch.Generator().manual_seed(7))


def train_and_save(rank: int, folder: Path, config: LlamaConfig) -> None:
    """Train a few steps on this rank, save a DCP checkpoint, and store the logits of the trained model."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [train_step(model, optim, batch) for batch in make_batches(rank, config)]

    model_state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder / "step-8")

    model.eval()
    with torch.no_grad():
        logits = model(make_prompts(config)).logits
    if rank == 0:
        torch.save({"logits": logits, "losses": losses}, folder / "trained.pt")
    dist.destroy_process_group()


def make_batches(rank: int, config: LlamaConfig) -> list[torch.Tensor]:
    """Return the token ids of a rank, one batch for each step: sequences that count upwards."""
    generator = torch.Generator().manual_seed(100 + rank)
    starts = torch.randint(config.vocab_size, (STEPS, 8, 1), generator=generator)
    return list((starts + torch.arange(32)) % config.vocab_size)


def train_step(model: LlamaForCausalLM, optim: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Run one optimizer step and return the loss before it."""
    loss = model(batch, labels=batch).loss
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


def run_ranks(folder: Path, config: LlamaConfig) -> None:
    """Train on `RANKS` forked processes; a fork does not import torch again."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train_and_save, args=(rank, folder, config)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        with closing(process):
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"a training rank failed with exit code {process.exitcode}")


def run_command(folder: Path, *words: str) -> str:
    """Run the command in a folder, print the command line, and return its output."""
    print("   $ shardckpt " + " ".join(words), flush=True)
    command = [sys.executable, "-m", "shardckpt_cli", *words]
    process = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode != 0:
        raise SystemExit(process.returncode)
    return process.stdout


def format_sizes(folder: Path) -> str:
    """Return the names and sizes (kB of 1000 bytes) of the files in a folder."""
    return ", ".join(f"{path.name} {path.stat().st_size / 1e3:.0f} kB" for path in sorted(folder.iterdir()))


def consolidate_and_compare(folder: Path, config: LlamaConfig) -> None:
    """Inspect and consolidate the shards, load the result with transformers, compare it with the trained model."""
    config.save_pretrained(folder / "base")
    print("3. Inspect the checkpoint:")
    summary, _, table = run_command(folder, "inspect", "step-8").partition("\n\n")
    print(indent(summary), f"     (and {len(table.splitlines()) - 1} rows, one for each tensor)", sep="\n")

    start = time.perf_counter()
    print("4. Consolidate it, with the config that inference needs:")
    print(indent(run_command(folder, "consolidate", "step-8", "merged", "--config-from", "base")))
    print(f"   took {time.perf_counter() - start:.1f} s, start-up included: {format_sizes(folder / 'merged')}")

    model, info = LlamaForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)
    unexpected = {kind: names for kind, names in info.items() if names}
    print(f"5. from_pretrained loaded {len(model.state_dict())} tensors; missing or unexpected: {unexpected or 'none'}")

    torch.set_num_threads(1)
    trained = torch.load(folder / "trained.pt")["logits"]
    with torch.no_grad():
        same = torch.equal(model.eval()(make_prompts(config)).logits, trained)
    shape = "x".join(map(str, trained.shape))
    print(f"6. Its {shape} logits and those of the trained model: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if unexpected or not same:
        raise SystemExit(1)


def indent(text: str) -> str:
    """Return text, indented."""
    return textwrap.indent(text.rstrip(), " " * 5)


def main() -> None:
    """Run all steps in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tied", action="store_true", help="use one matrix for the input and the output embedding")
    config = build_config(tied=parser.parse_args().tied)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="shardckpt-demo-") as name:
        folder, start = Path(name), time.perf_counter()
        run_ranks(folder, config)
        losses = torch.load(folder / "trained.pt")["losses"]
        print(
            f"1. Trained a small Llama for {STEPS} steps on {RANKS} ranks with fully_shard and AdamW: "
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f} ({time.perf_counter() - start:.1f} s)"
        )
        print(f"2. Saved model and optimizer with torch DCP: {format_sizes(folder / 'step-8')}")
        consolidate_and_compare(folder, config)


if __name__ == "__main__":
    main()
