"""`fully_shard`: the function, `FSDPModule` and the state of one module."""
