"""Share one conversion among ranks: each writes some payload files.

Rank 0 starts and commits the publication, generates names and writes the small files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from shardckpt.events.progress import OnProgress
from shardckpt.offline.write.conversion import ConversionPlan, Hashes, Layout, Stopwatch
from shardckpt.plan.layout.output_files import share_out
from shardckpt.ranks.group import Group
from shardckpt.ranks.meeting import join_ranks
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import JoinedPublication, require_files, start_publication

_SEPARATOR = "\0"


def write_with_ranks(plan: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Layout:
    """Write a conversion with the ranks of `torchrun` or the caller's own job; if one fails, all raise."""
    report = plan.report
    with join_ranks(f"{report.target}\0{report.tensor_count}\0{report.nbytes}") as group:
        layout = _publish_together(group, plan, on_progress)
    watch.end_phase("copy")
    return layout


def _publish_together(group: Group, plan: ConversionPlan, on_progress: OnProgress | None) -> Layout:
    publication: Publication | None = None
    try:
        with group.collective("preparing the target"):
            if group.rank == 0:
                publication = plan.publish_with(start_publication)
        names = (publication.unique_suffix, plan.files.save_id, publication.staging_url) if publication else ()
        message = _SEPARATOR.join(names).encode("utf-8", "surrogateescape")  # a local path may be any bytes
        received = group.broadcast(message).decode("utf-8", "surrogateescape")
        unique_suffix, save_id, place = received.split(_SEPARATOR, 2)
        with group.collective("writing"):
            publication = publication or JoinedPublication(place)
            layout = plan.plan_layout(unique_suffix, save_id)
            shares = share_out(layout.payload, group.size)
            hashes = plan.write_payload(shares[group.rank], publication, on_progress)
        messages = group.all_gather(_encode_hashes(hashes))
        all_hashes = {name: blocks for message in messages for name, blocks in _decode_hashes(message)}
        with group.collective("publishing"):
            if group.rank == 0:
                others = [{file.name: file.nbytes for file in share} for share in shares[1:]]
                require_files(publication.staging_url, publication.staging_url, [{}, *others])
                plan.finish(layout, all_hashes, publication)
                publication.commit()
    except BaseException:
        if publication is not None:
            publication.rollback()
        raise
    return layout


def _encode_hashes(hashes: Hashes) -> bytes:
    return json.dumps({name: packed.hex() for name, packed in hashes.items()}).encode()


def _decode_hashes(message: bytes) -> Iterator[tuple[str, bytes]]:
    return ((name, bytes.fromhex(digits)) for name, digits in json.loads(message).items())
