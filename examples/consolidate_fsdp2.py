"""Train a small Llama on two ranks with `fully_shard`, save its shards with torch DCP, merge them, load, compare.

Nothing is downloaded: the weights start random. Run it with `make demo`, or with `--tied` for tied embeddings.
"""

from __future__ import annotations

import os

# Before torch: nothing may reach for a hub, and matrix products must not depend on where in memory a weight lies.
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
"""Sequences and tokens a sequence, of the batch whose logits are compared."""


def small_llama(*, tied: bool) -> LlamaConfig:
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


def prompts(config: LlamaConfig) -> torch.Tensor:
    """Return the token ids, of shape `PROMPTS`, whose logits are compared."""
    return torch.randint(config.vocab_size, PROMPTS, generator=torch.Generator().manual_seed(7))


def train_and_save(rank: int, folder: Path, config: LlamaConfig) -> None:
    """Be one rank: train a few steps, save a DCP checkpoint, and leave the trained model's logits beside it."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [train_step(model, optim, batch) for batch in batches(rank, config)]

    model_state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder / "step-8")

    model.eval()
    with torch.no_grad():
        logits = model(prompts(config)).logits
    if rank == 0:
        torch.save({"logits": logits, "losses": losses}, folder / "trained.pt")
    dist.destroy_process_group()


def batches(rank: int, config: LlamaConfig) -> list[torch.Tensor]:
    """Return the token ids that a rank trains on, one batch a step: sequences that count upwards."""
    seeded = torch.Generator().manual_seed(100 + rank)
    starts = torch.randint(config.vocab_size, (STEPS, 8, 1), generator=seeded)
    return list((starts + torch.arange(32)) % config.vocab_size)


def train_step(model: LlamaForCausalLM, optim: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Do one optimizer step and return the loss before it."""
    loss = model(batch, labels=batch).loss
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


def run_ranks(folder: Path, config: LlamaConfig) -> None:
    """Train on `RANKS` forked processes; forking spares each the seconds that importing torch takes."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train_and_save, args=(rank, folder, config)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        with closing(process):
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"a training rank failed with exit code {process.exitcode}")


def shardckpt(folder: Path, *words: str) -> str:
    """Run the command in a folder, show it as it would be typed, and return what it printed."""
    print("   $ shardckpt " + " ".join(words), flush=True)
    command = [sys.executable, "-m", "shardckpt_cli", *words]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return done.stdout


def sizes(folder: Path) -> str:
    """Return the files of a folder with their sizes, in kB of 1000 bytes."""
    return ", ".join(f"{path.name} {path.stat().st_size / 1e3:.0f} kB" for path in sorted(folder.iterdir()))


def merge_and_compare(folder: Path, config: LlamaConfig) -> None:
    """Inspect and merge the shards, load the result with transformers, and compare it with the trained model."""
    config.save_pretrained(folder / "base")
    print("3. What the checkpoint holds:")
    summary, _, table = shardckpt(folder, "inspect", "step-8").partition("\n\n")
    print(indented(summary), f"     (and {len(table.splitlines()) - 1} rows, one a tensor)", sep="\n")

    start = time.perf_counter()
    print("4. Merge it, with the config that inference needs:")
    print(indented(shardckpt(folder, "consolidate", "step-8", "merged", "--config-from", "base")))
    print(f"   took {time.perf_counter() - start:.1f} s, start-up included: {sizes(folder / 'merged')}")

    model, info = LlamaForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)
    odd = {kind: names for kind, names in info.items() if names}
    print(f"5. from_pretrained loaded {len(model.state_dict())} tensors; missing or unexpected: {odd or 'none'}")

    torch.set_num_threads(1)
    trained = torch.load(folder / "trained.pt")["logits"]
    with torch.no_grad():
        same = torch.equal(model.eval()(prompts(config)).logits, trained)
    shape = "x".join(map(str, trained.shape))
    print(f"6. Its {shape} logits and those of the trained model: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if odd or not same:
        raise SystemExit(1)


def indented(text: str) -> str:
    """Return text shifted to the right."""
    return textwrap.indent(text.rstrip(), " " * 5)


def main() -> None:
    """Do it all in a temporary folder, and say what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tied", action="store_true", help="use one matrix for the input and the output embedding")
    config = small_llama(tied=parser.parse_args().tied)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="shardckpt-demo-") as name:
        folder, start = Path(name), time.perf_counter()
        run_ranks(folder, config)
        losses = torch.load(folder / "trained.pt")["losses"]
        print(
            f"1. Trained a small Llama for {STEPS} steps on {RANKS} ranks with fully_shard and AdamW: "
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f} ({time.perf_counter() - start:.1f} s)"
        )
        print(f"2. Saved model and optimizer with torch DCP: {sizes(folder / 'step-8')}")
        merge_and_compare(folder, config)


if __name__ == "__main__":
    main()
