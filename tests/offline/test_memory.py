"""`--max-memory` is a cap on what a process adds to its start-up, however large a tensor is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from shardckpt.encodings.safetensors import HeaderTensor, encode_header
from shardckpt.offline.select.options import MIN_MEMORY_BYTES
from tests.kit.writers.share_writers import as_rank, sharded

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")

CAP = MIN_MEMORY_BYTES
CAP_OF_4 = 40 << 20
"""The least for 4 threads."""
ROWS, COLUMNS = 8 * CAP // 4 // 2048, 2048
FEWER_ROWS = 3 * CAP // 4 // 2048
"""Of what is put in order element by element, which takes long."""


PROGRAM_PAGES = 9 << 20
"""Pages of NumPy's program files that are resident if pip wrote those files (8.6 MiB; 13 MiB if uv did)."""

MEASURE = """
def measure():
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    program = is_program = 0
    for line in open("/proc/self/smaps"):
        key, *rest = line.split()
        if not key.endswith(":"):
            is_program = ".so" in line
        elif is_program and key in ("Rss:", "Anonymous:"):
            program += int(rest[0]) if key == "Rss:" else -int(rest[0])
    print(peak, program)
"""
"""Prints the peak and what of the program files is resident, in KiB."""


def added_bytes(src: Path, code: str) -> int:
    """Return by how much `code` raises the peak of the memory of a fresh process that has inspected a checkpoint.

    Pages of program files count as `PROGRAM_PAGES`: how many are resident depends on how their files came into the
    page cache, and the system takes them back when memory is short.
    """
    lines = f"{MEASURE}\nimport shardckpt\nshardckpt.inspect({str(src)!r})\nmeasure()\n{code}\nmeasure()"
    done = subprocess.run([sys.executable, "-c", lines], check=True, capture_output=True, text=True)
    (start, start_program), *_, (end, end_program) = (map(int, line.split()) for line in done.stdout.splitlines())
    return ((end - end_program) - (start - start_program) << 10) + PROGRAM_PAGES


def by_columns(folder: Path) -> None:
    """Two ranks, cut in the second dimension: every row of the result comes from both."""
    folder.mkdir()
    for rank in range(2):
        half = np.full((ROWS, COLUMNS // 2), rank, np.float32)
        info = f'{{"w": {{"saved_offsets": [0, {rank * COLUMNS // 2}]}}}}'
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"w": half}, folder / name, {"DCP_SHARDING_INFO": info})


def whole(folder: Path, rows: int = ROWS) -> None:
    folder.mkdir()
    header = encode_header([HeaderTensor("w", "float32", (rows, COLUMNS))], {})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * rows * COLUMNS)


def transposed(folder: Path) -> None:
    folder.mkdir()
    torch.save({"w": torch.zeros(COLUMNS, FEWER_ROWS).T}, folder / "a.pt")


def flat(folder: Path) -> None:
    """FSDP1's LOCAL states of two ranks: a flat parameter that begins with the tensor and has a few elements more."""
    folder.mkdir()
    whole = torch.zeros(FEWER_ROWS * COLUMNS + 5)
    for rank in range(2):
        with as_rank(rank, 2):
            torch.save({"_flat_param": sharded(whole, rank, 2)}, folder / f"model_rank{rank}.pt")
    handle = {"module": "", "fqns": ["w", "b"], "shapes": [[FEWER_ROWS, COLUMNS], [5]]}
    (folder / "flat_param_metadata_rank0.json").write_text(json.dumps({"handles": [handle]}))


ALL = [(by_columns, "", 8), (whole, "", 8), (whole, "dtype='bf16', ", 4), (transposed, "", 3), (flat, "", 3)]


