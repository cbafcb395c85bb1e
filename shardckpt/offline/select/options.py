"""Conversion options, and dtypes as users name them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict

from shardckpt.dtypes import FLOATS, QUANTIZED, SHORT_NAMES
from shardckpt.errors import UsageError, require_bools
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.plan.naming.weights import Weights
from shardckpt.plan.quantized_weights import METHOD
from shardckpt.reader import NamedBases

_SWITCHES = ("dequantize", "allow_overflow", "allow_loss", "overwrite", "dry_run", "parallel")
Part = Literal["model", "optim", "all"]
OptimKeys = Literal["names", "ids", "flat"]
VLLM_SHARDED = "vllm-sharded"  # the only target that takes `tp`

PARTS: tuple[Part, ...] = ("model", "optim", "all")
OPTIM_KEYS: tuple[OptimKeys, ...] = ("names", "ids", "flat")
DEFAULT_SHARD_BYTES = 5 * 10**9
DEFAULT_MEMORY_BYTES = 256 * 2**20
# The modules that a conversion loads (mainly NumPy, 16 MiB) take almost this much.
MIN_MEMORY_BYTES = 24 * 2**20


def parse_dtype(text: str) -> str:
    """Return torch's name of a float dtype for casts, or a quantized type; empty stays empty."""
    name = SHORT_NAMES.get(text, text) if isinstance(text, str) else repr(text)
    if name and name not in FLOATS and name not in QUANTIZED:
        known = sorted({*SHORT_NAMES, *FLOATS, *QUANTIZED})
        raise UsageError(f"--dtype {text!r} is not a float type to cast to", expected=", ".join(known))
    return name


def parse_memory(limit: int | str) -> int:
    """Return a memory limit in bytes."""
    nbytes = parse_size(limit)
    if nbytes < MIN_MEMORY_BYTES:
        raise UsageError("--max-memory is too small to work in", found=str(limit), expected="24MiB or more")
    return nbytes


def parse_part(part: str) -> Part:
    """Return the part that a caller names."""
    for known in PARTS:
        if part == known:
            return known
    raise UsageError("--part must be a part of a checkpoint", found=part, expected=", ".join(PARTS))


def parse_globs(name: str, globs: object, what: str = "globs of names") -> tuple[str, ...]:
    """Return globs as a caller gives them: several texts, or one."""
    texts = (globs,) if isinstance(globs, str) else tuple(globs) if isinstance(globs, Iterable) else (None,)
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"`{name}` must be {what}", found=repr(globs), expected="a list of texts")
    return texts


class CommonParams(TypedDict, total=False):
    """Keyword parameters for all conversions; `Options` describes them."""

    part: Part
    weights: Weights
    model_key: str
    optim_key: str | os.PathLike[str]
    optim_keys: OptimKeys
    param_names: str | os.PathLike[str]
    shapes_from: str | os.PathLike[str]
    dtype: str
    keep_fp32: str | Iterable[str]
    allow_overflow: bool
    allow_loss: bool
    max_shard_size: int | str
    max_memory: int | str
    include: str | Iterable[str]
    exclude: str | Iterable[str]
    rules: str | os.PathLike[str]
    rename: str | Iterable[str]
    config_from: str | os.PathLike[str]
    overwrite: bool
    dry_run: bool
    jobs: int | None
    parallel: bool


class RekeyParams(CommonParams, total=False):
    """Keyword parameters for `rekey`."""

    base: NamedBases


class TargetParams(TypedDict, total=False):
    """Keyword parameters for conversions that can write several formats."""

    to: str
    tp: int
    dequantize: bool
    quantize: str
    quantize_include: str | Iterable[str]
    quantize_exclude: str | Iterable[str]


class ConversionParams(RekeyParams, TargetParams, total=False):
    """Keyword parameters for `consolidate` and `convert`."""


