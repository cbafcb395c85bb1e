"""Faults of resumes that others reported, injected into small training runs of each style.

A fault changes what a resumed job restores, or what it does between the restore and its first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import fsdp as theirs
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import shardckpt
from shardckpt import core
from shardckpt.checkpoint.stateful.flatten import flatten_state
from shardckpt.state.local.tensor_shards import LocalShard

VOCABULARY, SAMPLES, BATCH = 7, 48, 4  # seven rows on two ranks: uneven shards
SAVED_AT, STEPS = 3, 5


class Net(nn.Module):
    """A language model of one block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.embed(tokens))))

    def drop(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(hidden, 0.2, self.training)


class TiedNet(Net):
    """The model with one tensor for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class BufferedNet(Net):
    """The model with buffers, of which one is not saved, and with a random generator for its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(6, momentum=None)
        self.register_buffer("temperature", torch.ones(()), persistent=False)
        self.generator = torch.Generator()

    def drop(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.temperature.mul_(0.9)
        kept = torch.rand(hidden.shape, generator=self.generator) < 0.8
        return self.batch_norm((hidden * kept).flatten(0, 1)).view_as(hidden) * self.temperature


class ScaledNet(Net):
    """The model with a number in its extra state, which a compiled graph holds as a constant."""

    factor = 2.0

    def drop(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().drop(hidden) * self.factor

    def get_extra_state(self) -> float:
        return self.factor

    def set_extra_state(self, state: float) -> None:
        self.factor = state


class MasterAdamW(torch.optim.AdamW):
    """AdamW for parameters of bfloat16, with copies of float32 in its state."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        before = [(each, each.clone()) for group in self.param_groups for each in group["params"]]
        super().step(closure)
        for each, old in before:
            master = self.state[each].setdefault("master", old.float())
            master += each.float() - old.float()  # the update as far as bfloat16 has it
            master *= 1 - 1e-4
            each.copy_(master)


class Generator:
    """Saved state of a random generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["state"])


class ModelState:
    """Saved state of a model, as frameworks wrap it; with a cache, that of the time when it was asked first."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.cache = model, None

    def keep_cache(self) -> None:
        self.cache = {name: value.clone() for name, value in self.model.state_dict().items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict() if self.cache is None else self.cache

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        (self.cache or {}).update(state)
        if self.cache is None:
            self.model.load_state_dict(state)


NETS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "tied": TiedNet,
    "buffers": BufferedNet,
    "masters": lambda: Net().bfloat16(),
    "wrapped": Net,
    "scaled": ScaledNet,
    "loader": Net,
}
"""Models, by the kind of job that trains them."""


def shard_units(shard: Callable[..., Any], net: nn.Module) -> nn.Module:
    for each in () if isinstance(net, TiedNet) else (net.embed, net.head):
        shard(each)
    return shard(net) or net


STYLES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "ddp": DistributedDataParallel,
    "wrapper": core.FullyShardedDataParallel,
    "originals": lambda net: core.FullyShardedDataParallel(net, use_orig_params=True),
    "fully_shard": lambda net: shard_units(core.fully_shard, net),
    "torch fsdp2": lambda net: shard_units(theirs.fully_shard, net),
}
WORLDS = {"plain": 1}


class Data:
    """Shuffled samples, a batch for each rank, and the position in them."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.at = rank, world, 0
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, 9), generator=generator)
        self.order = torch.randperm(SAMPLES, generator=generator)

    def next(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the next samples."""
        chosen = self.order[self.at : self.at + BATCH * 2][self.rank :: self.world]
        self.at += BATCH * 2
        return {"input": self.tokens[chosen, :-1], "labels": self.tokens[chosen, 1:]}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class LoadedData(Data):
    """The samples from a loader with a worker, whose sampler has the position."""

    def next(self) -> dict[str, torch.Tensor]:
        return next(self.batches)

    @functools.cached_property
    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        samples = [{"input": each[:-1], "labels": each[1:]} for each in self.tokens]
        loader = DataLoader(samples, batch_sampler=self.draw(), num_workers=1, prefetch_factor=1)
        return iter(loader)

    def draw(self) -> Iterator[list[int]]:
        while self.at < SAMPLES:
            chosen = self.order[self.at : self.at + BATCH * 2][self.rank :: self.world]
            self.at += BATCH * 2
            yield chosen.tolist()


class Job:
    """One process of a training run."""

    def __init__(
        self, style: str, rank: int, world: int, seed: int, root: Path, net: str = "plain", **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.net = NETS[net]()
        self.model = STYLES[style](self.net)
        optim = MasterAdamW if net == "masters" else torch.optim.AdamW
        self.optim = optim(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 1, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=net == "buffers")
        self.data = LoadedData(rank, world) if net == "loader" else Data(rank, world)
        self.rank, self.world = rank, world
        self.state = {"model": self.model, "optim": self.optim, "schedule": self.schedule, "data": self.data}
        self.state["rng"] = shardckpt.RNGState()
        torch.manual_seed(100 * seed + rank)
        if isinstance(self.net, BufferedNet):
            self.net.generator.manual_seed(100 * seed + rank)
            self.state |= {"noise": shardckpt.PerRank(Generator(self.net.generator)), "scaler": self.scaler}
        if net == "wrapped":
            self.state["model"] = ModelState(self.model)
        self.checkpointer = shardckpt.Checkpointer(root, witness=shardckpt.Witness(**options))
        self.step = 0

    def train(self, steps: int = STEPS, saved_at: int = -1, *, in_background: bool = False) -> None:
        """Train to a step; save one of them."""
        handle = None
        while self.step < steps:
            self.step += 1
            batch = self.data.next()
            loss = self.train_step(batch)
            self.checkpointer.witness(self.step, loss=loss, batch=batch)
            if self.step == saved_at:
                save = self.checkpointer.async_save if in_background else self.checkpointer.save
                handle = save(self.step, self.state)
        if handle is not None:
            handle.result()

    def train_step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = functional.cross_entropy(self.model(batch["input"]).flatten(0, 1), batch["labels"].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        self.optim.zero_grad()
        self.schedule.step()
        if self.world > 1:
            for buffer in self.model.buffers():
                distributed.broadcast(buffer, 0)
        return loss.detach()

    def restore(self, *left_out: str, strict: bool = True) -> None:
        """Restore the newest step; parts that are left out keep the values that they have."""
        include = [name for name in self.state if name not in left_out]
        self.step = self.checkpointer.restore(self.state, include=include if left_out else None, strict=strict)

    def rebuild_buffers(self) -> None:
        """Compute the buffer that is not saved, as a job does that knows of it."""
        for _ in range(self.step if isinstance(self.net, BufferedNet) else 0):
            self.net.temperature.mul_(0.9)

    @torch.no_grad()
    def change(self, change: Callable[[LocalShard], Any], *path: str) -> None:
        """Change this rank's shard of a tensor of the state in place."""
        flat = flatten_state({"model": self.model, "optim": self.optim}, self.rank, self.world)
        if path in flat.arrays:  # of a flat parameter, a rank may have no part of a member
            for shard in flat.arrays[path].shards:
                change(shard)


@dataclass(frozen=True)
class Fault:
    """A fault, and how the verdict has to name it.

    Attributes:
        origin: Where it was reported.
        resume: Restores a job with the fault.
        cause: Cause of the divergence.
        name: Name of what differs first; empty for any.
        ranks: Ranks that differ, in two; None for any.
        net: Kind of the job that saved.
        resumed_net: Kind of the job that resumes; empty for the same.
        holes: Styles of sharding in which the fault cannot occur, with the reason.
    """

    origin: str
    resume: Callable[[Job], None]
    cause: str
    name: str = ""
    ranks: tuple[int, ...] | None = None
    net: str = "plain"
    resumed_net: str = ""
    holes: Mapping[str, str] = field(default_factory=dict)


def lose_rows_of_an_uneven_vocabulary(job: Job) -> None:
    def lose_last_row(shard: LocalShard) -> None:
        if shard.box.stop[0] == VOCABULARY:
            shard.tensor[-1:] *= 0.5

    job.restore()
    job.change(lose_last_row, "model", "embed.weight")


def quantize_a_slot(job: Job) -> None:
    job.restore()
    job.change(lambda shard: shard.tensor.mul_(1e-4), "optim", "state", "head.weight", "exp_avg_sq")


def advance_a_fresh_optimizer(job: Job) -> None:
    job.restore("optim")
    rates = [group["lr"] for group in job.optim.param_groups]
    for group in job.optim.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    job.optim.step()
    job.optim.zero_grad()
    for group, rate in zip(job.optim.param_groups, rates, strict=True):
        group["lr"] = rate


def seed_ranks_anew(job: Job) -> None:
    job.restore()
    if job.rank or job.world == 1:
        torch.manual_seed(1234)


def forget_the_position(job: Job) -> None:
    job.restore("data")


def begin_from_scratch(job: Job) -> None:
    job.restore("model")


def shuffle_in_another_way(job: Job) -> None:
    job.restore()
    job.data.order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(6))


