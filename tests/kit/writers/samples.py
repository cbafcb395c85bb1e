"""A good checkpoint of every format that can be read, small, written by the libraries that write such files."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

import shardckpt
from shardckpt.boxes import Box, full_box
from shardckpt.layout import DimLayout, FlatLayout, ParamSpec
from shardckpt.stream.format.stream_records import Version
from shardckpt.stream.publish.publisher import Publisher
from tests.kit.writers.dcp_writers import save, save_chunked
from tests.kit.writers.deepspeed_writer import Run, write_universal
from tests.kit.writers.deepspeed_writer import write as write_deepspeed
from tests.kit.writers.native_writer import write_step
from tests.kit.writers.share_writers import as_rank, dtensor, sharded
from tests.kit.writers.torch_writers import FORMS

Builder = Callable[[Path], Path]

MODEL = {
    "a.w": torch.arange(24.0).reshape(6, 4),
    "b": torch.tensor([1, 2, 3, 1 << 40, 5]),
    "s": torch.tensor(3.5),
    "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
}
"""What every sample holds, whatever its form."""

OPTIM: dict[str, Any] = {
    "state": {"a.w": {"exp_avg": torch.ones(6, 4), "step": torch.tensor(3.0)}},
    "param_groups": [{"params": ["a.w"], "lr": 0.1}],
}
_BOXES = {"model.a.w": [((0, 0), (6, 1)), ((0, 1), (6, 3))]}


def _state() -> dict[str, Any]:
    return {"model": dict(MODEL), "optimizer": OPTIM, "epoch": {"n": 7}}


def _dcp(form: str) -> Builder:
    return lambda folder: save(_state(), folder, **FORMS[form]())


def _dcp_chunks(folder: Path) -> Path:
    return save_chunked(_state(), _BOXES, folder)


def _accelerate_sharded(folder: Path) -> Path:
    save({"model": dict(MODEL)}, folder / "pytorch_model_fsdp_0")
    save({"optimizer": OPTIM}, folder / "optimizer_0")
    torch.save({"step": 3}, folder / "random_states_0.pkl")
    return folder


def _accelerate_full(folder: Path) -> Path:
    folder.mkdir()
    torch.save(MODEL, folder / "pytorch_model_fsdp.bin")
    torch.save(OPTIM, folder / "optimizer.bin")
    torch.save({"step": 3}, folder / "random_states_0.pkl")
    return folder


def _fabric(folder: Path) -> Path:
    save({"model": dict(MODEL), "optimizer": OPTIM}, folder)
    torch.save({"epoch": 3}, folder / "meta.pt")
    return folder


def _composer(folder: Path) -> Path:
    save(dict(MODEL), folder / "model")
    save(OPTIM, folder / "optim")
    (folder / "composer_metadata.json").write_text("{}")
    torch.save({"timestamp": 3}, folder / "resumption.pkl")
    return folder


def _one_file(folder: Path) -> Path:
    folder.mkdir()
    save_file(MODEL, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def _halves() -> list[dict[str, torch.Tensor]]:
    names = list(MODEL)
    return [{n: MODEL[n] for n in names[:2]}, {n: MODEL[n] for n in names[2:]}]


def _shards(folder: Path) -> Path:
    folder.mkdir()
    weight_map = {}
    for i, part in enumerate(_halves(), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _ranks(folder: Path) -> Path:
    folder.mkdir()
    for rank in range(2):
        offsets: dict[str, list[int]] = {}
        mine: dict[str, torch.Tensor] = {}
        for name, tensor in MODEL.items():
            if tensor.dim():
                parts = tensor.tensor_split(2)
                mine[name] = parts[rank].clone()
                offsets[name] = [rank * parts[0].shape[0], *(0 for _ in tensor.shape[1:])]
            elif rank == 0:
                mine[name], offsets[name] = tensor, []
        info = json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(mine, folder / name, {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"})
    return folder


def _adapter(folder: Path) -> Path:
    folder.mkdir()
    save_file(MODEL, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return folder


def _hf_torch(folder: Path) -> Path:
    folder.mkdir()
    weight_map = {}
    for i, part in enumerate(_halves(), 1):
        file = f"pytorch_model-{i:05d}-of-00002.bin"
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _torch_folder(folder: Path) -> Path:
    folder.mkdir()
    torch.save(MODEL, folder / "model.pt")
    torch.save(OPTIM, folder / "optim.pt")
    return folder


def _rank_files(folder: Path) -> Path:
    """LOCAL states of two ranks: floats lie flat, other types are cut by rows."""
    folder.mkdir()
    flat = {name: value for name, value in MODEL.items() if name in ("a.w", "s")}
    rows = {name: value for name, value in MODEL.items() if name not in flat}
    laid = FlatLayout(tuple(_spec(name, value) for name, value in flat.items()), 2)
    whole = torch.cat([value.reshape(-1) for value in flat.values()])
    cut = DimLayout(tuple(_spec(name, value) for name, value in rows.items()), 2, (0,) * len(rows))
    for rank, shard in enumerate(whole.split(laid.chunk)):
        state: OrderedDict[str, Any] = OrderedDict({"flat": shard.clone()})
        for index, (name, value) in enumerate(rows.items()):
            box = cut.box(index, rank)
            state[name] = value[box.offset[0] : box.offset[0] + box.size[0]].clone()
        units = [{"layout": laid.to_json(), "flat": "flat"}, {"layout": cut.to_json(), "flat": None}]
        for unit in units:
            unit |= {"entries": unit["layout"]["params"], "place": rank}
        note = {"version": 1, "kind": "LOCAL", "rank": rank, "world": 2, "names": list(MODEL), "units": units}
        state._metadata = OrderedDict(shardckpt=note)  # type: ignore[attr-defined]
        torch.save({"model": state, "optimizer": OPTIM}, folder / f"rank{rank}.pt")
    return folder


def _dtensors(folder: Path) -> Path:
    """FSDP2's DTensors of two ranks, beside what every rank has whole."""
    folder.mkdir()
    moments = OPTIM["state"]["a.w"]
    for rank in range(2):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            model = {name: dtensor(value, mesh) if value.dim() else value for name, value in MODEL.items()}
            state = {"a.w": {**moments, "exp_avg": dtensor(moments["exp_avg"], mesh)}}
            optim = {**OPTIM, "state": state}
            torch.save({"model": model, "optimizer": optim, "step": 3}, folder / f"rank{rank}.pt")
    return folder


