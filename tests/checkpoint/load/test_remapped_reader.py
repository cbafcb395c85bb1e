"""`load` through a file of rules: a checkpoint in other names and shapes goes straight into the objects of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.core import fully_shard
from shardckpt.errors import UsageError
from tests.kit.ranks.harness import run
from tests.kit.ranks.interpreters import RunScript

RULES = """
[[rule]]
stack = {from = "experts.{e}.weight", over = "e", to = "experts"}
[[rule]]
fuse = {from = ["q.weight", "k.weight"], to = "qk.weight"}
[[rule]]
transpose = {name = "out.weight", dims = [1, 0]}
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.Parameter(torch.randn(3, 4, 6))
        self.qk = torch.nn.Linear(6, 8, bias=False)
        self.out = torch.nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.qk(x)) + self.experts.sum()


def separate(value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what becomes tensors of `Net` by the rules."""
    parts = {f"experts.{e}.weight": value["experts"][e].clone() for e in range(3)}
    q, k = value["qk.weight"].split([5, 3])
    return {**parts, "q.weight": q.clone(), "k.weight": k.clone(), "out.weight": value["out.weight"].T.contiguous()}


def trained() -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    optim = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.ones(2, 6)).sum().backward()
    optim.step()
    return net, optim


def write(folder: Path, form: str) -> tuple[Net, torch.optim.Optimizer]:
    """Save a model and its optimizer in other names and shapes, in a format; return what they were."""
    net, optim = trained()
    names = [name for name, _ in net.named_parameters()]
    moments = {slot: {n: optim.state[p][slot] for n, p in net.named_parameters()} for slot in ("exp_avg", "exp_avg_sq")}
    state: dict[str, dict[str, Any]] = {n: {"step": torch.tensor(1.0)} for n in separate(net.state_dict())}
    for slot, values in moments.items():
        for name, value in separate(values).items():
            state[name][slot] = value
    group = {**optim.state_dict()["param_groups"][0], "params": list(state)}
    assert len(names) == 3
    nest = {"net": separate(net.state_dict()), "optim": {"state": state, "param_groups": [group]}}
    if form == "native":
        shardckpt.save(nest, folder / "ckpt")
    else:
        torch.save(nest, folder / "ckpt.pt")
        shardckpt.reshard(folder / "ckpt.pt", folder / "ckpt", world_size=2, to="dcp")
    (folder / "rules.toml").write_text(RULES)
    return net, optim


def check(net: Net, optim: torch.optim.Optimizer, folder: Path, **options: Any) -> None:
    shardckpt.load({"net": net, "optim": optim}, folder / "ckpt", rules=folder / "rules.toml", **options)


@pytest.mark.parametrize("form", ["native", "dcp"])
def test_model_and_optimizer_are_loaded_in_their_own_shapes(tmp_path: Path, form: str) -> None:
    net, optim = write(tmp_path, form)
    found = Net()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.zero_()
    other = torch.optim.AdamW(found.parameters(), lr=9.0)
    check(found, other, tmp_path, verify="full")
    for mine, theirs in zip(found.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(other.state[mine][slot], optim.state[theirs][slot])
    assert other.param_groups[0]["lr"] == 0.25


def _sharded(rank: int, _world: int, folder: Path) -> list[torch.Tensor]:
    net = Net()
    for parameter in net.parameters():
        parameter.data.zero_()
    fully_shard(net)
    optim = torch.optim.AdamW(net.parameters(), lr=9.0)
    check(net, optim, folder)
    assert optim.param_groups[0]["lr"] == 0.25
    return [p.full_tensor().detach() for p in net.parameters()]


def test_ranks_of_a_sharded_model_read_what_they_hold(tmp_path: Path) -> None:
    net, _ = write(tmp_path, "dcp")
    for found in run(2, _sharded, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(found, net.parameters(), strict=True))


def test_without_a_state_the_nest_has_the_new_names(tmp_path: Path) -> None:
    net, _ = write(tmp_path, "native")
    found = shardckpt.load(tmp_path / "ckpt", rules=tmp_path / "rules.toml")
    assert set(found["net"]) == {"experts", "qk.weight", "out.weight"}
    assert torch.equal(found["net"]["out.weight"], net.out.weight)
    assert found["optim"]["param_groups"][0]["params"] == ["experts", "qk.weight", "out.weight"]


def test_a_load_without_rules_imports_no_module_of_rules(run_script: RunScript, tmp_path: Path) -> None:
    shardckpt.save({"w": torch.ones(2)}, tmp_path / "step")
    code = (
        f"import sys, shardckpt; shardckpt.load({str(tmp_path / 'step')!r})\n"
        "print(*[name for name in sys.modules if name.startswith(('shardckpt.plan.rules', 'shardckpt.readers.remap'))])"
    )
    assert run_script(code).stdout.split() == []


def test_damage_is_found_behind_rules_too(tmp_path: Path) -> None:
    write(tmp_path, "native")
    file = max((tmp_path / "ckpt").glob("*.safetensors"), key=lambda each: each.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(shardckpt.errors.ChecksumError):
        check(*trained(), tmp_path, verify="full")  # type: ignore[arg-type]


def test_rules_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    write(tmp_path, "native")
    net, optim = trained()
    before = [p.detach().clone() for p in net.parameters()]
    (tmp_path / "rules.toml").write_text('[[rule]]\ndrop = {name = "nothing"}\n')
    with pytest.raises(UsageError, match="matches no tensor"):
        check(net, optim, tmp_path)
    (tmp_path / "rules.toml").write_text(RULES + '[[rule]]\ncast = {name = "experts", dtype = "bf16"}\n')
    with pytest.raises(UsageError, match="cast=True"):
        check(net, optim, tmp_path)
    with pytest.raises(UsageError, match="rules are not found"):
        shardckpt.load({"net": net}, tmp_path / "ckpt", rules="nowhere.toml")
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