def number_ranks_in_another_way(job: Job) -> None:
    job.restore()
    job.data.rank = job.world - 1 - job.rank


def run_ahead(job: Job) -> None:
    job.restore()
    job.data.next()  # the position counts a batch that a worker had fetched, and training had not


def restore_into_a_cache(job: Job) -> None:
    job.state["model"].keep_cache()
    job.restore()


def initialize_a_norm_again(job: Job) -> None:
    job.restore()
    job.change(lambda shard: shard.tensor.fill_(1.0), "model", "norm.weight")
    job.change(lambda shard: shard.tensor.zero_(), "model", "norm.bias")


def freeze_the_schedule(job: Job) -> None:
    job.restore()
    job.schedule.step = lambda: None


def use_the_schedule_of_another_optimizer(job: Job) -> None:
    job.restore()
    rate = job.schedule.base_lrs[0]
    for group in job.optim.param_groups:
        group["lr"] = rate


def step_the_schedule_twice(job: Job) -> None:
    job.restore()
    once = job.schedule.step
    job.schedule.step = lambda: (once(), once())


def change_betas(job: Job) -> None:
    job.restore()
    for group in job.optim.param_groups:
        group["betas"] = (0.8, 0.999)


def evaluate(job: Job) -> None:
    job.restore()
    job.model.eval()


