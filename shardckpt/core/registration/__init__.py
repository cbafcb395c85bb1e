"""Register parameters on modules that are sharded or unsharded."""
