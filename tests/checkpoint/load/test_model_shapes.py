"""LOCAL files of FSDP1, which tell no shapes, go straight into the models that do, however those are sharded."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh

import shardckpt
from shardckpt import core as ours
from shardckpt.checkpoint.load.load import find_param_shapes
from shardckpt.errors import UsageError
from shardckpt.state import model_state_dict, optim_state_dict
from shardckpt.state.local.local_shards import local_model
from tests.kit.models.states import quiet
from tests.kit.ranks.harness import raised_everywhere, run
from tests.kit.writers.rank_writers import built, in_place, truth, two_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SAVED = ("local-flat", "local-orig", "local-orig-bf16", "local-flat-bf16")
Cut = Callable[[nn.Module], nn.Module]


def blank() -> nn.Module:
    """Return the net as a new run has it: of none of the numbers that were saved."""
    model = built()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(-1.0)
    return model


def units(model: nn.Module, cut: Cut) -> nn.Module:
    """Cut a net where the one that was saved was not: its first block and itself alone."""
    model.first = cut(model.first)
    return cut(model)


def wrapped(engine: Any, **options: Any) -> Cut:
    if engine is theirs:
        options["device_id"] = torch.device("cpu")
    return lambda model: units(model, lambda each: quiet(engine.FullyShardedDataParallel, each, **options))


FACES: Mapping[str, Cut] = {
    "plain": lambda model: model,
    "flat": wrapped(ours),
    "orig": wrapped(ours, use_orig_params=True),
    "in place": lambda model: units(model, ours.fully_shard),
    "torch in place": lambda model: in_place(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),))),
    "torch's wrapper": wrapped(theirs, use_orig_params=True),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what two ranks under torch's own wrapper saved."""
    folder = tmp_path_factory.mktemp("ranks")
    run(2, two_ranks, folder, timeout=120)
    return folder


