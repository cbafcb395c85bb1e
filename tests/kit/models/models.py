"""Small models, each with one thing that sharding engines get wrong, and how they are cut into units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Sharder = Callable[[nn.Module], nn.Module]
WIDTH = 7


class Block(nn.Module):
    """Two linears and a residual; odd sizes, so that no world size divides them."""

    def __init__(self, width: int = WIDTH, hidden: int = 9) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Linear, blocks, linear; subclasses change what the blocks are and how they are called."""

    block: Callable[[], nn.Module] = Block

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, 3)

    def call(self, block, x, index):
        return block(x)

    def forward(self, x):
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = self.call(block, x, index)
        return self.last(x)


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mix(nn.Module):
    """What a model may be: recomputing in its blocks, frozen in part, tied from head to embedding."""

    def __init__(self, *, checkpointed: bool, frozen: bool, tied: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.blocks[0].requires_grad_(False)
            self.blocks[1].up.requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class FrozenMix(Stack):
    """A unit that is frozen whole, one that is frozen in part, one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)


class FrozenFirst(Stack):
    """Frozen from the input up to the middle: the units before it have nothing to do in backward."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.first, self.blocks[0]):
            module.requires_grad_(False)

    def forward(self, x):
        return super().forward(x)


class WithSpare(Block):
    """A block with a linear that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 4)


class Unused(Stack):
    """Every block has parameters that no rank uses."""

    block = WithSpare


class Gated(Block):
    """A block whose parts are used or left out by what the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, use: bool = True):
        x = super().forward(x)
        return x + self.extra(x) if use else x


class Ranked(nn.Module):
    """Units of one size; `batch[1]` names the blocks whose extra part this rank uses."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(depth))

    def forward(self, batch):
        x, used = batch
        for index, block in enumerate(self.blocks):
            x = block(x, index in used)
        return x


class Inner(nn.Module):
    """A unit inside a unit: its own linear, and a block that is a unit too."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.deep = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])

    def forward(self, x):
        x = self.own(x)
        for group in self.deep:
            for block in group:
                x = block(x)
        return x


class Nested(Stack):
    """Lists of lists of modules, three levels of units."""

    block = Inner

    def __init__(self) -> None:
        super().__init__(depth=2)


class Recomputed:
    """A way to call blocks: each recomputes its forward in backward."""

    reentrant = False

    def call(self, block, x, index):
        return checkpoint(block, x, use_reentrant=self.reentrant)


class Checkpointed(Recomputed, Stack):
    pass


class CheckpointedReentrant(Checkpointed):
    """The same with the older kind, which runs a backward inside backward."""

    reentrant = True


class InsideCheckpoint(nn.Module):
    """A block that recomputes what is inside it."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class InsideCheckpointReentrant(InsideCheckpoint):
    reentrant = True


class UnitOfCheckpoint(Stack):
    """unit(checkpoint) where `Checkpointed` is checkpoint(unit)."""

    block = InsideCheckpoint


class UnitOfCheckpointReentrant(Stack):
    block = InsideCheckpointReentrant


class Twice(Stack):
    """One block is called three times, with other blocks between."""

    def forward(self, x):
        x = self.first(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2], self.blocks[0]):
            x = self.call(block, x, 0)
        return self.last(x)


class TwiceCheckpointed(Recomputed, Twice):
    pass


class TwiceCheckpointedReentrant(TwiceCheckpointed):
    reentrant = True


@dataclass
class Output:
    """What a block of `Containers` may answer with."""

    hidden: torch.Tensor
    extras: dict[str, Any] = field(default_factory=dict)


class Containing(Block):
    """Takes and gives a given container."""

    kind = "dict"

    def forward(self, x):
        x = x["x"] if isinstance(x, dict) else x
        y = super().forward(x)
        if self.kind == "dict":
            return {"hidden": y, "n": 3}
        if self.kind == "dataclass":
            return Output(y, {"all": [y * 2]})
        return (y, None, [y.detach()])


class Containers(Stack):
    """Outputs in dicts, dataclasses and tuples."""

    block = Containing

    def __init__(self) -> None:
        super().__init__()
        for block, kind in zip(self.blocks, ("dict", "dataclass", "tuple"), strict=True):
            block.kind = kind

    def call(self, block, x, index):
        out = block({"x": x} if index else x)
        if isinstance(out, dict):
            return out["hidden"]
        return out.extras["all"][0] if isinstance(out, Output) else out[0]


class Opaque:
    """A container that no tree walk knows."""

    def __init__(self, value) -> None:
        self.value = value


class Hiding(Block):
    def forward(self, x):
        return Opaque(super().forward(x))


class Hidden(Stack):
    """Outputs that only their attribute leads to."""

    block = Hiding

    def call(self, block, x, index):
        return block(x).value


class Viewing(Block):
    """Gives a view of its result."""

    def forward(self, x):
        return super().forward(x).view(-1)


class ViewedInPlace(Stack):
    """A unit's output is a view, and is changed in place at once."""

    block = Viewing

    def call(self, block, x, index):
        out = block(x)
        out.mul_(0.5).add_(1.0)
        return out.view(x.shape)


