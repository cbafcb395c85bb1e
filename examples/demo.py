"""A training run that is killed while it saves, goes on with fewer ranks, and ends as a model for transformers.

    python examples/demo.py             # or `make demo`; --keep leaves the folder behind

Nothing is downloaded: the weights start random. Every number that is printed was measured on this run.
"""

from __future__ import annotations

import os

# Before torch: nothing may reach for a hub, and matrix products must not depend on where in memory a weight lies.
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
STUCK_AFTER = 1_000_000
"""Bytes that each rank writes of the fatal step."""

FORK = multiprocessing.get_context("fork")  # which spares each rank the seconds that importing torch takes


def small_llama() -> LlamaConfig:
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


def batch(step: int) -> torch.Tensor:
    """Return this rank's share of a step's sequences, which count upwards: the same ones on any number of ranks."""
    starts = torch.randint(WORDS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return ((starts + torch.arange(TOKENS)) % WORDS).chunk(dist.get_world_size())[dist.get_rank()]


def train(run: Path, config: LlamaConfig, last: int, before_save: Callable[[int], None]) -> LlamaForCausalLM:
    """Be one rank: go on from the newest step that is whole, or begin."""
    torch.manual_seed(dist.get_world_size())  # a resumed job begins with other weights, and loads
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = Checkpointer(run, save_every=SAVE_EVERY)
    state = {"model": model, "optim": optim}
    start = time.perf_counter()
    found = steps.restore(state)
    if found is not None:
        taken = time.perf_counter() - start
        say(f"restored step {found}, the newest that is whole, in {taken:.2f} s; each block agrees with its hash")
    for step in range((found or 0) + 1, last + 1):
        ids = batch(step)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if step in (1, last) or steps.should_save(step) or step == (found or 0) + 1:
            say(f"step {step:2}: loss {mean.item():.4f}")
        if steps.should_save(step):
            before_save(step)
            start = time.perf_counter()
            steps.save(step, state)
            taken = time.perf_counter() - start
            say(f"         saved in {taken:.2f} s: {sizes(Path(steps.path(step)))}")
    return model


def die_while_saving(rank: int, stuck: Event) -> Callable[[int], None]:
    """Return what makes a disk stop in the middle of a file, once the fatal step is saved."""
    write, written = os.write, 0

    def halfway(file: int, data: memoryview) -> int:
        nonlocal written
        if written < STUCK_AFTER:
            written += (count := write(file, data))
            return count
        if rank == 1:
            stuck.set()
        time.sleep(60)
        raise SystemExit("nobody killed this rank")

    def before_save(step: int) -> None:
        if step == KILLED_AT:
            os.write = halfway

    return before_save


def doomed_rank(rank: int, folder: Path, config: LlamaConfig, stuck: Event) -> None:
    """Be a rank of the first job, which does not live to see its end."""
    with joined(folder / "store-2", rank, 2):
        train(folder / "run", config, STEPS, die_while_saving(rank, stuck))


def lone_rank(folder: Path, config: LlamaConfig) -> None:
    """Be the only rank of the second job; leave what the trained model says beside its steps."""
    with joined(folder / "store-1", 0, 1):
        model = train(folder / "run", config, STEPS, lambda _: None)
        torch.save(answers(model), folder / "trained.pt")


@contextmanager
def joined(store: Path, rank: int, world: int) -> Iterator[None]:
    """Be a rank of a job inside."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def answers(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return a model's logits for four sequences, and how it goes on counting from a prompt."""
    model.eval()
    with torch.no_grad():
        logits = model((torch.arange(4)[:, None] * 30 + torch.arange(32)) % WORDS).logits
        prompt = torch.arange(40, 48)[None]
        told = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    return {"logits": logits, "told": told[0]}


def train_and_kill(folder: Path, config: LlamaConfig) -> None:
    """Run the first job, and kill it in the middle of a save."""
    stuck = FORK.Event()
    ranks = [FORK.Process(target=doomed_rank, args=(rank, folder, config, stuck)) for rank in range(2)]
    for process in ranks:
        process.start()
    while not stuck.wait(0.05) and all(process.is_alive() for process in ranks):
        pass
    if not stuck.is_set():
        raise SystemExit("a rank failed before it was killed")
    print(f"2. Both ranks are killed while step {KILLED_AT} is being written.")
    for process in ranks:
        process.kill()
        process.join()
    ends = ", ".join(signal.Signals(-(process.exitcode or 0)).name for process in ranks)
    (left,) = (folder / "run").glob(".*.partial-*")
    print(f"   They ended by {ends} and left {left.name}: {sizes(left)}.")
    print("   No COMMIT was written, so there is no such step:")
    print(indented(command(folder, "ls", "run")))


def resume(folder: Path, config: LlamaConfig) -> None:
    """Run the second job to its end."""
    process = FORK.Process(target=lone_rank, args=(folder, config))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"the resumed job failed with exit code {process.exitcode}")
    print(f"   It has saved step {KILLED_AT} anew:")
    print(indented(command(folder, "ls", "run")))


def export(folder: Path, config: LlamaConfig) -> None:
    """Make the last step a folder for transformers, load it there, and compare."""
    config.save_pretrained(folder / "config")
    start = time.perf_counter()
    print("4. The last step becomes a folder that transformers loads:")
    print(indented(command(folder, "consolidate", f"run/step-{STEPS:08}", "model", "--config-from", "config")))
    print(f"   took {time.perf_counter() - start:.1f} s, start-up included: {sizes(folder / 'model')}")

    torch.set_num_threads(1)
    model, info = LlamaForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    odd = {kind: names for kind, names in info.items() if names}
    print(f"5. from_pretrained loaded {len(model.state_dict())} tensors; missing or unexpected: {odd or 'none'}")
    trained, loaded = torch.load(folder / "trained.pt"), answers(model)
    same = torch.equal(trained["logits"], loaded["logits"]) and torch.equal(trained["told"], loaded["told"])
    shape = "x".join(map(str, loaded["logits"].shape))
    given, told = loaded["told"][:8].tolist(), loaded["told"][8:].tolist()
    print(f"   After {' '.join(map(str, given))} it says {' '.join(map(str, told))}.")
    print(f"   Its {shape} logits and those of the trained model: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if odd or not same:
        raise SystemExit(1)


def command(folder: Path, *words: str) -> str:
    """Run the command in a folder, show it as it would be typed, and return what it printed."""
    print("   $ shardckpt " + " ".join(words), flush=True)
    line = [sys.executable, "-m", "shardckpt_cli", *words]
    done = subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout)
    return done.stdout


def sizes(folder: Path) -> str:
    """Return how much a folder holds, in MB of a million bytes."""
    found = [path.stat().st_size / 1e6 for path in folder.iterdir()]
    return f"{sum(found):.1f} MB in {len(found)} files"


def say(line: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print("   " + line, flush=True)


def indented(text: str) -> str:
    """Return text shifted to the right."""
    return textwrap.indent(text.rstrip(), " " * 5)


def tell(folder: Path) -> None:
    """Tell the story."""
    start, config = time.perf_counter(), small_llama()
    print("1. Two ranks train a small Llama with shardckpt's fully_shard and AdamW.", flush=True)
    train_and_kill(folder, config)
    print("3. One rank takes over.", flush=True)
    resume(folder, config)
    export(folder, config)
    print(f"All of it took {time.perf_counter() - start:.1f} s.")


def main() -> None:
    """Do it all in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave the folder, to look into it")
    keep = parser.parse_args().keep
    disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="shardckpt-demo-"))
    try:
        tell(folder)
    finally:
        if keep:
            print(f"Everything lies in {folder}")
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
