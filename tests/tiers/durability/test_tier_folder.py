"""The run that a tier's folder belongs to."""

from shardckpt.tiers.durability.tier_folder import find_run_id


def test_a_run_has_one_id_whichever_way_its_folder_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert find_run_id(f"{tmp_path}/run") == find_run_id(f"{tmp_path}/link") == find_run_id(f"file://{tmp_path}/run/")
    assert find_run_id("s3://bucket/run/") == find_run_id("s3://bucket/run") != find_run_id("s3://bucket/other")
