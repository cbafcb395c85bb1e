"""Buckets of parameters: buffer layout, all-gather, reduction, extensions."""
