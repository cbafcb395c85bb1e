"""Kill a training run during a save, resume it on fewer ranks, and export the model for transformers.

    python examples/demo.py             # or `make demo`; --keep does not delete the folder

Nothing is downloaded: the weights are random at first. All printed numbers are measured in this run.
"""

from __future__ import annotations

import os

# Set before torch is imported: no downloads, and matrix products that do not depend on the address of a weight.
os.environ.update(HF_HUB_OFFLINE="1", MKL_CBWR="COMPATIBLE", TOKENIZERS_PARALLELISM="false")

import argparse
import multiprocessing
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from shardckpt import Checkpointer
from shardckpt.core import fully_shard

STEPS, SAVE_EVERY, KILLED_AT = 40, 10, 30
SEQUENCES, TOKENS, WORDS = 16, 16, 128
BLOCK_AFTER = 1_000_000
"""Bytes that each rank writes of the step before it is killed."""

FORK = multiprocessing.get_context("fork")  # ranks do not import torch again


def build_config() -> LlamaConfig:
    """Return the config of a Llama with two layers and 0.4 million parameters."""
    return LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def make_batch(step: int) -> torch.Tensor:
    """Return this rank's part of the sequences of a step; they count upwards and are the same at any world size."""
    starts = torch.randint(WORDS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return ((starts + torch.arange(TOKENS)) % WORDS).chunk(dist.get_world_size())[dist.get_rank()]


def train(run: Path, config: LlamaConfig, last: int, before_save: Callable[[int], None]) -> LlamaForCausalLM:
    """Train on this rank, from the newest complete step if there is one."""
    torch.manual_seed(dist.get_world_size())  # the resumed job starts with other weights, before it loads
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = Checkpointer(run, save_every=SAVE_EVERY)
    state = {"model": model, "optim": optim}
    start = time.perf_counter()
    restored = steps.restore(state)
    if restored is not None:
        seconds = time.perf_counter() - start
        print_rank0(f"restored step {restored}, the newest complete one, in {seconds:.2f} s; all hashes match")
    for step in range((restored or 0) + 1, last + 1):
        ids = make_batch(step)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if step in (1, last) or steps.should_save(step) or step == (restored or 0) + 1:
            print_rank0(f"step {step:2}: loss {mean.item():.4f}")
        if steps.should_save(step):
            before_save(step)
            start = time.perf_counter()
            steps.save(step, state)
            seconds = time.perf_counter() - start
            print_rank0(f"         saved in {seconds:.2f} s: {format_sizes(Path(steps.path(step)))}")
    return model


def block_while_saving(rank: int, blocked: Event) -> Callable[[int], None]:
    """Return a hook that makes `os.write` block in the middle of a file when step `KILLED_AT` is saved."""
    write, written = os.write, 0

    def write_partly(file: int, data: memoryview) -> int:
        nonlocal written
        if written < BLOCK_AFTER:
            written += (count := write(file, data))
            return count
        if rank == 1:
            blocked.set()
        time.sleep(60)
        raise SystemExit("this rank was not killed")

    def before_save(step: int) -> None:
        if step == KILLED_AT:
            os.write = write_partly

    return before_save


def run_first_job(rank: int, folder: Path, config: LlamaConfig, blocked: Event) -> None:
    """Run a rank of the first job, which is killed during a save."""
    with process_group(folder / "store-2", rank, 2):
        train(folder / "run", config, STEPS, block_while_saving(rank, blocked))


def run_second_job(folder: Path, config: LlamaConfig) -> None:
    """Run the only rank of the second job, and store the outputs of the trained model."""
    with process_group(folder / "store-1", 0, 1):
        model = train(folder / "run", config, STEPS, lambda _: None)
        torch.save(compute_outputs(model), folder / "trained.pt")


@contextmanager
def process_group(store: Path, rank: int, world: int) -> Iterator[None]:
    """Run the body as a rank of a process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def compute_outputs(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return the logits of a model for four sequences, and the tokens that it generates for a prompt."""
    model.eval()
    with torch.no_grad():
        logits = model((torch.arange(4)[:, None] * 30 + torch.arange(32)) % WORDS).logits
        prompt = torch.arange(40, 48)[None]
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    return {"logits": logits, "tokens": tokens[0]}


def train_and_kill(folder: Path, config: LlamaConfig) -> None:
    """Run the first job and kill it during a save."""
    blocked = FORK.Event()
    ranks = [FORK.Process(target=run_first_job, args=(rank, folder, config, blocked)) for rank in range(2)]
    for process in ranks:
        process.start()
    while not blocked.wait(0.05) and all(process.is_alive() for process in ranks):
        pass
    if not blocked.is_set():
        raise SystemExit("a rank failed before it was killed")
    print(f"2. Both ranks are killed while they write step {KILLED_AT}.")
    for process in ranks:
        process.kill()
        process.join()
    signals = ", ".join(signal.Signals(-(process.exitcode or 0)).name for process in ranks)
    (partial,) = (folder / "run").glob(".*.partial-*")
    print(f"   They ended by {signals} and left {partial.name}: {format_sizes(partial)}.")
    print("   COMMIT was not written, so the step does not exist:")
    print(indent(run_command(folder, "ls", "run")))


def resume(folder: Path, config: LlamaConfig) -> None:
    """Run the second job until it ends."""
    process = FORK.Process(target=run_second_job, args=(folder, config))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"the resumed job failed with exit code {process.exitcode}")
    print(f"   It saved step {KILLED_AT} again:")
    print(indent(run_command(folder, "ls", "run")))


