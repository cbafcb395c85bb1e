"""Kill ranks and agents under torchrun, and lose memory; compare the losses with those of jobs resumed by hand.

    python examples/survive.py [--style ddp] [--short]

Each agent of torchrun is a simulated machine: it has one rank, and a folder in memory for the captures.
After each failure torchrun starts the ranks that are left again, on four, three or two machines, and each attempt
restores the newest step. Afterwards every attempt is repeated by forked ranks that load the same step from a
disk, to which the attempt before it had saved, and every loss is compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import run as torchrun
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from train_fsdp import Block, Model, make_batch

import shardckpt
from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.core.wrap import ModuleWrapPolicy
from shardckpt.events import OperationEvent, RestoreEvent

STYLES = ("fully_shard", "wrapper", "fsdp2", "ddp")
CAPTURE_EVERY, SAVE_EVERY = 2, 16
LEAST_STEPS, MOST_AFTER_SAVE = 6, 13
"""A failure comes after so many steps of an attempt, and at most so many after a save in the root."""

MOST_S = 80.0
"""Maximum seconds for an incident and what follows; a run may take so many for each of its incidents."""

TORCHRUN = (
    *("--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=9", "--local-addr=127.0.0.1"),
    *("--rdzv-backend=c10d", "--rdzv-id=survive"),
    "--rdzv-conf=is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=20",
)
"""Options of torchrun. The store of the rendezvous is in another process, since any agent may be killed. Agents wait
3 s for others to join; an agent without a sign of life for 20 s counts as lost. Busy machines may stall for seconds. An
agent that is alive and counts as lost does not learn it, and its rank may train on alone."""

GROUP_TIMEOUT = timedelta(seconds=30)
"""Maximum time that ranks wait for each other."""

ENVIRONMENT = {
    # Otherwise ranks that start again find the addresses of those before them in the store of an agent.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
FORK = multiprocessing.get_context("fork")
MARKS = ("noticed", "created", "imported", "joined", "restored", "stepped")
"""Times in the journal of a rank: it noticed a failure; its process was created, had imported torch, had joined the
group, had restored, had trained the first step."""


def build_training(style: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer on this rank."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model: nn.Module = Model()
    if style == "wrapper":
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    elif style == "ddp":
        model = DistributedDataParallel(model)
    else:
        shard: Callable[..., object] = fully_shard if style == "fully_shard" else torch_fully_shard
        for block in model.blocks:
            shard(block)
        shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_alone() -> None:
    """Take a step of an optimizer, so that forked ranks have all that the first step imports."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train one step; return the mean loss of all ranks."""
    ids = make_batch(step)
    loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


# Ranks under torchrun


class Journal:
    """Journal of a rank in one attempt: a line of JSON for each thing that happened.

    Args:
        folder: Folder of the journals.
    """

    def __init__(self, folder: Path) -> None:
        imported = time.time()
        attempt = [imported]
        dist.broadcast_object_list(attempt)
        self._file = (folder / f"{attempt[0]:.6f}-{dist.get_rank()}.jsonl").open("a", buffering=1)
        self.write(pid=os.getpid(), node=os.environ["SHARDCKPT_NODE"], world=dist.get_world_size())
        self.write(created=find_creation_time(), joined=time.time())

    def write(self, **fields: object) -> None:
        """Write fields; they are there even if the process is killed right after."""
        self._file.write(json.dumps(fields) + "\n")


