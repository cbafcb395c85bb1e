"""Rank files as torch itself writes them: each rank of a gloo group saves what its wrapper's `state_dict` gave.

Nothing is trained: parameters hold numbers of their own, and moments are multiples of what a rank holds of them.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  (as everybody calls it)
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.kit.models.torch_limits import SHARDS_UNEVEN_ROWS_TWICE

CPU = torch.device("cpu")
TWO = (
    "local-orig",
    "local-flat",
    "local-orig-bf16",
    "local-flat-bf16",
    "sharded-orig",
    "sharded-flat",
    "sharded-mesh",
    "fsdp2",
)
FOUR = (
    *("local-orig-4", "local-flat-4", "sharded-orig-4", "sharded-orig-hybrid", "sharded-flat-hybrid"),
    *("fsdp2-4", "fsdp2-hybrid"),
    *(("fsdp2-tp",) if SHARDS_UNEVEN_ROWS_TWICE else ()),
)
SLOTS = {"exp_avg": 2.0, "exp_avg_sq": 3.0}


class Block(nn.Module):
    """Odd sizes: none divides by a number of ranks or by an alignment."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.zeros(width))


class Net(nn.Module):
    """Two units and what is left, buffers, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.first = Block(5)
        self.second = Block(6)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight


def built() -> Net:
    """Return the net with its numbers: each element of it is another one."""
    model, at = Net(), 1
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = torch.arange(at, at + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        at += tensor.numel()
    return model


def truth() -> dict[str, torch.Tensor]:
    """Return what the files hold together: the model, and the optimizer as `<fqn>/<slot>`."""
    model = built()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in model.named_parameters():
        found |= {f"{name}/{slot}": times * value.detach() for slot, times in SLOTS.items()}
        found[f"{name}/step"] = torch.tensor(3.0)
    return found


def optimizer(model: nn.Module, groups: int = 1) -> torch.optim.Optimizer:
    """Return an optimizer whose moments are multiples of what this rank holds."""
    parameters = list(model.parameters())
    cut = -(-len(parameters) // groups)
    optim = torch.optim.AdamW([{"params": parameters[i : i + cut]} for i in range(0, len(parameters), cut)], lr=0.1)
    for parameter in parameters:
        held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if held.numel() or hasattr(parameter, "to_local"):  # as in training: an empty fragment has no gradient
            moments = {slot: parameter.detach().clone().mul_(times) for slot, times in SLOTS.items()}
            optim.state[parameter] = {"step": torch.tensor(3.0), **moments}
    return optim


def flat(style: str, *, compute: Any = None, mesh: Any = None) -> FSDP:
    """Return torch's FSDP1 around the net and its blocks; `style` is `orig` or `flat`."""
    options: dict[str, Any] = {
        "use_orig_params": style == "orig",
        "device_id": CPU,
        "sharding_strategy": ShardingStrategy.FULL_SHARD
        if mesh is None or mesh.ndim == 1
        else ShardingStrategy.HYBRID_SHARD,
        "mixed_precision": MixedPrecision(param_dtype=compute) if compute else None,
        "device_mesh": mesh,
    }
    model = built()
    model.first, model.second = FSDP(model.first, **options), FSDP(model.second, **options)
    return FSDP(model, **options)


def save(model: nn.Module, folder: Path, rank: int, kind: StateDictType | None = None, groups: int = 1) -> None:
    """Save this rank's files: the model's state of a kind, and the optimizer's own state_dict."""
    folder.mkdir(parents=True, exist_ok=True)
    optim = optimizer(model, groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind is None:
            torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "step": 3}, folder / f"rank{rank}.pt")
            return
        with FSDP.state_dict_type(model, kind):
            torch.save(model.state_dict(), folder / f"model_rank{rank}.pt")
        state = optim.state_dict()
        if kind is StateDictType.SHARDED_STATE_DICT:
            state = FSDP.sharded_optim_state_dict(model, optim)
        torch.save(state, folder / f"optim_rank{rank}.pt")


def two_ranks(rank: int, world: int, folder: Path) -> None:
    """Save what two ranks can."""
    local, sharded = StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    for style in ("orig", "flat"):
        save(flat(style), folder / f"local-{style}", rank, local)
        save(flat(style, compute=torch.bfloat16), folder / f"local-{style}-bf16", rank, local, groups=2)
        save(flat(style), folder / f"sharded-{style}", rank, sharded)
    save(in_place(built(), init_device_mesh("cpu", (world,))), folder / "fsdp2", rank)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    save(flat("orig", mesh=mesh), folder / "sharded-mesh", rank, sharded)


def four_ranks(rank: int, world: int, folder: Path) -> None:
    """Save what takes four ranks."""
    assert world == 4
    local, sharded = StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for style in ("orig", "flat"):
        save(flat(style, mesh=mesh), folder / f"sharded-{style}-hybrid", rank, sharded)
        save(flat(style), folder / f"local-{style}-4", rank, local)
    save(flat("orig"), folder / "sharded-orig-4", rank, sharded)
    save(in_place(built(), mesh), folder / "fsdp2-hybrid", rank)
    save(in_place(built(), init_device_mesh("cpu", (world,))), folder / "fsdp2-4", rank)
    if not SHARDS_UNEVEN_ROWS_TWICE:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = built()
    plan = {"first.up": ColwiseParallel(), "first.down": RowwiseParallel(), "second.up": ColwiseParallel()}
    save(in_place(parallelize_module(model, mesh["tp"], plan), mesh["dp"]), folder / "fsdp2-tp", rank)


class Ignoring(nn.Module):
    """Two units, a parameter that FSDP ignores, and a buffer as long as the shard of a unit."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, width), nn.Linear(4, 3)
        self.ignored = nn.Parameter(torch.zeros(shape))
        self.register_buffer("scale", torch.zeros(10))


def ignoring_ranks(rank: int, world: int, folder: Path, shape: tuple[int, ...], width: int) -> None:
    """Save a LOCAL state with an ignored parameter, the optimizer, and the members of the flat parameters."""
    options: dict[str, Any] = {"device_id": CPU, "use_orig_params": False}
    model = Ignoring(shape, width)
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, 1.0 + len(name))
    model.first, model.second = FSDP(model.first, **options), FSDP(model.second, **options)
    whole = FSDP(model, ignored_states=[model.ignored], **options)
    save(whole, folder, rank, StateDictType.LOCAL_STATE_DICT)
    units = {"": whole, "first": model.first, "second": model.second}
    flats = {name: unit._handle.flat_param for name, unit in units.items()}
    handles = [
        {"module": name, "fqns": list(flat._fqns), "shapes": [list(shape) for shape in flat._shapes]}
        for name, flat in flats.items()
    ]
    note = {"world_size": world, "rank": rank, "handles": handles}
    (folder / f"flat_param_metadata_rank{rank}.json").write_text(json.dumps(note))


def for_the_docs(rank: int, world: int, folder: Path) -> None:
    """Save a layer of a transformer in three ways."""

    def layer() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(8, 2, 16)

    options: dict[str, Any] = {"device_id": CPU}
    model = layer()
    model.linear1 = FSDP(model.linear1, **options)
    save(FSDP(model, **options), folder / "local", rank, StateDictType.LOCAL_STATE_DICT)
    save(FSDP(layer(), **options, use_orig_params=True), folder / "sharded", rank, StateDictType.SHARDED_STATE_DICT)
    model = layer()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    save(model, folder / "ranks", rank)


def in_place(model: nn.Module, mesh: Any) -> nn.Module:
    """Return the net under torch's `fully_shard`."""
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    return model
