"""`verify="live"` finds memory that is not what the checkpoint has, and reports nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.checkpoint.load import live_check
from shardckpt.checkpoint.load.tensor_loader import ElementReader
from shardckpt.errors import ChecksumError, UsageError
from shardckpt.native.verified_store import VerifiedStore
from shardckpt.storage.local import LocalStore
from tests.kit.models.states import FRONT_ENDS, Net, step
from tests.kit.ranks.harness import run

DIGESTS = pytest.mark.parametrize("store_digests", [False, True])


class Meddler:
    """An object that initializes a tensor anew when it is loaded."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        with torch.no_grad():
            self.tensor.fill_(0.5)


def model_and_optimizer(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optim.step()
    return {"model": model, "optim": optim}


def without_slot(wanted: Any) -> Any:
    return [request for request in wanted if request[0].path[-1] != "exp_avg"]


@DIGESTS
def test_an_object_that_changes_a_tensor_when_it_is_loaded_is_found(store_digests: bool, tmp_path: Path) -> None:
    state = model_and_optimizer(1)
    state["meddler"] = Meddler(torch.ones(3))
    shardckpt.save(state, tmp_path / "a", store_digests=store_digests)
    shardckpt.load(state, tmp_path / "a", verify="live")
    state["meddler"] = Meddler(state["model"].first.weight)
    shardckpt.load(state, tmp_path / "a")
    with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"memory of model\.first\.weight differs") as caught:
        shardckpt.load(state, tmp_path / "a", verify="live")
    assert (caught.value.divergence.cause, caught.value.divergence.since) == ("parameter", "load")


def test_a_parameter_that_was_replaced_is_found(tmp_path: Path) -> None:
    state = model_and_optimizer(1)
    meddler = Meddler(torch.ones(3))
    shardckpt.save({"model": state["model"], "meddler": meddler}, tmp_path / "a", store_digests=True)
    first = state["model"].first
    meddler.load_state_dict = lambda saved: setattr(first, "weight", torch.nn.Parameter(torch.zeros(6, 5)))
    with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"model\.first\.weight"):
        shardckpt.load({"model": state["model"], "meddler": meddler}, tmp_path / "a", verify="live")


