"""One adapter for each way to shard a parameter."""
