"""`fully_shard`: the function, `FSDPModule` and one module's state."""