def forget_a_buffer(job: Job) -> None:
    job.restore()  # the buffer is not in the checkpoint, and has its first value


def share_the_generator_of_dropout(job: Job) -> None:
    job.restore()
    states = [torch.get_rng_state(), torch.get_rng_state()]
    if job.world > 1:
        distributed.broadcast(states[0], 0)
    torch.set_rng_state(states[0])


def share_the_generator_of_a_module(job: Job) -> None:
    job.restore()
    job.rebuild_buffers()
    state = job.net.generator.get_state()
    if job.world > 1:
        distributed.broadcast(state, 0)
    job.net.generator.set_state(state)


def forget_the_counts(job: Job) -> None:
    counts = job.net.batch_norm.num_batches_tracked
    job.restore()
    job.rebuild_buffers()
    counts.zero_()


def begin_with_the_first_scale(job: Job) -> None:
    job.restore("scaler")


def rebuild_masters(job: Job) -> None:
    job.restore()
    flat = flatten_state({"model": job.model, "optim": job.optim}, job.rank, job.world)
    for path, array in flat.arrays.items():
        if path[-1] == "master":
            for shard in array.shards:
                shard.tensor.copy_(shard.tensor.bfloat16())


def train_without_the_tie(job: Job) -> None:
    job.restore(strict=False)  # otherwise the load finds that the checkpoint has no slots for the second tensor


def keep_a_graph(job: Job) -> None:
    job.net.factor = 1.0
    graph = torch.fx.symbolic_trace(lambda hidden: ScaledNet.drop(job.net, hidden))
    object.__setattr__(job.net, "drop", graph)  # holds the factor as a constant, and has no guard
    job.restore()


