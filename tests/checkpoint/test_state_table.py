"""The page on what can be in a state says what is so: each cell is tried, and none is silent.

`UPDATE_DOCS=1 pytest tests/checkpoint/test_state_table.py` writes the tables into the page.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardckpt
from shardckpt.errors import ShardckptError
from tests.checkpoint import test_low_bit_optimizers as low_bit
from tests.checkpoint import test_optimizer_zoo as zoo
from tests.kit.ranks.harness import run

PAGE = Path(__file__).resolve().parents[2] / "docs/state-table.md"
WIDTH = 64


def values(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def quantize(seed: int, config: str, **settings: Any) -> torch.Tensor:
    from torchao import quantization

    layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    layer.weight.copy_(values(seed))
    quantization.quantize_(layer, getattr(quantization, config)(**settings))
    return layer.weight.data


def nf4(seed: int) -> torch.Tensor:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return to_nf4(values(seed), 64, 16)


def moments(seed: int, bits: str) -> torch.Tensor:
    from torchao import optim

    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = getattr(optim, f"AdamW{bits}")(layer.parameters())
    layer.weight.grad = values(seed)
    optimizer.step()
    return optimizer.state[layer.weight]["exp_avg"]


def bitsandbytes_layer(seed: int, kind: str, **settings: Any) -> nn.Module:
    from bitsandbytes import nn as layers

    layer = getattr(layers, kind)(WIDTH, WIDTH, **settings)
    layer.load_state_dict({"weight": values(seed), "bias": values(seed)[0]})
    layer.to("cpu")
    if kind == "Linear4bit":
        layer(torch.zeros(1, WIDTH))
    return layer.requires_grad_(False)


class Named(torch.Tensor):
    """A subclass with its elements in its own memory."""


def hold(build: Callable[[int], torch.Tensor], seed: int) -> nn.Module:
    """Return a module with one frozen weight."""
    module = nn.Module()
    module.weight = nn.Parameter(build(seed), requires_grad=False)
    return module


def with_dtype(dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (values(seed) * 9).to(dtype)


def with_layout(layout: torch.layout, seed: int) -> torch.Tensor:
    return values(seed).relu().to_sparse(layout=layout)


PLAIN = "torch.Tensor: "
TENSORS: dict[str, Callable[[int], torch.Tensor]] = {
    **{
        PLAIN + str(dtype).removeprefix("torch."): partial(with_dtype, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
    },
    PLAIN + "a transposed view": lambda seed: values(seed).t(),
    PLAIN + "on `meta`": lambda seed: values(seed).to("meta"),
    PLAIN + "sparse (COO)": partial(with_layout, torch.sparse_coo),
    PLAIN + "sparse (CSR)": partial(with_layout, torch.sparse_csr),
    PLAIN + "`quantize_per_tensor`": lambda seed: torch.quantize_per_tensor(values(seed), 0.1, 0, torch.qint8),
    PLAIN + "nested": lambda seed: torch.nested.nested_tensor(list(values(seed)), layout=torch.jagged),
    "a subclass with its own memory": lambda seed: values(seed).as_subclass(Named),
    "torchao: `Int8Tensor`": partial(quantize, config="Int8WeightOnlyConfig", version=2),
    "torchao: `Float8Tensor`": partial(quantize, config="Float8WeightOnlyConfig"),
    "torchao: `IntxUnpackedToInt8Tensor`": partial(quantize, config="IntxWeightOnlyConfig"),
    "torchao: `NF4Tensor`": nf4,
    **{f"torchao: `OptimState{bits}`": partial(moments, bits=bits) for bits in ("8bit", "4bit", "Fp8")},
}
MODULES: dict[str, Callable[[int], nn.Module]] = {
    **{name: partial(hold, build) for name, build in TENSORS.items()},
    "bitsandbytes: `Params4bit` (NF4)": partial(bitsandbytes_layer, kind="Linear4bit", quant_type="nf4"),
    "bitsandbytes: `Params4bit` (FP4)": partial(bitsandbytes_layer, kind="Linear4bit", quant_type="fp4"),
    "bitsandbytes: `Int8Params`": partial(bitsandbytes_layer, kind="Linear8bitLt", has_fp16_weights=False),
}
NEEDS_A_GPU = ("torchao: `Int4Tensor`", "Transformer Engine: `Float8Tensor`")


# -------------------------------------------------------------------------------------------------------------- forms


def list_parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return a wrapper's inner tensors, or the tensor itself."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    return [part for name in value.__tensor_flatten__()[0] for part in list_parts(getattr(value, name))]


def as_data(value: torch.Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
    """Return all that equals if two plain tensors are equal bit for bit."""
    data = value.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)
    return data.numpy().tobytes(), value.dtype, value.shape


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors are wrappers with the same class or none, and have the same bits."""
    ones, others = list_parts(one), list_parts(other)
    is_alike = len(ones) == len(others) and (ones[0] is one) == (others[0] is other)
    return is_alike and all(as_data(a) == as_data(b) for a, b in zip(ones, others, strict=True))