def _megatron(folder: Path) -> Path:
    save(_state(), folder)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 3}, folder / "common.pt")
    return folder


def _torch_checkpointing(folder: Path) -> Path:
    """What `torch_checkpointing` 0.1.1 leaves of two ranks: an item a file, and metadata of plain values."""
    folder.mkdir()
    moments = OPTIM["state"]["a.w"]
    shapes: dict[str, dict[str, Any]] = {"model": {}, "optim": {}}
    for rank in range(2):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            model = {name: dtensor(value, mesh) if value.dim() else value for name, value in MODEL.items()}
            state = {"a.w": {**moments, "exp_avg": dtensor(moments["exp_avg"], mesh)}}
            torch.save(model, folder / f"model_{rank}.pt")
            torch.save({**OPTIM, "state": state}, folder / f"optim_{rank}.pt")
    torch.save({"step": 3}, folder / "loop_0.pt")
    paths = [("model", (name,), value.shape) for name, value in MODEL.items()]
    for item, path, shape in [*paths, ("optim", ("state", "a.w", "exp_avg"), moments["exp_avg"].shape)]:
        sharding = {"type": "DTensorShardingMetadata", "data": {"global_shape": list(shape)}}
        shapes[item][json.dumps(list(path))] = [{"sharding_metadata": sharding, "ranks": (0, 1)}]
    items = {
        item: {"nested_path_to_metadata": told, "rank_to_layout_info": {0: None, 1: None}}
        for item, told in shapes.items()
    }
    said = {"metadata": items, "world_size": 2, "version": "2.0"}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(said, protocol=4))
    return folder