def restore(job: Job) -> None:
    job.restore()


ONE_RANK = {"plain": "one rank has nothing to share"}
NO_MODEL = dict.fromkeys(
    ("wrapper", "originals", "fully_shard", "torch fsdp2"),
    "a new optimizer of shards is not restored without its model, so that a wrapped model is refused",
)

FAULTS: Mapping[str, Fault] = {
    "uneven vocabulary": Fault("torchtitan#1136", lose_rows_of_an_uneven_vocabulary, "parameter", "model.embed.weight"),
    "quantized slot": Fault("flashoptim#3", quantize_a_slot, "optimizer", "optim.state.head.weight.exp_avg_sq"),
    "fresh optimizer": Fault("Megatron-Bridge#5680", advance_a_fresh_optimizer, "optimizer", "optim.state.*.step"),
    "other random states": Fault("Megatron-LM#6858", seed_ranks_anew, "random state", "torch", (1,)),
    "repeated samples": Fault("accelerate#3938", forget_the_position, "batch", "repeated"),
    "from scratch": Fault("DeepSpeed#6691", begin_from_scratch, "parameter", "model.embed.weight"),
    "other permutation": Fault("VeOmni#853", shuffle_in_another_way, "batch", "other samples"),
    "other share": Fault(
        "VeOmni#853", number_ranks_in_another_way, "batch", "other ranks' share", (0, 1), holes=ONE_RANK
    ),
    "workers ran ahead": Fault("prime-rl#3299", run_ahead, "batch", "skipped"),
    "a worker ran ahead": Fault("prime-rl#3299", restore, "batch", "skipped", net="loader"),
    "cached state dict": Fault(
        "torchtitan#1702",
        restore_into_a_cache,
        "parameter",
        "model.model.embed.weight",
        net="wrapped",
        holes=NO_MODEL,
    ),
    "initialized norm": Fault("to_empty", initialize_a_norm_again, "parameter", "model.norm.weight"),
    "missing tie": Fault(
        "to_empty", train_without_the_tie, "parameter", "model.head.weight", net="tied", resumed_net="plain"
    ),
    "frozen schedule": Fault(
        "a schedule that is not stepped", freeze_the_schedule, "schedule", "optim.param_groups.0.lr"
    ),
    "schedule of another optimizer": Fault(
        "an optimizer made after the schedule",
        use_the_schedule_of_another_optimizer,
        "schedule",
        "optim.param_groups.0.lr",
    ),
    "schedule stepped twice": Fault(
        "a loop and a framework step it", step_the_schedule_twice, "schedule", "optim.param_groups.0.lr"
    ),
    "other betas": Fault("a changed config", change_betas, "optimizer", "optim.param_groups.0.betas.0"),
    "evaluation mode": Fault("a validation before the first step", evaluate, "random state", "torch"),
    "lost buffer": Fault("persistent=False", forget_a_buffer, "parameter", "model.temperature", net="buffers"),
    "shared dropout": Fault(
        "rng.pt of rank 0", share_the_generator_of_dropout, "random state", "torch", (1,), holes=ONE_RANK
    ),
    "shared generator": Fault(
        "rng.pt of rank 0",
        share_the_generator_of_a_module,
        "random state",
        "model.generator",
        (1,),
        net="buffers",
        holes=ONE_RANK,
    ),
    "counts of batch norm": Fault(
        "integers left out", forget_the_counts, "parameter", "model.batch_norm.num_batches_tracked", net="buffers"
    ),
    "first scale": Fault("no scaler in the state", begin_with_the_first_scale, "state", "scaler.scale", net="buffers"),
    "lost masters": Fault(
        "masters made from bfloat16", rebuild_masters, "optimizer", "optim.state.*.weight.master", net="masters"
    ),
    "stale graph": Fault("guards that are not evaluated", keep_a_graph, "loss", "loss", net="scaled"),
}
