"""`FullyShardedDataParallel`: the wrapper and its state-dict statics."""