def find_creation_time() -> float:
    """Return the time at which this process was created, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def run_rank(folder: Path, style: str) -> None:
    """Train under torchrun until a file `stop` appears."""
    imported = time.time()
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    journal = Journal(folder / "journal")
    journal.write(imported=imported)
    try:
        train(folder, style, journal)
    except Exception:
        journal.write(noticed=time.time())
        raise
    dist.destroy_process_group()


def train(folder: Path, style: str, journal: Journal) -> None:
    """Restore the newest step and train on; every second step is captured, every 16th saved in the root."""
    agent = os.getppid()

    def note_tier(event: OperationEvent) -> None:
        if isinstance(event, RestoreEvent):
            journal.write(tier=event.tier)

    ck = shardckpt.Checkpointer(
        folder / "run",
        save_every=SAVE_EVERY,
        tiers=[shardckpt.PeerMemory(copies=1, every=CAPTURE_EVERY, max_bytes="1GB")],
        on_event=note_tier,
    )
    model, optimizer = build_training(style, seed=0)
    state: dict[str, Any] = {"model": model, "optim": optimizer}
    step = ck.restore(state) or 0
    journal.write(restored=time.time(), start=step)
    while not is_stopped(folder):
        step += 1
        loss = take_step(model, optimizer, step)
        journal.write(step=step, loss=loss, stepped=time.time())
        if ck.should_save(step):
            ck.save(step, state)
        if os.getppid() != agent:
            raise SystemExit("the agent of this rank is gone: a scheduler would have ended the rank too")
    ck.wait()


def is_stopped(folder: Path) -> bool:
    """Return True on all ranks if rank 0 sees the file `stop`."""
    flag = torch.tensor([dist.get_rank() == 0 and (folder / "stop").exists()], dtype=torch.int32)
    dist.broadcast(flag, 0)
    return bool(flag.item())


# The process that starts agents and kills


@dataclass
class Attempt:
    """One start of all ranks, as their journals have it.

    Attributes:
        began: Time at which rank 0 formed the group, in seconds since the epoch.
        marks: Times of each rank.
        nodes: Process id of the rank of each node.
        world: Number of ranks.
        start: Step that was restored; 0 without one.
        tier: Place that it was restored from.
        losses: Mean loss of each step.
    """

    began: float
    marks: dict[str, list[float]] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    world: int = 0
    start: int = 0
    tier: str = ""
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Number of the last step that was trained."""
        return max(self.losses, default=self.start)

    def read_line(self, line: dict[str, Any]) -> None:
        """Take in a line of a journal."""
        if "node" in line:
            self.nodes[line["node"]], self.world = line["pid"], line["world"]
        self.start, self.tier = line.get("start", self.start), line.get("tier", self.tier)
        if "loss" in line:
            self.losses[line["step"]] = line["loss"]
        for mark in MARKS:
            if mark in line and not (mark == "stepped" and line["step"] != self.start + 1):
                self.marks.setdefault(mark, []).append(line[mark])


def read_attempts(folder: Path) -> list[Attempt]:
    """Return all attempts, in the order of their begin."""
    attempts: dict[str, Attempt] = {}
    for path in sorted(folder.glob("*.jsonl")):
        began = path.stem.rpartition("-")[0]
        attempt = attempts.setdefault(began, Attempt(float(began)))
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                attempt.read_line(json.loads(line))
    return [attempts[began] for began in sorted(attempts, key=float)]


class Cluster:
    """Simulated machines, each with an agent of torchrun.

    Args:
        folder: Folder of the run, the journals and the sockets.
        style: Kind of sharding.
        deadline: When to stop waiting, in seconds on the `time.monotonic` clock.
        is_forking: Whether agents fork their ranks, which then import nothing.
    """

    def __init__(self, folder: Path, style: str, deadline: float, *, is_forking: bool) -> None:
        self._folder, self._style, self._deadline, self._is_forking = folder, style, deadline, is_forking
        self._agents: dict[str, BaseProcess] = {}
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._nodes: set[str] = set()

    def start(self, nodes: str) -> None:
        """Start the agents of some machines."""
        options = [*TORCHRUN, f"--rdzv-endpoint=127.0.0.1:{self._store.port}", f"--log-dir={self._folder}"]
        options += ["--run-path", "--start-method=fork"] if self._is_forking else []
        options += [os.path.abspath(__file__), "--rank-in", str(self._folder), "--style", self._style]
        for node in nodes:
            args = (node, options, self._folder / f"agent-{node}.txt")
            self._agents[node] = FORK.Process(target=run_agent, args=args)
            self._agents[node].start()
            self._nodes.add(node)

    def read(self) -> list[Attempt]:
        """Return all attempts until now."""
        return read_attempts(self._folder / "journal")

    def wait_for(self, world: int, since: float) -> Attempt:
        """Wait until an attempt of a number of ranks has trained some steps, and return it.

        Args:
            world: Number of ranks.
            since: Time after which the attempt began, in seconds since the epoch.
        """
        while time.monotonic() < self._deadline:
            attempt = next(iter(self.read()[-1:]), Attempt(0.0))
            is_far = attempt.last - attempt.start >= LEAST_STEPS and attempt.last > SAVE_EVERY
            is_before_save = LEAST_STEPS <= attempt.last % SAVE_EVERY <= MOST_AFTER_SAVE
            if attempt.began > since and attempt.world == world and is_far and is_before_save:
                return attempt
            time.sleep(0.1)
        raise SystemExit(f"{world} ranks did not train in time:\n{self._read_outputs()}")

    def kill(self, nodes: str, *, rank: bool = False, memory: bool = False, agent: bool = False) -> None:
        """Kill processes of some machines at once with SIGKILL, and lose their captures in memory."""
        attempt = self.read()[-1]
        doomed = [self._agents[node].pid or 0 for node in nodes if agent]
        doomed += [attempt.nodes[node] for node in nodes if rank]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        for node in nodes if memory else "":
            lose_memory(node)
        for node in nodes if agent else "":
            self._agents.pop(node).join()

    def find_partners(self) -> str:
        """Return the machines of ranks 0 and 1: the second one has the copies of the first."""
        return "".join([*self.read()[-1].nodes][:2])

    def finish(self) -> None:
        """End the run by the file `stop`, and wait for its agents."""
        (self._folder / "stop").touch()
        for node, agent in self._agents.items():
            agent.join(get_left_s(self._deadline))
            if agent.exitcode != 0:
                raise SystemExit(f"the agent of machine {node} failed:\n{self._read_outputs()}")

    def close(self) -> None:
        """End all processes that are left."""
        for agent in self._agents.values():
            agent.kill()
            agent.join()
        for attempt in self.read()[-1:]:
            for pid in attempt.nodes.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for node in self._nodes:
            lose_memory(node)

    def _read_outputs(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self._folder.glob("agent-*.txt")))


