"""One file a rank: merge shards of DTensors, FSDP1 and local states."""