def export(folder: Path, config: LlamaConfig) -> None:
    """Consolidate the last step, load it with transformers, and compare."""
    config.save_pretrained(folder / "config")
    start = time.perf_counter()
    print("4. Consolidate the last step for transformers:")
    print(indent(run_command(folder, "consolidate", f"run/step-{STEPS:08}", "model", "--config-from", "config")))
    print(f"   took {time.perf_counter() - start:.1f} s, start-up included: {format_sizes(folder / 'model')}")

    torch.set_num_threads(1)
    model, info = LlamaForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    unexpected = {kind: names for kind, names in info.items() if names}
    print(f"5. from_pretrained loaded {len(model.state_dict())} tensors; missing or unexpected: {unexpected or 'none'}")
    trained, loaded = torch.load(folder / "trained.pt"), compute_outputs(model)
    same = torch.equal(trained["logits"], loaded["logits"]) and torch.equal(trained["tokens"], loaded["tokens"])
    shape = "x".join(map(str, loaded["logits"].shape))
    prompt, generated = loaded["tokens"][:8].tolist(), loaded["tokens"][8:].tolist()
    print(f"   After {' '.join(map(str, prompt))} it generates {' '.join(map(str, generated))}.")
    print(f"   Its {shape} logits and those of the trained model: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if unexpected or not same:
        raise SystemExit(1)


def run_command(folder: Path, *words: str) -> str:
    """Run the command in a folder, print the command line, and return its output."""
    print("   $ shardckpt " + " ".join(words), flush=True)
    line = [sys.executable, "-m", "shardckpt_cli", *words]
    process = subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if process.returncode != 0:
        raise SystemExit(process.stdout)
    return process.stdout


def format_sizes(folder: Path) -> str:
    """Return the size of a folder, in MB of a million bytes."""
    file_sizes = [path.stat().st_size / 1e6 for path in folder.iterdir()]
    return f"{sum(file_sizes):.1f} MB in {len(file_sizes)} files"


def print_rank0(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print("   " + line, flush=True)


def indent(text: str) -> str:
    """Return text, indented."""
    return textwrap.indent(text.rstrip(), " " * 5)


def run_demo(folder: Path) -> None:
    """Run the two jobs and export the model."""
    start, config = time.perf_counter(), build_config()
    print("1. Two ranks train a small Llama with shardckpt's fully_shard and AdamW.", flush=True)
    train_and_kill(folder, config)
    print("3. One rank resumes.", flush=True)
    resume(folder, config)
    export(folder, config)
    print(f"Everything took {time.perf_counter() - start:.1f} s.")


def main() -> None:
    """Run all steps in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="do not delete the folder")
    keep = parser.parse_args().keep
    disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="shardckpt-demo-"))
    try:
        run_demo(folder)
    finally:
        if keep:
            print(f"The files are in {folder}")
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