def held(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all that a model and its optimizer hold, the latter as `<fqn>/<slot>`."""
    found = {name: value.clone() for name, value in model_state_dict(model, "FULL").items()}
    for name, slots in optim_state_dict(model, optim, "FULL")["state"].items():
        found |= {f"{name}/{slot}": value.clone() for slot, value in slots.items()}
    return found


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    return [
        *sorted(expected.keys() ^ found.keys()),
        *(name for name in expected.keys() & found.keys() if not torch.equal(found[name], expected[name])),
    ]


def loaded_wrong(rank: int, world: int, folder: Path, faces: tuple[str, ...], saved: tuple[str, ...]) -> list[str]:
    """Load what was saved into each face; return what is not as it was."""
    warnings.simplefilter("ignore")
    wrong = []
    for face, name in product(faces, saved):
        model = FACES[face](blank())
        optim = torch.optim.AdamW(model.parameters(), lr=9.0)
        shardckpt.load({"model": model, "optim": optim}, folder / name)
        wrong += [f"{face}, {name}: {each}" for each in differing(held(model, optim), truth())]
        wrong += [f"{face}, {name}: {group['lr']}" for group in optim.param_groups if group["lr"] != 0.1]
    return wrong


@pytest.mark.parametrize(
    ("world", "faces", "saved"),
    [(1, ("plain", "flat"), SAVED[:2]), (2, ("orig", "in place"), SAVED), (3, tuple(FACES), SAVED[:2])],
    ids=["on 1", "on 2", "on 3"],
)
def test_models_and_optimizers_are_filled_bit_for_bit(
    world: int, faces: tuple[str, ...], saved: tuple[str, ...], written: Path
) -> None:
    """Saved by two ranks; the files tell neither names nor shapes, or names alone."""
    assert run(world, loaded_wrong, written, faces, saved, timeout=120) == [[]] * world


def test_a_model_tells_its_parameters_in_order_with_their_ties_and_no_buffers() -> None:
    model = built()
    known = find_param_shapes([local_model(model)])
    assert known is not None
    parameters = model.named_parameters(remove_duplicate=False)
    assert list(known.shapes.items()) == [(name, tuple(parameter.shape)) for name, parameter in parameters]
    assert known.aliases == {"head.weight": "embed.weight"}
    assert known.is_ordered
    assert find_param_shapes([]) is None


def test_a_process_without_a_group_loads_them(written: Path) -> None:
    model = blank()
    shardckpt.load({"model": model}, written / "local-flat", ignore_extra=True)
    weights = {name: value for name, value in truth().items() if "/" not in name}
    assert differing(model.state_dict(), weights) == []


def other_width(model: nn.Module) -> None:
    model.first.up = nn.Linear(4, 8)


def one_lacks(model: nn.Module) -> None:
    model.second.up.bias = None


def one_more(model: nn.Module) -> None:
    model.first.extra = nn.Parameter(torch.zeros(7))


@pytest.mark.parametrize("name", ["local-flat", "local-orig"])
@pytest.mark.parametrize(
    ("change", "unit"),
    [(other_width, "first"), (one_lacks, "second"), (one_more, "first")],
    ids=["other width", "one lacks", "one more"],
)
def test_another_model_is_refused_with_the_unit_and_left_alone(
    name: str, change: Callable[[nn.Module], None], unit: str, written: Path
) -> None:
    model = blank()
    change(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=rf"into.*'{unit}._flat_param'.* found \d+ .* expected \d+ elements"):
        shardckpt.load({"model": model}, written / name, ignore_extra=True)
    assert differing(model.state_dict(), before) == []


def test_another_model_is_refused_on_every_rank(written: Path) -> None:
    def body(rank: int, world: int) -> None:
        warnings.simplefilter("ignore")
        model = blank()
        other_width(model)
        shardckpt.load({"model": FACES["flat"](model)}, written / "local-flat", ignore_extra=True)

    assert all("'first._flat_param'" in each.message for each in raised_everywhere(2, body))


@pytest.mark.parametrize("read", [shardckpt.load, shardckpt.open])
def test_without_a_model_they_are_refused_with_the_way_out(read: Callable[[Path], Any], written: Path) -> None:
    way_out = r"no file has their members' shapes.*load\({.model.: model}, path\).*consolidate SRC DST --shapes-from"
    with pytest.raises(UsageError, match=way_out):
        read(written / "local-flat")


def test_a_state_without_a_model_is_refused(written: Path) -> None:
    with pytest.raises(UsageError, match="no file has their members' shapes"):
        shardckpt.load({"model": built().state_dict()}, written / "local-flat")


def test_of_several_models_each_file_is_of_the_one_that_fits(written: Path, tmp_path: Path) -> None:
    """Accelerate's folder of two models that were saved LOCAL, loaded in the other order."""
    for rank in range(2):
        for number, name in enumerate(("local-flat", "local-orig")):
            file = tmp_path / f"pytorch_model_fsdp{f'_{number}' * bool(number)}_rank{rank}.bin"
            shutil.copyfile(written / name / f"model_rank{rank}.pt", file)
    other = nn.Linear(3, 2)
    model, again = blank(), blank()
    shardckpt.load({"other": other, "model_1": again, "model": model}, tmp_path, include=["model*"])
    weights = {name: value for name, value in truth().items() if "/" not in name}
    assert differing(model.state_dict(), weights) == []
    assert differing(again.state_dict(), weights) == []


@pytest.fixture
def untold(fixtures: Path, tmp_path: Path) -> Path:
    """The fixture of GPT-2, without the notes beside it."""
    source = fixtures / "fsdp1_local_gpt2_w2" / "ckpt"
    for file in source.glob("*.pt"):
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def test_a_language_model_is_filled_from_the_fixture(untold: Path, fixtures: Path) -> None:
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    folder = fixtures / "fsdp1_local_gpt2_w2"
    expected = load_file(folder / "truth_model.safetensors") | load_file(folder / "truth_optim.safetensors")
    settings = json.loads((folder / "truth_param_groups.json").read_text())["param_groups"]

    def found_in(cut: Cut) -> dict[str, torch.Tensor]:
        model = gpt2.GPT2LMHeadModel(
            gpt2.GPT2Config(vocab_size=97, n_positions=19, n_embd=30, n_layer=2, n_head=3, pad_token_id=0)
        )
        for at, layer in enumerate(model.transformer.h):
            model.transformer.h[at] = cut(layer)
        model = cut(model)
        layers = [parameter for name, parameter in model.named_parameters() if ".h." in name]
        rest = [parameter for name, parameter in model.named_parameters() if ".h." not in name]
        optim = torch.optim.AdamW([{"params": rest}, {"params": layers}], lr=9.0)
        shardckpt.load({"model": model, "optim": optim}, untold)
        assert [group["lr"] for group in optim.param_groups] == [group["lr"] for group in settings]
        return held(model, optim)

    def body(rank: int, world: int) -> list[str]:
        warnings.simplefilter("ignore")
        cuts = (lambda each: each, ours.FullyShardedDataParallel, ours.fully_shard)
        return [each for cut in cuts for each in differing(found_in(cut), expected)]

    assert run(3, body, timeout=60) == [[]] * 3