def get_left_s(deadline: float) -> float:
    """Return the seconds that are left until a time on the `time.monotonic` clock."""
    return max(0.0, deadline - time.monotonic())


def run_agent(node: str, options: Sequence[str], output: Path) -> None:
    """Be torchrun on a machine.

    Args:
        node: Name of the machine.
        options: Command line of torchrun.
        output: File of what it prints.
    """
    os.environ.update(ENVIRONMENT, SHARDCKPT_NODE=node)
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(opened, stream)
    torchrun.main(options)


def lose_memory(node: str) -> None:
    """Remove the captures in memory of a machine."""
    os.environ["SHARDCKPT_NODE"] = node
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank may still use them
        shardckpt.stop_tiers()
    del os.environ["SHARDCKPT_NODE"]


@dataclass(frozen=True)
class Incident:
    """Something that happens to the run.

    Attributes:
        what: Description.
        world: Number of ranks afterwards.
        killed: Machines of which processes are killed; empty for two partners: one has the copies of the other.
        targets: Kinds of killed processes: arguments of `Cluster.kill`.
        started: Machines that start.
    """

    what: str
    world: int
    killed: str = ""
    targets: tuple[str, ...] = ()
    started: str = ""


LONG = (
    Incident("the start of four machines", 4, started="abcd"),
    Incident("SIGKILL of a rank", 4, "b", ("rank",)),
    Incident("SIGKILL of a rank, and the loss of its memory", 4, "d", ("rank", "memory")),
    Incident("SIGKILL of an agent", 3, "a", ("agent",)),
    Incident("the loss of a machine: agent, rank and memory", 2, "c", ("agent", "rank", "memory")),
    Incident("the start of two machines", 4, started="ac"),
    Incident("SIGKILL of the ranks of two partners, and the loss of their memory", 4, "", ("rank", "memory")),
)
SHORT = (
    Incident("the start of two machines", 2, started="ab"),
    Incident("SIGKILL of a rank", 2, "b", ("rank",)),
    Incident("the loss of a machine: agent, rank and memory", 1, "a", ("agent", "rank", "memory")),
)


def cause(cluster: Cluster, incident: Incident) -> None:
    """Cause an incident, wait until the run goes on, and print the seconds of each part."""
    now, before = time.time(), len(cluster.read())
    if incident.targets:
        cluster.kill(incident.killed or cluster.find_partners(), **dict.fromkeys(incident.targets, True))
    cluster.start(incident.started)
    attempt = cluster.wait_for(incident.world, now)
    source = f"from {attempt.tier}: step {attempt.start}" if attempt.start else "nothing"
    going = f"{attempt.world} ranks go on" if attempt.world > 1 else "1 rank goes on"
    print(f"{incident.what}: {going}, restored {source}")
    noticed = [at for each in cluster.read()[:before] for at in each.marks.get("noticed", []) if at > now]
    times = [now, *noticed[:1], *(max(attempt.marks[mark]) for mark in MARKS[1:])]
    names = ["noticed by another rank"] * bool(noticed)
    names += ["processes created", "torch imported", "group joined", "restored", "first step"]
    spans = [f"{name} {after - at:.2f} s" for name, (at, after) in zip(names, pairwise(times), strict=True)]
    print(f"  {', '.join(spans)}: {times[-1] - now:.1f} s in all", flush=True)