def _flat_shards(folder: Path) -> Path:
    """FSDP1's LOCAL states of two ranks: a flat parameter, whose shapes a note tells, beside a ShardedTensor."""
    folder.mkdir()
    whole, moment = MODEL["a.w"].reshape(-1), OPTIM["state"]["a.w"]["exp_avg"].reshape(-1)
    rest = {name: value for name, value in MODEL.items() if name not in ("a.w", "b")}
    handle = {"module": "a", "fqns": ["w"], "shapes": [[6, 4]]}
    for rank in range(2):
        with as_rank(rank, 2):
            model = {"a._flat_param": sharded(whole, rank, 2), "b": sharded(MODEL["b"], rank, 2), **rest}
            torch.save(model, folder / f"model_rank{rank}.pt")
        slots = {"exp_avg": moment.chunk(2)[rank].clone(), "step": torch.tensor(3.0)}
        torch.save({"state": {0: slots}, "param_groups": [{"params": [0], "lr": 0.1}]}, folder / f"optim_rank{rank}.pt")
    note = {"world_size": 2, "rank": 0, "handles": [handle]}
    (folder / "flat_param_metadata_rank0.json").write_text(json.dumps(note))
    return folder


def _spec(name: str, value: torch.Tensor) -> ParamSpec:
    return ParamSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _torch_file(**options: Any) -> Builder:
    def build(folder: Path) -> Path:
        folder.mkdir()
        torch.save(_state(), folder / "a.pt", **options)
        return folder / "a.pt"

    return build


def _native(folder: Path) -> Path:
    boxes = {
        ("model", "a.w"): [(0, Box((0, 0), (6, 1))), (1, Box((0, 1), (6, 3)))],
        ("model", "b"): [(1, full_box((5,)))],
    }
    return write_step(folder, _state(), boxes)


def _native_alone(folder: Path) -> Path:
    return write_step(folder, _state(), alone=("model",))


def _stream(folder: Path) -> Path:
    """Two versions, of which the second has changes of an element, of a tensor, and none."""
    before = {name: value.clone() for name, value in MODEL.items()}
    before["a.w"][1, 2] = 7.0
    before["b"].zero_()
    with Publisher(folder, dtype=None) as publisher:
        publisher.publish(1, before)
        publisher.publish(2, MODEL)
    return folder / Version(1, 2).folder


def _hf_delta(folder: Path) -> Path:
    """The same versions, exported."""
    shardckpt.export_versions(_stream(folder.with_name(f"{folder.name}-stream")).parent, folder)
    return folder / "weight_v000002"


def _deepspeed(stage: int, write: Callable[[Path, Run, int, int], Path]) -> Builder:
    trained = {name: MODEL[name].float() for name in ("a.w", "s")}
    held = {name: value for name, value in MODEL.items() if name not in trained}
    run = Run([trained], held, frozen=("half",), live=None)
    return lambda folder: write(folder, run, stage, 2)


SAMPLES: Mapping[str, Mapping[str, Builder]] = {
    "stream": {"changes": _stream},
    "hf-delta": {"changes": _hf_delta},
    "deepspeed": {"stage 2": _deepspeed(2, write_deepspeed), "stage 3": _deepspeed(3, write_deepspeed)},
    "deepspeed-universal": {"stage 2": _deepspeed(2, write_universal), "stage 3": _deepspeed(3, write_universal)},
    "accelerate": {"sharded": _accelerate_sharded, "full": _accelerate_full},
    "fabric": {"sharded": _fabric},
    "composer": {"parts": _composer},
    "megatron": {"torch_dist": _megatron},
    "torch-checkpointing": {"ranks": _torch_checkpointing},
    "native": {"ranks": _native, "alone": _native_alone},
    "dcp": {
        **{form: _dcp(form) for form in FORMS},
        "chunks": _dcp_chunks,
    },
    "safetensors": {"file": _one_file, "shards": _shards, "ranks": _ranks, "adapter": _adapter},
    "hf-torch": {"shards": _hf_torch},
    "torch-folder": {"loose": _torch_folder, "ranks": _rank_files, "dtensors": _dtensors, "flat": _flat_shards},
    "torch": {"zip": _torch_file(), "legacy": _torch_file(_use_new_zipfile_serialization=False)},
}
"""Name of a registered format to builders: each fills a folder that does not exist and returns the source."""