class Keeping(Block):
    """Keeps a tensor of its forward, as a cache does, and gives nothing that needs gradients."""

    def forward(self, x):
        self.kept = super().forward(x)
        return x.detach()


class Escaped(Stack):
    """The loss is made of a tensor that a unit kept on itself."""

    block = Keeping

    def call(self, block, x, index):
        block(x)
        return block.kept


class Partial(Stack):
    """Gives two results; the loss may use one of them, so that some blocks never see backward."""

    def forward(self, batch):
        x, early = batch
        x = self.first(x)
        middle = self.blocks[1](self.blocks[0](x))
        late = self.last(self.blocks[2](middle))
        return middle if early else late


class Entry(nn.Module):
    """A unit whose inputs never require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens):
        return self.embed(tokens) * self.scale


class NoGradInputs(nn.Module):
    """The first unit takes integers; backward ends in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Entry(), Block(), nn.Linear(WIDTH, 3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class MixedDtype(Block):
    """fp32 linears, a bf16 gain and a double shift in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x):
        return super().forward(x) * self.gain.float() + self.shift.float() + self.table[1]


class MixedDtypes(Stack):
    block = MixedDtype


class Scaled(Block):
    """A 0-dim parameter, and one whose memory is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.turned = nn.Parameter(torch.randn(4, WIDTH).t())

    def forward(self, x):
        return super().forward(x) * self.temperature + self.turned.sum(1)


class Scalars(Stack):
    block = Scaled


class Recurrent(nn.Module):
    """A module that keeps a list of its own weights."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(5, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x)[0])


class Chain(nn.Module):
    """Blocks, one after the other; a subclass sets `blocks`."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Odd(Chain):
    """ParameterList, ParameterDict, a parametrized linear, an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock(), OddBlock()])


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(6, 6) / 3, torch.randn(6) / 3])
        self.named = nn.ParameterDict({"shift": torch.randn(6) / 3})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.normed(x @ self.many[0] + self.many[1] + self.named["shift"])
        return x + self.attend(x, x, x, need_weights=False)[0]


class Noted(Block):
    """A block that notes when it computes forward and when backward reaches its middle; `probe` is called at both."""

    def __init__(self, name: str, width: int, hidden: int, probe: Callable[[str], None]) -> None:
        super().__init__(width, hidden)
        self.name, self.probe = name, probe

    def forward(self, x):
        self.probe(f"run {self.name}")
        middle = torch.tanh(self.up(x))
        if middle.requires_grad:
            middle.register_hook(lambda _: self.probe(f"grad {self.name}"))
        return x + self.down(middle)


class Wide(nn.Module):
    """Blocks large enough that bytes tell who holds what, each of its own size so that a collective tells its unit."""

    def __init__(self, depth: int = 4, width: int = 64, probe: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Noted(f"blocks.{i}", width, 96 + 16 * i, probe) for i in range(depth))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


# ------------------------------------------------------------------------------------------------- cases


def floats(rank: int, step: int) -> torch.Tensor:
    """A batch of rows of 5 that is this rank's and this step's own."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(1000 * step + rank))


def sequences(size: int) -> Callable[[int, int], torch.Tensor]:
    return lambda rank, step: torch.randn(2, 3, size, generator=torch.Generator().manual_seed(1000 * step + rank))


def ranked(rank: int, step: int) -> tuple[torch.Tensor, set[int]]:
    """Each rank uses the extra part of other blocks, each step anew; some parts are used by nobody at times."""
    return rows(rank, step), {(rank + step) % 4, (2 * rank + step) % 4}


def partial(rank: int, step: int) -> tuple[torch.Tensor, bool]:
    return floats(rank, step), step % 2 == 0


def partial_by_rank(rank: int, step: int) -> tuple[torch.Tensor, bool]:
    return floats(rank, step), (rank + step) % 2 == 0


def blocks_and_root(model: nn.Module, shard: Sharder) -> nn.Module:
    """Every entry of `blocks` is a unit, and the root."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = shard(block)
    return shard(model)


def root_alone(model: nn.Module, shard: Sharder) -> nn.Module:
    return shard(model)


def deep(model: nn.Module, shard: Sharder) -> nn.Module:
    for inner in model.blocks:
        for group in inner.deep:
            for index, block in enumerate(group):
                group[index] = shard(block)
    return blocks_and_root(model, shard)


def embedding_too(model: nn.Module, shard: Sharder) -> nn.Module:
    """The embedding is a unit; the head, tied to it, is left to the root."""
    model.embed = shard(model.embed)
    return blocks_and_root(model, shard)


def square(out: Any) -> torch.Tensor:
    """A loss that needs no target."""
    return (out.float() ** 2).mean()


@dataclass(frozen=True)
class Case:
    """A model, how it is cut, and what it is fed.

    `torch` says where torch is right: "yes", "orig" (its wrapper with original parameters only), "flat" (without),
    "no" (nowhere).
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any] = floats
    cut: Callable[[nn.Module, Sharder], nn.Module] = blocks_and_root
    torch: str = "yes"

    def __str__(self) -> str:
        return self.name


