"""`diff` compares tensors and other values across formats and world sizes, by canonical names."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardckpt
from shardckpt.offline.results.comparison import TensorDifference
from tests.kit.runs.cases import NAMES, read_case


def files(folder: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[str, str]:
    for name, tensors in (("a", a), ("b", b)):
        save_file(tensors, folder / f"{name}.safetensors")
    return str(folder / "a.safetensors"), str(folder / "b.safetensors")


def only(folder: Path, a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    found = shardckpt.diff(*files(folder, {"w": a}, {"w": b}))
    assert not found.same
    [difference] = found.differences
    return difference


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("torch_save", "fsdp1_full"))])
def test_a_checkpoint_equals_what_was_made_of_it(name: str, fixtures: Path, tmp_path: Path) -> None:
    """Across formats: the sharded source and the safetensors that consolidate wrote."""
    case = read_case(fixtures, name, tmp_path)
    shardckpt.consolidate(str(case.source), str(tmp_path / "out"), part="all")
    found = shardckpt.diff(str(case.source), str(tmp_path / "out"))
    assert [d for d in (*found.differences, *found.value_differences) if d.kind != "only_in_a"] == []
    if name == "fsdp1_local_gpt2_w2":  # whose ids have no certain names
        assert ["--param-names" in each.reason for each in found.not_compared] == [True]
        assert found.compared == found.equal == len(case.model)
    else:
        assert found.compared == found.equal >= len(case.optim)
    assert found.compared_values == found.equal_values


def test_the_same_run_at_another_world_size_has_the_same_names(fixtures: Path) -> None:
    a, b = (str(fixtures / n / "ckpt") for n in ("accelerate_fsdp1_sharded_llama_w2", "accelerate_fsdp2_full_llama_w2"))
    found = shardckpt.diff(a, b)
    assert found.compared > 50


def test_a_changed_value_is_measured(tmp_path: Path) -> None:
    found = only(tmp_path, torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.5, 4.0]))
    assert (found.kind, found.max_abs, found.max_rel, found.nans) == ("values", 0.5, 0.2, (0, 0))


def test_the_largest_difference_of_many_blocks_is_found(tmp_path: Path) -> None:
    a = torch.zeros(3 << 20)
    b = a.clone()
    b[5], b[-1] = 1e-3, 7.0
    assert only(tmp_path, a, b).max_abs == 7.0


def test_distances_are_norms_of_all_blocks_equal_ones_included(tmp_path: Path) -> None:
    b = torch.arange(1.0, 3_000_001)
    a = b.clone()
    a[-1], a[7] = a[-1] + 3, a[7] - 4
    found = only(tmp_path, a, b)
    assert found.l2 == 5.0
    assert found.norm == pytest.approx(float(b.double().norm()), rel=1e-12)
    assert found.relative_l2 == found.l2 / found.norm


def test_a_distance_from_zeros_or_infinities_is_infinite(tmp_path: Path) -> None:
    found = only(tmp_path, torch.ones(4), torch.zeros(4))
    assert (found.l2, found.norm, found.relative_l2) == (2.0, 0.0, math.inf)
    found = only(tmp_path, torch.tensor([math.inf, 1.0]), torch.tensor([3.0, 4.0]))
    assert (found.l2, found.norm, found.relative_l2) == (math.inf, 5.0, math.inf)


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["head", *(f"layers.{at}.{name}" for at in (0, 2, 10) for name in ("weight", "bias"))]
    a = {name: torch.zeros(1 if name == "head" else 4) for name in names}
    b = {name: tensor + 1 for name, tensor in a.items()}
    b |= {"layers.0.weight": a["layers.0.weight"], "layers.2.bias": torch.zeros(5)}
    layers = shardckpt.diff(*files(tmp_path, a, b)).layers
    assert [(layer.name, layer.tensor_count, layer.l2) for layer in layers] == [
        ("head", 1, 1.0),
        ("layers.0", 1, 2.0),
        ("layers.2", 2, 2.0),
        ("layers.10", 2, pytest.approx(8**0.5)),
    ]
    assert [layer.max_abs for layer in layers] == [1.0] * 4
    assert layers[2].relative_l2 == 1.0


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.w.weight", "model.layers.3"),
        ("model.layers.3.mlp.experts.7.w/exp_avg", "model.layers.3"),
        ("model.embed.weight", "model.embed"),
        ("head", "head"),
    ],
)
def test_the_layer_of_a_tensor_ends_at_its_first_number(name: str, layer: str) -> None:
    assert TensorDifference(name, "values", "", "").layer == layer


def test_nans_are_counted_and_equal_to_themselves(tmp_path: Path) -> None:
    a = torch.tensor([math.nan, 1.0, 2.0])
    assert shardckpt.diff(*files(tmp_path, {"w": a}, {"w": a.clone()})).same
    found = only(tmp_path, a, torch.tensor([math.nan, math.nan, 2.0]))
    assert found.nans == (1, 2)
    assert found.max_abs == math.inf


def test_bits_count_and_not_values(tmp_path: Path) -> None:
    found = only(tmp_path, torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.kind, found.max_abs) == ("values", 0.0)


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 5]), 3.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 2.0),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0]), 1.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), 1.0),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16), 1.0),
    ],
)
def test_every_kind_of_number_is_measured(a: torch.Tensor, b: torch.Tensor, gap: float, tmp_path: Path) -> None:
    assert only(tmp_path, a, b).max_abs == gap


def test_another_type_is_a_difference_with_a_distance(tmp_path: Path) -> None:
    a = torch.tensor([1.0, 1 / 3])
    found = only(tmp_path, a, a.to(torch.bfloat16))
    assert (found.kind, str(found.a), str(found.b)) == ("dtype", "float32 [2]", "bfloat16 [2]")
    assert found.max_abs is not None
    assert 0 < found.max_abs < 1e-3
    assert found.message.startswith("w: dtype: float32 [2] / bfloat16 [2]; max abs ")
    assert found.b == shardckpt.results.TensorInfo("w", "bfloat16", (2,), 4, 1)


def test_another_shape_is_not_compared(tmp_path: Path) -> None:
    found = only(tmp_path, torch.zeros(2, 3), torch.zeros(3, 2))
    assert (found.kind, found.max_abs) == ("shape", None)


def test_what_only_one_side_has_is_listed(tmp_path: Path) -> None:
    found = shardckpt.diff(
        *files(tmp_path, {"both": torch.ones(1), "x": torch.ones(1)}, {"both": torch.ones(1), "y": torch.ones(1)})
    )
    assert [(d.name, d.kind) for d in found.differences] == [("x", "only_in_a"), ("y", "only_in_b")]
    assert (found.compared, found.equal) == (1, 1)


def test_wrapper_prefixes_do_not_count(tmp_path: Path) -> None:
    a = {"_orig_mod.module.w": torch.ones(2), "_orig_mod.module.b": torch.ones(1)}
    assert shardckpt.diff(*files(tmp_path, a, {"w": torch.ones(2), "b": torch.ones(1)})).same


def test_ids_and_names_of_an_optimizer_are_matched_where_groups_tell(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(layer.named_parameters(), lr=0.1)
    layer(torch.ones(3)).sum().backward()
    adam.step()
    torch.save({"model": layer.state_dict(), "optim": adam.state_dict()}, tmp_path / "a.pt")
    shardckpt.consolidate(str(tmp_path / "a.pt"), str(tmp_path / "out"), part="all")
    found = shardckpt.diff(str(tmp_path / "a.pt"), str(tmp_path / "out"))
    assert found.same
    assert found.compared == 2 + 6


def test_one_flipped_bit_of_a_shard_is_found(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "hf_pretrained_llama" / "ckpt"
    shutil.copytree(source, tmp_path / "b")
    shard = tmp_path / "b" / "model-00002-of-00004.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 0x40
    shard.write_bytes(raw)
    found = shardckpt.diff(str(source), str(tmp_path / "b"))
    assert len(found.differences) == 1
    assert found.differences[0].name in load_file(shard)


HAS_LATER_SETTING = "decoupled_weight_decay" in torch.optim.AdamW([torch.zeros(1)]).defaults
"""True if groups of this torch's AdamW have a setting more than those of torch 2.6."""


