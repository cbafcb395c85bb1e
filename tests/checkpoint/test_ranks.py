"""Several ranks save and load: whoever wrote what, each gets what it holds, and no more is read, sent or written."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardckpt
from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.errors import RankError, StorageError, UsageError
from shardckpt.offline.verify import verify
from shardckpt.storage.fsspec_writer import FsspecWriter
from shardckpt.storage.local import LocalStore
from tests.kit.models.states import (
    FRONT_ENDS,
    PARALLEL,
    Net,
    built,
    differing,
    flat,
    looked_at,
    step,
    theirs,
    whole,
    wrapper,
)
from tests.kit.ranks.harness import mark, outcomes, raised_everywhere, run, since


def trained_on(mesh: DeviceMesh, shard: Callable, optimizer: Callable) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model on a mesh and its optimizer, after one step."""
    torch.manual_seed(0)
    model = shard(Net((1,)), mesh)
    optim = optimizer(model.parameters(), lr=0.01)
    step(model, optim)
    return model, optim


def time_until_refused(path: Path, who: str) -> float:
    """Return after how many seconds a save fails because of a rank."""
    start = time.monotonic()
    with pytest.raises(shardckpt.errors.RankError, match=who):
        shardckpt.save({"t": torch.ones(2)}, path)
    return time.monotonic() - start


def save_face(rank: int, world: int, face: str, path: Path):
    model, optim = built(face)
    shardckpt.save({"model": model, "optim": optim, "step": 5, "rng": shardckpt.RNGState()}, path)
    found = looked_at(model, optim)
    step(model, optim, 7)
    return found, looked_at(model, optim)