class MergeParams(CommonParams, TargetParams, total=False):
    """Keyword parameters for `merge_adapter`, whose `base` is the base model."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options for `consolidate` and `convert`.

    Field names are the command's options, with underscores.

    Attributes:
        to: Format to write: `safetensors`, `torch` (`torch.save` files), `dcp` (torch's distributed checkpoints),
            `native` (a shardckpt step), or another name that `list_targets` returns. If empty: the format with the
            target's suffix, else `safetensors`.
        tp: Tensor-parallel world size, for `vllm-sharded`.
        part: `model`, `optim` or `all`.
        weights: `live`, the model's own; `master`, `ema` or a variant's name, if the checkpoint contains these.
        model_key: Path to the model, if the rules do not find it.
        optim_key: Path to the optimizer: a key, a file, or `file:key`.
        optim_keys: Parameter keys to write for the optimizer: `names`; `ids`, numbered as in `torch.optim`; or `flat`,
            one key per value, `state.<parameter>.<slot>`.
        param_names: JSON file from optimizer id to name, or an array of names.
        shapes_from: Any checkpoint of the same model with full tensors. It splits flat parameters, checks shapes, and
            names the ids if an optimizer is alone in its file.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        dtype: Float dtype to cast the model's float tensors to, or `q8_0` for GGUF.
        keep_fp32: Globs for final names that are not cast, not quantized and not dequantized.
        dequantize: Write quantized weights (torchao, bitsandbytes, fp8 with block scales) as plain ones, in `dtype` or
            the type that they had.
        quantize: `fp8-block` to store linear weights as `float8_e4m3fn` with a scale for each 128 x 128 block, as
            DeepSeek-V3 does. Only for a safetensors folder with the model's config.
        quantize_include: Globs for final names to quantize instead: matrices named `*.weight`.
        quantize_exclude: Globs for final names that are not quantized.
        allow_overflow: Accept finite values that become infinite in a cast.
        allow_loss: Omit values that the format cannot store; otherwise they are an error that lists them.
        max_shard_size: Maximum tensor data per file, in bytes.
        max_memory: Maximum memory in bytes, in addition to the started process.
        include: Globs for final names to write; empty for all.
        exclude: Globs for final names to skip.
        rules: TOML file, or name of built-in rules, for other names and shapes.
        rename: `FROM=TO`, in order, after `rules`: FROM is a regular expression for full names, TO may refer to groups.
        config_from: Folder whose config and tokenizer files are copied.
        overwrite: Replace one existing checkpoint of the same format.
        dry_run: Plan and check, and write nothing.
        jobs: Threads per process that read and write; None to choose, at most 4.
        parallel: Whether to share the output files among the job's ranks, which all make this call.
    """

    to: str = ""
    tp: int = 0
    part: Part = "model"
    weights: Weights = "live"
    model_key: str = ""
    optim_key: str = ""
    optim_keys: str = "names"
    param_names: str = ""
    shapes_from: str = ""
    base: NamedBases = ""
    dtype: str = ""
    keep_fp32: tuple[str, ...] = ()
    dequantize: bool = False
    quantize: str = ""
    quantize_include: tuple[str, ...] = ()
    quantize_exclude: tuple[str, ...] = ()
    allow_overflow: bool = False
    allow_loss: bool = False
    max_shard_size: int | str = DEFAULT_SHARD_BYTES
    max_memory: int | str = DEFAULT_MEMORY_BYTES
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rules: str = ""
    rename: tuple[str, ...] = ()
    config_from: str = ""
    overwrite: bool = False
    dry_run: bool = False
    jobs: int | None = None
    parallel: bool = False

    def validated(self) -> Options:
        """Return the same options after all checks that need no checkpoint.

        Raises:
            UsageError: An option has an invalid value.
        """
        parse_part(self.part)
        if self.optim_keys not in OPTIM_KEYS:
            raise UsageError(
                "--optim-keys must be a kind of keys", found=repr(self.optim_keys), expected=", ".join(OPTIM_KEYS)
            )
        parse_dtype(self.dtype)
        self._check_quantize()
        self._check_idle()
        if self.tp and self.to != VLLM_SHARDED:
            raise UsageError("--tp belongs to a target", found=self.to or "none", expected=f"--to {VLLM_SHARDED}")
        parse_size(self.max_shard_size)
        parse_memory(self.max_memory)
        if self.jobs is not None and (type(self.jobs) is not int or self.jobs < 1):
            raise UsageError("--jobs must be a number of threads", found=repr(self.jobs), expected="1 or more")
        require_bools(**{name: getattr(self, name) for name in _SWITCHES})
        return self

    def _check_idle(self) -> None:
        """Refuse options that would do nothing."""
        is_cast = bool(self.dtype or self.quantize or self.dequantize)
        idle = {
            "--keep-fp32 does nothing without --dtype, --quantize or --dequantize": self.keep_fp32 and not is_cast,
            "--dtype casts the model, which --part optim leaves out": self.dtype and self.part == "optim",
            "--dequantize changes the model, which --part optim leaves out": self.dequantize and self.part == "optim",
            "--weights chooses model weights, which --part optim leaves out": self.weights != "live"
            and self.part == "optim",
            "--optim-keys does nothing without --part optim or all": self.optim_keys != "names"
            and self.part == "model",
        }
        for what, is_idle in idle.items():
            if is_idle:
                raise UsageError(what)

    def _check_quantize(self) -> None:
        if self.quantize and self.dequantize:
            raise UsageError(
                "--quantize and --dequantize are two steps", fix=f"First --dequantize, then --quantize {METHOD}."
            )
        if self.quantize not in ("", METHOD):
            raise UsageError("--quantize must be a quantization method", found=self.quantize, expected=METHOD)
        if not self.quantize and (self.quantize_include or self.quantize_exclude):
            raise UsageError(
                "globs choose what --quantize quantizes", found="no --quantize", fix=f"Pass --quantize {METHOD}."
            )
        if self.quantize and self.part == "optim":
            raise UsageError("--quantize needs a model", found="--part optim", expected="--part model or all")