def run_state(**changed: object) -> dict[str, object]:
    """What a small run saves; the same every time but for what is changed in its groups or beside them."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW([{"params": [("weight", layer.weight)]}, {"params": [("bias", layer.bias)], "lr": 0.2}])
    layer(torch.ones(3)).sum().backward()
    adam.step()
    state = {"model": layer.state_dict(), "optim": adam.state_dict(), "step": 3, "seed": 7, "schedule": {"last": [0.1]}}
    for name, value in changed.items():
        if name in state:
            state[name] = value
        else:
            state["optim"]["param_groups"][0][name] = value  # type: ignore[index]
    return state


def difference(folder: Path, a: dict[str, object], b: dict[str, object], **how: object) -> shardckpt.results.Comparison:
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    return shardckpt.diff(folder / "a.pt", folder / "b.pt", **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "name", "words"),
    [
        ({"lr": 0.5}, "param_groups.0.lr", ("0.001", "0.5")),
        ({"betas": (0.9, 0.99)}, "param_groups.0.betas", ("[1] 0.999", "[1] 0.99")),
        ({"amsgrad": True}, "param_groups.0.amsgrad", ("False", "True")),
        ({"step": 4}, "step", ("3", "4")),
        ({"step": 3.0}, "step", ("int 3", "float 3.0")),
        ({"step": True}, "step", ("int 3", "bool True")),
        ({"seed": None}, "seed", ("int 7", "None")),
        ({"schedule": {"last": [0.1, 0.2]}}, "schedule.last", ("1 items", "2 items")),
        ({"schedule": {"last": [1e-4]}}, "schedule.last", ("[0] 0.1", "[0] 0.0001")),
    ],
)
def test_a_value_that_is_not_a_tensor_counts(
    changed: dict[str, object], name: str, words: tuple[str, str], tmp_path: Path
) -> None:
    found = difference(tmp_path, run_state(), run_state(**changed))
    assert not found.same
    assert found.differences == ()
    [only] = found.value_differences
    assert (only.name, only.a, only.b) == (name, *words)
    assert difference(tmp_path, run_state(), run_state()).same


def test_streams_are_compared_by_content_and_position(tmp_path: Path) -> None:
    def stream(content: bytes, at: int) -> io.BytesIO:
        made = io.BytesIO(content)
        made.seek(at)
        return made

    kept = stream(b"bytes", 2)
    for name, other in {
        "equal": stream(b"bytes", 2),
        "moved": stream(b"bytes", 3),
        "other": stream(b"Bytes", 2),
    }.items():
        for side, value in {"a": kept, "b": other}.items():
            shardckpt.save({"model": {"w": torch.ones(2)}, "s": value}, tmp_path / name / side)
        found = shardckpt.diff(tmp_path / name / "a", tmp_path / name / "b")
        assert found.same == (name == "equal"), found
        assert not found.not_compared


def test_a_value_of_one_side_alone_is_a_difference(tmp_path: Path) -> None:
    a = run_state()
    b = {key: value for key, value in a.items() if key != "seed"}
    assert [(d.name, d.kind, d.a) for d in difference(tmp_path, a, b).value_differences] == [("seed", "only_in_a", "7")]


def test_a_tensor_differs_from_a_number_of_the_same_value(tmp_path: Path) -> None:
    found = difference(tmp_path, run_state(), run_state(step=torch.tensor(3)))
    assert [(d.name, d.kind, d.a, d.b) for d in found.value_differences] == [("step", "type", "3", "int64 []")]
    assert found.differences == ()


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "native"])
@pytest.mark.parametrize("keys", ["names", "ids", "flat"])
def test_values_of_equal_checkpoints_are_equal_in_every_format(to: str, keys: str, tmp_path: Path) -> None:
    state = {key: value for key, value in run_state().items() if key in ("model", "optim")}
    torch.save(state, tmp_path / "a.pt")
    shardckpt.convert(tmp_path / "a.pt", tmp_path / "out", to=to, part="all", optim_keys=keys)
    found = shardckpt.diff(tmp_path / "a.pt", tmp_path / "out")
    assert found.same
    assert found.compared_values == 20 + 2 * HAS_LATER_SETTING


def test_all_that_a_run_holds_is_equal_after_resharding(tmp_path: Path) -> None:
    torch.save(run_state(), tmp_path / "a.pt")
    for to in ("native", "dcp", "torch"):
        shardckpt.reshard(tmp_path / "a.pt", tmp_path / to, to=to, world_size=2)
        found = shardckpt.diff(tmp_path / "a.pt", tmp_path / to)
        assert found.same
        assert found.compared_values == 20 + 2 * HAS_LATER_SETTING + 3


def test_groups_are_matched_by_their_parameters_and_not_by_their_order(tmp_path: Path) -> None:
    a, b = run_state(), run_state()
    b["optim"]["param_groups"].reverse()  # type: ignore[index]
    assert difference(tmp_path, a, b).same


def test_another_division_into_groups_is_a_difference_of_its_own(tmp_path: Path) -> None:
    a, b = run_state(), run_state(lr=0.2)
    a["optim"]["param_groups"][0]["lr"] = 0.2  # type: ignore[index]
    first, second = b["optim"]["param_groups"]  # type: ignore[index]
    second["params"] = first["params"] + second["params"]
    second["param_names"] = first["param_names"] + second["param_names"]
    del b["optim"]["param_groups"][0]  # type: ignore[attr-defined, index]
    found = difference(tmp_path, a, b)
    assert [d.name for d in found.value_differences] == ["param_groups.members"]


def test_a_part_is_compared_alone_and_the_rest_is_said(tmp_path: Path) -> None:
    a, b = run_state(), run_state(lr=0.5, seed=8)
    model = difference(tmp_path, a, b, part="model")
    assert model.same
    assert model.left_out == ("optim", "step", "seed", "schedule")
    optim = difference(tmp_path, a, b, part="optim")
    assert [d.name for d in optim.value_differences] == ["param_groups.0.lr"]
    assert optim.left_out == ("model", "step", "seed", "schedule")


def test_globs_choose_tensors_and_values_and_the_rest_is_said(tmp_path: Path) -> None:
    a, b = run_state(), run_state(lr=0.5, seed=8)
    found = difference(tmp_path, a, b, exclude=["*.lr", "seed"])
    assert found.same
    assert found.left_out == ("param_groups.0.lr", "param_groups.1.lr", "seed")
    assert [d.name for d in difference(tmp_path, a, b, include=["se*", "weight"]).value_differences] == ["seed"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"part": "trainer"}, "--part must be a part"),
        ({"atol": -1.0}, "atol must be a finite number"),
        ({"rtol": math.nan}, "rtol must be a finite number"),
        ({"include": ["nothing"]}, "matches no tensor"),
        ({"exclude": ["*"]}, "--exclude leaves nothing"),
    ],
)
def test_a_call_that_cannot_be_done_is_refused(how: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(shardckpt.errors.UsageError, match=message):
        difference(tmp_path, run_state(), run_state(), **how)


def test_a_part_that_neither_holds_is_refused(tmp_path: Path) -> None:
    a, b = files(tmp_path, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    with pytest.raises(shardckpt.errors.UsageError, match="neither checkpoint holds this part"):
        shardckpt.diff(a, b, part="optim")


@pytest.mark.parametrize(
    ("a", "b", "how", "is_equal"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), {"atol": 0.11}, True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), {"rtol": 0.04}, False),
        (torch.tensor([100.0]), torch.tensor([101.0]), {"rtol": 0.01}, True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), {"atol": 1e-9}, True),
        (torch.tensor([math.nan]), torch.tensor([-math.nan]), {"atol": 1e-9}, True),
        (torch.tensor([math.nan]), torch.tensor([1.0]), {"atol": 1e9}, False),
        (torch.tensor([math.inf]), torch.tensor([math.inf, 1.0][:1]), {"atol": 1e-9}, True),
        (torch.tensor([1.0]), torch.tensor([math.inf]), {"rtol": 1.0}, False),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), {"rtol": 9.0}, False),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1.1j]), {"atol": 0.11}, True),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1.2j]), {"atol": 0.11}, False),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0078125]).bfloat16(), {"rtol": 0.01}, True),
        (torch.tensor([1.0]).to(torch.float8_e5m2), torch.tensor([1.25]).to(torch.float8_e5m2), {"rtol": 0.3}, True),
        (torch.tensor([1]), torch.tensor([2]), {"atol": 5.0}, False),
        (torch.tensor([True]), torch.tensor([False]), {"atol": 5.0}, False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), {"atol": 5.0}, False),
    ],
)
def test_tolerances_are_of_floating_point_numbers(
    a: torch.Tensor, b: torch.Tensor, how: dict[str, float], is_equal: bool, tmp_path: Path
) -> None:
    assert shardckpt.diff(*files(tmp_path, {"w": a}, {"w": b}), **how).same is is_equal  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "how", "is_equal"),
    [
        (0.1, 0.1 + 1e-12, {"rtol": 1e-9}, True),
        (0.1, 0.1 + 1e-12, {}, False),
        (0.0, -0.0, {}, False),
        (0.0, -0.0, {"atol": 1e-9}, True),
        (math.nan, math.nan, {}, True),
        (1.0, math.inf, {"rtol": 1.0}, False),
        (3, 4, {"atol": 5.0}, False),
        (True, False, {"atol": 5.0}, False),
        ([1.0, (2.0, "x")], (1.0, [2.0, "x"]), {}, True),
    ],
)
def test_tolerances_and_types_are_of_values_too(
    a: object, b: object, how: dict[str, float], is_equal: bool, tmp_path: Path
) -> None:
    assert difference(tmp_path, run_state(seed=a), run_state(seed=b), **how).same is is_equal


def test_values_that_cannot_be_read_are_not_compared_unless_their_bytes_are_the_same(
    fixtures: Path, tmp_path: Path
) -> None:
    """Accelerate keeps the state of torch's generator as a tensor inside of a value."""
    source = fixtures / "accelerate_fsdp1_full_gpt2_w2" / "ckpt"
    shutil.copytree(source, tmp_path / "same")
    assert shardckpt.diff(source, tmp_path / "same").same
    states = torch.load(source / "random_states_0.pkl", weights_only=False)
    states["torch_manual_seed"][0] ^= 1
    torch.save(states, tmp_path / "same" / "random_states_0.pkl")
    found = shardckpt.diff(source, tmp_path / "same")
    assert not found.same
    assert [each.name for each in found.not_compared] == ["random_states_0.pkl.torch_manual_seed"]
    assert shardckpt.diff(source, tmp_path / "same", exclude=["*torch_manual_seed"]).same