def are_same(ones: dict[str, Any], others: dict[str, Any]) -> bool:
    return ones.keys() == others.keys() and all(is_same(ones[name], others[name]) for name in ones)


def try_module(build: Callable[[int], nn.Module], step: Path) -> bool:
    first, second = build(0), build(1)
    shardckpt.save({"m": first}, step)
    shardckpt.load({"m": second}, step)
    return are_same(first.state_dict(), second.state_dict())


def try_state_dict(build: Callable[[int], nn.Module], step: Path) -> bool:
    state = build(0).state_dict()
    shardckpt.save({"m": state}, step)
    return are_same(state, shardckpt.load(step)["m"])


class AnySlot(torch.optim.SGD):
    """An optimizer whose step uses a slot of any class."""

    def step(self, closure: Any = None) -> None:
        """Leave everything as it is."""


def try_optimizer(build: Callable[[int], nn.Module], step: Path) -> bool:
    slot = next(build(0).parameters()).data
    trainings = []
    for _ in range(2):
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        trainings.append({"model": model, "optim": AnySlot(model.parameters(), lr=0.1)})
    trainings[0]["optim"].state[trainings[0]["model"].weight]["slot"] = slot
    shardckpt.save(trainings[0], step)
    shardckpt.load(trainings[1], step)
    return is_same(slot, trainings[1]["optim"].state[trainings[1]["model"].weight]["slot"])


def try_shards(build: Callable[[int], nn.Module], step: Path) -> bool:
    """Save on two ranks, load on four, and read everything."""

    def shard(seed: int, world: int) -> nn.Module:
        model = build(seed)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        return model

    def save(rank: int, world: int) -> Any:
        try:
            model = shard(0, world)
        except Exception as error:  # noqa: BLE001  (whatever torch and the class raise themselves)
            return f"torch cannot shard it ({type(error).__name__})"
        try:
            shardckpt.save({"m": model}, step)
        except ShardckptError as error:
            return error.what
        return None

    def load(rank: int, world: int) -> None:
        model = shard(1, world)
        shardckpt.load({"m": model}, step)
        shardckpt.save({"m": model}, step.with_name("again"))

    if refusal := run(2, save)[0]:
        raise RefusedError(refusal)
    run(4, load)
    wanted = build(0).state_dict()
    return all(are_same(wanted, shardckpt.load(each)["m"]) for each in (step, step.with_name("again")))


def try_offline(build: Callable[[int], nn.Module], step: Path) -> bool:
    """Consolidate to safetensors, and compare the tensors in the files."""
    model = build(0)
    shardckpt.save({"m": model}, step)
    out = step.with_name("out")
    shardckpt.consolidate(step, out)
    written = [as_data(each)[:2] for file in out.glob("*.safetensors") for each in load_file(file).values()]
    saved = [as_data(part)[:2] for each in model.state_dict().values() for part in list_parts(each)]
    return Counter(saved) == Counter(written)


class RefusedError(Exception):
    """A form is refused, with the reason."""


FORMS = {
    "module": try_module,
    "state dict": try_state_dict,
    "optimizer": try_optimizer,
    "FSDP2 shards": try_shards,
    "offline": try_offline,
}


