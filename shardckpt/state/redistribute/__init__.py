"""Move tensors between shardings: all-to-all, scatter, rows."""
