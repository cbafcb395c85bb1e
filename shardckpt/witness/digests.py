"""Digests of tensors, batches and random states.

Tensors on a device are reduced there, by integer sums, which are equal in any order: only sums are copied to the host.
Other tensors are hashed where they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.stateful.tensor_bytes import sum_rows, tensor_bytes
from shardckpt.devices import find_generators

_DIGEST_BITS = 32
_DIGEST_MASK = (1 << _DIGEST_BITS) - 1


def digest_bytes(data: bytes) -> int:
    """Return a 32-bit digest."""
    return xxhash.xxh3_64_intdigest(data) & _DIGEST_MASK


def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a 32-bit digest for each tensor's elements, bit for bit."""
    digests = [0] * len(tensors)
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.is_cpu:
            hasher = xxhash.xxh3_64()
            for part in tensor_bytes(tensor):
                hasher.update(part)
            digests[at] = hasher.intdigest() & _DIGEST_MASK
        elif tensor.numel():
            sums.setdefault(tensor.device, []).append((at, sum_rows(tensor.reshape(1, -1))))
    for group in sums.values():
        values = torch.cat([total for _, total in group]).tolist()  # the only copy to the host
        for (at, _), value in zip(group, values, strict=True):
            digests[at] = _fold(value)
    return digests


def _fold(value: int) -> int:
    return (value ^ (value >> _DIGEST_BITS)) & _DIGEST_MASK


class SampleDigests(NamedTuple):
    """Digests of one rank's batch."""

    ordered: int  # digest of the batch in the order of its samples
    samples: tuple[int, ...]


def digest_batch(batch: Any) -> SampleDigests:
    """Return digests of a batch and each of its samples."""
    # A sample is a row: the elements of all tensors, arrays and lists at one index of dimension 0. Values of another
    # length than the first, and single values, belong to the batch alone. Similar items in a list, such as the batches
    # for an accumulated gradient, are separate batches. For other objects, and a container inside itself, only the
    # class counts.
    samples: list[int] = []
    parts = []
    for part in _split(_open_containers(batch, ())):
        columns = list(_columns(part, ""))
        parts.append(columns)
        samples += _digest_samples(columns)
    return SampleDigests(digest_bytes(repr((parts, samples)).encode("utf-8", "replace")), tuple(samples))


def _open_containers(value: Any, outer: tuple[int, ...]) -> Any:
    """Return a batch as a tree of dicts and lists, with dataclass fields and without cycles."""
    if id(value) in outer:
        return type(value).__qualname__
    inner = (*outer, id(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _open_containers(getattr(value, each.name, None), inner) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _open_containers(item, inner) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not all(type(item) in _SCALARS for item in value):
        return [_open_containers(item, inner) for item in value]
    return value


_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _split(batch: Any) -> Sequence[Any]:
    """Return the batches in a list; other ranks may have another number of batches."""
    if not isinstance(batch, (list, tuple)) or _is_plain(batch):
        return (batch,)
    return batch if len({repr(_shape(item)) for item in batch}) == 1 else (batch,)


def _shape(value: Any) -> object:
    """Return a value's structure, which batches from one loader have in common."""
    if isinstance(value, Mapping):
        return {str(key): _shape(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return None if _is_plain(value) else [_shape(item) for item in value]
    return (str(value.dtype), value.ndim) if isinstance(value, (torch.Tensor, np.ndarray)) else type(value).__name__


def _digest_samples(columns: Sequence[_Column]) -> list[int]:
    count = next((len(each.rows) for each in columns if each.has_samples and each.rows), 0)
    if not count and columns and not any(each.has_samples for each in columns):
        return [digest_bytes(repr(columns).encode("utf-8", "replace"))]
    hashers = [xxhash.xxh3_64() for _ in range(count)]
    for each in columns:
        if each.has_samples and len(each.rows) == count:
            for hasher, row in zip(hashers, each.rows, strict=True):
                hasher.update(f"{each.name}={row};".encode("utf-8", "replace"))
    return [hasher.intdigest() & _DIGEST_MASK for hasher in hashers]


class _Column(NamedTuple):
    """One batch value's digests, by sample; or one digest that belongs to no sample."""

    name: str
    rows: list[int]
    has_samples: bool = True


def _columns(value: Any, name: str) -> Iterator[_Column]:
    """Yield the row digests for each tensor, array and list in a batch, by its place."""
    if isinstance(value, torch.Tensor):
        yield from _tensor_columns(value, name)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield from _tensor_columns(_read_array(value), name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _columns(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)) and not _is_plain(value) and any(map(_is_container, value)):
        for at, item in enumerate(value):
            yield from _columns(item, f"{name}.{at}")
    elif isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        yield _Column(name, [_digest_plain(item) for item in value])
    else:
        yield _Column(name, [_digest_plain(value)], has_samples=False)


def _is_container(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, Mapping, list, tuple))


def _is_plain(value: Any) -> bool:
    """Return True for values whose text says all, in every process."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, (np.ndarray, np.generic)):
        return not value.dtype.hasobject
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _digest_plain(value: Any) -> int:
    text = repr(value) if _is_plain(value) else type(value).__qualname__
    return digest_bytes(text.encode("utf-8", "replace"))


def _read_array(value: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array as a tensor; a dtype that torch lacks is converted."""
    if value.dtype.itemsize > (16 if value.dtype.kind == "c" else 8):
        value = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
    return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))


def _tensor_columns(tensor: torch.Tensor, name: str) -> Iterator[_Column]:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if own.is_nested:
        yield _Column(name, [digest_tensors([each])[0] for each in own.unbind()])
    elif own.layout == torch.sparse_coo:
        own = own.coalesce()
        yield _Column(name, digest_tensors([own.indices(), own.values()]), has_samples=False)
    elif own.layout != torch.strided or own.is_meta or own.is_quantized:
        yield _Column(name, [_digest_plain(str(own.dtype))], has_samples=False)
    else:
        yield _Column(name, _digest_rows(own), has_samples=own.dim() > 0)


def _digest_rows(tensor: torch.Tensor) -> list[int]:
    if not tensor.numel():
        return [0] * (tensor.shape[0] if tensor.dim() else 0)
    return [_fold(total) for total in sum_rows(tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)).tolist()]


def digest_random_states(others: Mapping[str, torch.Generator] | None = None) -> dict[str, int]:
    """Return digests of this process's random generators: Python, numpy, torch, the device in use, and others."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    found = {
        "python": digest_bytes(repr(random.getstate()).encode("ascii")),
        "numpy": digest_bytes(f"{kind}{rest}".encode() + np.asarray(keys).tobytes()),
        "torch": digest_bytes(torch.get_rng_state().numpy().tobytes()),
    }
    for name, module in find_generators(in_use=True).items():
        found[name] = digest_bytes(module.get_rng_state().cpu().numpy().tobytes())
    for name, generator in (others or {}).items():
        found[name] = digest_bytes(generator.get_state().cpu().numpy().tobytes())
    return found
