"""Ship the weights of two training ranks to a running server; kill both sides; compare what the server generates.

    python examples/rl_stream.py        # forks gloo ranks and a server on the CPU; --keep does not delete the folder

The ranks publish every step to a stream, as changes in bf16. The server applies each version while they train. Nothing
is downloaded: the weights are random at first, and the model learns to count.
"""

from __future__ import annotations

import os

# Set before torch is imported: no downloads, and matrix products that do not depend on the address of a weight.
os.environ.update(HF_HUB_OFFLINE="1", MKL_CBWR="COMPATIBLE", TOKENIZERS_PARALLELISM="false")

import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import shardckpt
from shardckpt.core import fully_shard

STEPS, SAVE_EVERY, KILLED_AFTER, SERVER_KILLED_AFTER = 40, 10, 24, 8
SEQUENCES, TOKENS, WORDS = 16, 16, 128
PROMPT = tuple(range(40, 48))

FORK = multiprocessing.get_context("fork")  # processes do not import torch again


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


# The trainer.


def run_rank(rank: int, folder: Path, name: str, config: LlamaConfig, reached: Event) -> None:
    """Train on one of two ranks, from the newest checkpoint, and publish each step."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / name), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = shardckpt.Checkpointer(folder / "run", save_every=SAVE_EVERY)
    restored = steps.restore({"model": model, "optim": optim})
    with shardckpt.Publisher(folder / "stream", anchors=shardckpt.Anchors(max_chain=8, max_bytes=8)) as publisher:
        if restored is not None:
            version = publisher.resume(model)
            report(f"trainer: restored step {restored}, whose weights are version {version}", rank)
        for step in range((restored or 0) + 1, STEPS + 1):
            train_step(model, optim, step)
            publisher.publish(step, model)
            if steps.should_save(step):
                steps.save(step, {"model": model, "optim": optim})
            if step == KILLED_AFTER and restored is None:
                reached.set()
                time.sleep(60)
                raise SystemExit("this rank was not killed")
    report(f"trainer: published version {STEPS}", rank)
    dist.destroy_process_group()


def train_step(model: LlamaForCausalLM, optim: torch.optim.Optimizer, step: int) -> None:
    """Train on this rank's part of some sequences that count upwards."""
    starts = torch.randint(WORDS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    ids = ((starts + torch.arange(TOKENS)) % WORDS).chunk(2)[dist.get_rank()]
    model(ids, labels=ids).loss.backward()
    optim.step()
    optim.zero_grad()


# The server.


def serve(folder: Path, config: LlamaConfig, last: int, is_restarted: bool) -> None:
    """Follow the stream until a version, then generate."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    subscriber = shardckpt.Subscriber(folder / "stream", mirror=folder / "mirror")
    count = 0
    while subscriber.held is None or subscriber.held.number < last:
        staged = subscriber.stage(timeout_s=30)
        staged.commit(model)  # all of the version, or an error and the old one
        count += 1
        if is_restarted:
            report(f"server: joins at version {staged.version}, and applies it at once")
    text = generate(model)
    report(f"server: version {subscriber.label} after {'1 update' if count == 1 else f'{count} updates'}: {text}")
    (folder / "text").write_text(text)
    if not is_restarted:
        time.sleep(60)
        raise SystemExit("the server was not killed")


def generate(model: LlamaForCausalLM) -> str:
    """Return what a model says after the prompt."""
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    return " ".join(map(str, ids[0, len(PROMPT) :].tolist()))


# The job.


def main() -> None:
    """Run the trainer and the server, kill each, start it again, and compare."""
    torch.set_num_threads(1)
    disable_progress_bar()
    folder, config = Path(tempfile.mkdtemp(prefix="rl-stream-")), build_config()
    reached = FORK.Event()
    try:
        (folder / "stream").mkdir()
        trainer = [start(run_rank, rank, folder, "store-1", config, reached) for rank in range(2)]
        wait_for((folder / "stream" / "STREAM.json").exists)
        server = start(serve, folder, config, SERVER_KILLED_AFTER, False)
        wait_for((folder / "text").exists)
        kill("server", [server])
        (folder / "text").unlink()
        wait_for(reached.is_set)
        kill("trainer", trainer)

        trainer = [start(run_rank, rank, folder, "store-2", config, reached) for rank in range(2)]
        join(trainer)
        join([start(serve, folder, config, STEPS, True)])
        compare(folder, config)
    finally:
        if "--keep" in sys.argv:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder)


def compare(folder: Path, config: LlamaConfig) -> None:
    """Export the newest version, and require that transformers generates the server's text with it."""
    found = shardckpt.verify_versions(folder / "stream")
    epochs = {version.epoch for version in found.versions}
    anchors = sum(version.has_anchor for version in found.versions)
    print(f"stream: {len(found.versions)} versions in {len(epochs)} epochs, {anchors} anchors, all intact: {found.ok}")
    config.save_pretrained(folder / "config")
    shardckpt.consolidate(f"{folder}/stream@latest", folder / "exported", config_from=str(folder / "config"))
    text = generate(LlamaForCausalLM.from_pretrained(folder / "exported", dtype=torch.bfloat16))
    if text != (folder / "text").read_text():
        raise SystemExit(f"the exported version says {text}, the server {(folder / 'text').read_text()}")
    print("the exported version generates the same text")


def start(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that ends with this one."""
    process = FORK.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def wait_for(is_done: Callable[[], bool]) -> None:
    """Wait until something has happened."""
    deadline = time.monotonic() + 60
    while not is_done():
        if time.monotonic() > deadline:
            raise SystemExit("a process did not get so far within a minute")
        time.sleep(0.02)


def kill(what: str, processes: list[BaseProcess]) -> None:
    """End processes by SIGKILL, as a node failure or the out-of-memory killer does."""
    for process in processes:
        process.kill()
        process.join()
    names = ", ".join(signal.Signals(-(process.exitcode or 0)).name for process in processes)
    print(f"{what}: ended by {names}", flush=True)


def join(processes: list[BaseProcess]) -> None:
    """Wait for processes; raise SystemExit if one failed."""
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a process failed with exit code {process.exitcode}")


def report(text: str, rank: int = 0) -> None:
    """Print on rank 0."""
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