def find_outcome(kind: str, form: str, step: Path) -> str:
    """Return "yes", or why not; a form that is neither refused nor right fails."""
    try:
        is_right = FORMS[form](MODULES[kind], step)
    except ShardckptError as error:
        outcome = error.what
    except RefusedError as error:
        outcome = str(error)
    else:
        assert is_right, f"{kind}, {form}: it was loaded with other values"
        return "yes"
    assert not list(step.parent.glob("*/COMMIT")) or form == "offline", f"{kind}, {form}: refused after a commit"
    return outcome


# ------------------------------------------------------------------------------------------------------------- tables

ON_RANKS = ("one process", "FSDP2 shards, resumed on other ranks")


def find_row(kind: str, folder: Path) -> dict[str, str]:
    found = {}
    for form in FORMS:
        (folder / form).mkdir(parents=True)
        found[form] = find_outcome(kind, form, folder / form / "step")
    return found


def describe_optimizer(name: str) -> tuple[str, str]:
    rule = f", with `register_slot` for `{zoo.WITH_OBJECTS[name][0]}`" if name in zoo.WITH_OBJECTS else ""
    one = f"yes{rule}" if rule or name not in zoo.REFUSED else "no: objects outside slots, or in objects"
    if name in zoo.SHARDED:
        return one, f"yes{rule}{', after one step' if name in zoo.STEPS_FIRST else ''}"
    return one, "no: refused by name" if name in zoo.REFUSED_ON_SHARDS else "no: its own step raises"


def write_tables(rows: dict[str, dict[str, str]]) -> str:
    reasons = list(dict.fromkeys(cell for row in rows.values() for cell in row.values() if cell != "yes"))
    lines = [f"| tensor | {' | '.join(FORMS)} |", "|---" * (len(FORMS) + 1) + "|"]
    for kind, row in rows.items():
        cells = ["yes" if cell == "yes" else f"no ({reasons.index(cell) + 1})" for cell in row.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += [f"| {kind} | {' | '.join(['needs a GPU, not tested'] * len(FORMS))} |" for kind in NEEDS_A_GPU]
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), "", "## Optimizers", ""]
    lines += [
        "In one process, a resumed run equals an uninterrupted one bit for bit; on shards too, on as many ranks.",
        "",
    ]
    lines += [f"| optimizer | {' | '.join(ON_RANKS)} |", "|---" * (len(ON_RANKS) + 1) + "|"]
    rows_of = {name: describe_optimizer(name) for name in {*zoo.NAMES, *zoo.REFUSED}}
    rows_of |= {f"torchao.optim.{name}": ("yes", "yes") for name in low_bit.OPTIMIZERS}
    lines += [f"| `{name}` | {' | '.join(rows_of[name])} |" for name in sorted(rows_of, key=str.lower)]
    return "\n".join([*lines, ""])


def read_page() -> tuple[str, str]:
    """Return the page's text before and after the mark."""
    head, mark, tables = PAGE.read_text(encoding="utf-8").partition("<!-- made by a test -->\n\n")
    return head + mark, tables


def read_row(kind: str) -> dict[str, str]:
    """Return what the page says on a kind."""
    lines = read_page()[1].splitlines()
    reasons = {line.partition(". ")[0]: line.partition(". ")[2] for line in lines if line[:1].isdigit()}
    row = next(line for line in lines if line.startswith(f"| {kind} |"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    return {
        form: cell if cell == "yes" else reasons[cell.removeprefix("no (").removesuffix(")")]
        for form, cell in zip(FORMS, cells, strict=True)
    }


@pytest.mark.parametrize("kind", MODULES)
def test_each_form_is_right_or_refused_as_the_page_says(kind: str, tmp_path: Path) -> None:
    assert find_row(kind, tmp_path) == read_row(kind)


def test_the_page_has_a_row_for_each_tensor_and_optimizer(tmp_path: Path) -> None:
    if os.environ.get("UPDATE_DOCS"):
        rows = {kind: find_row(kind, tmp_path / str(number)) for number, kind in enumerate(MODULES)}
        PAGE.write_text(read_page()[0] + write_tables(rows), encoding="utf-8")
    assert read_page()[1] == write_tables({kind: read_row(kind) for kind in MODULES})
