"""Read checkpoints of every format as manifests. Knows no model and no rank."""
