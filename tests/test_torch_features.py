"""What an older torch lacks has a fallback with the same result; here the feature is hidden from the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardckpt import devices, torch_features
from tests.kit.ranks.harness import raised_everywhere, run


def test_no_accelerator_is_none_whether_torch_returns_that_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert torch_features.find_accelerator() is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    assert torch_features.find_accelerator() is None
    assert not devices.is_gpu_used()


def test_the_store_is_found_in_the_table_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, world: int) -> tuple[bytes, bytes]:
        group = dist.new_group([0, 1])
        store = torch_features.get_group_store(group)
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(dist.ProcessGroup, "get_group_store", raising=False)
            older = torch_features.get_group_store(group)
        store.set(f"new-{rank}", "1")
        older.set(f"old-{rank}", "2")
        return older.get(f"new-{rank}"), store.get(f"old-{rank}")

    assert run(2, body) == [(b"1", b"2")] * 2


@pytest.mark.parametrize("takes_source", [True, False])
def test_a_value_that_all_ranks_have_is_sharded(monkeypatch: pytest.MonkeyPatch, *, takes_source: bool) -> None:
    monkeypatch.setattr(torch_features, "_TAKES_SOURCE", takes_source and torch_features._TAKES_SOURCE)
    value = torch.arange(15.0).reshape(5, 3)

    def body(rank: int, world: int) -> list[list[float]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return torch_features.shard_replicated(value, mesh, [Replicate(), Shard(0)]).to_local().tolist()

    rows = value.tolist()
    assert run(4, body) == [rows[:3], rows[3:]] * 2


def test_submeshes_of_one_mesh_are_joined_in_its_order_with_any_torch() -> None:
    def body(rank: int, world: int) -> tuple[object, list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        joined = torch_features.concatenate_meshes([mesh["dp"], mesh["tp"]])
        return joined.mesh_dim_names, joined.mesh.flatten().tolist()

    assert run(4, body) == [(("dp", "tp"), [0, 1, 2, 3])] * 4


@pytest.mark.skipif(hasattr(DeviceMesh, "_concatenate"), reason="this torch joins them in any order")
def test_an_older_torch_joins_them_in_that_order_alone() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
        torch_features.concatenate_meshes([mesh["dp"], mesh["tp"]])

    assert {raised.name for raised in raised_everywhere(2, body)} == {"UsageError"}


@pytest.mark.parametrize("has_feature", [True, False])
def test_a_gradient_may_have_another_type(monkeypatch: pytest.MonkeyPatch, *, has_feature: bool) -> None:
    monkeypatch.setattr(torch_features, "_HAS_GRAD_DTYPE", has_feature and torch_features._HAS_GRAD_DTYPE)
    parameter = torch.nn.Parameter(torch.arange(3.0))
    data = parameter.data_ptr()
    torch_features.assign_gradient_of_another_type(parameter, torch.ones(3, dtype=torch.float16))
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float16
    assert (parameter.dtype, parameter.data_ptr(), parameter.tolist()) == (torch.float32, data, [0.0, 1.0, 2.0])


class TestHooksOfSavedTensors:
    """`torch.autograd.graph.saved_tensors_hooks` and all that is built of it, such as checkpointing."""

    @pytest.fixture(autouse=True)
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        context = torch.autograd.graph.saved_tensors_hooks
        for name in ("__enter__", "__exit__"):  # restored at the end
            monkeypatch.setattr(context, name, getattr(context, name))
        monkeypatch.setattr(torch_features, "get_saved_tensor_hooks", torch_features._get_recorded_hooks)
        torch_features._record_entered_hooks()

    def test_the_innermost_is_found_and_none_outside(self) -> None:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return tensor

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        assert torch_features.get_saved_tensor_hooks() is None
        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            with torch.autograd.graph.saved_tensors_hooks(copy, keep):
                assert torch_features.get_saved_tensor_hooks() == (copy, keep)
            assert torch_features.get_saved_tensor_hooks() == (keep, keep)
        assert torch_features.get_saved_tensor_hooks() is None

    def test_it_is_so_after_an_error(self) -> None:
        with pytest.raises(ValueError, match="inside"), torch.autograd.graph.save_on_cpu():
            raise ValueError("inside")
        assert torch_features.get_saved_tensor_hooks() is None

    def test_those_of_a_checkpoint_are_found_inside_it(self) -> None:
        found = []

        def body(x: torch.Tensor) -> torch.Tensor:
            found.append(torch_features.get_saved_tensor_hooks())
            return x * x

        x = torch.ones(2, requires_grad=True)
        checkpoint(body, x, use_reentrant=False).sum().backward()
        assert None not in found
        assert torch.equal(x.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize("recursive", [True, False])
def test_a_method_that_is_not_compiled_keeps_its_self_in_its_innermost_function(
    monkeypatch: pytest.MonkeyPatch, *, recursive: bool
) -> None:
    def disable(function: Any, *, recursive: bool) -> Any:
        """As torch 2.9: what is below is found through a bound method, too, and called without its `self`."""

        def wrapper(*args: Any) -> Any:
            return function(*args)

        wrapper._torchdynamo_orig_callable = function
        return wrapper

    class Module:
        def call(self, x: int) -> tuple[Any, int]:
            return self, x

    monkeypatch.setattr(torch.compiler, "disable", disable)
    Module.call = torch_features.disable_compiler(Module.call, recursive=recursive)
    module = Module()
    assert module.call(3) == (module, 3)
    assert hasattr(module.call, "_torchdynamo_orig_callable") is recursive