@pytest.mark.shown_by(
    "[by columns-4 threads]",
    "whole-4 threads",
    "cast-4 threads",
    "flat-4 threads",
)
@pytest.mark.shown_by("[transposed-4 threads]", "transposed-1 thread")
@pytest.mark.parametrize(("jobs", "cap"), [(1, CAP), (4, CAP_OF_4)], ids=["1 thread", "4 threads"])
@pytest.mark.parametrize(("make", "options", "times"), ALL, ids=["by columns", "whole", "cast", "transposed", "flat"])
def test_a_tensor_of_many_times_the_cap_is_written_under_it(
    make: Callable[[Path], None], options: str, times: int, jobs: int, cap: int, tmp_path: Path
) -> None:
    src = tmp_path / "src"
    make(src)
    options += f"max_memory={cap}, jobs={jobs}"
    added = added_bytes(src, f"shardckpt.consolidate({str(src)!r}, {str(tmp_path / 'out')!r}, {options})")
    assert added <= cap, f"{added / 2**20:.1f} MiB"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > times * CAP


def test_the_measure_sees_a_tensor_that_is_held(tmp_path: Path) -> None:
    """The control: a process that reads the tensor as a whole breaks the cap by this measure."""
    src = tmp_path / "src"
    whole(src)
    assert added_bytes(src, f"data = open({str(src / 'model.safetensors')!r}, 'rb').read()") > 7 * CAP


@pytest.mark.shown_by("[*-1 thread]", "*-4 threads")
@pytest.mark.parametrize(("jobs", "cap"), [(1, CAP), (4, CAP_OF_4)], ids=["1 thread", "4 threads"])
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_other_formats_are_written_under_the_cap_too(to: str, jobs: int, cap: int, tmp_path: Path) -> None:
    by_columns(tmp_path / "src")
    options = f"to={to!r}, max_shard_size=10**12, max_memory={cap}, jobs={jobs}"
    call = f"shardckpt.consolidate({str(tmp_path / 'src')!r}, {str(tmp_path / 'out')!r}, {options})"
    added = added_bytes(tmp_path / "src", call)
    assert added <= cap, f"{added / 2**20:.1f} MiB"
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) > 8 * CAP


def write_adapter(folder: Path, factors: dict[str, np.ndarray], **settings: object) -> None:
    folder.mkdir()
    named = {f"base_model.model.{name}": value for name, value in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(told))


@pytest.mark.parametrize("kind", ["lora", "dora by rows", "dora by columns"])
def test_an_adapter_is_merged_in_little_memory(kind: str, tmp_path: Path) -> None:
    whole(tmp_path / "base")
    rows, columns = (COLUMNS, ROWS) if kind == "dora by columns" else (ROWS, COLUMNS)
    factors = {"w.lora_A.weight": np.ones((8, columns), np.float32), "w.lora_B.weight": np.ones((rows, 8), np.float32)}
    if kind != "lora":
        factors["w.lora_magnitude_vector"] = np.ones(rows, np.float32)
    is_turned = kind == "dora by columns"
    write_adapter(tmp_path / "adapter", factors, use_dora=kind != "lora", fan_in_fan_out=is_turned)
    places = ", ".join(repr(str(tmp_path / each)) for each in ("base", "adapter", "out"))
    call = f"shardckpt.merge_adapter({places}, max_memory={CAP}, rename=['w=w.weight'])"
    added = added_bytes(tmp_path / "base", call)
    assert added <= 2 * CAP, f"{added / 2**20:.1f} MiB"  # the product has threads and buffers of its own


