"""Read checkpoints of every format as manifests, without a model and without other ranks."""