def load_face(rank: int, world: int, face: str, path: Path):
    model, optim = built(face, seed=3, steps=0)
    state = {"model": model, "optim": optim, "step": 0, "rng": shardckpt.RNGState()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shardckpt.load(state, path)
    found = looked_at(model, optim)
    step(model, optim, 7)
    return state["step"], found, looked_at(model, optim)


def over_faces(rank: int, world: int, faces, action, folder: Path) -> dict:
    """Let the same ranks save, or load as others say, one face after the other; each has a folder of its own."""
    found = {}
    for face in faces:
        try:
            found[face] = action(rank, world, faces[face] if isinstance(faces, dict) else face, folder / face)
        except Exception as error:
            raise RuntimeError(f"{face} of {faces}") from error
    return found


def compare(found, expected, *, exact: bool = True) -> list[str]:
    return [*differing(found[0], expected[0], exact), *differing(found[1], expected[1], exact)]


ELASTIC = ["plain", "flat", "orig", "in place", "torch in place", "ddp", "whole", "kept"]


class TestElastic:
    def test_saved_at_four_by_any_face_and_loaded_by_all_at_one_two_and_three(self, tmp_path: Path) -> None:
        cut, copied = ("flat", "orig", "in place", "torch in place"), ("plain", "ddp", "whole", "kept")
        saved = run(4, over_faces, cut, save_face, tmp_path, timeout=120.0)[0]
        saved |= run(2, over_faces, copied, save_face, tmp_path, timeout=120.0)[0]
        assert sorted(saved) == sorted(ELASTIC)
        assert [face for face in saved if not verify(str(tmp_path / face)).ok] == []
        wrong = {}
        for ranks, by in ((1, None), (2, 1), (3, 3)):
            others = {face: "plain" if by is None else ELASTIC[(at + by) % 8] for at, face in enumerate(ELASTIC)}
            for rank, found in enumerate(run(ranks, over_faces, others, load_face, tmp_path, timeout=120.0)):
                for face, (told, now, gone_on) in found.items():
                    before, later = saved[face]
                    differs = [*compare(now, before), *compare(gone_on, later, exact=False)]
                    if differs or told != 5:
                        wrong[f"{face} to {others[face]}, rank {rank} of {ranks}"] = (told, differs[:4])
        assert wrong == {}

    @pytest.mark.parametrize("face", ["in place", "flat"])
    def test_one_optimizer_may_have_the_parameters_of_several_models(self, tmp_path: Path, face: str) -> None:
        def pair(shard: Callable, steps: int) -> dict:
            torch.manual_seed(0)
            a, b = shard(nn.Linear(3, 5)), shard(nn.Linear(5, 3))
            optim = torch.optim.Adam([{"params": a.parameters()}, {"params": b.parameters(), "lr": 0.5}])
            for _ in range(steps):
                b(a(torch.ones(1, 3))).sum().backward()
                optim.step()
            return {"models": {"a": a, "b": b}, "optim": optim}

        def body(rank: int, world: int) -> None:
            shard = fully_shard if face == "in place" else FullyShardedDataParallel
            shardckpt.save(pair(shard, 2), tmp_path / "sharded")
            again = pair(shard, 1)
            shardckpt.load(again, tmp_path / "whole")
            shardckpt.save(again, tmp_path / "again")

        whole = pair(lambda module: module, 2)
        shardckpt.save(whole, tmp_path / "whole")
        expected = flat(shardckpt.load(tmp_path / "whole")["optim"])
        assert ("models.a.weight", "exp_avg") in expected
        run(2, body)
        shardckpt.load(into := pair(lambda module: module, 0), tmp_path / "sharded")
        shardckpt.save(into, tmp_path / "elastic")
        for step_name in ("again", "elastic"):
            found = shardckpt.load(tmp_path / step_name)["optim"]
            assert differing(flat(found), expected, False) == []
            assert [group["lr"] for group in found["param_groups"]] == [0.001, 0.5]

    def test_one_optimizer_may_have_a_parameter_beside_a_sharded_model(self, tmp_path: Path) -> None:
        def build(steps: int) -> dict:
            torch.manual_seed(0)
            model, scale = fully_shard(nn.Linear(3, 5)), nn.Parameter(torch.ones(2))
            optim = torch.optim.Adam([*model.parameters(), scale])
            for _ in range(steps):
                (model(torch.ones(1, 3)).sum() * scale.sum()).backward()
                optim.step()
            return {"model": model, "scale": scale, "optim": optim}

        def body(rank: int, world: int) -> bool:
            first, again = build(2), build(0)
            shardckpt.save(first, tmp_path / "c")
            shardckpt.load(again, tmp_path / "c")
            found, expected = (each["optim"].state[each["scale"]]["exp_avg"] for each in (again, first))
            return torch.equal(found, expected) and torch.equal(again["scale"], first["scale"])

        assert run(2, body) == [True] * 2
        saved = shardckpt.load(tmp_path / "c")["optim"]["state"]
        assert set(saved) == {"model.weight", "model.bias", "scale"}

    @pytest.mark.parametrize("form", ["native", "torch.save"])
    def test_an_optimizer_of_several_models_that_was_saved_by_ids_is_loaded_by_position(
        self, tmp_path: Path, form: str
    ) -> None:
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        optim = torch.optim.SGD([*a.parameters(), *b.parameters()], momentum=0.9)
        b(a(torch.ones(1, 2))).sum().backward()
        optim.step()
        state = {"a": a.state_dict(), "b": b.state_dict(), "optim": optim.state_dict()}
        path = tmp_path / ("c" if form == "native" else "c.pt")
        (shardckpt.save if form == "native" else torch.save)(state, path)
        again = torch.optim.SGD([*a.parameters(), *b.parameters()], momentum=0.9)
        shardckpt.load({"a": a, "b": b, "optim": again}, path)
        for parameter, slots in optim.state.items():
            assert torch.equal(again.state[parameter]["momentum_buffer"], slots["momentum_buffer"])

    @pytest.mark.parametrize("where", ["open", "verify", "read"])
    @pytest.mark.parametrize("what", ["torch wrapper", "object"])
    def test_an_error_of_one_rank_is_told_before_others_gather(self, tmp_path: Path, what: str, where: str) -> None:
        class Summed:
            """An object that exchanges data when it loads, as one around a sharded model may."""

            def __init__(self) -> None:
                self.held = {"w": torch.ones(3)}

            def state_dict(self) -> dict:
                return self.held

            def load_state_dict(self, state: dict) -> None:
                dist.all_reduce(state["w"])

        def stop(progress: object) -> None:
            raise ValueError("this rank stops")

        def body(rank: int, world: int) -> None:
            torch.manual_seed(0)
            wrap = wrapper(theirs, device_id=torch.device("cpu"))
            state = {"held": wrap(Net((1,))) if what == "torch wrapper" else Summed()}
            shardckpt.save(state, tmp_path / "c")
            if where == "read":
                shardckpt.load(state, tmp_path / "c", on_progress=stop if rank else None)
            elif where == "open":
                shardckpt.load(state, tmp_path / "c" if rank == 0 else tmp_path / "nothing")
            else:
                damage(tmp_path / "c")
                shardckpt.load(state, tmp_path / "c", verify="full")

        def damage(step: Path) -> None:
            if dist.get_rank() == 0:
                last = max(step.glob("*.safetensors"))
                last.write_bytes(last.read_bytes()[:-1] + b"!")
            dist.barrier()

        told = {"open": "nothing", "verify": "checksum", "read": "this rank stops"}[where]
        for raised in raised_everywhere(2, body, group_timeout=10.0):
            assert told in raised.message and "imed out" not in raised.message

    def test_without_a_state_it_is_the_nest_of_whole_tensors(self, tmp_path: Path) -> None:
        saved, _ = run(3, save_face, "flat", tmp_path / "c")[0]
        nest = shardckpt.load(tmp_path / "c")
        assert differing(nest["model"], saved[0]) == []
        assert differing(flat(nest["optim"]), saved[1]) == []
        assert (nest["step"], len(nest["rng"])) == (5, 3)

    def test_torchs_own_wrapper_is_saved_and_loaded_by_its_whole_state(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setitem(FRONT_ENDS, "torch wrapper", wrapper(theirs, use_orig_params=True))
        saved, _ = run(2, save_face, "torch wrapper", tmp_path / "c")[0]
        for _, found, _ in run(2, load_face, "torch wrapper", tmp_path / "c"):
            assert compare(found, saved) == []

    @pytest.mark.parametrize("face", ["flat", "orig", "in place"])
    def test_hybrid_sharding_is_saved_once(self, tmp_path: Path, face: str) -> None:
        def body(rank: int, world: int):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model, optim = trained_on(mesh, FRONT_ENDS[face], torch.optim.AdamW)
            shardckpt.save({"model": model, "optim": optim}, tmp_path / "c")
            return looked_at(model, optim)

        saved = run(4, body)[0]
        nest = shardckpt.load(tmp_path / "c")
        assert differing(nest["model"], saved[0]) == []
        assert differing(flat(nest["optim"]), saved[1]) == []
        assert payload_bytes(tmp_path / "c") < 1.05 * nest_bytes(nest) + 4 * 60_000

    @pytest.mark.parametrize("face", ["in place", "orig", "torch in place"])
    def test_tensor_parallelism_beneath_sharding_is_a_cut_like_others(self, tmp_path: Path, face: str) -> None:
        def body(rank: int, world: int):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model, optim = trained_on(mesh, PARALLEL[face], functools.partial(torch.optim.SGD, momentum=0.9))
            shardckpt.save({"model": model, "optim": optim}, tmp_path / "c")
            found = looked_at(model, optim)
            torch.manual_seed(4)
            other = PARALLEL[face](Net((1,)), mesh)
            again = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
            shardckpt.load({"model": other, "optim": again}, tmp_path / "c")
            return found, looked_at(other, again)

        for found, loaded in run(4, body):
            assert compare(loaded, found) == []
        assert differing(shardckpt.load(tmp_path / "c")["model"], found[0]) == []


def payload_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def nest_bytes(nest) -> int:
    if isinstance(nest, torch.Tensor):
        return nest.nbytes
    values = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, (list, tuple)) else ()
    return sum(map(nest_bytes, values))


class TestTensors:
    def test_dtensors_of_any_placement_go_to_any_other(self, tmp_path: Path) -> None:
        full = torch.arange(7 * 10.0).view(7, 10)

        def save_them(rank: int, world: int) -> None:
            mesh = init_device_mesh("cpu", (2, 2))
            places = {"rows": (Shard(0), Shard(0)), "both": (Shard(1), Shard(0)), "copies": (Replicate(), Replicate())}
            places["mixed"] = (Replicate(), Shard(1))
            shardckpt.save({k: distribute_tensor(full.clone(), mesh, v) for k, v in places.items()}, tmp_path / "c")

        def load_them(rank: int, world: int):
            mesh = init_device_mesh("cpu", (3,))
            into = {k: distribute_tensor(torch.zeros(7, 10), mesh, [Shard(1)]) for k in ("rows", "both", "copies")}
            into["mixed"] = torch.zeros(7, 10)
            shardckpt.load(into, tmp_path / "c")
            return {name: whole(value) for name, value in into.items()}

        run(4, save_them)
        for found in run(3, load_them):
            assert all(torch.equal(value, full) for value in found.values())

    def test_partial_sums_are_refused_on_all_ranks_by_name(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> None:
            mesh = init_device_mesh("cpu", (2,))
            shardckpt.save({"a": {"sum": DTensor.from_local(torch.ones(3), mesh, [Partial()])}}, tmp_path / "c")

        for raised in raised_everywhere(2, body):
            assert "a.sum" in raised.message and "partial" in raised.message
        assert os.listdir(tmp_path) == []

    def test_rows_of_a_strided_shard_without_a_split_are_refused_by_name_on_all_ranks(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> None:
            mesh, columns = init_device_mesh("cpu", (2,)), torch.arange(24.0).view(4, 6)[:, 3 * rank : 3 * rank + 3]
            rows = DTensor.from_local(columns.reshape(-1), mesh, [_StridedShard(0, split_factor=4)], run_check=False)
            shardckpt.save({"a": {"viewed": rows}}, tmp_path / "c")

        for raised in raised_everywhere(2, body):
            assert "a.viewed" in raised.message and "Redistribute it to plain Shard" in raised.message
        assert os.listdir(tmp_path) == []

    def test_replicas_are_written_once_and_shared_out(self, tmp_path: Path) -> None:
        state = {f"t{n}": torch.full((300_000,), float(n)) for n in range(6)}
        run(3, lambda rank, world: shardckpt.save(state, tmp_path / "c"))
        sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.safetensors")]
        assert len(sizes) == 3 and max(sizes) < 1.1 * min(sizes)
        assert sum(sizes) < 1.02 * nest_bytes(state)

    @pytest.mark.parametrize("where", ["tensor", "value", "optimizer"])
    def test_what_differs_between_ranks_is_never_dropped(self, tmp_path: Path, where: str) -> None:
        def body(rank: int, world: int) -> None:
            model = nn.Linear(2, 2)
            optim = torch.optim.SGD(model.parameters(), lr=0.1 + (rank if where == "optimizer" else 0))
            state = {"run": {"t": torch.full((3,), float(rank if where == "tensor" else 0)), "equal": torch.ones(2)}}
            state["run"]["n"] = rank if where == "value" else 0
            shardckpt.save({**state, "optim": optim}, tmp_path / "c")

        named = {"tensor": "run.t", "value": "run.n", "optimizer": "optim.param_groups.0.lr"}[where]
        for raised in raised_everywhere(3, body):
            assert (
                named in raised.message and "differ" in raised.message and "equal" not in raised.message.split(":")[0]
            )
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("sharing", [0, 1])
    @pytest.mark.parametrize("kind", ["values", "shapes", "other pair", "module"])
    def test_two_names_of_one_tensor_are_so_on_all_ranks(self, kind: str, sharing: int, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> None:
            state = {name: torch.full((4,), value) for value, name in enumerate("wxy")}
            if rank == sharing:
                state["y"] = state["x"]
            elif kind == "other pair":
                state["y"] = state["w"]
            elif kind == "shapes":
                state["y"] = torch.ones(7, 2, dtype=torch.float64)
            if kind == "module":
                state = {"model": nn.ParameterDict({name: value.float() for name, value in state.items()})}
                if rank == sharing:
                    state["model"]["y"] = state["model"]["x"]
            shardckpt.save(state, tmp_path / "c")

        for raised in raised_everywhere(2, body):
            assert raised.is_a(UsageError) or raised.is_a(RankError)
            assert "y: two names are one tensor on some ranks, and not on others" in raised.message
            assert "rank 0, but not on rank 1" in raised.message or "rank 1, but not on rank 0" in raised.message
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("face", ["ddp", "orig", "in place", "torch in place", "torch wrapper"])
    def test_buffers_may_differ_and_those_of_rank_0_are_saved(self, tmp_path: Path, face: str) -> None:
        def body(rank: int, world: int) -> torch.Tensor:
            faces = {**FRONT_ENDS, "torch wrapper": wrapper(theirs, device_id=torch.device("cpu"))}
            model = faces[face](Net((1,)))
            next(model.buffers()).fill_(1.0 + rank)
            shardckpt.save({"model": model}, tmp_path / "c")
            shardckpt.load({"model": model}, tmp_path / "c")
            return next(model.buffers())

        assert all(torch.equal(buffer, torch.ones_like(buffer)) for buffer in run(2, body))

    @pytest.mark.parametrize("placed", [[Shard(0)], [Replicate()]])
    def test_buffers_may_be_dtensors_of_which_ranks_have_parts(self, tmp_path: Path, placed: list):
        def body(rank: int, world: int) -> list[float]:
            mesh, model = init_device_mesh("cpu", (2,)), nn.Module()
            model.register_buffer("table", distribute_tensor(torch.arange(3.0), mesh, placed))
            for _ in range(2):  # the second save repeats the plan of the first one
                shardckpt.save({"model": model}, tmp_path / "c", overwrite=True)
            model.table.to_local().zero_()
            shardckpt.load({"model": model}, tmp_path / "c")
            return model.table.full_tensor().tolist()

        assert run(2, body) == [[0.0, 1.0, 2.0]] * 2
        assert shardckpt.load(tmp_path / "c")["model"]["table"].tolist() == [0.0, 1.0, 2.0]

    def test_models_may_share_a_sharded_parameter_of_which_one_rank_has_all(self, tmp_path: Path):
        def body(rank: int, world: int) -> bool:
            torch.manual_seed(0)
            shared = fully_shard(nn.Linear(4, 1))
            models = {name: nn.Sequential(nn.Linear(4, 4), shared) for name in ("actor", "critic")}
            before = shared.weight.full_tensor()
            shardckpt.save(models, tmp_path / "c")
            shared.weight.to_local().detach().zero_()
            shardckpt.load(models, tmp_path / "c")
            return torch.equal(shared.weight.full_tensor(), before)

        assert run(2, body) == [True] * 2

    def test_a_state_of_a_modules_own_making_may_be_gathered_from_all_ranks(self, tmp_path: Path) -> None:
        class Total(nn.Module):
            def state_dict(self, *args: object, prefix: str = "", **options: object) -> dict:
                total = torch.ones(1)
                dist.all_reduce(total)
                return {f"{prefix}total": total}

        def body(rank: int, world: int) -> None:
            torch.manual_seed(0)
            shardckpt.save({"model": nn.ModuleDict({"net": nn.Linear(2, 2), "total": Total()})}, tmp_path / "c")

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "values of a `state_dict")
            run(2, body, group_timeout=5.0)

    def test_what_is_marked_comes_back_to_its_own_rank(self, tmp_path: Path) -> None:
        class Loader:
            def __init__(self, at: int) -> None:
                self.at = {"next": at, "order": torch.tensor([at])}

            def state_dict(self) -> dict:
                return self.at

            def load_state_dict(self, state: dict) -> None:
                self.at = state

        def body(rank: int, world: int):
            shardckpt.save({"loader": shardckpt.PerRank(Loader(rank)), "n": 1}, tmp_path / "c")
            loader = Loader(9)
            shardckpt.load({"loader": shardckpt.PerRank(loader), "n": 0}, tmp_path / "c")
            return loader.at["next"], int(loader.at["order"])

        assert run(3, body) == [(0, 0), (1, 1), (2, 2)]
        state = {"n": 0, "loader": shardckpt.PerRank(Loader(9))}
        with pytest.raises(
            shardckpt.errors.MismatchError, match="loader was saved per rank by another number of ranks"
        ) as caught:
            shardckpt.load(state, tmp_path / "c")
        assert state["n"] == 0 and "filled in part" not in str(caught.value)

    def test_plain_values_that_are_marked_come_back_to_their_own_rank(self, tmp_path: Path) -> None:
        def state(value: int, length: int) -> dict:
            held = {
                "int": value,
                "dict": {"r": value, "log": [np.full(length, value)]},
                "tensor": torch.full((length,), value),
                "array": np.full(2, value),
            }
            return {name: shardckpt.PerRank(each) for name, each in held.items()}

        def body(rank: int, world: int):
            shardckpt.save(state(rank, rank + 1), tmp_path / "c")
            into = state(9, 1)
            held = {name: each.held for name, each in into.items()}
            shardckpt.load(into, tmp_path / "c")
            assert into["dict"].held is held["dict"] and into["array"].held is held["array"]
            assert (into["tensor"].held is held["tensor"]) == (rank == 0), "filled in place where it fits"
            found = {name: each.held for name, each in into.items()}
            log = found["dict"]["log"][0].tolist()
            return found["int"], found["dict"]["r"], log, found["tensor"].tolist(), found["array"].tolist()

        assert run(2, body) == [(0, 0, [0], [0], [0, 0]), (1, 1, [1, 1], [1, 1], [1, 1])]
        assert shardckpt.load(tmp_path / "c")["int"] == [0, 1]

    def test_a_model_among_other_things_that_are_marked_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(shardckpt.errors.UnsupportedError, match=r"own\.0\.net: .*Linear.*PerRank\(it\)"):
            shardckpt.save({"own": shardckpt.PerRank({"net": torch.nn.Linear(1, 1)})}, tmp_path / "c")
        net = torch.nn.Linear(1, 1)
        shardckpt.save({"own": shardckpt.PerRank(net)}, tmp_path / "c")
        other = torch.nn.Linear(1, 1)
        shardckpt.load({"own": shardckpt.PerRank(other)}, tmp_path / "c")
        assert torch.equal(net.weight, other.weight)

    @pytest.mark.parametrize("first", ["model", "own"])
    def test_buffers_that_are_marked_come_back_to_their_own_rank_beside_their_model(self, tmp_path: Path, first: str):
        def states(norm: nn.Module, own: nn.Module) -> dict:
            state = {"model": norm, "own": shardckpt.PerRank(own)}
            return state if first == "model" else dict(reversed(state.items()))

        def body(rank: int, world: int) -> tuple[list[float], list[float]]:
            norm = nn.BatchNorm1d(1)
            norm.running_mean.fill_(1.0 + rank)
            shardckpt.save(states(norm, norm), tmp_path / "c")
            again, own = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
            shardckpt.load(states(again, own), tmp_path / "c")
            return again.running_mean.tolist(), own.running_mean.tolist()

        assert run(2, body) == [([1.0], [1.0]), ([1.0], [2.0])]

    def test_random_numbers_go_on_on_each_rank_or_begin_anew_on_all(self, tmp_path: Path) -> None:
        def body(rank: int, world: int):
            torch.manual_seed(100 + rank)
            shardckpt.save({"rng": shardckpt.RNGState()}, tmp_path / "c")
            expected = torch.rand(3).tolist()
            torch.manual_seed(0)
            shardckpt.load({"rng": shardckpt.RNGState()}, tmp_path / "c")
            return expected, torch.rand(3).tolist()

        def other_world(rank: int, world: int):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                shardckpt.load({"rng": shardckpt.RNGState()}, tmp_path / "c")
            assert len(told) == (rank == 0), "one warning of all ranks"
            for each in told:
                assert "saved by 2 ranks and are loaded on 3" in str(each.message)
                assert each.filename == __file__, "the line that loads is the one to look at"
            return torch.rand(3).tolist()

        before = run(2, body)
        assert all(expected == found for expected, found in before)
        anew = run(3, other_world)
        assert len({str(each) for each in [*anew, *(expected for expected, _ in before)]}) == 5
        assert run(3, other_world) == anew


class TestCosts:
    def test_a_save_is_two_rounds_through_the_first_rank_and_the_second_sends_little(self, tmp_path: Path) -> None:
        def body(rank: int, world: int):
            model, optim = built("orig")
            found = []
            for number in range(3):
                start = mark()
                shardckpt.save({"model": model, "optim": optim, "n": number}, tmp_path / f"{number}")
                calls = since(start)
                found.append((len(calls), sum(call.sent for call in calls)))
                others = [str(call) for call in calls if call.op not in ("send", "recv", "all_reduce", "all_gather")]
                assert number == 0 or [c for c in calls if c.op not in ("send", "recv")] == others == []
            return found

        for rank, (first, second, third) in enumerate(run(3, body)):
            # Two rounds, there and back, with each other rank; one message is longer than a packet and takes another.
            assert second[0] == third[0] == 5 * (2 if rank == 0 else 1)
            assert abs(second[1] - third[1]) < 64 and (rank == 0 or second[1] < 0.8 * first[1])

    def test_a_plan_is_made_anew_when_anything_changes(self, tmp_path: Path) -> None:
        def body(rank: int, world: int):
            mesh = init_device_mesh("cpu", (2,))
            whole_ = torch.arange(12.0)
            states = [
                {"t": distribute_tensor(whole_, mesh, [Shard(0)]), "u": torch.ones(2)},
                {"t": distribute_tensor(whole_.bfloat16(), mesh, [Shard(0)]), "u": torch.ones(2)},
                {"t": distribute_tensor(torch.arange(20.0), mesh, [Shard(0)]), "u": torch.ones(2)},
                {"t": distribute_tensor(whole_.view(3, 4), mesh, [Shard(1)]), "u": torch.ones(2)},
                {"t": distribute_tensor(whole_, mesh, [Replicate()]), "v": torch.ones(2)},
                {"t": distribute_tensor(whole_, mesh, [Shard(0)]), "u": torch.ones(2)},
            ]
            for number, state in enumerate(states):
                shardckpt.save(state, tmp_path / f"{number}")
            return [{name: whole(value) for name, value in state.items()} for state in states]

        for number, state in enumerate(run(2, body)[0]):
            assert differing(shardckpt.load(tmp_path / f"{number}"), state) == []
            assert verify(str(tmp_path / f"{number}")).ok

    def test_a_rank_reads_the_bytes_of_its_boxes_and_gathers_no_tensor(self, tmp_path: Path) -> None:
        rows = 4096

        def save_it(rank: int, world: int) -> None:
            mesh = init_device_mesh("cpu", (world,))
            shardckpt.save({"t": distribute_tensor(torch.rand(rows, 64), mesh, [Shard(0)])}, tmp_path / "c")

        def load_it(rank: int, world: int):
            mesh = init_device_mesh("cpu", (world,))
            into = {"t": distribute_tensor(torch.zeros(rows, 64), mesh, [Shard(0)])}
            read, original = [0], LocalStore.read
            shardckpt.load(into, tmp_path / "c", verify=False)  # the group is made

            def counted(store, reads) -> None:
                read[0] += sum(each.buffer.nbytes for each in reads if each.name.endswith(".safetensors"))
                original(store, reads)

            LocalStore.read = counted
            start = mark()
            shardckpt.load(into, tmp_path / "c", verify=False)
            sent = max((call.sent for call in since(start)), default=0)
            return read[0], into["t"].to_local().nbytes, sent

        run(4, save_it)
        for read, held, sent in run(3, load_it):
            assert held <= read < held + 4096 and sent < 4096


class TestFailures:
    """A failing rank is named on all; what lay there before stays; nothing is left of what was written."""

    def before(self, tmp_path: Path) -> dict:
        shardckpt.save({"old": torch.arange(3)}, tmp_path / "c")
        return shardckpt.load(tmp_path / "c")

    def after(self, tmp_path: Path) -> None:
        assert os.listdir(tmp_path) == ["c"]
        assert torch.equal(shardckpt.load(tmp_path / "c")["old"], torch.arange(3))

    @pytest.mark.parametrize("failing", [0, 2])
    def test_in_the_capture(self, tmp_path: Path, failing: int) -> None:
        self.before(tmp_path)

        class Broken:
            def state_dict(self) -> dict:
                raise ZeroDivisionError("in the middle")

            def load_state_dict(self, state: dict) -> None: ...

        def body(rank: int, world: int) -> None:
            state = {"t": torch.ones(2), "x": Broken() if rank == failing else 1}
            shardckpt.save(state, tmp_path / "c", overwrite=True)

        for rank, raised in enumerate(raised_everywhere(3, body)):
            assert "in the middle" in raised.message
            assert raised.name == ("StateDictError" if rank == failing else "RankError")
            assert rank == failing or f"rank {failing}" in raised.message
        self.after(tmp_path)

    @pytest.mark.parametrize("failing", [0, 1])
    def test_on_a_full_disk(self, tmp_path: Path, failing: int) -> None:
        self.before(tmp_path)

        def body(rank: int, world: int) -> None:
            original = os.write

            def full(fd: int, data) -> int:
                if rank == failing and len(data) > 10_000:
                    raise OSError(28, "No space left on device")
                return original(fd, data)

            state = {f"t{n}": torch.rand(50_000) * 0 + n for n in range(3)}
            os.write = full
            try:
                shardckpt.save(state, tmp_path / "c", overwrite=True)
            finally:
                os.write = original

        for rank, raised in enumerate(raised_everywhere(3, body)):
            assert "No space left" in raised.message
            assert raised.is_a(OSError) if rank == failing else f"rank {failing}" in raised.message
        self.after(tmp_path)

    def test_paths_that_differ_are_refused_before_anything_is_written(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> None:
            shardckpt.save({"step": 1}, tmp_path / f"of-rank-{rank}")

        for raised in raised_everywhere(2, body):
            assert raised.name == "UsageError" and "ranks save to different paths" in raised.message
            assert f"rank 0 {tmp_path}/of-rank-0, rank 1 {tmp_path}/of-rank-1" in raised.message
        assert os.listdir(tmp_path) == []

    def test_a_save_that_one_rank_alone_calls_is_said_to_be_a_call_for_all(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> None:
            shardckpt.save({"step": 1}, tmp_path / "c")
            if rank == 0:
                with pytest.raises(RankError, match=r"rank 1 .*calls that every rank makes"):
                    shardckpt.save({"step": 1}, tmp_path / "d")

        run(2, body, group_timeout=2.0)
        assert os.listdir(tmp_path) == ["c"]

    def test_a_target_that_exists_is_told_to_all_and_the_next_save_works(self, tmp_path: Path) -> None:
        self.before(tmp_path)

        def body(rank: int, world: int):
            with pytest.raises(FileExistsError):
                shardckpt.save({"t": torch.ones(2)}, tmp_path / "c")
            shardckpt.save({"t": torch.ones(2)}, tmp_path / "d")
            return sorted(shardckpt.load(tmp_path / "d"))

        assert run(2, body) == [["t"]] * 2

    @pytest.mark.parametrize(
        ("how", "is_first", "gone"),
        [
            ("dies", True, 1),
            ("dies", False, 0),
            ("dies", False, 1),
            ("hangs", True, 1),
            ("hangs", False, 0),
            ("hangs", False, 1),
        ],
    )
    def test_a_rank_that_is_gone_is_named_within_the_timeout(
        self, tmp_path: Path, how: str, is_first: bool, gone: int
    ) -> None:
        self.before(tmp_path)
        ready, told = tmp_path / "ready", tmp_path / "told"
        ready.mkdir()
        told.mkdir()

        def body(rank: int, world: int):
            state = {"t": torch.arange(60_000.0)}
            if not is_first:
                shardckpt.save(state, tmp_path / "d")
            (ready / str(rank)).touch()
            if rank == gone:
                while len(os.listdir(ready)) < world:  # the others may still connect to it in `init_process_group`
                    time.sleep(0.01)
                if how == "dies":
                    os._exit(1)
                while len(os.listdir(told)) < world - 1:  # it comes back only when the others have given it up
                    time.sleep(0.05)
                return None
            with pytest.raises(shardckpt.errors.RankError, match=f"rank {gone}"):
                shardckpt.save(state, tmp_path / "c", overwrite=True)
            (told / str(rank)).touch()
            return rank

        found = outcomes(3, body, group_timeout=2.5, timeout=30.0)
        assert [each.value for each in found if each.rank != gone] == [rank for rank in range(3) if rank != gone], found
        assert torch.equal(shardckpt.load(tmp_path / "c")["old"], torch.arange(3))
        assert gone == 0 or set(os.listdir(tmp_path)) <= {"c", "d", "ready", "told"}, "rank 0 removes what all wrote"

    def test_the_first_rank_finds_who_is_late_before_the_others_give_up_on_it(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> float:
            shardckpt.save({"t": torch.ones(2)}, tmp_path / "c")
            if rank == 1:
                time.sleep(6.0)
                return 0.0
            return time_until_refused(tmp_path / "d", "rank 1")

        first, _, other = run(3, body, group_timeout=4.0)
        assert first < 4.0 and other < 4.0, "who waits for the first rank hears from it, and need not look for its word"

    def test_once_a_rank_has_died_the_first_rank_does_not_wait_for_those_that_are_late(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> float:
            shardckpt.save({"t": torch.ones(2)}, tmp_path / "c")
            if rank == 1:
                os._exit(1)
            if rank == 2:
                time.sleep(5.0)
                return 0.0
            return time_until_refused(tmp_path / "d", "rank 1")

        found = outcomes(3, body, group_timeout=20.0, timeout=40.0)
        assert found[0].value is not None and found[0].value < 2.0 + 3.0, found[0]

    def test_what_does_not_fit_on_one_rank_is_loaded_on_none(self, tmp_path: Path) -> None:
        shardckpt.save({"t": torch.arange(3)}, tmp_path / "c")

        def body(rank: int, world: int):
            into = torch.zeros(3 + (rank == 1), dtype=torch.int64)
            with pytest.raises(shardckpt.errors.MismatchError, match="size mismatch for t") as caught:
                shardckpt.load({"t": into}, tmp_path / "c")
            return int(into.sum()), str(caught.value)

        (first, told), (second, own), last = run(3, body)
        assert (first, second) == (0, 0) and last == (first, told)
        assert told.endswith(f" failed on rank 1: {own}") and told.count("failed on rank") == 1


class TestStores:
    def test_ranks_save_to_a_bucket_and_over_what_lies_there(self, s3_bucket: str) -> None:
        target = f"{s3_bucket}/run/step-1"

        def body(rank: int, world: int):
            for seed in (0, 1):
                model, optim = built("in place", seed)
                shardckpt.save({"model": model, "optim": optim, "step": seed}, target, overwrite=seed > 0)
            other, again = built("flat", 5, steps=0)
            state = {"model": other, "optim": again, "step": 7}
            shardckpt.load(state, target)
            return state["step"], looked_at(model, optim), looked_at(other, again)

        for told, saved, found in run(2, body, timeout=60.0, group_timeout=30.0):
            assert told == 1 and compare(found, saved) == []
        assert verify(target).ok

    def test_a_failure_leaves_nothing_in_the_bucket(self, s3_bucket: str) -> None:
        target = f"{s3_bucket}/run/step-1"

        def body(rank: int, world: int) -> None:
            whole_ = FsspecWriter.write

            def broken(self, data) -> None:
                if rank == 1 and len(data) > 100_000:
                    raise StorageError("the store is gone")
                whole_(self, data)

            FsspecWriter.write = broken
            shardckpt.save({f"t{n}": torch.full((200_000,), float(n)) for n in range(2)}, target)

        for raised in raised_everywhere(2, body, timeout=60.0, group_timeout=30.0):
            assert "the store is gone" in raised.message
        assert fsspec.filesystem("s3").find(target) == []


def pass_a_text_as_group(rank: int, world: int, folder: Path) -> list[str]:
    messages = []
    for call in (shardckpt.save, shardckpt.load):
        with pytest.raises(UsageError) as caught:
            call({"step": 1}, folder / "c", process_group="gloo")
        messages.append(str(caught.value))
    return messages


def test_a_process_group_of_another_type_is_refused(tmp_path: Path) -> None:
    assert run(1, pass_a_text_as_group, tmp_path) == [["`process_group` must be a process group; found 'gloo'"] * 2]