# The same attempts, resumed by hand from a disk


def repeat(attempts: Sequence[Attempt], folder: Path, style: str, deadline: float) -> list[dict[int, float]]:
    """Repeat attempts on forked ranks, each from the step that one before it has saved to disk; return their losses."""
    sources = [find_source(attempts, index) for index in range(len(attempts))]
    results = []
    for index, attempt in enumerate(attempts):
        saved = {each.start for each, source in zip(attempts, sources, strict=True) if source == index}
        receiver, sender = FORK.Pipe(duplex=False)
        loaded = folder / f"{sources[index]}-{attempt.start}" if attempt.start else None
        args = (attempt, loaded, {step: folder / f"{index}-{step}" for step in saved}, style, folder, sender)
        ranks = [FORK.Process(target=repeat_rank, args=(rank, *args), daemon=True) for rank in range(attempt.world)]
        for process in ranks:
            process.start()
        sender.close()
        if not receiver.poll(get_left_s(deadline)):
            raise SystemExit("ranks that were resumed by hand did not train in time")
        try:
            results.append(receiver.recv())
        except EOFError:
            raise SystemExit("a rank that was resumed by hand failed") from None
        for process in ranks:
            process.join()
    return results


def find_source(attempts: Sequence[Attempt], index: int) -> int:
    """Return the index of the newest attempt that trained the step that an attempt restored; -1 without one."""
    start = attempts[index].start
    return max((at for at in range(index) if attempts[at].start < start <= attempts[at].last), default=-1)


def repeat_rank(
    rank: int, attempt: Attempt, loaded: Path | None, saved: dict[int, Path], style: str, folder: Path, sender: Any
) -> None:
    """Repeat an attempt on one of the forked ranks."""
    warnings.simplefilter("ignore")  # torch warns of each FSDP2 module that returns a view
    store = dist.FileStore(str(folder / f"store-{attempt.began}"), attempt.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=attempt.world, timeout=GROUP_TIMEOUT)
    model, optimizer = build_training(style, seed=0 if loaded is None else 1)
    state: dict[str, Any] = {"model": model, "optim": optimizer}
    if loaded is not None:
        shardckpt.load(state, loaded)
    losses = {}
    for step in range(attempt.start + 1, attempt.last + 1):
        losses[step] = take_step(model, optimizer, step)
        if step in saved:
            shardckpt.save(state, saved[step])
    if rank == 0:
        sender.send(losses)
    dist.destroy_process_group()


def run(folder: Path, style: str, incidents: Sequence[Incident], *, is_forking: bool) -> None:
    """Cause all incidents of a run, then repeat its attempts and compare."""
    (folder / "journal").mkdir()
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    train_alone()
    deadline = time.monotonic() + MOST_S * len(incidents)
    cluster = Cluster(folder, style, deadline, is_forking=is_forking)
    try:
        for incident in incidents:
            cause(cluster, incident)
        cluster.finish()
        attempts = [attempt for attempt in cluster.read() if attempt.losses]
    finally:
        cluster.close()
    expected = repeat(attempts, folder, style, deadline)
    differing = [
        step
        for attempt, losses in zip(attempts, expected, strict=True)
        for step in losses
        if losses[step] != attempt.losses[step]
    ]
    count = sum(len(attempt.losses) for attempt in attempts)
    verdict = f"DIFFERENT at {differing}" if differing else "equal, bit for bit"
    print(f"losses of {count} steps in {len(attempts)} attempts, and those of jobs resumed by hand: {verdict}")
    if differing:
        raise SystemExit(1)


def main() -> None:
    """Run as a rank of torchrun, or start the agents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--style", choices=STYLES, default=STYLES[0], help="kind of sharding")
    parser.add_argument("--short", action="store_true", help="two failures on two machines")
    parser.add_argument("--fork", action="store_true", help="agents fork their ranks, which then import nothing")
    parser.add_argument("--rank-in", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_in is not None:
        run_rank(options.rank_in, options.style)
        return
    folder = Path(tempfile.mkdtemp(prefix="survive-"))
    try:
        run(folder, options.style, SHORT if options.short else LONG, is_forking=options.fork)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
