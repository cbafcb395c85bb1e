"""Reader of Lightning's sharded checkpoints: DCP folders with `meta.pt`.

The model is below the user's key (Fabric) or below `model` (Trainer); an optimizer below its key, or `optimizer_{i}`. A
full checkpoint is one file by `torch.save`, which this reader does not handle.
"""

from __future__ import annotations

from shardckpt.reader import Evidence, Format, Reader, Source
from shardckpt.readers.dcp import reader as dcp
from shardckpt.readers.frameworks.composite import SubReader, join

META = "meta.pt"


def recognize(source: Source) -> Evidence:
    """Recognize a DCP folder that contains `meta.pt`."""
    if source.file is not None or META not in source.files or not dcp.metadata_names(source.files):
        return Evidence.NONE
    return dcp.recognize(source)


def open_source(source: Source) -> Reader:
    """Open a recognized source; `meta.pt` is one object, read on demand."""
    part = SubReader(dcp.open_folder(source.store))
    return join(FORMAT.name, source.store, [part], {META: source.listing[META].size})


FORMAT = Format(
    name="fabric",
    title="sharded checkpoint by Lightning Fabric or Trainer",
    looks_for="meta.pt next to a .metadata file and *.distcp files",
    recognize=recognize,
    open=open_source,
)
