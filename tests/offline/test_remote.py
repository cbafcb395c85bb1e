"""From bucket to bucket: no local copy, few requests, no byte twice, nothing but the result left behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import aiobotocore.client
import fsspec
import pytest
from safetensors.torch import load

import shardckpt

CASES = ["dcp_fsdp2_llama_w2", "hf_pretrained_llama", "torch_save_zip_nasty", "accelerate_fsdp2_sharded_gpt2_w2"]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Every S3 request from here on: operation, key, range."""
    seen: list[tuple[str, str, str]] = []
    call = aiobotocore.client.AioBaseClient._make_api_call

    async def counted(client, operation, arguments):
        seen.append((operation, arguments.get("Key", ""), arguments.get("Range", "")))
        return await call(client, operation, arguments)

    monkeypatch.setattr(aiobotocore.client.AioBaseClient, "_make_api_call", counted)
    return seen


def _upload(folder: Path, url: str) -> None:
    fsspec.filesystem("s3").put(str(folder) + "/", url + "/", recursive=True)


def _objects(url: str) -> set[str]:
    return {key.removeprefix(url.removeprefix("s3://") + "/") for key in fsspec.filesystem("s3").find(url)}


@pytest.mark.parametrize("case", CASES)
def test_a_bucket_converts_to_a_bucket_with_the_same_bits(case, fixtures, s3_bucket, tmp_path, monkeypatch):
    _upload(fixtures / case / "ckpt", f"{s3_bucket}/in")
    monkeypatch.chdir(tmp_path)
    report = shardckpt.consolidate(f"{s3_bucket}/in", f"{s3_bucket}/out")
    shardckpt.consolidate(str(fixtures / case / "ckpt"), str(tmp_path / "local"))
    name = report.files[0].name
    remote = load(fsspec.filesystem("s3").cat_file(f"{s3_bucket}/out/{name}"))
    local = load((tmp_path / "local" / "model.safetensors").read_bytes())
    assert remote.keys() == local.keys()
    assert all(remote[key].equal(local[key]) for key in local)
    assert {"model.safetensors", "model.safetensors.index.json"} <= _objects(f"{s3_bucket}/out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["local"], "a local copy of the source or the target was made"


@pytest.mark.parametrize("case", CASES)
def test_a_small_checkpoint_takes_few_requests_and_no_byte_twice(case, fixtures, s3_bucket, requests):
    _upload(fixtures / case / "ckpt", f"{s3_bucket}/in")
    for verb in ("inspect", "consolidate"):
        requests.clear()
        getattr(shardckpt, verb)(f"{s3_bucket}/in", *([f"{s3_bucket}/out"] if verb == "consolidate" else []))
        gets = [
            (key, wanted) for operation, key, wanted in requests if operation == "GetObject" and "/in/" in f"/{key}"
        ]
        assert gets
        assert max(Counter(key for key, _ in gets).values()) <= 22
        spans = defaultdict(list)
        for key, wanted in gets:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            spans[key].append((int(first), int(last)))
        for ranges in spans.values():
            ranges.sort()
            assert all(a[1] < b[0] for a, b in pairwise(ranges)), ranges


def test_overwriting_a_bucket_leaves_one_generation(fixtures, s3_bucket):
    source = str(fixtures / "dcp_fsdp2_llama_w2" / "ckpt")
    target = f"{s3_bucket}/out"
    shardckpt.consolidate(source, target, part="all")
    first = _objects(target)
    with pytest.raises(shardckpt.errors.TargetExistsError):
        shardckpt.consolidate(source, target, part="all")
    assert _objects(target) == first
    shardckpt.consolidate(source, target, part="all", overwrite=True)
    assert len(_objects(target)) == len(first)
    assert not [d for d in shardckpt.diff(source, target).differences if not d.name.startswith("trainer.")]


def test_the_optimizer_of_another_save_is_never_paired_with_a_model(fixtures, s3_bucket, tmp_path):
    source = str(fixtures / "dcp_fsdp2_llama_w2" / "ckpt")
    target = f"{s3_bucket}/out"
    shardckpt.consolidate(source, target, part="all")
    fs = fsspec.filesystem("s3")
    fs.copy(f"{target}/optimizer.safetensors", f"{target}/optimizer-0a1b2c3d.safetensors")
    found = shardckpt.inspect(target)
    assert {file.name for file in found.files} == {"model.safetensors", "optimizer.safetensors"}
    assert any("optimizer-0a1b2c3d" in warning for warning in found.warnings)
