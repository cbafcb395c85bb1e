"""What a conversion can be asked for, and how types are written by people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardckpt.dtypes import FLOATS, SHORT_NAMES
from shardckpt.errors import UsageError
from shardckpt.format.reader import NamedBases
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.plan.naming.weights import Weights

Part = Literal["model", "optim", "all"]
OptimKeys = Literal["names", "ids", "flat"]
PARTS: tuple[Part, ...] = ("model", "optim", "all")
OPTIM_KEYS: tuple[OptimKeys, ...] = ("names", "ids", "flat")
DEFAULT_SHARD_BYTES = 5 * 10**9
DEFAULT_MEMORY_BYTES = 256 * 2**20
LEAST_MEMORY_BYTES = 24 * 2**20
"""Below this the modules that a conversion loads (numpy above all, 16 MiB) would break the promise by themselves."""


def parse_dtype(text: str) -> str:
    """Return torch's name of a float type that tensors can be cast to; empty stays empty.

    Raises:
        UsageError: No such type, or none that values can be cast to.
    """
    name = SHORT_NAMES.get(text, text)
    if name and name not in FLOATS:
        raise UsageError(
            f"--dtype {text!r} is not a float type to cast to", expected=", ".join(sorted({*SHORT_NAMES, *FLOATS}))
        )
    return name


@dataclass(frozen=True, slots=True)
class Options:
    """What `consolidate` and `convert` can be asked for. Field names are the command's options, with underscores.

    Attributes:
        to: Format to write: `safetensors`, `torch` (files of `torch.save`), `dcp` (torch's distributed checkpoints), or
            `native`, a step of shardckpt. Empty: `torch` for one file that is named so, else `safetensors`.
        part: `model`, `optim` or `all`.
        weights: `live`, the model's own; `master`, `ema` or a variant's name, where the checkpoint holds those too.
        model_key: Where the model is, where the rules find another place.
        optim_key: Where the optimizer is: a key, a file, or `file:key`.
        optim_keys: How the optimizer written calls its parameters: `names`; `ids`, numbered as `torch.optim` does; or
            `flat`, one key a value, `state.<parameter>.<slot>`.
        param_names: JSON file from optimizer id to name, or an array of names.
        shapes_from: Any checkpoint of the same model with full tensors: takes flat parameters apart, and is checked
            against.
        base: Path of a folder that the checkpoint refers to, as `load` takes it.
        dtype: Float type to cast the model's float tensors to.
        keep_fp32: Globs of final names that are not cast.
        allow_overflow: Accept finite values that become infinite in a cast.
        allow_loss: Leave out what the format cannot hold; otherwise that is an error which lists it.
        max_shard_size: Bytes of tensor data in a file.
        max_memory: Bytes that the process may add to its start-up.
        include: Globs of final names to take; all, if there are none.
        exclude: Globs of final names to leave.
        rules: TOML file of rules, or the name of a set that comes with the package: other names and shapes.
        rename: `FROM=TO`, in order, after `rules`: FROM is a regular expression for full names, TO may name groups.
        config_from: Folder whose config and tokenizer files are carried along.
        overwrite: Replace one checkpoint of the same format at the target.
        dry_run: Plan and check, write nothing.
        jobs: Threads that read and write, in each process; None for as many as help, at most 4.
        parallel: Share the output files among the ranks of the job, each of which makes this very call.
    """

    to: str = ""
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
        """Return the same options once everything that can be checked without a checkpoint was checked.

        Raises:
            UsageError: A value that cannot be.
        """
        if self.part not in PARTS:
            raise UsageError(f"--part {self.part!r} is not a part", expected=", ".join(PARTS))
        if self.optim_keys not in OPTIM_KEYS:
            raise UsageError(f"--optim-keys {self.optim_keys!r} is not a kind of keys", expected=", ".join(OPTIM_KEYS))
        parse_dtype(self.dtype)
        parse_size(self.max_shard_size)
        if parse_size(self.max_memory) < LEAST_MEMORY_BYTES:
            raise UsageError(
                "--max-memory is too small to work in", found=str(self.max_memory), expected="24MiB or more"
            )
        if self.jobs is not None and self.jobs < 1:
            raise UsageError("--jobs is not a number of threads", found=str(self.jobs), expected="1 or more")
        return self
