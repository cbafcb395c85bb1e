"""Data positions: sample order, batches per step, streams per rank."""