def test_files_beside_that_are_not_read_are_not_compared(tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(1)}, tmp_path / name / "model.safetensors")
        torch.save({"lr": lr}, tmp_path / name / "optimizer.pt")
    found = shardckpt.diff(tmp_path / "a", tmp_path / "b")
    assert not found.same
    assert found.not_compared == (("optimizer.pt", "this is not read"),)
    assert shardckpt.diff(tmp_path / "a", tmp_path / "b", part="model").same


def test_numbers_of_an_optimizer_that_nothing_names_are_compared_as_numbers(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(layer.parameters(), lr=0.1)
    torch.save(adam.state_dict(), tmp_path / "a.pt")
    adam.param_groups[0]["lr"] = 0.2
    torch.save(adam.state_dict(), tmp_path / "b.pt")
    found = shardckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt", part="optim")
    assert [d.name for d in found.value_differences] == ["param_groups.0.lr"]
    assert "numbers" in found.warnings[0]


def test_files_that_are_not_read_are_equal_if_their_bytes_are(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    save_file({"w": torch.ones(2)}, first / "model.safetensors")
    torch.save({"x": 1}, first / "optimizer.pt")
    torch.save({"x": 2}, first / "scheduler.pt")
    shutil.copytree(first, second)
    found = shardckpt.diff(first, second)
    assert found.same
    assert found.not_compared == ()
    torch.save({"x": 3}, second / "scheduler.pt")
    found = shardckpt.diff(first, second)
    assert not found.same
    assert [each.name for each in found.not_compared] == ["scheduler.pt"]
    (second / "optimizer.pt").unlink()
    assert [each.name for each in shardckpt.diff(first, second).not_compared] == ["optimizer.pt", "scheduler.pt"]


def test_progress_counts_the_tensors_that_both_have(tmp_path: Path) -> None:
    a = {"u": torch.ones(4), "v": torch.ones(6), "only": torch.ones(9)}
    seen: list[shardckpt.results.Progress] = []
    shardckpt.diff(*files(tmp_path, a, {"u": torch.zeros(4), "v": torch.ones(6)}), on_progress=seen.append)
    assert [(each.done_bytes, each.total_bytes) for each in seen] == [(16, 40), (40, 40)]


def test_numbers_of_half_a_byte_are_compared_and_not_measured(tmp_path: Path) -> None:
    """A byte has two of them, so that differences of bytes are no distance."""
    for name, data in (("a", b"\x12\x34"), ("b", b"\x12\x35")):
        header = b'{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
        (tmp_path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    a, b = (tmp_path / f"{name}.safetensors" for name in "ab")
    [found] = shardckpt.diff(a, b).differences
    assert (found.kind, found.max_abs, found.l2) == ("values", None, None)
    assert shardckpt.diff(a, a).same


def save_optimizer(path: Path, model: dict[str, torch.Tensor], moment: float = 5.0, step: float = 1.0) -> str:
    """Save a model with the state of its optimizer, whose moments differ by parameter."""
    state = {
        number: {"step": torch.tensor(step), "exp_avg": torch.full((2,), moment + number)}
        for number in range(len(model))
    }
    groups = [{"lr": 0.1, "params": list(state), "param_names": list(model)}]
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, path)
    return str(path)


def test_a_parameter_with_the_name_of_a_slot_is_compared_and_so_is_the_slot(tmp_path: Path) -> None:
    model = {"x": torch.zeros(2), "x/exp_avg": torch.ones(2)}
    a = save_optimizer(tmp_path / "a.pt", model)
    shardckpt.consolidate(a, tmp_path / "folder", part="all")
    found = shardckpt.diff(a, tmp_path / "folder")
    assert (found.compared, found.differences) == (6, ())
    b = save_optimizer(tmp_path / "b.pt", model | {"x/exp_avg": torch.ones(2) + 3})
    [difference] = shardckpt.diff(a, b).differences
    assert (difference.name, difference.max_abs) == ("x/exp_avg", 3.0)
    c = save_optimizer(tmp_path / "c.pt", model, moment=7.0)
    names = [difference.name for difference in shardckpt.diff(a, c).differences]
    assert names == ["x/exp_avg (of the optimizer)", "x/exp_avg/exp_avg"]
    [alone] = shardckpt.diff(a, c, part="optim", include=["x/exp_avg"]).differences
    assert alone.max_abs == 2.0


def test_a_slot_equals_no_parameter_of_its_name(tmp_path: Path) -> None:
    a = save_optimizer(tmp_path / "a.pt", {"x": torch.zeros(2)})
    torch.save({"model": {"x": torch.zeros(2), "x/exp_avg": torch.full((2,), 5.0)}}, tmp_path / "b.pt")
    found = shardckpt.diff(a, tmp_path / "b.pt")
    assert [(each.name, each.kind) for each in found.differences] == [
        ("x/exp_avg", "only_in_b"),
        ("x/exp_avg (of the optimizer)", "only_in_a"),
        ("x/step", "only_in_a"),
    ]


def test_counters_differ_and_have_no_part_in_norms(tmp_path: Path) -> None:
    model = {"layers.0.w": torch.zeros(2)}
    a, b = (save_optimizer(tmp_path / f"{step}.pt", model, step, step) for step in (1.0, 1001.0))
    found = shardckpt.diff(a, b)
    moment, counter = found.differences
    assert (counter.name, counter.max_abs, counter.l2, counter.norm) == ("layers.0.w/step", 1000.0, None, None)
    [layer] = found.layers
    assert (layer.tensor_count, layer.l2, layer.norm) == (1, moment.l2, moment.norm)


def test_a_layer_in_which_only_counters_differ_is_none(tmp_path: Path) -> None:
    model = {"layers.0.w": torch.zeros(2), "norm.num_batches_tracked": torch.tensor(1)}
    changed = model | {"norm.num_batches_tracked": torch.tensor(9)}
    a, b = (save_optimizer(tmp_path / f"{at}.pt", state) for at, state in enumerate((model, changed)))
    found = shardckpt.diff(a, b)
    assert [(each.name, each.is_counter) for each in found.differences] == [("norm.num_batches_tracked", True)]
    assert found.layers == ()


def test_files_that_steps_store_with_a_model_are_compared(tmp_path: Path) -> None:
    a, b = tmp_path / "step-1", tmp_path / "step-2"
    for step, contents in ((a, ("{}", "x", None)), (b, ("{ }", "x", "y"))):
        (folder := tmp_path / f"files-{step.name}").mkdir()
        for name, text in zip(("config.json", "merges.txt", "vocab.txt"), contents, strict=True):
            if text is not None:
                (folder / name).write_text(text)
        shardckpt.save({"w": torch.ones(2)}, step, model_files=folder)
    found = shardckpt.diff(a, b)
    assert not found.same
    assert [(each.name, each.kind) for each in found.value_differences] == [
        ("model_files/config.json", "value"),
        ("model_files/vocab.txt", "only_in_b"),
    ]
    assert found.value_differences[0].a.startswith("'2 bytes, xxh3 ")
    assert (found.compared_values, found.equal_values) == (2, 1)
    assert shardckpt.diff(a, a).same
    assert shardckpt.diff(a, b, include=["w"]).same
    shardckpt.consolidate(a, tmp_path / "out")
    assert shardckpt.diff(a, tmp_path / "out").same, "other formats store no files"