PLAIN = Case("mlp", Stack)
CASES = [
    PLAIN,
    Case("one unit", Stack, cut=root_alone),
    Case("tied in the root", Tied, tokens),
    Case("tied across units", Tied, tokens, embedding_too, torch="no"),
    Case("frozen unit and frozen part", FrozenMix, torch="orig"),
    Case("frozen first", FrozenFirst, torch="orig"),
    Case("unused everywhere", Unused, torch="flat"),
    Case("used on some ranks", Ranked, ranked, torch="no"),
    Case("nested", Nested, cut=deep),
    Case("checkpoint(unit)", Checkpointed),
    Case("checkpoint(unit) reentrant", CheckpointedReentrant),
    Case("unit(checkpoint)", UnitOfCheckpoint),
    Case("unit(checkpoint) reentrant", UnitOfCheckpointReentrant),
    Case("called three times", Twice),
    Case("called three times, checkpointed", TwiceCheckpointed),
    Case("called three times, checkpointed reentrant", TwiceCheckpointedReentrant, torch="no"),
    Case("containers", Containers),
    Case("unknown containers", Hidden, torch="no"),
    Case("view changed in place", ViewedInPlace, torch="no"),
    Case("escaped tensor", Escaped, torch="no"),
    Case("part of the outputs", Partial, partial, torch="flat"),
    Case("part of the outputs by rank", Partial, partial_by_rank, torch="no"),
    Case("inputs without gradients", NoGradInputs, tokens),
    Case("mixed dtypes", MixedDtypes, torch="no"),
    Case("scalars and strides", Scalars, torch="no"),
    Case("lstm", Recurrent, sequences(5)),
    Case("gru", lambda: Recurrent(nn.GRU), sequences(5)),
    Case("lists, parametrized, attention", Odd, sequences(6)),
]


def case(name: str) -> Case:
    """The case of that name."""
    return next(each for each in CASES if each.name == name)


def built(which: Case) -> nn.Module:
    """The model of a case, the same on every rank."""
    torch.default_generator.manual_seed(17)  # the CPU's alone: to note a seed for other devices takes 400 times as long
    return which.build()


def linears(model: nn.Module) -> Iterator[nn.Linear]:
    return (module for module in model.modules() if isinstance(module, nn.Linear))
