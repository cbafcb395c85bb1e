"""The `shardckpt` command."""
