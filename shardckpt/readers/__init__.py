"""Readers: open checkpoints of every format as manifests, without a model or other ranks."""
