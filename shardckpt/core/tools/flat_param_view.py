"""Flat parameters over the shards in units with `use_orig_params`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn

from shardckpt.core.registration.base import mark_flat
from shardckpt.core.runtime.fsdp_unit import FSDPUnit


@contextmanager
def register_flat_params(units: Sequence[tuple[nn.Module, FSDPUnit]], name: str) -> Generator[None, None, None]:
    """Register flat parameters instead of the original ones inside the context."""
    # A flat parameter aliases the shard, so the original parameters have its changes afterwards.
    homes = {home: unit.registrations for home, unit in units}
    places = [p for _, unit in units for member in unit.params.members for p in member.places]
    before = {module: dict(module._parameters) for module in [*homes, *(place.module for place in places)]}
    for _, unit in units:
        unit.reshard()
    for place in places:
        place.module._parameters.pop(place.attribute, None)
    flats = []
    for home, registrations in homes.items():
        for index, registration in enumerate(registrations):
            bucket = registration.bucket
            flat = mark_flat(nn.Parameter(bucket.shard.data, requires_grad=bucket.trainable))
            home._parameters[f"{name}_{index}" if index else name] = flat
            flats.append((flat, registration))
    try:
        yield
    finally:
        for module, registered in before.items():
            module._parameters.clear()
            module._parameters.update(registered)
        for flat, registration in flats:
            if flat.data_ptr() != registration.bucket.shard.data_ptr():
                registration.bucket.shard.data.copy_(flat.data)
            registration.register_sharded()
