"""Parameter buckets: buffer layout, all-gather, reduction, extensions."""