@DIGESTS
def test_tensors_in_one_memory_are_found(store_digests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the plan of the load does not see it, which refuses these."""
    monkeypatch.setattr("shardckpt.checkpoint.load.load_plan.LoadPlanBuilder.check_shared_memory", lambda self: None)
    shardckpt.save({"a": torch.zeros(4, 4), "b": torch.ones(4, 4)}, tmp_path / "a", store_digests=store_digests)
    memory = torch.rand(20)
    with pytest.raises(shardckpt.errors.ResumeDivergence, match="memory of"):
        shardckpt.load({"a": memory[:16].view(4, 4), "b": memory[4:].view(4, 4)}, tmp_path / "a", verify="live")


def test_a_slot_that_a_reader_leaves_as_it_was_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shardckpt.save(model_and_optimizer(1), tmp_path / "a", store_digests=True)
    read = ElementReader.read
    monkeypatch.setattr(
        ElementReader,
        "read",
        lambda self, wanted, *store: read(self, without_slot(wanted) if store else wanted, *store),
    )
    with pytest.raises(shardckpt.errors.ResumeDivergence) as caught:
        shardckpt.load(model_and_optimizer(2), tmp_path / "a", verify="live")
    assert caught.value.divergence.cause == "optimizer"


@DIGESTS
def test_clean_loads_of_other_dtypes_and_large_tensors_are_not_reported(
    store_digests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_check, "BATCH_BYTES", 64)
    saved = {"a": torch.rand(30, 7), "nan": torch.full((5,), float("nan")), "empty": torch.empty(0, 3)}
    shardckpt.save(saved, tmp_path / "a", store_digests=store_digests)
    for dtype in (torch.float32, torch.bfloat16):
        state = {name: torch.zeros(each.shape, dtype=dtype).t().contiguous().t() for name, each in saved.items()}
        shardckpt.load(state, tmp_path / "a", verify="live", cast=True)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each read of a file adds the number of its bytes."""
    sizes: list[int] = []
    read = LocalStore.read

    def count(self: LocalStore, reads: Any) -> None:
        sizes.extend(len(each.buffer) for each in reads if each.name.endswith(".safetensors"))
        read(self, reads)

    monkeypatch.setattr(LocalStore, "read", count)
    return sizes


@DIGESTS
def test_of_the_files_no_more_is_read_than_without_the_check(
    store_digests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> dict[str, torch.Tensor]:
        return {str(number): torch.rand(1 << number) for number in range(20)}

    shardckpt.save(build(), tmp_path / "a", store_digests=store_digests)
    sizes = count_reads(monkeypatch)
    shardckpt.load(build(), tmp_path / "a")
    without = sum(sizes)
    sizes.clear()
    shardckpt.load(build(), tmp_path / "a", verify="live")
    assert sum(sizes) == without


@DIGESTS
def test_strided_memory_is_hashed_if_the_step_has_its_digest(
    store_digests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardckpt.save({"a": torch.rand(30, 7)}, tmp_path / "a", store_digests=store_digests)
    again: list[Any] = []
    request = live_check._request
    monkeypatch.setattr(live_check, "_request", lambda part, stored: again.append(part) or request(part, stored))
    shardckpt.load({"a": torch.zeros(7, 30).t()}, tmp_path / "a", verify="live")
    assert bool(again) == (not store_digests)


@pytest.mark.parametrize("shape", [(300, 100), ()], ids=["elements", "a number"])
@DIGESTS
def test_a_damaged_file_is_damage_and_no_divergence(
    store_digests: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    state = {"a": torch.full(shape, 3.0), "step": torch.full((), 2.0)}
    shardckpt.save(state, tmp_path / "a", store_digests=store_digests)
    (path,) = (tmp_path / "a").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[data.rindex(torch.full((), 3.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    for verify in ("read", "live"):
        with pytest.raises(ChecksumError, match="do not match their checksum"):
            shardckpt.load({"a": torch.zeros(shape), "step": torch.zeros(())}, tmp_path / "a", verify=verify)


def test_a_number_is_checked_before_the_load_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shardckpt.save({"a": torch.rand(30, 7), "step": torch.ones(())}, tmp_path / "a")
    checked: list[Any] = []
    read = VerifiedStore.read
    monkeypatch.setattr(VerifiedStore, "read", lambda self, reads: checked.extend(reads) or read(self, reads))
    shardckpt.load({"a": torch.zeros(30, 7), "step": torch.zeros(())}, tmp_path / "a", verify="live")
    assert [len(each.buffer) for each in checked] == [4]


def test_files_on_another_machine_are_checked_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardckpt.save({"a": torch.rand(30, 7)}, "memory://live/a")
    checked: list[Any] = []
    read = VerifiedStore.read
    monkeypatch.setattr(VerifiedStore, "read", lambda self, reads: checked.extend(reads) or read(self, reads))
    shardckpt.load({"a": torch.zeros(30, 7)}, "memory://live/a", verify="live")
    assert [len(each.buffer) for each in checked] == [30 * 7 * 4]


def test_ranks_of_any_style_check_what_they_hold_and_all_raise(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        found = []
        for face in ("flat", "in place"):
            state = {"model": FRONT_ENDS[face](Net((1,)))}
            state["optim"] = torch.optim.AdamW(state["model"].parameters())
            step(state["model"], state["optim"])
            shardckpt.save(state, tmp_path / face, store_digests=True)
        for face in ("flat", "in place"):
            for source in ("flat", "in place"):
                state = {"model": FRONT_ENDS[face](Net((1,)))}
                state["optim"] = torch.optim.AdamW(state["model"].parameters())
                shardckpt.load(state, tmp_path / source, verify="live")
        if rank:
            read = ElementReader.read
            ElementReader.read = lambda self, wanted, *store: read(self, [] if store else wanted, *store)
        try:
            shardckpt.load(
                {"model": FRONT_ENDS["in place"](Net((1,)))}, tmp_path / "flat", include=["model"], verify="live"
            )
        except shardckpt.ShardckptError as error:
            found.append(f"{type(error).__name__}: {error}")
        return found

    (first,), (second,) = run(2, body)
    assert "RankError" in first
    assert "failed on rank 1" in first
    assert "ResumeDivergence" in second


def test_a_load_without_a_state_has_no_memory_to_check(tmp_path: Path) -> None:
    shardckpt.save({"a": torch.zeros(4)}, tmp_path / "a")
    with pytest.raises(UsageError, match="live"):
        shardckpt.load(tmp_path / "a", verify="live")