def test_experts_are_merged_in_little_memory(tmp_path: Path) -> None:
    experts = 16
    (tmp_path / "base").mkdir()
    header = encode_header([HeaderTensor("experts.w", "float32", (experts, ROWS // experts, COLUMNS))], {})
    with (tmp_path / "base" / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * ROWS * COLUMNS)
    factors = {
        "experts.lora_A.weight": np.ones((8 * experts, COLUMNS), np.float32),
        "experts.lora_B.weight": np.ones((ROWS // experts, 8 * experts), np.float32),
    }
    write_adapter(tmp_path / "adapter", factors, target_parameters=["experts.w"])
    places = ", ".join(repr(str(tmp_path / each)) for each in ("base", "adapter", "out"))
    added = added_bytes(tmp_path / "base", f"shardckpt.merge_adapter({places}, max_memory={CAP})")
    assert added <= 2 * CAP, f"{added / 2**20:.1f} MiB"


def test_a_weight_is_quantized_under_the_cap(tmp_path: Path) -> None:
    whole(tmp_path / "src", FEWER_ROWS)
    (tmp_path / "src" / "config.json").write_text('{"model_type": "llama"}')
    options = f"quantize='fp8-block', rename=['w=w.weight'], max_memory={CAP}, jobs=1"
    call = f"shardckpt.convert({str(tmp_path / 'src')!r}, {str(tmp_path / 'out')!r}, {options})"
    added = added_bytes(tmp_path / "src", call)
    assert added <= CAP, f"{added / 2**20:.1f} MiB"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > FEWER_ROWS * COLUMNS


def _save_quantized(kind: str, path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    import shardckpt

    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, bias=False)).requires_grad_(False)
    if kind == "int8":
        quantize_(model, Int8WeightOnlyConfig(version=2))
    else:
        model[0].weight = torch.nn.Parameter(to_nf4(model[0].weight.detach(), 64, 256), requires_grad=False)
    shardckpt.save({"model": model}, path)


@pytest.mark.shown_by("[*-1 thread]", "*-4 threads")
@pytest.mark.parametrize(("jobs", "cap"), [(1, CAP), (4, CAP_OF_4)], ids=["1 thread", "4 threads"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_weight_is_dequantized_under_the_cap(kind: str, jobs: int, cap: int, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    _save_quantized(kind, tmp_path / "src")
    options = f"dequantize=True, max_memory={cap}, jobs={jobs}"
    call = f"shardckpt.consolidate({str(tmp_path / 'src')!r}, {str(tmp_path / 'out')!r}, {options})"
    added = added_bytes(tmp_path / "src", call)
    assert added <= cap, f"{added / 2**20:.1f} MiB"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 8 * CAP - COLUMNS


def test_rows_in_another_order_are_quantized_under_the_cap(tmp_path: Path) -> None:
    """Queries of a llama, of several times the cap, beside small tensors."""
    heads = FEWER_ROWS // 128
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 128, "hidden_size": COLUMNS}
    sizes |= {"intermediate_size": 32, "vocab_size": 2, "num_hidden_layers": 1, "max_position_embeddings": 8}
    layer = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (32, COLUMNS)) | {"mlp.down_proj": (COLUMNS, 32)}
    layer |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (128, COLUMNS))
    layer |= {"self_attn.q_proj": (FEWER_ROWS, COLUMNS), "self_attn.o_proj": (COLUMNS, FEWER_ROWS)}
    layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (COLUMNS,))
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (2, COLUMNS), "model.norm.weight": (COLUMNS,)}
    header = encode_header([HeaderTensor(name, "float32", shape) for name, shape in shapes.items()], {})
    (tmp_path / "src").mkdir()
    with (tmp_path / "src" / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(4 * math.prod(shape) for shape in shapes.values()))
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **sizes}
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    options = f"dtype='q8_0', max_memory={CAP}, jobs=1"
    call = f"shardckpt.convert({str(tmp_path / 'src')!r}, {str(tmp_path / 'out.gguf')!r}, {options})"
    added = added_bytes(tmp_path / "src", call)
    assert added <= CAP, f"{added / 2**20:.1f} MiB"
    assert (tmp_path / "out.gguf").stat().st_size > 1.5 * CAP


def test_rules_are_streamed(tmp_path: Path) -> None:
    whole(tmp_path / "src")
    (tmp_path / "rules.toml").write_text('[[rule]]\nsplit = {from = "w", to = ["a", "b"], dim = 1}\n')
    options = f"rules={str(tmp_path / 'rules.toml')!r}, max_memory={CAP}"
    call = f"shardckpt.consolidate({str(tmp_path / 'src')!r}, {str(tmp_path / 'out')!r}, {options})"
    added = added_bytes(tmp_path / "src", call)
    assert added <= CAP, f"{added / 2**20:.1f} MiB"
