"""DeepSpeed folders: every stage and world size gives the same whole tensors, and what does not fit is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt.errors import (
    AmbiguousError,
    FormatError,
    IncompleteError,
    OverlapError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from shardckpt.plan.layout.coverage import require_complete
from shardckpt.reader import Reader
from shardckpt.readers.deepspeed import reader as deepspeed
from shardckpt.readers.registry import detect, open_checkpoint, open_source
from tests.kit.writers.deepspeed_writer import STEPS, Run, dealt, write
from tests.kit.writers.materialise import assert_same, materialise, truth

CASES = ("deepspeed_zero1_bf16_gpt2_w2", "deepspeed_zero2_bf16_nasty_w2", "deepspeed_zero3_bf16_llama_w2")


def numbered(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


RUN = Run(
    groups=[
        {"a.w": numbered(5, 7), "tiny": numbered(1), "k": numbered(3, 2, 3)},
        {"a.b": numbered(7), "s": numbered()},
    ],
    held={
        "steps": torch.tensor(5),
        "mask": torch.tensor([True, False]),
        "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
        "none": torch.zeros(0, 4),
        "ice": numbered(3, 3).bfloat16(),
    },
    frozen=("ice",),
    order=("steps", "a.w", "a.b", "mask", "tiny", "ice", "half", "none", "k", "s", "head"),
    shared={"head": "a.w"},
)


def opened(folder: Path) -> Reader:
    reader = open_checkpoint(str(folder))
    require_complete(reader.manifest, reader.manifest.tensors.values(), "here")
    return reader


def assert_is(reader: Reader, run: Run) -> None:
    """Compare everything that a reader shows with what was trained."""
    tensors = reader.manifest.tensors
    module = run.module()
    assert [path[1] for path in tensors if path[0] == "model" and path[1] not in run.shared] == [
        name for name in run.names if name not in run.shared
    ]
    for name, value in module.items():
        entry = tensors["model", name]
        if entry.delivered:
            found = materialise(reader, ("model", name))
            whole = torch.frombuffer(bytearray(found.tobytes()), dtype=torch.float32) if found.size else torch.empty(0)
            assert torch.equal(whole.reshape(entry.shape).to(value.dtype), value), name
            assert entry.dtype == str(value.dtype).removeprefix("torch.")
        else:
            assert_same(reader, ("model", name), value)
    for name, value in run.trained.items():
        assert_same(reader, ("master", name), value)
        assert_same(reader, ("optimizer", "state", name, "step"), torch.tensor(float(STEPS)))
    for key, value in run.moments().items():
        name, _, slot = key.rpartition("/")
        assert_same(reader, ("optimizer", "state", name, slot), value)
    groups: Any = reader.manifest.objects["optimizer", "param_groups"].value
    assert [group["params"] for group in groups] == [list(group) for group in run.groups]
    assert [group["lr"] for group in groups] == [0.1 / (g + 1) for g in range(len(run.groups))]
    for alias, name in run.shared.items():
        assert reader.manifest.aliases["model", alias] == ("model", name)
        assert reader.manifest.aliases["master", alias] == ("master", name)


class TestFixtures:
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("inner", ["", "global_step3"])
    def test_masters_and_moments_are_bit_exact_from_either_folder(self, fixtures: Path, case: str, inner: str) -> None:
        source = open_source(str(fixtures / case / "ckpt" / inner))
        assert detect(source) is deepspeed.FORMAT
        reader = deepspeed.open_source(source)
        for name, value in truth(fixtures / case / "truth_master.safetensors").items():
            assert_same(reader, ("master", name), value)
        for key, value in truth(fixtures / case / "truth_optim.safetensors").items():
            name, _, slot = key.rpartition("/")
            assert_same(reader, ("optimizer", "state", name, slot), value)

    def test_what_else_a_model_file_holds_keeps_its_key(self, fixtures: Path) -> None:
        values = {p: e.value for p, e in open_checkpoint(str(fixtures / CASES[0] / "ckpt")).manifest.objects.items()}
        assert (values["epoch",], values["global_steps",], values["note",]) == (2, 3, "client")
        assert not any(path[0] in {"param_shapes", "shared_params", "buffer_names"} for path in values)


class TestLayouts:
    @pytest.mark.parametrize("world", range(1, 9))
    @pytest.mark.parametrize("stage", [1, 3])
    def test_any_world_size_gives_the_same_tensors(self, stage: int, world: int, tmp_path: Path) -> None:
        assert_is(opened(write(tmp_path, RUN, stage, world)), RUN)

    @pytest.mark.parametrize("live", [torch.bfloat16, torch.float16, None])
    @pytest.mark.parametrize("stage", [2, 3])
    def test_any_type_of_weights(self, stage: int, live: torch.dtype | None, tmp_path: Path) -> None:
        run = Run(RUN.groups, RUN.held, RUN.frozen, RUN.order, RUN.shared, live)
        assert_is(opened(write(tmp_path, run, stage, 2)), run)

    def test_the_bf16_optimizer_writes_its_padding(self, tmp_path: Path) -> None:
        assert_is(opened(write(tmp_path, RUN, 1, 3, lean=False)), RUN)

    def test_parameters_that_start_at_multiples(self, tmp_path: Path) -> None:
        assert_is(opened(write(tmp_path, RUN, 2, 3, parameter_alignment=8)), RUN)

    @pytest.mark.parametrize("size", [1, 9, 20])
    def test_groups_in_several_flat_tensors(self, size: int, tmp_path: Path) -> None:
        assert_is(opened(write(tmp_path, RUN, 3, 3, sub_group=size)), RUN)

    @pytest.mark.parametrize("is_elastic", [True, False])
    def test_optimizers_that_count_their_steps_elsewhere(self, is_elastic: bool, tmp_path: Path) -> None:
        """Elastic checkpoints leave the groups out; some optimizers count for a group."""
        write(tmp_path, RUN, 2, 2)
        for file in (tmp_path / "global_step3").glob("*_optim_states.pt"):
            saved = torch.load(file)
            said = saved["optimizer_state_dict"]
            base = said["base_optimizer_state"]
            for slots in base["state"].values():
                del slots["step"]
            if is_elastic:
                said["base_optimizer_state"] = list(base["state"].values())
                said["base_optimizer_state_step"] = 7
            else:
                for group in base["param_groups"]:
                    group["step"] = 7
            torch.save(saved, file)
        reader = opened(tmp_path)
        for name in RUN.trained:
            assert reader.manifest.objects["optimizer", "state", name, "step"].value == 7
            assert_same(reader, ("optimizer", "state", name, "exp_avg"), RUN.moments()[f"{name}/exp_avg"])
        groups: Any = reader.manifest.objects["optimizer", "param_groups"].value
        assert [group["params"] for group in groups] == [list(group) for group in RUN.groups]

    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.parametrize("world", [1, 3])
    def test_moments_have_the_names_that_the_optimizer_gave_them(self, world: int, stage: int, tmp_path: Path) -> None:
        """Muon has one flat buffer for matrices, and Adam's moments for the others (DeepSpeed's `MuonWithAuxAdam`)."""
        write(tmp_path, RUN, stage, world)
        for file in (tmp_path / "global_step3").glob("*_optim_states.pt"):
            saved = torch.load(file)
            said = saved["optimizer_state_dict"]
            base = said["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
            base["state"][0] = {"momentum_buffer": base["state"][0]["exp_avg"]}
            torch.save(saved, file)
        reader = opened(tmp_path)
        slots = {path[2:] for path in reader.manifest.tensors if path[:2] == ("optimizer", "state")}
        adam = [(name, slot) for name in RUN.groups[1] for slot in ("exp_avg", "exp_avg_sq", "step")]
        assert slots == {*adam, *((name, "momentum_buffer") for name in RUN.groups[0])}
        for name in RUN.groups[0]:
            place = ("optimizer", "state", name, "momentum_buffer")
            assert_same(reader, place, RUN.moments()[f"{name}/exp_avg"])

    @settings(max_examples=40, deadline=None)
    @given(
        shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5),
        more=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=4),
        stage=st.sampled_from((1, 2, 3)),
        world=st.integers(1, 16),
        live=st.sampled_from((torch.bfloat16, None)),
        rule=st.sampled_from(
            (
                {},
                {"is_old": True},
                {"lean": False},
                {"parameter_alignment": 4},
                {"places": "flat"},
                {"places": "flat", "is_old": True},
                {"places": "flat", "parameter_alignment": 8},
                {"places": "dealt"},
                {"places": "dealt", "is_old": True},
                {"places": "dealt", "lean": False},
            )
        ),
    )
    def test_odd_shapes(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        shapes: list[tuple[int, ...]],
        more: list[tuple[int, ...]],
        stage: int,
        world: int,
        live: torch.dtype | None,
        rule: dict[str, Any],
    ) -> None:
        """Every way in which a version of DeepSpeed pads the ends of groups and tells where parameters lie."""
        folder = tmp_path_factory.mktemp("odd")
        groups = [{f"p{g}.{i}": numbered(*s) for i, s in enumerate(group)} for g, group in enumerate((shapes, more))]
        run = Run([group for group in groups if group], live=live)
        assert_is(opened(write(folder, run, stage, world, **rule)), run)
        shutil.rmtree(folder)

    @pytest.mark.parametrize("stage", [1, 2])
    def test_parameters_that_were_dealt_out_to_three_ranks(self, stage: int, tmp_path: Path) -> None:
        """DeepSpeed tells their places as if they had not been; the weights lie in the order of `param_shapes`."""
        big = {f"{name}{i}": numbered(20 + i, 15) for i, name in enumerate("wxyzwxyz")}
        run = Run([{name: big[name] for name in dealt(list(big), 3)}, RUN.groups[1]], live=None)
        assert_is(opened(write(tmp_path, run, stage, 3, places="dealt")), run)

    def test_all_padding_of_a_group_was_once_the_last_ranks(self, tmp_path: Path) -> None:
        """More than its part has: five elements in parts of two are three of padding."""
        run = Run([{"w": numbered(5)}], live=None)
        assert_is(opened(write(tmp_path, run, 2, 4, is_old=True)), run)


class TestBadInput:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(tmp_path / "ckpt", RUN, 2, 3)

    @pytest.fixture
    def split(self, tmp_path: Path) -> Path:
        return write(tmp_path / "split", RUN, 3, 3)

    def edit(self, file: Path, change: Callable[[Any], object]) -> None:
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)

    def test_buffers_and_values_that_differ_between_ranks_are_not_those_of_rank_0(self, split: Path) -> None:
        assert shardckpt.verify(split).ok
        [file] = split.rglob("zero_pp_rank_1_mp_rank_00_model_states.pt")
        self.edit(file, lambda state: (state["module"]["half"].add_(1), state.update(epoch=3)))
        reader = open_checkpoint(str(split))
        assert "zero_pp_rank_1_mp_rank_00_model_states.pt" in repr(reader.manifest.objects["epoch",].value)
        with pytest.raises(OverlapError, match=r"zero_pp_rank_1.*: 'model.half' differs between ranks"):
            materialise(reader, ("model", "half"))
        assert any("model.half, epoch: the values differ" in warning for warning in reader.manifest.warnings)

    def test_a_missing_partition_is_named_where_it_is_needed(self, folder: Path, tmp_path: Path) -> None:
        (folder / "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        shardckpt.consolidate(str(folder), str(tmp_path / "live"))
        with pytest.raises(IncompleteError, match="bf16_zero_pp_rank_1_mp_rank_00_optim_states"):
            shardckpt.consolidate(str(folder), str(tmp_path / "master"), weights="master")
        with pytest.raises(IncompleteError, match="the file is not there"):
            shardckpt.consolidate(str(folder), str(tmp_path / "all"), part="all")
        assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("ckpt")] == ["live"]

    @pytest.mark.parametrize("name", ["bf16_zero_pp_rank_2_mp_rank_00_optim", "zero_pp_rank_1_mp_rank_00_model"])
    def test_a_missing_part_of_stage_3_is_named(self, name: str, split: Path, tmp_path: Path) -> None:
        (split / f"global_step3/{name}_states.pt").unlink()
        with pytest.raises(IncompleteError, match=name):
            shardckpt.consolidate(str(split), str(tmp_path / "out"))

    def test_no_model_file_is_said(self, folder: Path) -> None:
        (folder / "global_step3/mp_rank_00_model_states.pt").unlink()
        with pytest.raises(IncompleteError, match="the model's is not"):
            open_checkpoint(str(folder))

    def test_two_files_of_one_rank(self, folder: Path) -> None:
        step = folder / "global_step3"
        name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        shutil.copy(step / f"bf16_{name}", step / name)
        with pytest.raises(FormatError, match="two files have the same rank"):
            open_checkpoint(str(folder))

    def test_a_file_of_a_larger_save(self, folder: Path) -> None:
        step = folder / "global_step3"
        name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
        shutil.copy(step / name.format(0), step / name.format(3))
        with pytest.raises(FormatError, match="rank 3"):
            open_checkpoint(str(folder))

    def test_ranks_of_different_worlds(self, folder: Path, tmp_path: Path) -> None:
        other = write(tmp_path / "other", RUN, 2, 2)
        name = "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        shutil.copy(other / name, folder / name)
        with pytest.raises(FormatError, match=r"different saves.*found 2 ranks.*expected 3 ranks"):
            open_checkpoint(str(folder))

    def test_ranks_of_different_steps(self, folder: Path, split: Path) -> None:
        def later(state: Any) -> None:
            state["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1

        self.edit(folder / "global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", later)
        with pytest.raises(FormatError, match="ranks 0 and 2 took different numbers of steps"):
            open_checkpoint(str(folder))
        self.edit(split / "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt", lambda s: s.update(global_steps=9))
        with pytest.raises(FormatError, match=r"different saves.*steps 3, 9"):
            open_checkpoint(str(split))

    def test_sizes_that_disagree_with_the_shapes(self, folder: Path, split: Path) -> None:
        def grow(state: Any) -> None:
            state["param_shapes"][0]["a.w"] = torch.Size([50, 7])

        self.edit(folder / "global_step3/mp_rank_00_model_states.pt", grow)
        with pytest.raises(FormatError, match=r"group 0 of rank . is not as long.*found 18 elements.*for 3 parameters"):
            open_checkpoint(str(folder))
        self.edit(split / "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt", grow)
        with pytest.raises(FormatError, match="flat tensor 0 of rank 0 is not as long as param_shapes"):
            open_checkpoint(str(split))

    def test_a_moment_that_is_no_part_of_anything_is_left_out_and_named(self, folder: Path) -> None:
        def error(state: Any) -> None:
            state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["worker_error"] = torch.zeros(3)

        for rank in range(3):
            self.edit(folder / f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", error)
        warnings = opened(folder).manifest.warnings
        assert any("worker_error of flat tensor 0 is not shaped like its parameters" in text for text in warnings)

    def test_tensor_parallel_ranks_are_explained(self, folder: Path) -> None:
        step = folder / "global_step3"
        for file in list(step.iterdir()):
            shutil.copy(file, step / file.name.replace("mp_rank_00", "mp_rank_01"))
        with pytest.raises(UnsupportedError, match="ds_to_universal"):
            open_checkpoint(str(folder))

    def test_classes_that_are_not_known_are_named_and_refused(self, folder: Path) -> None:
        def client(state: Any) -> None:
            state["args"] = shutil.Error("x")

        self.edit(folder / "global_step3/mp_rank_00_model_states.pt", client)
        with pytest.raises(UnsafeError, match=r"shutil\.Error"):
            open_checkpoint(str(folder))

    def test_which_step_is_meant(self, tmp_path: Path) -> None:
        for n in (1, 2):
            write(tmp_path, RUN, 2, 1, tag=f"global_step{n}")
        assert all(name.startswith("global_step2/") for name in opened(tmp_path).manifest.files)
        (tmp_path / "latest").write_text("global_step9")
        with pytest.raises(IncompleteError, match="found global_step9"):
            open_checkpoint(str(tmp_path))
        (tmp_path / "latest").unlink()
        with pytest.raises(AmbiguousError, match="global_step1, global_step2"):
            open_checkpoint(str(tmp_path))

    @pytest.mark.parametrize("tag", ["..", "/etc", "../ckpt/global_step3", "global_step3\0"])
    def test_a_pointer_out_of_the_folder_leads_nowhere(self, tag: str, folder: Path) -> None:
        (folder / "latest").write_text(tag)
        with pytest.raises(IncompleteError, match="latest names a folder"):
            open_checkpoint(str(folder))

    def test_weights_that_lie_beside_are_said_to_be_left(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"")
        assert any("model.safetensors is next to" in text for text in opened(folder).manifest.warnings)


def test_a_model_is_loaded_from_any_stage_by_one_call(tmp_path: Path) -> None:
    model = torch.nn.Linear(5, 3)
    optim = torch.optim.AdamW(model.parameters())
    run = Run([{"weight": numbered(3, 5), "bias": numbered(3)}], live=None)
    for stage in (2, 3):
        folder = write(tmp_path / str(stage), run, stage, 3)
        shardckpt.load({"model": model, "optimizer": optim}, str(folder), strict=False)
        assert torch.equal(model.weight, run.trained["weight"])
        assert torch.equal(model.bias, run.trained["bias"])
        state = optim.state_dict()["state"]
        assert torch.equal(state[0]["exp_avg"], run.moments()["weight/exp_avg"])
        assert torch.equal(state[1]["exp_avg_sq"], run.moments()["bias/exp_avg_sq"])
        assert state[0]["step"] == STEPS
        assert optim.param_groups[0]["lr"] == 0.1
        torch.nn.init.zeros_(model.weight)
        optim = torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    "name", ["zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]
)
def test_a_part_is_not_taken_for_a_model(name: str, tmp_path: Path) -> None:
    [file] = write(tmp_path, RUN, 3, 2).rglob(name)
    with pytest.raises(UsageError, match="one part of a DeepSpeed checkpoint"):
        shardckpt.consolidate(str(file), str(tmp_path / "out"))


def test_the_file_of_a_whole_model_is_read_by_itself(tmp_path: Path) -> None:
    [file] = write(tmp_path, RUN, 2, 2).rglob("mp_rank_00_model_states.pt")
    found = shardckpt.inspect(str(file))
    assert {tensor.name for tensor in found.tensors} >= {f"module.{name}" for name in RUN.names}
